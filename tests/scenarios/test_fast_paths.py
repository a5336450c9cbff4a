"""Every fast path off gives the same run, byte for byte: engine skip-ahead, plain links, uncopied messages.

In explored runs too: what is skipped draws nothing.
"""

from __future__ import annotations

import pytest

from scenarios.load import load
from scenarios.sim_world import SimStage


def lines(name: str, seed: int, *, fast: bool, explore: bool = False, off: str = "engines links copies") -> bytes:
    """The evidence of a run; unless ``fast``, with the paths named in ``off`` turned off."""
    written: list[bytes] = []
    stage = SimStage(load(name), seed, write=written.append, explore=explore, copy_always=not fast and "copies" in off)
    stage.simulation.engines.fast_path = fast or "engines" not in off
    stage.simulation.network.fast_path = fast or "links" not in off
    with stage:
        assert stage.run().reason == "completed"
    return b"".join(written)


@pytest.mark.parametrize("explore", [False, True], ids=["default orders", "explored"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_evidence_of_smoke_is_equal_with_every_fast_path_off(seed: int, explore: bool) -> None:
    assert lines("smoke", seed, fast=True, explore=explore) == lines("smoke", seed, fast=False, explore=explore)


@pytest.mark.parametrize("off", ["engines", "links", "copies"])
def test_each_fast_path_alone_changes_nothing_of_an_explored_run(off: str) -> None:
    assert lines("minimal", 4, fast=True, explore=True) == lines("minimal", 4, fast=False, explore=True, off=off)


def test_it_would_notice_a_difference() -> None:
    assert lines("smoke", 1, fast=True) != lines("smoke", 2, fast=True)
    assert lines("smoke", 1, fast=True) != lines("smoke", 1, fast=True, explore=True)


@pytest.mark.slow
@pytest.mark.parametrize("explore", [False, True], ids=["default orders", "explored"])
def test_the_evidence_of_fault_injection_is_equal_with_every_fast_path_off(explore: bool) -> None:
    assert lines("fault_injection", 7, fast=True, explore=explore) == lines(
        "fault_injection", 7, fast=False, explore=explore
    )
