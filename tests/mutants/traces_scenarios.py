"""The scenarios that wrong owners of traces run in: two replicas, a dozen groups, one learner and one evaluator."""

from __future__ import annotations

from tests.mutants.policy_scenarios import LONGER, SHORT, policy_scenario


def _scenario(
    name: str,
    summary: str,
    *,
    episodes: str = "groups: 14, turns: 4, think_s: 0.3, traced: 0.6, request_aware: 0.5, aborted: 0.25, failed: 0.1, "
    "repeated: 0.15",
    rollouts: str = "buffer: {max_staleness: 1, keep_expired: true}, learner: {batch_groups: 2, fit_s: 0.3}, "
    "evaluator: {groups: 1, interval_s: 0.5}",
    steps: str = "",
    acceptance: str = "",
    prompt: str = SHORT,
    output: str = LONGER,
) -> str:
    return policy_scenario(
        name, summary, arrivals=f"{{rollouts: {{{episodes}}}}}", publishing="{}", steps=steps, acceptance=acceptance,
        service=f"      rollouts: {{{rollouts}}}\n", prompt=prompt, output=output,
        limits="time_limit_s: 400, converge_within_s: 40",
    )  # fmt: skip


_STALLED = """
- when: {event: call.sent, where: {target: traces-policy, method: release_sessions, actor: buffer-policy}}
  do: sigstop
  target: traces-policy
  for_s: 4
"""
_LATE = """
- at_s: 0
  do: delayed_delivery
  target: {link: {from: agent-policy-0, to: traces-policy}}
  with: {method: append, delay_s: 5, count: 8}
"""
_LOST = """
- when: {event: call.sent, where: {target: traces-policy, method: append}, from_s: 1}
  do: restart_empty
  target: traces-policy
"""

TRACES_SCENARIOS: dict[str, str] = {
    "traces": _scenario(
        "traces",
        "Producer, learner and evaluator share a trace store; groups fail, are filtered, broken off and go on.",
        acceptance="\n- cleanups_kept_others: {at_least: 1}\n",
    ),
    "traces_expiring": _scenario(
        "traces_expiring",
        "Completed groups grow stale in the buffer, and are rolled out again in the same sessions.",
        rollouts="buffer: {max_staleness: 0, keep_expired: true}, producer: {filter_equal_rewards: false}, "
        "learner: {batch_groups: 3, fit_s: 0.2}, evaluator: null",
        episodes="groups: 16, turns: 3, think_s: 0.3, request_aware: 0.5",
    ),
    "traces_stalled": _scenario(
        "traces_stalled",
        "The trace store stops while expired groups are dropped; the buffer answers all the same.",
        rollouts="buffer: {max_staleness: 0, keep_expired: false}, producer: {filter_equal_rewards: false}, "
        "learner: {batch_groups: 3, fit_s: 0.2}, evaluator: null",
        episodes="groups: 20, turns: 3, think_s: 0.3",
        steps=_STALLED,
    ),
    "traces_lost": _scenario(
        "traces_lost",
        "The trace store dies and another one comes, empty; everybody finds it.",
        episodes="groups: 40, turns: 3, think_s: 0.3, request_aware: 0.5, aborted: 0.1",
        steps=_LOST,
    ),
    "traces_late": _scenario(
        "traces_late",
        "Some first turns reach the trace store five seconds late; by then their groups are over and released.",
        rollouts="access: {call_timeout_s: 0.5, patience_s: 1}, producer: {failure_pause_s: 0}, "
        "learner: {batch_groups: 2, fit_s: 0.3}, evaluator: null",
        episodes="groups: 24, turns: 4, think_s: 0.3, request_aware: 0.5, expert_bytes: 0",
        steps=_LATE,
        acceptance="\n- occurs: {event: trace.refused, at_least: 1}\n",
    ),
    "traces_dense": _scenario(
        "traces_dense",
        "Turns of a model without experts are answered a second time, which is refused; nothing recorded is lost.",
        episodes="groups: 12, turns: 4, think_s: 0.3, request_aware: 0.5, repeated: 0.3, expert_bytes: 0",
    ),
    "traces_alone": _scenario(
        "traces_alone",
        "A colocated learner trains between productions, and groups that it did not take stay in the buffer.",
        rollouts="buffer: {max_staleness: 9, keep_expired: true}, producer: {filter_equal_rewards: false}, "
        "learner: {mode: colocated, batch_groups: 3, fit_s: 0.2}, evaluator: {groups: 1}",
        episodes="groups: 12, turns: 2, failed: 0.15",
    ),
    "traces_deep": _scenario(
        "traces_deep",
        "A conversation of six hundred turns is recorded, exported, trained on and released.",
        rollouts="learner: {batch_groups: 1, fit_s: 0.2}, buffer: {max_staleness: 9}, evaluator: null",
        episodes="groups: 1, members: 1, turns: 600, expert_bytes: 0",
        prompt="fixed: 1",
        output="fixed: 1",
    ),
}
