"""What the lines A1 to B3 of a published autoscaler run should say (scaling_acceptance.md 4)."""

from __future__ import annotations

from typing import Any

from analysis.checks.foreign_rules import UNKNOWN, Rule, Stated, returned_in
from analysis.checks.foreign_view import Facts
from protocol.evidence import Event

_CONDITIONS = {"token_usage_low", "no_queue", "throughput_stable"}
_IDLE_WITHIN_S = 300.0


def _decided(facts: Facts, action: str, round_: str = "a") -> list[Event]:
    return [one for one in facts.decisions if one.data["action"] == action and one.data["round"] == round_]


def _no_out_in_low(facts: Facts, _: Stated) -> Any:
    high = facts.phases.get("HIGH")  # by the boundaries: the tag LOW names the last phase as well (M52)
    return UNKNOWN if high is None else all(one.t_s >= high for one in _decided(facts, "scale_out"))


def _out_in_high(facts: Facts, _: Stated) -> Any:
    begin, end = facts.phases.get("HIGH"), facts.phases.get("STEADY")
    found = _decided(facts, "scale_out")
    if begin is None or end is None or not facts.decisions:
        return UNKNOWN
    return bool(found) and begin <= found[0].t_s <= end


def _served_in_steady(facts: Facts, _: Stated) -> Any:
    counts = facts.served.get("STEADY", {})
    elastic = {name for name in counts if name not in facts.initial}
    if elastic:
        return any(latest > first for name, (first, latest) in counts.items() if name in elastic)
    note = facts.notes.get("phase_steady_done", {}).get("elastic_served")
    return UNKNOWN if not isinstance(note, int) or isinstance(note, bool) else note > 0


def _in_outside_high(facts: Facts, _: Stated) -> Any:
    begin, end, found = facts.phases.get("HIGH"), facts.phases.get("STEADY"), _decided(facts, "scale_in")
    if begin is None or end is None or not facts.decisions:
        return UNKNOWN
    return bool(found) and not any(begin <= one.t_s < end for one in found)


def _in_completed(facts: Facts, _: Stated) -> Any:
    if not facts.decisions:
        return UNKNOWN
    found = [facts.operations.get(one.data["operation"]) for one in _decided(facts, "scale_in")]
    if facts.listed and set(facts.listed[-1][1]) != set(facts.initial):
        return False
    return bool(found) and all(one is not None and one.state == "COMPLETED" for one in found)


def _screenshots(facts: Facts, _: Stated) -> Any:
    taken = facts.counts.get("tui_screenshot_captured", 0)
    return UNKNOWN if "phase_steady_done" not in facts.notes else taken >= 2


def _flag(name: str, key: str) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        note = facts.notes.get(name)
        return UNKNOWN if note is None or key not in note else note[key] is True

    return rule


def _idle_in(about: str) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        begin = facts.noted_s.get("round_b_scaled_out")
        if begin is None or not facts.decisions:
            return UNKNOWN
        found = [one for one in _decided(facts, "scale_in", "b") if one.t_s >= begin]
        if not found:
            return False
        frame = found[0].data["frame"]
        if about == "running":
            return frame.get("total_running_reqs") == 0
        if about == "conditions":
            return set(found[0].data["conditions"]) >= _CONDITIONS
        return found[0].t_s - begin <= _IDLE_WITHIN_S

    return rule


def _final_one(facts: Facts, _: Stated) -> Any:
    note = facts.notes.get("round_b_done", {}).get("final")
    return UNKNOWN if note is None else note == 1


RULES: dict[str, Rule] = {
    "A1_no_scale_out_in_low": _no_out_in_low,
    "A2_scale_out_decided_in_high": _out_in_high,
    "A3_elastic_served_in_steady": _served_in_steady,
    "A4_scale_in_decided_outside_high": _in_outside_high,
    "A5_scale_in_completed_final_is_initial": _in_completed,
    "A7_resources_returned": returned_in("round_a_resources"),
    "A8_tui_screenshots": _screenshots,
    "B1_manual_scale_out_active": _flag("round_b_scaled_out", "active"),
    "B2_idle_scale_in_within_window": _idle_in("window"),
    "B2_idle_evidence_zero_running": _idle_in("running"),
    "B2_idle_conditions_all_three": _idle_in("conditions"),
    "B3_final_one_initial_survived": _final_one,
    "B3_resources_returned": returned_in("round_b_resources"),
}
