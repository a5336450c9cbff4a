"""What the published runs of scaling asked for is asked of their scenarios too, and each line of it can fail."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.verdict import Judge, Verdict
from protocol.evidence import Event
from scenarios.load import load
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage

_NOTHING = "{at_s: 1, do: note, with: {text: nothing}}"

_FEW_AT_LAST = (
    "workload=["
    + ", ".join(
        "{service: genrm, arrivals: {closed_loop: {sessions: 8, think_s: 0.1}}, prompt_tokens: {fixed: 64}, "
        f"output_tokens: {{fixed: {tokens}}}, from_s: {start}, for_s: {lasts}}}"
        for start, lasts, tokens in ((0, 60, 8), (60, 13.7, 8000))
    )
    + "]"
)


def judged(name: str, *changes: str) -> Verdict:
    scenario = load(name, changes)
    judge = Judge(preregistered(scenario))
    with SimStage(scenario, scenario.model.seed, sinks=[judge.feed]) as stage:
        stage.run()
    return judge.verdict()


@pytest.mark.parametrize(
    ("name", "change", "lines"),
    [
        # The replica stays: capacity is not back.
        ("manual_1_2_1", f"steps.3={_NOTHING}", ["capacity_returned"]),
        # Nobody calls while the replica comes, or while it goes, so nobody knows whether it was noticed.
        ("manual_1_2_1", "workload.for_s=2", ["replica: genrm-0", "nth=100, within_s=40"]),
        ("manual_1_2_1", _FEW_AT_LAST, ["nth=5, within_s=1"]),
        # S3's scale-in does not come: two replicas are left.
        ("failure_injection_genrm", f"steps.7={_NOTHING}", ["capacity_returned", "current: 2"]),
        # S1's does not come: no later phase begins with one replica.
        ("failure_injection_genrm", f"steps.1={_NOTHING}", ["current: 1"]),
        # The monitor was looked at once.
        ("autoscaler_cycle", f"steps.1={_NOTHING}", ["autoscaler.shown"]),
    ],
)
def test_a_line_of_the_published_acceptance_can_fail(name: str, change: str, lines: list[str]) -> None:
    failed = [row.name for row in judged(name, change).failed() if row.required]
    for line in lines:
        assert any(line in one for one in failed), (line, failed)


def test_what_the_monitor_shows_is_held_against_what_was_done() -> None:
    rows = {row.name: row for row in judged("autoscaler_cycle").checks}
    assert rows["autoscaler_shows_its_own"].judged == 2 and rows["autoscaler_shows_its_own"].result == "pass"


def test_a_time_limit_in_the_middle_of_an_operation_leaves_it_undecided() -> None:
    """The initial replica takes 44 s to start, and so does the new one, asked for 5 s later."""
    rows = {row.name: row for row in judged("manual_1_2_1", "limits.time_limit_s=70").checks}
    assert rows["run_finished"].result == "fail" and "time_limit" in rows["run_finished"].explain
    assert rows["operations_end"].result == "inconclusive"
    assert "before the run's own end" in rows["operations_end"].explain


@pytest.mark.parametrize(
    ("api", "said"),
    [
        ("{timeout_s: 600, completion_wait_s: 10}", None),
        ("{timeout_s: 100}", {"service": "genrm", "budget_s": 100.0, "wait_s": 60.0}),
        ("{completion_wait_s: 90}", {"service": "genrm", "budget_s": 600.0, "wait_s": 90.0}),
    ],
)
def test_how_long_an_operation_may_take_is_on_record_where_it_is_not_as_usual(api: str, said: Any) -> None:
    events: list[Event] = []
    scenario = load("manual_1_2_1", [f"topology.services.genrm.scaling.api={api}", "limits.time_limit_s=55"])
    with SimStage(scenario, scenario.model.seed, sinks=[events.append]) as stage:
        stage.run()
    assert [dict(event.data) for event in events if event.kind == "scale.budget"] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ("{api: {idempotency_window_s: 60}}", {"scale.window": {"service": "chat", "window_s": 60.0}}),
        (
            "{kind: rollout, rollout: {idempotency_window_s: 60, max_history: 3}}",
            {
                "scale.bounds": {"service": "chat", "max_history": 3, "max_keys": 4096},
                "scale.window": {"service": "chat", "window_s": 60.0},
            },
        ),
        ("{kind: rollout, rollout: {drain_sleep_s: 1}}", {}),
    ],
)
def test_what_an_api_of_either_kind_keeps_is_on_record_where_it_is_not_as_usual(scaling: str, said: Any) -> None:
    events: list[Event] = []
    scenario = load("smoke", [f"topology.services.chat.scaling={scaling}"])
    with SimStage(scenario, scenario.model.seed, sinks=[events.append]) as stage:
        stage.run()
    kinds = ("scale.bounds", "scale.window", "scale.budget")
    assert {event.kind: dict(event.data) for event in events if event.kind in kinds} == said
