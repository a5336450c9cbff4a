"""The simulated event loop: one asyncio loop per actor, all on one SimPy clock of integer nanoseconds.

How a run proceeds (the whole of it; ``Kernel.run`` is the code):

1. If actors are runnable, each runs *one* asyncio iteration, in creation order (by draw when exploring).
2. Else the clock pops every entry of the next instant: SimPy events, kernel callbacks, actors' timers, arrivals.

An actor's iteration is asyncio's: what was ready, then arrivals ("I/O"), then expired timers; what these add runs in
the next iteration. One loop *object* per actor makes ownership a fact of the object graph: a task, future or timer
belongs to the actor whose loop made it, whatever user code does with context variables, and killing an actor is
one flag that every one of its ports tests.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import sys
import weakref
from asyncio import events as _aio_events
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from itertools import count
from typing import Any, NamedTuple, NoReturn, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event

_set_running = _aio_events._set_running_loop
_heappush = heapq.heappush
_heappop = heapq.heappop

LIVELOCK_CALLBACKS = 100_000
"""Callbacks of one actor at one instant beyond which the run is a livelock (DESIGN.md)."""

_GC_STEPS = 100_000  # kernel steps between two collections of the young generations; part of what is replayed
_GC_FULL = 25  # every how many of these the old generation is collected too

background: contextvars.ContextVar[bool] = contextvars.ContextVar("seatrial_background", default=False)
"""True inside periodic work and what it calls: no progress for the deadlock detector."""


class Draw(Protocol):
    """What exploring needs of a random stream (``sim.random.Stream`` is one)."""

    def next64(self) -> int: ...

    def below(self, n: int) -> int: ...


class SimulationStopped(Exception):
    """The run cannot go on. ``reason`` is deadlock, livelock or crash; ``report`` says who waits for whom."""

    def __init__(self, reason: str, report: str) -> None:
        super().__init__(f"{reason}: {report}")
        self.reason = reason
        self.report = report


class Entry:
    """A scheduled kernel callback: no actor, no task, no context. ``cancel()`` is idempotent."""

    __slots__ = ("fn", "args", "background")

    def __init__(self, fn: Callable[..., object] | None, args: tuple[Any, ...], background: bool) -> None:
        self.fn = fn
        self.args = args
        self.background = background

    def cancel(self) -> None:
        self.fn = None
        self.args = ()


class Clock(simpy.Environment):
    """A SimPy environment whose time is an int count of nanoseconds. SimPy processes and resources run on it unchanged."""

    _now: int

    def __init__(self, ties: Draw | None = None) -> None:
        super().__init__(initial_time=0)
        if ties is not None:
            # Equal times are permuted: the tie-breaker is a draw, made unique by a counter in its low bits.
            self._eid = _drawn_ids(ties)  # type: ignore[assignment]

    def schedule(self, event: Event, priority: int = NORMAL, delay: int = 0) -> None:  # type: ignore[override]
        if type(delay) is not int:
            raise TypeError(f"simulated time is an int count of nanoseconds; got a delay of {delay!r}")
        _heappush(self._queue, (self._now + delay, priority, next(self._eid), event))  # type: ignore[misc]

    def call_at(self, t_ns: int, fn: Callable[..., object], *args: Any, background: bool = False) -> Entry:
        """Run ``fn(*args)`` at ``t_ns`` (not before now), outside of any actor."""
        entry = Entry(fn, args, background)
        _heappush(self._queue, (t_ns if t_ns > self._now else self._now, NORMAL, next(self._eid), entry))  # type: ignore[misc]
        return entry

    def call_after(self, delay_ns: int, fn: Callable[..., object], *args: Any, background: bool = False) -> Entry:
        entry = Entry(fn, args, background)
        _heappush(self._queue, (self._now + delay_ns, NORMAL, next(self._eid), entry))  # type: ignore[misc]
        return entry

    def step(self) -> None:
        raise EmptySchedule("the Kernel advances this clock")


def _drawn_ids(ties: Draw) -> Iterator[int]:
    for number in count():
        yield (ties.next64() << 64) | number


class NodeClock(NamedTuple):
    """A node's monotonic clock: an origin of its own and a drift in parts per billion."""

    origin_ns: int = 0
    drift_ppb: int = 0


