"""Calls to an engine: what each way of failing says of the outcome, and server-sent events however they are cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from protocol.errors import ConnectionLost, ConnectionRefused, ConnectTimeout, HttpError, Outcome, ReadTimeout
from protocol.messages import EngineAddress, GenerateRequest, VersionSpan
from real.http_call import answered, get_text, limits, new_session
from real.plain_client import PlainEngineClient

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def request_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(head, body) of a request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return head, await reader.readexactly(length)


@contextlib.asynccontextmanager
async def engine(peer: Peer) -> AsyncIterator[PlainEngineClient]:
    """A client of a server that does as told with each connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await peer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with new_session() as session:
        yield PlainEngineClient(session, EngineAddress("e", 3, "127.0.0.1", port))
    server.close()


def says(answer: bytes) -> Peer:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer)
        await writer.drain()

    return peer


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def items(client: PlainEngineClient, **limits: float) -> list[str]:
    return [event async for event in client.forward_stream("/generate", "{}", **limits)]


def test_the_body_goes_as_it_is_and_the_answer_comes_as_it_is() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(whole("201 Created", '{"b": 1,"a":"ü"}'.encode()))

    async def body() -> None:
        async with engine(peer) as client:
            assert await client.forward("/v1/x", '{"z":1, "a": "ü"}') == '{"b": 1,"a":"ü"}'

    asyncio.run(body())
    head, sent = seen[0]
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\n") and b"Content-Type: application/json" in head
    assert sent == '{"z":1, "a": "ü"}'.encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("peer", "kind", "outcome"),
    [
        (says(whole("400 Bad Request", b"no")), HttpError, Outcome.NOT_DONE),
        (says(whole("503 Unavailable", b"no")), HttpError, Outcome.UNKNOWN),
        (says(b""), ConnectionLost, Outcome.UNKNOWN),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"), ConnectionLost, Outcome.UNKNOWN),
        (says(b"SMTP ready\r\n\r\n"), ConnectionLost, Outcome.UNKNOWN),
        (hang, ReadTimeout, Outcome.UNKNOWN),
    ],
)
def test_a_failed_call_says_what_is_known(peer: Peer, kind: type[Any], outcome: Outcome, stream: bool) -> None:
    async def body() -> None:
        async with engine(peer) as client:
            with pytest.raises(kind) as caught:
                if stream:
                    await items(client, read_timeout_s=0.3)
                else:
                    await client.forward("/generate", "{}", read_timeout_s=0.3)
            assert caught.value.outcome is outcome
            if kind is HttpError:
                assert caught.value.body == "no"

    asyncio.run(body())


@pytest.mark.parametrize("none", [None, math.inf])
def test_no_time_out_at_all(none: float | None) -> None:
    async def body() -> None:
        async with engine(says(whole("200 OK", b"{}"))) as client:
            reply = await client.post("/flush_cache", {}, connect_timeout_s=none, read_timeout_s=none)
            assert reply.status == 200

    asyncio.run(body())
    waits = limits(connect_timeout_s=none, sock_read_s=none, total_s=none)
    assert (waits.total, waits.sock_connect, waits.sock_read) == (None, None, None)
    assert limits(connect_timeout_s=2, sock_read_s=3).sock_read == 3


def test_nobody_listens() -> None:
    async def body() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            async with new_session() as session:
                client = PlainEngineClient(session, EngineAddress("e", 0, "127.0.0.1", bound.getsockname()[1]))
                with pytest.raises(ConnectionRefused) as caught:
                    await client.get("/ready", connect_timeout_s=2.0, read_timeout_s=2.0)
        assert caught.value.outcome is Outcome.NOT_DONE

    asyncio.run(body())


_NO_HOSTS = ["a..b", "a" * 64, ".a", "", "[::1", "h:99999", "1.2.3.4.5", "ü..b", "x:y@a..b"]


@pytest.mark.parametrize("host", _NO_HOSTS)
def test_a_url_that_no_request_can_be_made_of_is_as_nobody_there(host: str) -> None:
    """aiohttp raises UnicodeError for some, when it connects, and InvalidURL for others. Nothing was sent."""

    async def body() -> None:
        async with new_session() as session:
            with pytest.raises(ConnectionRefused) as caught:
                await get_text(session, f"http://{host}/engines", connect_timeout_s=2.0, read_timeout_s=2.0)
            assert caught.value.outcome is Outcome.NOT_DONE

    asyncio.run(body())


@pytest.mark.parametrize("where", ["http://a..b/x", "http://[::1/x", "http://h:99999/x"])
def test_who_was_redirected_to_no_host_at_all_has_asked_somebody(where: str) -> None:
    moved = f"HTTP/1.1 307 Moved\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()

    async def body() -> None:
        async with engine(says(moved)) as client:
            with pytest.raises(ConnectionLost) as caught:
                await client.forward("/generate", "{}", read_timeout_s=2.0)
            assert caught.value.outcome is Outcome.UNKNOWN

    asyncio.run(body())


def test_an_error_of_the_block_is_the_blocks() -> None:
    async def body() -> None:
        async with engine(says(whole("200 OK", b"\xff"))) as client, new_session() as session:
            address = client.address
            with pytest.raises(UnicodeError):
                url = f"http://{address.host}:{address.port}/x"
                async with answered(session, "POST", url, data="{}") as response:
                    (await response.read()).decode("utf-8")

    asyncio.run(body())


