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

GATEWAY = f"""\
name: killed_gateway{_SERVICE}\
    chat: {{initial_replicas: 2, engine: tiny-cpu, gateways: 2}}
workload:
  service: chat
  arrivals: {{constant: {{rate_per_s: 20}}}}
  prompt_tokens: {{fixed: 40}}
  output_tokens: {{uniform: {{low: 10, high: 60}}}}
  for_s: 3
  clients: 2
steps:
  - when: {{event: gateway.picked, where: {{actor: gateway-chat-0}}, from_s: 1}}
    do: sigkill
    target: gateway-chat-0
limits: {{time_limit_s: 300, converge_within_s: 8, shadow_s: 5}}
"""
KILL = "do: sigkill\n    target: gateway-chat-0"
CUT_OFF = "do: partition\n    target: {link: {from: node-0, to: node-1}}\n    for_s: 30"


def instead(step: str) -> str:
    """``GATEWAY`` with another fault."""
    assert KILL in GATEWAY
    return GATEWAY.replace(KILL, step)


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


def test_a_gateway_that_is_dead_does_not_say_that_all_is_well() -> None:
    verdict, events = run(GATEWAY)
    (unheard,) = of(events, "run.unheard")
    (last,) = of(events, "request.done")[-1:]
    assert unheard.t_ns >= last.t_ns + 8 * 10**9  # nobody knew that it would not come back
    assert (unheard.data["who"], unheard.data["asked"]) == ("gateway-chat-0", "engines")
    assert (verdict.result, [row.name for row in verdict.failed()]) == ("inconclusive", ["run_finished"])
    row = next(row for row in verdict.checks if row.name == "run_finished")
    assert row.witness == (unheard.seq,)
    assert "gateway-chat-0 did not answer engines until the bound was over" in row.explain and "dead" in row.explain
    assert of(events, "run.finished", reason="completed")  # all was taken down nevertheless
    assert not of(events, "leak.found")


@pytest.mark.parametrize("killed", ["restart_empty", "recovery"])
def test_who_is_back_answers_and_a_dead_recovery_is_not_at_work(killed: str) -> None:
    recovery = "do: sigkill\n    target: recovery-chat-0\n    must_hit: {processes: {at_least: 1}}"
    step = {"restart_empty": "do: restart_empty\n    target: gateway-chat-0", "recovery": recovery}[killed]
    verdict, events = run(instead(step))
    assert not of(events, "run.unheard")
    assert next(row.result for row in verdict.checks if row.name == "run_finished") == "pass"


def test_a_gateway_that_went_with_its_node_is_unheard() -> None:
    verdict, events = run(instead(CUT_OFF).replace("nodes: 1", "nodes: 2"))
    assert "gateway-chat-1" in [e.data["who"] for e in of(events, "run.unheard")]
    assert (verdict.result, [row.name for row in verdict.failed()]) == ("inconclusive", ["run_finished"])
