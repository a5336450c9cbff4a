"""What came before what: the order of two events, or the admission that it is not known.

Source: DESIGN.md, "What came before what".
"""

from __future__ import annotations

import bisect
from typing import Literal

from protocol.evidence import Event

Relation = Literal["before", "after", "unordered"]
Process = tuple[str, int]

_KEPT = 4096  # causal snapshots per process; older ones only make pairs unordered, never wrongly ordered


class Order:
    """Orders events by cause, by the process's own counter, or by a gap above the clock error.

    Feed every event in file order, then ask about any two that were fed. With a clock error of zero (the simulated
    world) the file order is the order, and nothing is kept.

    Args:
        clock_error_ns: bound on the difference of two processes' clocks.
    """

    def __init__(self, clock_error_ns: int = 0) -> None:
        self.clock_error_ns = clock_error_ns
        # Per process: counters at which it learnt of others, and what it knew from then on.
        self._when: dict[Process, list[int]] = {}
        self._knew: dict[Process, list[dict[Process, int]]] = {}

    def see(self, event: Event) -> None:
        """Take in the causes of one event."""
        if not self.clock_error_ns or event.cause is None:
            return
        sender, counter = parse_cause(event.cause)
        process = (event.actor, event.inc)
        known = dict(self.known_at(process, event.n))
        for other, n in self.known_at(sender, counter).items():
            if known.get(other, -1) < n:
                known[other] = n
        if known.get(sender, -1) < counter:
            known[sender] = counter
        when = self._when.setdefault(process, [])
        knew = self._knew.setdefault(process, [])
        when.append(event.n)
        knew.append(known)
        if len(when) > _KEPT:
            del when[: _KEPT // 2], knew[: _KEPT // 2]

    def known_at(self, process: Process, counter: int) -> dict[Process, int]:
        """Per other process, the highest counter that happened before this process's event ``counter`` (or is it)."""
        when = self._when.get(process)
        if not when:
            return {}
        index = bisect.bisect_right(when, counter) - 1
        return self._knew[process][index] if index >= 0 else {}

    def compare(self, a: Event, b: Event) -> Relation:
        """``before`` when a happened before b, ``after`` the other way round, else ``unordered``."""
        if not self.clock_error_ns:
            return "before" if a.seq < b.seq else "after"
        if (a.actor, a.inc) == (b.actor, b.inc):
            return "before" if a.n < b.n else "after"
        if self.known_at((b.actor, b.inc), b.n).get((a.actor, a.inc), -1) >= a.n:
            return "before"
        if self.known_at((a.actor, a.inc), a.n).get((b.actor, b.inc), -1) >= b.n:
            return "after"
        if b.t_ns - a.t_ns > self.clock_error_ns:
            return "before"
        if a.t_ns - b.t_ns > self.clock_error_ns:
            return "after"
        return "unordered"


def parse_cause(cause: str) -> tuple[Process, int]:
    """``actor/incarnation/n`` taken apart; actor names may hold slashes.

    Raises:
        ValueError: it is not of that form.
    """
    try:
        actor, inc, n = cause.rsplit("/", 2)
        return (actor, int(inc)), int(n)
    except ValueError as error:
        raise ValueError(f"cause {cause!r} is not actor/incarnation/n") from error
