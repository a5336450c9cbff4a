"""The simulated actors: what the contract of both worlds (tests/contract) cannot see from outside."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pathlib
import subprocess
import sys
import tracemalloc
import weakref
import zlib
from typing import Any

import pytest

from protocol.errors import ActorDied, CallCancelled, NameTaken, Outcome, SpawnFailed
from protocol.messages import GenerateRequest
from protocol.ports import ActorHandle, Limits, backend
from sim.backend import SimBackend, run_sim
from sim.clock import SimulationStopped
from sim.copying import Copier, Packed
from sim.simulation import Simulation
from sim.timings import Timings
from tests.sim.worlds import Chain, Echo, Evidence, Immortal

ROOT = pathlib.Path(__file__).resolve().parents[2]
FREE = Timings(call_cost_s=0.0)


# ---- a killed actor leaves nothing ----


class Victim:
    def __init__(self, echo: ActorHandle) -> None:
        self.echo = echo
        self.ballast = bytearray(20_000)
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        backend().periodic(0.001, self._tick, name="tick")
        backend().background(self._wait(), name="wait")

    async def _tick(self) -> None:
        await self.echo.echo("tick")

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            backend().emit("test.mark", what="finally")
            self.echo.echo("finally")

    async def work(self) -> None:
        self.tasks.append(asyncio.create_task(self._wait()))
        await self._wait()


async def kill_many(backend: SimBackend, kills: int, instances: list[Any]) -> None:
    echo = await backend.spawn(Echo, name="echo")
    for i in range(kills):
        victim = await backend.spawn(Victim, echo, name=f"victim-{i % 7}")
        process = backend.system.find(victim.name, victim.incarnation)
        assert process is not None
        instances += [weakref.ref(process), weakref.ref(process.loop), weakref.ref(process.instance)]
        calls = [victim.work() for _ in range(3)]
        await asyncio.sleep(0.002)
        await backend.kill(victim)
        for call in calls:
            with pytest.raises(ActorDied):
                await call
    await asyncio.sleep(1)


def killing_run(kills: int) -> tuple[Evidence, list[Any], str]:
    evidence = Evidence()
    instances: list[Any] = []
    with Simulation(seed=5, recorder=evidence, timings=Timings(spawn_s=0.001)) as simulation:
        simulation.run(lambda backend: kill_many(backend, kills, instances))
        digest = simulation.world.digest()
    return evidence, instances, digest


def plain_run(seed: int) -> str:
    async def body(backend: SimBackend) -> None:
        echo = await backend.spawn(Echo, name="echo")
        await asyncio.gather(*(echo.echo(i) for i in range(50)))

    with Simulation(seed=seed, explore=True) as simulation:
        simulation.run(body)
        return simulation.world.digest()


def test_1000_kills_leave_no_event_no_memory_and_no_change_in_the_next_seed() -> None:
    expected = plain_run(11)
    evidence, instances, _ = killing_run(1000)
    died: dict[tuple[str, int], int] = {}
    for event in evidence.events:
        key = (event.actor, event.inc)
        assert key not in died, f"{event} after the death of its process"
        if event.kind == "actor.died":
            died[key] = event.seq
    assert len(died) == 1000
    assert "finally" not in [event.data["what"] for event in evidence.of("test.mark")]
    gc.collect()
    assert len(instances) == 3000
    assert [ref() for ref in instances if ref() is not None] == []
    assert plain_run(11) == expected


def test_memory_does_not_grow_from_one_killing_run_to_the_next() -> None:
    killing_run(50)  # what is cached once for ever (compiled encoders, import machinery) is cached here
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(3):
            killing_run(50)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # Each run's victims hold a megabyte of ballast; what may remain are free lists.
    assert sizes[2] - sizes[1] < 50_000, sizes


def test_a_killing_run_is_repeated_exactly() -> None:
    first, _, digest = killing_run(30)
    second, _, again = killing_run(30)
    assert first.events == second.events
    assert digest == again


# ---- death in the middle of a step ----


@pytest.mark.parametrize("copy_always", [False, True])
def test_after_a_kill_at_an_emission_the_rest_of_the_step_has_no_effect(copy_always: bool) -> None:
    evidence = Evidence()
    with Simulation(recorder=evidence, copy_always=copy_always) as simulation:
        world = simulation.world

        async def body(backend: SimBackend) -> tuple[list[Any], tuple[str, ...], str]:
            echo = await backend.spawn(Echo, name="echo")
            victim = await backend.spawn(Immortal, echo, name="victim")
            world.hook("test.mark", lambda event: world.processes[event.actor].die("killed"))
            with pytest.raises(ActorDied):
                await victim.be_killed_at_mark()
            await asyncio.sleep(5)
            return await echo.history(), await backend.storage.list(""), backend.new_id("req")

        history, files, next_id = simulation.run(body)
    assert history == []
    assert files == ()
    assert next_id == "req-0000001"
    assert [event.data["what"] for event in evidence.of("test.mark")] == ["the last"]
    assert [event.actor for event in evidence.of("actor.spawned")] == ["driver", "echo", "victim"]
    assert [event.data["method"] for event in evidence.of("call.sent")] == ["be_killed_at_mark", "history"]
    last = max(event.seq for event in evidence.events if event.actor == "victim")
    assert [event.kind for event in evidence.events if event.seq == last] == ["actor.died"]


def test_finally_blocks_at_the_end_of_the_run_have_no_effect() -> None:
    evidence = Evidence()
    with Simulation(recorder=evidence) as simulation:

        async def body(backend: SimBackend) -> None:
            echo = await backend.spawn(Echo, name="echo")
            victim = await backend.spawn(Immortal, echo, name="victim")
            call = victim.wait()
            await asyncio.sleep(0.1)
            await backend.kill(victim)
            with pytest.raises(ActorDied):
                await call
            survivor = await backend.spawn(Immortal, echo, name="survivor")
            survivor.wait()
            await asyncio.sleep(0.1)

        simulation.run(body)
        before = len(evidence.events)
    assert len(evidence.events) == before
    assert evidence.of("test.mark") == []


def test_a_caller_killed_when_its_call_is_recorded_sends_nothing() -> None:
    """The event precedes its effect: an injector at call.sent stops the call itself."""
    with Simulation() as simulation:
        world = simulation.world

        async def body(backend: SimBackend) -> list[Any]:
            echo = await backend.spawn(Echo, name="echo")
            chain = await backend.spawn(Relayer, echo, name="relayer")

            def kill(event: Any) -> None:
                if event.actor == "relayer":
                    world.processes["relayer"].die("killed")

            world.hook("call.sent", kill)
            with pytest.raises(ActorDied):
                await chain.relay("x")
            await asyncio.sleep(1)
            history: list[Any] = await echo.history()
            return history

        assert simulation.run(body) == []


class Relayer:
    def __init__(self, target: ActorHandle) -> None:
        self.target = target

    async def relay(self, value: Any) -> Any:
        return await self.target.echo(value)

    async def relay_often(self, interval_s: float) -> None:
        backend().periodic(interval_s, self._relay_one, name="relays")

    async def _relay_one(self) -> None:
        await self.target.slow(0.2)

    async def relay_with_timeout(self, timeout_s: float, duration_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                result: str = await self.target.slow(duration_s)
                return result
        except TimeoutError:
            return "timed out"


# ---- evidence ----


def test_causes_and_lamport_clocks_follow_the_calls() -> None:
    evidence = Evidence()

    async def body(backend: SimBackend) -> None:
        last = await backend.spawn(Chain, None, name="c")
        middle = await backend.spawn(Chain, last, name="b")
        first = await backend.spawn(Chain, middle, name="a")
        await asyncio.gather(first.go("one"), first.go("two"))

    run_sim(body, recorder=evidence)
    by_id = {event.id: event for event in evidence.events}
    marks = evidence.of("test.mark")
    assert len(marks) == 12
    for mark in marks:
        sent = by_id[mark.cause or ""]
        assert sent.kind == "call.sent" and sent.data["target"] == mark.actor and sent.data["method"] == "go"
    for event in evidence.events:
        if event.cause is not None:
            assert by_id[event.cause].lc < event.lc
            assert by_id[event.cause].seq < event.seq
            assert by_id[event.cause].actor != event.actor
    for process in {event.actor: None for event in evidence.events}:
        own = [event for event in evidence.events if event.actor == process]
        assert [event.n for event in own] == list(range(1, len(own) + 1))
        assert all(a.lc < b.lc for a, b in itertools.pairwise(own))
    done = evidence.of("call.done")
    assert len(done) == 6 and {event.data["outcome"] for event in done} == {"done"}
    out = {event.data["what"]: event for event in marks if event.actor == "c"}
    ended = next(event for event in done if event.actor == "b")
    assert by_id[ended.cause or ""].actor == "c" and ended.lc > out["one out"].lc


def test_an_abandoned_call_ends_once_as_unknown_and_its_late_reply_is_ignored() -> None:
    evidence = Evidence()

    async def body(backend: SimBackend) -> str:
        echo = await backend.spawn(Echo, name="echo")
        relayer = await backend.spawn(Relayer, echo, name="relayer")
        result: str = await relayer.relay_with_timeout(0.1, 0.5)
        await asyncio.sleep(1)
        return result

    assert run_sim(body, recorder=evidence) == "timed out"
    (done,) = [event for event in evidence.of("call.done") if event.actor == "relayer"]
    assert (done.data["outcome"], done.data["error"]) == ("unknown", "CancelledError")


def test_every_call_has_one_end_and_a_death_is_noticed_once_a_caller() -> None:
    evidence = Evidence()

    async def body(backend: SimBackend) -> None:
        echo = await backend.spawn(Echo, name="echo")
        calls = [echo.slow(100) for _ in range(5)]
        await asyncio.sleep(0.1)
        await backend.kill(echo)
        for call in calls:
            with pytest.raises(ActorDied) as caught:
                await call
            assert caught.value.outcome is Outcome.UNKNOWN

    run_sim(body, recorder=evidence)
    (died,) = evidence.of("actor.died")
    (noticed,) = evidence.of("actor.death_noticed")
    assert noticed.t_ns - died.t_ns == 10_000_000
    assert noticed.cause == died.id
    ends = evidence.of("call.done")
    assert sorted(event.data["call"] for event in ends) == sorted(e.data["call"] for e in evidence.of("call.sent"))
    assert {event.data["error"] for event in ends} == {"ActorDied"}


def test_copying_always_changes_nothing_that_is_recorded() -> None:
    def events(copy_always: bool) -> list[Any]:
        evidence = Evidence()

        async def body(backend: SimBackend) -> None:
            echo = await backend.spawn(Echo, name="echo")
            chain = await backend.spawn(Chain, await backend.spawn(Chain, None, name="b"), name="a")
            request = GenerateRequest("r-1", 10, 20)
            await asyncio.gather(chain.go("x"), *(echo.echo(request) for _ in range(20)), echo.echo([1]))
            assert await echo.echo(request) == request

        run_sim(body, recorder=evidence, copy_always=copy_always)
        return evidence.events

    assert events(False) == events(True)


def test_what_may_be_shared_is_shared_and_all_else_is_copied() -> None:
    request = GenerateRequest("r-1", 10, 20)
    assert Copier().pack(request) is request
    assert type(Copier(always=True).pack(request)) is Packed
    assert type(Copier(always=True).pack_call((), {})) is Packed
    copier = Copier()
    assert copier.pack(pair := (request, ("a", 1))) is pair
    assert type(Copier(always=True).pack(pair)) is Packed
    for value in ([1], (1, [2]), {"a": 1}, {1}, Echo()):
        for _ in range(2):
            assert type(copier.pack(value)) is Packed
            assert type(copier.pack_call((1, value), {})) is Packed
            assert type(copier.pack_call((), {"x": value})) is Packed
    assert copier.pack_call((1, "a", request), {"b": None}) == ((1, "a", request), {"b": None})


def test_a_subclass_of_a_message_is_not_shared() -> None:
    class Open(GenerateRequest):
        """Undeclared: it may hold anything."""

    copier = Copier()
    assert copier.pack(GenerateRequest("r", 1, 1)) is not None
    with pytest.raises(TypeError, match="Open"):  # a local class: that it is serialised at all shows it is not shared
        copier.pack(Open("r", 1, 1))


# ---- one thread, one server ----


def times_of_calls(timings: Timings, n: int, *, slow_percent: int = 100, costs_s: Any = None) -> list[float]:
    """When each of ``n`` calls, all sent at once, is served, in seconds after the first could be."""
    with Simulation(timings=timings, costs_s=costs_s) as simulation:

        async def body(backend: SimBackend) -> list[float]:
            echo = await backend.spawn(Echo, name="echo")
            process = simulation.system.find("echo", echo.incarnation)
            assert process is not None
            process.loop.slow_percent = slow_percent
            base: float = await echo.at()
            times = await asyncio.gather(*(echo.at() for _ in range(n)))
            return [time - base for time in times]

        return simulation.run(body)


def test_each_message_occupies_its_callee_for_its_cost() -> None:
    trip = 2 * 0.00006
    for slow_percent in (100, 300):
        cost = 0.0004 * slow_percent / 100
        times = times_of_calls(Timings(), 10, slow_percent=slow_percent)
        assert times == pytest.approx([trip + cost * (i + 1) for i in range(10)], abs=1e-9)


def test_cost_can_be_set_by_class_and_by_name() -> None:
    for costs, cost in (({"Echo": 0.002}, 0.002), ({"Echo": 0.002, "echo": 0.001}, 0.001), ({"other": 1.0}, 0.0004)):
        times = times_of_calls(Timings(), 3, costs_s=costs)
        assert times[1] - times[0] == pytest.approx(cost, abs=1e-9)


def test_after_sigcont_buffered_replies_run_before_expired_timers() -> None:
    async def body(backend: SimBackend) -> bool:
        echo = await backend.spawn(Echo, name="echo")
        watcher = await backend.spawn(Watcher, echo, name="watcher")
        call = watcher.answered_when_timer_runs(1.0, 2.0)
        await asyncio.sleep(0.1)
        await backend.signal(watcher, "SIGSTOP")
        await asyncio.sleep(10)  # its timer expires, and a second later the reply is in its buffer
        await backend.signal(watcher, "SIGCONT")
        result: bool = await call
        return result

    assert run_sim(body)


class Watcher:
    def __init__(self, target: ActorHandle) -> None:
        self.target = target

    async def answered_when_timer_runs(self, timer_s: float, reply_s: float) -> bool:
        """Whether a call was answered when the timer's callback ran."""
        call: Any = self.target.slow(reply_s)
        seen: list[bool] = []
        asyncio.get_running_loop().call_later(timer_s, lambda: seen.append(call.done))
        await call
        await asyncio.sleep(0)
        return seen[0]


