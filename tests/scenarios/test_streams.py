"""Commands whose output goes nowhere: readers that leave, full and closed streams, a folder that is gone."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from analysis import __main__ as analysis_line
from scenarios import __main__ as scenarios_line
from scenarios.load import Scenario
from scenarios.runner import run_in_sim
from tests.scenarios.conftest import ROOT

_FAILING = "acceptance=[{latency_p99: {at_most_s: 0.001}}]"


@pytest.fixture
def run_directory(small: Callable[..., Scenario], tmp_path: pathlib.Path) -> pathlib.Path:
    """A run that failed: exit code 1 is right, and 0, 2 and 3 would be wrong."""
    run_in_sim(small("workload.for_s=0.5", _FAILING), 5, out=tmp_path / "run", report=False)
    return tmp_path / "run"


def _call(words: list[str], folder: pathlib.Path, *, redirect: str = "", stdout: int | None = None) -> tuple[int, str]:
    """Exit code and stderr. ``redirect``: as the shell writes it."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_changes_no_exit_code(
    run_directory: pathlib.Path, small_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    run = ["scenarios", "run", str(small_file), "--backend", "sim", "--no-report", "--set", "workload.for_s=0.5"]
    for words, expected in (
        (["analysis", "verdict", str(run_directory)], 1),
        (["analysis", "explain", str(run_directory)], 1),
        (["analysis", "table", str(run_directory)], 0),
        (run, 0),
        ([*run, "--json", "--set", _FAILING], 1),
    ):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            assert _call(words, small_file.parent, stdout=writing) == (expected, "")
        finally:
            os.close(writing)


def test_a_full_stdout_is_one_message(run_directory: pathlib.Path) -> None:
    for words in (["analysis", "verdict", str(run_directory)], ["scenarios", "schema"]):
        code, said = _call(words, run_directory, redirect="> /dev/full")
        assert (code, said) == (2, "error: stdout: cannot be written (No space left on device)\n")


@pytest.mark.parametrize("redirect", ["<&- >&-", "<&- >&- 2>&-", "2> /dev/full", "2>&-"])
def test_closed_and_full_streams_change_no_exit_code(run_directory: pathlib.Path, redirect: str) -> None:
    for words, expected in (
        (["analysis", "verdict", str(run_directory)], 1),
        (["analysis", "verdict", "absent"], 2),
        (["scenarios", "validate", "smoke", "--set", "seed=x"], 2),
    ):
        code, said = _call(words, run_directory, redirect=redirect)
        assert code == expected and "Traceback" not in said, said


def test_a_current_folder_that_is_gone(run_directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    gone = tmp_path / "gone"
    for words in ("scenarios validate smoke", f"analysis verdict {run_directory}"):
        gone.mkdir()
        script = f'rmdir "$PWD"; exec {sys.executable} -m {words}'
        done = subprocess.run(
            ["sh", "-c", script],
            cwd=gone, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        said = "error: the current folder is gone (No such file or directory); change to one that is there\n"
        assert (done.returncode, done.stderr) == (2, said)


def test_a_defect_of_ours_is_no_verdict(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr(analysis_line, "judge_run", broken)
    done = CliRunner().invoke(analysis_line.main, ["verdict", str(run_directory)])
    assert done.exit_code == 3 and "nobody foresaw this" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: that is a defect of seatrial")
    monkeypatch.setattr(scenarios_line, "load", broken)
    monkeypatch.setattr(sys, "argv", ["scenarios", "validate", "smoke"])
    with pytest.raises(SystemExit) as ended:
        scenarios_line.main()
    assert ended.value.code == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: that is a defect of seatrial")


def test_an_interrupted_analysis_is_no_failed_check(
    run_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(analysis_line, "judge_run", interrupted)
    try:
        done = CliRunner().invoke(analysis_line.main, ["verdict", str(run_directory)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.exit_code, done.stderr.strip()) == (3, "interrupted; there is no verdict")
