"""What the scenarios of wrong publications, weight updates, session servers and owners of traces have in common."""

from __future__ import annotations

import json

SHORT = "uniform: {low: 4, high: 12}"
LONGER = "uniform: {low: 8, high: 24}"


def policy_scenario(
    name: str,
    summary: str,
    *,
    arrivals: str,
    publishing: str,
    steps: str = "",
    acceptance: str = "",
    service: str = "",
    replicas: int = 2,
    nodes: int = 1,
    weights: str = "shards: 1, shard_gb: 0.05",
    prompt: str = SHORT,
    output: str = LONGER,
    limits: str = "time_limit_s: 400, converge_within_s: 40, shadow_s: 200",
) -> str:
    """One service ``policy`` of a tiny engine whose weights are published under those who use it.

    Args:
        service: further keys of the service, each a line.
        weights, prompt, output, limits: what stands between the braces.
        arrivals, publishing: with their braces.
        steps, acceptance: lists in block style; empty: none.
    """
    return (
        f"name: mutant_{name}\nsummary: {json.dumps(summary)}\n"
        f"topology:\n  nodes: {nodes}\n  gpus_per_node: {-(-replicas // nodes)}\n  services:\n    policy:\n"
        f"      initial_replicas: {replicas}\n      engine: tiny-cpu\n      weights: {{{weights}}}\n"
        f"      publishing: {publishing}\n{service}"
        f"workload:\n  service: policy\n  arrivals: {arrivals}\n"
        f"  prompt_tokens: {{{prompt}}}\n  output_tokens: {{{output}}}\n  idempotent: false\n"
        f"steps:{steps or ' []'}\nacceptance:{acceptance or ' []'}\nlimits: {{{limits}}}\n"
    )