def test_callers_of_a_stopped_actor_hear_nothing_for_ever() -> None:
    async def body(backend: SimBackend) -> None:
        echo = await backend.spawn(Echo, name="echo")
        await backend.signal(echo, "SIGSTOP")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await echo.echo(1)
        await backend.signal(echo, "SIGCONT")

    run_sim(body)


# ---- order, cancel, streams under a network that reorders ----


def test_ordered_calls_start_in_order_on_a_link_that_reorders() -> None:
    with Simulation(seed=3, explore=True, timings=FREE) as simulation:

        async def body(backend: SimBackend) -> tuple[list[int], list[int]]:
            echo = await backend.spawn(Echo, name="echo", limits=Limits(data_calls=2))
            await asyncio.gather(*(echo.echo(i) for i in range(200)))
            unordered = await echo.history()
            other = await backend.spawn(Echo, name="other", limits=Limits(data_calls=2))
            view = other.ordered()
            await asyncio.gather(*((view.echo if i % 3 else view.data)(i) for i in range(500)))
            return unordered, await other.history()

        unordered, ordered = simulation.run(body)
    assert unordered != list(range(200)) and sorted(unordered) == list(range(200))
    assert ordered == list(range(500))


def test_stream_items_stay_in_order_on_a_link_that_reorders() -> None:
    async def body(backend: SimBackend) -> list[int]:
        echo = await backend.spawn(Echo, name="echo")
        return [i async for i in echo.count(200)]

    for seed in range(5):
        assert run_sim(body, seed=seed, explore=True) == list(range(200))


