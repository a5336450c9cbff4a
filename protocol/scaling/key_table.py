"""What idempotency keys have answered, bounded in number and in time (scaling.md 1.7)."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from protocol.scaling.contract import Direction

R = TypeVar("R")


class KeyTable(OrderedDict[tuple[Direction, str], R]):
    """What the idempotency keys of both directions have answered, in the order of creation.

    A step looks at what it lets go of, and at what is held before that, which are few; not at all that is kept.

    Args:
        most: keys that are kept, beside those that are held.
        expired: whether the window of a record is over; of two, never that of the younger one alone.
        held: whether a record must stay, however old it is.
    """

    def __init__(self, most: int, expired: Callable[[R], bool], held: Callable[[R], bool]) -> None:
        super().__init__()
        self._most = most
        self._expired = expired
        self._held = held

    def remember(self, direction: Direction, key: str, record: R) -> None:
        """Keep what a key is answered, and let go of what is too old or too much, oldest first."""
        self.pop((direction, key), None)
        self[direction, key] = record
        self.expire()
        excess = len(self) - self._most
        if excess > 0:
            evictable = (name for name, one in self.items() if not self._held(one))
            for old in list(itertools.islice(evictable, excess)):
                del self[old]

    def expire(self) -> None:
        """Forget the keys whose window is over."""
        over = []
        for name, record in self.items():
            if not self._expired(record):
                break
            if not self._held(record):
                over.append(name)
        for name in over:
            del self[name]
