"""The clock of a run: a SimPy environment of integer nanoseconds, and the clocks that nodes show."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event

_heappush = heapq.heappush


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
    """A SimPy environment whose time is an int count of nanoseconds; SimPy processes and resources run unchanged."""

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
