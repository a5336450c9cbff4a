"""A real run as a whole: what it refuses, what its end cleans up, what reaches the caller."""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess
import sys
import time

import pytest

from protocol.errors import ActorDied, CallCancelled, StorageNotFound
from tests.processes import is_running
from tests.real.components import Claimant
from tests.real.local_ray import ROOT, environment

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def test_the_end_of_a_run_leaves_no_process_and_no_group(tmp_path: pathlib.Path) -> None:
    import ray
    from ray.util import placement_group_table

    from real.backend import RealBackend, run_real

    pids: list[int] = []

    async def body(backend: RealBackend) -> None:
        for name in ("running", "stopped", "busy"):
            actor = await backend.spawn(Claimant, name=name)
            pids.append(await actor.claim(1))
        await backend.signal(await backend.lookup("stopped"), "SIGSTOP")
        await backend.placement_groups.create(((("GPU", 1.0),),), strategy="PACK", name="left")
        raise KeyError("the body fails")

    with pytest.raises(KeyError, match="the body fails"):
        run_real(body, folder=str(tmp_path))
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]
    left = [row for row in placement_group_table().values() if row["name"].endswith("/left")]
    assert [row["state"] for row in left] == ["REMOVED"]
    assert ray.is_initialized()  # Ray itself was not ours to end


def test_a_failed_background_task_of_the_driver_fails_the_run(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def fails() -> None:
        raise RuntimeError("in the background")

    async def body(backend: RealBackend) -> None:
        backend.background(fails(), name="fails")
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="in the background"):
        run_real(body, folder=str(tmp_path))


def test_what_the_real_world_cannot_do_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def body(backend: RealBackend) -> None:
        with pytest.raises(RuntimeError, match="no serving engines"):
            _ = backend.engines
        with pytest.raises(ValueError, match="driver"):
            await backend.kill(backend.me)

    run_real(body, folder=str(tmp_path))


def test_run_real_without_ray_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from real.backend import run_real

    async def body(backend: object) -> None: ...

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"ray\.init"):
        run_real(body)


def test_a_component_that_exits_is_a_crash(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def body(backend: RealBackend) -> None:
        actor = await backend.spawn(Claimant, name="leaver")
        with pytest.raises(ActorDied):
            await actor.leave()

    run_real(body, folder=str(tmp_path))
    last = (tmp_path / "events" / "leaver-1.jsonl").read_text().splitlines()[-1]
    assert '"kind":"actor.died"' in last and "SystemExit: 3" in last


def test_a_cancel_that_arrives_before_its_call(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def body(backend: RealBackend) -> None:
        actor = await backend.spawn(Claimant, name="actor")
        view = actor.ordered()
        for calls in (view, actor):
            number = backend.caller.next_number() + 1
            await backend.caller.peer(actor).cancel.remote(number)
            first, second = calls.claim(1), calls.claim(1)
            assert first.number == number
            with pytest.raises(CallCancelled):
                await first
            await second

    run_real(body, folder=str(tmp_path))
    claims = (tmp_path / "events" / "actor-1.jsonl").read_text().count("gateway.routable")
    assert claims == 2  # those that were cancelled never ran


def test_storage(tmp_path: pathlib.Path) -> None:
    from real.backend import RealBackend, run_real

    async def body(backend: RealBackend) -> None:
        storage = backend.storage
        await storage.write("exports/v7.tmp/shard-0", b"weights", size_bytes=10**9)
        await storage.write("exports/v7.tmp/manifest", b"", fsync=False)
        assert await storage.list("exports/v7") == ("exports/v7.tmp/manifest", "exports/v7.tmp/shard-0")
        await storage.rename("exports/v7.tmp", "exports/v7")
        assert await storage.list("") == ("exports/v7/manifest", "exports/v7/shard-0")
        assert await storage.read("exports/v7/shard-0") == b"weights"
        await storage.write("exports/v7/shard-0", b"other")
        assert await storage.read("exports/v7/shard-0") == b"other"
        await storage.delete("exports/v7/shard-0")
        for failing in (
            storage.read("exports/v7/shard-0"),
            storage.delete("exports/v7/shard-0"),
            storage.rename("nothing", "else"),
        ):
            with pytest.raises(StorageNotFound):
                await failing
        for path in ("/etc/passwd", "../outside", "", "a/../../b"):
            with pytest.raises(ValueError, match="storage path"):
                await storage.write(path, b"")

    run_real(body, folder=str(tmp_path))


TWO_NODES = """
import asyncio, sys
import ray
from ray.cluster_utils import Cluster
from protocol.errors import ActorDied, PlacementError
from protocol.ports import Placement
from real.backend import run_real
from tests.contract.components import Self

async def body(backend):
    nodes = await backend.nodes()
    assert len(nodes) == 2 and nodes[0] == backend.node, nodes
    far = await backend.spawn(Self, name="far", node=nodes[1])
    assert (await far.who())[2] == nodes[1]
    await backend.signal(far, "SIGSTOP")
    call = far.who()
    try:
        async with asyncio.timeout(1.0):
            await call
        raise AssertionError("a stopped actor answered")
    except TimeoutError:
        pass
    await backend.signal(far, "SIGCONT")
    assert (await call)[0] == "far"
    far = await backend.restart(far)  # kills it over there
    assert await far.who() == ("far", 2, nodes[1])
    group = await backend.placement_groups.create(
        ((("GPU", 1.0),), (("GPU", 1.0),)), strategy="STRICT_SPREAD", name="group")
    on = [(await (await backend.spawn(Self, name=f"b{i}", placement=Placement(group, i))).who())[2] for i in (0, 1)]
    assert sorted(on) == sorted(nodes), on
    try:
        await backend.spawn(Self, name="wrong", placement=Placement(group, 0), node=on[1])
        raise AssertionError("placed on a node that does not hold the bundle")
    except PlacementError:
        pass
    return "two nodes"

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=8, num_gpus=1)
ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
try:
    print(run_real(body, folder=sys.argv[1]))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_two_nodes(tmp_path: pathlib.Path) -> None:
    # A process of its own: this one is connected to the Ray of the other tests.
    done = subprocess.run(
        [sys.executable, "-c", TWO_NODES, str(tmp_path)],
        cwd=ROOT, env={**os.environ, **environment()}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "two nodes" in done.stdout.splitlines(), done.stdout + done.stderr
