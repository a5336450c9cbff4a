"""The scenarios of the wrong ways to scale rollout replicas: a tiny engine, weights of two versions."""

from __future__ import annotations

import json

from tests.mutants.autoscaler_scenarios import AUTOSCALER_SCENARIOS


def _scenario(
    name: str, summary: str, *, steps: str, acceptance: str, output: int = 100, sleep_s: float = 3, for_s: float = 24
) -> str:
    return (
        f"name: mutant_{name}\nsummary: {json.dumps(summary)}\n"
        "topology:\n  nodes: 1\n  gpus_per_node: 8\n  services:\n    chat:\n      initial_replicas: 1\n"
        "      engine: tiny-cpu\n      weights: {version: '7'}\n"
        f"      scaling: {{kind: rollout, rollout: {{drain_sleep_s: {sleep_s}}}}}\n"
        "workload:\n  service: chat\n  arrivals: {closed_loop: {sessions: 8}}\n  prompt_tokens: {fixed: 40}\n"
        f"  output_tokens: {{fixed: {output}}}\n  for_s: {for_s}\nsteps:{steps}acceptance:{acceptance}"
        "limits: {time_limit_s: 600, converge_within_s: 30, shadow_s: 2}\n"
    )


_OUT = "\n- {at_s: 1, do: scale_out, with: {num_replicas: %d}}"
_IN = "\n- {at_s: %s, do: scale_in, with: {num_replicas: %d}}\n"
_COMPLETED = "\n- reached: {state: COMPLETED, within_s: 60}\n"

ROLLOUT_SCALING_SCENARIOS: dict[str, str] = {
    "rollout_1_2_1": _scenario(
        "rollout_1_2_1",
        "Weights change; then out to two, with the new ones, and back to one.",
        steps="\n- {at_s: 0.2, do: sync_weights, with: {version: '8', attempts: 3}}"
        + (_OUT % 2).replace("at_s: 1", "at_s: 4")
        + _IN % (14, 1),
        acceptance=_COMPLETED
        + "- occurs: {event: request.done, where: {replica: chat-1, version: '7'}, at_most: 0}\n"
        + "- occurs: {event: request.done, where: {replica: chat-1, version: '8'}, at_least: 1}\n"
        + "- capacity_returned: {}\n",
    ),
    # An autoscaler asks, and the answers are lost: it is on record what they were.
    "rollout_auto_deaf": AUTOSCALER_SCENARIOS["auto_deaf"]
    .replace("mutant_auto_deaf", "mutant_rollout_auto_deaf")
    .replace("scaling: {lifecycle", "scaling: {kind: rollout, lifecycle"),
    "rollout_cancelled": _scenario(
        "rollout_cancelled",
        "A scale-out is cancelled when its replica is started already: it goes on.",
        steps=_OUT % 2 + "\n- {at_s: 3, do: cancel}\n",
        acceptance="\n- reached: {state: ACTIVE, within_s: 60}\n",
    ),
    "rollout_update_meets_scale_in": _scenario(
        "rollout_update_meets_scale_in",
        "Weights are to be updated while replicas drain.",
        steps=_OUT % 2
        + "\n- {when: {event: scale.drain, where: {what: chosen}}, after_s: 0.2, do: sync_weights, "
        + "with: {version: '8', attempts: 20}}"
        + _IN % (10, 1),
        acceptance=_COMPLETED
        + "- occurs: {event: weights.synced, where: {status: 409, code: DRAINING}, at_least: 1}\n"
        + "- occurs: {event: weights.synced, where: {status: 200}, at_least: 1}\n",
    ),
    "rollout_3_2": _scenario(
        "rollout_3_2",
        "Out to three and back to two.",
        steps=_OUT % 3 + _IN % (20, 2),
        for_s=30,
        acceptance=_COMPLETED,
    ),
    "rollout_busy_victim": _scenario(
        "rollout_busy_victim",
        "A victim is not idle when the sleep is over: it serves on.",
        steps=_OUT % 2 + _IN % (10, 1),
        output=460,
        sleep_s=0.2,
        acceptance="\n- reached: {state: FAILED, within_s: 60}\n"
        + "- reached: {event: gateway.routable, where: {replica: chat-1}, nth: 2, within_s: 60}\n",
    ),
}
