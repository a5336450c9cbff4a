"""How turns end: the outcome table row by row, the whitelist, aborts, callers that give up (serving.md 2.3 to 2.5)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from protocol.config import EntrypointConfig, GateConfig
from protocol.errors import (
    AdmissionTimeout,
    BarrierError,
    ConnectionLost,
    ConnectionRefused,
    ConnectTimeout,
    GatePoisoned,
    GateRefused,
    HttpError,
    Outcome,
    ReadTimeout,
    SeatrialError,
)
from protocol.serving.engine_work import AT_WORK
from protocol.serving.gate import RequestGate
from protocol.serving.settlement import RejectionPattern
from tests.protocol.fake import FakeBackend, run
from tests.protocol.serving.world import Fleet, fleet_of, raised

TOO_LONG = "The input (600 tokens) is longer than the model's context length (512 tokens)."


async def one(world: FakeBackend) -> Fleet:
    return await (await fleet_of(world, 1)).opened()


def test_a_complete_answer_is_stamped_named_and_settled() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        turn = await fleet.turn("s", 0)
        assert (turn.model_step, turn.entrypoint) == (0, "driver")  # of FakeBackend.me
        assert turn.result.request_id == world.of("gate.granted")[-1]["lease"]
        assert fleet.engines[0].generated == ["req-0001"]
        assert world.of("gate.settled", label="completed", backend_ended=True, terminal_recorded=True, active=0)

    run(body)


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (HttpError(status=400, body=TOO_LONG), "rejected: context length"),
        (ConnectTimeout("x"), "failed: never sent"),
        (ConnectionRefused("x"), "failed: never sent"),
    ],
)
def test_what_never_began_is_a_safe_failed_attempt(error: SeatrialError, label: str) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.engines[0].generate_script = [error]
        assert type(await raised(fleet.turn("s", 0))) is type(error)
        assert world.of("gate.settled", label=label, active=0) and not world.of("gate.poisoned")
        await fleet.publisher.publish(1)  # drain passes
        assert (await fleet.turn("s", 0)).model_step == 1

    run(body)


@pytest.mark.parametrize(
    "error",
    [
        "hang",
        ReadTimeout("x"),
        ConnectionLost("x"),
        HttpError(status=400, body="Duplicate request ID detected: req-1"),
        HttpError(status=422, body=TOO_LONG),
        HttpError(status=500, body=TOO_LONG),
        HttpError(status=503),
    ],
    ids=str,
)
def test_everything_else_is_unknown_and_poisons(error: SeatrialError | str) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.engines[0].generate_script = [error]
        await raised(fleet.turn("s", 0))
        assert world.of("gate.settled", backend_ended=False) and len(world.of("gate.poisoned")) == 1
        assert isinstance(await raised(fleet.turn("s", 0)), GatePoisoned)
        assert isinstance(await raised(fleet.publisher.publish(1)), GatePoisoned)
        assert fleet.engines[0].version == "0" and len(fleet.engines[0].generated) <= 1

    run(body)


def test_a_caller_that_gives_up_does_not_end_the_turn() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.engines[0].duration_s = 3
        turn = fleet.begin("s", 0)
        await asyncio.sleep(1)
        turn.cancel()
        await asyncio.sleep(0)
        assert (await fleet.snapshots())[0].active
        await fleet.publisher.publish(1)  # which waits for it
        assert world.of("gate.settled", label="completed") and not world.of("gate.poisoned")

    run(body)


def test_a_lost_reply_of_the_settlement_is_asked_for_again() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.engines[0].duration_s = 1
        turn = fleet.begin("s", 0)
        await asyncio.sleep(0.5)
        fleet.gates[0].lose_next = 1
        assert (await turn).model_step == 0
        assert len(world.of("gate.settled")) == 1 and not world.of("gate.poisoned")

    run(body)


def test_a_lost_grant_is_asked_for_again_under_the_same_name() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.gates[0].lose_next = 1
        began = asyncio.get_running_loop().time()
        assert (await fleet.turn("s", 0)).model_step == 0
        assert asyncio.get_running_loop().time() - began < 11  # not after the whole admission time
        assert len(world.of("gate.granted")) == len(world.of("gate.settled")) == 1
        await fleet.publisher.publish(1)  # no lease is left that is nobody's

    run(body)


def test_a_gate_that_never_answers_is_told_when_it_does_that_nothing_was_sent() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.gates[0].lose_next = 12  # more than fit into the time for an admission
        assert isinstance(await raised(fleet.turn("s", 0)), ReadTimeout)
        fleet.gates[0].lose_next = 0
        await asyncio.sleep(10)
        assert world.of("gate.settled", label="failed: never sent", active=0) and not fleet.engines[0].generated
        await fleet.publisher.publish(1)

    run(body)


def test_a_turn_whose_caller_has_gone_while_it_waited_is_never_sent() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await fleet_of(world, 1)
        for waited_s in (1, 7):  # the second is asked for again meanwhile, and is not
            turn = fleet.begin("s", 0)
            await asyncio.sleep(waited_s)
            turn.cancel()
        await fleet.opened()
        await asyncio.sleep(5)
        assert not fleet.engines[0].generated
        assert [data["label"] for data in world.of("gate.settled")] in ([], ["failed: never sent"])
        assert not (await fleet.snapshots())[0].active and not fleet.servers[0].target._held
        assert not fleet.servers[0].target._left and not fleet.servers[0].target._turns

    run(body)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_turn_that_leaves_while_an_ask_of_it_was_never_answered_holds_no_lease(leaves: bool) -> None:
    """The first ask comes late to the gate, and waits there still when the second one is over: nobody's, once open."""

    async def body(world: FakeBackend) -> None:
        config = EntrypointConfig(forward_timeout_s=30, admission_timeout_s=40 if leaves else 12, call_timeout_s=5)
        fleet = await (await fleet_of(world, 1, entrypoint=config)).opened()
        gate, loop = fleet.gates[0].target, asyncio.get_running_loop()
        request, late_s, asks = gate.request, [10.5], []

        async def late(*given: Any) -> Any:
            async def served(after_s: float) -> Any:
                await asyncio.sleep(after_s)
                return await request(*given)

            asks.append(loop.create_task(served(late_s.pop() if late_s else 0.0)))
            return await asyncio.shield(asks[-1])  # who gives up its wait ends nothing at the gate

        gate.request = late
        await fleet.controller.prepare_pause()
        turn = fleet.begin("s", 0)
        await asyncio.sleep(11)  # into the second ask
        if leaves:
            turn.cancel()
        await asyncio.wait([*fleet.servers[0].target._turns])
        error = (await asyncio.gather(turn, return_exceptions=True))[0]
        assert isinstance(error, asyncio.CancelledError if leaves else AdmissionTimeout)
        assert not fleet.servers[0].target._turns and len(asks) == 2 and not asks[0].done()
        await fleet.controller.resume_requests(0)
        await asyncio.sleep(1)
        assert isinstance(asks[0].exception(), GateRefused)
        assert not (await fleet.snapshots())[0].active and not fleet.servers[0].target._held
        await fleet.publisher.publish(1)

    run(body)


