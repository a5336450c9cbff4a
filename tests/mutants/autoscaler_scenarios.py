"""The scenarios of the mutants of the autoscaler: a tiny engine whose KV cache a few sessions fill by half."""

from __future__ import annotations

import json

_HIGH = "{closed_loop: {sessions: 16}}"
_COMES_LATE = """
- service: chat
  arrivals: {closed_loop: {sessions: 1, turns: 1}}
  prompt_tokens: {fixed: 40}
  output_tokens: {fixed: 8}
  from_s: %s
"""


_OUT = {
    "token_usage_threshold": 0.3, "ttft_p95_threshold": 60, "queue_depth_per_engine": 90,
    "queue_time_p95_threshold": 60, "condition_duration_secs": 2, "max_delta": 1,
}  # fmt: skip
_IN = {"token_usage_threshold": 0.05, "throughput_variance_threshold": 1, "condition_duration_secs": 3}


def autoscaler_scenario(
    name: str,
    summary: str,
    *,
    steps: str = " []",
    high_s: float = 12,
    ends_s: float = 40,
    arrivals: str = _HIGH,
    acceptance: str = " []",
    most: int = 3,
    scaler: dict[str, float] | None = None,
    out: dict[str, float] | None = None,
    in_: dict[str, float] | None = None,
    initial: int = 1,
    component: str = "",
    scale_api: str = "",
    lifecycle: str = "",
    service: str = "chat",
    module: str = "tests.mutants.autoscalers",
) -> str:
    components = {"autoscaler": component, "scale_api": scale_api}
    given = {part: f"{module}:{cls}" for part, cls in components.items() if cls}
    config = {
        "min_engines": initial, "max_engines": most, "metrics_interval_secs": 0.5, "evaluation_interval_secs": 1,
        "condition_window_secs": 6, "scale_out_cooldown_secs": 4, "scale_in_cooldown_secs": 6, **(scaler or {}),
        "scale_out_policy": {**_OUT, **(out or {})}, "scale_in_policy": {**_IN, **(in_ or {})},
    }  # fmt: skip
    return (
        f"name: mutant_{name}\nsummary: {json.dumps(summary)}\n"
        f"topology:\n  nodes: 1\n  gpus_per_node: 8\n  services:\n    {service}:\n"
        f"      initial_replicas: {initial}\n      engine: tiny-cpu\n      components: {json.dumps(given)}\n"
        f"      scaling: {{lifecycle: {{{lifecycle}}}, autoscaler: {json.dumps(config)}}}\n"
        f"workload:\n- service: {service}\n  arrivals: {arrivals}\n  prompt_tokens: {{fixed: 40}}\n"
        f"  output_tokens: {{uniform: {{low: 100, high: 300}}}}\n  for_s: {high_s}"
        f"{(_COMES_LATE % ends_s).replace('chat', service)}steps:{steps}\nacceptance:{acceptance}\n"
        "limits: {time_limit_s: 900, converge_within_s: 30, shadow_s: 2}\n"
    )


ACTIVE = "\n- reached: {state: ACTIVE, within_s: 15}\n"
_ANSWER_LOST = """
- at_s: 0
  do: reply_lost
  target: {link: {from: autoscaler-chat, to: front-chat}}
  with: {method: scale_out, count: 2}
  for_s: 61
"""
DIRTY = """
- {at_s: 0, do: placement_stuck, for_s: 60}
- {at_s: 0, do: removal_fails, with: {late_s: 9}, for_s: %s}
"""
SLOW_TO_CLEAN = "placement_timeout_s: 3, removal_timeout_s: 2"

