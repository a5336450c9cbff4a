"""Calls with a route key, and POST /generate of a scaled service (scaling.md 1.1)."""

from __future__ import annotations

import json
from typing import Any

from protocol.config import GatewayConfig
from protocol.errors import ConnectionLost, ConnectionRefused, HttpError, Outcome, ReadTimeout
from protocol.messages import ForwardRequest
from protocol.scaling.bodies import ApiReply
from protocol.serving.gateway import Gateway
from tests.protocol.fake import FakeBackend, fleet, run
from tests.protocol.scaling.world import ScalingWorld, service
from tests.protocol.scaling.world import run as run_scaling

KEYS = [f"session-{n}" for n in range(60)]


async def made(world: FakeBackend, count: int) -> Gateway:
    gateway = Gateway(GatewayConfig(backoff_s=0.01))
    await gateway.start()
    for engine in await fleet(world, count):
        await gateway.add_replica(engine.address)
    return gateway


async def places(gateway: Gateway) -> dict[str, str]:
    """Key to the replica that answered."""
    found = {}
    for number, key in enumerate(KEYS):
        call = ForwardRequest(f"r-{key}-{number}", "/generate", "{}", route_key=key)
        found[key] = (await gateway.forward(call)).engine
    return found


def test_a_key_stays_where_it_is_and_only_keys_of_one_that_leaves_move() -> None:
    async def body(world: FakeBackend) -> None:
        gateway = await made(world, 4)
        before = await places(gateway)
        assert await places(gateway) == before
        shares = [list(before.values()).count(f"engine-{n}") for n in range(4)]
        assert min(shares) >= 5 and sum(shares) == len(KEYS)
        gone = world.engines.every[2].address
        await gateway.set_routable(gone, False, "a test")
        after = await places(gateway)
        assert {key for key in KEYS if after[key] != before[key]} == {key for key in KEYS if before[key] == gone.name}
        await gateway.set_routable(gone, True, "")
        assert await places(gateway) == before
        assert all(view.in_flight == 0 for view in await gateway.engines())

    run(body)


def test_a_key_does_not_hold_a_call_back_when_its_replica_fails() -> None:
    async def body(world: FakeBackend) -> None:
        gateway = await made(world, 2)
        home = (await places(gateway))[KEYS[0]]
        engine = world.engines.latest(home)
        assert engine is not None
        engine.generate_script.append(ConnectionRefused("not now"))
        reply = await gateway.forward(ForwardRequest("r", "/generate", "{}", route_key=KEYS[0]))
        assert reply.engine != home and reply.attempts == 2 and reply.port == 30_000

    run(body)


def ask(given: Any, *errors: BaseException) -> ApiReply:
    """POST /generate at a service whose only replica fails so."""

    async def body(world: ScalingWorld) -> ApiReply:
        made = await service(world)
        made.engine("engine-0").generate_script.extend(errors)
        reply: ApiReply = await made.api.generate(given)
        return reply

    found: ApiReply = run_scaling(body)
    return found


def test_a_call_of_the_model_is_handed_on_and_says_who_answered() -> None:
    sent = {"text": "x", "sampling_params": {"temperature": 0}, "route_key": "k", "model_name": None, "logprob": True}
    reply = ask(sent)
    assert reply.status == 200 and (reply.body["engine_host"], reply.body["engine_port"]) == ("host", 30_000)
    handed = reply.body["answer"]["body"]
    merged = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1024}  # with the defaults, scaling.md 8
    assert handed == {"text": "x", "sampling_params": merged, "logprob": True, "rid": handed["rid"]}
    assert ask({"text": "x", "rid": "mine"}).body["answer"]["body"]["rid"] == "mine"


def test_how_a_failed_call_is_told() -> None:
    refused = HttpError(status=400, body=json.dumps({"error": "too long"}), outcome=Outcome.NOT_DONE)
    reply = ask({"text": "x"}, refused)
    assert (reply.status, reply.body["error"]) == (400, "UPSTREAM_REFUSED") and "too long" in reply.body["detail"]
    for error, status, code, outcome in (
        (ConnectionRefused("no"), 503, "UNAVAILABLE", "not_done"),
        (ReadTimeout("slow"), 502, "OUTCOME_UNKNOWN", "unknown"),  # nobody is routable then, but it was sent
        (ConnectionLost("cut"), 502, "OUTCOME_UNKNOWN", "unknown"),
    ):
        reply = ask({"text": "x"}, error)
        assert (reply.status, reply.body["error"], reply.body["outcome"]) == (status, code, outcome)
    assert ask({"text": "x", "model_name": "other"}).body["error"] == "UNKNOWN_MODEL"
    for wrong in ({}, {"text": "x", "input_ids": [1]}, {"input_ids": []}, {"input_ids": [True]}, {"text": 3}, [], None):
        assert (ask(wrong).status, ask(wrong).body["error"]) == (422, "INVALID_BODY")
