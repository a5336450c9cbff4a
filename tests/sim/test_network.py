"""Links, partitions and the fates of single messages, as the callers of actors meet them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protocol.errors import ActorDied, ConnectionLost, NoSuchActor, Outcome
from protocol.ports import ActorHandle
from sim.backend import SimBackend
from sim.network import Fate, FateKind, LinkSpec
from sim.simulation import Simulation
from sim.timings import Timings
from tests.sim.worlds import Echo, Evidence

LATENCY_S = 0.001
PLAIN = Timings(call_cost_s=0.0, spawn_s=0.01, link_latency_s=LATENCY_S, health_timeout_s=15.0)

Body = Callable[[Simulation, SimBackend, ActorHandle], Awaitable[Any]]


def with_far_echo(body: Body, *, evidence: Evidence | None = None, nodes: int = 2, **options: Any) -> Any:
    """Run a body with an Echo on node-1, the driver being on node-0."""
    with Simulation(timings=PLAIN, nodes=nodes, recorder=evidence, **options) as simulation:

        async def main(backend: SimBackend) -> Any:
            return await body(simulation, backend, await backend.spawn(Echo, name="echo", node="node-1"))

        return simulation.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(awaitable: Awaitable[Any]) -> float:
    began = now()
    await awaitable
    return now() - began


# ---- links ----


def test_a_call_takes_one_latency_each_way() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> tuple[float, float]:
        near = await backend.spawn(Echo, name="near")
        return await timed(echo.echo(1)), await timed(near.echo(1))

    far, near = with_far_echo(body)
    assert far == pytest.approx(2 * LATENCY_S, abs=1e-9)
    assert near == pytest.approx(2 * PLAIN.loopback_latency_s, abs=1e-9)


def test_jitter_is_drawn_over_its_range_from_the_links_own_stream() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> list[float]:
        simulation.network.set_link("node-0", "node-1", LinkSpec(LATENCY_S, jitter_s=0.01))
        return [await timed(echo.echo(i)) for i in range(200)]

    times = with_far_echo(body, seed=1)
    assert all(2 * LATENCY_S <= time + 1e-9 and time <= 2 * LATENCY_S + 0.01 + 1e-9 for time in times)
    assert min(times) < 2 * LATENCY_S + 0.001 and max(times) > 2 * LATENCY_S + 0.009
    assert times == with_far_echo(body, seed=1)
    assert times != with_far_echo(body, seed=2)


def test_bandwidth_makes_messages_queue() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> list[float]:
        simulation.network.set_link("node-0", "node-1", LinkSpec(LATENCY_S, bandwidth_bytes_per_s=1e6))
        return list(await asyncio.gather(*(timed(echo.data([b"x" * 100_000])) for _ in range(3))))

    times = with_far_echo(body)
    assert times == pytest.approx([2 * LATENCY_S + 0.1 * (i + 1) for i in range(3)], rel=0.01)


def test_loss_takes_its_share_and_is_recorded() -> None:
    evidence = Evidence()

    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> int:
        simulation.network.set_link("node-0", "node-1", LinkSpec(LATENCY_S, loss=0.25))
        calls = [echo.echo(i) for i in range(1000)]
        await asyncio.sleep(1)
        for call in calls:
            assert call.done or call.target is not None
        return sum(call.done for call in calls)

    answered = with_far_echo(body, evidence=evidence)
    assert 700 < answered < 800
    assert evidence.fates() == ["request_lost"] * (1000 - answered)


def test_reordering_lets_messages_overtake_others() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> list[int]:
        simulation.network.set_link("node-0", "node-1", LinkSpec(LATENCY_S, reorder=0.2, reorder_s=0.01))
        calls = []
        for i in range(100):
            calls.append(echo.echo(i))
            await asyncio.sleep(0.001)
        await asyncio.gather(*calls)
        history: list[int] = await echo.history()
        return history

    history = with_far_echo(body)
    assert sorted(history) == list(range(100)) and history != list(range(100))


def test_slow_down_adds_up_and_is_taken_off() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> list[float]:
        network = simulation.network
        first = network.slow_down("node-0", "node-1", 0.1)
        second = network.slow_down("node-0", "node-1", 0.2)
        times = [await timed(echo.echo(0))]
        for undo in (first, second):
            undo()
            times.append(await timed(echo.echo(0)))
        return times

    expected = [2 * LATENCY_S + extra for extra in (0.3, 0.2, 0.0)]
    assert with_far_echo(body) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("field", "value"), [("latency_s", -1.0), ("loss", 1.5), ("reorder", -0.1), ("jitter_s", float("nan"))]
)
def test_a_bad_link_is_refused_by_field_and_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"LinkSpec\.{field} = {value}"):
        LinkSpec(**{"latency_s": 0.1, field: value})


# ---- partitions, holds ----


def test_a_partition_keeps_messages_until_it_is_repaired() -> None:
    evidence = Evidence()
    hits: list[str] = []

    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> float:
        cut = simulation.network.partition("node-0", "node-1", on_hit=hits.append)
        calls = [asyncio.ensure_future(timed(echo.echo(i))) for i in range(3)]
        await asyncio.sleep(5)
        assert await echo_history(simulation) == []
        simulation.network.repair(cut)
        simulation.network.repair(cut)
        times = await asyncio.gather(*calls)
        assert await echo.history() == [0, 1, 2]
        return max(times)

    assert with_far_echo(body, evidence=evidence) == pytest.approx(5 + 2 * LATENCY_S, abs=1e-6)
    assert evidence.fates() == ["held"] * 3
    assert hits == ["held echo driver>echo"] * 3


async def echo_history(simulation: Simulation) -> list[Any]:
    """What an echo has seen, read past the network."""
    seen: list[Any] = simulation.system._processes["echo"].instance.seen
    return seen


def test_a_one_way_partition_lets_the_effect_happen_and_keeps_the_reply() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        cut = simulation.network.partition("node-1", "node-0", one_way=True)
        call = echo.echo("x")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await call
        assert await echo_history(simulation) == ["x"]
        simulation.network.repair(cut)
        assert await call == "x"

    with_far_echo(body)


def test_two_partitions_of_one_link_are_both_to_be_repaired() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        first = simulation.network.partition("node-0", "node-1")
        second = simulation.network.partition("node-0", "node-1", one_way=True)
        call = echo.echo("x")
        simulation.network.repair(first)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await call
        simulation.network.repair(second)
        assert await call == "x"

    with_far_echo(body)


def test_held_messages_arrive_together_and_in_order() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        held = simulation.network.hold("node-0", "node-1")
        calls = []
        for i in range(10):
            calls.append(echo.echo(i))
            await asyncio.sleep(0.1)
        simulation.network.release(held)
        assert await timed(asyncio.gather(*calls)) == pytest.approx(2 * LATENCY_S, abs=1e-6)
        assert await echo.history() == list(range(10))

    with_far_echo(body)


def test_a_node_cut_off_from_the_head_is_declared_dead_and_its_processes_act_on() -> None:
    """Silence until the health time-out, then ActorDied for ever; the zombie itself knows nothing of it."""
    evidence = Evidence()

    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        slow = echo.slow(5)
        await asyncio.sleep(0.1)
        cut = simulation.network.partition("node-0", "node-1")
        call = echo.echo("held")
        assert 14.9 < await timed(asyncio.gather(slow, call, return_exceptions=True)) < 15.1
        for pending in (slow, call):
            with pytest.raises(ActorDied) as caught:
                await pending
            assert caught.value.outcome is Outcome.UNKNOWN
        with pytest.raises(ActorDied) as again:
            await echo.echo("not sent")
        assert again.value.outcome is Outcome.NOT_DONE
        with pytest.raises(NoSuchActor):
            await backend.lookup("echo")
        assert await backend.nodes() == ("node-0",)
        zombie = simulation.system.find("echo", 1)
        assert zombie is not None and zombie.alive
        successor = await backend.spawn(Echo, name="echo")
        assert (successor.incarnation, zombie.alive) == (2, True)
        simulation.network.repair(cut)
        assert not zombie.alive
        assert await backend.nodes() == ("node-0", "node-1")
        with pytest.raises(ActorDied):
            await echo.echo("for ever")
        assert await successor.echo(1) == 1
        assert await (await backend.spawn(Echo, name="other", node="node-1")).echo(2) == 2

    with_far_echo(body, evidence=evidence)
    (lost,) = evidence.of("node.lost")
    assert lost.data == {"node": "node-1", "zombie": True}
    assert [event.data["node"] for event in evidence.of("node.restored")] == ["node-1"]
    assert [(event.actor, event.inc, event.data["reason"]) for event in evidence.of("actor.died")] == [
        ("echo", 1, "node_lost")
    ]


def test_a_partition_shorter_than_the_health_timeout_kills_nobody() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        for _ in range(3):
            cut = simulation.network.partition("node-0", "node-1")
            call = echo.echo("x")
            await asyncio.sleep(14)
            simulation.network.repair(cut)
            assert await call == "x"
        await asyncio.sleep(20)
        assert await echo.echo("y") == "y"

    with_far_echo(body)


def test_nodes_cut_off_from_each_other_but_not_from_the_head_stay_alive() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        simulation.network.partition("node-1", "node-2")
        await asyncio.sleep(60)
        assert await backend.nodes() == ("node-0", "node-1", "node-2")
        assert await echo.echo("x") == "x"

    with_far_echo(body, nodes=3)


# ---- fates ----


def fated(kind: FateKind, n: int, **options: Any) -> tuple[list[str], list[Any], Evidence, list[str]]:
    """What became of ``n`` calls in turn (``ok`` or the class of the error), what was seen, the evidence, the hits."""
    evidence = Evidence()
    hits: list[str] = []

    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> tuple[list[str], list[Any]]:
        fate = simulation.network.arm(Fate(kind, on_hit=hits.append, **options))
        outcomes = []
        for i in range(n):
            try:
                async with asyncio.timeout(1):
                    await echo.echo(i)
                outcomes.append("ok")
            except (ConnectionLost, TimeoutError) as error:
                outcomes.append(type(error).__name__)
        simulation.network.disarm(fate)
        simulation.network.disarm(fate)
        await asyncio.sleep(10)
        assert fate.hits == len(hits)
        return outcomes, await echo.history()

    outcomes, history = with_far_echo(body, evidence=evidence)
    return outcomes, history, evidence, hits


def test_request_lost_has_no_effect_and_the_caller_waits() -> None:
    outcomes, seen, evidence, hits = fated("request_lost", 4, count=2)
    assert outcomes == ["TimeoutError", "TimeoutError", "ok", "ok"]
    assert seen == [2, 3]
    assert evidence.fates() == ["request_lost"] * 2 and len(hits) == 2
    first = evidence.of("call.fate")[0]
    sent = next(event for event in evidence.of("call.sent") if event.data["method"] == "echo")
    assert (first.cause, first.data["call"]) == (sent.id, sent.data["call"])
    assert (first.data["source"], first.data["target"]) == ("driver", "echo")


def test_reply_lost_has_its_effect_and_the_caller_waits() -> None:
    outcomes, seen, evidence, _ = fated("reply_lost", 3, count=1)
    assert outcomes == ["TimeoutError", "ok", "ok"]
    assert seen == [0, 1, 2]
    (fate,) = evidence.of("call.fate")
    assert (fate.data["source"], fate.data["target"]) == ("echo", "driver")


def test_error_now_and_delivery_later() -> None:
    outcomes, seen, evidence, _ = fated("error_now", 3, count=1, delay_s=5.0)
    assert outcomes == ["ConnectionLost", "ok", "ok"]
    assert seen == [1, 2, 0]
    assert evidence.fates() == ["delayed"]
    end = next(event for event in evidence.of("call.done") if event.data["error"] == "ConnectionLost")
    assert end.data["outcome"] == "unknown"


def test_delivered_twice() -> None:
    outcomes, seen, _, _ = fated("duplicated", 2, count=1, delay_s=3.0)
    assert outcomes == ["ok", "ok"]
    assert seen == [0, 1, 0]


def test_delayed() -> None:
    outcomes, seen, _, _ = fated("delayed", 2, count=1, delay_s=3.0)
    assert outcomes == ["TimeoutError", "ok"]
    assert seen == [1, 0]


def test_http_fates_do_not_befall_actor_calls() -> None:
    for kind in ("connect_timeout", "read_timeout"):
        outcomes, seen, evidence, hits = fated(kind, 2)  # type: ignore[arg-type]
        assert (outcomes, seen, evidence.fates(), hits) == (["ok", "ok"], [0, 1], [], [])


def test_a_fate_meets_only_what_it_names() -> None:
    for options, hit in (
        ({"src": "driver", "dst": "echo", "method": "echo"}, True),
        ({"src": "node-0", "dst": "node-1"}, True),
        ({"dst": "ech*"}, True),
        ({"src": "echo"}, False),
        ({"dst": "driver"}, False),
        ({"dst": "node-0"}, False),
        ({"method": "history"}, False),
        ({"method": "ech"}, False),
    ):
        outcomes, _, _, hits = fated("request_lost", 1, **options)
        assert (outcomes == ["TimeoutError"]) is hit, options
        assert bool(hits) is hit
        outcomes, _, _, hits = fated("reply_lost", 1, **options)  # src and dst are of the call, whichever leg is lost
        assert (outcomes == ["TimeoutError"]) is hit, options


def test_chance_is_met_by_its_share() -> None:
    outcomes, _, _, _ = fated("duplicated", 400, chance=0.25)
    assert outcomes == ["ok"] * 400
    _, seen, _, hits = fated("duplicated", 400, chance=0.25)
    assert 60 < len(hits) < 140 and len(seen) == 400 + len(hits)


def test_a_lost_ordered_call_does_not_hold_up_the_later_ones() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        simulation.network.arm(Fate("request_lost", count=1))
        view = echo.ordered()
        lost = view.echo("lost")
        assert await asyncio.gather(view.echo(1), view.echo(2)) == [1, 2]
        assert await echo.history() == [1, 2]
        assert not lost.done

    with_far_echo(body)


def test_a_duplicate_of_an_ordered_call_is_dropped() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> None:
        simulation.network.arm(Fate("duplicated", delay_s=0.5))
        view = echo.ordered()
        assert await asyncio.gather(view.echo(1), view.echo(2)) == [1, 2]
        await asyncio.sleep(2)
        assert await echo.history() == [1, 2]

    with_far_echo(body)


def test_bad_fates_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown fate 'lost'"):
        Fate("lost")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"chance 2 is not from 0 to 1"):
        Fate("delayed", chance=2)
    with pytest.raises(ValueError, match="must not be negative"):
        Fate("delayed", delay_s=-1)


# ---- exploring ----


def test_exploring_draws_wide_delays_and_repeats_itself() -> None:
    async def body(simulation: Simulation, backend: SimBackend, echo: ActorHandle) -> tuple[list[float], str]:
        times = [await timed(echo.echo(i)) for i in range(300)]
        return times, simulation.world.digest()

    times, digest = with_far_echo(body, seed=4, explore=True)
    assert min(times) < LATENCY_S and max(times) > 32 * LATENCY_S
    assert with_far_echo(body, seed=4, explore=True) == (times, digest)
    assert with_far_echo(body, seed=5, explore=True)[1] != digest
