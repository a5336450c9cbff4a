"""How the pace of engines wanders, from what requests took beyond the model: what ``calibrate RUN...`` fits.

The model is that of a simulated engine (sim/engine_pace.py): a factor on its costs with mean 1 and standard deviation s
that is drawn anew every period P. The pace of a request, which is the duration that the costs give divided by the one
that it had, is then the mean of 1 / factor over its life, and of two requests of one engine that lived from a to b and
from c to d

    the covariance of their paces = s * s * (mean of max(0, 1 - |x - y| / P) over x in [a, b] and y in [c, d])

where paces are in units of their mean; that of their logarithms is about the same, and less at the mercy of single
requests. Products of the deviations of two requests that are near each other are fitted to it by least squares, which
gives the period; what each request deviates by itself, an average over the periods that it lasted, then gives s. Noise
that neighbours do not share is none of the pace. Deviations are from the mean of the request's run: what a whole run is
slower than another is not in it, since one period cannot have both.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

_FEWEST = 20  # requests of a run; of fewer, the mean is too uncertain to deviate from
_NEAR = 12  # so many later requests of the same engine each is held against
_LEAST_SPREAD = 0.05  # less is what the costs leave over without any noise
_MOST_SPREAD = 1.0
_LEAST_SHARED = 0.25  # of what requests deviate by themselves, or there is nothing that wanders
_SHORTEST, _LONGEST = 0.5, 64.0  # periods that can be told, in median durations
_COARSE, _FINE = 1.5, 1.06


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """One request on one engine, in seconds. ``pace``: the duration that the costs give, by the one that it had."""

    engine: Hashable
    begin: float
    end: float
    pace: float


@dataclasses.dataclass(frozen=True, slots=True)
class PaceFit:
    """Standard deviation of the factor, and how long a draw of it holds; both 0 where no noise was found.

    ``costs``: what costs that were fitted as if there were no noise are to be multiplied by. The mean of 1 / factor is
    above 1, and a request gains the more from that, the more periods it lasts.
    """

    spread: float = 0.0
    period_s: float = 0.0
    costs: float = 1.0


_Pair = tuple[float, float, float, float, float, float]
"""d - a, c - a, d - b and c - b; (b - a) * (d - c); product of the deviations."""


def fit_pace(runs: Sequence[Sequence[Life]]) -> PaceFit:
    """The wandering that explains the requests of these runs best; none where they are few or hardly deviate."""
    runs = [[one for one in run if one.pace > 0] for run in runs]
    runs = [run for run in runs if len(run) >= _FEWEST]
    themselves: list[_Pair] = []
    others: list[_Pair] = []
    for run in runs:
        _add_pairs(run, themselves, others)
    if not others:
        return PaceFit()
    usual = statistics.median(one.end - one.begin for run in runs for one in run)
    period = _best_period(others, usual)
    variance = _variance(themselves, period)[0]
    if variance < _LEAST_SPREAD**2 or _variance(others, period)[0] < _LEAST_SHARED * variance:
        return PaceFit()
    spread = min(_MOST_SPREAD, math.sqrt(math.expm1(variance)))  # of a lognormal factor with that variance of its log
    kept = statistics.fmean(_kept(pair, period) for pair in themselves)
    return PaceFit(spread, period, (1.0 + spread**2) / (1.0 + kept * spread**2))


def _add_pairs(run: Sequence[Life], themselves: list[_Pair], others: list[_Pair]) -> None:
    mean = statistics.fmean(math.log(one.pace) for one in run)
    engines: dict[Hashable, list[Life]] = defaultdict(list)
    for one in sorted(run, key=lambda one: (one.begin, one.end)):
        engines[one.engine].append(one)
    for lives in engines.values():
        for index, one in enumerate(lives):
            for other in lives[index : index + 1 + _NEAR]:
                a, b, c, d = one.begin, one.end, other.begin, other.end
                product = (math.log(one.pace) - mean) * (math.log(other.pace) - mean)
                into = themselves if other is one else others
                into.append((d - a, c - a, d - b, c - b, (b - a) * (d - c), product))


def _best_period(pairs: Sequence[_Pair], usual: float) -> float:
    steps = math.ceil(math.log(_LONGEST / _SHORTEST) / math.log(_COARSE))
    best = min((usual * _SHORTEST * _COARSE**n for n in range(steps + 1)), key=lambda one: _variance(pairs, one)[1])
    fine = round(math.log(_COARSE) / math.log(_FINE))
    return min((best * _FINE**n for n in range(-fine, fine + 1)), key=lambda one: _variance(pairs, one)[1])


def _variance(pairs: Sequence[_Pair], period: float) -> tuple[float, float]:
    """The variance of the factor's logarithm with this period, and what it leaves of the squares of the products."""
    shares = products = 0.0
    for pair in pairs:
        share = _kept(pair, period)
        shares += share * share
        products += share * pair[5]
    if not shares:
        return 0.0, 0.0
    return products / shares, -(max(0.0, products) ** 2) / shares


def _kept(pair: _Pair, period: float) -> float:
    """How much of the variance two requests have in common; one with itself: how much its average keeps."""
    late, c_a, d_b, c_b, area, _ = pair
    return (_twice(late, period) - _twice(c_a, period) - _twice(d_b, period) + _twice(c_b, period)) / area


def _twice(x: float, period: float) -> float:
    """max(0, 1 - |x| / period), integrated twice from 0."""
    x = abs(x)
    return x * x / 2.0 - x**3 / (6.0 * period) if x < period else period * x / 2.0 - period * period / 6.0
