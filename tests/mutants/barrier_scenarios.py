"""The scenarios of trouble in and around a publication barrier: gates that die, grants that are lost, long waits."""

from __future__ import annotations

from tests.mutants.policy_scenarios import policy_scenario

_DONE = "\n- occurs: {event: publication.ended, where: {outcome: done}, at_least: 2}\n"


def _scenario(
    name: str,
    summary: str,
    *,
    steps: str,
    acceptance: str = _DONE,
    publishing: str = "{}",
    service: str = "",
    agents: str = "sessions: 16, turns: 5, think_s: 0.2",
    output: str = "uniform: {low: 10, high: 20}",
    nodes: int = 1,
    workload: str = "",
) -> str:
    return policy_scenario(
        name, summary, arrivals=f"{{agents: {{{agents}}}}}{workload}", publishing=publishing, steps=steps,
        acceptance=acceptance, service=service, nodes=nodes, prompt="uniform: {low: 4, high: 8}", output=output,
        limits="time_limit_s: 300, converge_within_s: 60, shadow_s: 200",
    )  # fmt: skip


_SLOW = """
- when: {event: engine.accepted, where: {actor: policy-0}, from_s: 1}
  do: slow
  target: policy-0
  with: {percent: 3000}
  for_s: 8
"""
_BOTH_DIE = (
    _SLOW
    + """- when: {event: gate.granted, where: {actor: gate-policy-0}, from_s: 1.4, phase: before}
  do: restart_empty
  target: gate-policy-0
- when: {event: fault.injected, where: {name: restart_empty, target: gate-policy-0}}
  do: restart_empty
  target: entrypoint-policy-0
- when: {event: fault.injected, where: {name: restart_empty, target: entrypoint-policy-0}}
  after_s: 0.3
  do: publish
  with: {model_step: 1, attempts: 8, retry_s: 0.3}
"""
)

