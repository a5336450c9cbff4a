"""Sweeps: groups of failures, what is kept, the canary."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from analysis.errors import BadInput
from analysis.rundir import RunDir
from scenarios import sweep as sweep_module
from scenarios.console import Shell
from scenarios.load import Scenario
from scenarios.sweep import Group, Swept, check_canary, sweep_scenario
from tests.scenarios.conftest import SMALL

Make = Callable[..., Scenario]


def _sweep(scenario: Scenario, seeds: int, out: pathlib.Path, jobs: int = 1, sample: int = 1) -> Swept:
    return sweep_scenario(
        scenario, "small.yaml", 5, seeds, jobs=jobs, out=out, sample=sample, changes=["a=1"], shell=Shell(True)
    )


def test_passing_seeds_keep_only_a_sample(small: Make, tmp_path: pathlib.Path) -> None:
    swept = _sweep(small("workload.for_s=1"), 6, tmp_path / "out", sample=2)
    assert (swept.exit_code, swept.passed, swept.groups, swept.canary, swept.offline) == (0, 6, [], "", [])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["5", "6"]
    assert RunDir.open(tmp_path / "out" / "5").info().repeat.endswith("--seed 5 --set a=1 --explore")


def test_workers_find_what_one_process_finds(small: Make, tmp_path: pathlib.Path) -> None:
    alone = _sweep(small("workload.for_s=1"), 4, tmp_path / "one", sample=0)
    workers = _sweep(small("workload.for_s=1"), 4, tmp_path / "two", jobs=2, sample=0)
    assert (alone.passed, alone.events) == (workers.passed, workers.events) == (4, alone.events)


def test_failures_are_grouped_with_the_command_that_repeats_the_first(small: Make, tmp_path: pathlib.Path) -> None:
    text = SMALL.replace("  - nothing_lost: {}", "  - latency_p99: {at_most_s: 0.01}")
    swept = _sweep(small("workload.for_s=1", text=text), 5, tmp_path / "out")
    assert swept.exit_code == 1 and swept.passed == 0
    (group,) = swept.groups
    assert (group.result, group.seeds) == ("fail", [5, 6, 7, 8, 9]) and group.check.startswith("latency_p99")
    assert group.repeat == "python -m scenarios run small.yaml --backend sim --seed 5 --set a=1 --explore"
    assert [pathlib.Path(path).name for path in group.directories] == ["5", "6", "7"] and not swept.offline
    assert any("repeat: python -m scenarios run" in line for line in swept.lines())


def test_the_canary_is_caught_and_a_blind_judge_is_told(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_canary(small("workload.for_s=1"), 5) == ""
    monkeypatch.setattr(sweep_module.canary, "CAUGHT_BY", "no_crash")
    said = check_canary(small("workload.for_s=1"), 5)
    assert said.startswith("canary: no_crash is pass")
    swept = Swept("small", 1, 1, [], said, 1.0, 1, [], [])
    assert swept.exit_code == 3 and said in list(swept.lines())


def test_exit_codes() -> None:
    def code(*results: str, offline: tuple[str, ...] = ()) -> int:
        groups = [Group(result, "c", "w", [1], "r") for result in results]
        return Swept("s", 1, 0, groups, "", 1.0, 1, list(offline), []).exit_code

    assert [code(), code("fail"), code("inconclusive"), code("inconclusive", "fail")] == [0, 1, 3, 1]
    assert code(offline=("seed 1: differs",)) == 1


def test_a_folder_that_exists_is_refused_before_anything_runs(small: Make, tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadInput, match="exists already"):
        _sweep(small(), 1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_made_before_there_is_something_to_keep(
    small: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def looked(*arguments: object) -> str:
        seen.append(sorted(path.name for path in tmp_path.rglob("*")))
        return ""

    monkeypatch.setattr(sweep_module, "check_canary", looked)
    _sweep(small("workload.for_s=1"), 1, tmp_path / "a" / "out", sample=0)
    assert seen == [[]] and not list(tmp_path.iterdir())


def test_a_kept_run_has_its_name_when_it_is_whole(
    small: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = sweep_module.run_in_sim, []

    def broken_off(scenario: Scenario, seed: int, *, out: pathlib.Path | None = None, **more: Any) -> Any:
        ran = run(scenario, seed, out=out, **more)
        if out is not None:
            seen.append(out.name)
            assert [path.name for path in (tmp_path / "out").iterdir()] == ["5.part"]
            raise KeyboardInterrupt
        return ran

    monkeypatch.setattr(sweep_module, "run_in_sim", broken_off)
    with pytest.raises(KeyboardInterrupt):
        _sweep(small("workload.for_s=1"), 1, tmp_path / "out")
    assert seen == ["5.part"] and not list(tmp_path.iterdir())
