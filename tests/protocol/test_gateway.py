"""The gateway: picks, counts, retries, routing (scaling.md 5.1; hazards H4, H5)."""

from __future__ import annotations

import asyncio
import timeit
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from protocol.config import GatewayConfig
from protocol.errors import (
    ConnectionLost,
    ConnectionRefused,
    ConnectTimeout,
    HttpError,
    NoReplica,
    Outcome,
    ReadTimeout,
    SeatrialError,
)
from protocol.messages import EngineAddress, GenerateRequest
from protocol.ports import EngineSpec
from protocol.serving.gateway import Gateway, ReplicaView
from protocol.serving.pick_set import PickSet, Replica
from tests.protocol.fake import FakeBackend, FakeEngine, fleet, run


def request(number: int = 0, *, idempotent: bool = True) -> GenerateRequest:
    return GenerateRequest(f"r-{number:06d}", 100, 8, idempotent=idempotent)


async def gateway(world: FakeBackend, engines: tuple[FakeEngine, ...], **config: Any) -> Gateway:
    made = Gateway(GatewayConfig(**config))
    await made.start()
    for engine in engines:
        assert await made.add_replica(engine.address)
    return made


async def view(made: Gateway, name: str) -> ReplicaView:
    return next(v for v in await made.engines() if v.address.name == name)


def test_the_least_loaded_replica_is_picked_and_ties_go_round() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 3)
        made = await gateway(world, engines)
        calls = [asyncio.ensure_future(made.generate(request(n))) for n in range(7)]
        await asyncio.sleep(0)
        assert [e["replica"] for e in world.of("gateway.picked")] == [f"engine-{n % 3}" for n in range(7)]
        assert [v.in_flight for v in await made.engines()] == [3, 2, 2]
        await asyncio.gather(*calls)
        assert [(v.in_flight, v.served) for v in await made.engines()] == [(0, 3), (0, 2), (0, 2)]

    run(body)


def test_a_pick_is_counted_before_any_other_pick_can_look() -> None:
    async def body(world: FakeBackend) -> None:
        made = await gateway(world, await fleet(world, 4))
        calls = [asyncio.ensure_future(made.generate(request(n))) for n in range(100)]
        await asyncio.sleep(0)
        assert [v.in_flight for v in await made.engines()] == [25, 25, 25, 25]
        await asyncio.gather(*calls)

    run(body)


@pytest.mark.parametrize("error", [ConnectTimeout, ConnectionRefused, ConnectionLost, ReadTimeout])
def test_a_transport_error_is_retried_elsewhere_and_the_replica_is_suspect(error: type[SeatrialError]) -> None:
    async def body(world: FakeBackend) -> None:
        bad, good = await fleet(world, 2)
        bad.generate_script = [error("x")]
        made = await gateway(world, (bad, good))
        result = await made.generate(request())
        assert (result.engine, result.attempts) == ("engine-1", 2)
        assert [v.routable for v in await made.engines()] == [False, True]
        assert (await made.health_view(0, 1.0)).suspects == (bad.address,)
        await made.generate(request(1))
        assert bad.generated == []  # not picked again until health readmits it
        assert await made.set_routable(bad.address, True, "")
        assert (await made.health_view(0, 1.0)).suspects == ()

    run(body)


def test_a_4xx_is_never_retried_and_leaves_the_replica_routable() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [HttpError(status=400, body="too long")]
        made = await gateway(world, (one, two))
        with pytest.raises(HttpError) as caught:
            await made.generate(request())
        assert caught.value.outcome is Outcome.NOT_DONE
        assert caught.value.status == 400 and caught.value.attempts == 1
        assert two.generated == [] and world.of("gateway.moved") == []
        assert [v.routable for v in await made.engines()] == [True, True]

    run(body)


def test_a_5xx_is_retried_elsewhere_and_ten_in_a_row_make_a_suspect() -> None:
    async def body(world: FakeBackend) -> None:
        bad, good = await fleet(world, 2)
        bad.generate_script = [HttpError(status=500) for _ in range(10)]
        made = await gateway(world, (bad, good), backoff_s=0.0)
        for number in range(40):
            assert (await made.generate(request(number))).engine == "engine-1"
            if not (await view(made, "engine-0")).routable:
                break
        assert bad.generate_script == [] and bad.generated == []
        assert (await view(made, "engine-0")).why == "HttpError"

    run(body)


