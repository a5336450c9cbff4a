"""Engines of the real world: the port, the client and the front, on a stub in place of an engine."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

import pytest

from protocol.errors import (
    ConnectionRefused,
    HttpError,
    NameTaken,
    Outcome,
    PlacementError,
    ReadTimeout,
    StorageError,
)
from protocol.evidence import Event
from protocol.messages import GenerateRequest, VersionSpan, WeightUpdate
from protocol.ports import EngineClient, EngineSpec, Placement
from protocol.training.checkpoint import describe, encode_manifest, hash_weights
from tests.real.engine_world import SPEC, kinds_of, launched, ready, run_with_stubs, until

if TYPE_CHECKING:
    from real.backend import RealBackend

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def request(number: int, tokens: int, prompt_tokens: int = 40) -> GenerateRequest:
    return GenerateRequest(f"req-{number:07d}", prompt_tokens, tokens)


async def seen(client: EngineClient) -> dict[str, Any]:
    """What has reached the stub: ``posts`` beside generations, in their order, and the ids that are ``running``."""
    found: dict[str, Any] = json.loads((await client.get("/seen"))[1])
    return found


def ends(events: list[Event]) -> dict[int, tuple[str, str, str, str]]:
    """Calls of the driver: number to (method, outcome, error, kind and id of the cause)."""
    sent = {event.data["call"]: event.data["method"] for event in events if event.kind == "call.sent"}
    done = [event for event in events if event.kind == "call.done"]
    assert sorted(sent) == sorted(event.data["call"] for event in done)  # every one ends, once
    return {
        event.data["call"]: (sent[event.data["call"]], event.data["outcome"], event.data["error"], event.cause or "")
        for event in done
    }


def test_an_engine_from_its_launch_to_its_end(tmp_path: pathlib.Path) -> None:
    async def body(backend: RealBackend) -> None:
        engines = backend.engines
        assert not await engines.alive("genrm-0")
        await engines.terminate("genrm-0")  # silent
        address = await engines.launch(SPEC, name="genrm-0")
        assert await engines.alive("genrm-0")
        client = engines.client(address)
        assert (address.name, address.incarnation) == ("genrm-0", 1) and client.address == address
        with pytest.raises(ConnectionRefused) as refused:
            await client.get("/ready", connect_timeout_s=1.0)
        assert refused.value.outcome == Outcome.NOT_DONE
        with pytest.raises(NameTaken) as taken:
            await engines.launch(SPEC, name="genrm-0")
        assert taken.value.outcome == Outcome.NOT_DONE
        statuses = set()

        async def look() -> None:
            while 200 not in statuses:
                try:
                    statuses.add((await client.get("/ready", connect_timeout_s=1.0))[0])
                except ConnectionRefused:
                    pass
                await asyncio.sleep(0.02)

        async with asyncio.timeout(20):
            await look()
        assert statuses == {503, 200}

        result = await client.generate(request(1, 30), connect_timeout_s=1.0, read_timeout_s=5.0)
        assert (result.request_id, result.finish_reason, result.prompt_tokens) == ("req-0000001", "length", 40)
        assert (result.completion_tokens, result.weight_version, result.e2e_latency_s) == (30, "default", 0.03)
        assert result.spans == (VersionSpan("default", 0, 30, "some-model:default"),)
        assert (result.engine, result.engine_incarnation) == ("genrm-0", 1)
        counts = [count async for count in client.stream(request(2, 25))]
        assert counts[-1] == 25 and counts == sorted(counts)

        await engines.terminate("genrm-0")
        assert not await engines.alive("genrm-0")
        with pytest.raises(ConnectionRefused):
            await client.get("/ready")
        again = await engines.launch(SPEC, name="genrm-0")
        assert (again.incarnation, again.port) == (2, address.port)
        await ready(client)  # at the old address there is now a later incarnation, and its answers say so
        assert (await client.generate(request(3, 1))).engine_incarnation == 2

    # So long that on a busy machine, too, connecting is refused at first, and then 503 is seen.
    events = run_with_stubs(tmp_path, body, "--silent-s", "1", "--load-s", "2")
    first = [event for event in kinds_of(events, "genrm-0") if event.inc == 1]
    assert [event.kind for event in first] == [
        "actor.spawned", "engine.started", "engine.ready", "engine.accepted", "engine.finished", "engine.accepted",
        "engine.finished", "actor.died",
    ]  # fmt: skip
    assert first[0].data["role"] == "engine" and first[-1].data == {"reason": "killed", "detail": ""}
    assert first[2].data == {"version": "default", "weight_hash": "some-model:default"}
    assert first[3].data == {"request": "req-0000001", "running": 0, "queued": 0}
    assert first[4].data["spans"] == [["default", 0, 30, "some-model:default"]]
    by_id = {event.id: event for event in events}
    for accepted, finished in ((first[3], first[4]), (first[5], first[6])):
        sent = by_id[accepted.cause or ""]
        assert (sent.kind, sent.actor, sent.data["method"]) == ("call.sent", "driver", "/generate")
        done = next(e for e in events if e.kind == "call.done" and e.data["call"] == sent.data["call"])
        assert done.cause == finished.id and sent.lc < accepted.lc < finished.lc < done.lc
    for event in events:
        assert event.cause is None or by_id[event.cause].lc < event.lc
    assert {end[1:3] for end in ends(events).values()} == {("done", ""), ("not_done", "ConnectionRefused")}


def test_refusals_timeouts_and_clients_that_go_away(tmp_path: pathlib.Path) -> None:
    aborted: list[Any] = []

    async def body(backend: RealBackend) -> None:
        client = await launched(backend)
        with pytest.raises(HttpError) as refused:
            await client.generate(request(1, 5, prompt_tokens=6000))
        assert (refused.value.outcome, refused.value.status) == (Outcome.NOT_DONE, 400)
        assert "longer than the context" in refused.value.body
        with pytest.raises(ReadTimeout) as late:
            await client.generate(request(2, 30_000), read_timeout_s=0.2)
        assert late.value.outcome == Outcome.UNKNOWN
        waiting = asyncio.create_task(client.generate(request(3, 30_000)))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        began = asyncio.get_running_loop().time()
        stream = client.stream(request(4, 30_000))
        assert await anext(stream) >= 1
        await stream.aclose()
        with pytest.raises(ReadTimeout):
            async for _ in client.stream(request(5, 30_000), read_timeout_s=0.2):
                pass

        async def stopped() -> list[Any]:
            return list((await seen(client))["posts"])

        await asyncio.sleep(0.8)
        assert [rid for _, rid in await stopped()] == ["req-0000004", "req-0000005"]
        await asyncio.sleep(4.3 - (asyncio.get_running_loop().time() - began))
        aborted.extend(await stopped())
        assert (await client.post("/abort_request", {"rid": "nobody"})).success

    events = run_with_stubs(tmp_path, body)
    assert sorted(rid for _, rid in aborted) == [f"req-000000{n}" for n in (2, 3, 4, 5)]
    (no,) = kinds_of(events, "genrm-0", "engine.refused")
    assert (no.data["request"], no.data["status"]) == ("req-0000001", 400)
    finished = kinds_of(events, "genrm-0", "engine.finished")  # seen to the end, though nobody waited
    assert {event.data["reason"] for event in finished} == {"abort"} and len(finished) == 4
    outcomes = [end[1:3] for end in ends(events).values() if end[0] == "/generate"]
    assert outcomes == [
        ("not_done", "HttpError"), ("unknown", "ReadTimeout"), ("unknown", "Cancelled"), ("unknown", "Cancelled"),
        ("unknown", "ReadTimeout"),
    ]  # fmt: skip
    (post,) = [event for event in kinds_of(events, "genrm-0", "engine.post") if event.data["route"] == "/abort_request"]
    assert post.cause == post.data["delivery"] and post.cause is not None and post.cause.startswith("driver/")
    (asked,) = kinds_of(events, "genrm-0", "engine.abort_asked")  # says who asked, as the checks want to know
    assert (asked.data["request"], asked.cause, asked.n) == ("nobody", post.cause, post.n + 1)


SHARDS = (("a.safetensors", b"first half", 10), ("b.safetensors", b"second half", 11))


async def export(backend: RealBackend, path: str, version: str) -> str:
    """Write an export; returns its weight hash."""
    manifest = describe(version, SHARDS)
    for name, data, _ in SHARDS:
        await backend.storage.write(f"{path}/{name}", data)
    await backend.storage.write(f"{path}/manifest.json", encode_manifest(manifest))
    return manifest.weight_hash


def test_weights_are_those_that_the_host_read(tmp_path: pathlib.Path) -> None:
    hashes: dict[str, str] = {}

    async def body(backend: RealBackend) -> None:
        hashes["7"] = await export(backend, "exports/7", "7")
        client = await launched(backend, spec=EngineSpec("some-model", "exports/7"))
        assert (await client.generate(request(1, 4))).spans == (VersionSpan("7", 0, 4, hashes["7"]),)

        await backend.storage.write("exports/8/a.safetensors", b"torn")
        across = asyncio.create_task(client.generate(request(2, 60_000)))
        while not (await seen(client))["running"]:
            await asyncio.sleep(0.02)
        # The stub has the new weights 50 ms before it answers; request 2, of a minute, ends between the two.
        reply = await client.update_weights(WeightUpdate("exports/8", "8"))
        assert (reply.status, reply.success, reply.body) == (200, True, "Succeeded to update model weights.")
        spans = (await across).spans
        assert [(span.version, span.start, span.end) for span in spans] == [("7", 0, 30_000), ("8", 30_000, 60_000)]
        assert spans[0].weight_hash == hashes["7"] and spans[1].weight_hash not in ("", hashes["7"])

        missing = await client.update_weights(WeightUpdate("exports/missing", "9"))
        assert (missing.status, missing.success, missing.body) == (400, False, "no such path")
        assert (await client.generate(request(3, 4))).weight_version == "8"

        await export(backend, "exports/unflushed", "10")
        failed = await client.update_weights(WeightUpdate("exports/unflushed", "10"))
        assert (failed.status, failed.success) == (400, False)
        assert (await client.generate(request(4, 4))).spans == (VersionSpan("10", 0, 4, hashes["7"]),)
        for route in ("/pause_generation", "/continue_generation", "/continue_generation"):
            assert (await client.post(route, {"mode": "retract"})).body == "done"
        loaded = [path for route, path in (await seen(client))["posts"] if route.startswith("/update")]
        assert loaded == [str(tmp_path / "storage" / "exports" / name) for name in ("8", "missing", "unflushed")]

    events = run_with_stubs(tmp_path, body)
    engine = kinds_of(events, "genrm-0")
    order = [event.kind for event in engine[:5]]
    assert order == ["actor.spawned", "storage.read", "storage.read", "engine.started", "engine.ready"]
    assert [event.data["path"] for event in engine[1:3]] == ["exports/7/a.safetensors", "exports/7/b.safetensors"]
    assert hash_weights(event.data["sha256"] for event in engine[1:3]) == engine[4].data["weight_hash"] == hashes["7"]
    assert engine[1].data["reader"] == "genrm-0" and engine[3].data["version"] == "7"

    weights = kinds_of(events, "genrm-0", "engine.weights")
    torn = weights[0].data["weight_hash"]
    told = [(w.data["version"], w.data["weight_hash"], w.data["ok"]) for w in weights]
    assert told == [("8", torn, True), ("8", torn, False), ("10", hashes["7"], False)]
    assert weights[0].data["in_flight"] == 1
    (across,) = [e for e in kinds_of(events, "genrm-0", "engine.finished") if e.data["request"] == "req-0000002"]
    assert across.n > weights[0].n  # not before the weights that computed it are known
    assert across.data["spans"] == [["7", 0, 30_000, hashes["7"]], ["8", 30_000, 60_000, torn]]
    modes = kinds_of(events, "genrm-0", "engine.paused", "engine.resumed")
    assert [event.kind for event in modes] == ["engine.paused", "engine.resumed"]


def test_an_engine_without_its_weights_does_not_start(tmp_path: pathlib.Path) -> None:
    async def body(backend: RealBackend) -> None:
        await backend.engines.launch(EngineSpec("some-model", "exports/none"), name="genrm-0")
        async with asyncio.timeout(10):
            while await backend.engines.alive("genrm-0"):
                await asyncio.sleep(0.05)
        with pytest.raises(StorageError):
            await backend.storage.read("exports/none/manifest.json")

    events = run_with_stubs(tmp_path, body)
    assert [event.kind for event in kinds_of(events, "genrm-0")] == ["actor.spawned", "actor.died"]
    (death,) = kinds_of(events, "genrm-0", "actor.died")
    assert death.data == {"reason": "crashed", "detail": "no weights at exports/none"}


def test_where_an_engine_may_run(tmp_path: pathlib.Path) -> None:
    async def body(backend: RealBackend) -> None:
        engines, groups = backend.engines, backend.placement_groups
        with pytest.raises(PlacementError, match="no living node is named"):
            await engines.launch(SPEC, name="a", node="nowhere")
        with pytest.raises(PlacementError, match="fits on no node; the most"):
            await engines.launch(EngineSpec("some-model", num_gpus=10_000), name="a")
        group = await groups.create(((("GPU", 1.0),),), strategy="PACK", name="group")
        await groups.wait_created(group, 10)
        client = engines.client(await engines.launch(SPEC, name="a", placement=Placement(group)))
        await ready(client)
        await engines.terminate("a")
        # Its bundle is free again when Ray has noticed; until then the launch waits.
        await engines.launch(SPEC, name="a", placement=Placement(group))
        await engines.terminate("a")
        await groups.remove(group)
        await until(lambda: groups.state(group) == "REMOVED")
        with pytest.raises(PlacementError, match="REMOVED") as removed:
            await engines.launch(SPEC, name="a", placement=Placement(group))
        assert removed.value.outcome == Outcome.NOT_DONE
        assert not await engines.alive("a")

    run_with_stubs(tmp_path, body)


def test_a_run_without_settings_has_no_engines(tmp_path: pathlib.Path) -> None:
    from real.backend import run_real

    async def body(backend: RealBackend) -> None:
        with pytest.raises(RuntimeError, match=re.escape("engines=EngineSettings(...)")):
            _ = backend.engines

    run_real(body, folder=str(tmp_path))
