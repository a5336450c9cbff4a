"""Runs the command line in a process of its own, as a user does, and looks at what is left of it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from real.warden import Sweeper

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

TINY = """\
name: tiny
summary: Two replicas on two nodes, one of which is killed.
seed: 3
topology:
  nodes: 2
  gpus_per_node: 1
  services: {chat: {initial_replicas: 2, engine: tiny-cpu}}
workload:
  service: chat
  arrivals: {constant: {rate_per_s: 10}}
  prompt_tokens: {fixed: 40}
  output_tokens: {fixed: 300}
  for_s: 6
steps:
  - {at_s: 2, do: sigkill, target: busiest_replica}
acceptance:
  - nothing_lost: {}
limits: {time_limit_s: 100, converge_within_s: 40, shadow_s: 20}
real: {startup_s: 1}
"""


class Command:
    """``python -m scenarios run`` under way.

    Args:
        folder: takes the scenario file and the run directory.
        temporary: where the run's temporary folder is made.
        modules: a folder of modules of the user's own.
    """

    def __init__(
        self, folder: pathlib.Path, temporary: str, *arguments: str, text: str = TINY, modules: pathlib.Path = ROOT
    ) -> None:
        (folder / "tiny.yaml").write_text(text)
        self.out = folder / "run"
        self.temporary = pathlib.Path(temporary)
        command = [sys.executable, "-m", "scenarios", "run", str(folder / "tiny.yaml"), "--backend", "real"]
        self.process = subprocess.Popen(
            [*command, "--out", str(self.out), *arguments],
            cwd=ROOT, env={**os.environ, "TMPDIR": temporary, "PYTHONPATH": f"{ROOT}:{modules}"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.run = ""

    def wait(self, timeout_s: float = 150) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def wait_for_event(self, kind: str) -> None:
        """Wait until some process of the run has written an event of a kind."""
        self.wait_until(lambda: any(f'"kind":"{kind}"' in log.read_text() for log in self.temporary.glob("*/events/*")))

    def wait_until(self, reached: Callable[[], object]) -> None:
        until(reached, 100)
        (self.run,) = _wardens(self.temporary).values()

    def processes(self) -> dict[int, str]:
        return Sweeper(self.run, "").processes()

    def left(self) -> list[str]:
        """Everything of the run that is still there."""
        found = [f"process {pid}: {command}" for pid, command in self.processes().items()] if self.run else []
        found += [f"folder {path}" for path in self.temporary.iterdir()]
        return found + [f"warden {pid}" for pid in _wardens(self.temporary)]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def command(
    folder: pathlib.Path, temporary: str, *arguments: str, text: str = TINY, modules: pathlib.Path = ROOT
) -> Iterator[Command]:
    made = Command(folder, temporary, *arguments, text=text, modules=modules)
    try:
        yield made
    finally:
        made.end()


def until(reached: Callable[[], object], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def _wardens(below: pathlib.Path) -> dict[int, str]:
    """Wardens of runs whose folder is below another: pid to id of the run."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if len(words) > 2 and words[-3].endswith("warden.py") and words[-1].startswith(f"{below}/"):
                found[int(path.name)] = words[-2]
    return found
