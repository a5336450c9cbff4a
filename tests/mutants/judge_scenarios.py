"""The scenarios of the wrong variants of determinism: a tiny judge, and one with long prompts for the wedge."""

from __future__ import annotations

import json


def _scenario(
    name: str,
    summary: str,
    *,
    judgements: str,
    options: str = "deterministic: true, gpu: ada",
    acceptance: str,
    replicas: int = 2,
) -> str:
    return (
        f"name: mutant_{name}\nsummary: {json.dumps(summary)}\n"
        "topology:\n  nodes: 1\n  gpus_per_node: 8\n  services:\n    chat:\n"
        f"      initial_replicas: {replicas}\n      engine: tiny-cpu\n      engine_options: {{{options}}}\n"
        "      judge: {model_path: tiny}\n"
        f"workload:\n{judgements}"
        f"acceptance:\n{acceptance}"
        "limits: {time_limit_s: 600, converge_within_s: 20, shadow_s: 2}\n"
    )


def _judged(what: str, from_s: float = 0.0) -> str:
    return (
        f"- service: chat\n  arrivals: {{judgements: {{{what}}}}}\n"
        "  prompt_tokens: {uniform: {low: 40, high: 90}}\n"
        f"  output_tokens: {{fixed: 128}}\n  from_s: {from_s}\n"
    )


_LONG = """name: mutant_judges_wedged
summary: "Long prompts of one prefix come to a judge in deterministic mode, all at once."
topology:
  nodes: 1
  gpus_per_node: 2
  services:
    chat:
      initial_replicas: 1
      engine: qwen3-0.6b-rtx4090
      engine_options: {deterministic: true, gpu: ada}
      health: {stall_window_s: 100000, replace_after_s: 100000}
workload:
  service: chat
  arrivals: {closed_loop: {sessions: 12, turns: 3}}
  prompt_tokens: {fixed: 35}
  output_tokens: {fixed: 8}
  phases:
    - {from_s: 0.05, prompt_tokens: {fixed: 1800}, output_tokens: {fixed: 64}, shared_prefix_tokens: 1536}
  for_s: 5
  patience_s: 30
acceptance:
  - answered_fraction: {at_least: 1.0}
limits: {time_limit_s: 600, converge_within_s: 30}
"""

_BOTH = """- judgements_agree: {arm: greedy, cases: 20, replies: 80}
- judgements_agree: {arm: sampled, cases: 20, replies: 80}
"""

JUDGE_SCENARIOS: dict[str, str] = {
    "judges": _scenario(
        "judges",
        "Two judges, the same inputs, greedy and sampled.",
        judgements=_judged("cases: 20, repeats: 4, temperature: 1.0"),
        acceptance=_BOTH,
    ),
    "judges_apart": _scenario(
        "judges_apart",
        "Two judges, one of which has sampled more than the other.",
        judgements=_judged("cases: 7, repeats: 1, arms: [sampled], temperature: 1.0, at_once: 7")
        + _judged("cases: 20, repeats: 4, arms: [sampled], temperature: 1.0", from_s=5),
        acceptance="- judgements_agree: {arm: sampled, workload: 1, cases: 20, replies: 80}\n",
    ),
    "judges_seeded": _scenario(
        "judges_seeded",
        "The caller names a seed.",
        judgements=_judged("cases: 10, repeats: 4, arms: [sampled], temperature: 1.0, seed: 7"),
        acceptance="- judgements_agree: {arm: sampled, cases: 10, replies: 40}\n",
    ),
    "judges_named": _scenario(
        "judges_named",
        "The user has set an attention backend for all engines.",
        judgements=_judged("cases: 4, repeats: 2"),
        options="deterministic: true, gpu: ada, attention_backend: triton",
        acceptance="- occurs: {event: engine.options, where: {attention_backend: fa3}, at_most: 0}\n",
    ),
    "judges_wedged": _LONG,
}
