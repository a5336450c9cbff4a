"""The judge: feeds events to checks and reaches a verdict, live in a sweep or offline from a file, with one result.

Source: DESIGN.md, "Evidence and verdicts".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from analysis.acceptance import criteria
from analysis.checks import INVARIANTS, Check, CheckResult, Ledger
from analysis.checks.base import FREQUENT, Handler, Result
from analysis.errors import BadInput
from analysis.rundir import Preregistered, RunDir
from protocol.evidence import Event

Handlers = tuple[Callable[[Event], None], ...]

_SENT, _DONE = "call.sent", "call.done"
EXIT_CODES: dict[str, int] = {"pass": 0, "fail": 1, "inconclusive": 3}
BAD_INPUT = 2
ANALYSIS_VERSION = 1


class Verdict(NamedTuple):
    """What the judge says of a run."""

    result: Result
    checks: tuple[CheckResult, ...]
    events: int
    note: str = ""
    """What the reader had to say of the evidence itself, such as a cut last line."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.result]

    def as_json(self) -> dict[str, Any]:
        """The content of verdict.json."""
        return {
            "analysis_version": ANALYSIS_VERSION,
            "result": self.result,
            "events": self.events,
            "note": self.note,
            "checks": [check.as_json() for check in self.checks],
        }

    def failed(self) -> list[CheckResult]:
        """The rows that made it fail; where nothing failed, the rows that made it inconclusive."""
        decisive = [check for check in self.checks if check.group != "claim"]
        fails = [check for check in decisive if check.result == "fail"]
        return fails or [check for check in decisive if check.result == "inconclusive" and check.required]


class Judge:
    """Folds a stream of events into a verdict.

    Args:
        preregistered: thresholds fixed before the run; the judge knows nothing else beside the events.
        invariants: check classes; all by default.

    Raises:
        BadInput: an acceptance entry is unknown or wrong, or ``required`` names no invariant.
    """

    def __init__(
        self, preregistered: Preregistered | None = None, invariants: Sequence[type[Check]] = INVARIANTS
    ) -> None:
        self.preregistered = Preregistered() if preregistered is None else preregistered
        known = {check.name for check in INVARIANTS}
        if unknown := [name for name in self.preregistered.required if name not in known]:
            raise BadInput(f"preregistered.required names {unknown[0]!r}; known are {', '.join(sorted(known))}")
        self._ledger = Ledger(self.preregistered)
        self._checks = [check(self._ledger) for check in invariants]
        self._acceptance = criteria(self._ledger, self.preregistered.acceptance)
        named = [one for one in self._acceptance if isinstance(one, str)]
        self._checks += [one(self._ledger) for one in INVARIANTS if one.name in named and one not in invariants]
        self._checks += [one for one in self._acceptance if isinstance(one, Check)]
        self._raised: dict[object, str] = {}
        # Filled when a kind is first seen, so that its keys are the kinds that occurred.
        self._dispatch: dict[str, Handlers] = {}
        # Calls by method: who of those in the table above is about such calls.
        self._sends: dict[str, Handlers] = {}
        self._ends: dict[str, Handlers] = {}
        self._handlers: dict[str, list[tuple[int, Handler]]] = {}  # kind -> (number of a source, its handler)
        sources = [self._ledger.before(), *(check.handlers() for check in self._checks), self._ledger.after()]
        for number, source in enumerate(sources):
            for kind, handler in source.items():
                self._handlers.setdefault(kind, []).append((number, handler))
        # Sources that see none of the frequent kinds yet: when they do.
        self._later = {number: check.joins_at for number, check in enumerate(self._checks, 1) if check.joins_at}

    def feed(self, event: Event) -> None:
        """Judge one event. Never raises: a check that does becomes inconclusive."""
        self.feed_all((event,))

    def feed_all(self, events: Iterable[Event]) -> None:
        """Judge events, as :meth:`feed` would one by one."""
        ledger = self._ledger
        open_calls = ledger.open_calls
        dispatch, sends, ends = self._dispatch, self._sends, self._ends
        for event in events:
            ledger.events += 1
            ledger.last = event
            if ledger.causal is not None:
                ledger.causal.see(event)
            kind = event.kind
            handler = None
            found: Handlers | None = None
            try:
                if kind == _SENT:
                    data = event.data
                    open_calls[data["call"]] = event
                    found = sends.get(data["method"])
                    if found is None:
                        found = self._about(data["method"], kind, sends)
                elif kind == _DONE and (sent := open_calls.pop(event.data["call"], None)) is not None:
                    ledger.ended_calls += 1
                    found = ends.get(sent.data["method"])
                    if found is None:
                        found = self._about(sent.data["method"], kind, ends)
                else:
                    found = dispatch.get(kind)
                    if found is None:
                        found = self._first_of(kind)
                for handler in found:
                    handler(event)
            except Exception as error:
                self._drop(handler, event, error, found or ())

    record = feed  # a Judge is a Recorder

    def _first_of(self, kind: str) -> tuple[Callable[[Event], None], ...]:
        joining = [number for number, joins_at in self._later.items() if kind in joins_at]
        for number in joining:
            del self._later[number]
        if joining:
            self._sends.clear()
            self._ends.clear()
            for seen in self._dispatch.keys() & FREQUENT:
                self._dispatch[seen] = self._handlers_of(seen)
        found = self._dispatch[kind] = self._handlers_of(kind)
        return found

    def _handlers_of(self, kind: str) -> tuple[Callable[[Event], None], ...]:
        return tuple(
            handler
            for number, handler in self._handlers.get(kind, ())
            if not (kind in FREQUENT and number in self._later)
            and getattr(handler, "__self__", None) not in self._raised
        )

    def _about(self, method: str, kind: str, table: dict[str, Handlers]) -> Handlers:
        """The handlers of a kind of event that must see it of calls of this method."""
        seen = self._dispatch.get(kind)
        handlers = self._first_of(kind) if seen is None else seen
        owners = [getattr(handler, "__self__", None) for handler in handlers]
        found = table[method] = tuple(
            handler
            for handler, owner in zip(handlers, owners, strict=True)
            if not isinstance(owner, Check) or owner.wants_call(method)
        )
        return found

    def _drop(
        self,
        handler: Callable[[Event], None] | None,
        event: Event,
        error: Exception,
        handlers: tuple[Callable[[Event], None], ...],
    ) -> None:
        """Take the check that raised out of the dispatch and let the others see the event."""
        owner = getattr(handler, "__self__", None)
        self._raised[owner] = f"raised {type(error).__name__}: {error} at event {event.seq} ({event.kind})"
        self._sends.clear()
        self._ends.clear()
        for kind, current in self._dispatch.items():
            self._dispatch[kind] = tuple(one for one in current if getattr(one, "__self__", None) is not owner)
        rest = handlers[handlers.index(handler) + 1 :] if handler is not None else ()
        for later in rest:
            if getattr(later, "__self__", None) is owner:
                continue
            try:
                later(event)
            except Exception as another:
                self._drop(later, event, another, (later,))

    def verdict(self, note: str = "") -> Verdict:
        """The verdict on what was fed. Call it once, after the last event."""
        finished = {check: self._finish(check) for check in self._checks}
        by_name = {check.name: row for check, row in finished.items()}
        rows = [row for row in finished.values() if row.group != "acceptance"]
        rows += [finished[one] if isinstance(one, Check) else _as_asked(by_name[one]) for one in self._acceptance]
        decisive = [row for row in rows if row.group != "claim"]
        result: Result = "pass"
        if any(row.result == "fail" for row in decisive):
            result = "fail"
        elif any(row.result == "inconclusive" and row.required for row in decisive):
            result = "inconclusive"
        return Verdict(result, tuple(rows), self._ledger.events, note)

    def _finish(self, check: Check) -> CheckResult:
        applicable = not check.needs or any(kind in self._dispatch for kind in check.needs)
        asked_for = check.group == "acceptance"
        required = asked_for or check.name in self.preregistered.required
        applicable = applicable or asked_for
        raised = self._raised.get(check) or self._raised.get(self._ledger)
        if raised is None:
            try:
                return check.finish(required=required, applicable=applicable)
            except Exception as error:
                raised = f"raised {type(error).__name__}: {error} at the end"
        # Not check.row(): a check that raised may not be asked anything more.
        return CheckResult(
            check.name,
            check.group,
            "inconclusive",
            observed="no result",
            expected=check.expected,
            judged=check.judged,
            witness=(),
            explain=raised,
            required=check.group != "claim",
            applicable=True,
        )


