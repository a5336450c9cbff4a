"""The scenarios of the mutants that fall for what SGLang does unasked."""

from __future__ import annotations

import json


def _scenario(name: str, summary: str, service: str, workload: str, steps: str, more: str = "") -> str:
    return (
        f"name: mutant_{name}\nsummary: {json.dumps(summary)}\n"
        f"topology:\n  nodes: 1\n  gpus_per_node: 4\n  services:\n    policy:\n      engine: tiny-cpu\n{service}"
        f"workload: {workload}\nsteps: {steps or '[]'}\nacceptance: []\n"
        f"limits: {{time_limit_s: 200, converge_within_s: 40, shadow_s: 40{more}}}\n"
    )


SURPRISE_SCENARIOS = {
    "paused_while_it_loads": _scenario(
        "paused_while_it_loads",
        "A replacement is paused in place, at work, when it is to load its weights: the flush after them is refused.",
        "      initial_replicas: 2\n      weights: {shards: 1, shard_gb: 0.05, version: '1'}\n"
        "      components: {recovery: 'tests.mutants.surprises:MeetsAPause'}\n",
        "{service: policy, arrivals: {poisson: {rate_per_s: 10}}, prompt_tokens: {fixed: 60}, "
        "output_tokens: {fixed: 16}, for_s: 20}",
        "[{when: {event: engine.accepted, where: {actor: policy-0}, from_s: 2}, do: sigkill, target: policy-0, "
        "must_hit: {in_flight: {at_least: 1}}}]",
    ),
    "budgets": _scenario(
        "budgets",
        "Turns that take too long are aborted, each by the id of its request.",
        "      initial_replicas: 2\n      weights: {shards: 1, shard_gb: 0.05}\n      publishing: {}\n"
        "      components: {entrypoint: 'tests.mutants.surprises:GivesBudgets'}\n",
        "{service: policy, arrivals: {agents: {sessions: 16, turns: 4, think_s: 0.1}}, "
        "prompt_tokens: {uniform: {low: 4, high: 12}}, output_tokens: {uniform: {low: 30, high: 48}}, "
        "idempotent: false}",
        "",
    ),
    "told_to_leave": _scenario(
        "told_to_leave",
        "A replica gets a SIGTERM under steady traffic: it must be routed around, or it never ends.",
        "      initial_replicas: 3\n      health: {look_for_leaving_s: 3}\n",
        "{service: policy, arrivals: {poisson: {rate_per_s: 30}}, prompt_tokens: {fixed: 60}, "
        "output_tokens: {fixed: 200}, for_s: 40}",
        "[{when: {event: engine.accepted, where: {actor: policy-0}, from_s: 4}, do: sigterm, target: policy-0}]",
    ),
}
