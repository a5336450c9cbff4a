"""The order of a publication over all entrypoints: seal, drain, update, install, continue, reopen (serving.md 3.4)."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.publishing_views import (
    CONTINUE,
    GENERATIONS,
    PAUSE,
    UPDATES,
    Fleet,
    GateCalls,
    Place,
    may_be_of_a_gate,
)
from protocol.evidence import Event


class _Cycle:
    """How far one service is between a seal and the reopening: gates, in the order in which they got there."""

    def __init__(self) -> None:
        self.at: dict[str, dict[str, Event]] = {"seal": {}, "drain": {}, "install_version": {}, "reopen": {}}
        self.installs: dict[str, Place] = {}
        """The gates that an installation was sent to, first of all the first."""
        self.resuming = 0
        """Calls of resume_requests that are under way."""
        self.updated: dict[str, None] = {}
        """Gates whose replicas were sent the update: none of them may be left out."""
        self.publishers: dict[str, None] = {}
        """Who updates replicas, or has the controller prepare, fence and resume."""
        self.failed: dict[str, None] = {}
        """Gates whose replicas one of those could not ask for something, in the present try."""
        self.fenced = False
        """The publisher had the controller take out those that the update did not get into, whoever they are."""
        self.left_out: dict[str, Event] = {}
        """Gates without an installation when others went on: to what. They must stay as they are in this call."""
        self.pausing: dict[str, Event] = {}
        """Replicas that the controller had asked to pause since they were sealed, as far as that is certain."""


class PublicationOrder(Check):
    """Every seal before any drain, drain before update, update before install, install before continue, then reopen.

    Over all entrypoints of a service, at each of its publications (C-I1). An entrypoint may be left out of a resumption
    as a whole: nothing is installed there then, and its gate stays closed, until that call has ended. Only one that was
    sent no update may be, or whose replica has died; and, after the publisher had the controller take out those that
    the update did not get into, one of which that is seen: a call of its update, or of whoever asked it what it serves,
    failed, or it serves something else than the others. Else the sets of prepare and resume differ (C-I2). The gates
    that are opened are over replicas that serve one version, and none of these is paused (G-I6, W-I1). A replica that
    the controller asked to pause has paused before it is sent an update: else the pause of that one has failed (C-13).

    Kills: one forgotten at the resumption (C-I2), one fenced into which the update had got, one that did not pause and
    was updated (C-13), one that went on before a version was installed everywhere (C-3).
    """

    name = "publication_order"
    expected = "each stage is over everywhere before the next one begins"
    needs = ("publication.asked",)
    joins_at = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._calls = GateCalls(self._fleet)
        self._cycles: dict[str, _Cycle] = {}
        self._resuming: dict[int, _Cycle] = {}
        self._asked: dict[int, tuple[_Cycle, str]] = {}  # call of a publisher to a replica -> its gate
        self._pausing: dict[int, tuple[_Cycle, str]] = {}  # call that asks a replica to pause
        self._weights: dict[str, Event] = {}  # replica -> what it serves
        self._paused: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "engine.started": self._fleet.started,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "engine.ready": self._on_weights,
            "engine.weights": self._on_weights,
            "engine.paused": self._on_paused,
            "engine.resumed": self._on_resumed,
            "actor.died": self._on_died,
        }

    def wants_call(self, method: str) -> bool:
        # Leases are no step of a publication; any route may be one, for a replica that does not answer it has failed.
        return method[:1] == "/" or (may_be_of_a_gate(method) and method not in ("request", "settle"))

    def _on_weights(self, event: Event) -> None:
        self._weights[event.actor] = event

    def _on_paused(self, event: Event) -> None:
        self._paused[event.actor] = event

    def _on_resumed(self, event: Event) -> None:
        self._paused.pop(event.actor, None)

    def _on_died(self, event: Event) -> None:
        self._paused.pop(event.actor, None)
        place = self._fleet.by_replica.get(event.actor)
        cycle = None if place is None else self._cycles.get(place.service)
        if place is not None and cycle is not None:
            cycle.updated.pop(place.gate, None)
            cycle.pausing.pop(place.replica, None)

    def _on_sent(self, event: Event) -> None:
        place = self._calls.sent(event)
        method = event.data["method"]
        if place is None:
            if method in GENERATIONS:
                self._fleet.sent_turn(event)
                return
            if method in UPDATES or method == CONTINUE:
                self._on_backend(event, method)
            elif method == PAUSE:
                self._on_pause(event)
            elif method in ("prepare_pause", "targets", "fence", "resume_requests"):
                self._on_controller(event, method)
            if self._cycles:
                self._on_asked(event)
            return
        cycle = self._cycles.get(place.service)
        if method == "seal":
            if cycle is None or place.gate in cycle.at["reopen"]:
                self._cycles[place.service] = _Cycle()  # some were left out of the one before, to its end
            else:
                for stage in cycle.at.values():
                    stage.pop(place.gate, None)  # it is prepared again, and all that comes after it is to be done again
                cycle.installs.pop(place.gate, None)
                cycle.pausing.pop(place.replica, None)
        elif cycle is not None:
            if method == "install_version":
                self._after(event, place, cycle, "drain")
                self._one_version(event, place, cycle)
            elif method == "reopen":
                self._installed(event, place, cycle)
                self._goes_on(event, place, cycle)

    def _on_backend(self, event: Event, method: str) -> None:
        place = self._fleet.by_replica.get(event.data["target"])
        if place is None or not place.gate or self._fleet.is_fresh(event):
            return
        cycle = self._cycles.get(place.service)
        if cycle is None:
            if method in UPDATES:
                self.violation(f"{event.actor} sent an update to {place.replica} with every gate open", event.seq)
        elif method in UPDATES:
            cycle.updated[place.gate] = None
            cycle.publishers[event.actor] = None
            self._after(event, place, cycle, "drain")
            asked = cycle.pausing.get(place.replica)
            if asked is not None and place.replica not in self._paused:
                self.violation(
                    f"{event.actor} sent an update to {place.replica}, which was asked to pause and has not",
                    asked.seq,
                    event.seq,
                )
        else:
            self._installed(event, place, cycle)

    def _on_pause(self, event: Event) -> None:
        place = self._fleet.by_replica.get(event.data["target"])
        cycle = None if place is None else self._cycles.get(place.service)
        if place is not None and cycle is not None and event.actor in self._fleet.controllers:
            cycle.pausing[place.replica] = event
            self._pausing[event.data["call"]] = (cycle, place.replica)

    def _on_controller(self, event: Event, method: str) -> None:
        deployed = self._fleet.controllers.get(event.data["target"])
        cycle = None if deployed is None else self._cycles.get(deployed.data["service"])
        if cycle is None:
            return
        if method != "resume_requests":
            cycle.publishers[event.actor] = None
            if method == "fence":
                cycle.fenced = True
                for gate in cycle.failed:
                    cycle.updated.pop(gate, None)
            elif method == "prepare_pause":
                cycle.updated = {}
            cycle.failed = {}  # "targets" begins another try to update them all
        else:
            cycle.left_out = {}
            cycle.resuming += 1
            self._resuming[event.data["call"]] = cycle

    def _on_asked(self, event: Event) -> None:
        """A call to a replica in a cycle, of somebody who publishes."""
        place = self._fleet.by_replica.get(event.data["target"])
        cycle = None if place is None else self._cycles.get(place.service)
        if place is not None and cycle is not None and event.actor in cycle.publishers:
            self._asked[event.data["call"]] = (cycle, place.gate)

    def _on_done(self, event: Event) -> None:
        if self._asked and (asked := self._asked.pop(event.data["call"], None)) is not None:
            if event.data["outcome"] != "done":
                asked[0].failed[asked[1]] = None
            return
        if self._pausing and (paused := self._pausing.pop(event.data["call"], None)) is not None:
            if event.data["outcome"] == "unknown":
                paused[0].pausing.pop(paused[1], None)  # what became of it, another question tells
            return
        if self._resuming and (resumed := self._resuming.pop(event.data["call"], None)) is not None:
            resumed.left_out = {}
            resumed.resuming -= 1
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
        self._too_early(event, place, missing, stage, reached)

    def _installed(self, event: Event, place: Place, cycle: _Cycle) -> None:
        """Judge that a version is installed here, and at every other gate that this resumption opens."""
        self.judged += 1
        installed = cycle.at["install_version"]
        if len(installed) == len(self._fleet.services[place.service]):
            return
        for one in self._fleet.services[place.service]:
            if one.gate in installed:
                continue
            if one.gate == place.gate or one.gate in cycle.installs or self._took_it(event, one, place, cycle):
                self._too_early(event, place, one.gate, "install_version", installed)
                return
            cycle.left_out.setdefault(one.gate, event)

    def _took_it(self, event: Event, left_out: Place, other: Place, cycle: _Cycle) -> bool:
        """Whether a replica of which the gate is left out was updated, as the others were."""
        if left_out.gate not in cycle.updated:
            return False
        if not cycle.fenced:
            return True
        here, there = self._weights.get(left_out.replica), self._weights.get(other.replica)
        if here is None or there is None:
            seqs = [one.seq for one in (here, there) if one is not None]
            self.doubt(f"{left_out.gate} is left out; what {left_out.replica} serves is not known", *seqs, event.seq)
            return False
        return _served(here) == _served(there)

    def _too_early(self, event: Event, place: Place, gate: str, stage: str, reached: dict[str, Event]) -> None:
        what = event.data.get("method") or "drain done"
        self.violation(
            f"{event.actor} came to {what} of {place.replica} before {stage} of {gate} had succeeded",
            *[seen.seq for seen in list(reached.values())[-1:]],
            event.seq,
        )

    def _one_version(self, event: Event, place: Place, cycle: _Cycle) -> None:
        went_on = cycle.left_out.get(place.gate)
        if went_on is not None and cycle.resuming:
            self.violation(
                f"a version is installed at {place.gate} after {went_on.data['method']} of {went_on.data['target']} in "
                "the same resumption",
                went_on.seq,
                event.seq,
            )
        first = next(iter(cycle.installs.values()), place)
        cycle.installs[place.gate] = place
        served, other = self._weights.get(place.replica), self._weights.get(first.replica)
        if served is None or other is None:
            return
        if _served(served) != _served(other):
            text = " and ".join(f"{one.actor} serves {one.data['version']!r}" for one in (other, served))
            self.violation(
                f"a version is installed at {place.gate} over a mixed fleet: {text}", other.seq, served.seq, event.seq
            )

    def _goes_on(self, event: Event, place: Place, cycle: _Cycle) -> None:
        for one in self._fleet.services[place.service] if self._paused else ():
            paused = self._paused.get(one.replica)
            if paused is not None and one.gate in cycle.installs:
                self.violation(f"{place.gate} is reopened while {one.replica} is paused", paused.seq, event.seq)
                return

    def observed(self) -> str:
        return f"{self.judged} steps, {self.violations} out of order"


def _served(weights: Event) -> tuple[str, str]:
    return weights.data["version"], weights.data["weight_hash"]
