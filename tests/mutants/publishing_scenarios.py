"""The scenarios that the wrong variants of publications run in: two replicas, a dozen agents, one or two versions."""

from __future__ import annotations

from tests.mutants.barrier_scenarios import BARRIER_SCENARIOS
from tests.mutants.policy_scenarios import LONGER, SHORT, policy_scenario


def _scenario(
    name: str,
    summary: str,
    *,
    steps: str,
    acceptance: str = "",
    publishing: str = "{}",
    shard_gb: float = 0.05,
    agents: str = "sessions: 16, turns: 8, think_s: 0.8",
    prompt: str = SHORT,
    output: str = LONGER,
    replicas: int = 2,
    nodes: int = 1,
) -> str:
    return policy_scenario(
        name, summary, arrivals=f"{{agents: {{{agents}}}}}", publishing=publishing, steps=steps, acceptance=acceptance,
        replicas=replicas, nodes=nodes, weights=f"shards: 1, shard_gb: {shard_gb}", prompt=prompt, output=output,
    )  # fmt: skip


_ONE = "\n- {at_s: 1.5, do: publish, with: {model_step: 1}}\n"
_DONE = "\n- occurs: {event: publication.ended, where: {outcome: done}, at_least: 2}\n"
_LOST = """
- at_s: 2
  do: read_timeout
  target: {link: {from: entrypoint-policy-0, to: policy-0}}
  with: {method: /generate, count: 1}
"""
_QUICK = "{entrypoint: {forward_timeout_s: 3, admission_timeout_s: 20}, controller: {prepare_timeout_s: 20}}"
_KILL = """
- when: {event: engine.accepted, where: {running: 1}, from_s: 2}
  do: sigkill
  target: replica_of_trigger
  must_hit: {in_flight: {at_least: 1}}
"""

