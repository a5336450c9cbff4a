"""Every fast path off gives the same run, byte for byte: engine skip-ahead, plain links, uncopied messages."""

from __future__ import annotations

import pytest

from scenarios.load import load
from scenarios.sim_world import SimStage


def lines(name: str, seed: int, *, fast: bool) -> bytes:
    written: list[bytes] = []
    stage = SimStage(load(name), seed, write=written.append, copy_always=not fast)
    stage.simulation.engines.fast_path = fast
    stage.simulation.network.fast_path = fast
    with stage:
        assert stage.run().reason == "completed"
    return b"".join(written)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_evidence_of_smoke_is_equal_with_every_fast_path_off(seed: int) -> None:
    assert lines("smoke", seed, fast=True) == lines("smoke", seed, fast=False)


def test_it_would_notice_a_difference() -> None:
    assert lines("smoke", 1, fast=True) != lines("smoke", 2, fast=True)


@pytest.mark.slow
def test_the_evidence_of_fault_injection_is_equal_with_every_fast_path_off() -> None:
    assert lines("fault_injection", 7, fast=True) == lines("fault_injection", 7, fast=False)
