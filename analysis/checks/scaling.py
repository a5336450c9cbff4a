"""Scaling: who owns what, who may be removed, and what clean means (scaling.md 2 to 5).

Computed from what the world and the operators saw.
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from analysis.checks.scaling_views import DRIVER, SUBMISSIONS, TERMINAL, Groups, Operators
from protocol.evidence import Event
from protocol.messages import service_of

_CLOSE_NS = 5 * 10**9  # from the choice of a victim until its gateway must have closed it


class PlacementCheck(Check):
    """Base of the checks on placement groups: its own handlers run before the groups change."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.groups = Groups(ledger)
        self._own: dict[str, Handler] = {}

    def own(self) -> dict[str, Handler]:
        raise NotImplementedError

    def handlers(self) -> dict[str, Handler]:
        self._own = self.own()
        return dict.fromkeys((*self.groups.see, *self._own), self._on_event)

    def _on_event(self, event: Event) -> None:
        handler = self._own.get(event.kind)
        if handler is not None:
            handler(event)
        see = self.groups.see.get(event.kind)
        if see is not None:
            see(event)


class RemovedWhileIdle(PlacementCheck):
    """No component ends a replica while a request that its client waits for runs on it."""

    name = "removed_while_idle"
    expected = "replicas that are removed run nothing"
    needs = ("placement.removal_asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._grace_ns = round(ledger.preregistered.shadow_s * 1e9)

    def own(self) -> dict[str, Handler]:
        return {"actor.died": self._on_died}

    def _on_died(self, event: Event) -> None:
        groups = self.groups
        if event.actor not in groups.of_replica or groups.final or not groups.is_component_kill(event):
            return
        self.judged += 1
        if groups.ill(event, self._grace_ns):
            return  # recovery replaces a replica that does not answer, whatever it runs
        process = (event.actor, event.inc)
        for name, request in self.ledger.requests.items():
            run = request.runs[-1] if request.runs else None
            if run is not None and run.engine == process and not run.finished_seq and not request.done_seq:
                self.violation(
                    f"{event.actor}/{event.inc} was ended while it ran request {name}", run.accepted_seq, event.seq
                )

    def observed(self) -> str:
        return f"{self.judged} replicas removed, {self.violations} requests cut off"


class GroupsReleasedOnce(PlacementCheck):
    """The removal of a placement group is asked for once, newest group first, and in the end nothing is left over."""

    name = "groups_released_once"
    expected = "one removal a group, newest first; no group without a replica that serves"
    needs = ("placement.removal_asked", "placement.entered")

    def own(self) -> dict[str, Handler]:
        return {"placement.removal_asked": self._on_removal, "scale.snapshot": self._on_snapshot}

    def _on_removal(self, event: Event) -> None:
        group = self.groups.all.get(event.data["group"])
        if group is None or event.data["by"] == DRIVER:
            return
        self.judged += 1
        if group.asked_seq:
            self.violation(f"the removal of group {group.id} was asked for twice", group.asked_seq, event.seq)
            return
        for other in reversed(self.groups.all.values()):
            if other is group:
                return
            if other.owner == group.owner and not other.asked_seq and other.state != "REMOVED":
                self.violation(
                    f"group {group.id} is removed before {other.id}, which is newer", other.made_seq, event.seq
                )
                return

    def _on_snapshot(self, event: Event) -> None:
        if event.data["when"] != "final":
            return
        routable = event.data["routable"]
        for group in self.groups.open():
            replica = group.replica
            if replica is not None and service_of(replica[0]) != event.data["service"]:
                continue
            self.judged += 1
            if replica is None or not (self.groups.is_alive(replica) or self.groups.died_of_fault(replica)):
                self.violation(f"group {group.id} is {group.state} and holds no replica", group.made_seq, event.seq)
            elif self.groups.is_alive(replica) and replica[0] not in routable:
                self.violation(
                    f"{replica[0]} in group {group.id} is alive and nobody routes to it", group.made_seq, event.seq
                )

    def observed(self) -> str:
        return f"{len(self.groups.all)} groups, {self.violations} released wrongly or left"


class RanksAreNotReused(PlacementCheck):
    """A replica that was scaled out starts in its own placement group only, and never again once that is REMOVED."""

    name = "ranks_are_not_reused"
    expected = "no replica of a removed group starts again, none outside of its group"
    needs = ("placement.entered",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._entered: dict[str, int] = {}  # replica -> newest incarnation that entered a group
        self._outside: dict[Process, Event] = {}  # starts that are not known to be in a group yet

    def own(self) -> dict[str, Handler]:
        return {"placement.entered": self._on_entered, "actor.spawned": self._on_spawned}

    def _on_entered(self, event: Event) -> None:
        name = event.data["process"]
        self.judged += 1
        self._entered[name] = event.data["process_inc"]
        self._outside.pop((name, event.data["process_inc"]), None)
        old = self.groups.of_replica.get(name)
        if old is not None and old.id != event.data["group"]:
            self.violation(f"{name} had group {old.id} and starts in {event.data['group']}", old.made_seq, event.seq)

    def _on_spawned(self, event: Event) -> None:
        group = self.groups.of_replica.get(event.actor)
        if group is None or event.data["role"] != "engine":
            return
        self.judged += 1
        if group.state == "REMOVED":
            self.violation(
                f"{event.actor}/{event.inc} starts again, and its group {group.id} is REMOVED",
                group.made_seq,
                event.seq,
            )
        elif self._entered.get(event.actor) != event.inc:
            # Two processes tell of it, and which one comes first is not the same in both worlds.
            self._outside[event.actor, event.inc] = event

    def conclude(self) -> None:
        for (name, inc), event in self._outside.items():
            group = self.groups.of_replica[name]
            self.violation(f"{name}/{inc} starts again outside of its group {group.id}", group.made_seq, event.seq)

    def observed(self) -> str:
        return f"{self.judged} starts, {self.violations} of a rank that was over"


class ProtectedAlive(PlacementCheck):
    """The replicas of the deployment stay: no component ends one that is well, and all of them serve in the end."""

    name = "protected_alive"
    expected = "every initial replica serves at the end, and none that was well was ended"
    needs = ("scale.snapshot",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._initial: dict[str, int] = {}  # name -> seq of the snapshot
        self._grace_ns = round(ledger.preregistered.shadow_s * 1e9)

    def own(self) -> dict[str, Handler]:
        return {"scale.snapshot": self._on_snapshot, "actor.died": self._on_died}

    def _on_snapshot(self, event: Event) -> None:
        data = event.data
        if data["when"] == "deployed":
            self._initial.update(dict.fromkeys(data["initial"], event.seq))
            return
        for name in data["initial"]:
            self.judged += 1
            if name not in data["routable"]:
                self.violation(f"initial replica {name} does not serve any more", self._initial.get(name, 0), event.seq)

    def _on_died(self, event: Event) -> None:
        groups = self.groups
        if event.actor not in self._initial or groups.final or not groups.is_component_kill(event):
            return
        self.judged += 1
        if not groups.ill(event, self._grace_ns):
            self.violation(f"initial replica {event.actor}/{event.inc} was ended while it was well", event.seq)

    def conclude(self) -> None:
        if self._initial and not self.groups.final and self.ledger.finished is not None:
            self.doubt("nobody looked at the service at its end")

    def observed(self) -> str:
        return f"{len(self._initial)} initial replicas, {self.violations} lost"


class CleanMeansClean(PlacementCheck):
    """What an operator is told to be done and clean is so, and stays so until somebody asks for something.

    When nothing else is open: every placement group that is not REMOVED holds a replica that serves, capacity is the
    number of replicas, and nothing is created any more (scaling.md 2.5 to 2.7).
    """

    name = "clean_means_clean"
    expected = "terminal and clean: each group holds a replica, capacity is true, nothing goes on"
    needs = ("scale.answered",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._operators = Operators()
        self._initial: dict[str, int] = {}
        self._quiet_since: Event | None = None
        self._faults = False

    def own(self) -> dict[str, Handler]:
        return {
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
            "scale.snapshot": self._on_snapshot,
            "placement.state": self._on_state,
            "fault.injected": self._on_fault,
        }

    def _on_fault(self, event: Event) -> None:
        self._faults = True

    def _on_snapshot(self, event: Event) -> None:
        self._initial[event.data["service"]] = len(event.data["initial"])
        if event.data["when"] == "final":
            self._quiet_since = None

    def _on_asked(self, event: Event) -> None:
        self._operators.on_asked(event)
        if event.data["route"] in SUBMISSIONS:
            self._quiet_since = None

    def _on_answered(self, event: Event) -> None:
        asked = self._operators.on_answered(event)
        data = event.data
        if asked is None:
            return
        initial = self._initial.get(asked.data["service"])
        if data["current"] is not None and initial is not None:
            self.judged += 1
            if data["current"] < initial:
                self.violation(f"{data['current']} replicas in all, it is said; {initial} are protected", event.seq)
        if asked.data["route"] != "status" or data["state"] not in TERMINAL:
            return
        if data["cleanup"] != "false" or self.groups.final or not self._operators.quiet():
            return
        self._quiet_since = event
        if initial is None and not self.groups.all:
            return  # of what is there nothing is on record: what is left cannot be told
        self.judged += 1
        for group in self.groups.open():
            alive = self.groups.is_alive(group.replica) or self.groups.died_of_fault(group.replica)
            if not alive:
                self.violation(
                    f"{data['operation']} is {data['state']} and clean, and group {group.id} is {group.state} without "
                    "a replica",
                    group.made_seq,
                    event.seq,
                )
        expected = sum(self._initial.values()) + len(self.groups.open())
        sound = data["state"] in ("ACTIVE", "COMPLETED")  # others may have been cleaned up after their end
        if sound and len(self._initial) == 1 and not self._faults and data["current"] not in (None, expected):
            # Older operations show the capacity of their own end; the latest one shows the present.
            latest = max(self._operators.operations.values(), key=lambda seen: seen.admitted_seq)
            if latest.id == data["operation"]:
                self.violation(
                    f"{data['operation']} says {data['current']} replicas in all, there are {expected}", event.seq
                )

    def _on_state(self, event: Event) -> None:
        if self._quiet_since is not None and event.data["state"] != "REMOVED" and event.data["owner"] != DRIVER:
            self.violation(
                f"group {event.data['group']} became {event.data['state']} though every operation was over and clean",
                self._quiet_since.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} answers judged, {self.violations} untrue"


class NeverAboveTarget(PlacementCheck):
    """There are never more replicas than the largest total that anybody asked for."""

    name = "never_above_target"
    expected = "initial replicas and placement groups never exceed the largest target"
    needs = ("scale.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._initial: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._asked_seq = 0

    def own(self) -> dict[str, Handler]:
        return {"scale.snapshot": self._on_snapshot, "scale.asked": self._on_asked, "placement.state": self._on_state}

    def _on_snapshot(self, event: Event) -> None:
        self._initial[event.data["service"]] = len(event.data["initial"])

    def _on_asked(self, event: Event) -> None:
        if event.data["route"] == "scale_out" and event.data["target"] is not None:
            service = event.data["service"]
            self._most[service] = max(self._most.get(service, 0), event.data["target"])
            self._asked_seq = event.seq

    def _on_state(self, event: Event) -> None:
        group = self.groups.all.get(event.data["group"])
        if event.data["state"] != "CREATED" or not self._initial or (group is not None and group.state == "CREATED"):
            return  # where nobody said how many there were, nothing can be counted; what is told again is no other one
        self.judged += 1
        created = sum(group.state == "CREATED" for group in self.groups.open()) + 1
        initial = sum(self._initial.values())
        most = sum(max(self._most.get(service, 0), count) for service, count in self._initial.items())
        if initial + created > most:
            self.violation(
                f"{initial} initial replicas and {created} placement groups; nobody asked for more than {most}",
                self._asked_seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} placement groups made, {self.violations} too many"


class VictimStaysOut(PlacementCheck):
    """A replica in drain gets no request any more, soon after its drain began and until it is gone (scaling.md 5.2).

    Who the victim was, its end says: its placement group is REMOVED while a scale-in is open. It was in drain from when
    the operator was told DRAINING, or of an operation that left something to clean up, or from when the victim before
    it in the same operation was REMOVED.
    """

    name = "victim_stays_out"
    expected = f"no request reaches a victim later than {_CLOSE_NS // 10**9} s after its drain began"
    needs = ("placement.removal_asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._operators = Operators()
        self._draining: dict[str, tuple[str, Event]] = {}  # service -> operation, since when one of its replicas drains
        self._late: dict[Process, Event] = {}  # the first request that a victim should not have got; of each replica
        self._grace_ns = round(ledger.preregistered.shadow_s * 1e9)
        self._control: dict[str, None] = {}  # control APIs and managers: who chooses a victim, and has it closed

    def own(self) -> dict[str, Handler]:
        return {
            "scale.asked": self._operators.on_asked,
            "scale.answered": self._on_answered,
            "engine.accepted": self._on_accepted,
            "placement.state": self._on_state,
            "call.sent": self._on_sent,
        }

    def wants_call(self, method: str) -> bool:
        return method == "progress"

    def _on_sent(self, event: Event) -> None:
        if event.data["method"] == "progress":
            self._control[event.actor] = self._control[event.data["target"]] = None

    def _on_answered(self, event: Event) -> None:
        asked = self._operators.on_answered(event)
        seen = None if asked is None else self._operators.operations.get(asked.data["operation"])
        if seen is None or seen.direction != "scale_in":
            return
        if seen.resolved:
            if self._draining.get(seen.service, ("",))[0] == seen.id:
                self._forget(seen.service, None)
        elif (seen.state == "DRAINING" or seen.terminal) and seen.service not in self._draining:
            self._forget(seen.service, (seen.id, event))

    def _on_accepted(self, event: Event) -> None:
        if not self._draining or event.actor not in self.groups.of_replica or (event.actor, event.inc) in self._late:
            return
        since = self._draining.get(service_of(event.actor))
        if since is None or event.t_ns <= since[1].t_ns + _CLOSE_NS + self.ledger.order.clock_error_ns:
            return
        request = self.ledger.requests.get(event.data["request"])
        if request is None or request.sent_ns <= since[1].t_ns + _CLOSE_NS:
            return  # no client's, or one that was on its way then
        if not self._explained(event.t_ns):
            self._late[event.actor, event.inc] = event

    def _on_state(self, event: Event) -> None:
        group = self.groups.all.get(event.data["group"])
        if event.data["state"] != "REMOVED" or self.groups.final or group is None or group.replica is None:
            return
        victim = group.replica
        service = service_of(victim[0])
        operations = [seen for seen in self._operators.operations.values() if seen.service == service]
        if not any(seen.direction == "scale_in" and not seen.resolved for seen in operations):
            return  # a candidate that came to nothing
        late = self._late.get(victim)
        since = self._draining.get(service)
        if since is None:
            return  # it was gone before anybody was told of its drain
        self.judged += 1
        if late is not None:
            self.violation(
                f"{victim[0]}/{victim[1]} was in drain and got request {late.data['request']} "
                f"{(late.t_ns - since[1].t_ns) / 1e9:.1f} s later",
                since[1].seq,
                late.seq,
                event.seq,
            )
        self._forget(service, (since[0], event))  # the next victim of the operation, if there is one

    def _forget(self, service: str, since: tuple[str, Event] | None) -> None:
        """Begin anew for a service: one of its replicas drains since then, or none does."""
        if since is None:
            self._draining.pop(service, None)
        else:
            self._draining[service] = since
        self._late = {process: late for process, late in self._late.items() if service_of(process[0]) != service}

    def _explained(self, t_ns: int) -> bool:
        """Whether a fault kept the victim open: on the path of requests, on a link, or on who is to close it."""
        shadow = self.ledger.shadow
        return shadow.explain(t_ns, t_ns, self._grace_ns) is not None or any(
            (">" in window.target or window.target in self._control)
            and (window.end_ns is None or t_ns <= window.end_ns + self._grace_ns)
            for window in shadow.windows.values()
        )

    def observed(self) -> str:
        return f"{self.judged} victims, {self.violations} requests to one"
