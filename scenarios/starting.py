"""Ctrl-C while the command line is still being imported is one line and its exit code, as it is later.

So is a module of somebody's that would be taken for one of ours.

Imported first. An error raised in the midst of an import would come out as a traceback, or as another error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from typing import NoReturn

TOLD = "interrupted; what was written so far is no verdict"
INTERRUPTED = 3  # no verdict: inconclusive


def leave_interrupted() -> NoReturn:
    """Say so and end this process, without Python's own end, in which modules take down what they have."""
    with contextlib.suppress(OSError):
        os.write(2, f"{TOLD}\n".encode())
    os._exit(INTERRUPTED)


def _end(*_: object) -> NoReturn:
    leave_interrupted()  # nothing has been begun, and there is nothing to be cleaned up


def imported() -> None:
    """From here on Ctrl-C is an error again, which whoever runs a command deals with."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _hidden() -> str:
    """What somebody's module is in the way of, as one in the folder that ``python -m`` is run in; empty: nothing is."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("protocol", "sim", "real", "analysis"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and os.path.dirname(os.path.dirname(os.path.abspath(spec.origin))) != ours:
            return f"{spec.origin} hides the package {name!r} of seatrial; rename it, or run this in another folder"
    return ""


_run = getattr(sys.modules["__main__"], "__spec__", None)
if _run is not None and _run.name == "scenarios.__main__" and (_why := _hidden()):
    print(f"error: {_why}", file=sys.stderr)
    raise SystemExit(2)
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is somebody's, or is to be ignored
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread, which alone gets the signal
        pass
