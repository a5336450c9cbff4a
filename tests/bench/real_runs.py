"""Real runs in a row: the same verdict each time, and nothing left behind after any of them.

``python -m tests.bench.real_runs fault_injection --engine emulated --runs 20`` prints one line a run and ends with a
table; exit code 1 when a run did not pass, two runs differ in what they judged, or something was left.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import click

from real.warden import MARK

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_RUN_LIMIT_S = 1500


def processes_of(driver: int, temporary: pathlib.Path) -> list[str]:
    """Living processes of a run, zombies left out, by their environment: the run's mark, or a TMPDIR in its folder.

    Args:
        driver: pid of the command, with which the run's id ends.
        temporary: the folder in which its own is; an engine has a TMPDIR of its own somewhere below.
    """
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            lines = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            variables = dict(line.partition("=")[::2] for line in lines)
            marked = re.fullmatch(rf"run-[0-9a-f]+-{driver}", variables.get(MARK, ""))
            if marked or pathlib.Path(variables.get("TMPDIR", "/")).is_relative_to(temporary):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"process {path.name}: {command[:120]}")
        except OSError:
            continue
    return found


def shared_memory() -> set[str]:
    return {path.name for path in pathlib.Path("/dev/shm").iterdir()}


def one(
    scenario: str, engine: str, folder: pathlib.Path, temporary: pathlib.Path, options: tuple[str, ...]
) -> dict[str, Any]:
    """One run in a process of its own, with a temporary folder of its own; what it said and what it left."""
    temporary.mkdir()
    before = shared_memory()
    command = [sys.executable, "-m", "scenarios", "run", scenario, "--backend", "real", "--engine", engine]
    command += ["--out", str(folder / "run"), *options]
    begun = time.monotonic()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as ran:  # fmt: skip
        try:
            _, stderr = ran.communicate(timeout=_RUN_LIMIT_S)
        except BaseException:
            ran.kill()
            raise
    took_s = time.monotonic() - begun
    left = processes_of(ran.pid, temporary)
    left += [f"temporary {path.name}" for path in temporary.iterdir()]
    left += [f"shared memory {name}" for name in sorted(shared_memory() - before)]
    verdict = folder / "run" / "verdict.json"
    rows = json.loads(verdict.read_text())["checks"] if verdict.is_file() else []
    return {
        "exit_code": ran.returncode,
        "seconds": round(took_s, 1),
        "rows": {f"{row['name']} ({row['group']})": row["result"] for row in rows},
        "undecided": [
            f"{row['name']}: {row['explain'] or row['observed']}"
            for row in rows
            if row["result"] != "pass" and row["applicable"]
        ],
        "left": left,
        "stderr": stderr[-2000:],
    }


@click.command()
@click.argument("scenario")
@click.option("--engine", required=True)
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True)
@click.option("--keep", type=click.Path(path_type=pathlib.Path), help="Folder that takes the run directories.")
@click.option("--option", "options", multiple=True, help="A further argument of the run command.")
def main(scenario: str, engine: str, runs: int, keep: pathlib.Path | None, options: tuple[str, ...]) -> None:
    """Run a scenario for real, several times in a row."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run under way ends with this
    done: list[dict[str, Any]] = []
    # Short, wherever the runs are kept, because the paths of Ray's sockets have 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="") as short:
        temporary = pathlib.Path(short).resolve()
        for number in range(runs):
            folder = (keep.resolve() if keep else temporary / "kept") / str(number)
            result = one(scenario, engine, folder, temporary / str(number), options)
            done.append(result)
            print(
                f"run {number + 1}: exit {result['exit_code']}, {result['seconds']} s, load {os.getloadavg()[0]:.1f}, "
                f"left {result['left'] or 'nothing'}{''.join('; ' + text for text in result['undecided'])}",
                flush=True,
            )
            if not result["rows"]:
                print(result["stderr"], flush=True)
    same = all(result["rows"] == done[0]["rows"] for result in done)
    passed = sum(result["exit_code"] == 0 for result in done)
    clean = sum(not result["left"] for result in done)
    times = sorted(result["seconds"] for result in done)
    print(f"{scenario} on {engine}: {passed} of {runs} passed, {'the same' if same else 'DIFFERENT'} rows, "
          f"{clean} left nothing; {times[0]} to {times[-1]} s, median {times[len(times) // 2]} s")  # fmt: skip
    sys.exit(0 if passed == clean == runs and same else 1)


if __name__ == "__main__":
    main()
