"""Who holds which process stopped: a process goes on when the last of the faults that stopped it has healed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter


class Stops:
    """SIGSTOP and SIGCONT of one run, counted. Signals to the dead are silent."""

    def __init__(self) -> None:
        self._holds: Counter[int] = Counter()
        self._duties: dict[int, list[int]] = {}

    def stop(self, pids: list[int]) -> None:
        for duty in self._duties_of(pids):
            _send(duty, signal.SIGSTOP)  # else it would let them go on
        for pid in pids:
            self._holds[pid] += 1
            _send(pid, signal.SIGSTOP)

    def held(self, pid: int) -> int:
        """How many faults hold it stopped."""
        return self._holds[pid]

    def go_on(self, pids: list[int]) -> None:
        """Take back one ``stop`` of each."""
        for pid in pids:
            self._holds[pid] -= 1
            if not self._holds[pid]:
                del self._holds[pid]
                _send(pid, signal.SIGCONT)
        for duty in self._duties_of(pids):
            if not any(pid in self._holds for pid in self._duties[duty]):
                _send(duty, signal.SIGCONT)

    def duty_begins(self, duty: int, pids: list[int]) -> None:
        """The process ``duty`` stops these and lets them go on, in turn, from now on."""
        self._duties[duty] = pids
        if any(pid in self._holds for pid in pids):
            _send(duty, signal.SIGSTOP)

    def duty_ends(self, duty: int) -> None:
        """It is about to be told to end, and must be able to."""
        del self._duties[duty]
        _send(duty, signal.SIGCONT)

    def stop_again(self, pids: list[int]) -> None:
        """Something has let these go on: stop those that are to be stopped."""
        for pid in pids:
            if pid in self._holds:
                _send(pid, signal.SIGSTOP)

    def _duties_of(self, pids: list[int]) -> list[int]:
        return [duty for duty, theirs in self._duties.items() if any(pid in theirs for pid in pids)]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