class SimFuture(asyncio.Future):  # type: ignore[type-arg]
    """A future that hashes by creation number: asyncio keeps futures in sets, whose order must not be by address."""

    __slots__ = ("_number",)

    def __hash__(self) -> int:
        try:
            return self._number  # type: ignore[no-any-return]
        except AttributeError:
            self._number: int = next(self.get_loop()._kernel._numbers)  # type: ignore[attr-defined]
            return self._number


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """A task that hashes by creation number (its first hash is its registration, inside the constructor)."""

    __slots__ = ("_number",)
    __hash__ = SimFuture.__hash__  # type: ignore[assignment]


class SimHandle(asyncio.Handle):
    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: ActorLoop, context: contextvars.Context | None) -> None:
        # Written out instead of super().__init__: this runs for every callback of every actor.
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class SimTimer(asyncio.TimerHandle):
    __slots__ = ("background",)

    def __init__(self, when: float, callback: Any, args: Any, loop: ActorLoop, context: contextvars.Context | None) -> None:
        if context is None:
            context = contextvars.copy_context()
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True
        self.background = context.get(background, False)

    def cancel(self) -> None:
        if not self._cancelled:
            if self._scheduled:
                self._loop._kernel._timer_cancelled()
            # As asyncio.Handle.cancel, which clears what it holds.
            self._cancelled = True
            if self._loop.get_debug():
                self._repr = repr(self)
            self._callback = None
            self._args = None