@pytest.mark.parametrize("error", [ReadTimeout("x"), ConnectionLost("x"), HttpError(status=502)])
def test_a_call_of_unknown_outcome_is_not_replayed_unless_that_is_harmless(error: SeatrialError) -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [error]
        made = await gateway(world, (one, two))
        with pytest.raises(type(error)) as caught:
            await made.generate(request(idempotent=False))
        assert caught.value.outcome is Outcome.UNKNOWN
        assert two.generated == []
        assert [v.in_flight for v in await made.engines()] == [0, 0]

    run(body)


def test_a_call_that_was_surely_not_done_is_replayed_though_not_idempotent() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [ConnectTimeout("x")]
        made = await gateway(world, (one, two))
        assert (await made.generate(request(idempotent=False))).engine == "engine-1"

    run(body)


def test_the_count_moves_before_the_back_off_and_in_one_step() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [ConnectionLost("x")]
        made = await gateway(world, (one, two), backoff_s=0.5)
        sums: list[int] = []

        def at_emission(kind: str, fields: dict[str, Any]) -> None:
            if kind in ("gateway.moved", "gateway.unroutable"):
                sums.append(sum(r.in_flight for r in made._replicas.values()))

        world.on_emit = at_emission
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(0.1)  # in the back-off
        assert [v.in_flight for v in await made.engines()] == [0, 1]
        assert sums == [1, 1]
        await call
        moved = world.of("gateway.moved")
        assert [(m["old"], m["replica"], m["why"]) for m in moved] == [("engine-0", "engine-1", "ConnectionLost")]

    run(body)


def test_the_back_off_grows_and_attempts_are_bounded() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 5)
        for engine in engines:
            engine.generate_script = [ConnectTimeout("x")]
        made = await gateway(world, engines, attempts=4, backoff_s=0.3)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(ConnectTimeout) as caught:
            await made.generate(request())
        assert loop.time() - begun == pytest.approx(0.3 + 0.6 + 0.9)
        assert caught.value.attempts == 4
        assert len(caught.value.attached) == 3
        assert caught.value.outcome is Outcome.NOT_DONE

    run(body)


def test_one_unknown_attempt_makes_the_whole_unknown() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [ReadTimeout("x")]
        two.generate_script = [HttpError(status=400)]
        made = await gateway(world, (one, two))
        with pytest.raises(HttpError) as caught:
            await made.generate(request())
        assert caught.value.outcome is Outcome.UNKNOWN  # the first replica may have done it

    run(body)


def test_what_is_not_sent_yet_does_not_go_to_a_replica_that_left_during_the_back_off() -> None:
    async def body(world: FakeBackend) -> None:
        one, two, three = await fleet(world, 3)
        one.generate_script = [ConnectTimeout("x")]
        made = await gateway(world, (one, two, three), backoff_s=1.0)
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(0.5)
        assert await made.close_admission(two.address, "drain")
        result = await call
        assert result.engine == "engine-2" and two.generated == []
        assert [v.in_flight for v in await made.engines()] == [0, 0, 0]

    run(body)


def test_a_retry_waits_uncounted_while_every_replica_is_suspect() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        for engine in (one, two):
            engine.generate_script = [ReadTimeout("x")]
        made = await gateway(world, (one, two), routable_wait_s=5.0, backoff_s=0.1)
        calls = [asyncio.ensure_future(made.generate(request(n))) for n in range(2)]
        await asyncio.sleep(1.0)
        assert [(v.in_flight, v.routable) for v in await made.engines()] == [(0, False), (0, False)]
        await made.set_routable(one.address, True, "")
        results = await asyncio.gather(*calls)
        assert [(r.engine, r.attempts) for r in results] == [("engine-0", 2), ("engine-0", 2)]
        assert len(world.of("gateway.picked")) == len(world.of("gateway.released"))

        await made.set_routable(one.address, False, "ill")
        await made.set_routable(two.address, True, "")
        two.generate_script = [ReadTimeout("x")]
        with pytest.raises(NoReplica) as caught:
            await made.generate(request(2))
        assert caught.value.outcome is Outcome.UNKNOWN  # the attempt before may have been done
        assert caught.value.attempts == 1 and isinstance(caught.value.attached[0], ReadTimeout)

    run(body)