def test_no_connection_in_time() -> None:
    """A backlog that is full swallows the handshake: the kernel answers nothing."""

    async def body() -> None:
        with contextlib.ExitStack() as stack:
            hole = stack.enter_context(socket.socket())
            hole.bind(("127.0.0.1", 0))
            hole.listen(0)
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(hole.getsockname())
            await asyncio.sleep(0.1)
            async with new_session() as session:
                client = PlainEngineClient(session, EngineAddress("e", 0, "127.0.0.1", hole.getsockname()[1]))
                with pytest.raises(ConnectTimeout) as caught:
                    await client.forward("/generate", "{}", connect_timeout_s=0.3, read_timeout_s=5.0)
            assert caught.value.outcome is Outcome.NOT_DONE

    asyncio.run(body())


STREAM = ': hello\r\n\r\ndata: {"a": "ü"}\n\nevent: x\nid: 7\ndata:two\ndata: lines\r\n\r\ndata: [DONE]\n\n'.encode()


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7, 1000])
def test_events_however_they_are_cut(cut: int) -> None:
    chunks = b"".join(chunk(STREAM[at : at + cut]) for at in range(0, len(STREAM), cut))

    async def body() -> None:
        async with engine(says(OK + chunks + b"0\r\n\r\n")) as client:
            assert await items(client) == ['{"a": "ü"}', "two\nlines", "[DONE]"]

    asyncio.run(body())


@pytest.mark.parametrize(
    "end", [b"0\r\n\r\n", b"", chunk(b"data: half") + b"0\r\n\r\n", chunk(b"data: x\n") + b"0\r\n\r\n"]
)
def test_a_stream_without_its_end_is_lost_after_the_events_that_came(end: bytes) -> None:
    async def body() -> None:
        got: list[str] = []
        async with engine(says(OK + chunk(b"data: one\n\n") + end)) as client:
            with pytest.raises(ConnectionLost) as caught:
                async for event in client.forward_stream("/generate", "{}"):
                    got.append(event)
        assert (got, caught.value.outcome) == (["one"], Outcome.UNKNOWN)

    asyncio.run(body())


def test_a_long_event_is_no_problem() -> None:
    long = b"x" * (3 << 20)

    async def body() -> None:
        async with engine(says(OK + chunk(b"data: " + long + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")) as client:
            assert await items(client) == [long.decode(), "[DONE]"]

    asyncio.run(body())


def test_leaving_a_stream_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK + chunk(b"data: one\n\n"))
        assert await reader.read() == b""
        closed.set()

    async def body() -> None:
        async with engine(peer) as client:
            async with contextlib.aclosing(client.forward_stream("/generate", "{}")) as events:
                assert await anext(events) == "one"
            async with asyncio.timeout(5):
                await closed.wait()

    asyncio.run(body())


def test_a_generation_is_asked_for_and_read_as_sglang_has_it() -> None:
    meta = {
        "id": "r-1", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3, "completion_tokens": 2,
        "cached_tokens": 1, "weight_version": "7", "weight_versions": [{"version": "7", "start": 0, "end": 2}],
        "num_retractions": 1, "e2e_latency": 0.5, "queue_time": 0.1,
    }  # fmt: skip
    seen: list[Any] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads((await request_of(reader))[1])
        seen.append(asked)
        if asked["stream"]:
            first = json.dumps({"meta_info": {"completion_tokens": 1}}).encode()
            last = json.dumps({"meta_info": meta}).encode()
            data = b"data: " + first + b"\n\ndata: " + last + b"\n\ndata: [DONE]\n\n"
            writer.write(OK + chunk(data) + b"0\r\n\r\n")
        else:
            writer.write(whole("200 OK", json.dumps({"meta_info": meta}).encode()))

    async def body() -> None:
        async with engine(peer) as client:
            request = GenerateRequest("r-1", 3, 2)
            result = await client.generate(request)
            assert (result.request_id, result.finish_reason, result.completion_tokens) == ("r-1", "length", 2)
            assert result.spans == (VersionSpan("7", 0, 2),)
            assert (result.engine, result.engine_incarnation, result.num_retractions) == ("e", 3, 1)
            assert [count async for count in client.stream(request)] == [1, 2]

    asyncio.run(body())
    assert len(seen[0]["input_ids"]) == 3
    assert (seen[0]["rid"], seen[0]["sampling_params"]["max_new_tokens"]) == ("r-1", 2)


def test_a_refused_stream_is_an_error_of_the_call() -> None:
    event = json.dumps({"error": {"message": "too long", "code": 400}}).encode()

    async def body() -> None:
        async with engine(says(OK + chunk(b"data: " + event + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")) as client:
            with pytest.raises(HttpError) as caught:
                await anext(client.stream(GenerateRequest("r-1", 3, 2)))
        assert caught.value.outcome is Outcome.NOT_DONE

    asyncio.run(body())


def test_an_admin_call_gives_its_status_whatever_it_is() -> None:
    async def body() -> None:
        for answer, status, success in (
            (whole("200 OK", b'{"success": false}'), 200, False),
            (whole("400 Bad Request", b"Flush cache failed."), 400, False),
            (whole("200 OK", b"Cache flushed."), 200, True),
        ):
            async with engine(says(answer)) as client:
                reply = await client.post("/flush_cache", {})
                assert (reply.status, reply.success) == (status, success)

    asyncio.run(body())
