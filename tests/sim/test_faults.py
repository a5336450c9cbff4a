"""Every fault: what it does, that it is recorded, and that its healing takes it back. Storage faults: test_storage."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import (
    ActorDied,
    ConnectionLost,
    ConnectionRefused,
    ConnectTimeout,
    NetworkError,
    Outcome,
    PlacementError,
    ReadTimeout,
)
from protocol.faulting import FaultRefused, Target
from protocol.messages import EngineAddress, GenerateRequest
from protocol.ports import EngineSpec, Placement
from scenarios.faults import FAULTS
from sim.fault_kinds import IMPLEMENTED
from sim.simulation import Simulation

BUNDLE = ((("GPU", 1.0),),)


def run(body: Callable[[Any, Simulation], Any], **options: Any) -> list[Any]:
    events: list[Any] = []
    with Simulation(sinks=[events.append], **options) as simulation:
        simulation.run(lambda backend: body(backend, simulation), time_limit_s=3600)
        simulation.faults.heal_all()
        simulation.world.flush()
    return events


def kinds(events: list[Any], *wanted: str) -> list[str]:
    return [e.kind for e in events if e.kind in wanted]


async def engine(backend: Any, name: str = "engine-0", **where: Any) -> tuple[EngineAddress, Any]:
    """A replica that is ready."""
    address = await backend.engines.launch(EngineSpec(profile="tiny-cpu"), name=name, **where)
    client = backend.engines.client(address)
    while True:
        try:
            if (await client.get("/ready", connect_timeout_s=1, read_timeout_s=1))[0] == 200:
                return address, client
        except NetworkError:
            pass
        await asyncio.sleep(0.2)


def request(number: int, tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(f"r-{number:07d}", 50, tokens)


class Counter:
    """An actor with an effect that can be counted."""

    def __init__(self) -> None:
        self.count = 0

    async def add(self) -> int:
        self.count += 1
        return self.count

    async def value(self) -> int:
        return self.count


async def times(client: Any, counter: Any, number: int) -> tuple[float, float]:
    """Seconds of a generation, and of a hundred calls of an actor."""
    loop = asyncio.get_running_loop()
    before = loop.time()
    await client.generate(request(number, 200))
    middle = loop.time()
    for _ in range(100):
        await counter.add()
    return middle - before, loop.time() - middle


def test_every_declared_fault_is_implemented_and_no_other() -> None:
    assert sorted(IMPLEMENTED) == sorted(name for name, spec in FAULTS.items() if "sim" in spec.worlds)


class TestProcesses:
    def test_sigkill_breaks_connections_and_frees_the_port_and_the_gpu(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            address, client = await engine(backend)
            call = asyncio.ensure_future(client.generate(request(1, 400)))
            await asyncio.sleep(0.05)
            fault = simulation.faults.inject(
                "sigkill", Target(name="engine-0"), {}, must_hit={"in_flight": {"at_least": 1}}, transient=True
            )
            assert fault.satisfied()
            with pytest.raises(ConnectionLost) as lost:
                await call
            assert lost.value.outcome is Outcome.UNKNOWN
            with pytest.raises(ConnectionRefused) as refused:
                await client.generate(request(2))
            assert refused.value.outcome is Outcome.NOT_DONE
            again, _ = await engine(backend)
            assert (again.incarnation, again.port) == (address.incarnation + 1, address.port)

        events = run(body, gpus_per_node=1)
        assert kinds(events, "fault.injected", "actor.died", "fault.healed") == [
            "fault.injected", "actor.died", "fault.healed",
        ]  # fmt: skip

    @pytest.mark.parametrize(("part", "silence_s"), [("scheduler", 5.9), ("detokenizer", 66.0)])
    def test_sigkill_of_a_child_is_silence_first_and_the_death_of_the_whole_engine_then(
        self, part: str, silence_s: float
    ) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            call = asyncio.ensure_future(client.generate(request(1, 400)))
            await asyncio.sleep(0.05)
            began = asyncio.get_running_loop().time()
            simulation.faults.inject("sigkill", Target(name="engine-0"), {"part": part}, must_hit={}, transient=True)
            assert await backend.engines.alive("engine-0")
            with pytest.raises(ConnectionLost):
                await call
            assert asyncio.get_running_loop().time() - began == pytest.approx(silence_s, abs=0.1)
            assert not await backend.engines.alive("engine-0")
            actor = await backend.spawn(Counter, name="counter")
            with pytest.raises(FaultRefused, match="no engine"):
                simulation.faults.inject("sigkill", Target(name=actor.name), {"part": part}, must_hit={})

        run(body)

    def test_a_fault_that_meets_nothing_is_not_satisfied(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            await engine(backend)
            fault = simulation.faults.inject(
                "sigkill", Target(name="engine-0"), {}, must_hit={"in_flight": {"at_least": 3}}, transient=True
            )
            assert not fault.satisfied()

        assert [e.data["satisfied"] for e in run(body) if e.kind == "fault.healed"] == [False]

    def test_a_dead_or_unknown_target_is_refused_before_any_effect(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            with pytest.raises(FaultRefused, match="no such process"):
                simulation.faults.inject("sigstop", Target(name="nobody"), {}, must_hit={})
            await engine(backend)
            simulation.faults.inject("sigkill", Target(name="engine-0"), {}, must_hit={}, transient=True)
            with pytest.raises(FaultRefused, match="dead already"):
                simulation.faults.inject("sigstop", Target(name="engine-0"), {}, must_hit={})

        assert kinds(run(body), "fault.injected") == ["fault.injected"]

    def test_a_kill_may_have_to_meet_the_process_alone_and_one_of_a_link_never_does(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            await engine(backend)
            alive, faults = {"processes": {"at_least": 1}}, simulation.faults
            lost = faults.inject("request_lost", Target(), {"method": "*", "chance": 1.0}, must_hit=alive)
            assert not lost.satisfied()
            lost.heal()
            busy = faults.inject(
                "slow", Target(name="engine-0"), {"percent": 200}, must_hit={"in_flight": {"at_least": 1}}
            )
            assert not busy.satisfied() and busy.observed == {"in_flight": 0}
            killed = faults.inject("sigkill", Target(name="engine-0"), {}, must_hit=alive, transient=True)
            assert killed.satisfied() and killed.observed == {"in_flight": 0, "processes": 1}

        run(body)

    def test_restart_empty_of_an_engine_and_of_an_actor(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            address, _ = await engine(backend)
            counter = await backend.spawn(Counter, name="counter")
            await counter.add()
            for name in ("engine-0", "counter"):
                simulation.faults.inject("restart_empty", Target(name=name), {}, must_hit={}, transient=True)
            with pytest.raises(ActorDied):
                await counter.add()
            await asyncio.sleep(1)
            assert await (await backend.lookup("counter")).value() == 0
            assert simulation.engines.processes["engine-0"].incarnation == address.incarnation + 1

        run(body)

    @pytest.mark.parametrize("where", ["placed", "anywhere", "there"])
    def test_a_replica_that_could_not_start_again_is_not_restarted(self, where: str) -> None:
        """Its node has been declared dead, and nobody else has room; its process acts on, and the fault is refused."""

        async def body(backend: Any, simulation: Simulation) -> None:
            groups = backend.placement_groups
            filler = [await engine(backend, f"filler-{number}", node="node-0") for number in range(2)]
            if where == "placed":
                group = await groups.create(BUNDLE, strategy="PACK", name="g")
                await groups.wait_created(group, 5)
                await engine(backend, placement=Placement(group))
            else:
                await engine(backend, node=None if where == "anywhere" else "node-1")
            process = simulation.engines.processes["engine-0"]
            assert process.node == "node-1"
            await backend.spawn(Counter, name="counter", node="node-1")
            simulation.faults.inject("node_loss", Target(name="node-1"), {"zombie": True}, must_hit={})
            for name in ("engine-0", "counter"):
                with pytest.raises(FaultRefused, match=f"{name} could not start again"):
                    simulation.faults.inject("restart_empty", Target(name=name), {}, must_hit={}, transient=True)
            with pytest.raises(FaultRefused, match="driver could not start again"):
                simulation.faults.inject("restart_empty", Target(name="driver"), {}, must_hit={}, transient=True)
            assert process.alive and len(simulation.faults.active) == 1
            if where == "anywhere":
                await backend.engines.terminate(filler[0][0].name)
                simulation.faults.inject("restart_empty", Target(name="engine-0"), {}, must_hit={}, transient=True)
                assert simulation.engines.processes["engine-0"].node == "node-0"

        run(body, nodes=2, gpus_per_node=2)

    def test_what_is_lost_while_its_restart_is_told_is_half_restarted(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            await engine(backend, node="node-1")

            def lose(event: Any) -> None:
                off()
                simulation.cluster.lose("node-1", zombie=True)

            off = simulation.world.hook("fault.injected", lose)
            simulation.faults.inject("restart_empty", Target(name="engine-0"), {}, must_hit={}, transient=True)

        events = run(body, nodes=2)
        anomalies = [event.data for event in events if event.kind == "run.anomaly"]
        assert [anomaly["what"] for anomaly in anomalies] == ["fault_half_done"]
        assert "restart of engine-0: PlacementError" in anomalies[0]["detail"]
        assert kinds(events, "fault.healed") == ["fault.healed"]

    def test_overlapping_stops_end_with_the_last_one(self) -> None:
        """One from 1 s to 5 s, one from 4 s to 8 s: nothing is answered before 8 s."""

        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            _, client = await engine(backend)
            counter = await backend.spawn(Counter, name="counter")
            began = loop.time()
            for at_s in (1, 4):
                await asyncio.sleep(began + at_s - loop.time())
                for name in ("engine-0", "counter"):
                    simulation.faults.inject("sigstop", Target(name=name), {}, must_hit={}, for_s=4)
            adding = asyncio.ensure_future(_result(counter.add()))
            assert (await client.get("/ready"))[0] == 200 and await adding == 1
            assert 8 < loop.time() - began < 8.1

        events = run(body)
        stopped = [(event.actor, event.kind) for event in events if event.kind in ("actor.stopped", "actor.continued")]
        assert sorted(stopped) == [
            (name, f"actor.{what}") for name in ("counter", "engine-0") for what in ("continued", "stopped")
        ]

    @pytest.mark.parametrize("first", [0, 1])
    def test_overlapping_slowness_multiplies_and_ends_one_by_one(self, first: int) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            counter = await backend.spawn(Counter, name="counter")
            usual = await times(client, counter, 1)
            percents = (400, 200)
            faults = [
                [
                    simulation.faults.inject("slow", Target(name=name), {"percent": percent}, must_hit={})
                    for name in ("engine-0", "counter")
                ]
                for percent in percents
            ]
            for number, factor in ((2, 8), (3, percents[1 - first] // 100), (4, 1)):
                taken = await times(client, counter, number)
                for took, took_usually in zip(taken, usual, strict=True):
                    assert 0.7 * factor < took / took_usually < 1.05 * factor
                if number < 4:
                    for fault in faults[first if number == 2 else 1 - first]:
                        fault.heal()

        run(body)

    def test_sigstop_is_silent_and_sigcont_answers_what_waited(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            fault = simulation.faults.inject("sigstop", Target(name="engine-0"), {}, must_hit={}, for_s=5)
            waiting = asyncio.ensure_future(client.generate(request(1)))
            with pytest.raises(ReadTimeout) as timeout:
                await client.get("/ready", read_timeout_s=1)
            assert timeout.value.outcome is Outcome.UNKNOWN
            assert (await waiting).completion_tokens == 20
            assert fault.healed and asyncio.get_running_loop().time() > 5

        assert kinds(run(body), "actor.stopped", "actor.continued") == ["actor.stopped", "actor.continued"]

    def test_slow_doubles_the_time_of_engines_and_actors(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            counter = await backend.spawn(Counter, name="counter")
            usual = await times(client, counter, 1)
            faults = [
                simulation.faults.inject("slow", Target(name=name), {"percent": 400}, must_hit={})
                for name in ("engine-0", "counter")
            ]
            slow = await times(client, counter, 2)
            for fault in faults:
                fault.heal()
            healed = await times(client, counter, 3)
            assert 3.5 < slow[0] / usual[0] < 4.1 and 3 < slow[1] / usual[1] < 4.1
            assert healed == pytest.approx(usual, rel=1e-3)

        run(body)

    def test_a_wedged_engine_is_alive_and_makes_no_progress(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            call = asyncio.ensure_future(client.generate(request(1, 200)))
            await asyncio.sleep(0.05)
            fault = simulation.faults.inject(
                "wedge", Target(name="engine-0"), {}, must_hit={"in_flight": {"at_least": 1}}
            )
            assert (await client.get("/ready", read_timeout_s=1))[0] == 200
            await asyncio.sleep(30)
            assert not call.done()
            fault.heal()
            assert (await call).completion_tokens == 200

        run(body)

    def test_wedge_of_an_actor_is_refused(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            await backend.spawn(Counter, name="counter")
            with pytest.raises(FaultRefused, match="use sigstop"):
                simulation.faults.inject("wedge", Target(name="counter"), {}, must_hit={})

        run(body)


class TestLinks:
    LINK = Target(source="node-0", destination="node-1")

    def test_a_partition_holds_messages_and_the_repair_lets_them_go(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            counter = await backend.spawn(Counter, name="counter", node="node-1")
            fault = simulation.faults.inject("partition", self.LINK, {}, must_hit={"hits": {"at_least": 1}}, for_s=5)
            assert await counter.add() == 1
            assert fault.healed and fault.satisfied()

        run(body, nodes=2)

    def test_a_connection_over_a_partition_times_out_and_nothing_was_done(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend, node="node-1")
            fault = simulation.faults.inject("partition", self.LINK, {}, must_hit={})
            with pytest.raises(ConnectTimeout) as timeout:
                await client.generate(request(1), connect_timeout_s=2, read_timeout_s=60)
            assert timeout.value.outcome is Outcome.NOT_DONE
            fault.heal()
            await asyncio.sleep(5)

        assert "engine.accepted" not in kinds(run(body, nodes=2), "engine.accepted")

    def test_a_one_way_partition_lets_the_effect_happen(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend, node="node-1")
            simulation.faults.inject(
                "partition", Target(source="node-1", destination="node-0"), {"one_way": True}, must_hit={}
            )
            with pytest.raises(ReadTimeout):
                await client.generate(request(1), connect_timeout_s=2, read_timeout_s=10)

        assert kinds(run(body, nodes=2), "engine.accepted", "engine.finished") == ["engine.accepted", "engine.finished"]

    @pytest.mark.parametrize(("name", "params"), [("partition", {}), ("latency", {"extra_s": 1.0})])
    def test_an_end_that_is_nothing_is_refused_before_any_effect(self, name: str, params: dict[str, Any]) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            for target in (Target(destination="node-0"), Target(source="node-0", destination="engine-7")):
                with pytest.raises(FaultRefused, match="neither a node nor a process"):
                    simulation.faults.inject(name, target, params, must_hit={}, for_s=1)
            assert not simulation.faults.active

        assert kinds(run(body), "fault.injected", "fault.healed") == []

    def test_what_was_never_done_is_not_taken_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(self: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(IMPLEMENTED["partition"], "inject", fails)

        async def body(backend: Any, simulation: Simulation) -> None:
            with pytest.raises(RuntimeError, match="a defect"):
                simulation.faults.inject("partition", Target(source="node-0", destination="node-0"), {}, must_hit={})

        assert kinds(run(body), "fault.injected", "fault.healed") == ["fault.injected", "fault.healed"]

    def test_latency_is_added_and_taken_off(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            counter = await backend.spawn(Counter, name="counter", node="node-1")

            async def takes() -> float:
                before = loop.time()
                await counter.add()
                return loop.time() - before

            usual = await takes()
            fault = simulation.faults.inject("latency", self.LINK, {"extra_s": 0.5}, must_hit={})
            assert await takes() == pytest.approx(usual + 0.5, abs=1e-6)
            fault.heal()
            assert await takes() == pytest.approx(usual, abs=1e-6)

        run(body, nodes=2)


class TestMessages:
    def counts(self, name: str, params: dict[str, Any], timeout_s: float = 5.0) -> tuple[str, int]:
        """Outcome of one call under the fault, and how often its effect happened."""
        got: list[Any] = []

        async def body(backend: Any, simulation: Simulation) -> None:
            counter = await backend.spawn(Counter, name="counter")
            fault = simulation.faults.inject(
                name, Target(source="driver", destination="counter"), {"method": "add", "count": 1, **params},
                must_hit={"hits": {"at_least": 1}},
            )  # fmt: skip
            try:
                async with asyncio.timeout(timeout_s):
                    await counter.add()
                got.append("done")
            except TimeoutError:
                got.append("timeout")
            except NetworkError as error:
                got.append(type(error).__name__)
            await asyncio.sleep(5)
            assert fault.satisfied()
            got.append(await counter.value())

        events = run(body)
        assert len(kinds(events, "call.fate")) == 1
        return got[0], got[1]

    def test_a_lost_request_has_no_effect(self) -> None:
        assert self.counts("request_lost", {}) == ("timeout", 0)

    def test_a_lost_reply_has_had_its_effect(self) -> None:
        assert self.counts("reply_lost", {}) == ("timeout", 1)

    def test_a_delayed_request_arrives(self) -> None:
        assert self.counts("delayed_delivery", {"delay_s": 2.0}) == ("done", 1)

    def test_an_error_now_and_the_delivery_later(self) -> None:
        outcome, count = self.counts("delayed_delivery", {"delay_s": 2.0, "error_now": True})
        assert outcome != "done" and count == 1

    def test_a_duplicate_has_its_effect_twice(self) -> None:
        assert self.counts("duplicate", {"delay_s": 0.1}) == ("done", 2)

    @pytest.mark.parametrize(
        ("name", "error", "posts"), [("connect_timeout", ConnectTimeout, 0), ("read_timeout", ReadTimeout, 1)]
    )
    def test_http_timeouts(self, name: str, error: type[NetworkError], posts: int) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            simulation.faults.inject(
                name, Target(destination="engine-0"), {"method": "/flush_cache", "count": 1},
                must_hit={"hits": {"at_least": 1}},
            )  # fmt: skip
            with pytest.raises(error):
                await client.post("/flush_cache", {}, connect_timeout_s=1, read_timeout_s=3)
            assert (await client.post("/flush_cache", {}, connect_timeout_s=1, read_timeout_s=3)).status == 200

        assert len(kinds(run(body), "engine.post")) == posts + 1


class TestReadTimeouts:
    """They begin with the connection, as aiohttp's ``sock_read`` does, however long that takes to come about."""

    @pytest.mark.parametrize("cut_s", [0, 3, 8])
    def test_of_a_connection_that_was_held_up(self, cut_s: float) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            _, client = await engine(backend, node="node-1")
            if cut_s:
                simulation.faults.inject("partition", TestLinks.LINK, {}, must_hit={}, for_s=cut_s)
            simulation.faults.inject("reply_lost", Target(destination="engine-0"), {"count": 1}, must_hit={})
            began = loop.time()
            async with asyncio.timeout(60):
                with pytest.raises(ReadTimeout):
                    await client.post("/flush_cache", {}, read_timeout_s=5)
            assert loop.time() - began == pytest.approx(cut_s + 5, abs=0.001)
            assert (await client.post("/flush_cache", {}, read_timeout_s=5)).status == 200

        assert len(kinds(run(body, nodes=2), "engine.post")) == 2

    @pytest.mark.parametrize("none", [None, math.inf])
    def test_none_at_all(self, none: float | None) -> None:
        """A caller without a time-out of its own waits until it is answered, or for ever, as the port says."""

        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            _, client = await engine(backend)
            assert (await client.post("/flush_cache", {}, connect_timeout_s=none, read_timeout_s=none)).status == 200
            simulation.faults.inject("reply_lost", Target(destination="engine-0"), {"count": 1}, must_hit={})
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(100_000):
                    await client.post("/flush_cache", {}, connect_timeout_s=none, read_timeout_s=none)
            # Connecting is the system's to give up: with a machine that is gone nobody ever accepts.
            _, far = await engine(backend, "engine-1", node="node-1")
            simulation.cluster.lose("node-1")
            began = loop.time()
            with pytest.raises(ConnectTimeout):
                await far.get("/ready", connect_timeout_s=none, read_timeout_s=none)
            assert loop.time() - began == pytest.approx(simulation.timings.os_connect_timeout_s, abs=0.01)

        with Simulation(nodes=2) as simulation:
            simulation.run(lambda backend: body(backend, simulation))

    def test_of_an_answer_that_comes_in_the_rest_of_it(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            _, client = await engine(backend, node="node-1")
            simulation.faults.inject("partition", TestLinks.LINK, {}, must_hit={}, for_s=3)
            simulation.faults.inject("sigstop", Target(name="engine-0"), {}, must_hit={}, for_s=6)
            began = loop.time()
            assert (await client.post("/flush_cache", {}, read_timeout_s=5)).status == 200
            assert loop.time() - began == pytest.approx(6, abs=0.1)
            await asyncio.sleep(10)

        run(body, nodes=2)

    def test_of_a_request_that_is_late_on_a_connection_that_stands(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            _, client = await engine(backend)
            simulation.faults.inject(
                "delayed_delivery", Target(destination="engine-0"), {"delay_s": 6.0, "count": 1}, must_hit={}
            )
            began = loop.time()
            with pytest.raises(ReadTimeout):
                await client.post("/flush_cache", {}, connect_timeout_s=1, read_timeout_s=3)
            assert loop.time() - began == pytest.approx(3, abs=0.001)
            await asyncio.sleep(10)

        assert len(kinds(run(body), "engine.post")) == 1

    @pytest.mark.parametrize("read_timeout_s", [None, 3.0])
    @pytest.mark.parametrize(
        ("way", "name", "params"),
        [
            ("lost", "delayed_delivery", {"delay_s": 0.5}),
            ("lost", "request_lost", {}),
            ("cut_off", "delayed_delivery", {"delay_s": 0.5}),
        ],
    )
    def test_there_is_no_connection_with_a_node_that_is_lost_or_cut_off(
        self, way: str, name: str, params: dict[str, Any], read_timeout_s: float | None
    ) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            _, client = await engine(backend, node="node-1")
            if way == "lost":
                simulation.cluster.lose("node-1")
            else:
                simulation.faults.inject("partition", TestLinks.LINK, {}, must_hit={}, for_s=60)
            simulation.faults.inject(name, Target(destination="engine-0"), params, must_hit={})
            began = loop.time()
            with pytest.raises(ConnectTimeout) as lost:
                async with asyncio.timeout(100):
                    await client.post("/flush_cache", {}, connect_timeout_s=2, read_timeout_s=read_timeout_s)
            assert lost.value.outcome is Outcome.NOT_DONE and loop.time() - began == pytest.approx(2, abs=0.001)
            await asyncio.sleep(100)

        assert not kinds(run(body, nodes=2), "engine.post")

    def test_of_a_generation_that_comes_later_still_and_runs_until_somebody_looks(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            simulation.faults.inject(
                "delayed_delivery", Target(destination="engine-0"), {"delay_s": 3.0, "count": 1}, must_hit={}
            )
            with pytest.raises(ReadTimeout):
                await client.generate(request(1, 400), read_timeout_s=2)  # which take less than the 4 s of a look
            await asyncio.sleep(30)

        (finished,) = [event.data for event in run(body) if event.kind == "engine.finished"]
        assert (finished["reason"], finished["completion_tokens"]) == ("length", 400)

    def test_of_streams_that_a_stopped_engine_finds_when_it_goes_on(self) -> None:
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True}

        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            simulation.faults.inject("sigstop", Target(name="engine-0"), {}, must_hit={}, for_s=5)
            asked = json.dumps({**chat, "stream": True})
            for events in (
                client.stream(request(1, 400), read_timeout_s=2),
                client.forward_stream("/v1/chat/completions", asked, read_timeout_s=2),
            ):
                with pytest.raises(ReadTimeout):
                    async for _ in events:
                        pass
            await asyncio.sleep(30)

        finished = [event.data for event in run(body) if event.kind == "engine.finished"]
        assert [each["reason"] for each in finished] == ["abort", "abort"]
        assert all(0 < each["completion_tokens"] < 400 for each in finished)  # gone at the look 0.3 s later


class TestMetrics:
    def pages(self, name: str) -> tuple[list[tuple[int, str]], tuple[int, str]]:
        under: list[tuple[int, str]] = []
        after: list[tuple[int, str]] = []

        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend)
            fault = simulation.faults.inject(name, Target(name="engine-0"), {}, must_hit={"hits": {"at_least": 1}})
            for number in range(2):
                under.append(await client.get("/metrics"))
                await client.generate(request(number))
            fault.heal()
            assert fault.satisfied()
            after.append(await client.get("/metrics"))

        run(body)
        return under, after[0]

    def test_missing(self) -> None:
        under, after = self.pages("metrics_missing")
        assert [status for status, _ in under] == [404, 404] and after[0] == 200

    def test_stale(self) -> None:
        under, after = self.pages("metrics_stale")
        assert under[0] == under[1] != after

    def test_nan(self) -> None:
        under, after = self.pages("metrics_nan")
        values = [line.rsplit(" ", 1)[1] for line in under[0][1].splitlines() if line and not line.startswith("#")]
        assert set(values) == {"NaN"} and "NaN" not in after[1]


class TestNodes:
    def test_clock_skew_steps_the_wall_clock_and_not_the_monotonic_one(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            wall, monotonic = backend.wall_time(), loop.time()
            fault = simulation.faults.inject("clock_skew", Target(name="node-0"), {"step_s": -3600.0}, must_hit={})
            assert backend.wall_time() - wall == pytest.approx(-3600, abs=1e-3) and loop.time() == monotonic
            fault.heal()
            assert backend.wall_time() == pytest.approx(wall, abs=1e-3)

        run(body)

    def test_a_lost_node_is_silent_until_the_health_timeout_and_comes_back_empty(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            loop = asyncio.get_running_loop()
            counter = await backend.spawn(Counter, name="counter", node="node-1")
            fault = simulation.faults.inject(
                "node_loss", Target(name="node-1"), {}, must_hit={"processes": {"at_least": 1}}
            )
            assert fault.satisfied()
            before = loop.time()
            with pytest.raises(ActorDied):
                await counter.add()
            assert loop.time() - before > 10
            assert await backend.nodes() == ("node-0",)
            fault.heal()
            assert await backend.nodes() == ("node-0", "node-1")
            again = await backend.spawn(Counter, name="counter", node="node-1")
            assert await again.value() == 0

        assert kinds(run(body, nodes=2), "node.lost", "node.restored") == ["node.lost", "node.restored"]

    def test_a_zombie_is_dead_to_others_and_still_acts(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            _, client = await engine(backend, node="node-1")
            call = asyncio.ensure_future(client.generate(request(1, 400)))
            await asyncio.sleep(0.05)
            simulation.faults.inject("node_loss", Target(name="node-1"), {"zombie": True}, must_hit={})
            assert await backend.nodes() == ("node-0",)
            assert (await call).completion_tokens == 400

        run(body, nodes=2)

    def test_a_node_is_lost_once(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            simulation.faults.inject("node_loss", Target(name="node-1"), {"zombie": True}, must_hit={})
            with pytest.raises(FaultRefused, match="lost already"):
                simulation.faults.inject("node_loss", Target(name="node-1"), {}, must_hit={})

        assert kinds(run(body, nodes=2), "node.lost", "node.restored") == ["node.lost", "node.restored"]


class TestPlacement:
    def test_a_stuck_group_stays_pending_until_it_is_healed(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            groups = backend.placement_groups
            fault = simulation.faults.inject("placement_stuck", Target(), {}, must_hit={"hits": {"at_least": 1}})
            group = await groups.create(BUNDLE, strategy="PACK", name="g")
            with pytest.raises(PlacementError):
                await groups.wait_created(group, 30)
            assert (await groups.table())[group] == "PENDING"
            fault.heal()
            assert fault.satisfied()
            await groups.wait_created(group, 30)

        run(body)

    def test_a_failed_removal_leaves_the_row_and_the_next_one_works(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            groups = backend.placement_groups
            group = await groups.create(BUNDLE, strategy="PACK", name="g")
            await groups.wait_created(group, 5)
            fault = simulation.faults.inject("removal_fails", Target(), {}, must_hit={"hits": {"at_least": 1}})
            await groups.remove(group)
            await asyncio.sleep(10)
            assert (await groups.table())[group] == "CREATED"
            fault.heal()
            await groups.remove(group)
            await asyncio.sleep(1)
            assert (await groups.table())[group] == "REMOVED"

        run(body)

    def test_a_late_removal_happens_late(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> None:
            groups = backend.placement_groups
            group = await groups.create(BUNDLE, strategy="PACK", name="g")
            await groups.wait_created(group, 5)
            simulation.faults.inject("removal_fails", Target(), {"late_s": 20.0}, must_hit={})
            await groups.remove(group)
            await asyncio.sleep(10)
            assert (await groups.table())[group] == "CREATED"
            await asyncio.sleep(11)
            assert (await groups.table())[group] == "REMOVED"

        run(body)


async def _result(call: Any) -> Any:
    return await call
