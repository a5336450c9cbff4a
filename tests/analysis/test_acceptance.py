"""Acceptance criteria: thresholds met, missed and undecided; wrong entries refused."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.acceptance import CRITERIA, acceptance_schema, parse_criterion
from analysis.checks.criteria import latency_bin, latency_bin_top
from analysis.errors import BadInput
from tests.analysis.history import History


def asked(h: History, name: str, **parameters: Any) -> tuple[str, str]:
    row = h.judged(name, acceptance=({name: parameters},))
    assert row.group == "acceptance" and row.required
    return row.result, row.observed


def test_answered_fraction() -> None:
    h = History()
    h.served("r1")
    h.sent("r2")
    h.done("r2", outcome="not_done", status=503)
    h.end()
    assert asked(h, "answered_fraction", at_least=0.5) == ("pass", "1 of 2 (50.0000%)")
    assert asked(h, "answered_fraction", at_least=0.51)[0] == "fail"
    assert asked(History().end(), "answered_fraction", at_least=0)[0] == "inconclusive"
    cut = History()
    cut.sent("r1")
    assert asked(cut, "answered_fraction", at_least=1)[0] == "inconclusive"


def test_latency_p99() -> None:
    h = History()
    for i in range(100):
        h.sent(f"r{i}", ms=1000 * i)
        h.done(f"r{i}", ms=1000 * i + (900 if i == 7 else 10))
    h.end()
    assert asked(h, "latency_p99", at_most_s=0.011)[0] == "pass"
    h.sent("late", ms=200_000)
    slow = h.done("late", ms=201_000)
    row = h.judged("latency_p99", acceptance=({"latency_p99": {"at_most_s": 0.011}},))
    assert row.result == "fail" and slow.seq in row.witness
    assert asked(History().end(), "latency_p99", at_most_s=1)[0] == "inconclusive"


def test_latency_bins_are_narrow_and_ordered() -> None:
    for ns in [0, 1, 63, 64, 127, 128, 1000, 10**6 + 1, 10**9, 7 * 10**12]:
        top = latency_bin_top(latency_bin(ns))
        assert ns <= top <= ns * 65 // 64 + 1
        assert latency_bin(top) == latency_bin(ns) < latency_bin(top + 1)


def test_reached() -> None:
    h = History()
    h("engine.ready", at="e0/1", version="3", ms=50)  # in the start of the replicas
    h("run.workload", at="world/0", ms=100)
    h("node.lost", node="n1", ms=1100)
    h("engine.ready", at="e0/2", version="3", ms=4100)
    h.end()
    where = {"actor": "e0", "inc": 2, "version": "3"}
    assert asked(h, "reached", event="engine.ready", where=where, within_s=4)[0] == "pass"
    assert asked(h, "reached", event="engine.ready", within_s=3.9)[0] == "fail"
    assert asked(h, "reached", event="engine.ready", within_s=3, after="node.lost") == ("pass", "after 3.000 s")
    assert asked(h, "reached", event="engine.ready", within_s=0.05, after="run.started") == ("pass", "after 0.050 s")
    assert asked(h, "reached", event="engine.ready", within_s=9, nth=2)[0] == "fail"
    assert asked(h, "reached", event="engine.ready", where={"inc": 3}, within_s=9)[0] == "fail"
    cut = History()
    cut("run.workload", at="world/0")
    assert asked(cut, "reached", event="engine.ready", within_s=9)[0] == "inconclusive"
    assert asked(History().end(), "reached", event="engine.ready", after="node.lost", within_s=9)[0] == "inconclusive"


def test_occurs() -> None:
    h = History()
    h("storage.torn", path="a")
    h("storage.torn", path="b")
    assert asked(h, "occurs", event="storage.torn", at_least=1)[0] == "inconclusive"
    h.end()
    assert asked(h, "occurs", event="storage.torn", at_least=2) == ("pass", "2 times")
    assert asked(h, "occurs", event="storage.torn", at_least=3)[0] == "fail"
    assert asked(h, "occurs", event="storage.torn", at_most=1)[0] == "fail"
    assert asked(h, "occurs", event="storage.torn", where={"path": "a"}, at_most=1)[0] == "pass"


def test_events_per_request() -> None:
    h = History()
    h.served("r1")
    h.end()
    assert asked(h, "events_per_request", at_most=6) == ("pass", "6.00")
    assert asked(h, "events_per_request", at_most=5.9)[0] == "fail"
    assert asked(History().end(), "events_per_request", at_most=9)[0] == "inconclusive"


def test_an_invariant_asked_for_must_have_judged() -> None:
    h = History().end()
    assert asked(h, "nothing_lost")[0] == "inconclusive"
    assert h.verdict(acceptance=({"loaded_export_is_whole": {}},)).result == "inconclusive"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nothing_lost", "must be one 'criterion: {parameters}'"),
        ({"a": {}, "b": {}}, "must be one"),
        ({"fast": {}}, "'fast' is unknown; known are"),
        ({"answered_fractions": {}}, "'answered_fractions' is unknown; did you mean 'answered_fraction'? known are"),
        ({"answered_fraction": {}}, "'answered_fraction', key 'at_least': is missing; add it"),
        ({"answered_fraction": 0.9}, "its parameters are a mapping of keys, not 0.9; known: at_least"),
        ({"nothing_lost": [1]}, "its parameters are a mapping of keys, not [1]; known: none"),
        ({"answered_fraction": {"at_least": 2}}, "key 'at_least': must be less than or equal to 1 (given: 2)"),
        (
            {"answered_fraction": {"at_least": "x"}},
            "key 'at_least': must be a valid number, unable to parse string as a number (given: 'x')",
        ),
        (
            {"answered_fraction": {"at_least": 1, "at_lest": 1}},
            "unknown key 'at_lest'; did you mean 'at_least'? known: at_least",
        ),
        (
            {"reached": {"event": "engine.redy", "within_s": 1}},
            "event kind 'engine.redy' is unknown; did you mean 'engine.ready'?",
        ),
        (
            {"reached": {"event": "engine.ready", "state": "ACTIVE", "within_s": 1}},
            "has no field 'state'; it has version",
        ),
        ({"occurs": {"event": "engine.ready", "where": {"verion": "1"}}}, "has no field 'verion'"),
        (
            {"occurs": {"event": "engine.ready", "at_least": 3, "at_most": 2}},
            "'occurs': at_least 3 is more than at_most 2, so that nothing can meet both; lower at_least or raise",
        ),
    ],
)
def test_wrong_entries_are_refused(entry: Any, said: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_criterion(entry)
    assert said in str(error.value)


def test_the_schema_lists_every_criterion() -> None:
    listed = [next(iter(one["properties"])) for one in acceptance_schema()["oneOf"]]
    assert listed == sorted(CRITERIA)
    assert all(one["description"] for one in acceptance_schema()["oneOf"])
