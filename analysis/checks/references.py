"""References into the object store: each value ends once, after its last reader, and none is left (serving.md 5.7).

Computed from what the object store saw. The names of holds are the convention of docs/traces.md: ``trace/SESSION``,
``rollout/ROLLOUT``, ``turn/REQUEST``.
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.traces_views import Services, Values
from protocol.evidence import Event

_NAMED = ("trace", "rollout", "turn")


class ReferenceFreedOnce(Check):
    """A value of the object store ends once, and nobody reads or borrows it afterwards (S-I3).

    It ends by a free, or when the last who held it gives it back. Kills S-6, S-17 and S-21.
    """

    name = "reference_freed_once"
    expected = "no second end, no read after the end"
    needs = ("object.put",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._values = Values()

    def handlers(self) -> dict[str, Handler]:
        return {
            "object.put": self._values.put,
            "object.borrowed": self._on_borrowed,
            "object.given_back": self._values.given_back,
            "object.read": self._on_read,
            "object.freed": self._on_freed,
            "actor.died": self._values.died,
        }

    def _on_borrowed(self, event: Event) -> None:
        if event.data["ok"]:
            self._values.borrowed(event)
        else:
            self._in_vain(event, "borrow")

    def _on_read(self, event: Event) -> None:
        if event.data["ok"]:
            self.judged += 1
        else:
            self._in_vain(event, "read")

    def _in_vain(self, event: Event, what: str) -> None:
        if event.data["error"] != "ObjectFreed" or event.data["object"] in self._values.orphaned:
            return  # a process is dead, the one that put it or the one that held it, and no owner is to blame
        self.judged += 1
        end = self._values.ended.get(event.data["object"])
        self.violation(
            f"{event.actor} wanted to {what} {event.data['object']}, which had been freed"
            + ("" if end is None else f" by {end.actor}"),
            *([] if end is None else [end.seq]),
            event.seq,
        )

    def _on_freed(self, event: Event) -> None:
        self.judged += 1
        end = self._values.ended.get(event.data["object"])
        if end is not None:
            self.violation(
                f"{event.actor} freed {event.data['object']}, which {end.actor} had ended already", end.seq, event.seq
            )
        self._values.freed(event)

    def observed(self) -> str:
        return f"{self.judged} reads and frees, {self.violations} after the end"


class NoReferenceLeft(Check):
    """When nobody works any more, every value that is left is of a group that still lies in the buffer (S-I3, S-I5).

    Held for its session by the trace store, or for the rollout itself where that is not traced. A service of which a
    part died is passed over: what that part held nobody else may end. Kills S-7.
    """

    name = "no_reference_left"
    expected = "no value but those of groups in the buffer"
    needs = ("rollouts.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._services = Services()
        self._values = Values()
        self._left = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollouts.deployed": self._services.deployed,
            "object.put": self._values.put,
            "object.borrowed": self._values.borrowed,
            "object.given_back": self._values.given_back,
            "object.freed": self._values.freed,
            "actor.died": self._on_died,
            "trace.snapshot": self._on_snapshot,
        }

    def _on_died(self, event: Event) -> None:
        self._services.died(event)
        self._values.died(event)

    def _on_snapshot(self, event: Event) -> None:
        data = event.data
        service = self._services.by_name.get(data["service"])
        if data["when"] != "final" or service is None or service.broken:
            return
        needed = {f"trace/{row[1]}" for row in data["after"]} | {f"rollout/{row[0]}" for row in data["after"]}
        for name, value in self._values.alive.items():
            if value.put.actor not in service.agents:
                continue
            self.judged += 1
            holders = {holder for _, holder in value.holds}
            if holders & needed:
                self._left += 1
            elif all(holder.split("/")[0] in _NAMED for holder in holders):
                self.violation(
                    f"{name} of {value.put.data['holder']} is left, held for {', '.join(sorted(holders)) or 'nobody'}, "
                    "and no group in the buffer needs it",
                    value.put.seq,
                    event.seq,
                )
            else:
                self.doubt(f"{name} is left, held under names that say nothing: {sorted(holders)}", value.put.seq)
        self.judged += 1

    def observed(self) -> str:
        return f"{self._left} needed by groups in the buffer, {self.violations} left over"
