"""Ctrl-C while the command line is still being imported is one line and its exit code, as it is later.

Imported first. An error raised in the midst of an import would come out as a traceback, or as another error.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

TOLD = "interrupted; what was written so far is no verdict"
INTERRUPTED = 3  # no verdict: inconclusive


class HalfStarted(KeyboardInterrupt):
    """An interrupt in the midst of the start of Ray. What Ray has in this process by then cannot be taken down in
    order: it may end it by SIGSEGV or wait for ever."""


def leave(code: int) -> NoReturn:
    """End this process without Python's own end, in which modules take down what they have."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _end(*_: object) -> NoReturn:
    os.write(2, f"{TOLD}\n".encode())
    os._exit(INTERRUPTED)  # nothing has been begun, and there is nothing to be cleaned up


def imported() -> None:
    """From here on Ctrl-C is an error again, which whoever runs a command deals with."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is somebody's, or is to be ignored
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread, which alone gets the signal
        pass