@pytest.mark.parametrize("error", [ReadTimeout, ConnectionLost])
def test_a_replica_is_sent_a_request_again_when_it_has_let_go_of_it(error: type[SeatrialError]) -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        one.generate_script = [error("x")]
        made = await gateway(world, (one,), routable_wait_s=5.0, backoff_s=0.1, let_go_s=6.0)
        now = asyncio.get_running_loop().time
        began = now()
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(1.0)
        await made.set_routable(one.address, True, "")
        await asyncio.sleep(4.5)
        assert one.generated == [] and (await view(made, "engine-0")).in_flight == 1  # counted: it is to be sent there
        assert (await call).attempts == 2
        assert 6.0 <= now() - began < 7.0
        # What was never sent is sent at once.
        one.generate_script = [ConnectTimeout("x")]
        began = now()
        assert (await made.generate(request(1))).attempts == 2
        assert now() - began < 1.0

    run(body)


def test_a_call_does_not_wait_for_a_replica_that_leaves_meanwhile() -> None:
    async def body(world: FakeBackend) -> None:
        one, two, three = await fleet(world, 3)
        one.generate_script, two.generate_script = [ReadTimeout("x")], [ReadTimeout("x")]
        made = await gateway(world, (one, two), backoff_s=0.1)
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(1.0)
        assert [v.routable for v in await made.engines()] == [False, False]
        await made.set_routable(one.address, True, "")
        await asyncio.sleep(1.0)
        assert await made.add_replica(three.address)
        await made.set_routable(one.address, False, "ill")
        began = asyncio.get_running_loop().time()
        assert (await call).engine == three.address.name
        assert asyncio.get_running_loop().time() - began < 5.0
        assert [v.in_flight for v in await made.engines()] == [0, 0, 0]

    run(body)


def test_after_waiting_for_anybody_a_call_goes_where_it_has_not_been() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [ReadTimeout("x")]
        made = await gateway(world, (one,), backoff_s=0.1)
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(1.0)
        await made.set_routable(one.address, True, "")
        assert await made.add_replica(two.address)  # in the same step: both are there when it looks
        assert (await call).engine == "engine-1"

    run(body)


_DUPLICATE = "Duplicate request ID detected: r-000000"


def test_an_id_that_is_live_from_an_earlier_attempt_is_no_refusal() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await gateway(world, (one,), backoff_s=0.1, attempts=3)

        async def ask(script: list[SeatrialError]) -> Any:
            one.generate_script = script
            await made.set_routable(one.address, True, "")
            call = asyncio.ensure_future(made.generate(request()))
            await asyncio.sleep(1.0)
            await made.set_routable(one.address, True, "")
            return await call

        live = HttpError(status=400, body=_DUPLICATE)
        assert (await ask([ReadTimeout("x"), live])).attempts == 3
        with pytest.raises(ReadTimeout) as caught:  # the client is told that nobody knows, not that it asked wrongly
            await ask([ReadTimeout("x"), live, live])
        assert caught.value.attempts == 3 and caught.value.outcome is Outcome.UNKNOWN
        assert [type(error) for error in caught.value.attached] == [HttpError, HttpError]
        with pytest.raises(HttpError) as refused:  # of somebody else's
            await ask([live])
        assert (refused.value.status, refused.value.outcome) == (400, Outcome.NOT_DONE)
        assert [v.in_flight for v in await made.engines()] == [0]

    run(body)


def test_where_no_connection_comes_about_nobody_is_shut_out() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 3)
        made = await gateway(world, engines, routable_wait_s=5.0, backoff_s=0.1)
        for engine in engines:
            engine.generate_script = [ConnectTimeout("x")]
        begun = asyncio.get_running_loop().time()
        results = await asyncio.gather(*(made.generate(request(n, idempotent=False)) for n in range(6)))
        assert asyncio.get_running_loop().time() - begun < 5.0  # health has not said a word
        assert sorted(result.attempts for result in results) == [1, 1, 1, 2, 2, 2]
        assert sum(v.routable for v in await made.engines()) >= 2
        assert sum(v.in_flight for v in await made.engines()) == 0
        # They stay suspect, so that health looks at them, and what it says counts.
        suspects = (await made.health_view(0, 1.0)).suspects
        assert suspects == tuple(engine.address for engine in engines)
        for engine in engines:
            await made.set_routable(engine.address, False, "ill")
        with pytest.raises(NoReplica):
            await made.generate(request(9))

    run(body)


def test_when_most_cannot_be_connected_to_at_once_it_is_not_they_who_are_ill() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 5)
        made = await gateway(world, engines, attempts=1)
        for engine in engines[:3]:
            engine.generate_script = [ConnectTimeout("x")]
        routable = []
        for number in range(3):
            with pytest.raises(ConnectTimeout):
                await made.generate(request(number))
            routable.append(sum(v.routable for v in await made.engines()))
        assert routable == [4, 3, 5]  # the third is most of five
        assert len((await made.health_view(0, 1.0)).suspects) == 3

    run(body)


