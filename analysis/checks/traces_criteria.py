"""Acceptance criteria of trace ownership: the recorded facts E10 and E11 (acceptance_xtuner.md 10.2)."""

from __future__ import annotations

from analysis.checks.base import WITNESSES, Handler
from analysis.checks.criteria import AtLeast, Criterion
from analysis.checks.ledger import Ledger
from analysis.checks.traces_views import Services
from protocol.evidence import Event


class CleanupsKeptOthers(Criterion[AtLeast]):
    """The learner cleaned up while others had sessions in the trace store, and they found theirs afterwards (E10)."""

    name = "cleanups_kept_others"
    expected = "at least the stated number of cleanups with a session of others that lived through it"
    model = AtLeast

    def __init__(self, ledger: Ledger, parameters: AtLeast) -> None:
        super().__init__(ledger, parameters)
        self._services = Services()
        self._live: dict[str, dict[str, list[int]]] = {}  # service -> session in flight -> cleanups since its last look
        self._releasing: dict[int, str] = {}
        self._proved: set[int] = set()
        self._seqs: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollouts.deployed": self._services.deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "trace.recorded": self._on_recorded,
            "trace.looked_up": self._on_looked_up,
            "trace.exported": self._on_exported,
        }

    def _on_sent(self, event: Event) -> None:
        service = self._services.by_part.get(event.actor)
        if service is not None and event.actor == service.learner and event.data["target"] == service.store:
            self._releasing[event.data["call"]] = service.name

    def _on_done(self, event: Event) -> None:
        name = self._releasing.pop(event.data["call"], None)
        if name is None or event.data["outcome"] != "done":
            return
        self.judged += 1
        self._seqs = [*self._seqs, event.seq][-WITNESSES:]
        for cleanups in self._live.get(name, {}).values():
            cleanups.append(event.seq)

    def _sessions(self, event: Event) -> dict[str, list[int]]:
        service = self._services.by_agent.get(event.actor)
        return {} if service is None else self._live.setdefault(service.name, {})

    def _on_recorded(self, event: Event) -> None:
        if event.data["outcome"] == "done":
            self._sessions(event).setdefault(event.data["session"], [])

    def _on_looked_up(self, event: Event) -> None:
        data = event.data
        cleanups = self._sessions(event).get(data["session"])
        if cleanups and not data["error"] and data["found"] >= data["expected"] > 0:
            self._proved.update(cleanups)
            cleanups.clear()

    def _on_exported(self, event: Event) -> None:
        cleanups = self._sessions(event).pop(event.data["session"], None)
        if cleanups and not event.data["error"]:
            self._proved.update(cleanups)

    def conclude(self) -> None:
        if self.judged and len(self._proved) < self.parameters.at_least:
            self.fall_short(
                f"others' sessions lived through {len(self._proved)} of {self.judged} cleanups", *self._seqs
            )

    def observed(self) -> str:
        return f"{len(self._proved)} of {self.judged} cleanups"


class RecordedBetween(Criterion[AtLeast]):
    """Turns were recorded between the take of a batch and the cleanup after it (E11): without, a run shows nothing."""

    name = "recorded_between_take_and_cleanup"
    expected = "at least the stated number of batches"
    model = AtLeast

    def __init__(self, ledger: Ledger, parameters: AtLeast) -> None:
        super().__init__(ledger, parameters)
        self._services = Services()
        self._taking: dict[int, str] = {}
        self._taken: dict[str, bool] = {}  # service -> recorded since the learner's latest take
        self._between = 0
        self._seqs: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollouts.deployed": self._services.deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "trace.recorded": self._on_recorded,
        }

    def _on_sent(self, event: Event) -> None:
        service = self._services.by_part.get(event.actor)
        if service is None or event.actor != service.learner:
            return
        if event.data["target"] == service.buffer and event.data["method"] == "take_batch":
            self._taking[event.data["call"]] = service.name
        elif event.data["target"] == service.store and service.name in self._taken:
            self.judged += 1
            self._between += self._taken.pop(service.name)
            self._seqs = [*self._seqs, event.seq][-WITNESSES:]

    def _on_done(self, event: Event) -> None:
        name = self._taking.pop(event.data["call"], None)
        if name is not None and event.data["outcome"] == "done":
            self._taken[name] = False

    def _on_recorded(self, event: Event) -> None:
        service = self._services.by_agent.get(event.actor)
        if service is not None and service.name in self._taken and event.data["outcome"] == "done":
            self._taken[service.name] = True

    def conclude(self) -> None:
        if self.judged and self._between < self.parameters.at_least:
            self.fall_short(
                f"turns were recorded between take and cleanup of {self._between} of {self.judged} batches", *self._seqs
            )

    def observed(self) -> str:
        return f"{self._between} of {self.judged} batches"
