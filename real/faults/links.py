"""What a message meets on its way: the one place for calls between actors and for HTTP.

Fates and their order are those of ``sim/network.py``. The caller's process decides what befalls a request of a Ray
call and its answer; of an HTTP call, the caller decides on connecting and the engine's front on the rest
(`real.faults.traffic`). A partition or latency acts between the nodes of both ends; a message that it meets waits where
it is until the repair, and is lost if the process in which it waits dies by then.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Final, Literal

from protocol.errors import ConnectionLost
from real.faults.table import FaultTable, Standing, befalls

if TYPE_CHECKING:
    from real.census import Census
    from real.evidence import ProcessLog

Leg = Literal["request", "reply", "control"]
"""control: cancels. They are held and delayed as others, but no fate befalls them; nor does one befall the items of
streams, which cross as replies do."""
Fate = Literal[
    "none", "request_lost", "reply_lost", "delayed", "error_now", "duplicated", "connect_timeout", "read_timeout"
]

_SHOWN: Final[dict[str, Fate]] = {
    "request_lost": "request_lost",
    "reply_lost": "reply_lost",
    "delayed_delivery": "delayed",
    "duplicate": "duplicated",
    "connect_timeout": "connect_timeout",
    "read_timeout": "read_timeout",
}
"""Fault to what ``call.fate`` says of the message, in the order in which they are looked at."""
_FATES: Final = tuple(_SHOWN)
_REPLIES: Final = ("reply_lost", "read_timeout")
_HTTP_ONLY: Final = ("connect_timeout", "read_timeout")
_OF_NODES: Final = frozenset(("partition", "latency"))
_ALL: Final = frozenset(_FATES) | _OF_NODES
_LOOK_S: Final = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Passing:
    """A call or an HTTP exchange that has a message under way. ``sent``: id of its ``call.sent``."""

    call: int
    method: str
    caller: str
    callee: str
    sent: str | None
    http: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Befallen:
    """What befalls a message. ``delay_s``: of the late delivery or of the second one."""

    fate: Fate
    delay_s: float = 0.0


class Links:
    """The links as one process sees them.

    Args:
        table: of the process.
        census: says on which node a name is.
        log: takes ``call.fate``.
    """

    def __init__(self, table: FaultTable, census: Census, log: ProcessLog) -> None:
        self._table = table
        self._census = census
        self._log = log
        self._repairs: dict[tuple[str, str], asyncio.Future[None]] = {}

    @property
    def plain(self) -> bool:
        """No fault that a message could meet is in force."""
        return self._table.none_of(_ALL)

    def fate(
        self, passing: Passing, leg: Literal["request", "reply"], *, connecting: bool | None = None
    ) -> Befallen | None:
        """What befalls this message. Claims the hit and records it: act on it.

        Args:
            connecting: of an HTTP request; True asks about the connection alone, False about all but the connection.
        """
        for fault in self._table.active(*_FATES):
            if (fault.fault in _REPLIES) != (leg == "reply") or (fault.fault in _HTTP_ONLY and not passing.http):
                continue
            if connecting is not None and (fault.fault == "connect_timeout") != connecting:
                continue
            if not self._matches(fault, passing) or not self._table.chosen(fault):
                continue
            shown = _SHOWN[fault.fault]
            ends = (passing.caller, passing.callee) if leg == "request" else (passing.callee, passing.caller)
            if self._meet(fault, passing, shown, *ends):
                kind: Fate = "error_now" if fault.params.get("error_now") else shown
                return Befallen(kind, float(fault.params.get("delay_s", 0.0)))
        return None

    def bad_answer(self, passing: Passing) -> str | None:
        """What the answer to this exchange shall be made; None: it is left as it is. Claims the hit: act on it."""
        for fault in self._table.active("bad_answer"):
            if self._matches(fault, passing) and self._table.chosen(fault):
                shown = f"bad_answer {passing.method} {passing.caller}>{passing.callee}"
                if self._table.claim(fault, shown):
                    return str(fault.params["what"])
        return None

    async def cross(self, passing: Passing, leg: Leg) -> None:
        """Wait as long as partitions and latency hold this message up."""
        if self._table.none_of(_OF_NODES):
            return
        source, target = (passing.callee, passing.caller) if leg == "reply" else (passing.caller, passing.callee)
        link = (self._census.node_of(source), self._census.node_of(target))
        block = self._block(link)
        if block is not None and self._meet(block, passing, "held", source, target):
            # Everybody waits on one future, whose waiters go on in the order in which they came.
            await asyncio.shield(self._repaired(link))
        call = f"{passing.sent or passing.caller}/{passing.call}"  # the numbers of another process, or life, are others
        slowed = f"slowed {passing.method} {'>'.join(link)}"
        extra_s = sum(
            float(fault.params["extra_s"])
            for fault in self._table.active("latency")
            if link in fault.links and self._table.claim(fault, slowed, once=call)
        )
        if extra_s:
            await asyncio.sleep(extra_s)

    def _matches(self, fault: Standing, passing: Passing) -> bool:
        # The method first: it is at hand, a node is read from a file.
        if not befalls(str(fault.params.get("method", "*")), passing.method, passing.method):
            return False
        return self._is_end(fault.source, passing.caller) and self._is_end(fault.destination, passing.callee)

    def _is_end(self, pattern: str, name: str) -> bool:
        return befalls(pattern, name, name) or befalls(pattern, name, self._census.node_of(name))

    def _meet(self, fault: Standing, passing: Passing, shown: str, source: str, target: str) -> bool:
        if not self._table.claim(fault, f"{shown} {passing.method} {source}>{target}"):
            return False
        self._log.answered(
            0, passing.sent, "call.fate", call=passing.call, fate=shown, source=source, target=target
        )  # fmt: skip
        return True

    def _block(self, link: tuple[str, str]) -> Standing | None:
        return next((fault for fault in self._table.active("partition") if link in fault.links), None)

    def _repaired(self, link: tuple[str, str]) -> asyncio.Future[None]:
        repair = self._repairs.get(link)
        if repair is None or repair.done():
            repair = self._repairs[link] = asyncio.ensure_future(self._wait_for_repair(link))
        return repair

    async def _wait_for_repair(self, link: tuple[str, str]) -> None:
        while self._block(link) is not None:
            await asyncio.sleep(_LOOK_S)


def broken(method: str, name: str) -> ConnectionLost:
    """The error of a call whose connection broke though its request is delivered."""
    return ConnectionLost(f"the connection broke during {method!r} of {name}")
