"""The scenarios of autoscalers that are told something in mid-run, and of conditions that break while they build up."""

from __future__ import annotations

from typing import Any

from tests.mutants.autoscaler_scenarios import ACTIVE, DIRTY, SLOW_TO_CLEAN, autoscaler_scenario

_MANY = "{closed_loop: {sessions: 30}}"


def _scenario(name: str, summary: str, **more: Any) -> str:
    return autoscaler_scenario(name, summary, module="tests.mutants.autoscaler_changes", **more)


AUTOSCALER_CHANGE_SCENARIOS: dict[str, str] = {
    "auto_removed_idle": _scenario(
        "auto_removed_idle",
        "A service is removed from a running autoscaler: nobody asks it anything any more, and its session is closed.",
        component="LeavesIdle",
        arrivals="{closed_loop: {sessions: 1}}",
        acceptance="\n- occurs: {event: call.sent, where: {method: engines, target: front-chat}, at_most: 12}\n",
    ),
    "auto_patched_in_post": _scenario(
        "auto_patched_in_post",
        "The configuration changes while a submission is under way that is accepted and answered late.",
        component="IsPatchedWhileItAsks",
        most=4,
        arrivals=_MANY,
        scaler={"scale_out_cooldown_secs": 30},
        high_s=30,
        ends_s=32,
        acceptance="\n- reached: {state: ACTIVE, within_s: 20}\n",
    ),
    "auto_disabled_in_post": _scenario(
        "auto_disabled_in_post",
        "It is disabled while a submission is under way: that one is followed to its end, nothing else is asked for.",
        component="IsDisabledWhileItAsks",
        acceptance="\n- occurs: {event: scale.asked, where: {route: scale_in}, at_most: 0}\n",
    ),
    "auto_leaves_running": _scenario(
        "auto_leaves_running",
        "Somebody wants the service removed while its scale-out is accepted and under way.",
        component="IsToldToLeaveRunning",
        high_s=8,
        ends_s=20,
    ),
    "auto_leaves_dirty": _scenario(
        "auto_leaves_dirty",
        "Somebody wants the service removed while its scale-out has failed and is not cleaned up.",
        component="IsToldToLeaveDirty",
        steps=DIRTY.replace("removal_fails, with: {late_s: 9}", "removal_refused") % 9,
        scaler={"scale_out_cooldown_secs": 40},
        lifecycle=SLOW_TO_CLEAN,
        high_s=8,
        ends_s=30,
    ),
    "auto_refused_to_leave": _scenario(
        "auto_refused_to_leave",
        "Somebody wants the service removed while its scale-out is under way, is refused, and it is scaled as before.",
        component="IsToldToLeave",
        acceptance=ACTIVE + "- reached: {state: COMPLETED, within_s: 40}\n",
    ),
    "auto_hangs_once": _scenario(
        "auto_hangs_once",
        "An evaluation hangs at an answer that comes late, while a condition holds.",
        most=3,
        arrivals=_MANY,
        out={"condition_duration_secs": 5},
        scaler={"scale_out_cooldown_secs": 1},
        steps="""
- at_s: 0
  do: delayed_delivery
  target: {link: {from: autoscaler-chat, to: front-chat}}
  with: {method: status, count: 1, delay_s: 9}
  for_s: 60
""",
        high_s=40,
        ends_s=45,
        acceptance="\n- reached: {state: ACTIVE, nth: 2, within_s: 40}\n",
    ),
    "auto_thin": _scenario(
        "auto_thin",
        "Two of three replicas show no metrics for a moment while a condition builds up.",
        initial=3,
        most=4,
        arrivals="{closed_loop: {sessions: 60}}",
        out={"condition_duration_secs": 6},
        steps="""
- {at_s: 4.2, do: metrics_missing, target: chat-0, for_s: 2.4}
- {at_s: 4.2, do: metrics_missing, target: chat-1, for_s: 2.4}
""",
        high_s=25,
        acceptance="\n- reached: {state: ACTIVE, within_s: 30}\n",
    ),
    "auto_one_blinks": _scenario(
        "auto_one_blinks",
        "One of two idle replicas shows no metrics for a moment while the conditions of a scale-in build up.",
        scaler={"scale_in_cooldown_secs": 6, "scale_out_cooldown_secs": 16},
        in_={"condition_duration_secs": 8},
        steps="\n- {at_s: 20.4, do: metrics_missing, target: newest_replica, for_s: 2.4}\n",
        ends_s=60,
        acceptance=ACTIVE + "- reached: {state: COMPLETED, within_s: 60}\n",
    ),
}
