"""Histories of a few events, written tersely: what is not said is filled in."""

from __future__ import annotations

from typing import Any

from analysis.checks import INVARIANTS, Check, CheckResult
from analysis.rundir import Preregistered
from analysis.verdict import Judge, Verdict
from protocol.evidence import KINDS, Event

_DEFAULTS = {"int": 0, "float": 0.0, "str": "", "bool": True, "json": None, "int?": None, "float?": None, "str?": None}


class History:
    """``h("request.sent", request="r1")`` appends an event 1 ms after the last one, with default fields.

    ``at`` is the process, ``name/incarnation``; ``ms`` sets the time; ``cause`` an earlier event.
    """

    def __init__(self, clock_error_ms: int = 0, *, world: str = "sim") -> None:
        self.events: list[Event] = []
        self._counters: dict[str, int] = {}
        self._ms = -1
        if clock_error_ms >= 0:
            self("run.started", scenario="test", world=world, clock_error_ns=clock_error_ms * 10**6, schema=1)

    def __call__(
        self, kind: str, *, at: str = "client/0", ms: int | None = None, cause: Event | None = None, **fields: Any
    ) -> Event:
        declared = KINDS[kind].fields
        assert fields.keys() <= declared.keys(), f"{kind} has no {fields.keys() - declared.keys()}"
        data = {name: fields.get(name, _DEFAULTS[type_]) for name, (type_, _) in declared.items()}
        self._ms = self._ms + 1 if ms is None else ms
        actor, _, inc = at.rpartition("/")
        n = self._counters[at] = self._counters.get(at, 0) + 1
        event = Event(
            len(self.events), self._ms * 10**6, kind, actor, int(inc), n, n, None if cause is None else cause.id, data
        )
        self.events.append(event)
        return event

    def end(self, reason: str = "completed", **fields: Any) -> History:
        self("run.finished", reason=reason, events=len(self.events), at="world/0", **fields)
        return self

    # --- what most histories need
    def sent(self, request: str = "r1", **fields: Any) -> Event:
        return self("request.sent", request=request, **fields)

    def accepted(self, request: str = "r1", at: str = "e0/1", **fields: Any) -> Event:
        return self("engine.accepted", request=request, at=at, **fields)

    def finished(
        self, request: str = "r1", at: str = "e0/1", tokens: int = 8, version: str = "1", **fields: Any
    ) -> Event:
        fields.setdefault("spans", [[version, 0, tokens, f"hash-{version}"]])
        fields.setdefault("stale_cached_tokens", 0)
        return self("engine.finished", request=request, at=at, reason="length", completion_tokens=tokens, **fields)

    def done(
        self, request: str = "r1", at_engine: str = "e0/1", tokens: int = 8, version: str = "1", **fields: Any
    ) -> Event:
        replica, _, inc = at_engine.rpartition("/")
        fields.setdefault("outcome", "done")
        fields.setdefault("status", 200)
        return self(
            "request.done",
            request=request,
            replica=replica,
            replica_inc=int(inc or 0),
            completion_tokens=tokens,
            version=version,
            **fields,
        )

    def ready(self, at: str = "e0/1", version: str = "1", ms: int | None = None) -> Event:
        return self("engine.ready", at=at, ms=ms, version=version, weight_hash=f"hash-{version}")

    def served(self, request: str = "r1", at: str = "e0/1") -> None:
        """A request that goes well."""
        self.sent(request)
        self.accepted(request, at=at)
        self.finished(request, at=at)
        self.done(request, at_engine=at)

    # --- judging
    def verdict(self, **preregistered: Any) -> Verdict:
        judge = Judge(Preregistered(**preregistered))
        for event in self.events:
            judge.feed(event)
        return judge.verdict()

    def judged(self, name: str, **preregistered: Any) -> CheckResult:
        """The row of one invariant, or of an acceptance criterion (which comes last)."""
        rows = [row for row in self.verdict(**preregistered).checks if row.name.split("(")[0] == name]
        assert rows, f"no check {name}"
        return rows[-1]


def invariant(name: str) -> type[Check]:
    return next(check for check in INVARIANTS if check.name == name)
