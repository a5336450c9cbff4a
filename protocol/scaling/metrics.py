"""What an autoscaler knows of its replicas: pages of Prometheus text, read field by field, and frames made of them.

Source: scaling.md 6.2. A field that was not observed is absent, which is another thing than 0: a replica that answers
and misses a critical field is *unknown*, and its other fields still count (M34). A percentile is taken of what was
measured within a window, and not since the start of the process (hazard H7).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from protocol.messages import message
from protocol.prometheus import as_float, families

GAUGES: Final[tuple[str, ...]] = (
    "token_usage", "num_queue_reqs", "num_running_reqs", "gen_throughput", "max_total_num_tokens", "num_used_tokens",
    "num_prefill_prealloc_queue_reqs", "num_prefill_inflight_queue_reqs", "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
)  # fmt: skip
CRITICAL: Final[tuple[str, ...]] = ("token_usage", "num_queue_reqs", "gen_throughput")
"""Without these a replica is unknown: nobody may be removed on its account."""
HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "queue_time_p95": ("queue_time_seconds",),
    "ttft_p95": ("time_to_first_token_seconds",),
    "itl_p95": ("inter_token_latency_seconds", "time_per_output_token_seconds"),  # the latter before SGLang 0.4.7
    "e2e_latency_p95": ("e2e_request_latency_seconds",),
}
FIELDS: Final[tuple[str, ...]] = (*GAUGES, *HISTOGRAMS)
_PREFIXES = ("sglang:", "sglang_")
_MOST = 1e15
"""Nothing that a replica shows is larger. What is was not observed: sums and products of such values need be no numbers
any more, and an answer with Infinity in it is no JSON."""
_FRAMES_FOR_VARIANCE = 10
_FRAMES_AT_LEAST = 3


@message
class Reading:
    """One field of one replica. ``samples``: 1 for a gauge, observations in the window for a percentile."""

    value: float
    observed_at: float
    samples: int
    overflow: bool = False
    """The percentile is beyond the largest finite bound, which ``value`` is."""


@dataclasses.dataclass(slots=True)
class Page:
    """One page of metrics: gauges, and histograms as (upper bound, count up to it) in order, +Inf last."""

    gauges: dict[str, float]
    histograms: dict[str, tuple[tuple[float, float], ...]]


def read_page(text: str) -> Page:
    """Read a page of Prometheus text.

    Label sets are added up, but for ``token_usage``, which is their mean. A value that is NaN, negative, or larger than
    any that can be was not observed.

    Raises:
        ValueError: it is no Prometheus text.
    """
    gauges: dict[str, list[float]] = {}
    buckets: dict[str, dict[float, float]] = {}
    broken: set[str] = set()
    known = {alias: field for field, aliases in HISTOGRAMS.items() for alias in aliases}
    for family in families(text):
        for sample in family.samples:
            name = _bare(sample.name)
            if name in GAUGES:
                gauges.setdefault(name, []).append(sample.value)
            elif name.endswith("_bucket") and (field := known.get(name.removesuffix("_bucket"))) is not None:
                bound = float(sample.labels.get("le", "nan"))
                if not (_sound(bound) or bound == math.inf) or not _sound(sample.value):
                    broken.add(field)
                    continue
                counts = buckets.setdefault(field, {})
                counts[bound] = counts.get(bound, 0.0) + sample.value
    found = {
        name: sum(values) / (len(values) if name == "token_usage" else 1)
        for name, values in gauges.items()
        if all(_sound(value) for value in values)
    }
    whole = {field: tuple(sorted(counts.items())) for field, counts in buckets.items() if field not in broken}
    return Page(found, {field: counts for field, counts in whole.items() if _is_cumulative(counts)})


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return ""


def _sound(value: float) -> bool:
    return 0 <= as_float(value) <= _MOST


def _is_cumulative(counts: Sequence[tuple[float, float]]) -> bool:
    """Whether it is a histogram: bounds up to +Inf, counts that never fall."""
    values = [count for _, count in counts]
    return bool(counts) and math.isinf(counts[-1][0]) and values == sorted(values)


def percentile(buckets: Sequence[tuple[float, float]], q: float) -> tuple[float, bool]:
    """A quantile of a histogram, linear inside of a bucket, and whether it lies beyond the largest finite bound.

    Args:
        buckets: (upper bound, count up to it), +Inf last.
        q: in (0, 1].

    Returns:
        The value and the overflow flag; (0, False) of a histogram without samples, and then it is no evidence.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return 0.0, False
    rank = q * total
    index = bisect.bisect_left([count for _, count in buckets], rank)
    bound, count = buckets[index]
    lower, below = buckets[index - 1] if index else (0.0, 0.0)
    if math.isinf(bound):
        return (lower if index else 0.0), True
    return lower + (bound - lower) * (rank - below) / (count - below), False


