"""Health: taken out after N failures, wedges found, readmitted only after a token (engines.md 3; scaling.md 9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.config import GatewayConfig, HealthConfig
from protocol.errors import ActorDied, ConnectionLost, ReadTimeout
from protocol.messages import EngineAddress, GenerateRequest
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from tests.protocol.fake import FakeBackend, FakeEngine, FakeHandle, fleet, run


class Reports:
    """Stands for Recovery."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, str, str]] = []

    async def recover(self, address: EngineAddress, why: str) -> bool:
        self.reports.append((asyncio.get_running_loop().time(), address.name, why))
        return True


class Set:
    """A gateway, a prober and something to report to."""

    def __init__(self, world: FakeBackend, gateway: FakeHandle, prober: FakeHandle, recovery: FakeHandle) -> None:
        self.world = world
        self.gateway = gateway
        self.prober = prober
        self.recovery = recovery

    @property
    def reports(self) -> list[tuple[float, str, str]]:
        found: list[tuple[float, str, str]] = self.recovery.target.reports
        return found

    async def routable(self) -> list[str]:
        return [v.address.name for v in await self.gateway.engines() if v.routable]


async def setup(world: FakeBackend, engines: tuple[FakeEngine, ...], **config: Any) -> Set:
    gateway = await world.spawn(Gateway, GatewayConfig(read_timeout_s=300.0), name="gateway")
    for engine in engines:
        await gateway.add_replica(engine.address)
    recovery = await world.spawn(Reports, name="recovery")
    prober = await world.spawn(HealthProber, HealthConfig(**config), gateway, recovery, name="health")
    return Set(world, gateway, prober, recovery)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_healthy_fleet_is_probed_evenly_and_left_alone() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 20)
        made = await setup(world, engines, interval_s=1.0, slots=8)
        await asyncio.sleep(60)
        assert made.reports == [] and world.of("health.changed") == []
        assert {len(e.gets) for e in engines} <= {57, 58, 59, 60}
        assert all(set(e.gets) == {"/ready"} for e in engines)  # never a generation as the regular probe

    run(body)


def test_a_stopped_replica_is_taken_out_and_readmitted_when_it_continues() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 3)
        made = await setup(world, engines)
        await asyncio.sleep(5)
        engines[1].stopped = True
        await asyncio.sleep(8)
        assert await made.routable() == ["engine-0", "engine-2"]
        assert await made.prober.unhealthy() == (engines[1].address,)
        changed = world.of("health.changed")
        assert [(c["healthy"], c["failures"], c["why"]) for c in changed] == [(False, 3, "ReadTimeout")]
        engines[1].stopped = False
        await asyncio.sleep(5)
        assert await made.routable() == ["engine-0", "engine-1", "engine-2"]
        assert engines[1].gets[-3:].count("/health_generate") <= 1 and "/health_generate" in engines[1].gets
        assert [c["healthy"] for c in world.of("health.changed")] == [False, True]
        assert made.reports == []  # it came back before it was to be replaced

    run(body)


def test_a_look_for_a_wedge_does_not_hold_up_the_readmission_of_one_that_was_stopped() -> None:
    """That look went on for 4 s, in which nobody asked whether it was back. Found beside sglang-router."""

    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two), stall_window_s=5.0, stall_check_s=2.0)
        await asyncio.sleep(5)
        one.duration_s = 120.0
        call = asyncio.ensure_future(made.gateway.generate(GenerateRequest("r", 10, 4)))
        await asyncio.sleep(0.1)
        one.stopped = True
        await asyncio.sleep(6)
        assert await made.routable() == ["engine-1"]
        one.stopped = False
        await asyncio.sleep(2.3)  # a probe's interval and a generated token
        assert await made.routable() == ["engine-0", "engine-1"]
        call.cancel()

    run(body)


def test_two_failures_are_not_three() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        made = await setup(world, (engine,))
        for _ in range(5):
            engine.get_script["/ready"] = [(503, ""), (503, "")]
            await asyncio.sleep(4)
        assert await made.routable() == ["engine-0"] and world.of("health.changed") == []

    run(body)


def test_one_that_stays_stopped_is_reported_again_and_again_but_not_at_once() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        made = await setup(world, (engine,), replace_after_s=30.0, report_interval_s=10.0)
        engine.stopped = True
        await asyncio.sleep(30)
        assert made.reports == []
        await asyncio.sleep(35)
        assert [why for _, _, why in made.reports] == ["unhealthy: ReadTimeout"] * 3
        times = [t for t, _, _ in made.reports]
        assert all(10 <= b - a <= 12.5 for a, b in zip(times, times[1:], strict=False))

    run(body)


