"""The server in front of a session server: what it bounds, and what becomes of what it forwards. Without Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import ConnectionLost, NetworkError, ReadTimeout
from protocol.messages import HttpHead, RawRequest
from real.http_server import ServerSettings
from real.session_http import SessionFront
from tests.real.test_http_connections import in_use
from tests.real.test_http_server import until


class Sessions:
    """A session server that answers /echo at once, breaks off on /broken, and answers all else without an end."""

    def __init__(self) -> None:
        self.closed = 0
        self.broken: NetworkError = ConnectionLost("cut")

    async def http(self, request: RawRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        try:
            yield HttpHead(200, (("content-type", "text/plain"),))
            if request.path == "/echo":
                yield b'{"length": 0}'
                return
            if request.path == "/broken":
                yield b"the beginning"
                raise self.broken
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
        async with served(head_timeout_s=2.0) as (sessions, _, port):
            assert await in_use(port) == sessions.closed

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


@pytest.mark.parametrize(("error", "status"), [(ConnectionLost("cut"), "502"), (ReadTimeout("late"), "504")])
def test_a_stream_that_breaks_is_no_whole_answer_and_is_counted_as_broken(error: NetworkError, status: str) -> None:
    async def body() -> None:
        async with served() as (sessions, front, port):
            sessions.broken = error
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /broken HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert (await reader.readuntil(b"the beginning\r\n")).startswith(b"HTTP/1.1 200")
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                rest = await reader.read()
            assert rest == b"", "with the end of an answer it would look whole"
            writer.close()
            await until(lambda: not front._open)
            families = text_string_to_metric_families(front._metrics.page("").body)
            counts = {
                s.labels["status"]: s.value for f in families if f.name == "seatrial_http_requests" for s in f.samples
            }
            assert sessions.closed == 1 and counts == {status: 1}, "though its head said 200"

    asyncio.run(body())
