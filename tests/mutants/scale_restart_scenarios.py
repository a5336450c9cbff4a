"""The scenarios of wrong restarts: the control API, the manager or the gateway is killed, and started anew.

And of what one of them showed: a victim that nobody had closed when its operation's time was up.
"""

from __future__ import annotations

from tests.mutants.scaling_scenarios import ENDS_CLEAN, reconcile, scaling_scenario

_JOURNAL = "journal: journals"
_OUT_3 = "\n- {at_s: 1, do: scale_out, with: {num_replicas: 3, idempotency_key: out}}"
_GATEWAY = f"      gateway: {{{_JOURNAL}}}\n"
_SHORT = """
  service: chat
  arrivals: {closed_loop: {sessions: 24}}
  prompt_tokens: {fixed: 40}
  output_tokens: {fixed: 100}
"""
_IN_AT_14 = "\n- {at_s: 14, do: scale_in, with: {num_replicas: 1, idempotency_key: in, timeout_s: 60}}"
_UNHEARD_AT_13 = """
- at_s: 13
  do: request_lost
  target: {link: {from: scale-chat-0, to: manager-chat-0}}
  with: {method: progress, count: 1}
  for_s: 5
"""
_PARKED_AT_14 = "\n- {at_s: 14, do: scale_in, with: {num_replicas: 2, timeout_s: 0.3}}"
_GOES_WELL = """
- reached: {state: ACTIVE, within_s: 30}
- reached: {state: COMPLETED, within_s: 60}
- capacity_returned: {}
"""


def _restarted(name: str, summary: str, who: str, when: str, rest: str, acceptance: str = _GOES_WELL) -> str:
    kill = f"\n- {{{when}, do: restart_empty, target: {who}-chat-0, must_hit: {{processes: {{at_least: 1}}}}}}"
    return scaling_scenario(
        name, summary, steps=_OUT_3 + kill + rest, for_s=30, api=_JOURNAL, lifecycle=_JOURNAL, service=_GATEWAY,
        acceptance=acceptance, workload=_SHORT,
    )  # fmt: skip


SCALE_RESTART_SCENARIOS: dict[str, str] = {
    "scale_parked_at_once": scaling_scenario(
        "scale_parked_at_once",
        "The time is up when a victim was just chosen, before anybody closed it.",
        steps=_OUT_3 + _UNHEARD_AT_13 + _PARKED_AT_14 + reconcile(26),
        for_s=30,
        api="progress_timeout_s: 0.25",
        workload=_SHORT,
        acceptance=ENDS_CLEAN,
    ),
    "scale_api_restarted": _restarted(
        "scale_api_restarted",
        "The control API is killed while a replica is created; the key of its operation is used again.",
        "scale",
        "when: {event: scale.slot, where: {what: launched}}, after_s: 1",
        "\n- {at_s: 6, do: scale_out, with: {num_replicas: 3, idempotency_key: out}}" + _IN_AT_14,
    ),
    "scale_manager_restarted": _restarted(
        "scale_manager_restarted",
        "The manager is killed when it has chosen a victim.",
        "manager",
        "when: {event: scale.drain, where: {what: chosen}}",
        _IN_AT_14,
    ),
    "scale_manager_restarted_at_publication": _restarted(
        "scale_manager_restarted_at_publication",
        "The manager is killed when the gateway has just taken a replica, and has not heard of that.",
        "manager",
        "when: {event: gateway.routable, where: {replica: chat-2}}",
        _IN_AT_14,
    ),
    "scale_manager_restarted_at_removal": _restarted(
        "scale_manager_restarted_at_removal",
        "The manager is killed when it has asked for the removal of a group, and has not heard of that.",
        "manager",
        "when: {event: placement.removal_asked}",
        _IN_AT_14,
    ),
    "scale_gateway_restarted": _restarted(
        "scale_gateway_restarted",
        "The gateway is killed while a parked victim waits for its reconcile.",
        "gateway",
        "at_s: 16",
        _PARKED_AT_14 + reconcile(26),
        ENDS_CLEAN,
    ),
}
