"""What the criteria on imported runs fold the evidence into: what happened, as far as the run's recorders kept it.

Bounded by the number of operations, phases, replicas and steps; requests are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.evidence import Event

OVER = ("ACTIVE", "PARTIAL", "COMPLETED", "FAILED")


class Operation:
    """One admitted operation: when it was asked for, and every state that was seen, with its time."""

    __slots__ = (
        "actor",
        "asked_s",
        "cleaned_s",
        "dirty_s",
        "direction",
        "ended_s",
        "id",
        "in_flight",
        "states",
        "timeout_s",
    )

    def __init__(self, operation: str, asked: Event, in_flight: int | None) -> None:
        self.id = operation
        self.actor = asked.actor
        self.direction: str = asked.data["direction"]
        self.asked_s = asked.t_s
        self.timeout_s: float | None = asked.data["timeout_s"]
        self.in_flight = in_flight
        """Requests on the victim when it was asked for, where that was looked at."""
        self.states: list[str] = []
        self.ended_s: float | None = None
        self.dirty_s: float | None = None
        self.cleaned_s: float | None = None

    @property
    def state(self) -> str:
        return self.states[-1] if self.states else ""

    def saw(self, event: Event) -> None:
        state, cleanup = event.data["state"], event.data["cleanup"]
        if state and state != self.state:
            self.states.append(state)
        if state in OVER and self.ended_s is None:
            self.ended_s = event.t_s
        if state in OVER and cleanup == "true" and self.dirty_s is None:
            self.dirty_s = event.t_s
        if state in OVER and cleanup == "false" and self.cleaned_s is None:
            self.cleaned_s = event.t_s


class Facts:
    """Everything that the criteria ask about; feed it every event whose kind is in ``see``."""

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}
        self.refusals: list[tuple[float, str, int, str, bool]] = []
        """Refused questions: time, route, status, code, and whether an operation was terminal and not clean then."""
        self.calls: dict[str, list[tuple[bool, str]]] = {}
        """Calls whose ids have a tag in front of a dash: (done, replica)."""
        self.sent = self.failed = self.ended = 0
        self.loads: list[tuple[int, int]] = []
        self.reasons: dict[str, list[str]] = {}
        self.initial: tuple[str, ...] = ()
        self.listed: list[tuple[float, tuple[str, ...], int | None]] = []
        """Each change of the engines that were listed, with the capacity that was said beside them."""
        self.served: dict[str, dict[str, tuple[int, int]]] = {}
        """Phase to replica to its first and latest count of served requests."""
        self.phases: dict[str, float] = {}
        self.decisions: list[Event] = []
        self.resources: list[Event] = []
        self.progress: dict[str, dict[str, float]] = {}
        self.scores: dict[str, Any] = {}
        self.notes: dict[str, dict[str, Any]] = {}
        """Other records by name: the payload of the latest one."""
        self.counts: dict[str, int] = {}
        self.noted_s: dict[str, float] = {}
        self.killed = 0
        self.last_s = 0.0
        self._asks: dict[str, Event] = {}
        self._in_flight: int | None = None
        self._phase = ""
        self.see: dict[str, Callable[[Event], None]] = {
            "scale.asked": self._asked,
            "scale.answered": self._answered,
            "request.sent": self._sent,
            "request.done": self._done,
            "fault.injected": self._fault,
            "foreign.event": self._event,
            "foreign.load": self._load,
            "foreign.engines": self._engines,
            "foreign.phase": self._entered,
            "foreign.decision": self._decision,
            "foreign.resources": self._resources,
            "train.step": self._step,
            "train.rollout": lambda event: self._progressed("rollout", event, event.data["rollout"]),
            "train.finished": lambda event: self._progressed("finished", event, ""),
        }

    def all_of(self, direction: str, actor: str | None = None) -> list[Operation]:
        """Operations of a direction in the order of their submissions; of one who asked, where that is given."""
        return [one for one in self.operations.values() if one.direction == direction and actor in (None, one.actor)]

    def elastic(self) -> set[str]:
        """Replicas that were ever listed and are none of the deployment."""
        return {name for _, names, _ in self.listed for name in names} - set(self.initial)

    # --- handlers
    def _asked(self, event: Event) -> None:
        self._asks[event.data["ask"]] = event

    def _answered(self, event: Event) -> None:
        self.last_s = event.t_s
        asked, data = self._asks.pop(event.data["ask"], None), event.data
        if asked is None:
            return
        if data["status"] != 200:
            dirty = any(one.dirty_s is not None and one.cleaned_s is None for one in self.operations.values())
            self.refusals.append((event.t_s, asked.data["route"], data["status"], data["code"], dirty))
            return
        if asked.data["operation"]:
            operation = self.operations.get(asked.data["operation"])
            if operation is not None:
                operation.saw(event)
        elif data["operation"] and data["operation"] not in self.operations:
            self.operations[data["operation"]] = Operation(data["operation"], asked, self._in_flight)
            self._in_flight = None

    def _sent(self, event: Event) -> None:
        self.sent += 1

    def _done(self, event: Event) -> None:
        done, tag = event.data["outcome"] == "done", event.data["request"].partition("-")[0]
        self.ended += 1
        self.failed += not done
        if event.actor.startswith("client-genrm-"):
            self.calls.setdefault(tag, []).append((done, event.data["replica"]))

    def _fault(self, event: Event) -> None:
        self.killed += event.data["name"] == "sigkill"

    def _event(self, event: Event) -> None:
        name, payload = event.data["name"], event.data["payload"]
        self.last_s = event.t_s
        self.counts[name] = self.counts.get(name, 0) + 1
        self.noted_s[name] = event.t_s
        if not isinstance(payload, dict):
            return
        self.notes[name] = payload
        if name.endswith("_scores") and "scores" in payload:
            self.scores[name.removesuffix("_scores")] = payload["scores"]
        if name.endswith("_call"):
            self.reasons.setdefault(name.removesuffix("_call"), []).append(str(payload.get("finish_reason", "")))

    def _load(self, event: Event) -> None:
        self.loads.append((event.data["sent"], event.data["failed"]))

    def _engines(self, event: Event) -> None:
        served, in_flight = event.data["served"], event.data["in_flight"]
        self.last_s = event.t_s
        names = tuple(served)
        if event.data["initial"]:
            self.initial = names
        if not event.data["whole"]:
            for count in in_flight.values():
                self._in_flight = count if count is not None else self._in_flight  # somebody looked at a victim
        elif not self.listed or self.listed[-1][1:] != (names, event.data["current"]):
            self.listed.append((event.t_s, names, event.data["current"]))
        here = self.served.setdefault(self._phase, {})
        for name, count in served.items():
            if count is not None:
                first, _ = here.get(name, (count, count))
                here[name] = (first, count)

    def _entered(self, event: Event) -> None:
        self._phase = event.data["name"]
        self.phases[self._phase] = event.t_s

    def _decision(self, event: Event) -> None:
        self.decisions.append(event)

    def _resources(self, event: Event) -> None:
        self.resources.append(event)

    def _step(self, event: Event) -> None:
        self._progressed("step" if event.data["what"] == "started" else "step_end", event, event.data["step"])

    def _progressed(self, what: str, event: Event, number: object) -> None:
        self.progress.setdefault(what, {}).setdefault(str(number), event.t_s)
