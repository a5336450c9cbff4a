"""Speed of the event loop, as ratios taken in one process, contestants in turn: ``python tests/bench/loop_bench.py``.

sleeps: 1,000 tasks with distinct wake times call ``asyncio.sleep`` through actors (ordering, digest and livelock
checks on), against ``asyncio.SelectorEventLoop`` of which only ``time()`` and the advance of the clock are overridden.

kernel events: what engine models use, ``Clock.call_after`` re-armed by its own callback, against bare SimPy time-outs
in a process, which is how a model would be written without it; SimPy processes on the kernel's clock beside.

engine iterations: decode steps of 100 simulated engines with four requests each, on the kernel's clock, against as many
bare SimPy time-outs. Stepped: each step is an event, and does all that a step does. Skipped: as engines really run, a
run of steps in which nothing can change is one event.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import selectors
import statistics
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import simpy

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from sim.engine import SimEngine
from sim.kernel import Kernel
from sim.profiles import load_profile

TASKS = 1000
ACTORS = 10
BATCH = 4


class _InstantSelector(selectors.DefaultSelector):
    """Returns at once; what would have been waited for is added to the loop's clock."""

    loop: VirtualSelectorLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self.loop.now += timeout
        return []


class VirtualSelectorLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop with a simulated clock, and nothing else changed."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _InstantSelector()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now


async def _sleeper(number: int, sleeps: int) -> None:
    # 1,000 numbers, a stride that is coprime to 1,000 and a prime period: no two wake-ups of the run coincide.
    delay = 0.001 + (number * 619 % TASKS) * 0.000_001_009
    for _ in range(sleeps):
        await asyncio.sleep(delay)


def sleeps_on_asyncio(sleeps: int) -> float:
    """Seconds for TASKS * sleeps sleeps."""

    async def main() -> None:
        await asyncio.gather(*[_sleeper(i, sleeps) for i in range(TASKS)])

    loop = VirtualSelectorLoop()
    try:
        started = time.process_time()
        loop.run_until_complete(main())
        return time.process_time() - started
    finally:
        loop.close()


def sleeps_on_actors(sleeps: int) -> float:
    kernel = Kernel()
    loops = [kernel.new_loop(f"actor-{i}") for i in range(ACTORS)]
    left = ACTORS

    async def main(actor: int) -> None:
        nonlocal left
        await asyncio.gather(*[_sleeper(i, sleeps) for i in range(actor, TASKS, ACTORS)])
        left -= 1

    started = time.process_time()
    tasks = [loop.create_task(main(i)) for i, loop in enumerate(loops)]
    reason = kernel.run(lambda: not left)
    took = time.process_time() - started
    assert reason == "completed" and all(task.done() for task in tasks)
    assert kernel.callbacks >= 2 * TASKS * sleeps  # the timer and the task's step: nothing was skipped
    kernel.close()
    return took


def events_on_simpy(events: int) -> float:
    """Seconds for 100 * events time-outs of 100 SimPy processes."""
    env = simpy.Environment()

    def process(number: int) -> Generator[Any, None, None]:
        for _ in range(events):
            yield env.timeout(1000 + number)

    for i in range(100):
        env.process(process(i))
    started = time.process_time()
    env.run()
    return time.process_time() - started


def events_on_kernel(events: int) -> float:
    kernel = Kernel()
    clock = kernel.clock
    left = 100 * events

    def fire(number: int, remaining: int) -> None:
        nonlocal left
        left -= 1
        if remaining:
            clock.call_after(1000 + number, fire, number, remaining - 1)

    for i in range(100):
        clock.call_after(1000 + i, fire, i, events - 1)
    started = time.process_time()
    kernel.run(lambda: not left)
    took = time.process_time() - started
    assert left == 0
    return took


def processes_on_kernel(events: int) -> float:
    kernel = Kernel()
    clock = kernel.clock
    left = 100

    def process(number: int) -> Generator[Any, None, None]:
        nonlocal left
        for _ in range(events):
            yield clock.timeout(1000 + number)
        left -= 1

    for i in range(100):
        clock.process(process(i))
    started = time.process_time()
    kernel.run(lambda: not left)
    return time.process_time() - started