def _as_asked(row: CheckResult) -> CheckResult:
    """The row of an invariant that the scenario asks for: it must have judged something."""
    explain = row.explain if row.applicable else "nothing was judged"
    return row._replace(group="acceptance", required=True, applicable=True, explain=explain)


def judge(events: Iterable[Event], preregistered: Preregistered | None = None) -> Verdict:
    """The verdict on a finished stream of events."""
    arbiter = Judge(preregistered)
    arbiter.feed_all(events)
    return arbiter.verdict()


def judge_run(directory: RunDir) -> Verdict:
    """The verdict on a run directory, from its run.json and events.jsonl alone.

    Raises:
        BadInput: one of the two cannot be used.
    """
    try:
        arbiter = Judge(directory.info().preregistered)
    except BadInput as error:
        where = str(directory.run)
        raise error if str(error).startswith(where) else BadInput(f"{where}: key 'preregistered': {error}") from error
    reader = directory.read_events()
    arbiter.feed_all(reader)
    return arbiter.verdict(reader.cut)


def differences(ours: Verdict, stored: Any) -> list[str]:
    """Where a stored verdict.json differs from the verdict just reached: one line a row, empty when equal."""
    mine = ours.as_json()
    if stored == mine:
        return []
    if not isinstance(stored, dict) or not isinstance(stored.get("checks"), list):
        return ["the stored verdict is none"]
    lines = [
        f"{key}: stored {stored.get(key)!r}, now {mine[key]!r}"
        for key in ("analysis_version", "result", "events", "note")
        if stored.get(key) != mine[key]
    ]
    old = {f"{row.get('group')} {row.get('name')}": row for row in stored["checks"] if isinstance(row, dict)}
    new = {f"{row['group']} {row['name']}": row for row in mine["checks"]}
    for name in sorted(set(old) | set(new)):
        if old.get(name) != new.get(name):
            was = old.get(name, {}).get("result", "absent")
            now = new.get(name, {}).get("result", "absent")
            lines.append(f"{name}: stored {was}, now {now}" + (" (details differ)" if was == now else ""))
    return lines or ["the stored verdict has other keys"]
