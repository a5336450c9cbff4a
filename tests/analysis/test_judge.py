"""The judge: three values, errors of checks, live equals offline."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from analysis.acceptance import CRITERIA
from analysis.checks import INVARIANTS, Check
from analysis.checks.base import Handler
from analysis.errors import BadInput
from analysis.rundir import Preregistered
from analysis.verdict import Judge, judge
from analysis.writer import JsonlWriter
from protocol.evidence import Event
from tests.analysis.history import History


def good() -> History:
    h = History()
    h.ready()
    h.served("r1")
    return h.end()


def test_a_good_run_passes() -> None:
    verdict = good().verdict()
    assert verdict.result == "pass" and verdict.exit_code == 0
    assert {row.result for row in verdict.checks if row.applicable} == {"pass"}


def test_absent_subjects_are_listed_and_never_pass() -> None:
    rows = {row.name: row for row in good().verdict().checks}
    row = rows["loaded_export_is_whole"]
    assert (row.applicable, row.result, row.required) == (False, "inconclusive", False)
    assert "not applicable: no storage.read" in row.explain


def test_no_events_at_all_are_inconclusive() -> None:
    verdict = judge([])
    assert verdict.result == "inconclusive" and verdict.exit_code == 3
    assert not any(row.result == "pass" for row in verdict.checks)


def test_a_required_check_that_judged_nothing_makes_the_run_inconclusive() -> None:
    verdict = good().verdict(required=("admin_once",))
    assert verdict.result == "inconclusive"
    assert [row.name for row in verdict.failed()] == ["admin_once"]


def test_what_finds_nothing_to_judge_decides_nothing_unless_it_is_required() -> None:
    h = good()
    end = h.events.pop()
    h("actor.spawned", at="e0/1", role="engine")
    h.end(reason=end.data["reason"])
    row = h.judged("no_crash")
    assert (row.applicable, row.result, row.required) == (True, "inconclusive", False)
    assert h.verdict().result == "pass"
    assert h.verdict(required=("no_crash",)).result == "inconclusive"


def test_fail_outranks_inconclusive() -> None:
    h = History()
    h.sent("r1")
    verdict = h.end().verdict(required=("admin_once",))
    assert verdict.result == "fail" and verdict.exit_code == 1


class Raises(Check):
    name = "raises"
    expected = "never"

    def handlers(self) -> dict[str, Handler]:
        return {"request.sent": self._on_sent}

    def _on_sent(self, event: Event) -> None:
        raise ZeroDivisionError("oh")


class RaisesAtTheEnd(Check):
    name = "raises_at_the_end"
    expected = "never"

    def handlers(self) -> dict[str, Handler]:
        return {}

    def conclude(self) -> None:
        raise KeyError("gone")


def test_a_check_that_raises_is_inconclusive_and_the_others_go_on() -> None:
    arbiter = Judge(invariants=(Raises, RaisesAtTheEnd, *INVARIANTS))
    for event in good().events:
        arbiter.feed(event)
    verdict = arbiter.verdict()
    rows = {row.name: row for row in verdict.checks}
    assert rows["raises"].result == "inconclusive"
    assert rows["raises"].explain == "raised ZeroDivisionError: oh at event 2 (request.sent)"
    assert rows["raises_at_the_end"].result == "inconclusive"
    assert rows["nothing_lost"].result == "pass"
    assert verdict.result == "inconclusive"


def test_events_judged_together_are_judged_as_one_by_one() -> None:
    events = good().events
    together, apart = (Judge(invariants=(Raises, *INVARIANTS)) for _ in range(2))
    together.feed_all(events[:3])
    together.feed_all(iter(events[3:]))
    for event in events:
        apart.feed(event)
    assert together.verdict() == apart.verdict()
    assert together.verdict().events == len(events)


def test_unknown_names_are_refused() -> None:
    known = ", ".join(sorted(check.name for check in INVARIANTS))
    with pytest.raises(BadInput, match=f"names 'nothing_loost'; known are {known}$"):
        Judge(Preregistered(required=("nothing_loost",)))
    known = ", ".join(sorted(CRITERIA))
    with pytest.raises(BadInput, match=f"criterion 'fast' is unknown; known are {known}$"):
        Judge(Preregistered(acceptance=({"fast": {}},)))


def test_component_claims_decide_nothing() -> None:
    h = good()
    end = h.events.pop()
    h("gateway.picked", at="gw/1", request="r1", replica="e0", replica_inc=1, in_flight=7)
    h.end(reason=end.data["reason"])
    verdict = h.verdict()
    assert {row.name: row.result for row in verdict.checks}["gateway_counts"] == "fail"
    assert verdict.result == "pass"


def test_the_writer_is_a_recorder(tmp_path: pathlib.Path) -> None:
    events = good().events
    with JsonlWriter(tmp_path / "e.jsonl", chunk=2) as writer:
        for event in events:
            writer.record(event)
    assert len((tmp_path / "e.jsonl").read_bytes().splitlines()) == len(events)


class _Joins(Check):
    """Counts what it sees of a frequent kind from the first mark on."""

    name = "joins"
    expected = "all calls after the mark"
    joins_at = ("run.workload",)

    def handlers(self) -> dict[str, Any]:
        return {"call.sent": self._on, "run.healed": self._on}

    def _on(self, event: Event) -> None:
        self.judged += 1


def test_a_check_sees_frequent_kinds_only_from_the_kind_on_that_it_joins_at() -> None:
    judge = Judge(invariants=(_Joins,))
    check = judge._checks[0]

    def feed(kind: str, **data: Any) -> int:
        judge.feed(Event(check.ledger.events, 0, kind, "a", 0, 0, 0, None, data))
        return check.judged

    call = {"call": 1, "target": "b", "target_inc": 0, "method": "m"}
    assert feed("call.sent", **call) == 0
    assert feed("run.healed", faults=0) == 1  # not a frequent kind
    assert feed("run.workload") == 1
    assert feed("call.sent", **call) == 2
