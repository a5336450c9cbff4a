"""The scenarios of wrong proofs: managers that do not say all, victims that nobody closed, ranks that are over."""

from __future__ import annotations

from tests.mutants.scaling_scenarios import ENDS_CLEAN, OUT_2, reconcile, scaling_scenario

_HERE = "tests.mutants.scale_proofs"
_FAILED_DIRTY = '- reached: {event: scale.answered, where: {state: FAILED, cleanup: "true"}, within_s: 60}\n'


def _manager(cls: str) -> str:
    return f"      components: {{scale_manager: '{_HERE}:{cls}'}}\n"


def _early(cls: str) -> str:
    return scaling_scenario(
        "scale_completed_early",
        "A manager says COMPLETED while the victim's group is still being removed, and the operation's time is up.",
        steps=OUT_2
        + "\n- {at_s: 6, do: removal_fails, with: {late_s: 12}, for_s: 6}"
        + "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 3}}"
        + reconcile(14),
        for_s=28,
        api="completion_wait_s: 2",
        service=_manager(cls),
        acceptance=ENDS_CLEAN,
    )


SCALE_PROOF_SCENARIOS: dict[str, str] = {
    "scale_nameless_victim": scaling_scenario(
        "scale_nameless_victim",
        "A manager does not say which rank it drains, and would take any confirmation: none may be sent.",
        steps=OUT_2 + "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 3}}" + reconcile(12),
        for_s=18,
        service=_manager("TrustsTheNameless"),
        acceptance=ENDS_CLEAN + _FAILED_DIRTY,
    ),
    "scale_nameless_proof": scaling_scenario(
        "scale_nameless_proof",
        "Confirmations come that name no rank: the drain is not over by them.",
        steps=OUT_2 + "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 3}}" + reconcile(12),
        for_s=18,
        service=_manager("OmitsTheRank").replace("{", f"{{scale_api: '{_HERE}:ConfirmsWithoutRank', "),
        acceptance=ENDS_CLEAN + _FAILED_DIRTY,
    ),
    "scale_completed_early": _early("CompletesEarly"),
    "scale_completed_unknown": _early("CompletesEarlyAndSilent"),
    "scale_without_a_flag": scaling_scenario(
        "scale_without_a_flag",
        "A manager from before there was a flag for the cleanup: what it says otherwise is believed.",
        steps=OUT_2 + "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 30}}",
        for_s=14,
        service=_manager("KnowsNoFlag"),
        acceptance="\n- reached: {state: ACTIVE, within_s: 30}\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
    "scale_open_admission": scaling_scenario(
        "scale_open_admission",
        "Nobody can close a victim at the gateway; it is out for a moment, as health does not reach it, and idle.",
        steps=OUT_2
        + """
- at_s: 6.5
  do: request_lost
  target: {link: {from: scale-chat-0, to: gateway-chat-0}}
  with: {method: close_admission}
  for_s: 20
- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 3}}
- at_s: 12
  do: connect_timeout
  target: {link: {from: health-chat-0, to: chat-1}}
  for_s: 5
- at_s: 12
  do: delayed_delivery
  target: {link: {from: scale-chat-0, to: manager-chat-0}}
  with: {method: reconcile, count: 1, delay_s: 6}
"""
        + reconcile(12).replace("every_s: 0.5", "every_s: 0.1"),
        for_s=36,
        api="call_timeout_s: 0.2",
        acceptance=ENDS_CLEAN,
    ),
    "scale_dead_candidate": scaling_scenario(
        "scale_dead_candidate",
        "A candidate is not ready in time, its group goes late, and somebody has everything recovered that is dead.",
        steps="\n- {at_s: 0.5, do: removal_fails, with: {late_s: 9}, for_s: 12}\n"
        "- {at_s: 1, do: scale_out, with: {num_replicas: 2}}\n"
        "- {at_s: 8, do: reconcile, with: {direction: scale_out, every_s: 1, within_s: 30}}",
        for_s=20,
        lifecycle="init_timeout_s: 0.5, removal_timeout_s: 2",
        service=_manager("HasTheDeadRecovered"),
        acceptance=ENDS_CLEAN,
    ),
    "scale_retired": scaling_scenario(
        "scale_retired",
        "Out to two and back to one, and somebody has everything recovered that is dead.",
        steps=OUT_2 + "\n- {at_s: 7, do: scale_in, with: {num_replicas: 1, timeout_s: 30}}",
        for_s=18,
        service=_manager("HasTheDeadRecovered"),
        acceptance="\n- reached: {state: COMPLETED, within_s: 60}\n",
    ),
}