def test_the_only_replica_is_connected_to_again() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        one.generate_script = [ConnectTimeout("x"), ConnectTimeout("x")]
        made = await gateway(world, (one,), attempts=3, backoff_s=0.1)
        assert (await made.generate(request(idempotent=False))).attempts == 3
        one.generate_script = [ConnectTimeout("x")] * 3
        with pytest.raises(ConnectTimeout) as caught:
            await made.generate(request(1))
        assert caught.value.attempts == 3 and caught.value.outcome is Outcome.NOT_DONE
        assert [(v.in_flight, v.routable) for v in await made.engines()] == [(0, True)]

    run(body)


def test_who_was_closed_removed_or_broke_off_does_not_come_back_when_nobody_is_left() -> None:
    async def body(world: FakeBackend) -> None:
        lost, closed, gone, last = await fleet(world, 4)
        made = await gateway(world, (lost, closed, gone, last), attempts=1)
        lost.generate_script = [ConnectionLost("x")]
        for engine in (closed, gone, last):
            engine.generate_script = [ConnectTimeout("x")]
        for number in range(3):
            with pytest.raises(SeatrialError):
                await made.generate(request(number))
        await made.close_admission(closed.address, "drain")
        await made.remove_replica(gone.address)
        with pytest.raises(ConnectTimeout):
            await made.generate(request(3))
        assert {v.address.name: v.routable for v in await made.engines()} == {
            "engine-0": False, "engine-1": False, "engine-3": True,
        }  # fmt: skip
        await made.remove_replica(last.address)
        assert not any(v.routable for v in await made.engines())

    run(body)


def test_the_only_routable_replica_is_not_tried_again() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        one.generate_script = [HttpError(status=500)]
        made = await gateway(world, (one,))
        with pytest.raises(HttpError):
            await made.generate(request())
        assert one.generated == [] and (await view(made, "engine-0")).in_flight == 0

    run(body)


@pytest.mark.parametrize("at", ["picked", "running", "back-off"])
def test_a_cancelled_call_gives_its_count_back_and_is_not_retried(at: str) -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.duration_s = 5.0
        if at == "back-off":
            one.generate_script = [ConnectTimeout("x")]
        made = await gateway(world, (one, two), backoff_s=1.0)
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(0 if at == "picked" else 0.5)
        assert sum(v.in_flight for v in await made.engines()) == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [(v.in_flight, v.served) for v in await made.engines()] == [(0, 0), (0, 0)]
        assert two.generated == []
        assert len(world.of("gateway.released", ok=False)) == 1

    run(body)


def test_served_counts_successes_only() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [HttpError(status=500), HttpError(status=400)]
        made = await gateway(world, (one, two), backoff_s=0.0)
        await made.generate(request(0))
        with pytest.raises(HttpError):
            await made.generate(request(1))
        assert [v.served for v in await made.engines()] == [0, 1]

    run(body)


def test_counts_belong_to_an_incarnation_and_not_to_its_address() -> None:
    async def body(world: FakeBackend) -> None:
        (old,) = await fleet(world, 1)
        old.duration_s = 5.0
        made = await gateway(world, (old,))
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(1.0)
        old.alive = False
        new = world.engines.every[0].world.engines
        address = await new.launch(EngineSpec("fake"), name="engine-0")
        assert (address.host, address.port) == (old.address.host, old.address.port)
        assert await made.add_replica(address)
        views = {v.address.incarnation: v for v in await made.engines()}
        assert (views[0].in_flight, views[0].routable, views[0].why) == (1, False, "superseded")
        assert (views[1].in_flight, views[1].served) == (0, 0)
        await call  # retried on the new incarnation
        assert [(v.address.incarnation, v.in_flight, v.served) for v in await made.engines()] == [(1, 0, 1)]

    run(body)


def test_a_late_message_does_not_revive_the_dead() -> None:
    async def body(world: FakeBackend) -> None:
        (old,) = await fleet(world, 1)
        made = await gateway(world, (old,))
        old.alive = False
        new = await world.engines.launch(EngineSpec("fake"), name="engine-0")
        assert await made.replace_replica(old.address, new)
        assert not await made.add_replica(old.address)
        assert not await made.set_routable(old.address, True, "")
        assert await made.replace_replica(old.address, new)  # asked again: it is so
        assert await made.remove_replica(new)
        assert not await made.add_replica(new)
        assert not await made.replace_replica(old.address, EngineAddress("engine-0", 2, "host", 1))
        assert await made.engines() == ()

    run(body)


