"""The read time-outs of HTTP exchanges, one queue for all that have the same.

Nearly every exchange is answered long before. A timer of its own for each would fill the clock's queue with entries
that do nothing, and every other event would pay for its length. Here one entry stands for a whole queue, at the place
in the order of events that the timer of its first open exchange would have.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sim.clock import Clock, Entry

_MOST_SETTLED = 1000


class Waiting(Protocol):
    """What waits for an answer: an exchange."""

    read_at: tuple[int, int]

    @property
    def settled(self) -> bool:
        """It has its answer, or will never need one."""

    def read_expired(self) -> None:
        """Its time is over."""


class ReadTimeouts:
    """The open exchanges with one read time-out, in order of their deadlines.

    Args:
        clock: of the world.
        timeout_ns: of all of them.
        background: whether they belong to background work.
    """

    __slots__ = ("_armed", "_background", "_clock", "_entry", "_settled", "_waiting", "timeout_ns")

    def __init__(self, clock: Clock, timeout_ns: int, background: bool) -> None:
        self._clock = clock
        self.timeout_ns = timeout_ns
        self._background = background
        self._waiting: deque[Waiting] = deque()
        self._settled = 0  # of those in the queue
        self._armed: tuple[int, int] | None = None  # whose place the entry has
        self._entry: Entry | None = None

    def add(self, exchange: Waiting) -> None:
        """Call ``exchange.read_expired`` when the time-out from now is over, unless it is settled by then."""
        clock = self._clock
        waiting = self._waiting
        exchange.read_at = (clock._now + self.timeout_ns, clock.next_number())
        while waiting and waiting[0].settled:
            waiting.popleft()
            self._settled -= 1
        if self._settled > _MOST_SETTLED and self._settled * 2 > len(waiting):
            # One that is never answered holds up those behind it.
            self._waiting = waiting = deque(one for one in waiting if not one.settled)
            self._settled = 0
        waiting.append(exchange)
        if self._armed is None:
            self._arm(exchange)

    def note_settled(self) -> None:
        """One of the queue's exchanges has been settled. With the last of them the entry goes: it would be no work."""
        self._settled += 1
        if self._settled == len(self._waiting):
            self._waiting.clear()
            self._settled = 0
            self._armed = None
            if self._entry is not None:
                self._entry.cancel()
                self._entry = None

    def _arm(self, first: Waiting) -> None:
        self._armed = t_ns, number = first.read_at
        self._entry = self._clock.call_in_place(t_ns, number, self._fire, background=self._background)

    def _fire(self) -> None:
        armed, self._armed, self._entry = self._armed, None, None
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            if first.settled:
                waiting.popleft()
                self._settled -= 1
            elif first.read_at == armed:
                waiting.popleft()
                first.read_expired()
            else:
                self._arm(first)
                return
