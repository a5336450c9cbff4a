"""How the GPUs of one machine are shared out to the nodes of a real run."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios.load import load
from scenarios.real_preflight import _Missing, _shared_out, visible_gpus

CODE = "topology.services.code.initial_replicas"


def test_the_visible_ones_are_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert visible_gpus() == ["3", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("scenario", "changes", "devices", "shared"),
    [
        ("fault_injection", [], "0123456789", [(6.0, "0,1,2,3,4,5"), (4.0, "6,7,8,9")]),
        ("fault_injection", [], "0123456789ab", [(6.0, "0,1,2,3,4,5"), (6.0, "6,7,8,9,a,b")]),
        ("fault_injection", [f"{CODE}=4"], "012345", [(6.0, "0,1,2,3,4,5"), (0.0, "")]),
        ("fault_injection", [f"{CODE}=5"], "0123456", [(6.0, "0,1,2,3,4,5"), (1.0, "6")]),
        # One replica at first and two after the scale-out: it needs more than the first one's GPU.
        ("manual_1_2_1", [], "0123", [(3.0, "0,1,2")]),
        ("manual_1_2_1", [], "01", [(2.0, "0,1")]),
    ],
)
def test_each_node_gets_its_own(scenario: str, changes: list[str], devices: str, shared: list[Any]) -> None:
    assert _shared_out(load(scenario, changes), list(devices)) == shared


def test_too_few_are_refused_with_both_numbers() -> None:
    with pytest.raises(_Missing, match="need 10 GPUs, 4 are visible"):
        _shared_out(load("fault_injection"), list("0123"))