def test_who_has_closed_a_replica_may_take_that_back() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await gateway(world, (one, two))
        await made.close_admission(one.address, "scale-in")
        assert await made.reopen_admission(one.address) and (await view(made, "engine-0")).routable
        assert await made.reopen_admission(two.address)  # which nobody has closed
        served = {(await made.generate(request(number))).engine for number in range(4)}
        assert served == {"engine-0", "engine-1"}
        await made.remove_replica(one.address)
        assert not await made.reopen_admission(one.address)

    run(body)


def test_health_cannot_readmit_what_was_closed() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await gateway(world, (one, two))
        assert await made.close_admission(one.address, "drain")
        assert not await made.set_routable(one.address, True, "")
        assert (await view(made, "engine-0")).why == "drain"
        for number in range(4):
            assert (await made.generate(request(number))).engine == "engine-1"

    run(body)


def test_without_any_replica_a_request_waits_uncounted_and_then_is_refused() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await gateway(world, (one,), routable_wait_s=2.0)
        await made.set_routable(one.address, False, "ill")
        early = asyncio.ensure_future(made.generate(request(0)))
        await asyncio.sleep(1.0)
        assert (await view(made, "engine-0")).in_flight == 0
        await made.set_routable(one.address, True, "")
        assert (await early).engine == "engine-0"
        await made.set_routable(one.address, False, "ill")
        with pytest.raises(NoReplica) as caught:
            await made.generate(request(1))
        assert caught.value.outcome is Outcome.NOT_DONE

    run(body)


def test_wait_idle_ends_when_the_last_call_does_or_at_its_time_out() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        one.duration_s = 2.0
        made = await gateway(world, (one,))
        assert await made.wait_idle(one.address, 1.0)
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(0.1)
        assert not await made.wait_idle(one.address, 0.5)
        assert await made.wait_idle(one.address, 10.0)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.2)
        await call

    run(body)


def test_stalled_are_those_with_calls_in_flight_and_no_success_for_the_window() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await gateway(world, (one, two))
        await asyncio.sleep(100.0)  # idle for long is not stalled
        one.duration_s = 50.0
        call = asyncio.ensure_future(made.generate(request()))
        await asyncio.sleep(4.0)
        assert (await made.health_view(0, 5.0)).stalled == ()
        await asyncio.sleep(2.0)
        assert (await made.health_view(0, 5.0)).stalled == (one.address,)
        await call

    run(body)


def test_the_roster_is_sent_only_when_it_has_changed() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await gateway(world, (one, two))
        first = await made.health_view(0, 1.0)
        assert first.roster == (one.address, two.address)
        assert (await made.health_view(first.version, 1.0)).roster is None
        await made.remove_replica(one.address)
        assert (await made.health_view(first.version, 1.0)).roster == (two.address,)
        assert await made.roster() == (two.address,)

    run(body)


def test_metrics_are_prometheus_text() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        one.generate_script = [ConnectTimeout("x")]
        made = await gateway(world, (one, two))
        await made.generate(request())
        found = {
            (s.name, *sorted(s.labels.items())): s.value
            for family in text_string_to_metric_families(await made.metrics())
            for s in family.samples
        }
        one_label = (("incarnation", "0"), ("replica", "engine-0"))
        two_label = (("incarnation", "0"), ("replica", "engine-1"))
        assert found[("seatrial_gateway_routable", *one_label)] == 0
        assert found[("seatrial_gateway_served_total", *two_label)] == 1
        assert found[("seatrial_gateway_in_flight", *two_label)] == 0
        assert found[("seatrial_gateway_retries_total", ("cause", "ConnectTimeout"))] == 1
        assert found[("seatrial_gateway_failed_attempts_total", ("cause", "ConnectTimeout"))] == 1

    run(body)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("call"), st.sampled_from(["ok", "slow", "connect", "lost", "timeout", "400", "500"]), st.booleans()
        ),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("route"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.tuples(st.just("replace"), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.01, 0.3, 2.0])),
    ),
    max_size=40,
)