BARRIER_SCENARIOS: dict[str, str] = {
    "gate_dies": _scenario(
        "gate_dies",
        "A gate dies under turns that take long, and a version is published at once.",
        steps=_SLOW
        + """- when: {event: gate.granted, where: {actor: gate-policy-0}, from_s: 1.4, phase: before}
  do: restart_empty
  target: gate-policy-0
- when: {event: fault.injected, where: {name: restart_empty}}
  after_s: 0.3
  do: publish
  with: {model_step: 1, attempts: 8, retry_s: 0.3}
""",
        output="uniform: {low: 60, high: 90}",
    ),
    "both_die": _scenario(
        "both_die",
        "A gate and its entrypoint die under turns that take long, and a version is published at once.",
        steps=_BOTH_DIE,
        output="uniform: {low: 60, high: 90}",
    ),
    "both_die_unseen": _scenario(
        "both_die_unseen",
        "A gate and its entrypoint die under turns that take long, before an engine that shows no metrics.",
        steps="\n- {at_s: 0.2, do: metrics_missing, target: policy-0, for_s: 100}" + _BOTH_DIE,
        publishing="{controller: {prepare_timeout_s: 5}}",
        output="uniform: {low: 60, high: 90}",
    ),
    "gate_dies_resuming": _scenario(
        "gate_dies_resuming",
        "A gate dies when its version is to be installed: the next tries begin another epoch.",
        steps="""
- {at_s: 0.8, do: publish, with: {model_step: 1, attempts: 8, retry_s: 0.5}}
- when: {event: gate.changed, where: {actor: gate-policy-0, what: installed, epoch: 2}, phase: before}
  do: restart_empty
  target: gate-policy-0
""",
    ),
    "controller_dies": _scenario(
        "controller_dies",
        "The controller dies when everything is drained: the one that comes after it begins another epoch over all.",
        steps="""
- {at_s: 0.8, do: publish, with: {model_step: 1, attempts: 8, retry_s: 0.5}}
- when: {event: controller.stage, where: {stage: drained, epoch: 2}}
  do: restart_empty
  target: controller-policy
""",
        output="uniform: {low: 30, high: 48}",
    ),
    "publisher_dies": _scenario(
        "publisher_dies",
        "The publisher is restarted, and asked for an older version than is published; then a replica is recovered.",
        steps="""
- {at_s: 0.6, do: publish, with: {model_step: 2}}
- {at_s: 0.9, do: restart_empty, target: publisher-policy, must_hit: {processes: {at_least: 1}}}
- {at_s: 1.3, do: publish, with: {model_step: 1, attempts: 2, retry_s: 0.1}}
- {at_s: 2, do: sigkill, target: policy-0, must_hit: {processes: {at_least: 1}}}
""",
        acceptance="\n- occurs: {event: publication.ended, where: {model_step: 1, outcome: not_done, "
        "error: BarrierError}, at_least: 1}\n"
        "- occurs: {event: recovery.step, where: {stage: published}, at_least: 1}\n",
        agents="sessions: 24, at_once: 6, turns: 3, think_s: 6",
    ),
    "late_turns": _scenario(
        "late_turns",
        "The door to a gate opens late: agents have given up and retired by then.",
        steps="""
- at_s: 0.5
  do: delayed_delivery
  target: {link: {from: entrypoint-policy-0, to: gate-policy-0}}
  with: {method: request, count: 6, delay_s: 4}
""",
        acceptance="",
        agents="sessions: 12, turns: 6, think_s: 0.2",
        workload="\n  patience_s: 2",
    ),
    "hold_runs_out": _scenario(
        "hold_runs_out",
        "A resumption is tried for longer than it takes health to find that paused backends are ill.",
        steps="""
- {at_s: 0.4, do: publish, with: {model_step: 1, attempts: 30, retry_s: 1}}
- when: {event: controller.stage, where: {stage: served, epoch: 2}, phase: before}
  do: request_lost
  target: {link: {from: controller-policy, to: gate-policy-1}}
  with: {method: install_version, count: 40}
""",
        publishing="{controller: {call_timeout_s: 0.5, prepare_timeout_s: 2, resume_timeout_s: 2}}",
        service="      health: {replace_after_s: 3}\n      admin: {update_timeout_s: 3}\n",
    ),
    "pause_beside": _scenario(
        "pause_beside",
        "A native pause and a publication are asked for at the same time: one of the two is refused.",
        steps="""
- {at_s: 0.8, do: publish, with: {model_step: 1, attempts: 5, retry_s: 1}}
- at_s: 0.5
  do: delayed_delivery
  target: {link: {from: controller-policy, to: entrypoint-policy-0}}
  with: {method: set_aborting, count: 1, delay_s: 0.8}
""",
        service="      components: {publisher: 'tests.mutants.barriers:PausesAtOnce'}\n",
        output="uniform: {low: 30, high: 48}",
    ),
    "older_after_newer": _scenario(
        "older_after_newer",
        "A version is published that is older than the one before it, by one who does not remember; then a newer one.",
        steps="""
- {at_s: 0.4, do: publish, with: {model_step: 2}}
- {at_s: 2.0, do: publish, with: {model_step: 1}}
- {at_s: 3.0, do: publish, with: {model_step: 3, attempts: 5, retry_s: 1}}
""",
        acceptance="\n- occurs: {event: publication.ended, where: {outcome: done}, at_least: 3}\n"
        "- occurs: {event: publication.ended, where: {model_step: 1, outcome: not_done, error: BarrierError}, "
        "at_least: 1}\n",
        service="      components: {publisher: 'tests.mutants.barriers:ForgetsWhatItPublished'}\n",
        agents="sessions: 16, turns: 10, think_s: 0.4",
    ),
    "lost_grants": _scenario(
        "lost_grants",
        "Answers of a gate that granted leases are lost.",
        steps="""
- at_s: 0.5
  do: reply_lost
  target: {link: {from: entrypoint-policy-0, to: gate-policy-0}}
  with: {method: request, count: 3}
""",
        acceptance="",
        publishing="{entrypoint: {admission_timeout_s: 40}, controller: {prepare_timeout_s: 20}}",
        agents="sessions: 12, turns: 12, think_s: 2",
    ),
    "replaced_while_resuming": _scenario(
        "replaced_while_resuming",
        "A replica is replaced at its address, by one with older weights, while another is slow to continue.",
        steps="""
- {at_s: 0.8, do: publish, with: {model_step: 1, attempts: 12, retry_s: 1}}
- at_s: 0.5
  do: delayed_delivery
  target: {link: {from: controller-policy, to: policy-1}}
  with: {method: /continue_generation, count: 1, delay_s: 8}
""",
        service="      components: {publisher: 'tests.mutants.publishing_more:ReplacedInTheResumption'}\n",
    ),
}