AUTOSCALER_SCENARIOS: dict[str, str] = {
    "auto_cycle": autoscaler_scenario(
        "auto_cycle",
        "Out under load, in when it is over.",
        acceptance=ACTIVE + "- reached: {state: COMPLETED, within_s: 40}\n- capacity_returned: {}\n",
    ),
    "auto_full": autoscaler_scenario(
        "auto_full",
        "Load that asks for more than may be had.",
        most=2,
        arrivals="{closed_loop: {sessions: 30}}",  # two replicas are not enough for them
        high_s=40,
        ends_s=45,
    ),
    "auto_deaf": autoscaler_scenario(
        "auto_deaf",
        "The answers to a submission are lost: it was accepted all the same.",
        steps=_ANSWER_LOST,
        scaler={"scale_out_cooldown_secs": 100},
        most=4,
        arrivals="{closed_loop: {sessions: 30}}",  # two replicas are not enough for them
        high_s=90,
        ends_s=92,
    ),
    "auto_dirty": autoscaler_scenario(
        "auto_dirty",
        "A scale-out fails and is not clean for a while.",
        steps=DIRTY % 20,
        scaler={"scale_out_cooldown_secs": 1},
        lifecycle=SLOW_TO_CLEAN,
        high_s=25,
        ends_s=45,
    ),
    "auto_deaf_and_dirty": autoscaler_scenario(
        "auto_deaf_and_dirty",
        "When the answer to a submission comes at last, the operation has failed and is not clean.",
        steps=_ANSWER_LOST + DIRTY.replace("for_s: 60", "for_s: 90") % 80,
        scaler={"scale_out_cooldown_secs": 1},
        lifecycle=SLOW_TO_CLEAN,
        high_s=85,
        ends_s=110,
    ),
    "auto_silent_on_cleanup": autoscaler_scenario(
        "auto_silent_on_cleanup",
        "The status of an operation does not say whether it is clean; only a reconcile does.",
        scale_api="SilentOnCleanup",
        most=4,
        scaler={"scale_out_cooldown_secs": 1},
        high_s=30,
        ends_s=60,
    ),
    "auto_one_blind": autoscaler_scenario(
        "auto_one_blind",
        "Two idle replicas, one of which shows no metrics.",
        steps="""
- {at_s: 14, do: metrics_missing, target: newest_replica, for_s: 20}
""",
        scaler={"scale_out_cooldown_secs": 14},
        ends_s=60,
        acceptance=ACTIVE + "- reached: {state: COMPLETED, within_s: 70}\n",
    ),
    "auto_blinks": autoscaler_scenario(
        "auto_blinks",
        "The metrics of the only replica are missing for a moment while a condition builds up.",
        steps="""
- {at_s: 4.2, do: metrics_missing, target: chat-0, for_s: 2.4}
""",
        out={"condition_duration_secs": 5},
        high_s=20,
        acceptance="\n- reached: {state: ACTIVE, within_s: 25}\n",
    ),
    "auto_slow_once": autoscaler_scenario(
        "auto_slow_once",
        "First tokens are late while many come at once; afterwards nothing happens for long.",
        arrivals="{closed_loop: {sessions: 48}}",
        out={"ttft_p95_threshold": 0.4},
        high_s=10,
        ends_s=70,
        acceptance="\n- reversals: {at_most: 1}\n",
    ),
    "auto_joins_late": autoscaler_scenario(
        "auto_joins_late",
        "The service is added to a running autoscaler.",
        component="AddsItsServiceLate",
        acceptance=ACTIVE,
    ),
    "auto_neighbour_hangs": autoscaler_scenario(
        "auto_neighbour_hangs",
        "Another service of the same autoscaler never answers.",
        component="HasANeighbourThatHangs",
        acceptance=ACTIVE,
    ),
    "auto_neighbour_seen": autoscaler_scenario(
        "auto_neighbour_seen",
        "Somebody looks at the status of two services, of which one was scaled.",
        component="HasANeighbourThatHangs",
        steps="""
- {at_s: 1, do: look}
- {at_s: 10, do: look}
- {at_s: 35, do: look}
""",
        acceptance=ACTIVE,
    ),
    "auto_moves": autoscaler_scenario(
        "auto_moves",
        "The rollout service moves: its URL is changed in the old spelling.",
        component="MovesByTheOldSpelling",
        service="rollout",
        acceptance=ACTIVE,
    ),
    "auto_no_throughput": autoscaler_scenario(
        "auto_no_throughput",
        "Replicas of an old version do not show their throughput.",
        component="OldReplicas",
        acceptance=ACTIVE,
    ),
    "auto_leaves": autoscaler_scenario(
        "auto_leaves",
        "Somebody wants the service removed while its scale-out is under way.",
        component="IsToldToLeave",
        high_s=8,
        ends_s=20,
    ),
    "auto_partial_policy": autoscaler_scenario(
        "auto_partial_policy",
        "The service has one setting of its own; the rest is as configured for all.",
        component="HasOneSettingOfItsOwn",
        acceptance=ACTIVE,
    ),
    "auto_contradiction": autoscaler_scenario(
        "auto_contradiction",
        "Somebody sets thresholds for the service that contradict each other.",
        component="IsToldTheImpossible",
        arrivals="{closed_loop: {sessions: 8}}",
        scaler={"scale_in_cooldown_secs": 2, "scale_out_cooldown_secs": 2},
        high_s=60,
        ends_s=62,
        acceptance="\n- reversals: {at_most: 2}\n",
    ),
}