def test_a_cancel_that_overtakes_its_call_still_cancels_it() -> None:
    hit = 0
    for seed in range(20):
        with Simulation(seed=seed, explore=True) as simulation:

            async def body(backend: SimBackend) -> int:
                echo = await backend.spawn(Echo, name="echo")
                call = echo.slow(50)
                echo.cancel(call)
                began = asyncio.get_running_loop().time()
                with pytest.raises(CallCancelled):
                    await call
                assert asyncio.get_running_loop().time() - began < 1
                return 1

            hit += simulation.run(body)
    assert hit == 20


# ---- deadlock ----


class Waits:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def start(self) -> None:
        backend().periodic(1.0, self._tick, name="tick")

    async def _tick(self) -> None: ...

    async def wait(self) -> None:
        await self.event.wait()


def test_a_call_that_nobody_will_answer_is_a_deadlock_though_periodic_work_goes_on() -> None:
    async def body(backend: SimBackend) -> None:
        waits = await backend.spawn(Waits, name="waits")
        await waits.wait()

    with pytest.raises(SimulationStopped) as caught:
        run_sim(body)
    assert caught.value.reason == "deadlock"
    assert "waits/1.wait" in caught.value.report and "driver/0" in caught.value.report
    assert "waits/1: wait waits at locks.py" in caught.value.report  # where the callee is stuck


