"""The event loop: order, time, occupation, SIGSTOP, SIGKILL, deadlock, livelock (CPython's tests: test_conformance)."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import math
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
import simpy

from sim.clock import Clock, NodeClock, SimulationStopped
from sim.kernel import Kernel, new_event_loop, run
from sim.loop import ActorLoop, background, current_loop
from sim.random import Streams

SECOND = 1_000_000_000


def two() -> tuple[Kernel, ActorLoop, ActorLoop]:
    kernel = Kernel()
    return kernel, kernel.new_loop("a"), kernel.new_loop("b")


def finish(kernel: Kernel, *tasks: asyncio.Task[Any]) -> None:
    kernel.run(lambda: all(task.done() for task in tasks))


def test_what_is_found_after_the_end_of_a_run_schedules_nothing() -> None:
    kernel = Kernel()
    left = kernel.new_loop("a").create_future()
    left.add_done_callback(lambda _: pytest.fail("nobody is left to run it"))
    kernel.close()
    left.cancel()  # as the collector does, closing a coroutine that waits; an error here is printed as a traceback


class TestTime:
    def test_sleeps_take_exactly_their_time(self) -> None:
        async def main() -> list[int]:
            loop = current_loop()
            assert loop is not None
            seen = []
            for delay in (0.1, 0.2, 0.7, 1e-9, 3600.0):
                await asyncio.sleep(delay)
                seen.append(loop._clock._now)
            return seen

        assert run(main()) == [100_000_000, 300_000_000, SECOND, SECOND + 1, 3601 * SECOND + 1]

    def test_a_deadline_loop_ends_though_floats_round(self) -> None:
        async def main() -> int:
            loop = asyncio.get_running_loop()
            deadline, turns = loop.time() + 0.1 + 0.2, 0
            while loop.time() < deadline:
                turns += 1
                await asyncio.sleep(deadline - loop.time())
            return turns

        kernel = Kernel()
        loop = kernel.new_loop("x", NodeClock(origin_ns=123_456_789_012_345))
        assert loop.run_until_complete(main()) <= 2

    @pytest.mark.parametrize("clock", [NodeClock(), NodeClock(5 * SECOND, 1_000_000)])
    @pytest.mark.parametrize("delay", [math.inf, 1e300, 1e100])
    def test_what_is_never_due_is_a_timer_all_the_same(self, delay: float, clock: NodeClock) -> None:
        seen: list[str] = []

        async def sleeps() -> None:
            try:
                await asyncio.sleep(delay)
            finally:
                seen.append("woken")

        async def main() -> None:
            loop = asyncio.get_running_loop()
            sleeper = loop.create_task(sleeps())
            async with asyncio.timeout(delay) as bound:
                await asyncio.wait_for(asyncio.sleep(1), delay)
            assert not bound.expired()
            later, at = (
                loop.call_later(delay, seen.append, "later"),
                loop.call_at(loop.time() + delay, seen.append, "at"),
            )
            assert later.when() == pytest.approx(delay) and at.when() == pytest.approx(delay)
            at.cancel()
            assert at.cancelled() and not later.cancelled()
            gc.collect()  # its timer holds the sleeper's future, and that the sleeper
            await asyncio.sleep(10 * 365 * 86_400)
            assert seen == [] and not sleeper.done()
            sleeper.cancel()
            await asyncio.wait([sleeper])
            assert seen == ["woken"]

        Kernel().new_loop("x", clock).run_until_complete(main())

    def test_a_sleeper_that_nobody_else_holds_is_held_by_its_timer(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            sleeper = weakref.ref(loop.create_task(asyncio.sleep(math.inf)))
            await asyncio.sleep(1)
            gc.collect()
            assert sleeper() is not None

        run(main())

    @pytest.mark.parametrize("clock", [NodeClock(), NodeClock(5 * SECOND, 1_000_000)])
    @pytest.mark.parametrize("never", [math.nan, -math.inf])
    def test_nan_is_due_at_once_as_in_asyncio(self, never: float, clock: NodeClock) -> None:
        async def main() -> list[float]:
            loop = asyncio.get_running_loop()
            began = loop.time()
            seen: list[float] = []
            loop.call_later(never, lambda: seen.append(loop.time() - began))
            loop.call_at(never, lambda: seen.append(loop.time() - began))
            await asyncio.sleep(0.1)
            return seen

        assert Kernel().new_loop("x", clock).run_until_complete(main()) == [0, 0]
        assert len(asyncio.run(main())) == 2

    def test_each_node_has_its_origin_and_drift(self) -> None:
        kernel = Kernel()
        plain, shifted = kernel.new_loop("p"), kernel.new_loop("s", NodeClock(5 * SECOND, 1_000_000))
        kernel.clock.call_at(1000 * SECOND, lambda: None)
        kernel.run(lambda: kernel.now_ns == 1000 * SECOND)
        assert plain.time() == 1000.0
        assert shifted.time() == 1006.0  # 5 s origin, 1000 ppm of 1000 s

    def test_a_float_delay_is_refused(self) -> None:
        with pytest.raises(TypeError, match="int count of nanoseconds"):
            Clock().timeout(0.5)

    def test_a_simpy_process_and_event_are_awaited(self) -> None:
        kernel = Kernel()
        loop = kernel.new_loop("a")

        def disk(env: Any) -> Any:
            yield env.timeout(3 * SECOND)
            return "written"

        def broken(env: Any) -> Any:
            yield env.timeout(1)
            raise OSError("disk on fire")

        async def main() -> tuple[str, float]:
            with pytest.raises(OSError, match="on fire"):
                await loop.await_event(kernel.clock.process(broken(kernel.clock)))
            result = await loop.await_event(kernel.clock.process(disk(kernel.clock)))
            return result, loop.time()

        assert loop.run_until_complete(main()) == ("written", 3.000000001)

    def test_simpy_resources_run_on_the_clock(self) -> None:
        kernel = Kernel()
        order = []

        def user(env: Any, gpu: simpy.Resource, name: str) -> Any:
            with gpu.request() as request:
                yield request
                yield env.timeout(SECOND)
                order.append((name, env.now))

        gpu = simpy.Resource(kernel.clock, 1)
        for name in "ab":
            kernel.clock.process(user(kernel.clock, gpu, name))
        kernel.run(lambda: len(order) == 2)
        assert order == [("a", SECOND), ("b", 2 * SECOND)]


class TestOrder:
    def test_runnable_actors_take_turns_in_creation_order(self) -> None:
        kernel, a, b = two()
        seen: list[str] = []

        async def spin(name: str) -> None:
            for _ in range(3):
                seen.append(name)
                await asyncio.sleep(0)

        tasks = [b.create_task(spin("b")), a.create_task(spin("a"))]
        finish(kernel, *tasks)
        assert seen == ["a", "b"] * 3

    def test_exploring_finds_other_orders_and_repeats_them(self) -> None:
        def order(seed: int) -> str:
            kernel = Kernel(Streams(seed).stream("kernel.order"))
            seen: list[str] = []

            async def note(name: str) -> None:
                await asyncio.sleep(1)
                seen.append(name)

            tasks = [kernel.new_loop(name).create_task(note(name)) for name in "abcd"]
            finish(kernel, *tasks)
            return "".join(seen)

        orders = [order(seed) for seed in range(200)]
        assert len(set(orders)) == 24  # every permutation of four equal times
        assert orders == [order(seed) for seed in range(200)]

    def test_an_arrival_beats_the_timer_of_its_instant_unless_exploring(self) -> None:
        def winner(seed: int | None) -> str:
            kernel = Kernel(Streams(seed).stream("kernel.order") if seed is not None else None)
            loop = kernel.new_loop("a")
            seen: list[str] = []
            loop.call_later(1, seen.append, "timer")
            kernel.clock.call_at(SECOND, loop.deliver, seen.append, "arrival")
            kernel.run(lambda: len(seen) == 2)
            return seen[0]

        assert winner(None) == "arrival"
        assert {winner(seed) for seed in range(20)} == {"arrival", "timer"}

    def test_what_an_iteration_adds_runs_in_the_next(self) -> None:
        loop = new_event_loop()
        seen: list[str] = []
        loop.call_soon(lambda: (seen.append("1"), loop.call_soon(seen.append, "3")))
        loop.call_soon(seen.append, "2")
        loop._kernel.run(lambda: len(seen) == 3)
        assert seen == ["1", "2", "3"]

    def test_sets_of_tasks_and_futures_iterate_by_creation(self) -> None:
        async def main() -> list[str]:
            tasks = {asyncio.create_task(asyncio.sleep(1, str(i))) for i in range(50)}
            done, _ = await asyncio.wait(tasks)
            return [task.result() for task in done]

        assert run(main()) == run(main())

    def test_contexts_do_not_leak_between_arrivals(self) -> None:
        var: contextvars.ContextVar[int] = contextvars.ContextVar("var", default=0)
        kernel, a, _ = two()
        seen: list[int] = []

        async def handler(value: int) -> None:
            seen.append(var.get())
            var.set(value)

        for value in (1, 2):
            a.deliver(lambda v=value: a.create_task(handler(v)))
        kernel.run(lambda: len(seen) == 2)
        assert seen == [0, 0]


class TestSingleServer:
    def test_messages_are_served_one_after_another(self) -> None:
        kernel, a, _ = two()
        served: list[int] = []
        for _ in range(3):
            a.deliver(lambda: served.append(kernel.now_ns), cost_ns=400_000)
        kernel.run(lambda: len(served) == 3)
        assert served == [400_000, 800_000, 1_200_000]

    def test_slow_multiplies_costs(self) -> None:
        kernel, a, _ = two()
        served: list[int] = []
        a.slow_percent = 250
        a.deliver(lambda: served.append(kernel.now_ns), cost_ns=400_000)
        kernel.run(lambda: bool(served))
        assert served == [1_000_000]

    def test_an_occupied_actor_runs_nothing_and_the_other_goes_on(self) -> None:
        kernel, a, b = two()
        seen: list[tuple[str, float]] = []

        async def blocked() -> None:
            a.occupy(5 * SECOND)
            await asyncio.sleep(0)
            seen.append(("blocked", a.time()))

        async def ticks(loop: ActorLoop, name: str) -> None:
            for _ in range(2):
                await asyncio.sleep(1)
                seen.append((name, loop.time()))

        tasks = [a.create_task(ticks(a, "a")), a.create_task(blocked()), b.create_task(ticks(b, "b"))]
        finish(kernel, *tasks)
        assert [entry for entry in seen if entry[0] == "b"] == [("b", 1.0), ("b", 2.0)]
        assert ("blocked", 5.0) in seen and ("a", 5.0) in seen and ("a", 6.0) in seen

    def test_after_sigcont_buffered_arrivals_run_before_expired_timers(self) -> None:
        kernel, a, _ = two()
        seen: list[str] = []
        a.call_later(1, seen.append, "timer")
        kernel.clock.call_at(SECOND // 2, a.freeze)
        kernel.clock.call_at(2 * SECOND, a.deliver, seen.append, "reply")
        kernel.clock.call_at(3 * SECOND, lambda: seen.append("thaw"))
        kernel.clock.call_at(3 * SECOND, a.thaw)
        kernel.run(lambda: len(seen) == 3)
        assert seen == ["thaw", "reply", "timer"]

    @pytest.mark.parametrize("explore", [False, True])
    def test_after_sigcont_a_reply_behind_costly_arrivals_runs_before_expired_timers(self, explore: bool) -> None:
        draw = Streams(7).stream("order")
        for _ in range(20 if explore else 1):  # each run draws on
            kernel = Kernel(draw if explore else None)
            a = kernel.new_loop("a")
            seen: list[str] = []
            a.call_later(1, seen.append, "timer")
            kernel.clock.call_at(SECOND // 2, a.freeze)
            for number in range(3):
                request = functools.partial(a.deliver, seen.append, "request", cost_ns=400_000)
                kernel.clock.call_at(2 * SECOND + number, request)
            kernel.clock.call_at(2 * SECOND + 9, a.deliver, seen.append, "reply")
            kernel.clock.call_at(3 * SECOND, a.thaw)
            a.call_later(4, seen.append, "later timer")
            kernel.run(lambda seen=seen: "later timer" in seen)
            assert seen == ["request", "request", "request", "reply", "timer", "later timer"]


class TestSigkill:
    def test_nothing_runs_afterwards_not_even_the_rest_of_the_step_has_effects(self) -> None:
        kernel, a, b = two()
        seen: list[str] = []
        kept: list[asyncio.Future[None]] = []

        async def victim() -> None:
            try:
                a.kill()
                a.call_soon(seen.append, "call_soon")
                a.call_later(0, seen.append, "call_later")
                kept.append(asyncio.ensure_future(asyncio.sleep(0)))
                await asyncio.sleep(0)
                seen.append("resumed")
            finally:
                seen.append("finally")

        async def other() -> None:
            await asyncio.sleep(10)

        a.create_task(victim())
        task = b.create_task(other())
        finish(kernel, task)
        gc.collect()
        assert seen == []

    def test_suspended_generators_and_coroutines_stay_unrun_until_the_close(self) -> None:
        kernel, a, b = two()
        seen: list[str] = []

        async def items() -> Any:
            try:
                yield 1
                yield 2
            finally:
                seen.append("generator")

        async def victim() -> None:
            try:
                async for _ in items():
                    await asyncio.sleep(100)
            finally:
                seen.append("coroutine")

        async def killer() -> None:
            await asyncio.sleep(1)
            a.kill()
            await asyncio.sleep(1000)

        a.create_task(victim())
        task = b.create_task(killer())
        finish(kernel, task)
        gc.collect()
        assert seen == []
        kernel.close()
        assert "coroutine" in seen

    def test_a_thousand_kills_leave_no_memory(self) -> None:
        kernel = Kernel()
        refs = []

        async def forever() -> None:
            await asyncio.get_running_loop().create_future()

        for number in range(1000):
            loop = kernel.new_loop(f"actor-{number}")
            refs.append(weakref.ref(loop.create_task(forever())))
            kernel.clock.call_at(number, loop.kill)
        kernel.clock.call_at(2000, lambda: None)
        kernel.run(lambda: kernel.now_ns == 2000)
        assert all(ref() is not None for ref in refs)  # kept, unrun
        kernel.close()
        del loop
        kernel.loops.clear()
        gc.collect()
        assert [ref for ref in refs if ref() is not None] == []


class TestNoProgress:
    def test_an_empty_clock_is_a_deadlock_that_names_the_waiter(self) -> None:
        async def waits_for_nobody() -> None:
            await asyncio.Event().wait()

        with pytest.raises(SimulationStopped, match="waits_for_nobody|locks.py") as caught:
            run(waits_for_nobody())
        assert caught.value.reason == "deadlock"

    def test_who_sleeps_for_ever_is_named_too(self) -> None:
        async def sleeps_for_ever() -> None:
            await asyncio.sleep(math.inf)

        with pytest.raises(SimulationStopped, match="Task-1 waits at .* in sleep") as caught:
            run(sleeps_for_ever())
        assert caught.value.reason == "deadlock"

    def test_an_alarm_that_never_rings_is_not_waited_for(self) -> None:
        kernel, a, _ = two()
        kernel.open_work = lambda: ["a call"]

        async def periodic() -> None:
            background.set(True)
            while True:
                await asyncio.sleep(1)

        tasks = [a.create_task(periodic()), a.create_task(asyncio.sleep(math.inf))]
        with pytest.raises(SimulationStopped, match="only periodic work is left"):
            finish(kernel, *tasks)
        kernel.close()

    def test_periodic_work_is_not_progress(self) -> None:
        kernel, a, _ = two()
        kernel.open_work = lambda: ["call 7 to gate-0"]

        async def heartbeat() -> None:
            background.set(True)
            while True:
                await asyncio.sleep(1)

        async def stuck() -> None:
            await asyncio.Event().wait()

        a.create_task(heartbeat())
        a.create_task(stuck())
        with pytest.raises(SimulationStopped, match="call 7 to gate-0"):
            kernel.run(lambda: False)
        assert kernel.now_ns < 30 * SECOND

    def test_a_long_timer_of_ordinary_work_is_not_a_deadlock(self) -> None:
        kernel, a, _ = two()
        kernel.open_work = lambda: ["a long call"]

        async def heartbeat() -> None:
            background.set(True)
            while True:
                await asyncio.sleep(1)

        a.create_task(heartbeat())
        finish(kernel, a.create_task(asyncio.sleep(3600)))  # longer than stall_ns, too
        assert kernel.now_ns == 3600 * SECOND

    def test_a_livelock_is_reported_by_task(self) -> None:
        async def spins() -> None:
            while True:
                await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.create_task(spins(), name="spinner")

        with pytest.raises(SimulationStopped, match="spinner") as caught:
            run(main())
        assert caught.value.reason == "livelock"

    def test_cancelled_long_timeouts_do_not_pile_up(self) -> None:
        kernel, a, _ = two()

        async def main() -> int:
            most = 0
            for _ in range(10_000):
                async with asyncio.timeout(3600):
                    await asyncio.sleep(0.001)
                most = max(most, len(kernel.clock._queue))
            return most

        assert a.run_until_complete(main()) < 2_500


def test_threads_sockets_and_processes_are_refused_by_name() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        attempts: list[tuple[str, Coroutine[Any, Any, Any]]] = [
            ("run_in_executor", asyncio.to_thread(print)),
            ("create_connection", asyncio.open_connection("localhost", 1)),
            ("subprocess_exec", asyncio.create_subprocess_exec("true")),
        ]
        for name, attempt in attempts:
            with pytest.raises(RuntimeError, match=f"{name}.* refused in the simulated world"):
                await attempt
        with pytest.raises(RuntimeError, match="add_signal_handler"):
            loop.add_signal_handler(2, print)

    run(main())
