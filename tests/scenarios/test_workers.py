"""Worker processes of a sweep: none outlives it, and one that dies costs one seed."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from analysis.errors import BadInput
from scenarios.load import Scenario
from scenarios.seeds import run_seed
from scenarios.workers import Lost, run_in_workers
from tests.scenarios.conftest import ROOT, SMALL, Command, component_of

Make = Callable[..., Scenario]


@contextmanager
def _sweeping(folder: pathlib.Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A sweep of many seeds in two workers, in a process group of its own, as a terminal makes them."""
    with subprocess.Popen(
        [sys.executable, "-m", "scenarios", "sweep", *words, "--jobs", "2", "--out", "sw"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def _children(process: subprocess.Popen[str], count: int) -> list[int]:
    """Waits for as many."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    found: list[str] = []
    while len(found) < count and time.monotonic() < deadline:
        time.sleep(0.01)
        if process.poll() is not None:
            pytest.fail(process.communicate()[0])
        found = children.read_text().split()
    assert len(found) == count
    return [int(pid) for pid in found]


def _cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("later_s", [0.0, 0.05, 0.3, 3.0])  # while the workers start, import and run
def test_an_interrupted_sweep_leaves_no_process(tmp_path: pathlib.Path, later_s: float) -> None:
    with _sweeping(tmp_path, "smoke", "--seeds", "100000") as process:
        workers = _children(process, 2)
        time.sleep(later_s)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 3 and "Traceback" not in out, out
    assert out.splitlines()[-1] == "interrupted; what was written so far is no verdict"
    for worker in workers:  # the sweep has waited for them
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_sweep_that_is_killed(tmp_path: pathlib.Path, number: int) -> None:
    with _sweeping(tmp_path, "smoke", "--seeds", "100000") as process:
        _children(process, 2)
        time.sleep(2)  # they begin
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)  # it ends when the last of them has closed its stderr
    assert process.returncode == -number and "Traceback" not in out, out
    assert list(tmp_path.iterdir()) == []  # no folder for what was never kept


def test_a_worker_that_is_killed_costs_one_seed(tmp_path: pathlib.Path) -> None:
    with _sweeping(tmp_path, "smoke", "--seeds", "60") as process:
        worker = _children(process, 2)[0]
        while _cpu_s(worker) < 2 and process.poll() is None:  # it has begun
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and "Traceback" not in out, out
    assert "inconclusive 1 seeds, the worker: its process ended without a result (SIGKILL)" in out
    assert "INCONCLUSIVE: smoke: 59 of 60 seeds pass" in out


def _request(scenario: Scenario, hang_after_s: float | None = None) -> dict[str, Any]:
    folder = str(scenario.folder)
    return {"text": scenario.text, "source": scenario.source, "folder": folder, "hang_after_s": hang_after_s}


def test_a_seed_that_takes_its_process_along_is_lost_and_the_others_go_on(
    small: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEATRIAL_TEST_MARKER", str(tmp_path / "marker"))
    request = _request(small("workload.for_s=1", component_of("ClingingOnceGateway")), 0.3)
    first, *others = run_in_workers(request, range(4, 8), 1, 4)
    assert first == Lost(4, "exit code 3")
    assert [one["seed"] for one in others if not isinstance(one, Lost)] == [5, 6, 7]


def test_workers_give_what_this_process_gives(small: Make) -> None:
    scenario = small("workload.for_s=0.5", component_of("PrintingGateway"))  # its print is no result
    (done,) = run_in_workers(_request(scenario), range(5, 6), 1, 1)
    assert not isinstance(done, Lost)
    assert done["digest"] == run_seed(scenario, 5).digest


def test_workers_that_cannot_begin_are_one_message(small: Make, capfd: pytest.CaptureFixture[str]) -> None:
    request = {**_request(small()), "text": SMALL.replace("seed: 5", "sed: 5")}
    with pytest.raises(BadInput, match="a worker process ended before it began"):
        list(run_in_workers(request, range(5), 2, 1))
    assert "small.yaml:3: sed: unknown key" in capfd.readouterr().err


def test_a_sweep_whose_component_hangs_reports_it(command: Command, small_file: pathlib.Path) -> None:
    words = ("--seeds", "3", "--out", "sw", "--hang-after", "0.3", "--set", component_of("SpinningGateway"))
    for jobs in ("1", "2"):
        done = command("sweep", small_file, "--jobs", jobs, *words[:3], f"sw{jobs}", *words[4:])
        assert done.returncode == 1 and "0 of 3 seeds pass" in done.stdout, done.stdout + done.stderr
        assert "run_finished: endless_callback: gateway-chat-0/1, task generate: SpinningGateway" in done.stdout
        assert "canary: caught" in done.stdout and "differs" not in done.stdout
