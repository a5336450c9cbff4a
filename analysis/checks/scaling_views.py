"""What the scaling checks fold the evidence into: placement groups with what runs in them, and operators' operations.

From ``world`` events alone. Which group a replica is in, the world says (``placement.entered``); which operation is
open, an operator's own questions and answers say.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from analysis.checks.ledger import Ledger, Process
from protocol.evidence import Event

_KILLS = ("sigkill", "restart_empty")
DRIVER = "driver"
SUBMISSIONS = ("scale_out", "scale_in")
TERMINAL = ("ACTIVE", "PARTIAL", "CANCELLED", "COMPLETED", "FAILED")


class Group:
    """One placement group. ``replica``: the newest process started in it."""

    __slots__ = ("asked_seq", "id", "made_seq", "owner", "replica", "state")

    def __init__(self, event: Event) -> None:
        self.id: str = event.data["group"]
        self.owner: str = event.data["owner"]
        self.state: str = event.data["state"]
        self.made_seq = event.seq
        self.replica: Process | None = None
        self.asked_seq = 0
        """Of the request for its removal."""


class Groups:
    """Every placement group of a run, in the order of creation, and how the replicas in them ended.

    Args:
        ledger: for faults and deaths.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.all: dict[str, Group] = {}
        self.of_replica: dict[str, Group] = {}
        self.final = False
        """The operators have taken their last look: what ends now is the take-down."""
        self._killed_by_fault: dict[str, int] = {}  # target -> seq of a kill that has not come to its death yet
        self._ended: dict[Process, bool] = {}  # replica -> whether it died of a fault
        self.see: dict[str, Callable[[Event], None]] = {
            "placement.state": self._on_state,
            "placement.entered": self._on_entered,
            "placement.removal_asked": self._on_asked,
            "fault.injected": self._on_fault,
            "actor.died": self._on_died,
            "scale.snapshot": self._on_snapshot,
        }

    def open(self) -> list[Group]:
        """Those that are not REMOVED."""
        return [group for group in self.all.values() if group.state != "REMOVED"]

    def is_alive(self, replica: Process | None) -> bool:
        return replica is not None and replica not in self._ended

    def died_of_fault(self, replica: Process | None) -> bool:
        return replica is not None and self._ended.get(replica, False)

    def is_component_kill(self, event: Event) -> bool:
        """Whether an ``actor.died`` (asked before it is seen) is the work of a component and not of a fault."""
        return event.data["reason"] == "killed" and event.actor not in self._killed_by_fault

    def ill(self, event: Event, grace_ns: int) -> bool:
        """Whether a fault on the process itself, its node, or a link of either is or was on lately."""
        node = self._ledger.nodes.get((event.actor, event.inc), "")
        for window in self._ledger.shadow.windows.values():
            recent = window.end_ns is None or event.t_ns <= window.end_ns + grace_ns
            ends = window.target.split(">")
            if recent and any(fnmatchcase(name, end) for end in ends for name in (event.actor, node)):
                return True
        return False

    def _on_state(self, event: Event) -> None:
        group = self.all.get(event.data["group"])
        if group is None:
            self.all[event.data["group"]] = Group(event)
        else:
            group.state = event.data["state"]

    def _on_entered(self, event: Event) -> None:
        group = self.all.get(event.data["group"])
        if group is not None:
            group.replica = (event.data["process"], event.data["process_inc"])
            self.of_replica[event.data["process"]] = group

    def _on_asked(self, event: Event) -> None:
        group = self.all.get(event.data["group"])
        if group is not None and not group.asked_seq:
            group.asked_seq = event.seq

    def _on_fault(self, event: Event) -> None:
        if event.data["name"] in _KILLS:
            self._killed_by_fault[event.data["target"]] = event.seq

    def _on_died(self, event: Event) -> None:
        by_fault = not self.is_component_kill(event)
        self._killed_by_fault.pop(event.actor, None)
        if event.actor in self.of_replica:
            self._ended[event.actor, event.inc] = by_fault

    def _on_snapshot(self, event: Event) -> None:
        self.final = self.final or event.data["when"] == "final"


class Seen:
    """One admitted operation as its operators see it."""

    __slots__ = (
        "admitted_ns", "admitted_seq", "asked_ns", "budget_s", "clean", "direction", "id", "last_seq", "service",
        "state",
    )  # fmt: skip

    def __init__(self, operation: str, asked: Event, answered: Event) -> None:
        self.id = operation
        self.service: str = asked.data["service"]
        self.direction: str = asked.data["direction"]
        self.admitted_seq = answered.seq
        self.admitted_ns = answered.t_ns
        self.budget_s: float | None = asked.data["timeout_s"]
        self.asked_ns = asked.t_ns
        """When its state as it is known was asked for."""
        self.state: str = answered.data["state"]
        self.clean = False
        self.last_seq = answered.seq

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def resolved(self) -> bool:
        return self.terminal and self.clean


class Operators:
    """Questions that are open, operations that were admitted, and what is known of each.

    The check that owns it feeds it ``scale.asked`` and ``scale.answered``, and looks before or after it does.
    """

    def __init__(self) -> None:
        self.asked: dict[str, Event] = {}
        self.operations: dict[str, Seen] = {}
        self.uncertain: dict[str, dict[str, Event]] = {}
        """Service -> submissions without an answer, by key (or by ask): each may have been admitted."""

    def on_asked(self, event: Event) -> None:
        self.asked[event.data["ask"]] = event
        if not event.data["operation"]:
            name = event.data["key"] or event.data["ask"]
            self.uncertain.setdefault(event.data["service"], {})[name] = event

    def on_answered(self, event: Event) -> Event | None:
        """Take an answer in; returns the question that it belongs to."""
        data = event.data
        asked = self.asked.pop(data["ask"], None)
        if asked is None:
            return None
        if not asked.data["operation"]:
            if data["status"]:
                self.uncertain[asked.data["service"]].pop(asked.data["key"] or data["ask"], None)
            if data["status"] == 200 and data["operation"] and data["operation"] not in self.operations:
                self.operations[data["operation"]] = Seen(data["operation"], asked, event)
            return asked
        seen = self.operations.get(asked.data["operation"])
        if seen is not None and data["status"] == 200:
            seen.state = data["state"]
            seen.clean = data["cleanup"] == "false" and seen.terminal
            seen.last_seq = event.seq
            seen.asked_ns = asked.t_ns
        return asked

    def quiet(self, service: str | None = None) -> bool:
        """Nothing is open as far as anybody can know: no submission without an answer, no unresolved operation."""
        services = [service] if service is not None else list(self.uncertain)
        if any(self.uncertain.get(one) for one in services):
            return False
        return all(seen.resolved for seen in self.operations.values() if service in (None, seen.service))
