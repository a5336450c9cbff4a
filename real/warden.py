"""The warden of a run: a small process that outlives the driver and leaves nothing of the run behind.

``python warden.py RUN FOLDER`` holds the reading end of a pipe to the driver. A line on it is a request to end every
process of the run; the end of the pipe (the driver has ended, or was killed at any instruction) is the same request,
and then the run's folder and shared memory go too. A process belongs to the run when its environment says so
(``SEATRIAL_RUN``, inherited from Ray's daemons by actors, engines and their children) or when it descends from one
that does. The normal end of a run takes this path as well, so there is no second one that is never tried.

A file of its own with the standard library alone: it starts in a few milliseconds and holds on to nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

MARK = "SEATRIAL_RUN"
_LONGEST_S = 20.0
_LOOK_S = 0.02
_REMEMBER_EVERY_S = 5.0


class Swept(NamedTuple):
    """What a sweep did: processes ended, and (pid, command line) of those that would not."""

    killed: int
    left: tuple[tuple[int, str], ...]


class Sweeper:
    """Finds and ends what belongs to a run.

    Args:
        run: id of the run, as in the environment of its processes.
        folder: the run's temporary folder.
    """

    def __init__(self, run: str, folder: str) -> None:
        self._mark = f"{MARK}={run}".encode()
        self._folder = folder
        self._shared_memory: set[str] = set()

    def processes(self) -> dict[int, str]:
        """The living processes of the run: pid to command line."""
        parents = _parents()
        found = _with_descendants({pid for pid in parents if self._is_marked(pid)}, parents) - {os.getpid()}
        return {pid: _command(pid) for pid in sorted(found)}

    def below(self, roots: set[int]) -> list[int]:
        """Those of these processes, and of what descends from them, that live and belong to the run."""
        parents = _parents()
        return sorted(pid for pid in _with_descendants(roots & set(parents), parents) if self._is_marked(pid))

    def _is_marked(self, pid: int) -> bool:
        return self._mark in _read(pid, "environ").split(b"\0")

    def remember(self) -> None:
        """Note the shared memory that the run's processes have mapped: who is killed does not unlink its own."""
        for pid in self.processes():
            self._shared_memory |= shared_memory_of(pid)

    def sweep(self) -> Swept:
        """SIGKILL until there is none. Stopped processes die of it too."""
        killed: set[int] = set()
        deadline = time.monotonic() + _LONGEST_S
        self.remember()
        while living := self.processes():
            for pid in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            if time.monotonic() > deadline:
                return Swept(len(killed), tuple(living.items()))
            time.sleep(_LOOK_S)
        return Swept(len(killed), ())

    def remove(self) -> str:
        """Remove the folder and the shared memory; returns what could not be, empty when all is gone."""
        still_used: set[str] = set()
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                still_used |= shared_memory_of(int(entry.name))
        for path in sorted(self._shared_memory - still_used):
            with contextlib.suppress(OSError):
                os.unlink(path)
        shutil.rmtree(self._folder, ignore_errors=True)
        return f"{self._folder} could not be removed" if os.path.exists(self._folder) else ""


class Warden:
    """The driver's end.

    Args:
        run: id of the run; the driver puts it into ``os.environ[MARK]`` before it starts anything else.
        folder: the run's temporary folder, which exists.
    """

    def __init__(self, run: str, folder: str) -> None:
        self._run = run
        self._folder = folder
        self._sweeper = Sweeper(run, folder)
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), self._run, self._folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            env={"PATH": os.defpath}, start_new_session=True, text=True,
        )  # fmt: skip
        answer = self._said()
        if answer != "ready":
            raise RuntimeError(f"the warden of the run did not start (it said {answer!r})")

    def renew(self) -> None:
        """Start another one if somebody has killed it: a driver that is killed next would leave everything behind."""
        if self._process.poll() is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> dict[int, str]:
        """The living processes of the run: pid to command line."""
        return self._sweeper.processes()

    def sweep(self) -> list[str]:
        """End every process of the run now. Returns one line for each that would not."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write("sweep\n")
            self._process.stdin.flush()
            left = json.loads(self._said())["left"]
        except (OSError, ValueError):  # somebody has killed the warden: then its work is ours
            left = self._sweeper.sweep().left
        return [f"process {pid} did not end: {command}" for pid, command in left]

    def close(self) -> list[str]:
        """End what is left, and remove the folder and shared memory. Returns what could not be done."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()
            answer = json.loads(self._said())
            left, unremoved = answer["left"], answer["unremoved"]
        except (OSError, ValueError):
            left, unremoved = self._sweeper.sweep().left, self._sweeper.remove()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return [f"process {pid} did not end: {command}" for pid, command in left] + ([unremoved] if unremoved else [])

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _parents() -> dict[int, int]:
    """Every living process, and its parent."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            state, parent = _state(int(entry.name))
            if state not in "ZX":
                found[int(entry.name)] = parent
    return found


def family_of(pid: int) -> set[int]:
    """A process of this machine and the living ones that descend from it."""
    return _with_descendants({pid}, _parents())


def _with_descendants(pids: set[int], parents: dict[int, int]) -> set[int]:
    found = set(pids)
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _state(pid: int) -> tuple[str, int]:
    """(state, parent) of a process; a dead one's state is X."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[1])) if len(fields) > 1 else ("X", 0)


def shared_memory_of(pid: int) -> set[str]:
    """Paths of the shared memory that a process has mapped, as far as they still have a name."""
    # By inode: who made a named semaphore has it mapped under a first name, which is gone by then.
    inodes = {int(line.split()[4]) for line in _read(pid, "maps").splitlines() if b" /dev/shm/" in line}
    if not inodes:
        return set()
    with os.scandir("/dev/shm") as entries:
        return {entry.path for entry in entries if entry.inode() in inodes}


def _read(pid: int, what: str) -> bytes:
    try:
        return pathlib.Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return b""


def _serve(sweeper: Sweeper) -> dict[str, Any]:
    """Do as the pipe says until it ends; returns the last answer."""
    import select

    while True:
        readable, _, _ = select.select([0], [], [], _REMEMBER_EVERY_S)
        if not readable:
            sweeper.remember()
            continue
        if not os.read(0, 65536):
            swept = sweeper.sweep()
            return {"left": swept.left, "unremoved": sweeper.remove()}
        print(json.dumps({"left": sweeper.sweep().left}), flush=True)


def main() -> None:
    run, folder = sys.argv[1:]
    # Ctrl-C and a closing terminal reach whole groups; a polite kill by hand would leave the run without a warden.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    print("ready", flush=True)
    last = _serve(Sweeper(run, folder))
    with contextlib.suppress(OSError):  # the driver is dead and nobody reads
        print(json.dumps(last), flush=True)


if __name__ == "__main__":
    main()