def test_a_dead_replica_is_out_and_reported_at_once() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        await asyncio.sleep(5)
        one.alive = False
        await asyncio.sleep(1.5)
        assert await made.routable() == ["engine-1"]
        assert [(name, why) for _, name, why in made.reports] == [("engine-0", "dead")]

    run(body)


def test_a_suspect_is_readmitted_only_after_a_token() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        await asyncio.sleep(5)
        one.generate_script = [ConnectionLost("x")]
        begun = now()
        assert (await made.gateway.generate(GenerateRequest("r", 10, 4))).engine == "engine-1"
        assert await made.routable() == ["engine-1"]
        while len(await made.routable()) == 1:
            await asyncio.sleep(0.05)
        assert 1.0 <= now() - begun <= 2.0
        assert one.gets.count("/health_generate") == 1

    run(body)


def test_a_suspect_that_makes_no_token_is_wedged() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        await asyncio.sleep(5)
        one.wedged = True
        one.generate_script = [ReadTimeout("x")]
        await made.gateway.generate(GenerateRequest("r", 10, 4))
        await asyncio.sleep(24)
        assert await made.routable() == ["engine-1"]
        assert [why for _, _, why in made.reports] == ["wedged"]

    run(body)


def test_a_wedge_behind_a_ready_page_is_found_by_its_counters() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two), stall_window_s=5.0, stall_check_s=2.0)
        await asyncio.sleep(20)
        one.wedged = True
        call = asyncio.ensure_future(made.gateway.generate(GenerateRequest("r", 10, 4)))
        await asyncio.sleep(6)
        assert await made.routable() == ["engine-0", "engine-1"]
        await asyncio.sleep(2.5)
        assert await made.routable() == ["engine-1"]
        assert [(name, why) for _, name, why in made.reports] == [("engine-0", "wedged")]
        assert [c["why"] for c in world.of("health.changed")] == ["wedged"]
        call.cancel()

    run(body)


def test_a_long_generation_is_no_wedge() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        one.duration_s = 120.0
        await made.gateway.generate(GenerateRequest("r", 10, 4))
        assert one.gets.count("/metrics") > 10  # it was looked at
        assert made.reports == [] and world.of("health.changed") == []

    run(body)


@pytest.mark.parametrize("wedged", [True, False])
def test_where_an_engine_says_it_has_nothing_to_do_a_token_decides(wedged: bool) -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two), stall_window_s=5.0, stall_check_s=2.0)
        one.generate_script = ["hang"]  # the answer is lost on the way, or the gauges are from before it got stuck
        one.wedged = wedged
        call = asyncio.ensure_future(made.gateway.generate(GenerateRequest("r", 10, 4)))
        await asyncio.sleep(40)
        assert "/health_generate" in one.gets
        assert [(name, why) for _, name, why in made.reports][:1] == ([("engine-0", "wedged")] if wedged else [])
        assert ("engine-0" in await made.routable()) is not wedged
        call.cancel()

    run(body)


@pytest.mark.parametrize("wedged", [True, False])
@pytest.mark.parametrize("page", ["no_metrics", "nan_metrics"])
def test_without_counters_a_token_decides(wedged: bool, page: str) -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        setattr(one, page, True)
        one.wedged = wedged
        one.duration_s = 60.0
        call = asyncio.ensure_future(made.gateway.generate(GenerateRequest("r", 10, 4)))
        await asyncio.sleep(40)
        assert [why for _, _, why in made.reports][:1] == (["wedged"] if wedged else [])
        assert ("engine-0" in await made.routable()) is not wedged
        call.cancel()

    run(body)


_TOKENS = "sglang:generation_tokens_total"


@pytest.mark.parametrize("wedged", [True, False])
@pytest.mark.parametrize(
    "page",
    [
        f'{_TOKENS} 5\nx{{a="b", ="c"}} 1\n', f"{_TOKENS} 5 {'9' * 400}\n",  # IndexError, OverflowError of the parser
        f"{_TOKENS} {'9' * 400}\n", f"{_TOKENS} +Inf\n", f"{_TOKENS} 1{'0' * 308}\n" * 9 + f"{_TOKENS} 0.5\n",
    ],
    ids=["no_label", "huge_stamp", "huge", "infinite", "huge_sum"],
)  # fmt: skip
def test_a_page_that_nobody_can_read_is_no_page_and_breaks_nothing(page: str, wedged: bool) -> None:
    """Least of all may a counter that is infinite, and so always the same, pass for an engine that stands still."""

    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        one.odd_metrics, one.wedged, one.duration_s = page, wedged, 60.0
        call = asyncio.ensure_future(made.gateway.generate(GenerateRequest("r", 10, 4)))
        await asyncio.sleep(40)
        assert one.gets.count("/metrics") >= 2
        assert [why for _, _, why in made.reports][:1] == (["wedged"] if wedged else [])
        assert ("engine-0" in await made.routable()) is not wedged
        call.cancel()

    run(body)