def test_a_turn_that_waits_asks_its_gate_in_longer_and_longer_slices() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 1, entrypoint=EntrypointConfig(call_timeout_s=5))).opened()
        gate = fleet.gates[0].target
        request, slices = gate.request, []

        async def asked(session: str, timeout_s: float, name: str) -> Any:
            slices.append(round(timeout_s, 6))
            return await request(session, timeout_s, name)

        gate.request = asked
        await fleet.controller.prepare_pause()
        begun = asyncio.get_running_loop().time()
        error = await raised(fleet.turn("s", 0))
        assert isinstance(error, AdmissionTimeout) and "did not open within 600.0 s" in error.message
        assert asyncio.get_running_loop().time() - begun == pytest.approx(600)
        assert slices == [5, 10, 20, 40, 80, 80, 80, 80, 80, 80, 45]

    run(body)


def test_an_entrypoint_is_quiet_when_no_turn_of_an_earlier_gate_is_left() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.engines[0].duration_s = 5
        turn = fleet.begin("s", 0)
        await asyncio.sleep(1)
        server = fleet.servers[0]
        assert await server.quiet(fleet.gates[0].incarnation)
        fleet.gates[0].dead = True
        new = await world.spawn(RequestGate, GateConfig(), name="gate-0")
        assert new.incarnation > fleet.gates[0].incarnation and not await server.quiet(new.incarnation)
        await turn
        assert await server.quiet(new.incarnation)

    run(body)