def test_calls_made_by_periodic_work_are_no_progress() -> None:
    async def body(backend: SimBackend) -> None:
        echo = await backend.spawn(Echo, name="echo")
        relayer = await backend.spawn(Relayer, echo, name="relayer")
        await relayer.relay_often(1.0)
        waits = await backend.spawn(Waits, name="waits")
        await waits.wait()

    with pytest.raises(SimulationStopped, match="only periodic work is left"):
        run_sim(body, time_limit_s=3000)


def test_a_time_limit_is_told() -> None:
    async def body(backend: SimBackend) -> None:
        await asyncio.sleep(100)

    with pytest.raises(SimulationStopped, match="10 s of simulated time are over"):
        run_sim(body, time_limit_s=10)


# ---- births ----


def test_a_spawn_carries_on_when_its_spawner_dies_and_the_name_stays_taken() -> None:
    async def body(backend: SimBackend) -> None:
        spawner = await backend.spawn(Spawner, name="spawner")
        spawner.spawn("child")
        await asyncio.sleep(0.1)
        await backend.kill(spawner)
        with pytest.raises(NameTaken):
            await backend.spawn(Echo, name="child")
        await asyncio.sleep(0.5)
        child = await backend.lookup("child")
        assert await child.echo(1) == 1

    run_sim(body)


