"""What each line of a published verdict should say, from what the run's recorders kept (scaling_acceptance.md 2 to 6).

A line whose truth the evidence does not hold is ``UNKNOWN``: it is neither borne out nor contradicted. Sources of the
wrong readings that are told apart here: scaling_wrong_variants.md, M43 to M54.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from analysis.checks import foreign_autoscaler, foreign_training
from analysis.checks.foreign_rules import UNKNOWN, Rule, Stated, nth, returned
from analysis.checks.foreign_view import Facts


def truth(key: str, facts: Facts, stated: Stated) -> Any:
    """What a line should say; ``UNKNOWN`` where nobody can tell."""
    rule = _RULES.get(key)
    return UNKNOWN if rule is None else rule(facts, stated)


def agrees(stated: Any, found: Any) -> bool:
    """Whether a line says what was found. Numbers may be rounded; a bool is no number."""
    if isinstance(stated, bool) or isinstance(found, bool):
        return type(stated) is type(found) and stated == found
    if isinstance(stated, (int, float)) and isinstance(found, (int, float)):
        if not isinstance(found, float):
            return stated == found
        return abs(stated - found) <= (max(0.051, 0.0005 * abs(found)) if abs(found) >= 1 else 0.0006)
    return bool(stated == found)


# --- operations
def _ended_as(direction: str, state: str, index: int = 0) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        one = nth(facts, direction, index)
        return UNKNOWN if one is None else one.state == state

    return rule


def _chain(direction: str) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        one = nth(facts, direction)
        return UNKNOWN if one is None else one.states

    return rule


def _between(facts: Facts) -> set[str] | None:
    """The engines that were listed when the first scale-out was over and no scale-in had begun."""
    out, in_ = nth(facts, "scale_out"), nth(facts, "scale_in")
    if out is None or out.ended_s is None:
        return None
    end_s = in_.asked_s if in_ is not None else float("inf")
    found = [set(names) for at_s, names, _ in facts.listed if out.ended_s <= at_s <= end_s]
    return found[-1] if found else None


def _added_one(facts: Facts, _: Stated) -> Any:
    there = _between(facts)
    return UNKNOWN if there is None or not facts.initial else len(there - set(facts.initial)) == 1


def _survived(when: str) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        there = _between(facts) if when == "out" else _after_in(facts)
        return UNKNOWN if there is None or not facts.initial else set(facts.initial) <= there

    return rule


def _after_in(facts: Facts) -> set[str] | None:
    ins = [one for one in facts.all_of("scale_in") if one.ended_s is not None]
    if not ins or ins[-1].ended_s is None:
        return None
    found = [set(names) for at_s, names, _ in facts.listed if at_s >= ins[-1].ended_s]
    return found[-1] if found else None


def _only_initial(facts: Facts, _: Stated) -> Any:
    there = _after_in(facts)
    return UNKNOWN if there is None or not facts.initial else there == set(facts.initial)


def _elastic_served(facts: Facts, _: Stated) -> Any:
    elastic = facts.elastic() or {name for phase in facts.served.values() for name in phase} - set(facts.initial)
    counts = [latest for phase in facts.served.values() for name, (_, latest) in phase.items() if name in elastic]
    return UNKNOWN if not counts else max(counts) > 0


def _same_scores(later: str) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        first, second = facts.scores.get("phase0"), facts.scores.get(later)
        return UNKNOWN if not first or not second else first == second

    return rule


# --- load and resources
def _no_failures(facts: Facts, _: Stated) -> Any:
    if facts.loads:
        return all(sent > 0 and not failed for sent, failed in facts.loads)
    return UNKNOWN if not facts.sent else not facts.failed


def _sent(facts: Facts, _: Stated) -> Any:
    return facts.loads[-1][0] if facts.loads else facts.sent if facts.sent else UNKNOWN


def _both_operations_loaded(facts: Facts, stated: Stated) -> Any:
    numbers = [stated.get(f"load_requests_during_scale_{way}") for way in ("out", "in")]
    known = [one for one in numbers if isinstance(one, int) and not isinstance(one, bool)]
    return UNKNOWN if len(known) < 2 else all(one > 0 for one in known)


def _free(when: Iterable[str]) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        found = [one.data["free_gpus"] for one in facts.resources if one.data["when"] in when]
        known = [one for one in found if one is not None]
        return known[-1] if known else UNKNOWN

    return rule


# --- failure injection
def _calls_ok(tag: str, replicas: str = "any") -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        calls, reasons = facts.calls.get(tag, []), facts.reasons.get(tag, [])
        if len(calls) < 2:
            return UNKNOWN
        on = {replica for _, replica in calls}
        if replicas == "both":
            return len(on) == 2 and "" not in on
        if replicas == "initial":
            return all(done for done, _ in calls) and on <= set(facts.initial)
        return all(done for done, _ in calls) and all(reason == "length" for reason in reasons)

    return rule


def _dirty(facts: Facts, _: Stated) -> Any:
    one = nth(facts, "scale_in", 1)
    return UNKNOWN if one is None else one.state == "FAILED" and one.dirty_s is not None


def _held(facts: Facts, _: Stated) -> Any:
    if "s2_mutex_check" not in facts.notes:
        return UNKNOWN
    return any(code == "CONFLICT" and dirty for _, route, _, code, dirty in facts.refusals if route == "scale_out")


def _cleared(facts: Facts, _: Stated) -> Any:
    one = nth(facts, "scale_in", 1)
    if one is None or one.dirty_s is None:
        return UNKNOWN if one is None else False
    return one.cleaned_s is not None and one.cleaned_s > one.dirty_s


def _park_s(facts: Facts, _: Stated) -> Any:
    one = nth(facts, "scale_in", 1)
    return UNKNOWN if one is None or one.cleaned_s is None else float(one.cleaned_s - one.asked_s)


def _after_crash(facts: Facts, _: Stated) -> Any:
    one = nth(facts, "scale_in", 2)
    return UNKNOWN if one is None else facts.killed > 0 and one.state == "COMPLETED"


def _initial_answers(facts: Facts, _: Stated) -> Any:
    on = {replica for _, replica in facts.calls.get("s3", [])}
    return UNKNOWN if not on or not facts.initial else bool(on & set(facts.initial))


# --- consistency
def _replies(facts: Facts, _: Stated) -> Any:
    arms = [
        payload.get("replies")
        for name, payload in facts.notes.items()
        if name.startswith("arm_") and name.endswith("_done")
    ]
    return UNKNOWN if len(arms) < 2 or not all(isinstance(one, int) for one in arms) else sum(arms)


def _flip_rate(facts: Facts, stated: Stated) -> Any:
    cases, unstable = stated.get("cases"), stated.get("official_sampling_unstable_cases")
    if isinstance(cases, bool) or not isinstance(cases, int) or cases <= 0 or not isinstance(unstable, list):
        return UNKNOWN
    return float(len(unstable) / cases)


def _empty(key: str) -> Rule:
    def rule(_: Facts, stated: Stated) -> Any:
        return not stated[key] if isinstance(stated.get(key), list) else UNKNOWN

    return rule


def _none_cut(_: Facts, stated: Stated) -> Any:
    count = stated.get("truncated_count")
    return UNKNOWN if isinstance(count, bool) or not isinstance(count, int) else count == 0


_RULES: dict[str, Rule] = {
    "scale_out_active": _ended_as("scale_out", "ACTIVE"),
    "scale_in_completed": _ended_as("scale_in", "COMPLETED"),
    "scale_out_transition_chain": _chain("scale_out"),
    "scale_in_transition_chain": _chain("scale_in"),
    "scale_out_added_exactly_one_engine": _added_one,
    "scale_out_initial_survived": _survived("out"),
    "scale_in_initial_survived": _survived("in"),
    "scale_in_removed_exactly_the_elastic_engine": _only_initial,
    "scale_in_removed_exactly_elastic": _only_initial,
    "elastic_engine_served_traffic": _elastic_served,
    "scoring_identical_out": _same_scores("phase1"),
    "scoring_identical_in": _same_scores("phase2"),
    "load_zero_failures": _no_failures,
    "load_total_requests": _sent,
    "load_served_during_both_ops": _both_operations_loaded,
    "gpu_resources_returned": returned,
    "baseline_free_gpus": _free(("baseline",)),
    "free_gpus_after_scale_in": _free(("final",)),
    "s1_scale_in_completed": _ended_as("scale_in", "COMPLETED", 0),
    "s1_both_long_requests_ok": _calls_ok("s1"),
    "s1_requests_served_by_both_engines": _calls_ok("s1", "both"),
    "s2_deadline_abort_failed_dirty": _dirty,
    "s2_mutex_held_while_dirty": _held,
    "s2_reconcile_cleared_park": _cleared,
    "s2_reconcile_terminal_status": _ended_as("scale_in", "FAILED", 1),
    "s2_abort_to_reconcile_park_s": _park_s,
    "s2_long_requests_ok": _calls_ok("s2"),
    "s3_scale_in_completed_after_crash": _after_crash,
    "s3_all_requests_survived_on_initial_engine": _calls_ok("s3", "initial"),
    "s3_initial_engine_survived": _initial_answers,
    "A6_zero_load_failures": _no_failures,
    "A6_load_total": _sent,
    "elastic_engine_served_rewards": _elastic_served,
    "final_capacity_is_initial": _only_initial,
    "replies_total": _replies,
    "official_sampling_instability_rate": _flip_rate,
    "attribution_covers_both_engines": _empty("attribution_failures"),
    "parse_gate_independent": _empty("parse_gate_failures"),
    "greedy_verdicts_identical_across_engines": _empty("greedy_mismatches"),
    "no_truncated_replies": _none_cut,
    **foreign_autoscaler.RULES,
    **foreign_training.RULES,
}
"""Every line of a verdict that can be told true from false, and how."""
