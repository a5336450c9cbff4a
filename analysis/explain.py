"""What happened around the witnesses of a check: a message sequence, and who waited for whom at that point.

Source: DESIGN.md, "Evidence and verdicts"; drawn by analysis/sequence.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from analysis.checks import CheckResult
from analysis.order import parse_cause
from analysis.rundir import RunDir
from protocol.evidence import Event

ROWS = 60
NEIGHBOURS = 3
WAITS = 20
_SUBJECTS = ("request", "call", "operation", "fault", "path")
_CONTEXT = (
    "fault.injected",
    "fault.healed",
    "run.healed",
    "actor.died",
    "actor.stopped",
    "actor.continued",
    "node.lost",
)
_NEAR_NS = 2_000_000_000


class Step(NamedTuple):
    """One row of a message sequence, with the participants an arrow goes from and to; both None for no arrow."""

    event: Event
    source: str | None
    target: str | None
    label: str
    witness: bool


class Wait(NamedTuple):
    """Somebody who waits."""

    waiter: str
    waits_for: str
    should_wake: str
    since_s: float | None


class Explanation(NamedTuple):
    """What is shown of one check."""

    check: CheckResult
    steps: tuple[Step, ...]
    participants: tuple[str, ...]
    waits: tuple[Wait, ...]
    cycle: tuple[str, ...]
    """Processes that wait for one another in a ring, if some do."""
    left_out: int
    at_the_end: bool
    """Whether the waits are those at the end of the evidence, or those at the last witness."""


def explain_check(directory: RunDir, check: CheckResult) -> Explanation:
    """Read the run again and gather what belongs to the witnesses of a check.

    Raises:
        BadInput: the events cannot be read.
    """
    witnesses = set(check.witness)
    subjects, window = _subjects(directory, witnesses)
    chosen: list[Event] = []
    left_out = 0
    waits = _Waits()
    last = max(witnesses, default=-1)
    at_witness: tuple[Wait, ...] = ()
    for event in directory.read_events():
        waits.see(event)
        if event.seq == last:
            at_witness = waits.report(subjects)
        if not _belongs(event, witnesses, subjects, window):
            continue
        if event.kind == "actor.died" and event.seq > last and waits.all_answered:
            continue  # the end of the run takes every process down: that explains nothing
        if event.seq not in witnesses and len(chosen) >= ROWS:
            left_out += 1
            continue
        chosen.append(event)
    steps = tuple(Step(event, *_arrow(event), label(event), event.seq in witnesses) for event in chosen)
    participants: dict[str, None] = {}
    for step in steps:
        for name in (step.source, step.event.actor, step.target):
            if name is not None:
                participants[name] = None
    # What never ended is best seen at the end, anything else at the moment it went wrong.
    at_the_end = not witnesses or waits.is_open(subjects)
    found = waits.report(subjects) if at_the_end else at_witness
    return Explanation(check, steps, tuple(participants), found, _cycle(found), left_out, at_the_end)


def _subjects(directory: RunDir, witnesses: set[int]) -> tuple[set[tuple[str, Any]], tuple[int, int]]:
    """What the witnesses are about, and the span of time around them."""
    subjects: set[tuple[str, Any]] = set()
    first_ns, last_ns = None, 0
    for event in directory.read_events():
        if event.seq not in witnesses:
            continue
        first_ns = event.t_ns if first_ns is None else first_ns
        last_ns = event.t_ns
        for name in _SUBJECTS:
            if isinstance(event.data.get(name), int | str):
                subjects.add((name, event.data[name]))
    if first_ns is None:
        return subjects, (0, -1)
    return subjects, (first_ns - _NEAR_NS, last_ns + _NEAR_NS)


def _belongs(event: Event, witnesses: set[int], subjects: set[tuple[str, Any]], window: tuple[int, int]) -> bool:
    if any(abs(event.seq - seq) <= NEIGHBOURS for seq in witnesses):
        return True
    if any((name, event.data[name]) in subjects for name in _SUBJECTS if isinstance(event.data.get(name), int | str)):
        return True
    return event.kind in _CONTEXT and window[0] <= event.t_ns <= window[1]


def _arrow(event: Event) -> tuple[str | None, str | None]:
    """The message that an event sends, or the one that it follows from."""
    if event.kind == "call.sent" and event.data["target"] != event.actor:
        return event.actor, event.data["target"]
    if event.cause is None:
        return None, None
    (actor, _), _ = parse_cause(event.cause)
    return (actor, event.actor) if actor != event.actor else (None, None)


_SHOWN_FIELDS = {
    "call.sent": ("target", "method", "call"),
    "call.done": ("call", "outcome", "error"),
    "request.sent": ("request",),
    "request.done": ("request", "outcome", "status", "error", "replica", "version"),
    "engine.accepted": ("request", "running"),
    "engine.finished": ("request", "reason", "completion_tokens"),
    "run.started": ("scenario",),
}


def label(event: Event) -> str:
    """An event in a few words."""
    fields = _SHOWN_FIELDS.get(event.kind, tuple(event.data))
    shown = " ".join(f"{name}={_short(event.data[name])}" for name in fields if event.data.get(name) not in (None, ""))
    return f"{event.kind} {shown}".rstrip()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


class _Waits:
    """Who is waiting for whom: open calls and requests, or the world's own report of a deadlock."""

    def __init__(self) -> None:
        self._calls: dict[int, Event] = {}
        self._requests: dict[str, Event] = {}
        self._runs: dict[str, list[str]] = {}
        self._reported: list[Wait] = []

    def see(self, event: Event) -> None:
        kind, data = event.kind, event.data
        if kind == "call.sent":
            self._calls[data["call"]] = event
        elif kind == "call.done":
            self._calls.pop(data["call"], None)
        elif kind == "request.sent":
            self._requests[data["request"]] = event
        elif kind == "request.done":
            self._requests.pop(data["request"], None)
            self._runs.pop(data["request"], None)
        elif kind == "engine.accepted" and data["request"] in self._requests:
            self._runs.setdefault(data["request"], []).append(event.actor)
        elif kind == "engine.finished" and event.actor in self._runs.get(data["request"], ()):
            self._runs[data["request"]].remove(event.actor)
        elif kind == "run.wait":
            self._reported.append(Wait(data["waiter"], data["waits_for"], data["should_wake"], None))

    @property
    def all_answered(self) -> bool:
        """Whether no request is open."""
        return not self._requests

    def is_open(self, subjects: set[tuple[str, Any]]) -> bool:
        """Whether one of these calls or requests has not ended, or the world itself reports who waits."""
        return (
            bool(self._reported)
            or any(("call", call) in subjects for call in self._calls)
            or any(("request", request) in subjects for request in self._requests)
        )

    def report(self, subjects: set[tuple[str, Any]]) -> tuple[Wait, ...]:
        """Who waits, those that the witnesses are about first, then the longest."""
        if self._reported:
            return tuple(self._reported[:WAITS])
        found = []
        for call, sent in self._calls.items():
            target = sent.data["target"]
            wait = Wait(sent.actor, f"{target}.{sent.data['method']} (call {call})", target, sent.t_s)
            found.append((("call", call) not in subjects, sent.t_ns, wait))
        for request, sent in self._requests.items():
            engines = self._runs.get(request) or ["no engine"]
            wait = Wait(f"{sent.actor} ({request})", "the answer", ", ".join(engines), sent.t_s)
            found.append((("request", request) not in subjects, sent.t_ns, wait))
        found.sort(key=lambda row: row[:2])
        return tuple(wait for _, _, wait in found[:WAITS])


def _cycle(waits: tuple[Wait, ...]) -> tuple[str, ...]:
    """A ring in the waits-for graph, by process name; empty where there is none."""
    edges: dict[str, list[str]] = {}
    for wait in waits:
        edges.setdefault(wait.waiter.partition(" ")[0].partition(".")[0], []).append(
            wait.should_wake.partition(" ")[0].partition(".")[0]
        )
    for start in edges:
        path, seen = [start], {start}
        node = start
        while len(following := edges.get(node, [])) >= 1:
            node = following[0]
            if node == start:
                return tuple(path)
            if node in seen:
                break
            seen.add(node)
            path.append(node)
    return ()
