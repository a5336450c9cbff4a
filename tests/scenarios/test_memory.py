"""The memory of a whole run does not grow with it: events go to the file and through the checks, and are let go."""

from __future__ import annotations

import gc
import pathlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from analysis.timeline import BINS
from protocol.evidence import Event
from scenarios.load import Scenario
from scenarios.runner import run_in_sim
from sim.world import World

FEW, MANY = 1_000, 5_000
"""Requests. Both runs are long enough for whatever is kept for a time (read time-outs, latest deaths) to be full."""
AN_EVENT = 3.0
"""Bytes that may stay of an event. One that is kept takes 500 and more, its line 200, a request's name alone 60."""
A_BIN = 2_048
"""Bytes of a bin of the report's timeline, of which there is a fixed number; it fills as more requests fall into it."""


@pytest.fixture(autouse=True)
def collect_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage that lies in cycles waits for a collection, every 100,000 steps: more than the shorter run has."""
    monkeypatch.setattr("sim.kernel._GC_STEPS", 2_000)


def growth(small: Callable[..., Scenario], folder: pathlib.Path, *, report: bool) -> tuple[int, int]:
    """(bytes, events) that the longer of two runs has at most at one time, and in all, more than the shorter one."""
    run_in_sim(small(), 5, out=folder / "warm", report=report)  # modules, profiles and encoders are there once
    runs = []
    for requests in (FEW, MANY):
        scenario = small(f"workload.for_s={requests // 20}", "limits.time_limit_s=10000")
        gc.collect()
        tracemalloc.start()
        try:
            ran = run_in_sim(scenario, 5, out=folder / f"run-{requests}", report=report)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert ran.verdict.result == "pass", ran.verdict.failed()
        assert ran.result.events > 10 * requests
        runs.append((most, ran.result.events))
    (few, few_events), (many, many_events) = runs
    return many - few, many_events - few_events


@pytest.mark.slow
def test_the_memory_of_a_run_and_its_judge_is_bounded(small: Callable[..., Scenario], tmp_path: pathlib.Path) -> None:
    more, events = growth(small, tmp_path, report=False)
    assert more / events < AN_EVENT


@pytest.mark.slow
def test_the_memory_of_a_report_is_that_of_its_bins(small: Callable[..., Scenario], tmp_path: pathlib.Path) -> None:
    more, events = growth(small, tmp_path, report=True)
    assert more < BINS * A_BIN < 50 * events  # less than would be needed for a tenth of the events


@pytest.mark.slow
def test_it_would_notice_events_that_are_kept(
    small: Callable[..., Scenario], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Event] = []
    init = World.__init__

    def keeping(self: World, **options: Any) -> None:
        init(self, **options)
        self._sinks.append(kept.append)

    monkeypatch.setattr(World, "__init__", keeping)
    more, events = growth(small, tmp_path, report=False)
    assert more / events > 10 * AN_EVENT
