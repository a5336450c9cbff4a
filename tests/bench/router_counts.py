"""What became of the requests of one run through a gateway or router: counts from records, nothing else.

All instants are seconds of the machine's monotonic clock, which the client and the engines share.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

SLOW_FACTOR = 2.0
"""A request is slowed when it took longer than this many times the p99 of the quiet phase of the same run."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """One request as the client saw it. ``ended`` is infinite when no answer came while the run lasted."""

    rid: str
    sent: float
    ended: float
    ok: bool
    why: str = ""

    @property
    def latency(self) -> float:
        return self.ended - self.sent


@dataclasses.dataclass(frozen=True)
class Seen:
    """One request as one engine process saw it. ``status`` is None when the process did not live to answer."""

    engine: str
    rid: str
    begun: float
    status: int | None = None


@dataclasses.dataclass(frozen=True)
class Marks:
    """When the script did what. Engines are processes: one that is started again is another one.

    A request is of the phase in which it was sent: quiet [began, killed), kill [killed, listening), restart
    [listening, stopped), stop [stopped, continued), replace [continued, ended).
    """

    began: float
    killed: float
    restarted: str
    """The process that came back at the dead one's address."""
    listening: float
    """When it took connections."""
    stopped: float
    stopped_engine: str
    continued: float
    told: float
    """When the front had been told of the replacement and to forget the engine that it replaces."""
    new: str
    removed: str
    ended: float
    """When the last request was sent."""


Figures = dict[str, float]


def counts(sent: Sequence[Sent], seen: Sequence[Seen], marks: Marks) -> Figures:
    """Figures of one run. A time that had not come when the load ended is ``inf``.

    Raises:
        ValueError: the records do not fit each other, so that nothing can be said.
    """
    by_rid = {one.rid: one for one in sent}
    if len(by_rid) < len(sent):
        raise ValueError("two requests of the client have one id")
    if strangers := {one.rid for one in seen} - set(by_rid):
        raise ValueError(f"{len(strangers)} requests at the engines are not the client's, such as {min(strangers)}")
    begun: dict[str, int] = {}
    done: dict[str, int] = {}
    for one in seen:
        begun[one.rid] = begun.get(one.rid, 0) + 1
        done[one.rid] = done.get(one.rid, 0) + (one.status == 200)
    if unseen := [one.rid for one in sent if one.ok and not done.get(one.rid)]:
        raise ValueError(f"{len(unseen)} requests were answered, but no engine did them, such as {unseen[0]}")
    quiet = [one.latency for one in sent if marks.began <= one.sent < marks.killed and one.ok]
    if not quiet:
        raise ValueError("no request of the quiet phase was answered")
    slow = SLOW_FACTOR * quantile(quiet, 0.99)
    to_stopped = [
        by_rid[one.rid].sent
        for one in seen
        if one.engine == marks.stopped_engine
        and one.begun >= marks.continued
        and marks.stopped <= by_rid[one.rid].sent < marks.continued
    ]
    return {
        "requests": len(sent),
        "lost": sum(not one.ok for one in sent),
        **{f"lost, {name}": sum(not one.ok for one in part) for name, part in _phases(sent, marks)},
        "begun twice": sum(number > 1 for number in begun.values()),
        "done twice": sum(number > 1 for number in done.values()),
        "to the removed": sum(one.engine == marks.removed and one.begun > marks.told for one in seen),
        "to the stopped": len(to_stopped),
        "slowed, kill": _slowed(sent, slow, marks.killed, marks.listening),
        "slowed, stop": _slowed(sent, slow, marks.stopped, marks.continued),
        "until none fails after a kill": _last(
            (one.sent for one in sent if not one.ok), marks.killed, marks.listening
        ),
        "until none is slow after a kill": _last(
            (one.sent for one in sent if not one.ok or one.latency > slow), marks.killed, marks.listening
        ),
        "until routed around a stop": _last(to_stopped, marks.stopped, marks.continued),
        "readmit after restart": _first(
            (one.begun for one in seen if one.engine == marks.restarted), marks.listening
        ),
        "readmit after continue": _first(
            (one.begun for one in seen if one.engine == marks.stopped_engine
             and by_rid[one.rid].sent >= marks.continued), marks.continued
        ),
        "admit a new one": _first((one.begun for one in seen if one.engine == marks.new), marks.told),
        "quiet p50": quantile(quiet, 0.5),
        "quiet p99": quantile(quiet, 0.99),
        **{f"worst, {name}": max((one.latency for one in part), default=0.0) for name, part in _phases(sent, marks)},
    }  # fmt: skip


def _phases(sent: Sequence[Sent], marks: Marks) -> list[tuple[str, list[Sent]]]:
    edges = (
        ("quiet", marks.began), ("kill", marks.killed), ("restart", marks.listening), ("stop", marks.stopped),
        ("replace", marks.continued),
    )  # fmt: skip
    ends = [begins for _, begins in edges[1:]] + [math.inf]
    return [
        (name, [one for one in sent if begins <= one.sent < end])
        for (name, begins), end in zip(edges, ends, strict=True)
    ]


def _slowed(sent: Iterable[Sent], slow: float, begins: float, ends: float) -> int:
    return sum(begins <= one.sent < ends and one.latency > slow for one in sent)


def _last(instants: Iterable[float], begins: float, ends: float) -> float:
    """Seconds from ``begins`` to the last instant before ``ends``; 0 where there is none."""
    return max((at - begins for at in instants if begins <= at < ends), default=0.0)


def _first(instants: Iterable[float], begins: float) -> float:
    """Seconds from ``begins`` to the first instant; infinite where there is none, never below 0."""
    return max(0.0, min(instants, default=math.inf) - begins)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of the values do not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest) of repeats; of an even number the median is the higher of the two in the middle.

    Not the mean of those two: it would be infinite where only one of them is.
    """
    return statistics.median_high(values), min(values), max(values)
