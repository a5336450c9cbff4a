"""The order of a publication over all entrypoints: seal, drain, update, install, continue, reopen (serving.md 3.4)."""

from __future__ import annotations

from typing import Any

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.publishing_views import CONTINUE, UPDATE, Fleet, GateCalls, Place
from protocol.evidence import Event


class _Cycle:
    """How far one service is between a seal and the reopening: gates, in the order in which they got there."""

    def __init__(self) -> None:
        self.at: dict[str, dict[str, Event]] = {"seal": {}, "drain": {}, "install_version": {}, "reopen": {}}


class PublicationOrder(Check):
    """Every seal before any drain, drain before update, update before install, install before continue, then reopen.

    Over all entrypoints of a service, at each of its publications (C-I1); a gate is opened only over a fleet that
    serves one version and is not paused (G-I6, W-I1).
    """

    name = "publication_order"
    expected = "each stage is over everywhere before the next one begins"
    needs = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._calls = GateCalls(self._fleet)
        self._cycles: dict[str, _Cycle] = {}
        self._weights: dict[str, Event] = {}  # replica -> what it serves
        self._paused: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "engine.ready": self._on_weights,
            "engine.weights": self._on_weights,
            "engine.paused": self._on_paused,
            "engine.resumed": self._on_resumed,
            "actor.died": self._on_died,
        }

    def _on_weights(self, event: Event) -> None:
        self._weights[event.actor] = event

    def _on_paused(self, event: Event) -> None:
        self._paused[event.actor] = event

    def _on_resumed(self, event: Event) -> None:
        self._paused.pop(event.actor, None)

    def _on_died(self, event: Event) -> None:
        self._paused.pop(event.actor, None)

    def _on_sent(self, event: Event) -> None:
        place = self._calls.sent(event)
        method = event.data["method"]
        if place is None:
            place = self._fleet.by_replica.get(event.data["target"])
            if place is None or not place.gate or method not in (UPDATE, CONTINUE):
                return
            cycle = self._cycles.get(place.service)
            if cycle is None:
                if method == UPDATE:
                    self.violation(f"{event.actor} sent an update to {place.replica} with every gate open", event.seq)
            elif method == UPDATE:
                self._after(event, place, cycle, "drain")
            else:
                self._after(event, place, cycle, "install_version")
            return
        if method == "seal":
            if place.service not in self._cycles:
                self._cycles[place.service] = _Cycle()
        elif (cycle := self._cycles.get(place.service)) is not None:
            if method == "install_version":
                self._after(event, place, cycle, "drain")
                self._one_version(event, place)
            elif method == "reopen":
                self._after(event, place, cycle, "install_version")
                self._goes_on(event, place)

    def _on_done(self, event: Event) -> None:
        found = self._calls.done(event)
        if found is None or event.data["outcome"] != "done":
            return
        sent, place = found
        method = sent.data["method"]
        cycle = self._cycles.get(place.service)
        if cycle is None or method not in cycle.at:
            return
        if method == "drain":
            self._after(event, place, cycle, "seal")
        cycle.at[method][place.gate] = event
        if method == "reopen" and len(cycle.at["reopen"]) == len(self._fleet.services[place.service]):
            del self._cycles[place.service]

    def _after(self, event: Event, place: Place, cycle: _Cycle, stage: str) -> None:
        """Judge that a stage is over at every gate of the service."""
        self.judged += 1
        reached = cycle.at[stage]
        gates = self._fleet.services[place.service]
        if len(reached) == len(gates):
            return
        missing = next(one.gate for one in gates if one.gate not in reached)
        what = event.data.get("method") or "drain done"
        self.violation(
            f"{event.actor} came to {what} of {place.replica} before {stage} of {missing} had succeeded",
            *[seen.seq for seen in list(reached.values())[-1:]],
            event.seq,
        )

    def _one_version(self, event: Event, place: Place) -> None:
        served: dict[tuple[Any, Any], Event] = {}
        for one in self._fleet.services[place.service]:
            weights = self._weights.get(one.replica)
            if weights is not None:
                served.setdefault((weights.data["version"], weights.data["weight_hash"]), weights)
        if len(served) > 1:
            text = " and ".join(f"{weights.actor} serves {version!r}" for (version, _), weights in served.items())
            self.violation(
                f"a version is installed at {place.gate} over a mixed fleet: {text}",
                *(weights.seq for weights in served.values()),
                event.seq,
            )

    def _goes_on(self, event: Event, place: Place) -> None:
        for one in self._fleet.services[place.service]:
            paused = self._paused.get(one.replica)
            if paused is not None:
                self.violation(f"{place.gate} is reopened while {one.replica} is paused", paused.seq, event.seq)
                return

    def observed(self) -> str:
        return f"{self.judged} steps, {self.violations} out of order"
