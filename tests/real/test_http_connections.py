"""What one connection may hold of a server, and for how long: between requests, and while its client does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from real import http_server
from tests.real.test_http_server import PIECES, served, until


async def in_use(port: int) -> int:
    """Quick requests on one connection, for twice 2 s. Returns how many."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(20):
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert b"HTTP/1.1 200" in await reader.readuntil(b'{"length": 0}')
        await asyncio.sleep(0.2)
    writer.close()
    return 20


async def slowly(reader: asyncio.StreamReader, is_whole: Callable[[bytearray], bool]) -> tuple[bytes, float]:
    """Read a whole answer, a MB at a time and with pauses: 32 MB take some 5 s. Returns it, and the seconds it took."""
    now = asyncio.get_running_loop().time
    began, got = now(), bytearray()
    while not is_whole(got):
        until_size = len(got) + 1_000_000
        while len(got) < until_size and not is_whole(got):
            piece = await reader.read(10_000)
            assert piece, f"the connection was closed after {len(got)} bytes and {now() - began:.1f} s"
            got += piece
        await asyncio.sleep(0.15)
    return bytes(got), now() - began


def test_a_connection_that_is_in_use_is_kept() -> None:
    """Every look at it finds it between two requests."""

    async def body() -> None:
        async with served(head_timeout_s=2.0) as it:
            assert await in_use(it.port) == len(it.handlers.seen)

    asyncio.run(body())


@pytest.mark.parametrize("path", ["/stream", "/big"])
def test_a_client_that_stops_reading_is_cut_off(path: str) -> None:
    """Of a stream nothing is held for it any more; of a whole answer nothing ever was, but its connection."""

    async def body() -> None:
        async with served(write_timeout_s=0.5, head_timeout_s=1.0) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1000)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nflood".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            runner: Any = it.server._runner
            began = asyncio.get_running_loop().time()
            await until(lambda: not runner.server.connections)
            assert asyncio.get_running_loop().time() - began > 0.4
            assert it.handlers.closed == (path == "/stream") and not it.server._open
            rest = await reader.read()  # what the kernel had by then
            assert len(rest) < 32 << 20 and not rest.endswith(b"0\r\n\r\n"), "the end of an answer"
            assert (await it.counts())[path, "499" if path == "/stream" else "200"] == 1
            writer.close()

    asyncio.run(body())


def test_a_client_that_reads_slowly_gets_the_whole_stream() -> None:
    """Its pauses are shorter than the bound, all of it takes longer."""

    async def body() -> None:
        async with served(write_timeout_s=2.0) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1000)
            writer.write(b"POST /stream HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nmuch")
            got, took = await slowly(reader, lambda got: got.endswith(b"\r\n0\r\n\r\n"))
            assert took > 2 * 2.0
            assert got.count(b"data: " + b"x" * 10_000 + b"\n\n") == PIECES and got.count(b"data: [DONE]\n\n") == 1
            writer.close()
            assert await it.counts() == {("/stream", "200"): 1}

    asyncio.run(body())


def test_a_client_that_reads_slowly_gets_the_whole_of_an_answer_that_is_no_stream() -> None:
    """Its handler returned long ago: a connection is not idle as long as something of an answer is taken from it."""

    async def body() -> None:
        async with served(head_timeout_s=0.5, write_timeout_s=1.5) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1000)
            writer.write(b"POST /big HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert f"Content-Length: {32 << 20}\r\n".encode() in head
            _, took = await slowly(reader, lambda got: len(got) == 32 << 20)
            assert took > 2 * 2.0
            assert await reader.read() == b""  # idle at last
            writer.close()

    asyncio.run(body())


def test_a_clock_is_set_only_where_the_client_makes_a_writer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    set_s: list[float] = []
    real_timeout = asyncio.timeout

    class Counted:
        """asyncio, as the server has it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        def timeout(self, delay: float) -> asyncio.Timeout:
            set_s.append(delay)
            return real_timeout(delay)

    async def body() -> None:
        async with served(write_timeout_s=17.0) as it:
            assert (await it.post("/stream"))[0] == 200
            assert set_s.count(17.0) == 1  # around its end

    monkeypatch.setattr(http_server, "asyncio", Counted())
    asyncio.run(body())
