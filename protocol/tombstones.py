"""Who is over, remembered for a while: tombstones of the affinity router and of the trace store (serving.md 4.2).

What comes late for somebody who is over is told apart from what comes early for somebody new. Names are never used
again, so remembering one for too long harms nobody; the rule below is there so that memory has a bound.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable


class Tombstones:
    """Names of those who are over. Part of an actor, not one itself.

    A name is forgotten ``ttl_s`` after it was added; or earlier, oldest first, while there are more than ``most``.

    Args:
        ttl_s: how long a name is remembered, s; longer than anything of it can be under way.
        most: how many are remembered.
        let_go: called for each name that is forgotten, so that nothing else of it is left.
    """

    def __init__(self, ttl_s: float, most: int, let_go: Callable[[str], object] | None = None) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._let_go = let_go
        # Name -> when it is forgotten, in order. No dict: its first is found past all that was taken out of it.
        self._ends: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, names: tuple[str, ...], now: float) -> int:
        """They are over since ``now``, a time of the loop; again for one that was over already changes nothing.

        Returns how many are forgotten early for it.
        """
        for name in names:
            self._ends.setdefault(name, now + self._ttl_s)
        return self._forget(list(itertools.islice(self._ends, max(len(self._ends) - self._most, 0))))

    def expire(self, now: float) -> int:
        """Forget those whose time is over; returns how many."""
        over = []
        for name, ends in self._ends.items():
            if ends > now:
                break
            over.append(name)
        return self._forget(over)

    def _forget(self, names: list[str]) -> int:
        for name in names:
            del self._ends[name]
            if self._let_go is not None:
                self._let_go(name)
        return len(names)
