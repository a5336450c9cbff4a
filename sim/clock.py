"""The clock of a run: a SimPy environment of integer nanoseconds, and the clocks that nodes show."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event

_heappush: Callable[[Any, Any], None] = heapq.heappush  # SimPy types times as floats; here they are ints


class Draw(Protocol):
    """What exploring needs of a random stream (``sim.random.Stream`` is one)."""

    def next64(self) -> int: ...

    def below(self, n: int) -> int: ...

    def numbered(self) -> Iterator[int]: ...


class SimulationStopped(Exception):
    """The run cannot go on. ``reason`` is that of ``run.finished``; ``report`` says who waits for whom."""

    def __init__(self, reason: str, report: str) -> None:
        super().__init__(f"{reason}: {report}")
        self.reason = reason
        self.report = report


class Entry:
    """A scheduled kernel callback: no actor, no task, no context. ``cancel()`` is idempotent."""

    __slots__ = ("fn", "args", "background", "clock")

    clock: Clock
    fn: Callable[..., object] | None
    args: tuple[Any, ...]
    background: bool

    def cancel(self) -> None:
        if self.fn is not None:
            self.fn = None
            self.args = ()
            self.clock.note_cancelled()

    @property
    def gone(self) -> bool:
        return self.fn is None


NEVER_NS = 1 << 80
"""From this time on (38 million years) nothing happens any more: what is scheduled then is kept, and never due."""
FEW_CANCELLED = 100
"""So many cancelled entries may lie in the queue, whatever its length; the number is asyncio's own."""


class Clock(simpy.Environment):
    """A SimPy environment whose time is an int count of nanoseconds; SimPy processes and resources run unchanged."""

    _now: int

    def __init__(self, ties: Draw | None = None) -> None:
        super().__init__(initial_time=0)
        if ties is not None:
            # Equal times are permuted: the tie-breaker is a draw, made unique by a counter in its low bits.
            self._eid = ties.numbered()  # type: ignore[assignment]  # SimPy only calls next on it
        # Boundaries of engines have a priority each and tie with nobody. A draw for each would make the order of all
        # else depend on how many of them are skipped.
        self._boundaries = count()
        self.cancelled = 0  # entries and timers in the queue that will do nothing

    def schedule(self, event: Event, priority: int = NORMAL, delay: int = 0) -> None:  # type: ignore[override]  # ns
        if type(delay) is not int:
            raise TypeError(f"simulated time is an int count of nanoseconds; got a delay of {delay!r}")
        number = next(self._eid if priority <= NORMAL else self._boundaries)
        _heappush(self._queue, (self._now + delay, priority, number, event))

    def call_at(self, t_ns: int, fn: Callable[..., object], *args: Any, background: bool = False) -> Entry:
        """Run ``fn(*args)`` at ``t_ns`` (not before now), outside of any actor."""
        entry = Entry()  # filled here, without an __init__: engines make one for every step
        entry.clock = self
        entry.fn = fn
        entry.args = args
        entry.background = background
        _heappush(self._queue, (t_ns if t_ns > self._now else self._now, NORMAL, next(self._eid), entry))
        return entry

    def call_after(self, delay_ns: int, fn: Callable[..., object], *args: Any, background: bool = False) -> Entry:
        return self.post(delay_ns, fn, args, background)

    def post(self, delay_ns: int, fn: Callable[..., object], args: tuple[Any, ...], background: bool) -> Entry:
        """:meth:`call_after` for messages, whose arguments are packed already."""
        entry = Entry()
        entry.clock = self
        entry.fn = fn
        entry.args = args
        entry.background = background
        _heappush(self._queue, (self._now + delay_ns, NORMAL, next(self._eid), entry))
        return entry

    def next_number(self) -> int:
        """A place in the order of equal times, to be used later by :meth:`call_in_place`."""
        return next(self._eid)

    def call_in_place(self, t_ns: int, number: int, fn: Callable[..., object], *, background: bool = False) -> Entry:
        """As :meth:`call_at`, ordered among equal times as if it had been asked for when ``number`` was taken."""
        entry = Entry()
        entry.clock = self
        entry.fn = fn
        entry.args = ()
        entry.background = background
        _heappush(self._queue, (t_ns, NORMAL, number, entry))
        return entry

    def note_cancelled(self) -> None:
        """Something in the queue was cancelled."""
        self.cancelled += 1
        if self.cancelled > FEW_CANCELLED:
            self.compact()

    def compact(self) -> None:
        """Take what was cancelled out of the queue when that is most of it.

        As asyncio does: long time-outs are nearly always cancelled, and must not pile up. Keys are unique, so the
        order of what stays does not depend on the shape of the heap.
        """
        queue: list[Any] = self._queue
        if self.cancelled * 2 > len(queue):
            queue[:] = [entry for entry in queue if isinstance(entry[3], Event) or not entry[3].gone]  # in place:
            heapq.heapify(queue)  # the kernel holds a reference to the list
            self.cancelled = 0

    def step(self) -> None:
        raise EmptySchedule("the Kernel advances this clock")


class NodeClock(NamedTuple):
    """A node's monotonic clock: an origin of its own and a drift in parts per billion."""

    origin_ns: int = 0
    drift_ppb: int = 0
