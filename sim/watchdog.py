"""Ends a run in which one callback of an actor never comes back, such as ``while True: pass`` in a component.

Simulated time stands still in such a callback, so nothing inside of the run can notice. Once a second of real time a
signal asks whether the same callback still runs; it only looks, and a run in which every callback comes back is the
same without it. Seconds in which the whole process was stopped do not count.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import traceback
from os import _exit  # these three bound here: in an actor the modules' own are refused or simulated
from signal import setitimer
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

from sim.clock import SimulationStopped
from sim.kernel import Kernel
from sim.world import World

HANG_AFTER_S = 60.0
"""Real seconds that one callback may take. The longest of a healthy run takes milliseconds."""

UNSTOPPABLE = 3
"""Exit code of a process that had to be left because a component catches whatever ends it: no verdict."""

_LOOKS = 10  # at least so many during the time that a callback has
_TRIES = 10
_IN_C = 3  # times as long, of CPU time, has a callback that no handler interrupts
_OURS = ("sim", "asyncio", "simpy", "contextvars")


class EndlessCallback(KeyboardInterrupt):
    """Raised inside of the callback. A KeyboardInterrupt, for asyncio takes no other exception for the whole loop's."""


class Watchdog:
    """A context manager around a run of the kernel. Beside the main thread, where no signals arrive, it is nothing.

    An interrupt (Ctrl-C) that a component swallows is raised again at the next look.

    Args:
        kernel: whose callbacks are watched.
        after_s: real seconds that one may take.

    Raises (on leaving):
        SimulationStopped: ``endless_callback``, with the actor and its task.
    """

    def __init__(self, kernel: Kernel, after_s: float = HANG_AFTER_S) -> None:
        self._kernel = kernel
        self._after_s = after_s
        self._every_s = min(1.0, after_s / _LOOKS)
        self._seen: tuple[int, int] | None = None
        self._same = 0  # looks at which the same callback ran
        self._report = ""
        self._tries = 0
        self._interrupted = False
        self._over = False
        self._undo: list[tuple[int, Any]] = []
        self._timer = (0.0, 0.0)
        self._begun = 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._begun = monotonic()
        self._undo.append((signal.SIGALRM, signal.signal(signal.SIGALRM, self._look)))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._undo.append((signal.SIGINT, signal.signal(signal.SIGINT, self._interrupt)))
        # A callback in C code runs no handler of Python: in the end the signal itself ends the process.
        if signal.getsignal(signal.SIGPROF) is signal.SIG_DFL and sys.__stderr__ is not None:
            faulthandler.register(signal.SIGPROF, file=sys.__stderr__, all_threads=False, chain=True)
            self._undo.append((signal.SIGPROF, None))
        self._timer = setitimer(signal.ITIMER_REAL, self._every_s, self._every_s)
        self._rearm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._undo:
            return
        self._over = True
        setitimer(signal.ITIMER_REAL, 0)
        setitimer(signal.ITIMER_PROF, 0)
        for number, handler in reversed(self._undo):
            if number == signal.SIGPROF:
                faulthandler.unregister(number)
            else:
                signal.signal(number, handler)
        self._undo.clear()
        delay_s, interval_s = self._timer
        if delay_s:  # somebody else's alarm
            setitimer(signal.ITIMER_REAL, max(delay_s - (monotonic() - self._begun), 0.001), interval_s)
        if self._interrupted and kind is None:
            raise KeyboardInterrupt
        if self._report and not self._interrupted:
            raise SimulationStopped("endless_callback", self._report) from None

    def _rearm(self) -> None:
        if any(number == signal.SIGPROF for number, _ in self._undo):
            setitimer(signal.ITIMER_PROF, _IN_C * self._after_s)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        frames = list(_outwards(frame))
        # What is recorded is handed on whole, also to a judge that takes it in batches: the next look may end it.
        may_end = all(one.f_code is not World.flush.__code__ for one in frames)
        if (self._interrupted or self._report) and may_end:
            self._end()
        iterating = next((at for at, one in enumerate(frames) if one.f_code is Kernel._iterate.__code__), None)
        if iterating is None:  # between two callbacks
            self._seen, self._same = None, 0
            return
        names = frames[iterating].f_locals
        callback = (self._kernel.callbacks, names.get("todo", 0))  # no two callbacks have the same numbers
        if callback != self._seen:
            self._seen, self._same = callback, 0
            self._rearm()
            return
        self._same += 1
        if self._same * self._every_s >= self._after_s and may_end:
            self._report = self._describe(names, frames[:iterating])
            self._end()

    def _end(self) -> None:
        self._tries += 1
        if self._tries > _TRIES:
            print("it catches what would end it: the process ends here, without a verdict", file=sys.stderr, flush=True)
            _exit(UNSTOPPABLE)
        raise KeyboardInterrupt if self._interrupted else EndlessCallback

    def _describe(self, names: dict[str, Any], inner: list[FrameType]) -> str:
        """For the evidence: no line numbers of the loop, which a second run would not meet again. stderr has them."""
        loop = names["loop"]
        callback = names["handle"]._callback
        owner = getattr(callback, "__self__", None)
        task = owner.get_name() if isinstance(owner, asyncio.Task) else getattr(callback, "__qualname__", "a callback")
        theirs = [one for one in inner if one.f_globals.get("__name__", "").partition(".")[0] not in _OURS]
        code = (theirs or inner or [sys._getframe()])[-1].f_code
        where = f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        text = f"{loop.name}, task {task}: {where} has not come back in {self._after_s:g} s of real time"
        print(f"{text}; it is at", file=sys.stderr)
        for line in traceback.format_list(traceback.extract_stack(next(iter(theirs or inner), None))[-5:]):
            print(line, end="", file=sys.stderr)
        return text


def _outwards(frame: FrameType | None) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back
