"""Runs a command that cannot outlive the process that started it: ``python leash.py PARENT_PID COMMAND ...``.

The kernel is asked to SIGKILL this process when its parent dies, and the command takes its place. The request survives
the exec. A parent that died before the request was made would never be noticed, so it is looked at afterwards. A file
of its own with the standard library alone: it runs in the child, where importing the package would cost a second.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"leash: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("leash: the parent died before the engine was started")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
