"""What faults do to the HTTP messages of engines, and to their pages: the `Traffic` of clients and fronts."""

from __future__ import annotations

import re
import socket
from typing import Final

from protocol.messages import EngineAddress
from real.engines.traffic import Fate, Message, ReplyFate, RequestFate, Traffic
from real.faults.links import Links, Passing
from real.faults.table import FaultTable

_VALUE = re.compile(rb"^(?!#)(.*\S)[ \t]+\S+$", re.MULTILINE)
_BAD: Final = frozenset(("bad_answer",))
_NOT_FOUND = b'{"detail":"Not Found"}'
_AT_THE_FRONT: Final[dict[str, RequestFate]] = {
    "request_lost": "lose",
    "duplicated": "duplicate",
    "error_now": "break_then_deliver",
}


class FaultyTraffic(Traffic):
    """Looks at the faults in force.

    Args:
        links: what befalls messages.
        table: what else is in force.
    """

    def __init__(self, links: Links, table: FaultTable) -> None:
        self._links = links
        self._table = table
        self._stale: dict[int, bytes] = {}  # by fault: the page that it shows
        self._hole: Blackhole | None = None

    @property
    def plain(self) -> bool:
        return self._links.plain

    async def destination(self, message: Message, address: EngineAddress) -> tuple[str, int]:
        """Client side: a partition or latency holds up the handshake; under ``connect_timeout`` it goes nowhere."""
        if not self._links.plain:
            passing = _passing(message)
            if self._links.fate(passing, "request", connecting=True) is not None:
                self._hole = self._hole or Blackhole()
                return self._hole.address
            await self._links.cross(passing, "request")
        return address.host, address.port

    async def request(self, message: Message) -> Fate:
        if self._links.plain:
            return Fate()
        found = self._links.fate(_passing(message), "request", connecting=False)
        if found is None:
            return Fate()
        return Fate(_AT_THE_FRONT.get(found.fate, "deliver"), found.delay_s)

    async def reply(self, message: Message) -> ReplyFate:
        if self._links.plain:
            return "deliver"
        passing = _passing(message)
        if self._links.fate(passing, "reply") is not None:
            return "lose"
        await self._links.cross(passing, "reply")
        return "deliver"

    async def part(self, message: Message) -> None:
        await self._links.cross(_passing(message), "reply")

    def bad_answer(self, message: Message) -> str | None:
        return None if self._table.none_of(_BAD) else self._links.bad_answer(_passing(message))

    def page(self, message: Message, status: int, text: bytes) -> tuple[int, bytes]:
        if message.route != "/metrics":
            return status, text
        for fault in self._table.active("metrics_missing", "metrics_stale", "metrics_nan"):
            if fault.name != message.engine or not self._table.claim(fault, f"/metrics of {message.engine}"):
                continue
            if fault.fault == "metrics_missing":
                status, text = 404, _NOT_FOUND
            elif fault.fault == "metrics_nan" and status == 200:
                text = _VALUE.sub(rb"\1 NaN", text)
            elif fault.fault == "metrics_stale":
                text = self._stale.setdefault(fault.number, text)
        return status, text


class Blackhole:
    """A port of this machine on which no handshake ends, as on a host behind a dead link.

    The queue of its listener is full, and Linux then drops every further SYN.
    """

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._waiting = [self._knock() for _ in range(3)]  # one more than it takes

    def _knock(self) -> socket.socket:
        knocking = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        knocking.setblocking(False)
        knocking.connect_ex(self.address)
        return knocking

    def close(self) -> None:
        for held in (self._listener, *self._waiting):
            held.close()


def _passing(message: Message) -> Passing:
    return Passing(message.call, message.route, message.caller, message.engine, message.sent, http=True)
