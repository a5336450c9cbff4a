"""What a series of real runs looks for after each of them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from real.engines.sglang_flags import cpu_environment
from real.warden import MARK
from tests.bench.real_runs import processes_of

SLEEPER = "import time; print('up', flush=True); time.sleep(300)"


def test_an_engine_with_a_temporary_folder_of_its_own_is_seen_and_others_are_not(tmp_path: pathlib.Path) -> None:
    temporary = tmp_path / "t"
    driver = 7_000_000  # above any pid
    environments = [
        {"TMPDIR": str(temporary)},
        cpu_environment(temporary / "seatrial-x" / "engine-y"),
        {"TMPDIR": "/elsewhere", MARK: f"run-18fa-{driver}"},
        {"TMPDIR": f"{temporary}2"},
        {"TMPDIR": "/elsewhere", MARK: f"run-18fa-1{driver}"},
        {},
    ]
    inherited = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", MARK)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SLEEPER], env={**inherited, **environment}, stdout=subprocess.PIPE, text=True
        )
        for environment in environments
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
        found = processes_of(driver, temporary)
        seen = [any(line.startswith(f"process {process.pid}:") for line in found) for process in started]
        assert seen == [True, True, True, False, False, False], found
        assert len(found) == 3
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert processes_of(driver, temporary) == []
