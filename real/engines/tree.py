"""The processes of one engine: who they are, and how nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from typing import Literal

from real.engines.leftovers import Leftovers
from real.warden import shared_memory_of

Part = Literal["main", "scheduler", "detokenizer"]

_LEASH = pathlib.Path(__file__).with_name("leash.py")
_LAST_BYTES = 4000
_LAST_LINES = 25


class EngineTree:
    """An engine's main process and its children, in a process group of their own.

    Args:
        command, environment: of the main process.
        log: takes what it prints.
        leftovers: what must go with it.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], log: pathlib.Path, leftovers: Leftovers
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._leftovers = leftovers
        self._log = log
        # Popen here and not asyncio's: the leash holds to the thread that forks, and that must be this one.
        with open(log, "ab") as output:
            self._main = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *command],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._descriptor = os.pidfd_open(self._main.pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._end_seen)

    @property
    def pid(self) -> int:
        return self._main.pid

    async def wait(self) -> int:
        """The exit status of the main process, negative for a signal, when it has ended."""
        await self._ended.wait()
        return self._main.wait()

    def pids(self) -> dict[int, str]:
        """The living processes: pid to command line."""
        return tree_of(self.pid)

    def signal(self, number: signal.Signals, part: Part | None = None) -> None:
        """Send a signal to one part, or to every process."""
        if part is not None:
            os.kill(pid_of(part, self.pid), number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._main.pid, number)

    def note_shared_memory(self) -> None:
        """Remember the shared memory that the processes have mapped now: SGLang leaves some of it behind."""
        found: set[str] = set()
        for pid in self.pids():
            found |= shared_memory_of(pid)
        for path in sorted(found):
            self._leftovers.add(path)

    async def clear(self) -> None:
        """Kill what is left, wait until it is gone, and remove its shared memory."""
        left = self.pids()
        self.note_shared_memory()
        self.signal(signal.SIGKILL)
        await self.wait()
        for pid in left:  # children that have made a session of their own
            if pid != self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._leftovers.clear()

    def last_words(self) -> str:
        """The end of its log."""
        with open(self._log, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LAST_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LAST_LINES:])

    def _end_seen(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set()


def tree_of(root: int) -> dict[int, str]:
    """A process and what descends from it, as far as they live: pid to command line."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            parent = parent_of(int(entry.name))
            if parent:
                children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            found[pid] = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        todo += children.get(pid, [])
    return found


def pid_of(part: Part, root: int) -> int:
    """The process of an engine whose main process is ``root``. Raises LookupError: the engine has no such process."""
    if part == "main":
        return root
    pids = tree_of(root)
    for pid, command in pids.items():
        if pid != root and part in command:
            return pid
    raise LookupError(f"the engine has no {part} process; it runs {list(pids.values())}")


def parent_of(pid: int) -> int:
    """The parent of a process; 0 for one that has ended."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
