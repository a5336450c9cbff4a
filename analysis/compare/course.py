"""The course of one run as figures that two runs can be compared by: phases in seconds, metrics, totals.

A phase is what an operator would time with a watch: from a submission to what it came to, from a fault to the end of
what it broke. Names are the same in every world; numbers count in the order of submissions. One pass over the events.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from analysis.checks.scaling_views import SUBMISSIONS, TERMINAL
from analysis.compare.loads import load_starts
from analysis.rundir import RunDir, RunInfo
from protocol.evidence import Event

_WAY = {"scale_out": "out", "scale_in": "in"}
_FEW = 20  # calls of which each one is looked at


@dataclasses.dataclass
class Figure:
    """One figure of a run.

    ``unit`` is s, 1 (a count), 1/s or tok/s; ``group`` is phase, pause (of whoever drives the run, not of the
    protocol), total or metric.
    """

    name: str
    value: float
    unit: str
    group: str


@dataclasses.dataclass
class _Operation:
    name: str
    direction: str
    asked_s: float
    open_calls: dict[str, None]
    states: dict[str, float] = dataclasses.field(default_factory=dict)
    dirty_s: float | None = None
    clean_s: float | None = None
    refused: int = 0
    by_autoscaler: bool = False

    @property
    def over(self) -> tuple[str, float] | None:
        return next(((state, at) for state, at in self.states.items() if state in TERMINAL), None)


class Course:
    """Folds the events of one run into figures.

    Args:
        info: its run.json, for the phases of the load.
    """

    def __init__(self, info: RunInfo) -> None:
        self._loads = load_starts(info)
        self._asks: dict[str, Event] = {}
        self._operations: dict[str, _Operation] = {}
        self._fronts: dict[str, None] = {}
        self._sent: dict[str, float] = {}
        self._ended: dict[str, float] = {}  # only of calls that an operation or a fault waits for
        self._watched: dict[str, None] = {}
        self._latencies: list[float] = []
        self._latencies_known = True
        self._count = self._failed = self._tokens = self._retried = 0
        self._by_replica: dict[str, int] = {}
        self._faults: list[tuple[str, float, dict[str, None], str | None]] = []
        self._engine_from: dict[tuple[str, int], float] = {}
        self._startups: list[float] = []
        self._deaths: dict[str, float] = {}
        self._repairs: list[float] = []
        self._stated: dict[str, float] = {}
        self._publishing: dict[int, float] = {}
        self._published: dict[str, float] = {}
        self._first_s: float | None = None
        self._last_s = 0.0
        self._progress: dict[str, dict[str, float]] = {}
        self._handlers = {
            "run.started": self._on_started,
            "run.workload": self._on_workload,
            "foreign.phase": self._on_phase,
            "autoscaler.deployed": self._on_deployed,
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
            "request.sent": self._on_sent,
            "request.done": self._on_done,
            "fault.injected": self._on_fault,
            "engine.started": self._on_engine_started,
            "engine.ready": self._on_ready,
            "actor.died": self._on_died,
            "gateway.routable": self._on_routable,
            "publication.asked": lambda event: self._publishing.__setitem__(event.data["model_step"], event.t_s),
            "publication.ended": self._on_published,
            "foreign.load": self._on_load,
            "foreign.event": self._on_foreign,
            "foreign.verdict": self._on_stated,
            "train.step": self._on_step,
            "train.rollout": lambda event: self._on_progress("rollout", event.t_s, event.data["rollout"]),
        }

    @classmethod
    def of(cls, directory: RunDir) -> Course:
        """The course of a run directory. Raises BadInput: it cannot be read."""
        course = cls(directory.info())
        for event in directory.read_events():
            course.feed(event)
        return course

    def feed(self, event: Event) -> None:
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)

    # --- what happens
    def _on_started(self, event: Event) -> None:
        self._latencies_known = event.data["world"] != "imported"

    def _on_workload(self, event: Event) -> None:
        self._loads = {name: at + event.t_s for name, at in self._loads.items()}

    def _on_phase(self, event: Event) -> None:
        if event.data["name"] != "end":
            self._loads[f"load {sum(name.startswith('load') for name in self._loads) + 1}"] = event.t_s

    def _on_deployed(self, event: Event) -> None:
        self._fronts[event.data["api"]] = None

    def _on_asked(self, event: Event) -> None:
        self._asks[event.data["ask"]] = event

    def _on_answered(self, event: Event) -> None:
        asked, data = self._asks.pop(event.data["ask"], None), event.data
        if asked is None:
            return
        route = asked.data["route"]
        if route in SUBMISSIONS:
            if data["status"] == 200 and data["operation"] and data["operation"] not in self._operations:
                self._admit(data["operation"], asked)
            return
        operation = self._operations.get(asked.data["operation"])
        if operation is None:
            return
        if data["status"] != 200:
            operation.refused += route == "reconcile"
            return
        state = data["state"]
        if state:
            operation.states.setdefault(state, event.t_s)
        if state in TERMINAL and data["cleanup"] == "true" and operation.dirty_s is None:
            operation.dirty_s = event.t_s
        if state in TERMINAL and data["cleanup"] == "false" and operation.clean_s is None:
            operation.clean_s = event.t_s

    def _admit(self, operation: str, asked: Event) -> None:
        direction = asked.data["direction"]
        number = sum(one.direction == direction for one in self._operations.values()) + 1
        open_calls = dict.fromkeys(self._sent)
        self._watched.update(open_calls)
        self._operations[operation] = _Operation(
            f"{_WAY[direction]} {number}", direction, asked.t_s, open_calls, by_autoscaler=asked.actor in self._fronts
        )

    def _on_sent(self, event: Event) -> None:
        self._count += 1
        self._sent[event.data["request"]] = event.t_s
        self._first_s = event.t_s if self._first_s is None else self._first_s

    def _on_done(self, event: Event) -> None:
        data = event.data
        sent_s = self._sent.pop(data["request"], None)
        if sent_s is None:
            return
        self._last_s = event.t_s
        if data["request"] in self._watched:
            self._ended[data["request"]] = event.t_s
        if data["outcome"] != "done":
            self._failed += 1
            return
        self._latencies.append(event.t_s - sent_s)
        self._tokens += data["completion_tokens"]
        self._retried += data["attempts"] > 1
        if data["replica"]:
            self._by_replica[data["replica"]] = self._by_replica.get(data["replica"], 0) + 1

    def _on_fault(self, event: Event) -> None:
        going_on = [one for one in self._operations.values() if one.over is None]
        self._watched.update(dict.fromkeys(self._sent))
        waits = next((key for key, one in self._operations.items() if going_on and one is going_on[-1]), None)
        self._faults.append((event.data["name"], event.t_s, dict.fromkeys(self._sent), waits))

    def _on_engine_started(self, event: Event) -> None:
        self._engine_from[event.actor, event.inc] = event.t_s

    def _on_ready(self, event: Event) -> None:
        began = self._engine_from.pop((event.actor, event.inc), None)
        if began is not None:
            self._startups.append(event.t_s - began)

    def _on_died(self, event: Event) -> None:
        self._deaths[event.actor] = event.t_s

    def _on_routable(self, event: Event) -> None:
        died = self._deaths.pop(event.data["replica"], None)
        if died is not None:
            self._repairs.append(event.t_s - died)

    def _on_published(self, event: Event) -> None:
        step = event.data["model_step"]
        asked_s = self._publishing.pop(step, None)
        if asked_s is not None:
            self._published[f"publication {step} asked -> {event.data['outcome']}"] = event.t_s - asked_s

    def _on_load(self, event: Event) -> None:
        self._count += event.data["sent"]
        self._failed += event.data["failed"]

    def _on_foreign(self, event: Event) -> None:
        payload = event.data["payload"]
        if event.data["name"] == "load_stopped" and isinstance(payload, dict):
            for key in ("p50", "p95", "max"):
                value = payload.get(key)
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._stated[f"latency {key}"] = float(value)

    def _on_stated(self, event: Event) -> None:
        value = event.data["value"]
        if event.data["key"] == "A6_load_total" and isinstance(value, int) and not isinstance(value, bool):
            self._stated["requests"] = float(value)

    def _on_step(self, event: Event) -> None:
        what = "step" if event.data["what"] == "started" else "step end"
        self._on_progress(what, event.t_s, event.data["step"])

    def _on_progress(self, what: str, at_s: float, number: object) -> None:
        self._progress.setdefault(what, {}).setdefault(str(number), at_s)

    # --- figures
    def figures(self) -> list[Figure]:
        """Everything that can be said of the run, phases first, in the order in which they began."""
        found = [*self._phases(), *self._totals(), *self._metrics()]
        return [figure for figure in found if figure.value >= 0]

    def _phases(self) -> list[Figure]:
        phases: list[Figure] = []
        over: _Operation | None = None
        for operation in self._operations.values():
            name = operation.name
            if operation.by_autoscaler:
                phases += self._until_decision(operation, over)
            elif over is not None and over.over is not None:
                done = max(over.over[1], over.clean_s or 0.0) if over.dirty_s else over.over[1]
                phases.append(Figure(f"{over.name} over -> {name} asked", operation.asked_s - done, "s", "pause"))
            for state, at in operation.states.items():
                if state in ("HEALTH_CHECKING",):
                    phases.append(_seconds(f"{name} asked -> {state}", at - operation.asked_s))
            if operation.over is not None:
                state, at = operation.over
                if operation.dirty_s is not None:
                    phases.append(
                        _seconds(f"{name} asked -> {state}, not clean", operation.dirty_s - operation.asked_s)
                    )
                    if operation.clean_s is not None:
                        phases.append(_seconds(f"{name} asked -> clean", operation.clean_s - operation.asked_s))
                else:
                    phases += self._to_its_end(operation, state, at)
            for number, (fault, at, calls_open, waits) in enumerate(self._faults, 1):
                if waits is not None and self._operations[waits] is operation and operation.over is not None:
                    calls = [self._ended[call] for call in calls_open if call in self._ended]
                    end = max([operation.over[1], *calls])
                    phases.append(_seconds(f"{name} asked -> {fault} {number}", at - operation.asked_s))
                    phases.append(_seconds(f"{fault} {number} -> {name} over, calls answered", end - at))
            over = operation
        for number, repair in enumerate(self._repairs, 1):
            phases.append(_seconds(f"death {number} -> routed to again", repair))
        return phases + [_seconds(name, took) for name, took in self._published.items()]

    def _to_its_end(self, operation: _Operation, state: str, at: float) -> list[Figure]:
        """From a submission to its end; and to that of the long calls that it found, where there are few.

        A recorder that waited for the calls before it looked at the operation knows only when both were over.
        """
        calls = [self._ended[call] for call in operation.open_calls if call in self._ended]
        took = _seconds(f"{operation.name} asked -> {state}", at - operation.asked_s)
        if operation.direction != "scale_in" or not calls or len(self._latencies) >= _FEW:
            return [took]
        both = _seconds(f"{operation.name} asked -> {state}, calls answered", max([at, *calls]) - operation.asked_s)
        waited = not self._latencies_known and 0 <= at - max(calls) < 0.01
        return [both] if waited else [took, both]

    def _until_decision(self, operation: _Operation, before: _Operation | None) -> list[Figure]:
        name = operation.name
        if before is not None and before.over is not None and operation.direction == "scale_in":
            return [_seconds(f"{before.name} {before.over[0]} -> {name} decided", operation.asked_s - before.over[1])]
        begun = [(load, at) for load, at in self._loads.items() if at <= operation.asked_s]
        if not begun:
            return []
        load, at = max(begun, key=lambda one: one[1])
        return [_seconds(f"{load} begins -> {name} decided", operation.asked_s - at)]

    def _totals(self) -> list[Figure]:
        count = self._count or self._stated.get("requests", 0)
        totals: list[Figure] = []
        if count or self._latencies_known:  # an imported run need not tell of its requests
            totals += [Figure("requests", count, "1", "total"), Figure("requests failed", self._failed, "1", "total")]
        totals += [
            Figure(f"{one.name} reconciles refused", one.refused, "1", "total")
            for one in self._operations.values()
            if one.refused
        ]
        if self._operations:
            totals.append(Figure("operations", len(self._operations), "1", "total"))
        if self._faults:
            totals.append(Figure("faults", len(self._faults), "1", "total"))
        for what in ("step", "rollout"):
            if what in self._progress:
                totals.append(Figure(f"{what}s", len(self._progress[what]), "1", "total"))
        return totals

    def _metrics(self) -> list[Figure]:
        metrics: list[Figure] = []
        if self._latencies and self._latencies_known and len(self._latencies) >= 20:
            ordered = sorted(self._latencies)
            for key, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
                metrics.append(Figure(f"latency {key}", value, "s", "metric"))
            metrics.append(Figure("latency mean", sum(ordered) / len(ordered), "s", "metric"))
        metrics += [
            Figure(key, value, "s", "metric") for key, value in self._stated.items() if key.startswith("latency")
        ]
        for number, name in enumerate(self._calls(), 1):
            metrics.append(Figure(f"call {number}", name, "s", "metric"))
        if self._latencies_known and self._first_s is not None and self._last_s > self._first_s and self._count >= 20:
            took = self._last_s - self._first_s
            metrics.append(Figure("requests a second", self._count / took, "1/s", "metric"))
            if self._tokens:
                metrics.append(Figure("tokens a second", self._tokens / took, "tok/s", "metric"))
        if self._startups:
            metrics.append(Figure("engine start-up", sum(self._startups) / len(self._startups), "s", "metric"))
        if self._faults and self._latencies_known and self._count >= 20:
            metrics.append(Figure("requests sent twice", self._retried, "1", "metric"))
        metrics += self._training()
        return metrics

    def _calls(self) -> list[float]:
        """Lengths of long calls, where there are few: of those that an operation waited for, in their order."""
        if len(self._latencies) >= _FEW:
            return []
        return [one for one in self._latencies if one > 1.0]

    def _training(self) -> list[Figure]:
        found = []
        for what, seen in self._progress.items():
            times = sorted(seen.values())
            if len(times) > 2:
                gaps = sorted(b - a for a, b in zip(times, times[1:], strict=False))
                found.append(Figure(f"{what}: median gap", gaps[len(gaps) // 2], "s", "metric"))
        return found


def _seconds(name: str, value: float) -> Figure:
    return Figure(name, value, "s", "phase")


Figures = dict[str, Figure]


def by_name(figures: list[Figure]) -> Figures:
    """Figures by their names; where one comes twice the first counts."""
    found: dict[str, Any] = {}
    for figure in figures:
        found.setdefault(figure.name, figure)
    return found
