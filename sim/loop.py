"""The simulated event loop: one asyncio loop per actor, all on one SimPy clock of integer nanoseconds.

An actor's iteration is asyncio's: what was ready, then arrivals ("I/O"), then expired timers; what these add runs in
the next iteration. `sim.kernel` gives actors their turns. One loop *object* per actor makes ownership a fact of the
object graph: a task, future or timer belongs to the actor whose loop made it, whatever user code does with context
variables, and killing an actor is one flag that every one of its ports tests.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import weakref
from asyncio import events as _aio_events
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simpy.events import NORMAL, Event

from sim.clock import NEVER_NS, NodeClock
from sim.loop_objects import SimFuture, SimHandle, SimTask
from sim.refused import RefusedLoop

if TYPE_CHECKING:
    from sim.kernel import Kernel

_heappush: Callable[[Any, Any], None] = heapq.heappush  # SimPy types times as floats; here they are ints

background: contextvars.ContextVar[bool] = contextvars.ContextVar("seatrial_background", default=False)
"""True inside periodic work and what it calls: no progress for the deadlock detector."""


_copy_context = contextvars.copy_context
_PLAIN = object()


class ActorLoop(RefusedLoop):
    """One actor's asyncio event loop. Made by ``Kernel.new_loop``.

    States beside asyncio's: *occupied* (its one thread is busy until some time), *frozen* (SIGSTOP) and *dead*
    (SIGKILL: every port drops silently from that instant, even for the rest of the current synchronous step).
    """

    seatrial_backend: Any = None

    # More than 30 fields, beyond which instances share no keys: slots are smaller, and quicker to reach.
    __slots__ = (
        "_ahead", "_asyncgens", "_blocked", "_busy_until", "_clock", "_closed", "_context",
        "_debug", "_due", "_exception_handler", "_inbox", "_instant", "_instant_callbacks", "_io", "_kept",
        "_kernel", "_queued", "_ready", "_serving", "_shut", "_stopping", "_task_factory", "_todo",
        "dead", "drift_ppb", "frozen", "index", "name", "origin_ns", "slow_percent",
    )

    def __init__(self, kernel: Kernel, name: str, index: int, node_clock: NodeClock) -> None:
        self._kernel = kernel
        self._clock = kernel.clock
        self.name = name
        self.index = index
        self.origin_ns, self.drift_ppb = node_clock
        self.dead = False
        self._shut = False  # dead or closed: nothing is scheduled any more
        self.frozen = False
        self.slow_percent = 100
        self._ready: deque[Any] = deque()
        self._io: list[Any] = []
        self._due: list[Any] = []
        self._inbox: deque[tuple[int, SimHandle]] = deque()  # arrivals that cost service time, not yet served
        self._serving: SimHandle | None = None
        self._ahead = 0  # since SIGCONT: 1, and 1 for each buffered arrival in the inbox, which expired timers wait for
        self._todo = 0  # handles of the current iteration not yet run (it was cut by occupy or freeze)
        self._queued = False  # is in the kernel's runnable list
        self._blocked = False  # dead, frozen or occupied: nothing may run
        self._busy_until = 0
        self._instant = -1
        self._instant_callbacks = 0
        self._context = contextvars.Context()  # arrivals run in it: no context leaks from one actor into another
        self._asyncgens: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in order of creation
        self._kept: list[Any] = []
        self._stopping = False
        self._closed = False
        self._debug = False
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._task_factory: Any = None

    def __repr__(self) -> str:
        state = "dead" if self.dead else "frozen" if self.frozen else "alive"
        return f"<ActorLoop {self.name} {state}>"

    # --- what asyncio calls ---

    def time(self) -> float:
        """Monotonic seconds by this node's clock."""
        t = self._clock._now
        if self.drift_ppb:
            t += t * self.drift_ppb // 1_000_000_000
        return (t + self.origin_ns) / 1_000_000_000

    def _handle(self, callback: Any, args: Any, context: contextvars.Context | None) -> SimHandle:
        handle: Any = SimHandle()
        handle._context = _copy_context() if context is None else context
        handle._loop = self
        handle._callback = callback
        handle._args = args
        handle._cancelled = False
        handle._repr = None
        handle._source_traceback = None
        handle._when = None
        handle._scheduled = False  # in the clock's queue
        return handle

    def call_soon(  # type: ignore[override]  # gives our handle
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        # _handle written out, as in call_later: these two run for everything that an actor does.
        handle: Any = SimHandle()
        handle._context = _copy_context() if context is None else context
        handle._loop = self
        handle._callback = callback
        handle._args = args
        handle._cancelled = False
        handle._repr = None
        handle._source_traceback = None
        handle._when = None
        handle._scheduled = False  # in the clock's queue
        if self._shut:
            self._check_closed()
            return handle
        self._ready.append(handle)
        if not self._queued and not self._blocked:
            self._queued = True
            self._kernel._runnable.append(self)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]  # gives our handle
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        # There is one thread in the simulated world, so this is call_soon; kept because libraries call it.
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]  # gives our handle
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if delay is None:
            raise TypeError("delay must not be None")
        clock = self._clock
        # A positive delay takes at least a nanosecond, so that `while time() < deadline: sleep(rest)` ends. NaN is due
        # at once: no comparison with it holds, here as in asyncio's heap.
        try:
            ns = (round(delay * 1_000_000_000) or 1) if delay > 0 else 0
        except OverflowError:
            return self._call_outside_of_time(self.time() + delay, callback, args, context)
        if self.drift_ppb:
            return self.call_at(self.time() + delay, callback, *args, context=context)
        t_ns = clock._now + ns
        timer: Any = SimHandle()
        timer._context = _copy_context() if context is None else context
        timer._loop = self
        timer._callback = callback
        timer._args = args
        timer._cancelled = False
        timer._repr = None
        timer._source_traceback = None
        timer._when = (t_ns + self.origin_ns) / 1_000_000_000
        timer._scheduled = True
        if self._shut:
            self._check_closed()
        else:
            _heappush(clock._queue, (t_ns, NORMAL, next(clock._eid), timer))
        return timer

    def call_at(  # type: ignore[override]  # gives our handle
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if when is None:
            raise TypeError("when cannot be None")
        clock = self._clock
        try:
            t_ns = round(when * 1_000_000_000) - self.origin_ns
        except (OverflowError, ValueError):
            return self._call_outside_of_time(when, callback, args, context)
        if self.drift_ppb:
            t_ns = -(-t_ns * 1_000_000_000 // (1_000_000_000 + self.drift_ppb))  # up: never early by its own clock
        now = clock._now
        if t_ns <= now:
            # The deadline may be ahead by less than a nanosecond; see call_later.
            t_ns = now if when <= self.time() else now + 1
        timer: Any = self._handle(callback, args, context)
        timer._when = when
        timer._scheduled = True
        if self._shut:
            self._check_closed()
        else:
            _heappush(clock._queue, (t_ns, NORMAL, next(clock._eid), timer))
        return timer

    def _call_outside_of_time(
        self, when: float, callback: Any, args: Any, context: contextvars.Context | None
    ) -> asyncio.TimerHandle:
        """A timer for a time that is no count of nanoseconds: never due (but held, as any other) or due at once."""
        timer: Any = self._handle(callback, args, context)
        timer._when = when
        timer._scheduled = True
        if self._shut:
            self._check_closed()
        else:
            clock = self._clock
            t_ns = NEVER_NS if when > 0 else clock._now  # at once: -inf, and NaN
            _heappush(clock._queue, (t_ns, NORMAL, next(clock._eid), timer))
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
        made = SimTask(coro, loop=self, **options)
        if options and options.get("name") is not None:
            made._named = True
        if self.dead:
            # The rest of a synchronous step after SIGKILL: the task never runs, and must not be collected early.
            self._kept[0].append(made)
        return made

    # --- what the actor layer calls ---

    def deliver(self, fn: Callable[..., object], *args: Any, cost_ns: int = 0, plain: bool = False) -> None:
        """An arrival: run ``fn(*args)`` in the next iteration, before timers that expired meanwhile.

        With ``cost_ns`` it first occupies the actor for that long, first come, first served (a single server). Arrivals
        of a frozen actor are buffered, those of a dead one dropped. ``plain``: ``fn`` runs none of the actor's code, so
        that it may be called without an iteration where the actor has nothing else to do.
        """
        if self.dead:
            return
        handle = self._handle(fn, args, self._context)
        if plain:
            handle._when = _PLAIN  # it is no timer, so the field is free
        if cost_ns and self.slow_percent != 100:
            cost_ns = cost_ns * self.slow_percent // 100
        if cost_ns or self._inbox:
            if self._kernel.current is not self and not (
                self._queued or self._blocked or self._ready or self._io or self._due or self._todo
            ):
                self._serve(cost_ns, handle)  # idle: an iteration would find just this
                return
            self._inbox.append((cost_ns, handle))
        else:
            self._io.append(handle)
        if not self._queued and not self._blocked:
            self._queued = True
            self._kernel._runnable.append(self)

    def _serve(self, cost_ns: int, handle: SimHandle) -> None:
        """Begin with a message: its handler runs when its cost has been paid."""
        self._serving = handle
        if cost_ns:
            clock = self._clock
            self._busy_until = until = clock._now + cost_ns
            self._blocked = True
            # Whether this is progress is told by the message served, not by its cost.
            clock.call_at(until, self._free, background=True)
        else:
            self._io.append(handle)
            self._serving = None
            self._wake()

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
        serving = self._serving
        self._serving = None
        if self.frozen:
            if serving is not None:
                self._io.append(serving)
            return
        self._blocked = False
        if serving is not None:
            if serving._when is _PLAIN and not (self._ready or self._io or self._due or self._todo):
                serving._callback(*serving._args)
            else:
                self._io.append(serving)
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
        self._ahead = 1 + len(self._inbox)
        if not self.dead and self._clock._now >= self._busy_until:
            if self._serving is not None:
                self._io.append(self._serving)
                self._serving = None
            self._blocked = False
            self._wake()

    def kill(self) -> None:
        """SIGKILL. What is suspended is kept, unrun, until the kernel closes: collecting it would run ``finally``."""
        if self.dead:
            return
        # Sorted, for asyncio.all_tasks gives a set; closing them later must have one order.
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        self.dead = self._shut = self._blocked = True
        held = (self._asyncgens, self._ready, self._io, self._due, self._inbox)
        self._kept = [tasks, *(list(things) for things in held)]
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

    # --- running it alone: Runner, run_until_complete ---

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
        self._closed = self._shut = True
        self._ready.clear()

    def _check_closed(self) -> None:
        if self._closed and not self.dead:  # of a run that is over, what the collector finds later schedules nothing
            raise RuntimeError("Event loop is closed")

    async def shutdown_asyncgens(self) -> None:
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

    # --- debugging, exceptions ---

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


def _settle(future: asyncio.Future[Any], ok: bool, value: Any) -> None:
    if future.done():
        return
    if ok:
        future.set_result(value)
    else:
        future.set_exception(value)


def current_loop() -> ActorLoop | None:
    """The actor loop that is running now, or None outside of any actor."""
    loop = _aio_events._get_running_loop()
    return loop if isinstance(loop, ActorLoop) else None
