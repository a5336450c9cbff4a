"""Engines as one process sees them: the ports Engines and EngineClient of protocol.ports, over simulated HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from protocol.bad_answers import bad
from protocol.errors import ConnectionRefused, PlacementError, SpawnFailed
from protocol.messages import (
    AdminReply,
    EngineAddress,
    GenerateRequest,
    GenerateResult,
    HttpHead,
    RawRequest,
    WeightUpdate,
)
from protocol.ports import EngineSpec, Placement
from sim.engine_exchange import exchange
from sim.http import Exchange
from sim.loop import background

if TYPE_CHECKING:
    from sim.engines import SharedEngines
    from sim.loop import ActorLoop
    from sim.random import Stream
    from sim.world import Process


class EnginesPort:
    """protocol.ports.Engines for one process."""

    __slots__ = ("_shared", "_process", "_loop")

    def __init__(self, shared: SharedEngines, process: Process, loop: ActorLoop) -> None:
        self._shared = shared
        self._process = process
        self._loop = loop

    async def launch(
        self, spec: EngineSpec, *, name: str, node: str | None = None, placement: Placement | None = None
    ) -> EngineAddress:
        """Start an engine and return its address as soon as its node has heard of it.

        Raises NameTaken, PlacementError (not done), SpawnFailed (unknown: its node was lost before it had answered).
        """
        shared, caller = self._shared, self._process
        if not caller.alive:
            await self._loop.create_future()  # a dead process launches nothing
        launch = shared.ask(spec, name, node, placement, caller.node)
        try:
            process = await shared.have_done("launch", launch.where, caller, self._loop, lambda: shared.begin(launch))
        except PlacementError as reason:
            raise SpawnFailed(f"{name!r} did not start", attached=(reason,)) from None
        return EngineAddress(name, process.incarnation, process.host, process.port)

    async def alive(self, name: str) -> bool:
        return self._shared.is_known(name, self._process.node)

    async def terminate(self, name: str) -> None:
        """SIGKILL. Silent when there is no such process, or no such process any more."""
        if self._process.alive:
            await self._shared.end(name, self._process, self._loop)

    def client(self, address: EngineAddress) -> EngineClientPort:
        return EngineClientPort(self._shared, self._process, self._loop, address)


class EngineClientPort:
    """protocol.ports.EngineClient for one caller: every call is one HTTP exchange with whoever has the address now."""

    __slots__ = ("_shared", "_process", "_loop", "_address")

    def __init__(self, shared: SharedEngines, process: Process, loop: ActorLoop, address: EngineAddress) -> None:
        self._shared = shared
        self._process = process
        self._loop = loop
        self._address = address

    @property
    def address(self) -> EngineAddress:
        return self._address

    def _exchange(self, route: str, body: Any) -> Exchange:
        # An address is a host and a port: who answers is whoever listens there now, maybe a later incarnation.
        address = self._address
        server = self._shared.processes.get(address.name)
        if server is None or server.port != address.port or server.host != address.host:
            server = self._shared.listener(address.host, address.port)
            if server is None:
                raise ConnectionRefused(f"{route}: nobody listens at {address.host}:{address.port}")
        network = self._shared.network
        return Exchange(network, self._process, self._loop, address, server, route, body, background.get())

    async def _call(
        self, route: str, body: Any, size: int, connect_timeout_s: float | None, read_timeout_s: float | None
    ) -> Any:
        exchange = self._exchange(route, body)
        try:
            return await exchange.open(size, connect_timeout_s, read_timeout_s)
        except asyncio.CancelledError:
            exchange.abandon()
            raise

    async def generate(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> GenerateResult:
        size = 4 * request.prompt_tokens
        result: GenerateResult = await self._call("/generate", request, size, connect_timeout_s, read_timeout_s)
        return result

    async def stream(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AsyncIterator[int]:
        """Cumulative counts of output tokens. Tokens may coalesce; the end of the iteration is ``[DONE]``."""
        size = 4 * request.prompt_tokens
        items: AsyncGenerator[int, None] = self._items("/generate", request, size, connect_timeout_s, read_timeout_s)
        async with contextlib.aclosing(items):
            async for count in items:
                yield count

    async def _items(
        self, route: str, body: Any, size: int, connect_timeout_s: float | None, read_timeout_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """What a streamed answer brings, item by item; its error after the items that came."""
        items: asyncio.Queue[Any] = asyncio.Queue()
        exchange = self._exchange(route, body)
        exchange.on_item = items.put_nowait
        answer = exchange.open(size, connect_timeout_s, read_timeout_s)
        answer.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                yield item
            await answer
        finally:
            exchange.abandon()

    async def forward(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> str:
        text: str = await self._call(route, body, len(body), connect_timeout_s, read_timeout_s)
        return text

    def forward_stream(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[str, None]:
        """The data of each server-sent event; an engine that dies closes the connection before ``[DONE]``."""
        return self._items(route, body, len(body), connect_timeout_s, read_timeout_s)

    async def post(
        self,
        route: str,
        body: dict[str, Any],
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AdminReply:
        reply: AdminReply = await self._call(route, dict(body), 256, connect_timeout_s, read_timeout_s)
        return reply

    async def update_weights(
        self, update: WeightUpdate, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AdminReply:
        reply: AdminReply = await self._call(
            "/update_weights_from_disk", update, 256, connect_timeout_s, read_timeout_s
        )
        return reply

    async def get(
        self, route: str, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> tuple[int, str]:
        page: tuple[int, str] = await self._call(route, None, 128, connect_timeout_s, read_timeout_s)
        return page

    def exchange(
        self,
        request: RawRequest,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[HttpHead | bytes, None]:
        """The bytes that the engine would send (sim/engine_exchange.py), unless a fault has another answer in store."""
        pieces = exchange(self, request, connect_timeout_s, read_timeout_s)
        for fault in self._shared.answer_faults:
            if fault.befalls(self._process.world, self._process, self._address.name, request.path):
                fault.on_hit(f"bad_answer {request.path} {self._process.name}>{self._address.name}")
                return bad(pieces, fault.what, request.path)
        return pieces

    def cuts(self) -> Stream:
        """Draws where the bytes of a stream are cut."""
        return self._process.world.stream(f"http.cuts.{self._process.name}")