class Spawner:
    async def spawn(self, name: str) -> ActorHandle:
        return await backend().spawn(Echo, name=name)


class KilledWhileStarting:
    async def start(self) -> None:
        await asyncio.sleep(100)


def test_a_kill_from_outside_while_it_starts_fails_the_spawn_and_frees_the_name() -> None:
    with Simulation() as simulation:

        async def body(backend: SimBackend) -> None:
            spawn = asyncio.create_task(backend.spawn(KilledWhileStarting, name="x"))
            await asyncio.sleep(1)
            simulation.world.processes["x"].die("killed")
            with pytest.raises(SpawnFailed) as caught:
                await spawn
            assert isinstance(caught.value.attached[0], ActorDied)
            await backend.spawn(Echo, name="x")

        simulation.run(body)


class RaisesAnything:
    def __init__(self, kind: str) -> None:
        raise {"CancelledError": asyncio.CancelledError, "BaseException": BaseException}[kind]("in the constructor")


@pytest.mark.parametrize("kind", ["CancelledError", "BaseException"])
def test_whatever_a_constructor_raises_is_told_to_the_spawner(kind: str) -> None:
    async def body(backend: SimBackend) -> None:
        with pytest.raises(SpawnFailed, match=f"RaisesAnything.* did not start: .*{kind}: in the constructor"):
            await backend.spawn(RaisesAnything, kind, name="x")
        await backend.spawn(Echo, name="x")

    run_sim(body, time_limit_s=100)


def test_restart_from_outside_starts_a_dead_actor_again() -> None:
    with Simulation() as simulation:

        async def body(backend: SimBackend) -> None:
            echo = await backend.spawn(Echo, name="echo")
            with pytest.raises(NameTaken):
                simulation.system.restart_from_outside("echo")
            await backend.kill(echo)
            simulation.system.restart_from_outside("echo")
            await asyncio.sleep(1)
            again = await backend.lookup("echo")
            assert again.incarnation == 2 and await again.echo("x") == "x"

        simulation.run(body)


def test_a_handle_hashes_alike_in_every_process_and_is_useless_outside_of_one() -> None:
    kept: list[Any] = []

    async def body(backend: SimBackend) -> None:
        kept.append(await backend.spawn(Echo, name="echo"))

    run_sim(body)
    assert hash(kept[0]) == zlib.crc32(b"echo") * 1_000_003 + 1  # not hash(str), which differs between processes
    with pytest.raises(RuntimeError, match="outside of any actor"):
        kept[0].echo(1)


def test_the_digest_depends_on_no_hash_seed() -> None:
    """A run with kills, and one with drawn orders, in new processes under other hash seeds."""
    code = "from tests.sim.test_actors import killing_run, plain_run; print(killing_run(5)[2], plain_run(3))"
    printed = set()
    for hash_seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        printed.add(done.stdout)
    printed.add(f"{killing_run(5)[2]} {plain_run(3)}\n")
    assert len(printed) == 1, printed


class ExitsInATask:
    """Calls sys.exit() in a task of its own, not in a handler."""

    async def go(self) -> None:
        asyncio.get_running_loop().create_task(self._exit())
        await asyncio.sleep(1)

    async def _exit(self) -> None:
        raise SystemExit(3)


def test_sys_exit_in_a_child_task_ends_the_actor_and_not_the_simulation() -> None:
    async def body(backend: Any) -> str:
        actor = await backend.spawn(ExitsInATask, name="exits")
        with pytest.raises(ActorDied):
            await actor.go()
        return "went on"

    assert run_sim(body) == "went on"
