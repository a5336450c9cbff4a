"""The warden: what belongs to a run ends with its driver, whatever became of it, and nothing else does."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator

import pytest

from real.warden import MARK, Warden
from tests.processes import is_running
from tests.real.run_command import until

SLEEPER = "import time; print('up', flush=True); time.sleep(300)"
# Its child has an environment of its own, as a program may give it.
PARENT = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], env={})\n"
    "print('up', flush=True); time.sleep(300)"
)
HOLDER = (
    "import mmap, os, sys, time\n"
    "file = open(sys.argv[1], 'w+b'); file.truncate(4096); held = mmap.mmap(file.fileno(), 4096)\n"
    "print('up', flush=True); time.sleep(300)"
)

SEMAPHORE = (
    "import multiprocessing, pathlib, sys, time\n"
    "held = multiprocessing.get_context('spawn').Semaphore()\n"
    "pathlib.Path(sys.argv[1]).write_text(held._semlock.name); print('up', flush=True); time.sleep(300)"
)


class Run:
    """A run by hand."""

    def __init__(self, folder: str) -> None:
        self.id = f"test-{uuid.uuid4().hex}"
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, code: str, *arguments: str, marked: bool = True) -> int:
        environment = {**os.environ, **({MARK: self.id} if marked else {})}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        self.processes.append(process)
        return process.pid


@pytest.fixture
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        made = Run(os.path.join(folder, "run"))
        os.mkdir(made.folder)
        yield made
        for process in made.processes:
            process.kill()
            process.communicate()


def test_a_sweep_ends_the_processes_of_the_run_and_no_others(run: Run) -> None:
    warden = Warden(run.id, run.folder)
    first, stopped, parent = run.start(SLEEPER), run.start(SLEEPER), run.start(PARENT)
    other = run.start(SLEEPER, marked=False)
    os.kill(stopped, signal.SIGSTOP)
    belong = warden.processes()
    assert {first, stopped, parent} < set(belong) and len(belong) == 4 and other not in belong
    assert warden.sweep() == []
    assert not any(is_running(pid) for pid in belong) and is_running(other)
    assert os.path.isdir(run.folder)  # evidence is read from it after the sweep
    late = run.start(SLEEPER)
    assert warden.close() == []
    assert not is_running(late) and not os.path.exists(run.folder) and is_running(other)
    assert not is_running(warden.pid)


def test_the_death_of_the_driver_is_the_end_of_its_run(run: Run) -> None:
    driver = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from real.warden import Warden\nimport time\n"
        "warden = Warden(sys.argv[2], sys.argv[3])\nprint('up', flush=True)\n"
        "print(warden.pid, flush=True); time.sleep(300)"
    )
    root = str(pathlib.Path(__file__).resolve().parents[2])
    pid = run.start(driver, root, run.id, run.folder, marked=False)
    stdout = run.processes[-1].stdout
    assert stdout is not None
    warden = int(stdout.readline())
    sleeper = run.start(SLEEPER)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(warden, number)  # a closing terminal reaches it too
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(sleeper) and not os.path.exists(run.folder) and not is_running(warden), 15)


def test_a_named_semaphore_of_the_killed_is_removed(run: Run) -> None:
    """Its maker has it mapped under another name than it has by then."""
    named = pathlib.Path(run.folder, "named")
    run.start(SEMAPHORE, str(named))
    path = pathlib.Path("/dev/shm", "sem." + named.read_text().lstrip("/"))
    assert path.exists()
    warden = Warden(run.id, run.folder)
    assert warden.sweep() == [] and warden.close() == []
    assert not path.exists()


def test_shared_memory_of_the_killed_is_removed_and_that_of_others_is_not(run: Run) -> None:
    own, shared = f"/dev/shm/{run.id}-own", f"/dev/shm/{run.id}-shared"
    warden = Warden(run.id, run.folder)
    run.start(HOLDER, own)
    run.start(HOLDER, shared)
    run.start(HOLDER, shared, marked=False)
    try:
        assert warden.sweep() == [] and warden.close() == []
        assert not os.path.exists(own) and os.path.exists(shared)
    finally:
        os.unlink(shared)


def test_a_killed_warden_is_followed_by_another_that_outlives_the_driver(run: Run) -> None:
    driver = (
        "import os, signal, sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from real.warden import Warden\n"
        "warden = Warden(sys.argv[2], sys.argv[3])\nfirst = warden.pid\nwarden.renew()\n"
        "assert warden.pid == first\nos.kill(first, signal.SIGKILL)\n"
        "while warden.pid == first:\n    warden.renew()\n"
        "print('up', flush=True); time.sleep(300)"
    )
    root = str(pathlib.Path(__file__).resolve().parents[2])
    pid = run.start(driver, root, run.id, run.folder, marked=False)
    sleeper = run.start(SLEEPER)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(sleeper) and not os.path.exists(run.folder), 10)


def test_where_the_warden_itself_is_killed_the_driver_does_its_work(run: Run) -> None:
    warden = Warden(run.id, run.folder)
    first = run.start(SLEEPER)
    os.kill(warden.pid, signal.SIGKILL)
    assert warden.sweep() == []
    second = run.start(SLEEPER)
    assert warden.close() == []
    assert not is_running(first) and not is_running(second) and not os.path.exists(run.folder)
