"""Every fault in both worlds: what it does, that it is recorded and counted, and that its healing takes it back."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from protocol.errors import (
    ActorDied,
    ConnectionLost,
    ConnectTimeout,
    NetworkError,
    Outcome,
    PlacementError,
    ReadTimeout,
)
from tests.contract.faulted import Counter, FaultedArm, Faults, kinds, ready_engine, request, told, until, until_ready

BUNDLE = ((("GPU", 1.0),),)


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.ray)])
def world(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> FaultedArm:
    if request.param == "real":
        request.getfixturevalue("ray_session")
    return FaultedArm(request.param, tmp_path)


class TestProcesses:
    def test_sigkill_of_an_engine_breaks_its_connections(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            call = asyncio.ensure_future(client.generate(request(1, 400)))
            await faults.busy("engine-0")
            kill = faults.inject("sigkill", "engine-0", must_hit={"in_flight": 1}, transient=True)
            with pytest.raises(ConnectionLost) as lost:
                await call
            assert lost.value.outcome is Outcome.UNKNOWN and kill.healed and kill.satisfied()
            with pytest.raises(faults.refused, match="dead already"):
                faults.inject("sigstop", "engine-0")
            with pytest.raises(faults.refused, match="no such process"):
                faults.inject("sigkill", "engine-7", transient=True)
            await _recorded_dead(backend)

        events = world.run(body)
        injected = told(events, "fault.injected", "name", "target", "observed")
        assert injected == [("sigkill", "engine-0", {"in_flight": 1})]
        assert told(events, "fault.healed", "hits", "satisfied") == [(0, True)]
        assert told([e for e in events if e.actor == "engine-0"], "actor.died", "reason") == [("killed",)]

    def test_sigkill_of_a_child_kills_the_engine_late(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            faults.inject("sigkill", "engine-0", part="scheduler", transient=True)
            began = asyncio.get_running_loop().time()
            with pytest.raises(ConnectionLost):
                await client.generate(request(1, 400))  # an engine on a busy machine may notice it after a short one
            assert 3 < asyncio.get_running_loop().time() - began < 20
            await _recorded_dead(backend)

        events = world.run(body)
        assert told([e for e in events if e.actor == "engine-0"], "actor.died", "reason") == [("exited",)]

    def test_sigkill_of_an_actor(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            call = counter.work(60)
            await faults.busy("counter")
            with pytest.raises(faults.refused, match="is no engine"):
                faults.inject("sigkill", "counter", part="scheduler", transient=True)
            faults.inject("sigkill", "counter", must_hit={"in_flight": 1}, transient=True)
            with pytest.raises(ActorDied):
                await call

        events = world.run(body)
        assert told(events, "fault.healed", "satisfied") == [(True,)]
        assert told([e for e in events if e.actor == "counter"], "actor.died", "reason") == [("killed",)]

    def test_sigterm_lets_an_engine_take_requests_until_none_is_left(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            first = asyncio.ensure_future(client.generate(request(1, 400)))
            await faults.busy("engine-0")
            term = faults.inject("sigterm", "engine-0", must_hit={"in_flight": 1}, transient=True)
            assert term.healed and term.satisfied()
            assert (await client.generate(request(2))).finish_reason == "length"  # taken all the same
            assert (await client.get("/ready"))[0] == 200 and (await client.get("/health"))[0] == 503
            assert (await first).completion_tokens == 400
            await _recorded_dead(backend)
            await backend.spawn(Counter, name="counter")
            with pytest.raises(faults.refused, match="is no engine"):
                faults.inject("sigterm", "counter", transient=True)

        events = world.run(body)
        of_engine = [event for event in events if event.actor == "engine-0"]
        assert told(of_engine, "actor.died", "reason") == [("exited",)]
        order = [event.kind for event in of_engine if event.kind in ("engine.leaving", "engine.accepted")]
        assert order == ["engine.accepted", "engine.leaving", "engine.accepted"]

    def test_restart_empty_forgets_everything(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            counter = await backend.spawn(Counter, name="counter")
            await counter.add()
            for name in ("engine-0", "counter"):
                faults.inject("restart_empty", name, transient=True)
            with pytest.raises(ActorDied):
                await counter.add()
            async with asyncio.timeout(20):
                await until_ready(client)
            assert await (await backend.lookup("counter")).value() == 0

        events = world.run(body)
        born = [event.actor for event in events if event.kind == "actor.spawned"]
        assert born.count("counter") == born.count("engine-0") == 2

    def test_sigstop_is_silent_and_sigcont_answers_what_waited(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            loop = asyncio.get_running_loop()
            client = await ready_engine(backend)
            counter = await backend.spawn(Counter, name="counter")
            began = loop.time()
            stops = [faults.inject("sigstop", name, for_s=3) for name in ("engine-0", "counter")]
            waiting = asyncio.ensure_future(client.generate(request(1)))
            adding = asyncio.ensure_future(_result(counter.add()))
            with pytest.raises(ReadTimeout) as timeout:
                await client.get("/ready", read_timeout_s=1)
            assert timeout.value.outcome is Outcome.UNKNOWN and not adding.done()
            assert (await waiting).completion_tokens == 20 and await adding == 1
            assert all(stop.healed for stop in stops) and loop.time() - began > 3

        events = world.run(body)
        for name in ("engine-0", "counter"):
            own = [event for event in events if event.actor == name]
            seen = kinds(own, "actor.stopped", "engine.accepted", "actor.continued")
            assert seen[:2] == ["actor.stopped", "actor.continued"]  # nothing is accepted in between

    def test_a_process_goes_on_when_the_last_of_its_stops_has_healed(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            counter = await backend.spawn(Counter, name="counter")
            for at, duration_s in ((1, 2), (2, 4)):
                for name in ("engine-0", "counter"):
                    faults.inject("sigstop", name, for_s=duration_s)
                await asyncio.sleep(at)
            answers = [asyncio.ensure_future(_result(call)) for call in (client.get("/ready"), counter.add())]
            await asyncio.sleep(1)  # the first ones have healed 2 s ago
            assert not any(answer.done() for answer in answers)
            async with asyncio.timeout(20):
                assert (await answers[0])[0] == 200 and await answers[1] == 1

        events = world.run(body)
        for name in ("engine-0", "counter"):
            own = [event for event in events if event.actor == name]
            assert kinds(own, "actor.stopped", "actor.continued") == ["actor.stopped", "actor.continued"]

    def test_a_wedge_outlasts_a_stop_that_it_overlaps(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            call = asyncio.ensure_future(client.generate(request(1, 400)))
            await faults.busy("engine-0")
            stop, wedge = faults.inject("sigstop", "engine-0"), faults.inject("wedge", "engine-0")
            faults.repair(stop)
            assert (await client.get("/ready", read_timeout_s=5))[0] == 200
            await asyncio.sleep(4)
            assert not call.done()
            faults.repair(wedge)
            assert (await call).completion_tokens == 400

        world.run(body)

    def test_slow_makes_everything_take_longer(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            usual = await _takes(client, 1, 2, 3)
            slow = faults.inject("slow", "engine-0", percent=400)
            assert 2 < await _takes(client, 4) / usual < 10
            slow.heal()
            assert await _takes(client, 5, 6, 7) / usual < 2.5

        world.run(body)

    def test_slowness_multiplies_and_ends_one_by_one(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            usual = await _takes(client, 1, 2, 3)
            much, little = (faults.inject("slow", "engine-0", percent=percent) for percent in (400, 200))
            assert 5 < await _takes(client, 4) / usual < 20
            faults.repair(little)
            assert 2 < await _takes(client, 5) / usual < 10
            faults.repair(much)
            assert await _takes(client, 6, 7, 8) / usual < 2.5

        world.run(body)

    def test_a_wedged_engine_is_alive_and_makes_no_progress(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            call = asyncio.ensure_future(client.generate(request(1, 400)))
            await faults.busy("engine-0")
            wedge = faults.inject("wedge", "engine-0", must_hit={"in_flight": 1})
            assert (await client.get("/ready", read_timeout_s=1))[0] == 200
            await asyncio.sleep(5)
            assert not call.done()
            faults.repair(wedge)
            assert (await call).completion_tokens == 400 and wedge.satisfied()
            await backend.spawn(Counter, name="counter")
            with pytest.raises(faults.refused, match="use sigstop"):
                faults.inject("wedge", "counter")

        world.run(body)


class TestLinks:
    def test_a_partition_holds_calls_and_the_repair_lets_them_go_in_order(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            cut = faults.partition("driver", "counter")
            view = counter.ordered()  # Ray starts calls of a plain handle in whatever order on a busy machine
            calls = [asyncio.ensure_future(_result(view.add())) for _ in range(3)]
            await asyncio.sleep(1)
            assert not any(call.done() for call in calls)
            faults.repair(cut)
            assert await asyncio.gather(*calls) == [1, 2, 3]
            assert await counter.add() == 4

        events = world.run(body)
        assert told(events, "fault.healed", "hits") == [(3,)]
        assert told(events, "call.fate", "fate", "source", "target") == [("held", "driver", "counter")] * 3

    def test_a_one_way_partition_lets_the_effect_happen(self, world: FaultedArm) -> None:
        """Both processes are on one node here, so that its link to itself is cut in both directions."""

        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            cut = faults.partition("engine-0", "driver", one_way=True)
            with pytest.raises(ConnectTimeout) as timeout:
                await client.generate(request(1), connect_timeout_s=1, read_timeout_s=60)
            assert timeout.value.outcome is Outcome.NOT_DONE
            faults.repair(cut)
            await asyncio.sleep(1)
            assert (await client.generate(request(2))).completion_tokens == 20

        events = world.run(body)
        assert told(events, "engine.accepted", "request") == [("r-0000002",)]

    def test_latency_is_added_and_taken_off(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            loop = asyncio.get_running_loop()
            client = await ready_engine(backend)
            counter = await backend.spawn(Counter, name="counter")

            async def takes(call: Any) -> float:
                began = loop.time()
                await call()
                return loop.time() - began

            def page() -> Any:
                return client.get("/ready")

            latency = faults.inject("latency", link=("driver", "counter"), extra_s=0.5)
            for call in (counter.add, page):  # the link of the node to itself: there and back
                assert 0.95 < await takes(call) < 3
            faults.repair(latency)
            for call in (counter.add, page):
                assert await takes(call) < 0.8

        events = world.run(body)
        assert told(events, "fault.hit", "count") == [(1,), (2,)], "a call is one hit, though both of its ways are slow"
        assert [what.split()[:2] for (what,) in told(events, "fault.hit", "what")] == [
            ["slowed", "add"], ["slowed", "/ready"]
        ]  # fmt: skip

    def test_latency_moves_a_stream_of_an_actor_and_does_not_stretch_it(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            loop = asyncio.get_running_loop()
            counter = await backend.spawn(Counter, name="counter")
            latency = faults.inject("latency", link=("driver", "counter"), extra_s=0.5)
            began = loop.time()
            assert [number async for number in counter.up_to(60)] == list(range(60))
            assert 0.95 < loop.time() - began < 15  # one item after the other would take 30
            faults.repair(latency)

        events = world.run(body)
        assert told(events, "fault.healed", "hits") == [(1,)], "of one call, though each of its items is late"

    def test_what_comes_when_latency_is_taken_off_overtakes_nothing(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            latency = faults.inject("latency", link=("driver", "counter"), extra_s=1.0)
            items = counter.ticks(80, 0.05)
            first = await anext(items)
            faults.repair(latency)  # some twenty are under way; those that follow are as fast as ever
            assert [first, *[number async for number in items]] == list(range(80))

        world.run(body)

    def test_latency_that_slows_nothing_has_hit_nothing(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            latency = faults.inject("latency", link=("driver", "counter"), extra_s=0.5, must_hit={"hits": 1})
            await asyncio.sleep(0.5)
            assert latency.hits == 0 and not latency.satisfied()
            await counter.add()
            assert latency.hits == 1 and latency.satisfied()

        world.run(body)


class TestCalls:
    def meet(self, world: FaultedArm, name: str, **params: Any) -> tuple[str, int]:
        """The end of one call that meets the fault, and how often its effect happened."""
        got: list[Any] = []

        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            link = ("driver", "counter")
            fault = faults.inject(name, link=link, must_hit={"hits": 1}, method="add", count=1, **params)
            try:
                async with asyncio.timeout(2):
                    await counter.add()
                got.append("done")
            except TimeoutError:
                got.append("timeout")
            except NetworkError as error:
                got.append(type(error).__name__)
            await until(lambda: fault.healed)
            await asyncio.sleep(2)
            assert fault.satisfied()
            got.append(await counter.value())

        events = world.run(body)
        assert len(told(events, "call.fate", "fate")) == 1
        assert told(events, "fault.hit", "count") == told(events, "fault.healed", "hits") == [(1,)]
        ended = [call for (call,) in told(events, "call.done", "call")]
        assert len(ended) == len(set(ended))
        return got[0], got[1]

    def test_a_lost_request_has_no_effect(self, world: FaultedArm) -> None:
        assert self.meet(world, "request_lost") == ("timeout", 0)

    def test_a_lost_reply_has_had_its_effect(self, world: FaultedArm) -> None:
        assert self.meet(world, "reply_lost") == ("timeout", 1)

    def test_a_delayed_request_arrives(self, world: FaultedArm) -> None:
        assert self.meet(world, "delayed_delivery", delay_s=1.0) == ("done", 1)

    def test_an_error_now_and_the_delivery_later(self, world: FaultedArm) -> None:
        assert self.meet(world, "delayed_delivery", delay_s=1.0, error_now=True) == ("ConnectionLost", 1)

    def test_a_duplicate_has_its_effect_twice(self, world: FaultedArm) -> None:
        assert self.meet(world, "duplicate", delay_s=0.1) == ("done", 2)

    def test_the_death_of_the_callee_ends_the_wait_for_what_was_lost(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            for name in ("request_lost", "reply_lost"):
                faults.inject(name, link=("driver", "counter"), method="add", count=1)
            first, second = counter.add(), counter.add()
            await asyncio.sleep(1)
            await backend.kill(counter)
            for call in (first, second):
                with pytest.raises(ActorDied):
                    await call

        world.run(body)

    def test_ordered_calls_go_on_after_a_lost_one_and_take_no_duplicate(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            view = counter.ordered()
            faults.inject("request_lost", link=("driver", "counter"), method="add", count=1)
            view.add()
            assert await view.add() == 1
            faults.inject("duplicate", link=("driver", "counter"), method="add", count=1, delay_s=0.1)
            assert await view.add() == 2
            await asyncio.sleep(1)
            assert await view.add() == 3

        world.run(body)

    def test_streams_meet_what_calls_meet(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            for name in ("delayed_delivery", "duplicate"):
                faults.inject(name, link=("driver", "counter"), method="up_to", count=1, delay_s=0.5)
                assert [number async for number in counter.up_to(3)] == [0, 1, 2]
            faults.inject("reply_lost", link=("driver", "counter"), method="up_to", count=1)
            items = counter.up_to(2)
            assert [await anext(items), await anext(items)] == [0, 1]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await anext(items)

        world.run(body)


class TestHttp:
    @pytest.mark.parametrize(
        ("name", "params", "error", "posts"),
        [
            ("connect_timeout", {}, ConnectTimeout, 0),
            ("request_lost", {}, ReadTimeout, 0),
            ("read_timeout", {}, ReadTimeout, 1),
            ("reply_lost", {}, ReadTimeout, 1),
            ("delayed_delivery", {"delay_s": 0.5}, None, 1),
            (
                "delayed_delivery",
                {"delay_s": 2.0},
                None,
                1,
            ),  # more than the connect time-out, which is not what it meets
            ("delayed_delivery", {"delay_s": 4.0}, ReadTimeout, 1),
            ("delayed_delivery", {"delay_s": 1.0, "error_now": True}, ConnectionLost, 1),
            ("duplicate", {"delay_s": 0.5}, None, 2),
        ],
    )
    def test_every_fate(
        self, world: FaultedArm, name: str, params: dict[str, Any], error: type[NetworkError] | None, posts: int
    ) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            fault = faults.inject(
                name, link=("driver", "engine-*"), must_hit={"hits": 1}, method="/flush_cache", count=1, **params
            )
            assert (await client.get("/ready"))[0] == 200  # another route
            if error is None:
                assert (await _flush(client)).status == 200
            else:
                with pytest.raises(error):
                    await _flush(client)
            await until(lambda: fault.healed)
            await asyncio.sleep(1.5)
            assert (await _flush(client)).status == 200  # the late one has arrived by now

        events = world.run(body)
        assert kinds(events, "engine.post") == ["engine.post"] * (posts + 1)
        assert len(told(events, "call.fate", "fate")) == 1
        assert told(events, "fault.healed", "hits", "satisfied") == [(1, True)]

    def test_a_partition_is_met_by_the_handshake(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            faults.inject("partition", link=("driver", "engine-0"), for_s=1)
            assert (await client.generate(request(1), connect_timeout_s=5)).completion_tokens == 20

        assert told(world.run(body), "fault.healed", "hits") == [(1,)]

    def test_a_partition_holds_a_stream_that_is_under_way_and_the_engine_goes_on(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counts: list[int] = []
            reading = await _stream_under_way(backend, faults, counts)
            cut = faults.partition("driver", "engine-0")
            await asyncio.sleep(0.5)  # what was on its way has arrived
            before = list(counts)
            await asyncio.sleep(6)
            assert counts == before and before[-1] < 400 and not reading.done()
            faults.repair(cut)
            await reading
            assert counts == sorted(counts) and counts[-1] == 400

        events = [event for event in world.run(body) if event.data.get("fault") != 1]
        assert kinds(events, "engine.finished", "fault.healed") == ["engine.finished", "fault.healed"]
        held = told(events, "call.fate", "fate", "source", "target")
        assert set(held) == {("held", "engine-0", "driver")}
        assert told(events, "fault.healed", "hits") == [(len(held),)]

    def test_latency_moves_a_stream_that_is_under_way_and_does_not_stretch_it(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counts: list[int] = []
            reading = await _stream_under_way(backend, faults, counts)
            faults.inject("latency", link=("engine-0", "driver"), extra_s=2.0)
            await asyncio.sleep(0.5)
            before = list(counts)
            await asyncio.sleep(0.5)
            assert counts == before and before[-1] < 400
            async with asyncio.timeout(20):  # one event after the other would take minutes
                await reading
            assert counts == sorted(counts) and counts[-1] == 400

        events = [event for event in world.run(body) if event.data.get("fault") != 1]
        assert told(events, "fault.healed", "hits") == [(1,)], "of one call, though each of its events is late"


class TestStorage:
    def test_a_slow_export_takes_its_time(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            loop = asyncio.get_running_loop()
            counter = await backend.spawn(Counter, name="counter")
            slow = faults.inject("slow_export", path="exports", percent=1000)
            if hasattr(faults.inner.site, "bandwidth"):
                slow.heal()
                faults.inner.site.bandwidth = 1e9  # the simulated storage's own
                slow = faults.inject("slow_export", path="exports", percent=1000)
            began = loop.time()
            await counter.write("exports/v1/shard-0", b"weights", 100_000_000)
            assert 0.9 < loop.time() - began < 4
            began = loop.time()
            await counter.write("other/v1/shard-0", b"weights")
            assert loop.time() - began < 0.9 and slow.hits == 1
            assert await counter.read("exports/v1/shard-0") == b"weights" and slow.hits == 2

        world.run(body)

    def test_a_torn_export_is_told_to_have_gone_well(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            torn = faults.inject("torn_export", path="exports", fraction=0.5, count=1, must_hit={"hits": 1})
            for name in ("torn", "whole"):
                await counter.write(f"exports/{name}", b"12345678", 800)
            await until(lambda: torn.healed)
            assert await counter.read("exports/torn") == b"1234" and await counter.read("exports/whole") == b"12345678"

        events = world.run(body)
        assert told(events, "storage.torn", "path", "size", "writer") == [("exports/torn", 400, "counter")]
        assert told(events, "storage.written", "path") == [("exports/whole",)]
        assert told(events, "fault.healed", "hits", "satisfied") == [(1, True)]

    def test_a_full_disk_takes_what_fits(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            writers = [await backend.spawn(Counter, name=f"writer-{n}") for n in range(2)]
            full = faults.inject("disk_full", path="exports", free_bytes=12)
            await writers[0].write("exports/a", b"12345678")
            with pytest.raises(Exception, match="space") as error:
                await writers[1].write("exports/b", b"12345678")
            assert type(error.value).__name__ == "DiskFull"
            assert await writers[0].read("exports/b") == b"1234"
            await writers[0].write("elsewhere", b"1")
            faults.repair(full)
            await writers[1].write("exports/b", b"12345678")

        events = world.run(body)
        assert told(events, "storage.torn", "path", "size") == [("exports/b", 4)]
        assert told(events, "storage.failed", "path", "op", "error") == [("exports/b", "write", "DiskFull")]


class TestPages:
    def pages(self, world: FaultedArm, name: str) -> tuple[list[tuple[int, str]], tuple[int, str]]:
        under: list[tuple[int, str]] = []
        after: list[tuple[int, str]] = []

        async def body(backend: Any, faults: Faults) -> None:
            client = await ready_engine(backend)
            fault = faults.inject(name, "engine-0", must_hit={"hits": 2})
            for number in range(2):
                under.append(await client.get("/metrics"))
                await client.generate(request(number))
            faults.repair(fault)
            assert fault.satisfied() and fault.hits == 2
            after.append(await client.get("/metrics"))

        world.run(body)
        return under, after[0]

    def test_missing(self, world: FaultedArm) -> None:
        under, after = self.pages(world, "metrics_missing")
        assert [status for status, _ in under] == [404, 404] and after[0] == 200

    def test_stale(self, world: FaultedArm) -> None:
        under, after = self.pages(world, "metrics_stale")
        assert under[0] == under[1] != after

    def test_nan(self, world: FaultedArm) -> None:
        under, after = self.pages(world, "metrics_nan")
        values = [line.rsplit(" ", 1)[1] for line in under[0][1].splitlines() if line and not line.startswith("#")]
        assert set(values) == {"NaN"} and "NaN" not in after[1]


class TestClocks:
    def test_clock_skew_steps_the_wall_clock_of_one_node(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            counter = await backend.spawn(Counter, name="counter")
            wall, monotonic = backend.wall_time(), asyncio.get_running_loop().time()
            with pytest.raises(faults.refused, match="no such node"):
                faults.inject("clock_skew", "node-9", step_s=1.0)
            skew = faults.inject("clock_skew", backend.node, step_s=-3600.0, must_hit={"hits": 1})
            for now in (backend.wall_time(), await counter.wall_time()):
                assert now - wall == pytest.approx(-3600, abs=2)
            assert asyncio.get_running_loop().time() - monotonic < 2
            faults.repair(skew)
            assert await counter.wall_time() == pytest.approx(wall, abs=4) and skew.satisfied()

        world.run(body)


class TestPlacement:
    def test_a_state_of_a_group_is_told_once_whoever_looks(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            groups = backend.placement_groups
            counter = await backend.spawn(Counter, name="counter")
            group = await groups.create(BUNDLE, strategy="PACK", name="group")
            await groups.wait_created(group, 10.0)
            assert await counter.groups() == {group: "CREATED"}
            await groups.remove(group)
            while (await groups.table())[group] != "REMOVED":
                await asyncio.sleep(0.01)
            assert await counter.groups() == {group: "REMOVED"}

        states = told(world.run(body), "placement.state", "state")
        assert states == [("PENDING",), ("CREATED",), ("REMOVED",)]

    def test_a_stuck_group_stays_pending_until_it_is_healed(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            groups = backend.placement_groups
            before = await groups.create(BUNDLE, strategy="PACK", name="before")
            await groups.wait_created(before, 5)
            fault = faults.inject("placement_stuck", must_hit={"hits": 2})
            stuck = [await groups.create(BUNDLE, strategy="PACK", name=f"g-{n}") for n in range(2)]
            with pytest.raises(PlacementError):
                await groups.wait_created(stuck[0], 1)
            await groups.remove(stuck[1])
            await asyncio.sleep(0.5)
            assert await groups.table() == {before: "CREATED", stuck[0]: "PENDING", stuck[1]: "REMOVED"}
            faults.repair(fault)
            assert fault.satisfied()
            await groups.wait_created(stuck[0], 10)
            assert await groups.table() == {before: "CREATED", stuck[0]: "CREATED", stuck[1]: "REMOVED"}

        events = world.run(body)
        stuck = told(events, "placement.state", "group", "state")
        assert len(stuck) == len(set(stuck))

    def test_a_failed_removal_leaves_the_group_and_the_next_one_works(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            groups = backend.placement_groups
            group = await groups.create(BUNDLE, strategy="PACK", name="g")
            await groups.wait_created(group, 5)
            fault = faults.inject("removal_fails")
            for _ in range(2):
                await groups.remove(group)
            await asyncio.sleep(1)
            assert (await groups.table())[group] == "CREATED" and fault.hits == 1
            faults.repair(fault)
            await groups.remove(group)
            await asyncio.sleep(1)
            assert (await groups.table())[group] == "REMOVED"

        world.run(body)

    def test_a_refused_removal_raises_and_is_not_asked_for(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            groups = backend.placement_groups
            group = await groups.create(BUNDLE, strategy="PACK", name="g")
            await groups.wait_created(group, 5)
            fault = faults.inject("removal_refused")
            for _ in range(2):
                with pytest.raises(PlacementError, match="refused"):
                    await groups.remove(group)
            assert fault.hits == 1
            faults.repair(fault)
            await groups.remove(group)
            await asyncio.sleep(1)
            assert (await groups.table())[group] == "REMOVED"

        events = world.run(body)
        assert len(told(events, "placement.removal_asked", "group")) == 1

    def test_a_late_removal_happens_late(self, world: FaultedArm) -> None:
        async def body(backend: Any, faults: Faults) -> None:
            groups = backend.placement_groups
            group = await groups.create(BUNDLE, strategy="PACK", name="g")
            await groups.wait_created(group, 5)
            fault = faults.inject("removal_fails", late_s=3.0)
            await groups.remove(group)
            await asyncio.sleep(1)
            faults.repair(fault)
            assert (await groups.table())[group] == "CREATED"
            await asyncio.sleep(3)
            assert (await groups.table())[group] == "REMOVED"

        world.run(body)


async def _result(call: Any) -> Any:
    return await call


async def _takes(client: Any, *numbers: int) -> float:
    """Seconds of a generation; of several the shortest, for a busy machine makes them longer."""
    loop = asyncio.get_running_loop()
    times = []
    for number in numbers:
        began = loop.time()
        await client.generate(request(number, 300))
        times.append(loop.time() - began)
    return min(times)


async def _stream_under_way(backend: Any, faults: Faults, counts: list[int]) -> asyncio.Future[None]:
    """A stream of 400 tokens of which the first have arrived; ``counts`` grows as the others do.

    Its engine is slow, by the first fault, so that there are others whatever else the machine does.
    """
    client = await ready_engine(backend)
    faults.inject("slow", "engine-0", percent=400)

    async def read() -> None:
        async for count in client.stream(request(1, 400)):
            counts.append(count)

    reading = asyncio.ensure_future(read())
    await until(lambda: counts)
    return reading


async def _recorded_dead(backend: Any, engine: str = "engine-0") -> None:
    """Wait until whoever owns the engine has recorded its death: its clients may know of it sooner."""
    async with asyncio.timeout(20):
        while await backend.engines.alive(engine):
            await asyncio.sleep(0.05)


async def _flush(client: Any) -> Any:
    return await client.post("/flush_cache", {}, connect_timeout_s=1, read_timeout_s=3)
