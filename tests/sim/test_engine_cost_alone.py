"""What an iteration of an engine costs does not depend on how many other engines there are. Counted, not timed.

The count is of Python instructions, in every frame that runs while the kernel advances the clock: a loop over the
other engines, wherever it were, would be in it.
"""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

from sim.engine import SimEngine
from sim.engine_scheduler import Scheduler
from sim.kernel import Kernel
from sim.profiles import load_profile

TOKENS = 60
REQUESTS = 3


def instructions(engines: int, *, fast_path: bool, scheduler: type[Scheduler] | None = None) -> tuple[int, int]:
    """(instructions, events of the clock) of so many engines, each with the same load at instants of its own."""
    kernel = Kernel()
    profile = load_profile("tiny-cpu")
    made = [
        SimEngine(kernel.clock, profile, name=f"e{number}", priority=10 + number, fast_path=fast_path)
        for number in range(engines)
    ]
    for engine in made:
        engine.start()
    kernel.run(lambda: all(engine.listening for engine in made), until_ns=profile.startup_ns + 1)
    left = engines * REQUESTS

    def done(_: Any) -> None:
        nonlocal left
        left -= 1

    for number, engine in enumerate(made):
        if scheduler is not None:
            engine.scheduler.__class__ = scheduler
            engine.scheduler.others = made  # type: ignore[attr-defined]  # of the wrong scheduler below
        for request in range(REQUESTS):
            submit = partial(engine.submit, f"r{request}", 40, TOKENS, done=done)
            kernel.clock.call_after(1 + 1009 * number + 1_000_000 * request, submit)
    counted = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = kernel.steps
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        kernel.run(lambda: not left)
    finally:
        sys.settrace(previous)
    return counted, kernel.steps - before


def each(engines: int, **options: Any) -> float:
    """Instructions for one engine of so many: what two of them cost more than one has in it whatever is done once."""
    base, _ = instructions(engines, **options)
    more, _ = instructions(2 * engines, **options)
    return (more - base) / engines


def test_an_iteration_costs_the_same_beside_others() -> None:
    for fast_path in (False, True):
        few, many = each(1, fast_path=fast_path), each(16, fast_path=fast_path)
        assert abs(many / few - 1) < 0.01, f"{few} instructions for each of a few engines, {many} of many"


def test_an_iteration_is_one_event_beside_others_and_few_with_skips() -> None:
    steps = {(n, fast): instructions(n, fast_path=fast)[1] / n for n in (1, 16) for fast in (False, True)}
    assert steps[1, False] == steps[16, False] and steps[1, True] == steps[16, True]
    assert TOKENS < steps[1, False] < 2 * TOKENS + 4 * REQUESTS
    assert steps[1, True] < TOKENS / 2


def test_it_would_notice_a_look_at_every_other_engine() -> None:
    class Looks(Scheduler):
        """Asks at each boundary whether anybody else is busy."""

        others: list[SimEngine]

        def _start_iteration(self) -> bool:
            sum(1 for other in self.others if other.scheduler.running)
            return super()._start_iteration()

    few, many = (each(n, fast_path=False, scheduler=Looks) for n in (1, 16))
    assert many > 1.2 * few
