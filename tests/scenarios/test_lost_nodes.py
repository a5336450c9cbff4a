"""Machines that are lost or cut off while recovery is at work: where it starts the replicas anew, and beside whom."""

from __future__ import annotations

import pathlib

import pytest

from analysis.verdict import Judge
from protocol.evidence import Event
from scenarios.load import parse
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage

SCENARIO = """\
name: lost_nodes
summary: A node is lost or cut off for a minute; its two replicas are started anew on the node that has room.
seed: 1
topology:
  nodes: 3
  gpus_per_node: 2
  services:
    chat: {initial_replicas: 4, engine: tiny-cpu}
workload:
  service: chat
  arrivals: {poisson: {rate_per_s: 10}}
  prompt_tokens: {lognormal: {median: 60, p99: 200, at_most: 300}}
  output_tokens: {uniform: {low: 8, high: 64}}
  for_s: 80
steps:
"""
LIMITS = "limits: {time_limit_s: 400, converge_within_s: 130, shadow_s: 30}\n"
# The node is believed to be alive for 15 s more, so that recovery tries the replica's home first.
LOST = """\
  - {when: {event: engine.accepted, where: {actor: chat-3}, nth: 5}, do: sigkill, target: chat-3}
  - when: {event: fault.injected, where: {name: sigkill}}
    after_s: 0.1
    do: node_loss
    target: {node: node-1}
    for_s: 60
"""
CUT_OFF = "  - {at_s: 5, do: partition, target: {link: {from: node-0, to: node-1}}, for_s: 60}\n"


@pytest.mark.parametrize("steps", [LOST, CUT_OFF], ids=["lost", "cut off"])
def test_replicas_are_started_anew_where_there_is_a_machine(steps: str) -> None:
    scenario = parse(SCENARIO + steps + LIMITS, "lost.yaml", pathlib.Path())
    judge, events = Judge(preregistered(scenario)), []
    with SimStage(scenario, scenario.model.seed, sinks=[judge.feed, events.append]) as stage:
        stage.run()
    verdict = judge.verdict()
    assert verdict.result == "pass", {row.name: row.explain for row in verdict.failed()}
    born = [e for e in events if e.kind == "actor.spawned" and e.data["role"] == "engine"]
    assert sorted((e.actor, e.data["node"]) for e in born[4:]) == [("chat-2", "node-2"), ("chat-3", "node-2")]
    both = [name for name in ("chat-2", "chat-3") if _overlap(events, name)]
    assert both == (["chat-2", "chat-3"] if steps == CUT_OFF else [])


def _overlap(events: list[Event], name: str) -> bool:
    """Whether the second incarnation was born before the first died."""
    times = {(e.kind, e.inc): e.seq for e in events if e.actor == name}
    return times["actor.spawned", 1] < times["actor.died", 0]
