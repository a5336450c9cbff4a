"""How the pace of engines wanders, fitted to requests: what they were made with comes out, or nothing."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest

from analysis.calibrate_pace import Life, PaceFit, fit_pace


def lives(seed: int, spread: float, period_s: float, *, requests: int = 300, alone: float = 0.0) -> list[Life]:
    """Requests of two engines, each with a factor of its own; ``alone``: noise of each request by itself."""
    rng = random.Random(seed)
    sigma = math.sqrt(math.log1p(spread**2))
    made = []
    for engine in ("a", "b"):
        begin = 0.0
        factors: dict[int, float] = {}
        for _ in range(requests // 2):
            begin += rng.expovariate(3.0)
            work, at = rng.uniform(0.1, 0.5), begin
            left = work
            while left > 0:
                number = int(at // period_s)
                factor = factors.setdefault(number, rng.lognormvariate(-sigma * sigma / 2, sigma))
                stretch = min((number + 1) * period_s - at + 1e-9, left * factor)
                at, left = at + stretch, left - stretch / factor
            took = (at - begin) * rng.lognormvariate(0, alone)
            made.append(Life(engine, begin, begin + took, work / took))
    return made


@pytest.mark.parametrize(("spread", "period_s"), [(0.1, 0.5), (0.2, 0.25), (0.2, 1.0), (0.4, 0.5), (0.3, 3.0)])
def test_what_they_were_made_with_comes_out(spread: float, period_s: float) -> None:
    found = fit_pace([lives(seed, spread, period_s) for seed in range(6)])
    assert found.spread == pytest.approx(spread, rel=0.15)
    assert period_s / 1.5 < found.period_s < period_s * 1.5


def test_a_run_that_is_slower_as_a_whole_is_no_wandering() -> None:
    runs = [lives(seed, 0.0, 1.0) for seed in range(3)]
    slower = [
        [dataclasses.replace(one, pace=one.pace * by) for one in run]
        for run, by in zip(runs, (1.0, 0.8, 1.2), strict=True)
    ]
    assert fit_pace(slower) == PaceFit()


def test_noise_that_neighbours_do_not_share_is_none_of_the_pace() -> None:
    assert fit_pace([lives(seed, 0.0, 1.0, alone=0.3) for seed in range(3)]) == PaceFit()


def test_too_few_requests_or_none_that_are_near_tell_nothing() -> None:
    assert fit_pace([]) == PaceFit()
    assert fit_pace([lives(1, 0.5, 1.0, requests=18)] * 9) == PaceFit()
    assert fit_pace([[Life(n, n, n + 1.0, 1.0 + n % 2) for n in range(40)]]) == PaceFit()


def test_costs_are_put_right_for_what_a_request_gains_by_averaging() -> None:
    """Fitted without noise, costs are what requests took on average: less than they are, the longer those lasted."""
    runs = [lives(seed, 0.3, 0.1) for seed in range(4)]
    taken = statistics.fmean(1 / one.pace for run in runs for one in run)  # of what the true costs give
    found = fit_pace(runs)
    assert taken < 0.95 and taken * found.costs == pytest.approx(1.0, abs=0.03)
