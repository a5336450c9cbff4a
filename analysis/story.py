"""The course of scaling and training in a run: replicas, operations, decisions, drains, training steps and their gaps.

One pass over the evidence, for pictures and tables. Replicas, requests and training are what the world saw;
operations, drains and decisions are the control plane's own account of itself. No verdict is computed from any of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from analysis.timeline import Timeline
from protocol.evidence import Event
from protocol.messages import service_of


@dataclasses.dataclass(slots=True)
class Operation:
    """One scale operation: from its admission to its end. ``ended_s``: None while it is open."""

    name: str
    direction: str
    asked_s: float
    ended_s: float | None = None
    state: str = "PENDING"
    clean: bool | None = None


@dataclasses.dataclass(slots=True)
class Drain:
    """A replica on its way out: chosen, then idle (or parked), then gone."""

    replica: str
    incarnation: int
    chosen_s: float
    idle_s: float | None = None
    parked_s: float | None = None
    gone_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What an autoscaler decided to do. ``onset_s``: since when the condition that it names had held."""

    at_s: float
    service: str
    action: str
    delta: int
    triggered: tuple[str, ...]
    onset_s: float


@dataclasses.dataclass(slots=True)
class Step:
    """One training step."""

    number: int
    started_s: float
    ended_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Time without a sign of progress of the training, between two of them or at an edge of the run.

    ``during``: operations that were open in it.
    """

    after: str
    before: str
    from_s: float
    to_s: float
    during: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s


class Story:
    """Folds the events of a run. ``timeline``: requests and faults, in bins."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.begin_s = 0.0
        """When the workload began."""
        self.end_s = 0.0
        """When the last event of the workload came; taking the run down is no part of it."""
        self.replicas: dict[str, list[tuple[float, int, int]]] = {}
        """Service to (time, processes alive, of these ready), a row a change."""
        self.queue: list[tuple[float, float, float]] = []
        """(time, waiting, running) as an autoscaler's frames have it."""
        self.operations: dict[str, Operation] = {}
        self.drains: list[Drain] = []
        self.decisions: list[Decision] = []
        self.steps: dict[int, Step] = {}
        self.progress: list[tuple[float, str]] = []
        """Signs of progress of the training: (time, what)."""
        self._state: dict[str, dict[str, bool]] = {}
        self._down = False
        self._handlers: dict[str, Callable[[Event], None]] = {
            "run.workload": self._on_workload,
            "actor.spawned": self._on_spawned,
            "engine.ready": self._on_ready,
            "actor.died": self._on_died,
            "scale.snapshot": self._on_snapshot,
            "scale.state": self._on_state,
            "scale.decision": self._on_admitted,
            "scale.terminal": self._on_terminal,
            "scale.reconciled": self._on_reconciled,
            "scale.drain": self._on_drain,
            "autoscaler.evaluated": self._on_evaluated,
            "train.step": self._on_step,
            "train.rollout": lambda event: self._sign(event, f"rollout {event.data['rollout']}"),
            "train.weights": lambda event: self._sign(event, f"weights {event.data['version']}"),
        }

    def feed(self, event: Event) -> None:
        self.timeline.feed(event)
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)
        if event.kind in ("request.done", "train.finished", "scale.terminal", "train.step", "actor.died"):
            self.end_s = event.t_s if not self._down else self.end_s

    # --- replicas ---

    def _on_workload(self, event: Event) -> None:
        self.begin_s = event.t_s

    def _on_spawned(self, event: Event) -> None:
        if event.data["role"] == "engine":
            self._set(event, False)

    def _on_ready(self, event: Event) -> None:
        self._set(event, True)

    def _set(self, event: Event, ready: bool) -> None:
        service = service_of(event.actor)
        if service:
            self._state.setdefault(service, {})[event.actor] = ready
            self._note(service, event.t_s)

    def _on_died(self, event: Event) -> None:
        service = service_of(event.actor)
        if self._state.get(service, {}).pop(event.actor, None) is not None and not self._down:
            self._note(service, event.t_s)
        for drain in self.drains:
            if (drain.replica, drain.incarnation) == (event.actor, event.inc) and drain.gone_s is None:
                drain.gone_s = event.t_s

    def _note(self, service: str, t_s: float) -> None:
        known = self._state[service]
        self.replicas.setdefault(service, []).append((t_s, len(known), sum(known.values())))

    def _on_snapshot(self, event: Event) -> None:
        self._down = self._down or event.data["when"] == "final"  # from here on the run is taken down

    # --- scaling ---

    def _on_admitted(self, event: Event) -> None:
        if event.data["result"] == "ADMITTED":
            name = event.data["operation"]
            self.operations.setdefault(name, Operation(name, event.data["direction"], event.t_s))

    def _on_state(self, event: Event) -> None:
        name = event.data["operation"]
        one = self.operations.setdefault(name, Operation(name, event.data["direction"], event.t_s))
        one.state = event.data["state"]

    def _on_terminal(self, event: Event) -> None:
        data = event.data
        one = self.operations.setdefault(data["operation"], Operation(data["operation"], data["direction"], event.t_s))
        one.state, one.ended_s, one.clean = data["state"], event.t_s, not data["cleanup_required"]

    def _on_reconciled(self, event: Event) -> None:
        one = self.operations.get(event.data["operation"])
        if one is not None:
            one.clean = not event.data["cleanup_required"]

    def _on_drain(self, event: Event) -> None:
        data = event.data
        if data["what"] == "chosen":
            self.drains.append(Drain(data["replica"], data["replica_inc"], event.t_s))
            return
        for drain in reversed(self.drains):
            if (drain.replica, drain.incarnation) == (data["replica"], data["replica_inc"]):
                if data["what"] == "confirmed" and drain.idle_s is None:
                    drain.idle_s = event.t_s
                elif data["what"] == "parked":
                    drain.parked_s = event.t_s
                return

    def _on_evaluated(self, event: Event) -> None:
        data, frame = event.data, event.data["frame"]
        waiting, running = frame.get("total_queue_reqs"), frame.get("total_running_reqs")
        if waiting is not None and running is not None:
            self.queue.append((event.t_s, float(waiting), float(running)))
        if data["action"] == "none":
            return
        held = [data["streaks"].get(name, 0.0) for name in data["triggered"]]
        # Scale-out takes any one condition, the longest held counts; scale-in takes all, so the one held shortest.
        since = (max if data["action"] == "scale_out" else min)(held, default=0.0)
        self.decisions.append(
            Decision(
                event.t_s, data["service"], data["action"], data["delta"], tuple(data["triggered"]), event.t_s - since
            )
        )

    # --- training ---

    def _on_step(self, event: Event) -> None:
        number, what = event.data["step"], event.data["what"]
        if what == "started":
            self.steps[number] = Step(number, event.t_s)
        elif number in self.steps:
            self.steps[number].ended_s = event.t_s
        self._sign(event, f"step {number} {what}")

    def _sign(self, event: Event, what: str) -> None:
        self.progress.append((event.t_s, what))

    # --- what follows ---

    def gaps(self) -> list[Gap]:
        """Every gap of the training, those at both edges of the run among them: start to first sign, last sign to end.

        A list of gaps between consecutive signs alone says nothing of a training that never began, or stopped for good.
        """
        signs = [(self.begin_s, "start of the load"), *self.progress, (max(self.end_s, self.begin_s), "end of the run")]
        if not self.progress:
            return []
        return [
            Gap(one, other, from_s, to_s, self._open_in(from_s, to_s))
            for (from_s, one), (to_s, other) in zip(signs, signs[1:], strict=False)
        ]

    def _open_in(self, from_s: float, to_s: float) -> tuple[str, ...]:
        def overlaps(one: Operation) -> bool:
            return one.asked_s < to_s and (one.ended_s is None or one.ended_s > from_s)

        return tuple(f"{one.direction} {one.name}" for one in self.operations.values() if overlaps(one))

    def operation_rows(self) -> Iterator[dict[str, Any]]:
        """One row an operation, as a table wants it."""
        for one in self.operations.values():
            took = None if one.ended_s is None else one.ended_s - one.asked_s
            yield {
                "operation": one.name, "direction": one.direction, "asked_s": one.asked_s, "took_s": took,
                "state": one.state, "clean": one.clean,
            }  # fmt: skip

    def drain_rows(self) -> Iterator[dict[str, Any]]:
        """One row a drain: when it began, and how long each part of it took."""
        for one in self.drains:
            idle = None if one.idle_s is None else one.idle_s - one.chosen_s
            gone = None if one.gone_s is None else one.gone_s - one.chosen_s
            yield {
                "replica": one.replica, "chosen_s": one.chosen_s, "idle_after_s": idle, "gone_after_s": gone,
                "parked": one.parked_s is not None,
            }  # fmt: skip

    def decision_rows(self) -> Iterator[dict[str, Any]]:
        """One row a decision: when, and how long after its conditions had begun to hold."""
        for one in self.decisions:
            yield {
                "at_s": one.at_s, "service": one.service, "action": one.action, "delta": one.delta,
                "after_onset_s": one.at_s - one.onset_s, "triggered": ", ".join(one.triggered),
            }  # fmt: skip


def story_of(events: Iterable[Event]) -> Story:
    """The story of a run's events."""
    story = Story()
    for event in events:
        story.feed(event)
    return story
