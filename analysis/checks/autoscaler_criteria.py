"""Acceptance criteria on autoscalers (scaling_acceptance.md 4): when they decide, on what, and what is left."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from analysis.checks.base import Handler
from analysis.checks.criteria import Criterion, Parameters
from analysis.checks.ledger import Ledger
from analysis.checks.scaling_views import SUBMISSIONS
from protocol.evidence import Event


class DecidedWhen(Parameters):
    action: Literal["scale_out", "scale_in"]
    nth: int = Field(default=1, ge=1)
    from_s: float = Field(default=0, ge=0)
    """From the start of the run's workload."""
    to_s: float = Field(gt=0)
    conditions: list[str] = []
    """That the autoscaler names for it, all of them."""
    requests_open_at_most: int | None = Field(default=None, ge=0)
    """Clients' requests without an answer at that moment."""


class Decided(Criterion[DecidedWhen]):
    """The n-th request of an action that an autoscaler had accepted was made within a time; none before the first."""

    name = "decided"
    expected = "the decision, in that time"
    model = DecidedWhen

    def __init__(self, ledger: Ledger, parameters: DecidedWhen) -> None:
        super().__init__(ledger, parameters)
        self._fronts: dict[str, str] = {}  # actor in front of a control API -> service
        self._start_ns = 0
        self._asked: dict[str, tuple[Event, int, list[str]]] = {}
        self._seen: dict[str, None] = {}
        self._claimed: dict[str, list[str]] = {}  # service -> conditions of its latest decision
        self._found: tuple[Event, int, list[str]] | None = None

    def handlers(self) -> dict[str, Handler]:
        return {
            "run.workload": self._on_workload,
            "autoscaler.deployed": self._on_deployed,
            "autoscaler.evaluated": self._on_evaluated,
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
        }

    def _on_workload(self, event: Event) -> None:
        self._start_ns = event.t_ns

    def _on_deployed(self, event: Event) -> None:
        self._fronts[event.data["api"]] = event.data["service"]

    def _on_evaluated(self, event: Event) -> None:
        if event.data["action"] == self.parameters.action:
            self._claimed[event.data["service"]] = list(event.data["triggered"])

    def _on_asked(self, event: Event) -> None:
        if event.actor in self._fronts and event.data["route"] == self.parameters.action:
            open_requests = sum(1 for request in self.ledger.requests.values() if not request.done_seq)
            claimed = self._claimed.get(event.data["service"], [])
            self._asked[event.data["ask"]] = (event, open_requests, claimed)

    def _on_answered(self, event: Event) -> None:
        asked = self._asked.pop(event.data["ask"], None)
        operation = event.data["operation"]
        if asked is None or not operation or operation in self._seen:
            return
        self._seen[operation] = None
        if len(self._seen) == self.parameters.nth:
            self._found = asked

    def conclude(self) -> None:
        parameters = self.parameters
        if self._found is None:
            if not self.ledger.ended:
                self.doubt("the evidence has no end")
                return
            self.judged = 1
            self.violation(f"{len(self._seen)} of {parameters.nth} such requests came")
            return
        self.judged = 1
        asked, open_requests, claimed = self._found
        at_s = self._at_s()
        if not parameters.from_s <= at_s <= parameters.to_s:
            self.violation(f"at {at_s:.2f} s, not from {parameters.from_s:g} to {parameters.to_s:g} s", asked.seq)
        missing = [name for name in parameters.conditions if name not in claimed]
        if missing:
            self.violation(f"{', '.join(missing)} is not among its conditions", asked.seq)
        most = parameters.requests_open_at_most
        if most is not None and open_requests > most:
            self.violation(f"{open_requests} requests were open, more than {most}", asked.seq)

    def _at_s(self) -> float:
        assert self._found is not None
        return (self._found[0].t_ns - self._start_ns) / 1e9

    def observed(self) -> str:
        return f"{len(self._seen)} such requests" if self._found is None else f"at {self._at_s():.2f} s"


class CapacityReturned(Criterion[Parameters]):
    """In the end each scaled service has its initial replicas, nothing more is occupied, no placement group is left."""

    name = "capacity_returned"
    expected = "as it was deployed"

    def __init__(self, ledger: Ledger, parameters: Parameters) -> None:
        super().__init__(ledger, parameters)
        self._deployed: dict[str, Event] = {}
        self._final: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"scale.snapshot": self._on_snapshot}

    def _on_snapshot(self, event: Event) -> None:
        kept = self._deployed if event.data["when"] == "deployed" else self._final
        kept[event.data["service"]] = event

    def conclude(self) -> None:
        for service, before in self._deployed.items():
            after = self._final.get(service)
            if after is None:
                self.doubt(f"nobody looked at {service} at its end", before.seq)
                continue
            self.judged += 1
            for name in ("current", "ready", "occupied", "pending_cleanup", "groups"):
                if after.data[name] != before.data[name]:
                    self.violation(
                        f"{service}: {name} is {after.data[name]}, it was {before.data[name]}", before.seq, after.seq
                    )

    def observed(self) -> str:
        return f"{self.judged} services, {self.violations} figures not as before"


class ReversalsAtMost(Parameters):
    at_most: int = Field(ge=0)


class Reversals(Criterion[ReversalsAtMost]):
    """How often an autoscaler turned round: a scale-in after its scale-out, or the other way about."""

    name = "reversals"
    expected = "at most the stated number"
    model = ReversalsAtMost

    def __init__(self, ledger: Ledger, parameters: ReversalsAtMost) -> None:
        super().__init__(ledger, parameters)
        self._latest: dict[str, str] = {}  # actor in front of a control API -> its latest accepted action
        self._asked: dict[str, Event] = {}
        self._seen: dict[str, None] = {}
        self._turned: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return {
            "autoscaler.deployed": self._on_deployed,
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
        }

    def _on_deployed(self, event: Event) -> None:
        self._latest[event.data["api"]] = ""

    def _on_asked(self, event: Event) -> None:
        if event.actor in self._latest and event.data["route"] in SUBMISSIONS:
            self._asked[event.data["ask"]] = event

    def _on_answered(self, event: Event) -> None:
        asked: Event | None = self._asked.pop(event.data["ask"], None)
        operation: Any = event.data["operation"]
        if asked is None or not operation or operation in self._seen:
            return
        self._seen[operation] = None
        before, action = self._latest[asked.actor], asked.data["route"]
        self._latest[asked.actor] = action
        if before and before != action:
            self._turned.append(asked.seq)

    def conclude(self) -> None:
        self.judged = len(self._latest)
        if len(self._turned) > self.parameters.at_most:
            self.violation(f"{len(self._turned)} times, more than {self.parameters.at_most}", *self._turned)
        elif self.judged and not self.ledger.ended:
            self.doubt("the evidence has no end")

    def observed(self) -> str:
        return f"{len(self._turned)} in {len(self._seen)} accepted requests"
