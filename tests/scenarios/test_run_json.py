"""What run.json says of the inputs of a run beside its scenario."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest

from analysis.errors import BadInput
from analysis.rundir import RunDir
from scenarios import real_preflight, real_run
from scenarios.load import Scenario
from scenarios.runner import run_in_sim
from sim import profiles
from tests.scenarios.conftest import SMALL

Make = Callable[..., Scenario]


def test_engine_profiles_are_named_with_their_hash(small: Make, tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "mine.yaml"
    shutil.copy(pathlib.Path(profiles.__file__).with_name("tiny-cpu.yaml"), mine)
    mine.write_text(mine.read_text() + "# changed\n")
    text = SMALL.replace("engine: tiny-cpu", "engine: mine.yaml")
    ran = run_in_sim(small("workload.for_s=0.5", text=text, folder=tmp_path), 5, out=tmp_path / "run", report=False)
    assert ran.verdict.result == "pass"
    found = RunDir.open(tmp_path / "run").info().engines["chat"]
    assert (found.profile, found.sha256) == ("tiny-cpu", hashlib.sha256(mine.read_bytes()).hexdigest())


def test_a_run_from_before_profiles_were_named_is_read(small: Make, tmp_path: pathlib.Path) -> None:
    run_in_sim(small("workload.for_s=0.5"), 5, out=tmp_path / "run", report=False)
    directory = RunDir.open(tmp_path / "run")
    raw = json.loads(directory.run.read_text())
    del raw["engines"]
    directory.run.write_text(json.dumps(raw))
    assert directory.info().engines == {}


def test_a_real_run_names_the_profiles_of_emulated_engines_and_of_no_others(
    small: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    said: list[dict[str, str]] = []

    def not_live(*_: object) -> NoReturn:
        said.append({name: one.profile for name, one in RunDir(tmp_path / "run").info().engines.items()})
        raise OSError("enough")

    monkeypatch.setattr(real_run, "_live", not_live)
    monkeypatch.setattr(real_preflight, "_sglang_python", lambda *_: sys.executable)
    for kind in ("emulated", "sglang-cpu"):
        planned = real_preflight.plan(small(), real_preflight.RealOptions(kind))
        with pytest.raises(BadInput, match="enough"):
            real_run.run_in_real(planned, 1, out=tmp_path / "run")
    assert said == [{"chat": "tiny-cpu"}, {}]
