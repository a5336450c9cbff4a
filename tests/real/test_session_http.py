"""The server in front of a session server: what it bounds, and what becomes of what it forwards. Without Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from protocol.messages import HttpHead, RawRequest
from real.http_server import ServerSettings
from real.session_http import SessionFront
from tests.real.test_http_connections import in_use
from tests.real.test_http_server import until


class Sessions:
    """A session server that answers /echo at once and everything else without an end."""

    def __init__(self) -> None:
        self.closed = 0

    async def http(self, request: RawRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        try:
            yield HttpHead(200, (("content-type", "text/plain"),))
            if request.path == "/echo":
                yield b'{"length": 0}'
                return
            while True:
                yield b"x" * 10_000
        finally:
            self.closed += 1


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[Sessions, SessionFront, int]]:
    sessions: Any = Sessions()
    front = SessionFront(ServerSettings(**settings), sessions, 1000)
    _, port = await front.start()
    try:
        async with asyncio.timeout(20):
            yield sessions, front, port
    finally:
        await front.stop()


def test_a_connection_that_is_in_use_is_kept() -> None:
    async def body() -> None:
        async with served(head_timeout_s=0.6) as (sessions, _, port):
            await in_use(port)
            assert sessions.closed == 9

    asyncio.run(body())


def test_a_client_that_stops_reading_holds_no_turn() -> None:
    async def body() -> None:
        async with served(write_timeout_s=0.5) as (sessions, front, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await until(lambda: sessions.closed == 1 and not front._open)
            writer.close()

    asyncio.run(body())
