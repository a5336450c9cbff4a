"""Where the simulated loop deviates from asyncio's on purpose: test of CPython -> reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Deviation:
    """Tests (a glob over ``module.Class.test``) that cannot pass, why, and on which versions of Python."""

    pattern: str
    reason: str
    since: tuple[int, int] = (3, 11)
    until: tuple[int, int] = (3, 99)

    @property
    def module(self) -> str:
        return self.pattern.partition(".")[0]

    def applies(self) -> bool:
        return self.since <= sys.version_info[:2] <= self.until

    def matches(self, test: str) -> bool:
        return self.applies() and fnmatchcase(test, self.pattern)


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "test_tasks.RunCoroutineThreadsafeTests.test_run_coroutine_threadsafe*",
        "threads and executors are refused: the test calls the loop from a thread of run_in_executor",
    ),
    Deviation(
        "test_tasks.*.test_stop_while_run_in_complete",
        "the test expects 0.3 s because TestLoop moves time when a timer is made; a loop that is stopped at 0.2 s "
        "shows 0.2 s here, as asyncio's own selector loop does",
    ),
    Deviation(
        "test_runners.RunTests.test_asyncio_run_debug",
        "the environment does not reach a run: debug mode is off unless set_debug or debug=True turns it on",
    ),
    Deviation(
        "test_runners.RunnerTests.test_interrupt_call_soon",
        "the test spins on sleep(0) until a timer fires; simulated time does not pass while callbacks are ready, and "
        "100,000 of them at one instant are reported as a livelock",
    ),
)
