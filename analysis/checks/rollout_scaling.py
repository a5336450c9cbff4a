"""Elastic rollout replicas (scaling.md 7): explicit ends, weights before routes, no end in the middle of an update."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from analysis.checks.scaling import PlacementCheck
from analysis.checks.scaling_views import TERMINAL
from protocol.evidence import Event
from protocol.messages import service_of

_UPDATE = "/update_weights_from_disk"
_LATE = ("CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY")


class RolloutStatusIsExplicit(Check):
    """A terminal operation of a rollout service says in so many words that nothing is left of it.

    There is no reconcile to ask for more, so a client that is told nothing waits for ever (M16). And what has got as
    far as being connected is not cancelled any more.
    """

    name = "rollout_status_is_explicit"
    expected = "cleanup_required false in every terminal status; CANCELLED only from PENDING or CREATING"
    needs = ("rollout.scaled",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._services: dict[str, None] = {}
        self._asked: dict[str, Event] = {}
        self._late: dict[str, Event] = {}  # operation -> answer in which it was too late to be cancelled

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollout.scaled": self._on_scaled,
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
        }

    def _on_scaled(self, event: Event) -> None:
        self._services[event.data["service"]] = None

    def _on_asked(self, event: Event) -> None:
        if event.data["service"] in self._services and event.data["route"] == "status":
            self._asked[event.data["ask"]] = event

    def _on_answered(self, event: Event) -> None:
        asked, data = self._asked.pop(event.data["ask"], None), event.data
        if asked is None or data["status"] != 200:
            return
        operation = asked.data["operation"]
        if data["state"] in _LATE:
            self._late.setdefault(operation, event)
        if data["state"] not in TERMINAL:
            return
        self.judged += 1
        if data["cleanup"] != "false":
            self.violation(
                f"{operation} is {data['state']}, and whether it is clean is {data['cleanup']}", asked.seq, event.seq
            )
        if data["state"] == "CANCELLED" and operation in self._late:
            late = self._late[operation]
            self.violation(f"{operation} was {late.data['state']} and is CANCELLED", late.seq, event.seq)

    def observed(self) -> str:
        return f"{self.judged} terminal answers, {self.violations} not explicit"


class NoEndInAnUpdate(PlacementCheck):
    """No component ends a replica that is well while a weight update is under way on any replica of its service.

    A scale-in waits for the update that runs, and an update is refused while replicas drain: otherwise some replicas
    have the new weights and one is gone with half of them.
    """

    name = "no_end_in_an_update"
    expected = "replicas are removed between weight updates"
    needs = ("rollout.scaled",)
    believes = "which replica a drain has chosen; before its end nobody else can tell"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._services: dict[str, None] = {}
        self._loading: dict[Process, int] = {}  # replica -> seq of the update that reached it
        self._draining: dict[Process, Event] = {}
        self._grace_ns = round(ledger.preregistered.shadow_s * 1e9)

    def own(self) -> dict[str, Handler]:
        return {
            "rollout.scaled": self._on_scaled,
            "engine.post": self._on_post,
            "engine.weights": self._on_weights,
            "scale.drain": self._on_drain,
            "actor.died": self._on_died,
        }

    def _on_scaled(self, event: Event) -> None:
        self._services[event.data["service"]] = None

    def _on_post(self, event: Event) -> None:
        service = service_of(event.actor)
        if event.data["route"] != _UPDATE or service not in self._services:
            return  # of other services nobody updates all replicas at once; a replacement may load at any time
        self.judged += 1
        self._loading[event.actor, event.inc] = event.seq
        for (name, _), chosen in self._draining.items():
            if service_of(name) == service:
                self.violation(f"{event.actor} was given weights while {name} drained", chosen.seq, event.seq)

    def _on_weights(self, event: Event) -> None:
        self._loading.pop((event.actor, event.inc), None)

    def _on_drain(self, event: Event) -> None:
        replica = (event.data["replica"], event.data["replica_inc"])
        if event.data["what"] == "chosen":
            self._draining[replica] = event
            service = service_of(replica[0])
            for (name, inc), seq in self._loading.items():
                if service_of(name) == service:
                    self.violation(f"{replica[0]} was put in drain while {name}/{inc} loaded weights", seq, event.seq)

        elif event.data["what"] == "restored":
            self._draining.pop(replica, None)

    def _on_died(self, event: Event) -> None:
        process = (event.actor, event.inc)
        seq = self._loading.pop(process, None)
        self._draining.pop(process, None)
        if seq is None or self.groups.final or not self.groups.is_component_kill(event):
            return
        if not self.groups.ill(event, self._grace_ns):
            self.violation(f"{event.actor}/{event.inc} was ended while it loaded weights", seq, event.seq)

    def observed(self) -> str:
        return f"{self.judged} updates reached a replica, {self.violations} beside a removal"
