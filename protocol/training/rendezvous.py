"""Where training ranks meet: collectives and barriers of one update, which a failure of any rank ends for all.

Stands for the process group of the trainer. A rank that fails does not arrive any more; who notices it says so here,
and whoever waits is let go with an error that names the reason (serving.md 9.4, W-I5).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from protocol.errors import BarrierError

_BROKEN_KEPT = 64


class _Meeting:
    __slots__ = ("left", "payloads", "waiting")

    def __init__(self) -> None:
        self.payloads: dict[int, tuple[bytes, ...]] = {}
        self.waiting: list[asyncio.Future[None]] = []
        self.left = 0


class Rendezvous:
    """Lets ranks wait for each other. An actor."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[str, str], _Meeting] = {}
        self._broken: OrderedDict[str, str] = OrderedDict()

    async def gather(
        self, update: str, what: str, rank: int, ranks: tuple[int, ...], payload: tuple[bytes, ...] = ()
    ) -> tuple[tuple[bytes, ...], ...]:
        """Wait until all of ``ranks`` are here; returns what each has brought, in the order of ``ranks``.

        Args:
            update: run-unique id of the weight update.
            what: which of its meetings; every rank names it alike.
            rank, ranks: who arrives, and who is expected.
            payload: bytes that everybody gets.

        Raises BarrierError, *unknown*, once the update is given up; how far others are nobody knows.
        """
        self._check(update)
        meeting = self._meetings.setdefault((update, what), _Meeting())
        meeting.payloads[rank] = payload
        if len(meeting.payloads) == len(ranks):
            for waiter in meeting.waiting:
                if not waiter.done():
                    waiter.set_result(None)
        else:
            waiter = asyncio.get_running_loop().create_future()
            meeting.waiting.append(waiter)
            await waiter
            self._check(update)
        meeting.left += 1
        if meeting.left == len(ranks):
            self._meetings.pop((update, what), None)
        return tuple(meeting.payloads[one] for one in ranks)

    async def give_up(self, update: str, why: str) -> None:
        """Nobody waits in this update any more, and who arrives later is refused. Idempotent."""
        self._broken.setdefault(update, why)
        if len(self._broken) > _BROKEN_KEPT:
            self._broken.popitem(last=False)
        for key in [key for key in self._meetings if key[0] == update]:
            for waiter in self._meetings.pop(key).waiting:
                if not waiter.done():
                    waiter.set_result(None)

    def _check(self, update: str) -> None:
        why = self._broken.get(update)
        if why is not None:
            raise BarrierError(f"update {update} was given up: {why}")
