"""What one connection may hold of a server, and for how long: between requests, and while its client does not read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.real.test_http_server import served, until


async def in_use(port: int) -> None:
    """Quick requests on one connection, for three times 0.6 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(9):
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert b"HTTP/1.1 200" in await reader.readuntil(b'{"length": 0}')
        await asyncio.sleep(0.2)
    writer.close()


def test_a_connection_that_is_in_use_is_kept() -> None:
    """Every look at it finds it between two requests."""

    async def body() -> None:
        async with served(head_timeout_s=0.6) as it:
            await in_use(it.port)

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
        async with served(write_timeout_s=1.0) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1000)
            writer.write(b"POST /stream HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nflood")
            until_s, got = asyncio.get_running_loop().time() + 3.0, 0
            while asyncio.get_running_loop().time() < until_s or got < 20_000_000:  # the kernel keeps less
                for _ in range(5000):
                    got += len(await reader.read(1000))
                await asyncio.sleep(0.1)
            assert it.handlers.closed == 0
            writer.close()
            await until(lambda: it.handlers.closed == 1)

    asyncio.run(body())
