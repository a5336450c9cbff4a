"""The ratios of issue 2 for loop, kernel and engines hold: tests/bench/loop_bench.py, small."""

from __future__ import annotations

from typing import Any

from tests.bench.loop_bench import measure


def test_sleeps_events_and_engine_iterations_are_as_fast_as_the_originals() -> None:
    found: dict[str, Any] = {}
    for _ in range(3):  # other work on the machine can spoil one measurement, not three
        found = measure(size=15, rounds=7)
        events, engines = found["kernel_events"]["ratio"], found["engine_iterations"]["ratio_skipped"]
        if found["sleeps"]["ratio"] >= 1.0 and events >= 0.8 and engines >= 0.8:
            return
    raise AssertionError(f"needs sleeps >= 1.0, kernel events and engine iterations >= 0.8 of the originals: {found}")