class ActorLoop(asyncio.AbstractEventLoop):
    """One actor's asyncio event loop. Made by ``Kernel.new_loop``.

    States beside asyncio's: *occupied* (its one thread is busy until some time), *frozen* (SIGSTOP) and *dead*
    (SIGKILL: every port drops silently from that instant, even for the rest of the current synchronous step).
    """

    seatrial_backend: Any = None

    def __init__(self, kernel: Kernel, name: str, index: int, node_clock: NodeClock) -> None:
        self._kernel = kernel
        self._clock = kernel.clock
        self.name = name
        self.index = index
        self.origin_ns, self.drift_ppb = node_clock
        self.dead = False
        self.frozen = False
        self.slow_percent = 100
        self._ready: deque[asyncio.Handle] = deque()
        self._io: list[asyncio.Handle] = []
        self._due: list[asyncio.Handle] = []
        self._inbox: deque[tuple[int, asyncio.Handle]] = deque()  # arrivals that cost service time, not yet served
        self._serving: asyncio.Handle | None = None
        self._todo = 0  # handles of the current iteration not yet run (it was cut by occupy or freeze)
        self._queued = False  # is in the kernel's runnable list
        self._blocked = False  # dead, frozen or occupied: nothing may run
        self._busy_until = 0
        self._instant = -1
        self._instant_callbacks = 0
        self._context = contextvars.Context()  # arrivals run in it: no context leaks from one actor into another
        self._asyncgens: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: list[Any] = []
        self._stopping = False
        self._closed = False
        self._debug = False
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._task_factory: Any = None
        self._asyncgens_shutdown_called = False
        self._unix_signal_handlers: dict[int, Any] = {}

    def __repr__(self) -> str:
        state = "dead" if self.dead else "frozen" if self.frozen else "alive"
        return f"<ActorLoop {self.name} {state}>"

    # --- what asyncio calls -------------------------------------------------------------------------------------

    def time(self) -> float:
        """Monotonic seconds by this node's clock."""
        t = self._clock._now
        if self.drift_ppb:
            t += t * self.drift_ppb // 1_000_000_000
        return (t + self.origin_ns) / 1_000_000_000

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = SimHandle(callback, args, self, context)
        if self.dead:
            return handle
        if self._closed:
            self._check_closed()
        self._ready.append(handle)
        if not self._queued and not self._blocked:
            self._queued = True
            self._kernel._runnable.append(self)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        # There is one thread in the simulated world, so this is call_soon; kept because libraries call it.
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if delay is None:
            raise TypeError("delay must not be None")
        clock = self._clock
        # A positive delay takes at least a nanosecond, so that `while time() < deadline: sleep(rest)` ends.
        ns = (round(delay * 1_000_000_000) or 1) if delay > 0 else 0
        if self.drift_ppb:
            ns = ns * 1_000_000_000 // (1_000_000_000 + self.drift_ppb)
        timer = SimTimer(self.time() + delay, callback, args, self, context)
        if not self.dead:
            if self._closed:
                self._check_closed()
            _heappush(clock._queue, (clock._now + ns, NORMAL, next(clock._eid), timer))  # type: ignore[misc]
        return timer

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if when is None:
            raise TypeError("when cannot be None")
        clock = self._clock
        t_ns = round(when * 1_000_000_000) - self.origin_ns
        if self.drift_ppb:
            t_ns = t_ns * 1_000_000_000 // (1_000_000_000 + self.drift_ppb)
        now = clock._now
        if t_ns <= now:
            # The deadline may be ahead by less than a nanosecond; see call_later.
            t_ns = now if when <= self.time() else now + 1
        timer = SimTimer(when, callback, args, self, context)
        if not self.dead:
            if self._closed:
                self._check_closed()
            _heappush(clock._queue, (t_ns, NORMAL, next(clock._eid), timer))  # type: ignore[misc]
        return timer

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        if self._closed:
            self._check_closed()
        if self._task_factory is not None:
            name = options.pop("name", None)
            task: asyncio.Task[Any] = self._task_factory(self, coro, **options)
            if name is not None and hasattr(task, "set_name"):
                task.set_name(name)
            return task
        return SimTask(coro, loop=self, **options)

    # --- what the actor layer calls --------------------------------------------------------------------------------

    def deliver(self, fn: Callable[..., object], *args: Any, cost_ns: int = 0) -> None:
        """An arrival: run ``fn(*args)`` in the next iteration, before timers that expired meanwhile.

        With ``cost_ns`` it first occupies the actor for that long, first come, first served (a single server). Arrivals
        of a frozen actor are buffered, those of a dead one dropped.
        """
        if self.dead:
            return
        handle = SimHandle(fn, args, self, self._context)
        if cost_ns and self.slow_percent != 100:
            cost_ns = cost_ns * self.slow_percent // 100
        if cost_ns or self._inbox:
            self._inbox.append((cost_ns, handle))
        else:
            self._io.append(handle)
        if not self._queued and not self._blocked:
            self._queued = True
            self._kernel._runnable.append(self)

    def occupy(self, duration_ns: int) -> None:
        """Keep the actor's one thread busy for that long, starting now or when it is free."""
        if self.dead or duration_ns <= 0:
            return
        now = self._clock._now
        start = self._busy_until if self._busy_until > now else now
        self._busy_until = start + duration_ns * self.slow_percent // 100
        self._blocked = True
        self._clock.call_at(self._busy_until, self._free)

    def _free(self) -> None:
        if self.dead or self._clock._now < self._busy_until:
            return
        if self._serving is not None:
            self._io.append(self._serving)
            self._serving = None
        if not self.frozen:
            self._blocked = False
            self._wake()

    def _wake(self) -> None:
        if not self._queued and not self._blocked:
            self._queued = True
            self._kernel._runnable.append(self)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = self._blocked = True

    def thaw(self) -> None:
        """SIGCONT: buffered arrivals run before expired timers, as in a selector loop."""
        self.frozen = False
        if not self.dead and self._clock._now >= self._busy_until:
            if self._serving is not None:
                self._io.append(self._serving)
                self._serving = None
            self._blocked = False
            self._wake()

    def kill(self) -> None:
        """SIGKILL. What is suspended is kept, unrun, until the kernel is closed: collecting it would run ``finally``."""
        if self.dead:
            return
        # Sorted, for asyncio.all_tasks gives a set; closing them later must have one order.
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        self.dead = self._blocked = True
        self._kept = [tasks, list(self._asyncgens), list(self._ready), list(self._io), list(self._due), list(self._inbox)]
        self._ready.clear()
        self._io.clear()
        self._due.clear()
        self._inbox.clear()
        self._todo = 0

    def await_event(self, event: Event) -> SimFuture:
        """A future of this actor for a SimPy event's value (or its exception)."""
        future = self.create_future()

        def fired(event: Event) -> None:
            if not event._ok:
                event.defused = True  # the awaiting task has it from here
            self.deliver(_settle, future, event._ok, event._value)

        if event.callbacks is None:
            self.deliver(_settle, future, event._ok, event._value)
        else:
            event.callbacks.append(fired)
        return future

    # --- running it alone: Runner, run_until_complete ---------------------------------------------------------------

    def run_forever(self) -> None:
        self._check_closed()
        self._kernel.run(lambda: self._stopping)
        self._stopping = False

    def run_until_complete(self, future: Any) -> Any:
        self._check_closed()
        if self.is_running():
            raise RuntimeError("This event loop is already running")
        if _aio_events._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")
        new_task = not asyncio.isfuture(future)
        future = asyncio.ensure_future(future, loop=self)
        if new_task:
            future._log_destroy_pending = False
        future.add_done_callback(self._stop_when_done)
        try:
            self.run_forever()
        except BaseException:
            if new_task and future.done() and not future.cancelled():
                future.exception()  # retrieved: the coroutine raised a BaseException that is on its way up
            raise
        finally:
            future.remove_done_callback(self._stop_when_done)
        if not future.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        return future.result()

    def _stop_when_done(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            error = future.exception()
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                return  # already on its way up through run()
        self.stop()

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._kernel.running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._kernel.current is self:
            raise RuntimeError("Cannot close a running event loop")
        self._closed = True
        self._ready.clear()

    def _check_closed(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    async def shutdown_asyncgens(self) -> None:
        self._asyncgens_shutdown_called = True
        closing = list(self._asyncgens)
        self._asyncgens.clear()
        results = await asyncio.gather(*[agen.aclose() for agen in closing], return_exceptions=True)
        for result, agen in zip(results, closing, strict=True):
            if isinstance(result, Exception):
                self.call_exception_handler(
                    {
                        "message": f"an error occurred during closing of asynchronous generator {agen!r}",
                        "exception": result,
                        "asyncgen": agen,
                    }
                )

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is never an executor to shut down."""

    # --- debugging, exceptions ----------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    def set_task_factory(self, factory: Any) -> None:
        if factory is not None and not callable(factory):
            raise TypeError("task factory must be a callable or None")
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def set_exception_handler(self, handler: Any) -> None:
        if handler is not None and not callable(handler):
            raise TypeError(f"A callable object or None is expected, got {handler!r}")
        self._exception_handler = handler

    def get_exception_handler(self) -> Any:
        return self._exception_handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self._kernel.anomaly(self, context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.dead:
            return
        if self._exception_handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.default_exception_handler(
                {"message": "Unhandled error in exception handler", "exception": error, "context": context}
            )

    # --- what the simulated world refuses, by name ----------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        _refuse("run_in_executor / to_thread", "put the work in another actor, or use backend().blocking(duration_s)")

    def set_default_executor(self, executor: Any) -> NoReturn:
        _refuse("set_default_executor", "there are no threads in the simulated world")

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> NoReturn:
        _refuse("add_reader", "use the handles and clients of protocol.ports")

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> NoReturn:
        _refuse("add_signal_handler", "backend().signal sends signals to actors")

    async def create_connection(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("create_connection", "use backend().engines.client or a handle")

    async def create_server(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("create_server", "spawn an actor")

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("getaddrinfo", "addresses are protocol.messages.EngineAddress")

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("subprocess_exec", "spawn an actor, or launch an engine through backend().engines")

    async def subprocess_shell(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("subprocess_shell", "spawn an actor, or launch an engine through backend().engines")


def _refuse(what: str, instead: str) -> NoReturn:
    raise RuntimeError(f"{what} is refused in the simulated world: {instead}")


def _settle(future: asyncio.Future[Any], ok: bool, value: Any) -> None:
    if future.done():
        return
    if ok:
        future.set_result(value)
    else:
        future.set_exception(value)


class Kernel:
    """Advances the clock and gives actors their turns.

    Args:
        explore: draws the next runnable actor and the order of equal times from this stream; None: creation order, FIFO.
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
        self.mix = 0  # rolling digest of (time, actor) of every iteration
        self.stall_ns = 900_000_000_000
        self.open_work: Callable[[], list[str]] = list
        self.on_anomaly: Callable[[ActorLoop | None, str, str], None] | None = None
        self.trace: Callable[[int, ActorLoop, asyncio.Handle], None] | None = None
        self._runnable: list[ActorLoop] = []
        self._numbers = count(1)
        self._cancelled_timers = 0
        self._last_progress = 0
        self._next_stall_check = 0

    @property
    def now_ns(self) -> int:
        return self.clock._now

    def new_loop(self, name: str = "main", node_clock: NodeClock = NodeClock()) -> ActorLoop:
        loop = ActorLoop(self, name, len(self.loops), node_clock)
        self.loops.append(loop)
        return loop

    # --- the main loop -----------------------------------------------------------------------------------------------

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
            sys.set_asyncgen_hooks(*hooks)
            if collecting:
                gc.enable()

    def _run(self, until: Callable[[], bool], until_ns: int | None) -> str:
        clock = self.clock
        queue: list[Any] = clock._queue
        instant_entries = 0
        while True:
            while self._runnable:
                runnable = self._runnable
                if len(runnable) == 1:
                    loop = runnable.pop()
                elif self.explore is not None:
                    loop = runnable.pop(self.explore.below(len(runnable)))
                else:
                    # A round: everyone who is runnable now gets one turn, in creation order, before anyone gets two.
                    self._runnable = []
                    runnable.sort(key=_index)
                    for loop in runnable:
                        self._iterate(loop)
                    if until():
                        return "completed"
                    continue
                self._iterate(loop)
                if until():
                    return "completed"
            if until():
                return "completed"
            if not queue:
                raise SimulationStopped("deadlock", self.report("nothing is scheduled any more"))
            t_ns = queue[0][0]
            if until_ns is not None and t_ns > until_ns:
                clock._now = until_ns
                return "time_limit"
            if t_ns != clock._now:
                clock._now = t_ns
                instant_entries = 0
                if t_ns >= self._next_stall_check:
                    self._check_stall(t_ns)
            # Everything of this instant is taken before any actor runs, so that an actor's arrivals and timers of one
            # instant meet in one iteration, as they would behind one select().
            while queue and queue[0][0] == t_ns:
                item = _heappop(queue)[3]
                kind = type(item)
                if kind is SimTimer:
                    item._scheduled = False
                    if item._cancelled:
                        self._cancelled_timers -= 1
                        continue
                    loop = item._loop
                    if loop.dead:
                        continue
                    if not item.background:
                        self._last_progress = t_ns
                    loop._due.append(item)
                    if not loop._queued and not loop._blocked:
                        loop._queued = True
                        self._runnable.append(loop)
                elif kind is Entry:
                    fn = item.fn
                    if fn is not None:
                        if not item.background:
                            self._last_progress = t_ns
                        fn(*item.args)
                else:
                    # A SimPy event: what simpy.Environment.step does with it.
                    callbacks, item.callbacks = item.callbacks, None
                    for callback in callbacks:
                        callback(item)
                    if not item._ok and not hasattr(item, "_defused"):
                        raise item._value
                    self._last_progress = t_ns
                self.steps += 1
                if self.steps % _GC_STEPS == 0:
                    self._collect()
                instant_entries += 1
                if instant_entries > 100 * LIVELOCK_CALLBACKS:
                    raise SimulationStopped("livelock", f"{instant_entries} kernel events at {t_ns} ns")

    def _iterate(self, loop: ActorLoop) -> None:
        """One asyncio iteration of one actor."""
        loop._queued = False
        if loop._blocked:
            return
        ready = loop._ready
        todo = loop._todo
        if not todo:
            if loop._io:
                ready.extend(loop._io)
                loop._io.clear()
            if loop._due:
                if self.explore is not None and len(loop._due) + len(ready) > 1 and self.explore.below(2):
                    ready.extendleft(reversed(loop._due))  # a time-out may also win against the reply of its instant
                else:
                    ready.extend(loop._due)
                loop._due.clear()
            todo = len(ready)
            if not todo and loop._inbox:
                # Idle, and messages wait: serve the first. Its handler runs when its cost has been paid.
                cost_ns, handle = loop._inbox.popleft()
                loop._serving = handle
                if cost_ns:
                    now = self.clock._now
                    loop._busy_until = now + cost_ns
                    loop._blocked = True
                    self.clock.call_at(loop._busy_until, loop._free)
                else:
                    loop._io.append(handle)
                    loop._serving = None
                    loop._wake()
                return
        now = self.clock._now
        self.mix = (self.mix * 1_000_003 ^ now ^ (loop.index << 1)) & 0xFFFF_FFFF_FFFF_FFFF
        if loop._instant != now:
            loop._instant = now
            loop._instant_callbacks = 0
        loop._instant_callbacks += todo
        if loop._instant_callbacks > LIVELOCK_CALLBACKS:
            raise SimulationStopped("livelock", self._livelock_report(loop))
        self.callbacks += todo
        trace = self.trace
        self.current = loop
        _set_running(loop)
        try:
            while todo:
                todo -= 1
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                if trace is not None:
                    trace(now, loop, handle)
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    loop.call_exception_handler(
                        {"message": f"Exception in callback {handle._callback!r}", "exception": error, "handle": handle}
                    )
                if loop._blocked:
                    break
        finally:
            _set_running(None)
            self.current = None
        if loop.dead:
            return
        loop._todo = todo
        if not loop._queued and not loop._blocked and (ready or loop._inbox or loop._io or loop._due):
            loop._queued = True
            self._runnable.append(loop)

    # --- housekeeping ----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        rounds = self.steps // _GC_STEPS
        gc.collect(2 if rounds % _GC_FULL == 0 else 1)

    def _timer_cancelled(self) -> None:
        self._cancelled_timers += 1
        queue: list[Any] = self.clock._queue
        if self._cancelled_timers > 1000 and self._cancelled_timers * 2 > len(queue):
            # As asyncio does: long time-outs are nearly always cancelled, and must not pile up. Keys are unique, so
            # the order of what stays does not depend on the shape of the heap.
            kept = []
            for entry in queue:
                item = entry[3]
                if type(item) is SimTimer and (item._cancelled or item._loop.dead):
                    item._scheduled = False
                elif type(item) is not Entry or item.fn is not None:
                    kept.append(entry)
            queue[:] = kept  # in place: _run holds a reference
            heapq.heapify(queue)
            self._cancelled_timers = 0

    def _check_stall(self, t_ns: int) -> None:
        """Is only background work left while something is open?"""
        self._next_stall_check = t_ns + 5_000_000_000
        quiet = t_ns - self._last_progress
        if quiet < 5_000_000_000:
            return
        work = self.open_work()
        if not work:
            return
        if quiet < self.stall_ns:
            for entry in self.clock._queue:
                item: Any = entry[3]
                kind = type(item)
                if kind is SimTimer:
                    if not item.background and not item._cancelled and not item._loop.dead:
                        return
                elif kind is Entry:
                    if item.fn is not None and not item.background:
                        return
                else:
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
            name = owner.get_name() if isinstance(owner, asyncio.Task) else repr(handle._callback)
            names[name] = names.get(name, 0) + 1
        busiest = ", ".join(f"{name} x{number}" for name, number in sorted(names.items()))
        return f"{loop.name} ran {LIVELOCK_CALLBACKS} callbacks at {self.clock._now} ns without time moving; ready: {busiest}"

    def anomaly(self, loop: ActorLoop | None, context: dict[str, Any]) -> None:
        """What asyncio would log goes to the evidence instead (``run.anomaly``), or to stderr when nobody listens."""
        text = context.get("message", "")
        what = "unretrieved" if "never retrieved" in text else "loop_exception"
        error = context.get("exception")
        detail = f"{text}: {type(error).__name__}: {error}" if error is not None else text
        if self.on_anomaly is not None:
            self.on_anomaly(loop, what, detail)
        else:
            print(f"{loop.name if loop else 'kernel'}: {detail}", file=sys.stderr)

    def _asyncgen_first(self, agen: Any) -> None:
        if self.current is not None:
            self.current._asyncgens.add(agen)

    def _asyncgen_final(self, agen: Any) -> None:
        loop = self.current
        if loop is None or loop.dead or loop._closed or agen not in loop._asyncgens:
            return
        loop._asyncgens.discard(agen)
        if self.on_anomaly is not None:
            self.on_anomaly(loop, "unfinished_generator", getattr(agen, "__qualname__", "async generator"))
        loop.call_soon(loop.create_task, agen.aclose())

    def close(self) -> None:
        """Seal every port, then close what is still suspended, in creation order. Nothing it does has an effect."""
        for loop in self.loops:
            loop.kill()
        for loop in self.loops:
            kept, loop._kept = loop._kept, []
            for task in kept[0] if kept else ():
                task._log_destroy_pending = False
                coroutine: Any = task.get_coro()
                try:
                    coroutine.close()
                except BaseException:  # noqa: BLE001, S110 - a `finally` that awaits or raises: nobody is left to hear it
                    pass
            loop._closed = True
            loop.seatrial_backend = None
        self.clock._queue.clear()
        self._runnable.clear()


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


def current_loop() -> ActorLoop | None:
    """The actor loop that is running now, or None outside of any actor."""
    loop = _aio_events._get_running_loop()
    return loop if isinstance(loop, ActorLoop) else None


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
