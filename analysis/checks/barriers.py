"""What gates count and stamp, and who may do what while a barrier exists (serving.md 2.6, 3.4)."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from analysis.checks.publishing_views import Fleet, GateCalls
from protocol.evidence import Event

_ROUTES = ("set_routable", "recover")
"""What health does to the active set: it routes around a replica or to it, or has it replaced."""
_STAYS = ("BarrierError", "GatePoisoned")
"""What a controller raises whose barrier stays; whatever else a resumption ends with, it may have been completed."""


class HealthHoldsInABarrier(Check):
    """From the first seal to the reopening health changes nothing: it routes nobody away and replaces nobody (C-I4).

    Health is whoever asks the gateway of the service for its view, or was told to hold. One that cannot be told, since
    its answer to the latest hold has not come or its process is a new one, is excused until it has answered.

    A ``resume`` from the controller ends the barrier only when a gate of it was reopened before.

    Kills: a hold that is set once and runs out while resumptions are tried again, health that is let go before the
    reopening, and no hold at all (C-9).
    """

    name = "health_holds_in_a_barrier"
    expected = "between seal and reopening no health action changes the active set"
    needs = ("publication.asked",)
    joins_at = ("publishing.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._calls = GateCalls(self._fleet)
        self._gateways: dict[str, str] = {}  # gateway -> controller
        self._probers: dict[str, str] = {}  # health -> controller
        self._barriers: dict[str, Event] = {}  # controller -> first seal of the barrier that exists
        self._holds: dict[int, str] = {}  # call under way -> controller
        self._untold: dict[str, None] = {}  # controllers whose latest hold health may not have heard of
        self._resuming: dict[int, str] = {}
        self._reopened: dict[str, None] = {}  # controllers that have reopened a gate since their latest seal
        self._excused = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "actor.died": self._on_died,
        }

    def wants_call(self, method: str) -> bool:
        return method in (
            "seal", "reopen", "roster", "health_view", "hold", "resume", "resume_requests", *_ROUTES,
        )  # fmt: skip

    def _on_sent(self, event: Event) -> None:
        method, target = event.data["method"], event.data["target"]
        if event.actor in self._fleet.controllers:
            if method in ("seal", "reopen"):
                self._calls.sent(event)
            elif method == "roster":
                self._gateways[target] = event.actor
            elif method == "hold":
                self._probers[target] = event.actor
                self._holds[event.data["call"]] = event.actor
                self._untold[event.actor] = None
            elif method == "resume" and event.actor in self._reopened:
                self._barriers.pop(event.actor, None)
        elif method == "health_view":
            if target in self._gateways:
                self._probers[event.actor] = self._gateways[target]
        elif method == "resume_requests":
            self._resuming[event.data["call"]] = target
        elif method in _ROUTES and event.actor in self._probers:
            self._judge(event, self._probers[event.actor])

    def _judge(self, event: Event, controller: str) -> None:
        sealed = self._barriers.get(controller)
        if sealed is None:
            return
        if controller in self._untold:
            self._excused += 1
            return
        text = f"{event.actor} sent {event.data['method']} to {event.data['target']} in a barrier of {controller}"
        if self.ledger.order.compare(sealed, event) == "before":
            self.violation(text, sealed.seq, event.seq)
        else:
            self.doubt(f"{text}; the clocks cannot tell", sealed.seq, event.seq)

    def _on_done(self, event: Event) -> None:
        call, done = event.data["call"], event.data["outcome"] == "done"
        found = self._calls.done(event)
        if found is not None:
            if done:
                self._on_gate(found[0].data["method"], event)
        elif (controller := self._holds.pop(call, None)) is not None:
            if done:
                self._untold.pop(controller, None)
        elif (controller := self._resuming.pop(call, None)) is not None and done:
            self._barriers.pop(controller, None)

    def _on_gate(self, method: str, event: Event) -> None:
        """A gate is sealed, or open again."""
        if method == "reopen":
            self._reopened[event.actor] = None
            return
        self._reopened.pop(event.actor, None)
        if event.actor not in self._barriers:
            self.judged += 1
            self._barriers[event.actor] = event

    def _on_died(self, event: Event) -> None:
        self._barriers.pop(event.actor, None)
        self._reopened.pop(event.actor, None)
        if event.actor in self._probers:
            self._untold[self._probers[event.actor]] = None

    def observed(self) -> str:
        return f"{self.judged} barriers, {self.violations} health actions in one, {self._excused} of health not told"


class OneBarrier(Check):
    """At most one barrier at a time, and nobody pauses natively in it (C-I5).

    What was prepared is resumed before anything else is prepared, unless a call on it failed, or a gate or backend of
    it has died: then it may begin anew. A native pause is at work at least while entrypoints are told to abort for it;
    a barrier, from its first seal until all that it has sealed is reopened, or its resumption has answered. Where that
    answer was lost, or whoever asked for it has died, what comes after it and before another seal is undecided.

    Kills: a native pause that begins beside a barrier and lands in it (C-8), and a preparation that is not refused.
    """

    name = "one_barrier"
    expected = "one barrier at a time, and no native pause in it"
    needs = ("publication.asked",)
    joins_at = ("publishing.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._open: dict[int, tuple[str, str, str]] = {}  # call -> who asks, controller, method
        self._native: dict[str, None] = {}  # causes of what the native pauses do that may be at work
        self._flags: dict[int, Event] = {}  # calls under way that tell an entrypoint to abort for one
        self._pauses: dict[int, str] = {}  # native pause under way -> that cause
        self._sealed: dict[str, Event] = {}  # controller -> first seal of its barrier
        self._closed: dict[str, dict[str, None]] = {}  # controller -> gates that it has sealed and not reopened
        self._reopening: dict[int, tuple[str, str]] = {}  # call -> controller, gate
        self._lost: dict[str, None] = {}  # controllers whose latest resumption has an unknown outcome
        self._prepared: dict[str, Event] = {}  # controller -> end of the preparation

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "actor.died": self._on_died,
        }

    def wants_call(self, method: str) -> bool:
        return method in (
            "prepare_pause", "targets", "fence", "resume_requests", "pause_generation", "set_aborting", "seal",
            "reopen",
        )  # fmt: skip

    def _on_sent(self, event: Event) -> None:
        method, target = event.data["method"], event.data["target"]
        if event.actor in self._fleet.controllers:
            if method == "seal":
                if event.actor in self._lost:
                    self._end(event.actor)
                self._sealed.setdefault(event.actor, event)
                self._closed.setdefault(event.actor, {})[target] = None
                for flag in [flag for flag in self._flags.values() if flag.actor == event.actor]:
                    self._beside(event, flag)
            elif method == "reopen":
                self._reopening[event.data["call"]] = event.actor, target
            elif method == "set_aborting" and event.cause in self._native:
                self.judged += 1
                self._flags[event.data["call"]] = event
                if event.actor in self._sealed:
                    self._beside(self._sealed[event.actor], event)
        elif target in self._fleet.controllers:
            if method == "pause_generation":
                self._native[event.id] = None
                self._pauses[event.data["call"]] = event.id
            else:
                self._open[event.data["call"]] = (event.actor, target, method)

    def _beside(self, seal: Event, flag: Event) -> None:
        text = (
            f"{flag.actor} told {flag.data['target']} to abort for a native pause, and {seal.data['target']} was sealed"
        )
        if flag.actor in self._lost:
            self.doubt(f"{text} for a barrier of which nobody knows whether it was over", flag.seq, seal.seq)
        else:
            self.violation(f"{text} for a barrier", flag.seq, seal.seq)

    def _end(self, controller: str) -> None:
        """Its barrier is over."""
        for known in (self._sealed, self._closed, self._lost):
            known.pop(controller, None)

    def _on_answer(self, event: Event) -> None:
        """Of a gate, an entrypoint, or a native pause."""
        call = event.data["call"]
        self._flags.pop(call, None)
        cause = self._pauses.pop(call, None)
        if cause is not None and event.data["outcome"] != "unknown":  # else it may be at work yet
            self._native.pop(cause, None)
        controller, gate = self._reopening.pop(call, ("", ""))
        closed = self._closed.get(controller, {})
        if event.data["outcome"] == "done" and gate in closed:
            del closed[gate]
            if not closed:
                self._end(controller)

    def _on_done(self, event: Event) -> None:
        _, controller, method = self._open.pop(event.data["call"], ("", "", ""))
        if not controller:
            self._on_answer(event)
        elif event.data["outcome"] != "done":
            self._unresumed(controller, method, event.data["error"])
        elif method == "prepare_pause":
            self.judged += 1
            before = self._prepared.get(controller)
            if before is not None:
                text = f"a barrier of {controller} was prepared while another one was, which nobody had resumed"
                self.violation(text, before.seq, event.seq)
            self._prepared[controller] = event
        elif method == "resume_requests":
            self._prepared.pop(controller, None)
            self._end(controller)

    def _unresumed(self, controller: str, method: str, error: str) -> None:
        """Something that was asked of a controller has failed, or nobody is there to hear what became of it."""
        self._prepared.pop(controller, None)
        if method == "resume_requests" and error not in _STAYS and controller in self._sealed:
            self._lost[controller] = None

    def _on_died(self, event: Event) -> None:
        for call in [call for call, (asker, *_) in self._open.items() if asker == event.actor]:
            _, controller, method = self._open.pop(call)
            self._unresumed(controller, method, "ActorDied")
        self._end(event.actor)
        self._prepared.pop(event.actor, None)
        place = self._fleet.by_gate.get(event.actor) or self._fleet.by_replica.get(event.actor)
        if place is not None:
            for controller, deployed in self._fleet.controllers.items():
                if deployed.data["service"] == place.service:
                    self._prepared.pop(controller, None)

    def observed(self) -> str:
        return f"{self.judged} preparations and entrypoints told to abort, {self.violations} beside a barrier"


class LeasesAddUp(Check):
    """Grants are settlements, poison and what is active, on every gate at any time, and at the end none is (G-I4).

    A gate says how many leases it has with each grant and settlement. When everything is over, a lease that a living
    gate has still is nobody's, unless the gate is poisoned, or an entrypoint has died and taken its turns with it.

    Kills: a lease whose grant was lost and never asked for again, waiters that are counted (G-3), leases that leak
    (G-4).
    """

    name = "leases_add_up"
    expected = "grants = settlements + active, and none is active in the end"
    needs = ("gate.granted",)
    joins_at = ("publishing.deployed",)
    believes = "which leases a gate has granted: where its answer was lost, nobody else knows"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._active: dict[Process, dict[str, Event]] = {}
        self._excused: dict[str, None] = {}  # gates that are poisoned, or whose entrypoints have died
        self._over: dict[str, None] = {}  # services of which all episodes are over
        self._left = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "gate.granted": self._on_granted,
            "gate.settled": self._on_settled,
            "gate.poisoned": self._on_poisoned,
            "affinity.snapshot": self._on_snapshot,
            "actor.died": self._on_died,
        }

    def _on_snapshot(self, event: Event) -> None:
        self._over[event.data["service"]] = None

    def _on_granted(self, event: Event) -> None:
        active = self._active.setdefault((event.actor, event.inc), {})
        self.judged += 1
        lease = event.data["lease"]
        if lease in active:
            self.violation(f"{event.actor} granted {lease} twice", active[lease].seq, event.seq)
        active[lease] = event
        self._count(event, active)

    def _on_settled(self, event: Event) -> None:
        active = self._active.setdefault((event.actor, event.inc), {})
        if active.pop(event.data["lease"], None) is None:
            self.violation(f"{event.actor} settled {event.data['lease']}, which it had not granted", event.seq)
        self._count(event, active)

    def _count(self, event: Event, active: dict[str, Event]) -> None:
        if event.data["active"] != len(active):
            text = f"{event.actor} has {event.data['active']} active leases; {len(active)} were granted and not settled"
            self.violation(text, event.seq)

    def _on_poisoned(self, event: Event) -> None:
        self._excused[event.actor] = None

    def _on_died(self, event: Event) -> None:
        active = self._active.pop((event.actor, event.inc), None)
        place = self._fleet.by_gate.get(event.actor)
        if active and place is not None and place.service in self._over and event.actor not in self._excused:
            # The run is taken down when nothing is under way any more.
            self._left += len(active)
            lease, granted = next(iter(active.items()))
            text = f"all is over, and {event.actor} has {len(active)} active leases, {lease} first"
            self.violation(text, granted.seq, event.seq)
        place = self._fleet.by_entrypoint.get(event.actor)
        if place is not None and place.service not in self._over:
            self._excused[place.gate] = None

    def observed(self) -> str:
        return f"{self.judged} grants, {self._left} active in the end, {self.violations} that do not add up"


class VersionsNeverGoBack(Check):
    """The versions that a gate grants never go back, and change only by an installation after a drain (G-I5).

    Over all its incarnations: one that is restarted grants nothing of what it was born with. Each barrier begins anew:
    what was drained and installed before its seal says nothing of what comes after. Kills: an older version that is
    installed, an installation that is not waited for (G-9), a gate that is born open (G-13).
    """

    name = "versions_never_go_back"
    expected = "versions of grants do not decrease, and change only between a drain and a reopening"
    needs = ("gate.granted",)
    joins_at = ("publishing.deployed",)
    believes = "which version a gate grants; what turns are stamped with, turn_of_one_version judges without it"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._calls = GateCalls(self._fleet)
        self._latest: dict[str, Event] = {}  # gate -> first grant of the version that it grants
        self._drained: dict[str, Event] = {}
        self._installed: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "gate.granted": self._on_granted,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
        }

    def wants_call(self, method: str) -> bool:
        return method in ("seal", "drain", "install_version")

    def _on_sent(self, event: Event) -> None:
        place = self._calls.sent(event)
        if place is not None and event.data["method"] == "seal":
            self._drained.pop(place.gate, None)
            self._installed.pop(place.gate, None)

    def _on_done(self, event: Event) -> None:
        found = self._calls.done(event)
        if found is None or event.data["outcome"] != "done":
            return
        method, gate = found[0].data["method"], found[1].gate
        if method == "drain":
            self._drained[gate] = event
        elif method == "install_version" and gate in self._drained:
            self._installed[gate] = event

    def _on_granted(self, event: Event) -> None:
        gate, step = event.actor, event.data["model_step"]
        self.judged += 1
        latest = self._latest.get(gate)
        if latest is not None and latest.data["model_step"] == step:
            return
        if latest is not None and step < latest.data["model_step"]:
            text = f"{gate} granted version {step} after {latest.data['model_step']}"
            self.violation(text, latest.seq, event.seq)
        elif gate not in self._installed:
            self.violation(f"{gate} granted version {step}, which nobody had installed after a drain", event.seq)
        self._latest[gate] = event
        self._drained.pop(gate, None)
        self._installed.pop(gate, None)

    def observed(self) -> str:
        return f"{self.judged} grants, {self.violations} of a version that went back or was not installed"
