"""Looking at processes that a test has started, or that something else has."""

from __future__ import annotations

import pathlib


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that is dead and that nobody has reaped yet does not run."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between the open and the read
        return False