def _iterations(events: int, *, skip: bool) -> float:
    """Seconds for 100 * events decode steps, the requests' arrivals, prefills and ends with them."""
    kernel = Kernel()
    profile = load_profile("tiny-cpu").replace(context_length=1 << 40, kv_capacity_tokens=1 << 41)
    engines = [
        SimEngine(kernel.clock, profile, name=f"e{number}", priority=10 + number, fast_path=skip)
        for number in range(100)
    ]
    for engine in engines:
        engine.start()
    kernel.run(lambda: all(engine.listening for engine in engines), until_ns=profile.startup_ns + 1)
    left = 100 * BATCH

    def done(_: Any) -> None:
        nonlocal left
        left -= 1

    for number, engine in enumerate(engines):
        for request in range(BATCH):
            # Arrivals apart, so that no two engines step at one instant.
            submit = partial(engine.submit, f"r{request}", 40 + number, events + 7 * request, done=done)
            kernel.clock.call_after(1 + 10_007 * number, submit)
    started = time.process_time()
    kernel.run(lambda: not left)
    took = time.process_time() - started
    steps = sum(engine.scheduler.decode_steps for engine in engines)
    assert steps >= 100 * events and (skip or kernel.steps >= steps)
    return took * 100 * events / steps


def iterations_stepped(events: int) -> float:
    return _iterations(events, skip=False)


def iterations_skipped(events: int) -> float:
    return _iterations(events, skip=True)


def _in_turn(contestants: dict[str, Callable[[int], float]], size: int, rounds: int) -> dict[str, list[float]]:
    """Every round each contestant once, so that what the machine does meanwhile meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            gc.collect()
            gc.disable()  # the kernel runs with the collector off; give the others the same
            try:
                times[name].append(contestant(size))
            finally:
                gc.enable()
    return times


def measure(size: int = 60, rounds: int = 7) -> dict[str, Any]:
    """Ratios (ours faster: above 1), medians of the rounds, and rates in events per second."""
    sleeps = _in_turn({"asyncio": sleeps_on_asyncio, "actors": sleeps_on_actors}, size, rounds)
    contestants = {"simpy": events_on_simpy, "kernel": events_on_kernel, "kernel_processes": processes_on_kernel}
    kernel = _in_turn(contestants, size * 10, rounds)
    engines = _in_turn(
        {"simpy": events_on_simpy, "stepped": iterations_stepped, "skipped": iterations_skipped}, size * 10, rounds
    )

    def ratio(theirs: list[float], ours: list[float]) -> float:
        return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))

    return {
        "python": platform.python_version(),
        "sleeps": {
            "ratio": ratio(sleeps["asyncio"], sleeps["actors"]),
            "asyncio_per_s": TASKS * size / min(sleeps["asyncio"]),
            "actors_per_s": TASKS * size / min(sleeps["actors"]),
        },
        "kernel_events": {
            "ratio": ratio(kernel["simpy"], kernel["kernel"]),
            "ratio_simpy_processes": ratio(kernel["simpy"], kernel["kernel_processes"]),
            "simpy_per_s": 1000 * size / min(kernel["simpy"]),
            "kernel_per_s": 1000 * size / min(kernel["kernel"]),
            "kernel_processes_per_s": 1000 * size / min(kernel["kernel_processes"]),
        },
        "engine_iterations": {
            "ratio_stepped": ratio(engines["simpy"], engines["stepped"]),
            "ratio_skipped": ratio(engines["simpy"], engines["skipped"]),
            "simpy_per_s": 1000 * size / min(engines["simpy"]),
            "stepped_per_s": 1000 * size / min(engines["stepped"]),
            "skipped_per_s": 1000 * size / min(engines["skipped"]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=60, help="sleeps per task")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="profile the sleeps on actors")
    options = parser.parse_args()
    if options.profile:
        import cProfile

        cProfile.runctx("sleeps_on_actors(options.size)", globals(), {"options": options}, sort="tottime")
        return
    print(json.dumps(measure(options.size, options.rounds), indent=1))


if __name__ == "__main__":
    main()
