"""The scenarios of publications in the real world: gate, controller and affinity router are those of `sim`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from analysis.rundir import RunDir
from protocol.evidence import Event
from tests.real.local_ray import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.slow]
_WITHIN_S = 900


def run_of(name: str, engine: str, out: pathlib.Path) -> list[Event]:
    """The events of a run that must pass."""
    ran = subprocess.run(
        [sys.executable, "-m", "scenarios", "run", name, "--backend", "real", "--engine", engine, "--out", str(out),
         "--json", "--no-report"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=_WITHIN_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert json.loads(ran.stdout)["result"] == "pass"
    return list(RunDir.open(out).read_events())


def versions_of_turns(events: list[Event]) -> dict[int, set[tuple[str, ...]]]:
    """What turns are stamped with, and of which versions the engines say that they computed them."""
    computed = {
        event.data["request"]: tuple(version for version, *_ in event.data["spans"])
        for event in events
        if event.kind == "engine.finished"
    }
    found: dict[int, set[tuple[str, ...]]] = {}
    for event in events:
        if event.kind == "turn.done":
            found.setdefault(event.data["model_step"], set()).add(computed[event.data["request"]])
    return found


@pytest.mark.parametrize(
    "engine", ["emulated", pytest.param("sglang-cpu", marks=pytest.mark.sglang_cpu)]
)  # fmt: skip
def test_each_turn_is_of_the_version_on_its_lease(tmp_path: pathlib.Path, engine: str) -> None:
    events = run_of("publish_live_agents", engine, tmp_path / "run")
    assert versions_of_turns(events) == {0: {("0",)}, 1: {("1",)}, 2: {("2",)}}
    modes = {event.data["mode"] for event in events if event.kind == "engine.paused"}
    loads = [event.data for event in events if event.kind == "engine.weights"]
    assert modes == {"retract"} and all(load["ok"] and not load["in_flight"] for load in loads)
    if engine == "sglang-cpu":
        written = {event.data["path"] for event in events if event.kind == "storage.written"}
        assert sum(path.endswith(".safetensors") for path in written) >= 3


@pytest.mark.long
@pytest.mark.parametrize("name", ["gate_poison", "affinity_storm", "publish_many_entrypoints"])
def test_the_others_pass_too(tmp_path: pathlib.Path, name: str) -> None:
    run_of(name, "emulated", tmp_path / "run")