def test_an_unknown_end_under_a_dead_gate_is_for_the_next_one_to_know() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.engines[0].duration_s = 50  # more than the forward may take
        turn = fleet.begin("s", 0)
        await asyncio.sleep(1)
        fleet.gates[0].dead = True
        assert isinstance((await asyncio.gather(turn, return_exceptions=True))[0], ReadTimeout)
        assert not await fleet.servers[0].quiet(1)  # nobody has heard of it yet
        new = await world.spawn(RequestGate, GateConfig(), name="gate-0")
        await asyncio.sleep(1)
        assert await fleet.servers[0].quiet(1) and (await new.snapshot()).failures
        assert isinstance(await raised(fleet.publisher.publish(1)), GatePoisoned)

    run(body)


def test_an_entrypoint_that_was_restarted_is_quiet_when_its_replica_says_that_it_is_idle() -> None:
    """Who knew of its turns is dead, and so is their gate."""

    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        server, engine = fleet.servers[0], fleet.engines[0]
        server.target._inherited = True  # as its start has it in a later incarnation
        engine.running = 1
        assert not await server.quiet(1)
        for odd in ("no_metrics", "odd_metrics"):
            setattr(engine, odd, "what is this{" if odd == "odd_metrics" else True)
            assert not await server.quiet(1), "who does not say so is not idle"
            setattr(engine, odd, "" if odd == "odd_metrics" else False)
        engine.alive = False
        assert not await server.quiet(1)
        new = await world.engines.launch(engine.spec, name=engine.name)  # nothing of before can run there
        await fleet.gateway.add_replica(new)
        assert await server.quiet(1) and world.engines.latest(engine.name).gets == ["/metrics"]  # type: ignore[union-attr]  # it was launched
        world.engines.latest(engine.name).running = 1  # type: ignore[union-attr]  # of its own by now
        assert await server.quiet(1)

    run(body)


@pytest.mark.parametrize(
    "page", ["", "nothing of use 1\n", "what is this{", 'sglang:num_running_reqs{model_name="m"} 0.0\n', "all are NaN"]
)
def test_where_a_page_of_metrics_does_not_say_it_the_flush_of_the_cache_tells_whether_a_replica_is_idle(
    page: str,
) -> None:
    """SGLang without --enable-metrics (404) or before its first report; /v1/loads would show what it last reported."""

    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        server, engine = fleet.servers[0], fleet.engines[0]
        server.target._inherited = True
        engine.no_metrics, engine.odd_metrics = not page, page
        if page == "all are NaN":
            engine.odd_metrics = "".join(f"{name} NaN\n" for name in AT_WORK)
        engine.running = 1
        engine.posts.clear()
        assert not await server.quiet(1)
        engine.flush_answer = 500
        assert not await server.quiet(1)
        engine.running = engine.flush_answer = 0
        engine.post_script = ["hang"]
        assert not await server.quiet(1), "the answer is lost"
        assert await server.quiet(1)
        posted, asked = list(engine.posts), list(engine.gets)
        assert await server.quiet(1) and (engine.posts, engine.gets) == (posted, asked)  # once
        assert {route for route, _ in posted} == {"/flush_cache"} and "/v1/loads" not in asked

    run(body)


@pytest.mark.parametrize(
    ("flush_answer", "paused", "why"),
    [(404, False, "POST /flush_cache answers 404"), (200, True, "GET /ready answers 503")],
)
def test_a_replica_that_cannot_say_whether_it_is_idle_is_refused_by_name_until_another_process_is_in_its_place(
    flush_answer: int, paused: bool, why: str
) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        server, engine = fleet.servers[0], fleet.engines[0]
        server.target._inherited = True
        engine.odd_metrics = "sglang:num_running_reqs 0.0\nsglang:http_requests_active 0.0\n"
        engine.flush_answer, engine.paused = flush_answer, paused
        for _ in range(2):
            error = await raised(server.quiet(1))
            assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE
            assert "e-0 cannot say" in error.message and why in error.message
            assert "lacks sglang:num_queue_reqs, and" in error.message
        engine.alive = False
        assert not await server.quiet(1)  # who is there now is not known
        new = await world.engines.launch(engine.spec, name=engine.name)
        world.engines.every[-1].no_metrics, world.engines.every[-1].flush_answer = True, 404
        await fleet.gateway.add_replica(new)
        assert await server.quiet(1), "nothing of before can run there"

    run(body)


