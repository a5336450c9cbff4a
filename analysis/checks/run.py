"""The run itself: it ended, nothing anomalous, no leak, every fault hit something."""

from __future__ import annotations

from analysis.checks.base import Check, CheckResult, Handler, shown
from analysis.checks.ledger import Ledger
from protocol.evidence import Event

_WAITS_SHOWN = 8


class RunFinished(Check):
    """The run ended by itself and completed; deadlock, livelock and endless callback fail, with who waits for whom."""

    name = "run_finished"
    expected = "completed"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._waits: list[Event] = []
        self._waiting = 0

    def handlers(self) -> dict[str, Handler]:
        return {"run.wait": self._on_wait, "run.unheard": self._on_unheard, "run.finished": self._on_finished}

    def _on_wait(self, event: Event) -> None:
        self._waiting += 1
        if len(self._waits) < _WAITS_SHOWN:
            self._waits.append(event)

    def _on_unheard(self, event: Event) -> None:
        data = event.data
        self.doubt(
            f"{data['who']} did not answer {data['asked']} until the bound was over, so that nobody knows whether "
            f"every replica is routed to: {data['why']}",
            event.seq,
        )

    def _on_finished(self, event: Event) -> None:
        self.judged = 1
        reason, detail = event.data["reason"], event.data["detail"]
        if event.data["events"] + 1 != self.ledger.events:
            self.doubt(
                f"{event.data['events']} events were recorded before the end, "
                f"{self.ledger.events - 1} are in the evidence",
                event.seq,
            )
        if reason == "completed":
            return
        text = f"{reason}: {detail}" if detail else reason
        for wait in self._waits:
            text += f"; {wait.data['waiter']} waits for {wait.data['waits_for']} (from {wait.data['should_wake']})"
        if self._waiting > len(self._waits):
            text += f"; and {self._waiting - len(self._waits)} more"
        if self.ledger.stuck:
            self.violation(text, event.seq, *(wait.seq for wait in self._waits))
        else:
            self.doubt(text, event.seq)

    def conclude(self) -> None:
        if self.ledger.finished is None:
            self.doubt("run.finished is missing: the run was cut short or still goes on")
        if self.ledger.broken is not None:
            self.doubt(self.ledger.broken.data["detail"], self.ledger.broken.seq)

    def observed(self) -> str:
        finished = self.ledger.finished
        return "no end in the evidence" if finished is None else str(finished.data["reason"])


class _NoneReported(Check):
    """Base of checks on what the world reports at the end: absence counts only where the world looked."""

    kind: str

    def handlers(self) -> dict[str, Handler]:
        return {self.kind: self._on_report}

    def _on_report(self, event: Event) -> None:
        self.violation(f"{event.data['what']}: {event.data['detail']}", event.seq)

    def conclude(self) -> None:
        imported = self.ledger.world == "imported"
        if self.ledger.finished is not None and not imported:  # in a run of others nobody looked
            self.judged = self.ledger.events

    def observed(self) -> str:
        return f"{self.violations} reported"


class NoAnomalies(_NoneReported):
    """Nothing that asyncio would only have logged."""

    name = "no_anomalies"
    expected = "0 reported"
    kind = "run.anomaly"


class NoLeaks(_NoneReported):
    """Nothing is still held after the run's shutdown."""

    name = "no_leaks"
    expected = "0 reported"
    kind = "leak.found"


class FaultsHit(Check):
    """Every fault met what its step says it must meet; otherwise the run says nothing of that fault."""

    name = "faults_hit"
    expected = "every fault meets what it must"
    needs = ("fault.injected", "fault.healed")
    blame = "inconclusive"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._open: dict[int, Event] = {}
        self._hits = 0

    def handlers(self) -> dict[str, Handler]:
        return {"fault.injected": self._on_injected, "fault.healed": self._on_healed}

    def _on_injected(self, event: Event) -> None:
        self.judged += 1
        self._open[event.data["fault"]] = event

    def _on_healed(self, event: Event) -> None:
        data = event.data
        injected = self._open.pop(data["fault"], None)
        self._hits += data["hits"]
        if injected is None:
            self.violation(f"fault {data['fault']} ({data['name']}) ended twice, or never began", event.seq)
        elif not data["satisfied"] or not (data["hits"] or injected.data["must_hit"]):
            self.violation(
                f"fault {data['fault']}, {data['name']} on {data['target']}, did not meet what it must: "
                f"{shown(injected.data['must_hit'])}; it met {shown(injected.data['observed'])}, {data['hits']} hits",
                injected.seq,
                event.seq,
            )

    def conclude(self) -> None:
        for event in self._open.values():
            data = event.data
            text = f"fault {data['fault']}, {data['name']} on {data['target']}, has no end in the evidence"
            self.violation(text, event.seq)
        declared = self.ledger.preregistered.faults
        if declared is not None and self.judged < declared:
            self.violation(f"{declared} faults were declared before the run, {self.judged} were injected")

    def finish(self, *, required: bool, applicable: bool) -> CheckResult:
        # Declared faults of which none came are absent evidence, not an absent subject.
        declared = bool(self.ledger.preregistered.faults)
        return super().finish(required=required, applicable=applicable or declared)

    def observed(self) -> str:
        hits = f", {self._hits} hits" if self._hits else ""  # a fault of a process meets requests, not messages
        return f"{self.judged} injected, {self.violations} without effect or end{hits}"
