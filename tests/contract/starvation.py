"""How long an engine or its client waited for a processor: what a fact in real time cannot be asked through.

A fact says what an engine does within a second. On a machine that had no processor for the engine in that second, the
clock has told of the machine. The kernel counts for each thread how long it was ready to run and did not
(https://docs.kernel.org/scheduler/sched-stats.html, /proc/PID/task/TID/schedstat); a machine that lends its processors
elsewhere is seen by this process's own loop, which wakes up late.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import time

from real.warden import family_of

LATE_S = 0.1
"""What a fact must bear in a second; the bounds of the facts leave more than twice that."""
_WINDOW_S = 1.0
_TICK_S = 0.02


class Starvation:
    """``async with Starvation(main_pid) as starved: ...``, then ``starved.seconds``.

    Args:
        main_pid: of the engine; its children count too. Processes that come or go meanwhile do not.
            None: a simulated one, which waits for nobody.
    """

    def __init__(self, main_pid: int | None) -> None:
        self._main_pid = main_pid
        self.seconds = 0.0
        """The most that one thread waited in one second; known at the end."""
        self._before: dict[tuple[int, int], int] = {}
        self._overslept_s = 0.0

    async def __aenter__(self) -> Starvation:
        if self._main_pid is not None:
            self._before = self._waited(self._main_pid)
            self._watcher = asyncio.ensure_future(self._watch(self._main_pid))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._main_pid is not None:
            self._watcher.cancel()
            self._end_window(self._main_pid)

    async def _watch(self, main_pid: int) -> None:
        while True:
            ends = time.monotonic() + _WINDOW_S
            while (slept := time.monotonic()) < ends:
                await asyncio.sleep(_TICK_S)
                self._overslept_s += max(0.0, time.monotonic() - slept - 2 * _TICK_S)
            self._end_window(main_pid)

    def _end_window(self, main_pid: int) -> None:
        waited = self._waited(main_pid)
        lost = (waited[thread] - before for thread, before in self._before.items() if thread in waited)
        self.seconds = max([self.seconds, self._overslept_s, *(ns * 1e-9 for ns in lost)])
        self._before, self._overslept_s = waited, 0.0

    @staticmethod
    def _waited(main_pid: int) -> dict[tuple[int, int], int]:
        """(process, thread) -> ns in which it was ready and did not run."""
        waited = {}
        for pid in {os.getpid(), *family_of(main_pid)}:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    waited[pid, int(task.name)] = int((task / "schedstat").read_text().split()[1])
        return waited