def test_a_grant_of_an_earlier_gate_begins_nothing_once_the_entrypoint_is_quiet() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        assert await fleet.servers[0].quiet(1)
        turn = fleet.begin("s", 0)  # the old gate grants it: its answer was under way when it died, say
        await asyncio.sleep(1)
        assert not turn.done() and not fleet.engines[0].generated
        fleet.gates[0].dead = True
        await world.spawn(RequestGate, GateConfig(initially_closed=False, initial_model_step=7), name="gate-0")
        assert (await turn).model_step == 7

    run(body)


def test_while_aborting_nothing_is_sent_and_what_comes_back_is_aborted() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        fleet.engines[0].duration_s = 2
        running = fleet.begin("s", 0)
        await asyncio.sleep(1)
        await fleet.servers[0].set_aborting(True)
        assert (await fleet.turn("t", 0)).result.finish_reason == "abort"
        assert (await running).result.finish_reason == "abort"
        assert len(fleet.engines[0].generated) == 1 and len(world.of("gate.settled", label="aborted")) == 2
        await fleet.servers[0].set_aborting(False)
        assert (await fleet.turn("t", 0)).result.finish_reason == "length"

    run(body)


def test_a_recovered_replica_is_found_through_the_gateway() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await one(world)
        engine = fleet.engines[0]
        engine.alive = False
        assert isinstance(await raised(fleet.turn("s", 0)), ConnectionRefused)
        new = await world.engines.launch(engine.spec, name=engine.name)
        await fleet.gateway.add_replica(new)
        turn = await fleet.turn("s", 0)
        assert turn.result.engine_incarnation == 1

    run(body)


def test_the_whitelist_is_fixed_to_an_engine_and_its_version() -> None:
    sglang = RejectionPattern(EntrypointConfig())
    own = RejectionPattern(EntrypointConfig(engine="mine 1", rejections={"mine 1": "too long"}))
    typed = '{"error": {"code": "context_length_exceeded"}}'
    assert sglang.matches(HttpError(status=400, body=TOO_LONG))
    assert not sglang.matches(HttpError(status=400, body=typed))
    assert own.matches(HttpError(status=400, body="much too long")) and not own.matches(
        HttpError(status=413, body="too long")
    )
    with pytest.raises(ValueError, match="no rejection pattern of 'vllm 9'; add it"):
        RejectionPattern(EntrypointConfig(engine="vllm 9"))
    with pytest.raises(ValueError, match="no regular expression"):
        RejectionPattern(EntrypointConfig(rejections={"sglang 0.5.23": "("}))


def lmdeploy_error(message: str) -> HttpError:
    """A 400 of LMDeploy v0.16.0 on /v1/chat/completions (`ErrorResponse` of lmdeploy/serve/openai/protocol.py)."""
    body = {"message": message, "type": "invalid_request_error", "code": 400, "param": None, "object": "error"}
    return HttpError(status=400, body=json.dumps(body))


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("Input length (9000) must be smaller than the model context length (8192).", True),
        ("The request exceeds the model context length.", True),
        ("The session_id 7 is occupied.", False),
        ("max_new_tokens must be at least 1, got 0.", False),
        ("input_ids cannot be used when messages is non-empty. messages takes priority.", False),
        ("Client disconnected", False),
        ('unknown tool "The request exceeds the model context length."', False),
    ],
)
def test_which_400_of_lmdeploy_was_before_anything_was_generated(message: str, refused: bool) -> None:
    error = lmdeploy_error(message)
    assert RejectionPattern(EntrypointConfig(engine="lmdeploy 0.16")).matches(error) is refused
    anthropic = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    told = HttpError(status=400, body=json.dumps(anthropic))
    assert RejectionPattern(EntrypointConfig(engine="lmdeploy 0.16")).matches(told) is refused
    for minor in range(9, 16):  # they answer 200 where the context is too long, so none of their 400s is that
        assert not RejectionPattern(EntrypointConfig(engine=f"lmdeploy 0.{minor}")).matches(error)
