"""Determinism and continuity: the scenarios pass, and fail as published where what they are about is gone."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.errors import BadInput
from analysis.verdict import Judge, Verdict
from protocol.evidence import Event
from scenarios.load import load
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage

_FLASHINFER = "topology.services.genrm.engine_options.attention_backend=flashinfer"


def _run(name: str, *changes: str, keep: tuple[str, ...] = ()) -> tuple[Verdict, list[Event]]:
    scenario = load(name, changes)
    judge, kept = Judge(preregistered(scenario)), []

    def sink(event: Event) -> None:
        judge.feed(event)
        if event.kind in keep:
            kept.append(event)

    with SimStage(scenario, scenario.model.seed, sinks=[sink]) as stage:
        stage.run()
    return judge.verdict(), kept


def _rows(verdict: Verdict, name: str) -> list[Any]:
    return [row for row in verdict.checks if row.name.startswith(name)]


def test_the_wedge_fails_as_published() -> None:
    verdict, events = _run(
        "deterministic_wedge", _FLASHINFER, keep=("autoscaler.evaluated", "run.workload", "request.done")
    )
    assert verdict.result == "fail"
    start = next(event.t_s for event in events if event.kind == "run.workload")
    decisions = [event for event in events if event.kind == "autoscaler.evaluated" and event.data["action"] != "none"]
    # One decision, late and by the queue: 50.3 s after the onset of HIGH, which is at 20 s. No scale-in ever comes.
    (decision,) = decisions
    assert decision.data["action"] == "scale_out" and decision.data["triggered"] == ["queue_backlog"]
    assert decision.t_s - start - 20 == pytest.approx(50.3, abs=5)
    frame = decision.data["frame"]
    assert (frame["total_queue_reqs"], frame["total_running_reqs"], frame["avg_token_usage"]) == (48, 0, 0)
    # What was served is frozen: nothing is answered after the onset but what was short; the new judge serves nothing.
    done = [event for event in events if event.kind == "request.done" and event.data["outcome"] == "done"]
    assert max(event.t_s for event in done) - start < 25
    assert {event.data["replica"] for event in done} == {"genrm-0"}
    failed = {row.name.split("(")[0] for row in verdict.checks if row.result == "fail"}
    assert {"decided", "occurs", "answered_fraction", "capacity_returned"} <= failed
    assert [row.observed for row in _rows(verdict, "answered_fraction")][0].split()[0] != "0"


def test_with_the_prefix_cache_it_passes_and_decides_in_time() -> None:
    verdict, events = _run("deterministic_wedge", keep=("engine.options",))
    assert verdict.result == "pass", verdict.failed()
    assert {(e.data["attention_backend"], e.data["keeps_prefixes"]) for e in events} == {("fa3", True)}


def test_the_other_ways_out_of_the_wedge() -> None:
    instance = "topology.services.genrm.engine_options.instance_attention_backend=fa3"
    verdict, events = _run("deterministic_wedge", _FLASHINFER, instance, keep=("engine.options",))
    assert verdict.result == "pass" and events[0].data["attention_backend"] == "fa3"


@pytest.mark.parametrize("name", ["reward_consistency", "sampling_divergence"])
def test_judges_agree_with_all_three_measures_and_flip_without_the_switch(name: str) -> None:
    verdict, _ = _run(name)
    assert verdict.result == "pass", verdict.failed()
    off = "topology.services.genrm.engine_options.deterministic=false"
    hot = "workload.arrivals.judgements.temperature=1.0"
    changes = [off] if name == "sampling_divergence" else [off, hot]
    without, _ = _run(name, *changes)
    rows = _rows(without, "judgements_agree(arm=sampled")
    assert without.result == "fail" and rows[-1].result == "fail" and rows[-1].witness


def test_training_goes_on_as_published() -> None:
    verdict, events = _run(
        "train_continuity", keep=("train.step", "train.rollout", "train.finished", "scale.asked", "scale.answered")
    )
    assert verdict.result == "pass", verdict.failed()
    asked = {e.data["route"]: e.t_s for e in reversed(events) if e.kind == "scale.asked" and e.data["target"]}
    ends = {}
    for event in events:
        if event.kind == "scale.answered" and event.data["state"] in ("ACTIVE", "COMPLETED"):
            ends.setdefault(event.data["state"], event.t_s)
    out, between, into = (
        ends["ACTIVE"] - asked["scale_out"],
        asked["scale_in"] - ends["ACTIVE"],
        ends["COMPLETED"] - asked["scale_in"],
    )
    # train_continuity_20260925_r5, within 10 %.
    assert out == pytest.approx(58.8, rel=0.1) and between == pytest.approx(45.2, rel=0.1)
    assert into == pytest.approx(1.03, rel=0.1)
    assert sum(e.data["judged"] for e in events if e.kind == "train.rollout") == 24
    steps = [e.t_s for e in events if e.kind == "train.step" and e.data["what"] == "ended"]
    assert len(steps) == 8 and steps[-1] - asked["scale_out"] == pytest.approx(255.4, rel=0.1)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("smoke", "workload.arrivals={judgements: {}}", "no ingress for judgements"),
        ("smoke", "workload.phases=[{from_s: 1, prompt_tokens: {fixed: 1}, output_tokens: {fixed: 1}}]", "closed loop"),
        (
            "gate_poison",
            "workload.0.phases=[{from_s: 1, prompt_tokens: {fixed: 1}, output_tokens: {fixed: 1}}]",
            "loop",
        ),
        ("train_continuity", "workload.arrivals.training.rollout_service=nobody", "unknown service 'nobody'"),
        ("reward_consistency", "topology.services.genrm.engine_options.gpu=voodoo", "gpu"),
        ("manual_1_2_1", "steps.0={at_s: 1, do: sync_weights, with: {version: '2'}}", "kind rollout"),
        ("manual_1_2_1", "steps.0={at_s: 1, do: look}", "no autoscaler"),
    ],
)
def test_what_cannot_be_is_said_by_key(name: str, change: str, said: str) -> None:
    changes = [change]
    if name == "smoke" and "judgements" in change:
        changes += ["workload.for_s=null"]
    with pytest.raises(BadInput, match=said):
        load(name, changes)
