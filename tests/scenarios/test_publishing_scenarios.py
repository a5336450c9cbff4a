"""What the scenarios of publications must show, and when they must fail."""

from __future__ import annotations

import pytest

from analysis.verdict import Judge, Verdict
from protocol.evidence import Event
from scenarios.load import load
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage

_POLICY = "topology.services.policy"


def judged(name: str, *changes: str) -> Verdict:
    scenario = load(name, changes)
    judge = Judge(preregistered(scenario))
    with SimStage(scenario, scenario.model.seed, sinks=[judge.feed]) as stage:
        stage.run()
    return judge.verdict()


@pytest.mark.parametrize(
    "name", ["publish_by_ranks", "proxy_admin_timeouts", "prefix_cache_across_versions", "publish_live_agents"]
)
def test_it_passes_with_its_own_seed(name: str) -> None:
    verdict = judged(name)
    assert verdict.result == "pass", verdict.failed()


@pytest.mark.parametrize("name", ["gate_poison", "session_server_edges", "trace_ownership"])
def test_agents_begin_when_their_workload_does(name: str) -> None:
    scenario = load(name, ["workload.0.from_s=7", "steps=[]", "acceptance=[]"])
    service = scenario.model.workload[0].service
    events: list[Event] = []
    with SimStage(scenario, 1, sinks=[events.append]) as stage:
        stage.run()
    began = next(event.t_s for event in events if event.kind == "run.workload")
    first = next(event.t_s for event in events if event.kind == "turn.sent" and event.data["service"] == service)
    assert 7 <= first - began < 8


@pytest.mark.parametrize("service", ["group", "disk"])
def test_without_the_flush_old_prefixes_are_read(service: str) -> None:
    verdict = judged("prefix_cache_across_versions", f"topology.services.{service}.publishing.update.flush=false")
    assert [row.name for row in verdict.failed()] == ["no_stale_prefix"]


@pytest.mark.parametrize("transport", ["ipc", "nccl", "checkpoint_engine"])
def test_live_agents_do_not_notice_the_transport(transport: str) -> None:
    update = f"{_POLICY}.publishing.update"
    verdict = judged("publish_live_agents", f"{update}.transport={transport}", f"{update}.bucket_gb=0.02")
    assert verdict.result == "pass", verdict.failed()
    rows = {row.name: row for row in verdict.checks}
    for name in ("serves_the_trainers_weights", "every_rank_leaves", "nothing_runs_on_part_weights"):
        assert rows[name].judged, name
    assert bool(rows["memory_order"].judged) == (transport != "nccl")


def test_the_number_of_entrypoints_does_not_matter() -> None:
    verdict = judged("publish_many_entrypoints", "topology.nodes=2", f"{_POLICY}.initial_replicas=16")
    assert verdict.result == "pass", verdict.failed()


@pytest.mark.slow
def test_a_thousand_entrypoints_are_published_to() -> None:
    verdict = judged("publish_many_entrypoints", "topology.nodes=128", f"{_POLICY}.initial_replicas=1024")
    assert verdict.result == "pass", verdict.failed()
