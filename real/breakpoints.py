"""Breakpoints: the process that emits an event which a step waits for is held until the injector has acted.

The emitter has written its event and stands before its effect. It tells the driver over a Unix socket and blocks,
with everything that runs in its process, until the driver has seen the event; then the effect follows. A step that
acts *after* the effect is only told. The driver's own events are handed over inside of the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from protocol.evidence import Event, decode, encode
from real.faults.table import Armed, Table, TableWriter

if TYPE_CHECKING:
    from real.evidence import ProcessLog

HELD_AT_MOST_S: Final = 15.0
"""The driver acts within milliseconds, or a second for a node; it is gone or hangs when it has not by then."""

NEVER_EMITTED: Final = frozenset({"run.finished", "run.tail"})
"""Kinds that no process emits while steps can fire (a test compares this with the code)."""


class DriverGone(Exception):
    """The driver did not answer a held emitter; the text says how."""


class Announcer:
    """Tells the driver of the events of one process. One connection, made at the first of them."""

    def __init__(self) -> None:
        self._door: socket.socket | None = None
        self._unanswered = b""
        self._gone = False

    def announce(self, event: Event, table: Table) -> int:
        """Tell, and wait if anybody wants that. Returns the driver's Lamport time, 0 if there was nothing to wait for.

        Raises:
            DriverGone: once; from then on nothing is told.
        """
        wanted = [armed for armed in table.armed.get(event.kind, ()) if armed.wants(event)]
        if not wanted or self._gone:
            return 0
        wait = any(armed.wait for armed in wanted)
        try:
            if self._door is None:
                self._door = _connected(table.door)
            self._door.sendall((b"wait " if wait else b"tell ") + encode(event).encode())
            return int(self._answer(self._door)) if wait else 0
        except OSError as error:
            self._gone = True
            self.close()
            how = f"within {HELD_AT_MOST_S:g} s" if isinstance(error, TimeoutError) else f"({error})"
            raise DriverGone(f"the driver did not see {event.kind} {event.id} {how}") from error

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _answer(self, door: socket.socket) -> bytes:
        while b"\n" not in self._unanswered:
            got = door.recv(4096)
            if not got:
                raise ConnectionResetError("connection closed")
            self._unanswered += got
        line, _, self._unanswered = self._unanswered.partition(b"\n")
        return line


class Breakpoints:
    """The driver's side: who wants to see which events.

    Args:
        writer: of the run's fault table, where armed kinds are made known.
        log: the driver's own; what it emits while an event is seen follows from that event.
        run: id of the run; names the socket.
    """

    def __init__(self, writer: TableWriter, log: ProcessLog, run: str) -> None:
        self._writer = writer
        self._log = log
        # In the abstract namespace, which has no file to leave behind and no limit of a path's length to meet.
        self._name = f"seatrial/{run}/{os.getpid()}"
        self._hooks: dict[str, list[tuple[Armed, Callable[[Event], None]]]] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; call it in the driver's loop before the first hook."""
        self._server = await asyncio.start_unix_server(self._serve, path="\0" + self._name, limit=1 << 20)
        self._writer.door = self._name
        self._log.listener = self._see

    async def close(self) -> None:
        """Nobody is told or held any more."""
        for kind, hooks in list(self._hooks.items()):
            for armed, _ in list(hooks):
                self._unhook(kind, armed)
        self._log.listener = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def hook(
        self,
        kind: str,
        see: Callable[[Event], None],
        *,
        where: dict[str, Any] | None = None,
        from_ns: int = 0,
        wait: bool = False,
    ) -> Callable[[], None]:
        """Call ``see`` in the driver at events of a kind, wherever they are emitted; returns how to end that.

        Args:
            where: only events with these fields (``actor`` and ``inc`` too).
            from_ns: only events from this time of the run on.
            wait: hold the emitter, before the effect of the event, until ``see`` has returned.
        """
        armed = Armed(dict(where or {}), from_ns, wait)
        self._hooks.setdefault(kind, []).append((armed, see))
        self._writer.arm(kind, armed)
        return lambda: self._unhook(kind, armed)

    def _unhook(self, kind: str, armed: Armed) -> None:
        self._hooks[kind] = [pair for pair in self._hooks.get(kind, []) if pair[0] is not armed]
        self._writer.disarm(kind, armed)

    def _see(self, event: Event) -> None:
        for armed, see in list(self._hooks.get(event.kind, ())):
            if armed.wants(event):
                see(event)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):  # an emitter may die while it is held
            while line := await reader.readline():
                how, _, text = line.partition(b" ")
                event = decode(text)
                # In a context of its own, for what is done now and from now on follows from this event.
                contextvars.copy_context().run(self._seen_from_outside, event)
                if how == b"wait":
                    writer.write(b"%d\n" % self._log.lc)
                    await writer.drain()

    def _seen_from_outside(self, event: Event) -> None:
        self._log.received(event.lc, event.id)
        self._see(event)


def _connected(name: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.settimeout(HELD_AT_MOST_S)
    door.connect("\0" + name)
    return door


def deaf_to(kinds: list[str]) -> list[str]:
    """Those of these kinds that no process of the real world emits, so that a step would wait for ever."""
    return [kind for kind in kinds if kind in NEVER_EMITTED]
