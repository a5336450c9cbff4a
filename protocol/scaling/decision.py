"""What an autoscaler decides, as pure functions of what it knows.

Source: scaling.md 6.3; the order of the steps is part of the contract.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final, Literal

from protocol.messages import message
from protocol.scaling.contract import Direction
from protocol.scaling.metrics import Frame
from protocol.scaling.policy import AutoscalerConfig, Rules

OUT_CONDITIONS: Final = ("token_usage_high", "queue_backlog", "queue_latency_high", "ttft_high")
IN_CONDITIONS: Final = ("token_usage_low", "no_queue", "throughput_stable")
Action = Literal["none", "scale_out", "scale_in"]


@message
class Streak:
    """How long a condition has held without a break. ``elapsed_s``: None while it does not hold."""

    elapsed_s: float | None = None
    at_s: float = 0.0

    def sustained(self, duration_s: float) -> bool:
        """Whether it has held for so long."""
        return self.elapsed_s is not None and self.elapsed_s >= duration_s


def advance(streak: Streak, now_s: float, holds: bool, longest_gap_s: float) -> Streak:
    """The streak one frame later.

    The first frame in which the condition holds starts it at 0; a gap that is longer than ``longest_gap_s``, or goes
    back in time, starts it anew: nobody knows what was in between (M37).

    Args:
        streak: as it was.
        now_s: time of the frame, of a clock that does not go back.
        holds: the condition holds, in a frame that is valid for it.
        longest_gap_s: two evaluation intervals.
    """
    if not holds:
        return Streak(None, now_s)
    gap = now_s - streak.at_s
    if streak.elapsed_s is None or gap < 0 or gap > longest_gap_s:
        return Streak(0.0, now_s)
    return Streak(streak.elapsed_s + gap, now_s)


@message
class Condition:
    """One condition in one frame. ``value``: None where it was not observed; then it does not hold."""

    value: float | None
    threshold: float
    holds: bool


@message
class Choice:
    """A decision. ``delta``: replicas to add or remove, 0 for none."""

    action: Action
    delta: int
    reason: str
    triggered: tuple[str, ...] = ()
    confidence: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is made in, beside the frame. Times are of the loop's clock."""

    now_s: float
    current: int
    """Replicas observed, and those that open scale-outs will add."""
    last_action: Direction | None
    last_action_s: float
    open_request: str | None
    """A request that is not terminal, or not known to be clean; None: there is none."""
    refusal: str = ""
    """Why nothing may be decided on this service at all."""


def conditions(frame: Frame, rules: Rules) -> dict[str, Condition]:
    """Every condition of a frame, by name."""
    out, in_ = rules.scale_out, rules.scale_in
    depth = frame.num_engines * out.queue_depth_per_engine
    return {
        "token_usage_high": _above(frame.avg_token_usage, out.token_usage_threshold),
        "queue_backlog": _above(frame.total_queue_reqs, depth),
        "queue_latency_high": _above(
            frame.max_queue_time_p95, out.queue_time_p95_threshold, frame.max_queue_time_p95_overflow
        ),
        "ttft_high": _above(frame.max_ttft_p95, out.ttft_p95_threshold, frame.max_ttft_p95_overflow),
        "token_usage_low": _below(frame.avg_token_usage, in_.token_usage_threshold),
        "no_queue": Condition(
            frame.total_queue_reqs,
            in_.queue_depth_threshold,
            frame.total_queue_reqs is not None and frame.total_queue_reqs <= in_.queue_depth_threshold,
        ),
        "throughput_stable": _below(frame.throughput_variance, in_.throughput_variance_threshold),
    }


def _above(value: float | None, threshold: float, overflow: bool = False) -> Condition:
    return Condition(value, threshold, value is not None and (value > threshold or overflow))


def _below(value: float | None, threshold: float) -> Condition:
    return Condition(value, threshold, value is not None and value < threshold)


