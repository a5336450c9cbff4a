"""Admin POSTs: another attempt after a connect time-out only; unknown outcomes are reconciled (serving.md 1.2, 1.5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.config import AdminConfig, GatewayConfig
from protocol.errors import (
    ActorDied,
    ConnectionLost,
    ConnectionRefused,
    ConnectTimeout,
    HttpError,
    Outcome,
    ReadTimeout,
    SeatrialError,
)
from protocol.messages import WeightUpdate
from protocol.serving.admin import AdminClient, AdminResult, post_admin, post_update_weights, reported_weights
from protocol.serving.gateway import Gateway
from tests.protocol.fake import FakeBackend, FakeClient, FakeEngine, FakeHandle, fleet, run


def test_connect_time_outs_are_retried_up_to_the_limit() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        engine.post_script = [ConnectTimeout("x") for _ in range(4)]
        reply = await post_admin(FakeClient(engine), "/flush_cache", {"a": 1}, AdminConfig())
        assert reply.success and engine.posts == [("/flush_cache", {"a": 1})]
        attempts = world.of("admin.attempt")
        assert [a["attempt"] for a in attempts] == [1, 2, 3, 4, 5]
        assert [a["outcome"] for a in attempts] == ["not_done"] * 4 + ["done"]
        assert len({a["operation"] for a in attempts}) == 1

        engine.post_script = [ConnectTimeout("x") for _ in range(6)]
        with pytest.raises(ConnectTimeout):
            await post_admin(FakeClient(engine), "/flush_cache", {}, AdminConfig())
        assert len(engine.post_script) == 1 and len(engine.posts) == 1

    run(body)


@pytest.mark.parametrize(
    "error",
    [ReadTimeout("x"), ConnectionLost("x"), ConnectionRefused("x"), HttpError(status=400), HttpError(status=500)],
    ids=lambda e: f"{type(e).__name__}-{e.fields.get('status', '')}",
)
def test_anything_else_is_raised_at_once(error: SeatrialError) -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        engine.post_script = [error]
        with pytest.raises(type(error)) as caught:
            await post_admin(FakeClient(engine), "/flush_cache", {}, AdminConfig())
        assert caught.value.outcome is error.outcome
        assert len(world.of("admin.attempt")) == 1
        assert len(engine.posts) == (0 if error.outcome is Outcome.NOT_DONE else 1)

    run(body)


def test_a_refused_weight_update_is_of_unknown_outcome() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        engine.post_script = [HttpError(status=400, body="Weights were updated, but the cache was not flushed")]
        with pytest.raises(HttpError) as caught:
            await post_update_weights(FakeClient(engine), WeightUpdate("nowhere", "1"), AdminConfig())
        assert caught.value.outcome is Outcome.UNKNOWN

    run(body)


def test_reported_weights_reads_the_model_info() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        client = FakeClient(engine)
        timeouts: dict[str, Any] = {"connect_timeout_s": 1.0, "read_timeout_s": 1.0}
        assert await reported_weights(client, **timeouts) == ("0", "")
        for bad in ((200, "no json"), (200, "{}"), (200, "[]"), (503, "")):
            engine.get_script["/model_info"] = [bad]
            with pytest.raises(HttpError, match="model_info"):
                await reported_weights(client, **timeouts)

    run(body)


class Holder:
    """Stands for the HealthProber."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def hold(self, for_s: float) -> None:
        self.log.append(f"hold {for_s:.0f}")

    async def resume(self) -> None:
        self.log.append("resume")


async def admin(world: FakeBackend, engines: tuple[FakeEngine, ...], **config: Any) -> tuple[FakeHandle, list[str]]:
    gateway = await world.spawn(Gateway, GatewayConfig(), name="gateway")
    for engine in engines:
        await gateway.add_replica(engine.address)
    log: list[str] = []
    prober = await world.spawn(Holder, log, name="prober")
    return await world.spawn(AdminClient, AdminConfig(**config), gateway, prober, name="admin"), log


def outcomes(results: tuple[AdminResult, ...]) -> list[tuple[str, str, str]]:
    return [(r.replica, r.route, r.outcome) for r in results]


def test_a_pause_round_holds_health_and_continues_what_it_paused() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 3)
        made, log = await admin(world, engines, pause_mode="retract")
        await made.pause_round()
        for engine in engines:
            assert engine.posts == [("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})]
            assert not engine.paused
        assert log == ["hold 120", "resume"]

    run(body)


def test_the_continue_is_sent_though_the_pause_failed_and_health_judges_again() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.alive = False
        made, log = await admin(world, (one, two), reconcile_timeout_s=2.0)
        results = await made.pause_round()
        assert outcomes(results)[0] == ("engine-0", "/pause_generation", "not_done")
        assert outcomes(results)[3] == ("engine-1", "/continue_generation", "done")
        assert log[-1] == "resume" and not two.paused

    run(body)


def test_a_pause_of_unknown_outcome_is_looked_up_and_not_sent_again() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        made, _ = await admin(world, (engine,))
        engine.post_script = [ReadTimeout("x")]  # after the effect
        results = await made.pause_round()
        assert [r.outcome for r in results] == ["done", "done"]
        assert [route for route, _ in engine.posts] == ["/pause_generation", "/continue_generation"]
        assert engine.gets == ["/ready"]

    run(body)


def test_a_continue_that_was_lost_is_sent_again_until_the_replica_serves() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        made, _ = await admin(world, (engine,), pause_hold_s=0.0)

        def lost() -> BaseException:
            engine.paused = True  # the POST never arrived
            return ConnectionLost("x")

        engine.post_script = [None, lost, lost]
        results = await made.pause_round()
        assert [r.outcome for r in results] == ["done", "done"] and not engine.paused
        operations = [a["operation"] for a in world.of("admin.attempt", route="/continue_generation")]
        assert len(operations) == len(set(operations)) == 3  # known not to have happened: an operation of its own

    run(body)


def test_what_cannot_be_reconciled_in_time_stays_unknown() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        made, _ = await admin(world, (engine,), read_timeout_s=1.0, reconcile_timeout_s=3.0, connect_timeout_s=0.5)
        engine.stopped = True
        begun = asyncio.get_running_loop().time()
        (result,) = await made.flush_all()
        assert result.outcome == "unknown" and "ReadTimeout" in result.error
        assert asyncio.get_running_loop().time() - begun == pytest.approx(4.0, abs=0.01)

    run(body)


def test_a_refused_flush_is_not_done() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        made, _ = await admin(world, (engine,))
        engine.post_script = [HttpError(status=400, body="Flush cache failed.")]
        (result,) = await made.flush_all()
        assert result.outcome == "not_done" and len(world.of("admin.attempt")) == 1

    run(body)


def test_periodic_rounds_go_on_over_a_restart_of_the_gateway() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        await admin(world, (engine,), round="flush", round_interval_s=10.0)
        world.handles["gateway"].fail_next = [ActorDied("x")]
        await asyncio.sleep(25.0)
        assert [a["target"] for a in world.of("admin.attempt")] == ["fleet", "engine-0"]
        world.handles["gateway"].lose_next = 1  # an answer that never comes
        await asyncio.sleep(25.0)
        assert [a["target"] for a in world.of("admin.attempt")][2:] == ["fleet", "engine-0"]

    run(body)


def test_no_more_than_so_many_at_once() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 10)
        made, _ = await admin(world, engines, fan_out=3)
        for engine in engines:
            engine.post_delay_s = 1.0
        await made.flush_all()
        assert world.most_posting == 3
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)

    run(body)
