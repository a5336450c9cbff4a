"""What the lines of a published training run should say (scaling_acceptance.md 5; M42 to M45)."""

from __future__ import annotations

from typing import Any

from analysis.checks.foreign_rules import UNKNOWN, Rule, Stated, nth
from analysis.checks.foreign_view import Facts


def _times(facts: Facts, *what: str) -> list[float]:
    return sorted(at for one in what for at in facts.progress.get(one, {}).values())


def _progress(when: str) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        """Progress before out was asked for, between its end and the asking for in, or after the end of in (M43)."""
        times, out, in_ = (
            _times(facts, "step", "rollout", "step_end"),
            nth(facts, "scale_out"),
            nth(facts, "scale_in"),
        )
        if not times or out is None or in_ is None or out.ended_s is None or in_.ended_s is None:
            return UNKNOWN
        begin, end = {
            "before": (float("-inf"), out.asked_s),
            "between": (out.ended_s, in_.asked_s),
            "after": (in_.ended_s, float("inf")),
        }[when]
        return any(begin <= at <= end for at in times)

    return rule


def _rollouts(facts: Facts, _: Stated) -> Any:
    found = facts.progress.get("rollout", {})
    return len(found) if found else UNKNOWN


def _all_rollouts(facts: Facts, stated: Stated) -> Any:
    found, expected = facts.progress.get("rollout", {}), stated.get("num_rollout_expected")
    if not found or isinstance(expected, bool) or not isinstance(expected, int):
        return UNKNOWN
    return sorted(found, key=int) == [str(index) for index in range(expected)]


def _finished(facts: Facts, _: Stated) -> Any:
    in_, ends = nth(facts, "scale_in"), facts.progress.get("finished", {})
    return (
        UNKNOWN
        if in_ is None or in_.ended_s is None or not facts.progress
        else any(at > in_.ended_s for at in ends.values())
    )


def longest_silence(facts: Facts) -> tuple[float, str] | None:
    """The longest time without progress, both edges included: from the first look at the service to the end (M45)."""
    times = _times(facts, "step", "rollout", "step_end", "finished")
    if not times or not facts.listed:
        return None
    begin, end = facts.listed[0][0], max(facts.last_s, times[-1])
    marks = [min(begin, times[0]), *times, end]
    gaps = [(b - a, a) for a, b in zip(marks, marks[1:], strict=False)]
    gap, at = max(gaps)
    where = (
        "before the first"
        if at == marks[0] and at < times[0]
        else "after the last"
        if at == times[-1]
        else "between two"
    )
    return gap, where


def _no_stall(facts: Facts, _: Stated) -> Any:
    found = longest_silence(facts)
    return UNKNOWN if found is None else found[0] <= 120


def _no_error_lines(facts: Facts, _: Stated) -> Any:
    count = facts.notes.get("reanalysis_non_benign_error_lines", {}).get("value")
    return UNKNOWN if not isinstance(count, int) or isinstance(count, bool) else count == 0


RULES: dict[str, Rule] = {
    "train_events_before_scaling": _progress("before"),
    "train_events_between_operations": _progress("between"),
    "train_events_after_scale_in": _progress("after"),
    "no_train_stall_over_120s": _no_stall,
    "zero_errors_whole_run": _no_error_lines,
    "training_finished_after_scale_in": _finished,
    "rollout_count": _rollouts,
    "all_rollouts_landed": _all_rollouts,
}