FAULTS: dict[str, Any] = {
    "connect": lambda: ConnectTimeout("x"),
    "lost": lambda: ConnectionLost("x"),
    "timeout": lambda: ReadTimeout("x"),
    "400": lambda: HttpError(status=400),
    "500": lambda: HttpError(status=500),
}


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_counts_are_never_negative_and_sum_to_the_open_calls(steps: list[tuple[Any, ...]]) -> None:
    """Whatever happens, at every emission and after every step."""

    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 4)
        made = await gateway(world, engines, routable_wait_s=0.1, backoff_s=0.05)
        picked: dict[str, int] = {}
        calls: list[asyncio.Task[Any]] = []

        def check(kind: str = "", fields: dict[str, Any] | None = None) -> None:
            if kind == "gateway.picked":
                picked[fields["request"]] = picked.get(fields["request"], 0) + 1  # type: ignore[index]
            elif kind == "gateway.released":
                picked[fields["request"]] -= 1  # type: ignore[index]
            counts = [r.in_flight for r in made._replicas.values()]
            assert min(counts, default=0) >= 0
            open_calls = sum(picked.values())
            assert open_calls >= 0 and set(picked.values()) <= {0, 1}
            assert sum(counts) == open_calls, (kind, fields)
            routable = [r for r in made._replicas.values() if r.routable]
            assert made._picks.size == len(routable)
            assert all(r in made._picks._queues[r.in_flight] for r in routable)

        world.on_emit = check
        for number, step in enumerate(steps):
            if step[0] == "call":
                for engine in world.engines.every:
                    engine.duration_s = 1.0 if step[1] == "slow" else 0.01
                    if step[1] in FAULTS:
                        engine.generate_script.append(FAULTS[step[1]]())
                calls.append(asyncio.ensure_future(made.generate(request(number, idempotent=step[2]))))
            elif step[0] == "cancel" and calls:
                calls[step[1] % len(calls)].cancel()
            elif step[0] == "wait":
                await asyncio.sleep(step[1])
            elif step[0] in ("route", "close", "replace", "remove"):
                engine = world.engines.latest(f"engine-{step[1]}")
                assert engine is not None
                if step[0] == "route":
                    await made.set_routable(engine.address, step[2], "test")
                elif step[0] == "close":
                    await made.close_admission(engine.address, "test")
                elif step[0] == "remove":
                    await made.remove_replica(engine.address)
                else:
                    engine.alive = False
                    await made.replace_replica(
                        engine.address, await world.engines.launch(EngineSpec("fake"), name=engine.name)
                    )
            check()
        await asyncio.gather(*calls, return_exceptions=True)
        check()
        assert all(r.in_flight == 0 and not r.removed for r in made._replicas.values())
        served = sum(1 for c in calls if not c.cancelled() and c.exception() is None)
        assert len(world.of("gateway.released", ok=True)) == served
        assert len(world.of("gateway.released")) == len(world.of("gateway.picked"))

    run(body)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "pick", "other", "done", "discard"]), st.integers(0, 30)), max_size=80)
)
def test_a_pick_is_always_the_least_loaded(steps: list[tuple[str, int]]) -> None:
    picks = PickSet()
    members: list[Replica] = []
    for number, (what, choice) in enumerate(steps):
        if what == "add":
            members.append(Replica(EngineAddress(f"e{number}", 0, "h", 1), None, 0.0))  # type: ignore[arg-type]
            members[-1].in_flight = choice % 5
            picks.add(members[-1])
        elif members and what == "pick":
            least = min(r.in_flight for r in members)
            assert picks.pick().in_flight == least + 1
        elif members and what == "other":
            tried = [members[choice % len(members)]]
            others = [r.in_flight for r in members if r not in tried]
            found = picks.pick_other(tried)
            assert (found is None) == (not others)
            assert found is None or (found not in tried and found.in_flight == min(others) + 1)
        elif members and what == "done":
            replica = members[choice % len(members)]
            if replica.in_flight:
                picks.count(replica, -1)
        elif members and what == "discard":
            picks.discard(members.pop(choice % len(members)))
        assert picks.size == len(members)


def test_a_pick_costs_the_same_with_ten_thousand_replicas() -> None:
    def cost(replicas: int) -> float:
        picks = PickSet()
        for n in range(replicas):
            picks.add(Replica(EngineAddress(f"e{n}", 0, "h", 1), None, 0.0))  # type: ignore[arg-type]

        def turn() -> None:
            taken = [picks.pick() for _ in range(10)]
            for replica in taken:
                picks.count(replica, -1)

        return min(timeit.repeat(turn, number=300, repeat=5))

    assert cost(10_000) < 5 * cost(16)