class HistogramWindow:
    """What a cumulative histogram has grown by within a window, over restarts of its process too.

    Args:
        window_s: how long an observation counts.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._last: tuple[tuple[float, float], ...] | None = None
        self._grown: deque[tuple[float, tuple[tuple[float, float], ...]]] = deque()

    def add(self, at_s: float, buckets: tuple[tuple[float, float], ...]) -> None:
        """Take a page's histogram in. The first one is where counting begins: what was before is of unknown age.

        Counts that fall, or other bounds, mean that the process has begun anew: all it shows is new then.
        """
        last, self._last = self._last, buckets
        if last is not None:
            same = [bound for bound, _ in last] == [bound for bound, _ in buckets]
            if same and all(now >= then for (_, now), (_, then) in zip(buckets, last, strict=True)):
                grown = tuple((b, now - then) for (b, now), (_, then) in zip(buckets, last, strict=True))
                # Counts of a page are not read at one instant, so a difference may fall where the counts do not.
                grown = _rising(grown)
            else:
                grown = buckets
                if not same:
                    self._grown.clear()
            self._grown.append((at_s, grown))
        self._forget(at_s)

    def p95(self, at_s: float) -> Reading | None:
        """The 95th percentile of the window, or None where nothing was measured."""
        self._forget(at_s)
        if not self._grown:
            return None
        sums = [total_of(counts) for counts in zip(*([n for _, n in grown] for _, grown in self._grown), strict=True)]
        buckets = tuple(zip((bound for bound, _ in self._grown[-1][1]), sums, strict=True))
        samples = int(buckets[-1][1])
        if samples <= 0:
            return None
        value, overflow = percentile(buckets, 0.95)
        return Reading(value, self._grown[-1][0], samples, overflow)

    def _forget(self, at_s: float) -> None:
        while self._grown and self._grown[0][0] <= at_s - self._window_s:
            self._grown.popleft()


def _rising(counts: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    most = 0.0
    risen = []
    for bound, count in counts:
        most = max(most, count)
        risen.append((bound, most))
    return tuple(risen)


@dataclasses.dataclass(frozen=True, slots=True)
class FrameBody:
    """All replicas of a service at one moment. A value that nobody reported is null."""

    num_engines: int
    """Replicas that should report, whether or not they did."""
    total_queue_reqs: float | None
    total_running_reqs: float | None
    avg_token_usage: float | None
    total_throughput: float | None
    max_queue_time_p95: float | None
    max_ttft_p95: float | None
    max_itl_p95: float | None
    throughput_variance: float | None
    """None before there are three frames."""
    max_queue_time_p95_overflow: bool
    max_ttft_p95_overflow: bool
    max_itl_p95_overflow: bool
    is_empty: bool
    coverage: float
    """Replicas that answered, by those that should."""
    field_coverage: Mapping[str, float]
    unknown_engines: tuple[str, ...]
    timestamp: float
    """Seconds since the epoch, for people."""

    def snapshot(self) -> dict[str, Any]:
        """As JSON, as in the history (scaling.md 6.6)."""
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(FrameBody)}
        return {**shown, "field_coverage": dict(self.field_coverage), "unknown_engines": list(self.unknown_engines)}


@dataclasses.dataclass(frozen=True, slots=True)
class Frame(FrameBody):
    """What an autoscaler decides on: no condition holds of a value that is None."""

    taken_s: float
    """Of the loop's clock, which nobody else can read."""


def total_of(values: Iterable[float]) -> float:
    """The sum, correctly rounded: that of ``sum`` differs between Python 3.11 and 3.12, and with it digests would."""
    try:
        return math.fsum(values)
    except OverflowError:  # a page may say 1e308 twice
        return math.inf


def empty_frame(engines: Iterable[str], at_s: float, wall_s: float) -> Frame:
    """A frame in which nobody reported."""
    return aggregate(dict.fromkeys(engines), (), at_s, wall_s)


def aggregate(
    replicas: Mapping[str, Mapping[str, Reading] | None], throughputs: Sequence[float], at_s: float, wall_s: float
) -> Frame:
    """Make a frame.

    Args:
        replicas: name to its fields; None: it did not answer.
        throughputs: totals of the frames before, oldest first, without those in which it was not observed.
        at_s: of the loop's clock.
        wall_s: seconds since the epoch.
    """
    count = len(replicas)
    answered = {name: fields for name, fields in replicas.items() if fields is not None}
    by_field = {field: [fields[field] for fields in answered.values() if field in fields] for field in FIELDS}

    def total(field: str) -> float | None:
        return total_of(one.value for one in by_field[field]) if by_field[field] else None

    def worst(field: str) -> float | None:
        return max((one.value for one in by_field[field]), default=None)

    def beyond(field: str) -> bool:
        return any(one.overflow for one in by_field[field])

    usage, throughput = total("token_usage"), total("gen_throughput")
    return Frame(
        num_engines=count,
        total_queue_reqs=total("num_queue_reqs"),
        total_running_reqs=total("num_running_reqs"),
        avg_token_usage=None if usage is None else usage / len(by_field["token_usage"]),
        total_throughput=throughput,
        max_queue_time_p95=worst("queue_time_p95"),
        max_ttft_p95=worst("ttft_p95"),
        max_itl_p95=worst("itl_p95"),
        throughput_variance=None if throughput is None else variance((*throughputs, throughput)),
        max_queue_time_p95_overflow=beyond("queue_time_p95"),
        max_ttft_p95_overflow=beyond("ttft_p95"),
        max_itl_p95_overflow=beyond("itl_p95"),
        is_empty=not any(answered.values()),
        coverage=len(answered) / count if count else 0.0,
        field_coverage={field: len(found) / count if count else 0.0 for field, found in by_field.items()},
        unknown_engines=tuple(
            name for name, fields in replicas.items() if fields is None or any(c not in fields for c in CRITICAL)
        ),
        timestamp=wall_s,
        taken_s=at_s,
    )


def variance(throughputs: Sequence[float]) -> float | None:
    """Largest deviation from the mean, by the mean, of the last ten frames; None of fewer than three."""
    last = throughputs[-_FRAMES_FOR_VARIANCE:]
    if len(last) < _FRAMES_AT_LEAST:
        return None
    mean = total_of(last) / len(last)
    return max(abs(one - mean) for one in last) / mean if mean else 0.0
