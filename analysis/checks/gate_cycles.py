"""What belongs to an older cycle of a gate does nothing to it (serving.md 2.6)."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from protocol.evidence import Event

_STAGES = {"sealed": 0, "drained": 1, "installed": 2, "reopened": 3}


class OldEpochsDoNothing(Check):
    """An operation of an older cycle has no effect on a gate (G-I7).

    A gate's epochs only grow. Each begins with a seal and goes through its stages once and in order. Nothing is granted
    between its seal and its reopening, or in the name of another epoch. Each incarnation is a gate of its own, which
    may be born open. Kills: a late reopening that opens the next cycle (G-11), a late seal that takes the gate back.
    """

    name = "old_epochs_do_nothing"
    expected = "epochs grow, their stages come in order, nothing is granted between seal and reopening"
    needs = ("gate.changed",)
    joins_at = ("publishing.deployed",)
    believes = "the stages and epochs that a gate tells; what it lets through, turn_of_one_version judges without it"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._latest: dict[Process, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"gate.changed": self._on_changed, "gate.granted": self._on_granted, "actor.died": self._on_died}

    def _on_changed(self, event: Event) -> None:
        self.judged += 1
        epoch, what = event.data["epoch"], event.data["what"]
        latest = self._latest.get((event.actor, event.inc))
        self._latest[event.actor, event.inc] = event
        if latest is None:
            if what != "sealed":
                self.violation(f"{event.actor} is {what} in epoch {epoch} and has never been sealed", event.seq)
            return
        before, was = latest.data["epoch"], latest.data["what"]
        if epoch == before:
            in_order = _STAGES.get(what, -1) > _STAGES.get(was, -1)
        else:
            in_order = epoch > before and what == "sealed"
        if not in_order:
            text = f"{event.actor} is {what} in epoch {epoch} after it was {was} in epoch {before}"
            self.violation(text, latest.seq, event.seq)

    def _on_granted(self, event: Event) -> None:
        latest = self._latest.get((event.actor, event.inc))
        if latest is None:
            return
        self.judged += 1
        if latest.data["what"] != "reopened" or latest.data["epoch"] != event.data["epoch"]:
            text = (
                f"{event.actor} granted a lease of epoch {event.data['epoch']} when it was {latest.data['what']} "
                f"in epoch {latest.data['epoch']}"
            )
            self.violation(text, latest.seq, event.seq)

    def _on_died(self, event: Event) -> None:
        self._latest.pop((event.actor, event.inc), None)

    def observed(self) -> str:
        return f"{self.judged} stages and grants, {self.violations} of an older cycle or out of order"