def advance_all(
    streaks: Mapping[str, Streak], frame: Frame, rules: Rules, config: AutoscalerConfig, now_s: float
) -> dict[str, Streak]:
    """Every streak one frame later. A frame that is not valid for a direction ends all of that direction.

    Args:
        streaks: by condition; one that is missing does not hold yet.
        frame: the new one.
        rules: thresholds of this service.
        config: coverage that makes a frame valid, and the interval beyond which a gap breaks a streak.
        now_s: of the loop's clock.
    """
    found = conditions(frame, rules)
    valid_out = not frame.is_empty and frame.coverage >= config.min_coverage_scale_out
    valid_in = not frame.is_empty and frame.coverage >= config.min_coverage_scale_in and not frame.unknown_engines
    gap_s = 2 * config.evaluation_interval_secs
    return {
        name: advance(streaks.get(name, Streak()), now_s, found[name].holds and valid, gap_s)
        for names, valid in ((OUT_CONDITIONS, valid_out), (IN_CONDITIONS, valid_in))
        for name in names
    }


def decide(
    config: AutoscalerConfig, rules: Rules, frame: Frame, streaks: Mapping[str, Streak], situation: Situation
) -> Choice:
    """Decide on one service.

    Args:
        config: what holds for all services.
        rules: what holds for this one.
        frame: the latest.
        streaks: advanced to that frame already.
        situation: bounds of time and of what is open.
    """
    if not config.enabled:
        return _none("disabled")
    if situation.refusal:
        return _none(situation.refusal)
    if frame.is_empty:
        return _none("no replica reported")
    left_s = _cooldown_s(config, situation.last_action) - (situation.now_s - situation.last_action_s)
    if situation.last_action is not None and left_s > 0:
        return _none(f"cooldown after {situation.last_action}: {left_s:.1f} s")
    if situation.open_request is not None:
        return _none(f"{situation.open_request} is open")
    if situation.current < rules.max_engines and frame.coverage >= config.min_coverage_scale_out:
        duration_s = rules.scale_out.condition_duration_secs
        triggered = tuple(name for name in OUT_CONDITIONS if streaks[name].sustained(duration_s))
        if triggered:
            delta = out_delta(frame, rules, situation.current)
            return Choice("scale_out", delta, f"Conditions met: {', '.join(triggered)}", triggered, 0.8)
    if situation.current > rules.min_engines and frame.coverage >= config.min_coverage_scale_in:
        return _decide_in(rules, frame, streaks, situation.current)
    return _none("nothing to do")


def _decide_in(rules: Rules, frame: Frame, streaks: Mapping[str, Streak], current: int) -> Choice:
    if frame.unknown_engines:
        return _none(f"no scale-in: nothing is known of {', '.join(frame.unknown_engines)}")
    duration_s = rules.scale_in.condition_duration_secs
    if not all(streaks[name].sustained(duration_s) for name in IN_CONDITIONS):
        return _none("nothing to do")
    delta = in_delta(frame, rules, current)
    if not delta:
        return _none(f"no scale-in: the replicas that stay would be above {rules.scale_in.projected_usage_max:g}")
    reason = f"All conditions met: {', '.join(IN_CONDITIONS)}"
    return Choice("scale_in", delta, reason, IN_CONDITIONS, 0.6)


def out_delta(frame: Frame, rules: Rules, current: int) -> int:
    """Replicas to add: by how full the caches are, and by how long the queue is."""
    out = rules.scale_out
    usage, queue = frame.avg_token_usage or 0.0, frame.total_queue_reqs or 0.0
    by_usage = 0
    if usage > 0.9:
        by_usage = math.floor((usage - 0.7) / 0.1 + 1e-9)
    elif usage > out.token_usage_threshold:
        by_usage = 1
    by_queue = 0
    excess = queue - current * out.queue_depth_per_engine
    if excess > 0:
        by_queue = max(1, int(excess // (2 * out.queue_depth_per_engine)))
    return min(max(by_usage, by_queue, 1), out.max_delta, rules.max_engines - current)


def in_delta(frame: Frame, rules: Rules, current: int) -> int:
    """Replicas to remove: as many as ``max_delta`` allows (1 by default) with room enough on those that stay."""
    usage, engines = frame.avg_token_usage, frame.num_engines
    most = min(rules.scale_in.max_delta, current - rules.min_engines, engines - 1)
    if usage is None:
        return 0
    fits = (d for d in range(most, 0, -1) if usage * engines / (engines - d) <= rules.scale_in.projected_usage_max)
    return next(fits, 0)


def _cooldown_s(config: AutoscalerConfig, last: Direction | None) -> float:
    return config.scale_in_cooldown_secs if last == "scale_in" else config.scale_out_cooldown_secs


def _none(reason: str) -> Choice:
    return Choice("none", 0, reason)
