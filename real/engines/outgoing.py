"""A streamed answer on its way from the front of an engine to its caller."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from real.engines.inbound import Inbound
from real.engines.traffic import Traffic

Relay = Callable[[Inbound, web.StreamResponse], Awaitable[None]]
"""Called before an answer leaves; it may hold it back, and it signs it."""


class Outgoing:
    """The events of one stream: they leave in order, each as soon as the link lets it pass.

    Whoever reads the engine's answer does not wait here for a link that holds events up: an engine goes on meanwhile,
    and its end is observed when it comes. What waits is lost if the engine dies by then.

    Args:
        relay: before the first event; None: the answer goes to nobody.
        traffic: what may happen to each event.
        keep: runs a task of the front.
    """

    def __init__(
        self,
        inbound: Inbound,
        response: web.StreamResponse,
        relay: Relay | None,
        traffic: Traffic,
        keep: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self.response = response
        self.heard = relay is not None
        """False: the caller has gone, or was never there."""
        self._inbound = inbound
        self._relay = relay
        self._traffic = traffic
        self._keep = keep
        self._begun = False
        self._waiting: deque[tuple[bytes, asyncio.Task[Any]]] = deque()
        self._sender: asyncio.Task[Any] | None = None  # while something waits

    async def send(self, event: bytes) -> None:
        """The next event: written while nothing is in force, as fast as the caller reads; else left to wait."""
        if not self.heard:
            return
        if self._sender is None and self._traffic.plain:
            if self._begun:
                await self._write(event)
            else:
                await self._leave(event, self._passing())
            return
        # Each starts on its way when it is sent: latency moves a stream, it does not stretch it.
        self._waiting.append((event, self._keep(self._passing())))
        if self._sender is None:
            self._sender = self._keep(self._send_waiting())

    async def over(self) -> None:
        """Until the last event has left."""
        if self._sender is not None:
            await self._sender

    def _passing(self) -> Coroutine[Any, Any, None]:
        """What the next event does before it can be written."""
        if self._begun:
            return self._traffic.part(self._inbound.message)
        self._begun = True
        return self._begin()

    async def _begin(self) -> None:
        assert self._relay is not None
        await self._relay(self._inbound, self.response)
        await self.response.prepare(self._inbound.request)

    async def _send_waiting(self) -> None:
        while self._waiting:
            event, passing = self._waiting.popleft()
            await self._leave(event, passing)
        self._sender = None

    async def _leave(self, event: bytes, passing: Awaitable[None]) -> None:
        try:
            await passing
        except OSError:  # of the head
            self._unheard()
        else:
            await self._write(event)

    async def _write(self, event: bytes) -> None:
        try:
            await self.response.write(event)
        except OSError:
            self._unheard()

    def _unheard(self) -> None:
        self.heard = False
        while self._waiting:
            self._waiting.popleft()[1].cancel()
