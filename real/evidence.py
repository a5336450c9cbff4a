"""Evidence of one real process: its events, each on disk by one unbuffered write before the effect that it reports.

Every process writes a file of its own (``events/<actor>-<incarnation>.jsonl`` in the run's folder), because nothing
that is shared between processes survives a SIGKILL at any instruction. ``seq`` is 0 until the files are merged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import time
import urllib.parse
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from protocol.evidence import Event, encode
from real.breakpoints import Announcer, DriverGone
from real.faults.table import FaultTable, TableFile

_WHOLE, _UNWRITTEN = "events-whole", "events-unwritten"

OBSERVED = 2**52
"""From here on ``n`` is no place among the process's own events: another process wrote it (kill, SIGSTOP)."""


def begin_evidence(folder: str) -> None:
    """Make ready a run's folder for the mark that some event could not be written."""
    pathlib.Path(folder, _WHOLE).touch()


def evidence_is_lost(folder: str) -> bool:
    """Whether some process of the run could not write an event, for want of space."""
    return os.path.exists(os.path.join(folder, _UNWRITTEN))


class ProcessLog:
    """The events of one (actor, incarnation), with their counter ``n`` and Lamport clock ``lc``.

    An event of a kind that a step waits for is a breakpoint: ``emit`` returns when the injector has acted.

    Args:
        folder: of the run; the same for all its processes.
        actor: name of the process.
        incarnation: its incarnation.
        started_ns: ``CLOCK_MONOTONIC`` at the start of the run, which all processes of a machine share; ``t_ns`` counts
            from it.
        clock_offset_ns: by how much this machine's clock is ahead of the driver's.
    """

    def __init__(self, folder: str, actor: str, incarnation: int, started_ns: int, clock_offset_ns: int = 0) -> None:
        self.actor = actor
        self.incarnation = incarnation
        self.n = 0
        self.lc = 0
        self._table = TableFile(folder)
        self.faults = FaultTable(folder, self._table, self.emit, f"{actor}/{incarnation}")
        """What is in force; this process's hits become its events."""
        self.listener: Callable[[Event], None] | None = None
        """In the driver, whose own events need no way: sees every one."""
        self._announcer = Announcer()
        self._started_ns = started_ns + clock_offset_ns
        self._cause: ContextVar[str | None] = ContextVar("seatrial_cause", default=None)
        path = pathlib.Path(folder, "events", f"{urllib.parse.quote(actor, safe='')}-{incarnation}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._folder = folder

    @property
    def latest(self) -> str | None:
        """Id of this process's latest event: what a message that leaves now follows from."""
        return f"{self.actor}/{self.incarnation}/{self.n}" if self.n else None

    def received(self, lc: int, cause: str | None) -> None:
        """A call arrived; what this task emits from now on follows from ``cause``."""
        self.lc = max(self.lc, lc)
        self._cause.set(cause)

    def emit(self, kind: str, /, **fields: Any) -> str:
        """Write an event of this process; returns its id.

        Raises:
            UndeclaredEvent: nothing is written or counted.
        """
        return self._write(kind, self._cause.get(), fields)

    def merge(self, lc: int) -> None:
        """Something of Lamport time ``lc`` is known here now."""
        self.lc = max(self.lc, lc)

    def answered(self, lc: int, cause: str | None, kind: str, /, **fields: Any) -> str:
        """Write an event that follows from another process's answer."""
        self.lc = max(self.lc, lc)
        return self._write(kind, cause, fields)

    def emit_for(self, actor: str, incarnation: int, number: int, kind: str, /, **fields: Any) -> None:
        """Write an event of another process that it cannot write itself. ``number``: unique in the run."""
        self.lc += 1
        event = Event(0, self.now_ns(), kind, actor, incarnation, OBSERVED + number, self.lc, self.latest, fields)
        self._append(event)
        self._show(event)

    def close(self) -> None:
        self._announcer.close()
        os.close(self._file)

    def _write(self, kind: str, cause: str | None, fields: dict[str, Any]) -> str:
        event = Event(0, self.now_ns(), kind, self.actor, self.incarnation, self.n + 1, self.lc + 1, cause, fields)
        self._append(event)
        self.n += 1
        self.lc += 1
        self._show(event)
        return event.id

    def _show(self, event: Event) -> None:
        """Let the driver see an event that is on disk and has had no effect yet, if anybody there wants to."""
        if self.listener is not None:
            self.listener(event)
            return
        table = self._table.look()
        if event.kind in table.armed:
            try:
                self.lc = max(self.lc, self._announcer.announce(event, table))
            except DriverGone as gone:
                self._write("run.anomaly", None, {"what": "breakpoint_unanswered", "detail": str(gone)})

    def _append(self, event: Event) -> None:
        line = encode(event).encode()
        try:
            written = os.write(self._file, line)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            written = 0
        if written < len(line):  # the disk is full: half a line would spoil the ones behind it
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            with contextlib.suppress(OSError):  # another process has said so already; a name needs no space
                os.rename(os.path.join(self._folder, _WHOLE), os.path.join(self._folder, _UNWRITTEN))
            raise OSError(errno.ENOSPC, f"an event of {self.actor} could not be written: {os.strerror(errno.ENOSPC)}")

    def now_ns(self) -> int:
        """The time of the run."""
        return time.monotonic_ns() - self._started_ns