PUBLISHING_SCENARIOS: dict[str, str] = {
    **BARRIER_SCENARIOS,
    "publish": _scenario(
        "publish", "One version is published under agents; every turn is answered.", steps=_ONE, acceptance=_DONE
    ),
    "publish_busy": _scenario(
        "publish_busy",
        "Three versions are published under agents whose turns are long and follow each other at once.",
        steps=_ONE
        + "- {at_s: 2.5, do: publish, with: {model_step: 2}}\n"
        + "- {at_s: 3.5, do: publish, with: {model_step: 3}}\n",
        acceptance="\n- occurs: {event: publication.ended, where: {outcome: done}, at_least: 4}\n",
        agents="sessions: 24, turns: 8, think_s: 0.1",
        output="uniform: {low: 30, high: 48}",
    ),
    "publish_slow_drain": _scenario(
        "publish_slow_drain",
        "A replica becomes so slow that a drain times out: the gate is poisoned, and weights stay.",
        steps="""
- when: {event: engine.accepted, where: {actor: policy-0}, from_s: 2}
  do: slow
  target: policy-0
  with: {percent: 100000}
  for_s: 12
- {when: {event: fault.injected}, after_s: 0.05, do: publish, with: {model_step: 1}}
""",
        publishing="{entrypoint: {admission_timeout_s: 20}, controller: {prepare_timeout_s: 3}}",
        output="uniform: {low: 30, high: 48}",
    ),
    "publish_unknown": _scenario(
        "publish_unknown",
        "The answer of a turn never comes; no publication may pass its gate.",
        steps=_LOST + "- {when: {event: fault.hit}, after_s: 5, do: publish, with: {model_step: 1}}\n",
        publishing=_QUICK,
    ),
    "publish_too_long": _scenario(
        "publish_too_long",
        "Conversations come to exceed the context and are refused before anything is generated; publications pass.",
        steps="\n- {at_s: 6, do: publish, with: {model_step: 1}}\n",
        acceptance=_DONE,
        publishing="{entrypoint: {admission_timeout_s: 20}, controller: {prepare_timeout_s: 10}}",
        agents="sessions: 12, turns: 12, think_s: 0.8",
        prompt="uniform: {low: 60, high: 120}",
    ),
    "publish_late_reopen": _scenario(
        "publish_late_reopen",
        "A reopen of the first cycle is delivered in the middle of the second: it belongs to an older epoch.",
        steps="""
- at_s: 0.5
  do: delayed_delivery
  target: {link: {from: controller-policy, to: gate-policy-0}}
  with: {method: reopen, count: 1, delay_s: 4}
- {at_s: 1, do: publish, with: {model_step: 1}}
- {when: {event: publication.ended, where: {model_step: 1}}, after_s: 2.4, do: publish, with: {model_step: 2}}
""",
        publishing="{controller: {call_timeout_s: 0.5, pause_mode: none}}",
        agents="sessions: 16, turns: 14, think_s: 0.6",
        shard_gb=1.0,
        prompt="uniform: {low: 4, high: 8}",
    ),
    "publish_gate_restarted": _scenario(
        "publish_gate_restarted",
        "A gate is restarted between two publications: it must not open with a version of its own.",
        steps="""
- {at_s: 1, do: publish, with: {model_step: 1}}
- when: {event: gate.granted, where: {actor: gate-policy-0}, from_s: 4, phase: before}
  do: restart_empty
  target: gate-policy-0
- {at_s: 7, do: publish, with: {model_step: 2}}
""",
    ),
    "publish_lost_seals": _scenario(
        "publish_lost_seals",
        "Replies of seal and drain are lost; each stage alone takes less than the deadline, both together more.",
        steps="""
- at_s: 0.5
  do: reply_lost
  target: {link: {from: controller-policy, to: gate-policy-0}}
  with: {method: seal, count: 1}
- at_s: 0.5
  do: reply_lost
  target: {link: {from: controller-policy, to: gate-policy-0}}
  with: {method: drain, count: 1}
- {at_s: 1, do: publish, with: {model_step: 1, attempts: 3}}
""",
        publishing="{controller: {call_timeout_s: 4, prepare_timeout_s: 5}}",
        acceptance=_DONE,
    ),
    "publish_cut_off": _scenario(
        "publish_cut_off",
        "A node cannot be reached when the second installation begins; the same call again completes it.",
        steps="""
- {at_s: 1, do: publish, with: {model_step: 1, attempts: 8, retry_s: 2}}
- when: {event: controller.stage, where: {stage: served}, phase: before}
  do: partition
  target: {link: {from: controller-policy, to: gate-policy-1}}
  for_s: 12
""",
        publishing="{controller: {call_timeout_s: 0.5, resume_timeout_s: 3}}",
        acceptance=_DONE,
        nodes=2,
    ),
    "sessions_killed": _scenario(
        "sessions_killed",
        "A replica is killed under bound sessions: they are refused, and never moved.",
        steps=_KILL,
        publishing="{gates: false, affinity: {max_sessions: 40}}",
        agents="sessions: 60, at_once: 24, turns: 6, think_s: 0.6, late: 0.5",
        output="uniform: {low: 4, high: 12}",
        replicas=3,
        acceptance="\n- answered_fraction: {at_least: 0.8}\n",
    ),
    "sessions_lost_reply": _scenario(
        "sessions_lost_reply",
        "Answers are lost after their effect; no turn is sent a second time.",
        steps="""
- at_s: 1
  do: read_timeout
  target: {link: {from: "entrypoint-*", to: "policy-*"}}
  with: {method: /generate, count: 3}
""",
        publishing="{gates: false, entrypoint: {forward_timeout_s: 2}}",
        agents="sessions: 16, turns: 5, think_s: 0.5",
    ),
    "sessions_come_and_go": _scenario(
        "sessions_come_and_go",
        "Many more sessions than may be bound come and go, some with a request too late; there is room for all.",
        steps="",
        publishing="{gates: false, affinity: {max_sessions: 12}}",
        agents="sessions: 60, at_once: 10, turns: 2, think_s: 0.3, late: 0.5",
        output="uniform: {low: 4, high: 12}",
    ),
}
