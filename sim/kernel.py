"""The kernel of a run: it advances the clock and gives actors their turns. ``Kernel.run`` is the whole of it:

1. If actors are runnable, each runs *one* asyncio iteration, in creation order (by draw when exploring).
2. Else the clock pops every entry of the next instant: SimPy events, kernel callbacks, actors' timers, arrivals.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import sys
from asyncio import events as _aio_events
from collections.abc import Callable, Coroutine, Generator
from itertools import count
from typing import Any

from protocol.errors import message_of
from sim import huge_pages
from sim.clock import NEVER_NS, Clock, Draw, Entry, NodeClock, SimulationStopped
from sim.loop import ActorLoop, background
from sim.loop_objects import SimHandle

_set_running = _aio_events._set_running_loop
_heappop = heapq.heappop

LIVELOCK_CALLBACKS = 100_000
"""Callbacks of one actor at one instant beyond which the run is a livelock (DESIGN.md)."""

_GC_STEPS = 100_000  # kernel steps between two collections of the young generations; part of what is replayed
_GC_FULL = 25  # every how many of these the old generation is collected too
_STALL_CHECK_NS = 5_000_000_000
_PROGRESS_GRAIN_NS = 1_000_000_000
_PLAIN_CLOCK = NodeClock()


class Kernel:
    """Advances the clock and gives actors their turns.

    Args:
        explore: draws the next runnable actor and the order of equal times; None: creation order, FIFO.
        open_work: names of open calls, leases, operations and steps. While there are some, running out of
            progress is a deadlock.
    """

    def __init__(self, explore: Draw | None = None) -> None:
        self.clock = Clock(explore)
        self.explore = explore
        self.loops: list[ActorLoop] = []
        self.current: ActorLoop | None = None
        self.running = False
        self.callbacks = 0  # run so far, on any loop of this kernel
        self.steps = 0
        self._instant_step = 0  # the first step of the present instant
        self.mix = 0  # rolling digest of (time, actor), in the order of the iterations
        self.stall_ns = 900_000_000_000
        self.open_work: Callable[[], list[str]] = list
        self.on_anomaly: Callable[[ActorLoop | None, str, str], None] | None = None
        self.on_exit: Callable[[ActorLoop, SystemExit], None] | None = None
        """A callback of an actor raised SystemExit: its process ends. None (a loop run alone): it goes up."""
        self.trace: Callable[[int, ActorLoop, Any], None] | None = None
        # Whose an async generator is, by address: weak references to it are gone when it is finalized. What finished is
        # not finalized; its entry stays until the address is used again.
        self._owners: dict[int, ActorLoop] = {}
        self._collected = False  # objects of this run may have grown old
        self._runnable: list[ActorLoop] = []
        self._numbers = count(1)
        self._last_progress = 0
        self._next_stall_check = 0

    @property
    def now_ns(self) -> int:
        return self.clock._now

    def new_loop(self, name: str = "main", node_clock: NodeClock = _PLAIN_CLOCK) -> ActorLoop:
        loop = ActorLoop(self, name, len(self.loops), node_clock)  # type: ignore[abstract]  # RefusedLoop adds the rest
        self.loops.append(loop)
        return loop

    # --- the main loop ---

    def run(self, until: Callable[[], bool], *, until_ns: int | None = None) -> str:
        """Run until ``until()`` is true (looked at between iterations): ``"completed"``, or ``"time_limit"``.

        Raises:
            SimulationStopped: deadlock or livelock, with a report.
        """
        if self.running:
            raise RuntimeError("This event loop is already running")
        hooks = sys.get_asyncgen_hooks()
        collecting = gc.isenabled()
        gc.disable()  # the collector decides nothing: it runs at fixed step counts, below
        sys.set_asyncgen_hooks(firstiter=self._asyncgen_first, finalizer=self._asyncgen_final)
        self.running = True
        try:
            return self._run(until, until_ns)
        finally:
            self.running = False
            self.current = None
            _set_running(None)
            # What is unretrieved or unfinished and lies in cycles is found here, not when the collector next pleases.
            gc.collect(2 if self._collected else 0)
            sys.set_asyncgen_hooks(*hooks)
            if collecting:
                gc.enable()

    def _run(self, until: Callable[[], bool], until_ns: int | None) -> str:
        clock = self.clock
        queue: list[Any] = clock._queue
        limit_ns = NEVER_NS - 1 if until_ns is None else until_ns
        steps = self.steps
        collect_at = steps - steps % _GC_STEPS + _GC_STEPS
        try:
            if not self._runnable and until():
                return "completed"
            while True:
                runnable = self._runnable
                if runnable:
                    if len(runnable) == 1:
                        self._iterate(runnable.pop())
                    elif self.explore is not None:
                        self._iterate(runnable.pop(self.explore.below(len(runnable))))
                    else:
                        # A round: who is runnable now gets one turn, in creation order, before anyone gets two.
                        self._runnable = []
                        runnable.sort(key=_index)
                        for loop in runnable:
                            self._iterate(loop)
                    if until():
                        return "completed"
                    continue
                if not queue:
                    raise SimulationStopped("deadlock", self.report("nothing is scheduled any more"))
                t_ns = queue[0][0]
                if t_ns > limit_ns:
                    if t_ns >= NEVER_NS:
                        raise SimulationStopped("deadlock", self.report("nothing is scheduled any more"))
                    clock._now = limit_ns
                    return "time_limit"
                if t_ns != clock._now:
                    clock._now = t_ns
                    self._instant_step = steps
                    if t_ns >= self._next_stall_check:
                        self._check_stall(t_ns)
                kernel_ran = False
                # Everything of this instant is taken before any actor runs, so that an actor's arrivals and timers of
                # one instant meet in one iteration, as they would behind one select().
                while True:
                    item = _heappop(queue)[3]
                    steps += 1
                    kind = type(item)
                    if kind is SimHandle:
                        item._scheduled = False
                        if item._cancelled:
                            clock.cancelled -= 1
                        else:
                            loop = item._loop
                            if not loop.dead:
                                if t_ns - self._last_progress > _PROGRESS_GRAIN_NS:
                                    if not item._context.get(background, False):
                                        self._last_progress = t_ns
                                loop._due.append(item)
                                if not loop._queued and not loop._blocked:
                                    loop._queued = True
                                    self._runnable.append(loop)
                    elif kind is Entry:
                        fn = item.fn
                        if fn is None:
                            clock.cancelled -= 1
                        else:
                            if not item.background:
                                self._last_progress = t_ns
                            if self.current is not None:
                                self.current = None
                                _set_running(None)
                            item.fn = None  # cancelling it later is nothing
                            fn(*item.args)
                            kernel_ran = True
                    else:
                        # A SimPy event: what simpy.Environment.step does with it.
                        self._last_progress = t_ns
                        if self.current is not None:
                            self.current = None
                            _set_running(None)
                        callbacks, item.callbacks = item.callbacks, None
                        for callback in callbacks:
                            callback(item)
                        if not item._ok and not hasattr(item, "_defused"):
                            raise item._value
                        kernel_ran = True
                    if steps >= collect_at:
                        collect_at += _GC_STEPS
                        self._collect(steps)
                        if steps - self._instant_step > 100 * LIVELOCK_CALLBACKS:
                            number = steps - self._instant_step
                            raise SimulationStopped("livelock", f"{number} kernel events at {t_ns} ns")
                    if not queue or queue[0][0] != t_ns:
                        break
                if kernel_ran and not self._runnable and until():
                    return "completed"
        finally:
            self.steps = steps

    def _iterate(self, loop: ActorLoop) -> None:
        """One asyncio iteration of one actor."""
        loop._queued = False
        if loop._blocked:
            return
        ready = loop._ready
        todo = loop._todo
        now = self.clock._now
        if not todo:
            if loop._io:
                ready.extend(loop._io)
                loop._io.clear()
            due = loop._due
            if due and loop._ahead < 2:
                if loop._ahead:
                    loop._ahead = 0  # what was buffered until SIGCONT is before them in any case
                    ready.extend(due)
                elif self.explore is not None and len(due) + len(ready) > 1 and self.explore.below(2):
                    ready.extendleft(reversed(due))  # a time-out may also win against the reply of its instant
                else:
                    ready.extend(due)
                due.clear()
            todo = len(ready)
            if not todo:
                if loop._inbox:
                    if loop._ahead > 1:
                        loop._ahead -= 1
                    loop._serve(*loop._inbox.popleft())
                return
        self.callbacks += todo
        if loop._instant != now:
            loop._instant = now
            loop._instant_callbacks = todo
            self.mix = hash((self.mix, now, loop.index))  # of ints: the same in every process
        else:
            loop._instant_callbacks += todo
            if loop._instant_callbacks > LIVELOCK_CALLBACKS:
                raise SimulationStopped("livelock", self._livelock_report(loop))
            if self.current is not loop:  # else the same (time, actor) again, which callbacks counts
                self.mix = hash((self.mix, now, loop.index))
        if self.current is not loop:
            # Left set until another actor or kernel code runs: most iterations follow one of the same actor.
            self.current = loop
            _set_running(loop)
        trace = self.trace
        while todo:
            todo -= 1
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if trace is not None:
                trace(now, loop, handle)
            args = handle._args
            try:
                if not args:  # a task's first step: half the price of unpacking nothing
                    handle._context.run(handle._callback)
                elif len(args) == 1:  # a task's later steps
                    handle._context.run(handle._callback, args[0])
                else:
                    handle._context.run(handle._callback, *args)
            except KeyboardInterrupt:
                raise  # the person at the terminal's, not the component's
            except SystemExit as error:
                if self.on_exit is None:
                    raise
                self.on_exit(loop, error)
            except BaseException as error:
                message = f"Exception in callback {_name(handle._callback)}"
                loop.call_exception_handler({"message": message, "exception": error, "handle": handle})
            if loop._blocked:
                if loop.dead:
                    return
                break
        loop._todo = todo
        if (ready or loop._inbox or loop._io or loop._due) and not loop._queued and not loop._blocked:
            loop._queued = True
            self._runnable.append(loop)

    # --- housekeeping ---

    def _collect(self, steps: int) -> None:
        self._collected = True
        rounds = steps // _GC_STEPS
        gc.collect(2 if rounds % _GC_FULL == 0 else 1)
        if huge_pages.is_due(rounds):
            huge_pages.collapse()

    def _check_stall(self, t_ns: int) -> None:
        """Is only background work left while something is open?"""
        self._next_stall_check = t_ns + _STALL_CHECK_NS
        quiet = t_ns - self._last_progress
        if quiet < _STALL_CHECK_NS:
            return
        work = self.open_work()
        if not work:
            return
        for entry in self.clock._queue:
            item: Any = entry[3]
            if entry[0] >= NEVER_NS:
                continue
            if type(item) is SimHandle:
                # Somebody who is no background work has set an alarm: however late it rings, it is waited for.
                if not item._context.get(background, False) and not item._cancelled and not item._loop.dead:
                    return
            elif quiet < self.stall_ns and not (type(item) is Entry and (item.fn is None or item.background)):
                return
        raise SimulationStopped("deadlock", self.report("only periodic work is left"))

    def report(self, why: str) -> str:
        """Who waits for what, task by task, for a person."""
        lines = [f"{why} at {self.clock._now / 1e9:.6f} s"]
        work = self.open_work()
        lines += [f"  open: {item}" for item in work[:50]]
        for loop in self.loops:
            if loop.dead:
                continue
            for task in sorted(asyncio.all_tasks(loop), key=hash):
                lines.append(f"  {loop.name}{' (frozen)' if loop.frozen else ''}: {describe_wait(task)}")
                if len(lines) > 200:
                    return "\n".join([*lines, "  ..."])
        return "\n".join(lines)

    def _livelock_report(self, loop: ActorLoop) -> str:
        names: dict[str, int] = {}
        for handle in list(loop._ready)[:200]:
            owner = getattr(handle._callback, "__self__", None)
            name = owner.get_name() if isinstance(owner, asyncio.Task) else _name(handle._callback)
            names[name] = names.get(name, 0) + 1
        busiest = ", ".join(f"{name} x{number}" for name, number in sorted(names.items()))
        now = self.clock._now
        return f"{loop.name} ran {LIVELOCK_CALLBACKS} callbacks at {now} ns, time standing still; ready: {busiest}"

    def anomaly(self, loop: ActorLoop | None, context: dict[str, Any]) -> None:
        """What asyncio would log goes to the evidence instead (``run.anomaly``), or to stderr when nobody listens."""
        text = context.get("message", "")
        what = "unretrieved" if "never retrieved" in text else "loop_exception"
        error = context.get("exception")
        detail = f"{text}: {type(error).__name__}: {message_of(error)}" if error is not None else text
        if self.on_anomaly is not None:
            self.on_anomaly(loop, what, detail)
        else:
            print(f"{loop.name if loop else 'kernel'}: {detail}", file=sys.stderr)

    def _asyncgen_first(self, agen: Any) -> None:
        if self.current is not None:
            self.current._asyncgens[agen] = None
            self._owners[id(agen)] = self.current

    def _asyncgen_final(self, agen: Any) -> None:
        loop = self._owners.pop(id(agen), None)
        if loop is None or loop.dead or loop._closed:
            return
        loop._asyncgens.pop(agen, None)  # there only where the weak reference outlived the finalizer
        if self.on_anomaly is not None:
            self.on_anomaly(loop, "unfinished_generator", getattr(agen, "__qualname__", "async generator"))
        loop.call_soon(loop.create_task, agen.aclose())

    def close(self) -> None:
        """Seal every port, then close what is still suspended, in creation order. Nothing it does has an effect."""
        for loop in self.loops:
            loop.kill()
        for loop in self.loops:
            _set_running(loop)  # `finally` blocks see their actor's clock, and are refused what it is refused
            try:
                while loop._kept:
                    kept, loop._kept = loop._kept, []
                    self._close_kept(loop, kept)
            finally:
                _set_running(None)
            loop._closed = loop._shut = True
            loop.seatrial_backend = None
        self.clock._queue.clear()
        self._runnable.clear()

    def _close_kept(self, loop: ActorLoop, kept: list[Any]) -> None:
        made: list[asyncio.Task[Any]] = []  # by what is being closed: never started, so closing them runs nothing
        loop._kept = [made]
        tasks, generators = kept[0], kept[1] if len(kept) > 1 else ()
        for task in tasks:
            task._log_destroy_pending = False
            _close_quietly(task.get_coro().close)
        for generator in generators:
            _close_quietly(generator.aclose().send, None)
        if not made:
            loop._kept = []


def _close_quietly(close: Callable[..., object], *args: Any) -> None:
    try:
        close(*args)
    except BaseException:  # noqa: S110 - a `finally` that awaits or raises: nobody is left to hear it
        pass


def _name(callback: Any) -> str:
    """Not its repr, which holds memory addresses."""
    return getattr(callback, "__qualname__", type(callback).__qualname__)


def _index(loop: ActorLoop) -> int:
    return loop.index


def describe_wait(task: asyncio.Task[Any]) -> str:
    """``name: waits at file:line function``, from the innermost suspended frame."""
    coroutine: Any = task.get_coro()
    place = "not started"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return f"{task.get_name()} waits at {place}"


def new_event_loop() -> ActorLoop:
    """A loop with a kernel of its own: for tests, and for running plain asyncio code under simulated time."""
    return Kernel().new_loop("main")


def run(main: Coroutine[Any, Any, Any] | Generator[Any, Any, Any]) -> Any:
    """``asyncio.run`` under simulated time."""
    loop = new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop._kernel.close()
