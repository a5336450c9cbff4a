"""What a control API of scaling remembers, and for how long (scaling.md 1.7). From operators' questions and answers.

Only where its bounds are on record (``scale.bounds``): the usual ones are beyond any run.
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.scaling_views import SUBMISSIONS, Operators
from protocol.evidence import Event

_ABOVE = 2  # a hard ceiling is this much above a bound: two for the one model of a service


class MemoryIsBounded(Check):
    """An API keeps as many resolved operations and keys as it may, and no unresolved one is ever forgotten.

    An operation (a key) that at least ``max_history`` (``max_keys``) resolved operations (keys) and the ceiling have
    come after is forgotten: the status says 404, the key is as good as new. That one is forgotten too early cannot be
    told from here, for other models of the same API may have operations too; but none that is not resolved, and none
    that a key has just been answered with. Kills M24 (history without a bound), M25 (keys without one, keys that
    outlive their operation) and M26 (eviction of what is unresolved).
    """

    name = "memory_is_bounded"
    expected = "old operations and keys are forgotten, unresolved ones are not"
    needs = ("scale.bounds",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._operators = Operators()
        self._bounds: dict[str, Event] = {}
        self._resolved: dict[str, int] = {}  # operation -> its number in the order in which it was seen resolved
        self._lost: dict[str, int] = {}  # operation -> seq of the 404
        self._named: dict[str, Event] = {}  # operation -> answer to a key used again, until its status is known
        self._keys: dict[tuple[str, str, str], tuple[int, Event]] = {}  # key -> number and answer of its first use
        self._fresh = 0  # first uses of keys so far

    def handlers(self) -> dict[str, Handler]:
        return {
            "scale.bounds": self._on_bounds,
            "scale.asked": self._operators.on_asked,
            "scale.answered": self._on_answered,
        }

    def _on_bounds(self, event: Event) -> None:
        self._bounds[event.data["service"]] = event

    def _on_answered(self, event: Event) -> None:
        asked = self._operators.on_answered(event)
        if asked is None or asked.data["service"] not in self._bounds:
            return
        if asked.data["route"] in SUBMISSIONS:
            if asked.data["key"] is not None and event.data["status"] == 200:
                self._on_key(asked, event)
        elif asked.data["route"] == "status":
            self._on_status(asked, event)

    def _on_status(self, asked: Event, event: Event) -> None:
        operation, bounds = asked.data["operation"], self._bounds[asked.data["service"]]
        seen = self._operators.operations.get(operation)
        if seen is None:
            return
        most = bounds.data["max_history"]
        newer = len(self._resolved) - 1 - self._resolved[operation] if operation in self._resolved else 0
        self.judged += 1
        if event.data["status"] == 404:
            self._lost[operation] = event.seq
            answered = self._named.get(operation)
            if not seen.resolved:
                self.violation(f"{operation} is forgotten while it is {seen.state}", seen.admitted_seq, event.seq)
            elif answered is not None:
                self.violation(
                    f"a key was answered with {operation}, which is not known any more", answered.seq, event.seq
                )
        elif event.data["status"] == 200:
            if newer >= most + _ABOVE:
                self.violation(
                    f"{operation} is still known after {newer} others were over; {most} are kept",
                    bounds.seq,
                    event.seq,
                )
            self._named.pop(operation, None)
            if seen.resolved:
                self._resolved.setdefault(operation, len(self._resolved))

    def _on_key(self, asked: Event, event: Event) -> None:
        data, most = asked.data, self._bounds[asked.data["service"]].data["max_keys"]
        key = (data["service"], data["direction"], data["key"])
        self.judged += 1
        if event.data["operation"] in self._lost:
            self.violation(
                f"key {data['key']!r} is answered with {event.data['operation']}, which is not known any more",
                self._lost[event.data["operation"]],
                event.seq,
            )
        known = self._keys.get(key)
        answer = ("operation",) if event.data["operation"] else ("operation", "current", "ready")
        same = known is not None and all(known[1].data[name] == event.data[name] for name in answer)
        if known is None or not same:
            self._fresh += 1
            self._keys[key] = (self._fresh, event)
            return
        if event.data["operation"]:
            self._named[event.data["operation"]] = event
        number, first = known
        newer = self._fresh - number
        if newer >= most + _ABOVE:
            self.violation(
                f"key {data['key']!r} still answers as at first after {newer} others; {most} are kept",
                first.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} answers judged, {self.violations} from a memory too long or too short"
