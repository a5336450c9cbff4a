"""Actors that are killed and that nobody brings back: what fails for want of them is explained, and nothing else is."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from analysis.verdict import Judge, Verdict
from protocol.evidence import Event
from scenarios.load import parse
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage
from tests.mutants.autoscaler_scenarios import AUTOSCALER_SCENARIOS

_SERVICE = """
summary: An actor is killed, and nobody brings it back.
seed: 1
topology:
  nodes: 1
  gpus_per_node: 2
  services:
"""
SERVER = f"""\
name: killed_server{_SERVICE}\
    policy:
      initial_replicas: 2
      engine: tiny-cpu
      weights: {{shards: 1, shard_gb: 0.05}}
      publishing: {{gates: false, session_server: {{forward_timeout_s: 60}}}}
workload:
  service: policy
  arrivals: {{agents: {{sessions: 18, at_once: 6, turns: 6, think_s: 0.6, http: {{anthropic: 0, other_calls: 0.3}}}}}}
  prompt_tokens: {{uniform: {{low: 4, high: 8}}}}
  output_tokens: {{uniform: {{low: 8, high: 16}}}}
  idempotent: false
steps:
  - when: {{event: engine.accepted, where: {{actor: policy-0}}, from_s: 1}}
    do: sigkill
    target: entrypoint-policy-0
limits: {{time_limit_s: 300, converge_within_s: 40, shadow_s: 0.5}}
"""
JUDGE = f"""\
name: killed_judge{_SERVICE}\
    genrm:
      initial_replicas: 1
      engine: qwen3-0.6b-rtx4090
      judge: {{model_path: Qwen/Qwen3-0.6B}}
workload:
  service: genrm
  arrivals: {{judgements: {{cases: 12, repeats: 4, temperature: 0.1}}}}
  prompt_tokens: {{uniform: {{low: 200, high: 400}}}}
  output_tokens: {{fixed: 64}}
steps:
  - {{at_s: 0.4, do: sigkill, target: judge-genrm}}
limits: {{time_limit_s: 300, converge_within_s: 40, shadow_s: 0.1}}
"""


def run(text: str) -> tuple[Verdict, list[Event]]:
    scenario = parse(text, "killed.yaml", pathlib.Path())
    judge, events = Judge(preregistered(scenario)), []
    with SimStage(scenario, scenario.model.seed, sinks=[judge.feed, events.append]) as stage:
        stage.run()
    return judge.verdict(), events


def of(events: list[Event], kind: str, **fields: Any) -> list[Event]:
    return [e for e in events if e.kind == kind and all(e.data[name] == value for name, value in fields.items())]


@pytest.mark.parametrize(("text", "after_s"), [(SERVER, 2), (JUDGE, 0)], ids=["session server", "judge"])
def test_what_fails_for_want_of_it_is_explained_to_the_end(text: str, after_s: int) -> None:
    verdict, events = run(text)
    (killed,) = of(events, "fault.injected", name="sigkill")
    assert any(e.t_ns > killed.t_ns + after_s * 10**9 for e in of(events, "request.done", error="ActorDied"))
    assert {row.name: row.explain for row in verdict.checks if row.result == "fail"} == {}
    row = next(row for row in verdict.checks if row.name == "unexplained_failures")
    assert f"sigkill on {killed.data['target']}" in row.observed


def test_what_a_killed_autoscaler_had_asked_for_is_asked_after() -> None:
    kill = "{when: {event: scale.state, where: {state: CREATING}}, do: sigkill, target: autoscaler-chat}"
    head, _, rest = AUTOSCALER_SCENARIOS["auto_cycle"].partition("steps:")
    verdict, events = run(f"{head}steps:\n- {kill}\nacceptance: []\n" + rest[rest.index("limits:") :])
    (asked,) = of(events, "scale.asked", route="scale_out")
    assert asked.actor == "front-chat"
    (after,) = of(events, "scale.asked", route="status")
    assert after.actor == "driver"
    (answer,) = of(events, "scale.answered", ask=after.data["ask"])
    assert (answer.data["state"], answer.data["cleanup"]) == ("ACTIVE", "false")
    row = next(row for row in verdict.checks if row.name == "operations_end")
    assert (row.result, row.judged) == ("pass", 1)
