"""Slows processes down: ``python duty.py PERCENT PID ...`` lets them run for 100/PERCENT of the time.

It ends, and lets everything run again, when its standard input ends: when it is told to, and when the process that
started it is gone. A file of its own with the standard library alone, so that it is there in an instant.
"""

import os
import select
import signal
import sys

_PERIOD_S = 0.2
"""Long beside the time slices of the kernel and the beat of an emulated engine; short beside any time-out."""


def main() -> None:
    percent, pids = int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]]
    running_s = _PERIOD_S * 100 / percent
    try:
        while True:
            _send(pids, signal.SIGSTOP)
            if _told_to_end(_PERIOD_S - running_s):
                return
            _send(pids, signal.SIGCONT)
            if _told_to_end(running_s):
                return
    finally:
        _send(pids, signal.SIGCONT)


def _told_to_end(within_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], within_s)[0])


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has died; the others are still to be slow


if __name__ == "__main__":
    main()
