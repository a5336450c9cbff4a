"""How long the machine held up an engine or its client: what a fact in real time cannot be asked through.

A fact says what an engine does within a second. On a machine that did not run the engine in that second, the clock has
told of the machine. What can hold a process up, and where it is seen:

- another process has the processor: for each thread the kernel counts how long it was ready to run and did not
  (https://docs.kernel.org/scheduler/sched-stats.html, /proc/PID/task/TID/schedstat);
- a machine that runs as a guest has lost the processor itself: the host may tell ("steal" in /proc/stat), and where it
  does not, a thread that sleeps on each processor wakes up late;
- the disk, or memory that must first be found: /proc/pressure (https://docs.kernel.org/accounting/psi.html).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import threading
import time

from real.warden import family_of

LATE_S = 0.1
"""What a fact must bear in a second; the bounds of the facts leave more than twice that."""
_WINDOW_S = 1.0
_TICK_S = 0.02


class Starvation:
    """``async with Starvation(main_pid) as starved: ...``, then ``starved.seconds`` and ``starved.causes``.

    Args:
        main_pid: of the engine; its children count too. Processes that come or go meanwhile do not.
            None: a simulated one, which waits for nobody.
    """

    def __init__(self, main_pid: int | None) -> None:
        self._main_pid = main_pid
        self.causes: dict[str, float] = {}
        """What held them up -> the most of it in one second, in seconds; known at the end."""
        self._before: dict[tuple[str, object], float] = {}
        self._overslept_s: dict[str, float] = {}
        self._over = threading.Event()
        self._sleepers: list[threading.Thread] = []

    @property
    def seconds(self) -> float:
        """The most that one cause took of one second."""
        return max(self.causes.values(), default=0.0)

    async def __aenter__(self) -> Starvation:
        if self._main_pid is not None:
            self._before = self._counters(self._main_pid)
            self._watcher = asyncio.ensure_future(self._watch(self._main_pid))
            for processor in os.sched_getaffinity(0):
                self._sleepers.append(threading.Thread(target=self._sleep_on, args=(processor,)))
                self._sleepers[-1].start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._main_pid is not None:
            self._watcher.cancel()
            self._over.set()
            for sleeper in self._sleepers:
                sleeper.join()
            self._end_window(self._main_pid)

    def __str__(self) -> str:
        told = sorted((cause, seconds) for cause, seconds in self.causes.items() if seconds >= 0.01)
        return ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in told)

    async def _watch(self, main_pid: int) -> None:
        while True:
            ends = time.monotonic() + _WINDOW_S
            while (slept := time.monotonic()) < ends:
                await asyncio.sleep(_TICK_S)
                self._late("the client's loop woke up late", slept)
            self._end_window(main_pid)

    def _sleep_on(self, processor: int) -> None:
        os.sched_setaffinity(0, {processor})  # of this thread alone
        while not self._over.is_set():
            slept = time.monotonic()
            time.sleep(_TICK_S)
            self._late(f"a thread on processor {processor} woke up late", slept)

    def _late(self, cause: str, slept: float) -> None:
        late_s = time.monotonic() - slept - 2 * _TICK_S
        if late_s > 0:
            self._overslept_s[cause] = self._overslept_s.get(cause, 0.0) + late_s

    def _end_window(self, main_pid: int) -> None:
        counters = self._counters(main_pid)
        self._before, before = counters, self._before
        self._overslept_s, overslept = {}, self._overslept_s
        lost = [(key[0], counters[key] - at_first) for key, at_first in before.items() if key in counters]
        for cause, seconds in (*lost, *overslept.items()):
            self.causes[cause] = max(self.causes.get(cause, 0.0), seconds)

    @staticmethod
    def _counters(main_pid: int) -> dict[tuple[str, object], float]:
        """(cause, whose) -> seconds since the start of whatever it is."""
        found: dict[tuple[str, object], float] = {}
        for pid in {os.getpid(), *family_of(main_pid)}:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    waited_ns = int((task / "schedstat").read_text().split()[1])
                    found["a thread waited for a processor", int(task.name)] = waited_ns * 1e-9
        for line in pathlib.Path("/proc/stat").read_text().splitlines():
            if re.match(r"cpu\d", line):
                name, *ticks = line.split()
                found["the host took a processor", name] = int(ticks[7]) / os.sysconf("SC_CLK_TCK")
        for what in ("io", "memory"):
            with contextlib.suppress(OSError):  # a kernel without it
                some = pathlib.Path(f"/proc/pressure/{what}").read_text().partition("\n")[0]
                found[f"something waited for {what}", what] = int(some.rpartition("total=")[2]) * 1e-6
        return found