def test_nothing_is_judged_while_held() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        made = await setup(world, (engine,))
        await made.prober.hold(20.0)
        engine.paused = True  # /ready says 503 now
        call = asyncio.ensure_future(made.gateway.generate(GenerateRequest("r", 10, 4)))
        await asyncio.sleep(19)
        assert await made.routable() == ["engine-0"]
        await asyncio.sleep(6)
        assert await made.routable() == []  # a hold is bounded: who held may have died
        engine.paused = False
        await call
        await asyncio.sleep(5)
        assert await made.routable() == ["engine-0"]
        await made.prober.hold(20.0)
        await made.prober.resume()
        engine.paused = True
        await asyncio.sleep(6)
        assert await made.routable() == []

    run(body)


def test_a_verdict_that_the_gateway_did_not_get_is_told_again() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two), call_timeout_s=2.0)
        await asyncio.sleep(5)

        target = made.gateway.target
        original, lost = target.set_routable, [ActorDied("x"), ActorDied("x")]

        async def set_routable(*args: Any) -> bool:
            if lost:
                raise lost.pop()
            return bool(await original(*args))

        target.set_routable = set_routable
        one.stopped = True
        await asyncio.sleep(20)
        assert lost == [] and await made.routable() == ["engine-1"]
        assert [c["healthy"] for c in world.of("health.changed")] == [False]

    run(body)


def test_a_gateway_that_does_not_answer_does_not_stop_the_prober() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two), call_timeout_s=2.0)
        await asyncio.sleep(5)
        made.gateway.lose_next = 1
        await asyncio.sleep(5)
        one.alive = False
        await asyncio.sleep(2)
        assert await made.routable() == ["engine-1"] and len(made.reports) == 1

    run(body)


def test_a_report_that_recovery_did_not_get_is_made_again() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        await asyncio.sleep(5)
        made.recovery.fail_next = [ActorDied("x")]
        one.alive = False
        await asyncio.sleep(3)
        assert len(made.reports) == 1

    run(body)


def test_one_that_was_told_to_end_is_left_to_end_and_then_reported() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 2)
        made = await setup(world, engines, look_for_leaving_s=3.0, replace_after_s=30.0)
        await asyncio.sleep(7)
        assert [engine.gets.count("/health") for engine in engines] == [2, 2]
        engines[0].get_script["/health"] = [(503, "")] * 100
        engines[0].get_script["/health_generate"] = [(503, "")] * 100
        await asyncio.sleep(4)
        assert await made.routable() == ["engine-1"] and made.reports == []
        await asyncio.sleep(10)
        assert await made.routable() == ["engine-1"] and made.reports == []  # /ready says 200 all the time
        engines[0].alive = False
        await asyncio.sleep(2)
        assert [(name, why) for _, name, why in made.reports] == [("engine-0", "dead")]

    run(body)


def test_one_that_was_told_to_end_and_does_not_is_replaced_in_the_end() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), look_for_leaving_s=3.0, replace_after_s=30.0)
        one.get_script["/health"] = [(503, "")] * 100
        await asyncio.sleep(32)
        assert made.reports == []
        await asyncio.sleep(3)
        assert [why for _, _, why in made.reports] == ["leaving, and still there"]

    run(body)


def test_replicas_that_come_and_go_are_followed() -> None:
    async def body(world: FakeBackend) -> None:
        one, two, three = await fleet(world, 3)
        made = await setup(world, (one, two))
        await asyncio.sleep(5)
        await made.gateway.remove_replica(one.address)
        await made.gateway.add_replica(three.address)
        await asyncio.sleep(1)
        probes = len(one.gets)
        one.alive = False
        await asyncio.sleep(5)
        assert len(one.gets) == probes and len(three.gets) >= 4
        assert made.reports == []

    run(body)


def test_without_recovery_it_only_routes() -> None:
    async def body(world: FakeBackend) -> None:
        (engine,) = await fleet(world, 1)
        gateway = await world.spawn(Gateway, GatewayConfig(), name="gateway")
        await gateway.add_replica(engine.address)
        await world.spawn(HealthProber, HealthConfig(), gateway, name="health")
        engine.alive = False
        await asyncio.sleep(5)
        assert [v.routable for v in await gateway.engines()] == [False]

    run(body)
