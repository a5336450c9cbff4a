"""The server around the handlers: who is let in, what is bounded, what a client's going away does, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import pydantic
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import ConnectionLost
from protocol.serving.http import PROMETHEUS, Handler, HttpAnswer, HttpRequest, HttpStream, Routes, json_answer
from real.hosts import is_loopback
from real.http_server import HttpServer, PortTaken, ServerSettings

TOKEN = "0123456789abcdef-token"
PIECES = 3200
"""Of a long stream, 10,000 bytes each: more than the kernel keeps for a connection."""


class Handlers:
    """A few handlers, and what they have seen."""

    def __init__(self) -> None:
        self.seen: list[HttpRequest] = []
        self.cancelled = 0
        self.closed = 0
        self.go_on = asyncio.Event()
        self.page = "# HELP mine Of mine.\n# TYPE mine gauge\nmine 7.0\n"
        table: dict[tuple[str, str], Handler] = {
            ("POST", "/echo"): self.echo,
            ("POST", "/wait"): self.wait,
            ("POST", "/stream"): self.stream,
            ("POST", "/big"): self.big,
            ("GET", "/metrics"): self.metrics,
        }
        self.routes = Routes(table, max_body_bytes=1000, retry_after_s=1)

    async def echo(self, request: HttpRequest) -> HttpAnswer:
        self.seen.append(request)
        return json_answer({"length": len(request.body)})

    async def wait(self, request: HttpRequest) -> HttpAnswer:
        self.seen.append(request)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return json_answer({"waited": True})

    async def stream(self, request: HttpRequest) -> HttpStream:
        self.seen.append(request)
        return HttpStream(self._events(request.body))

    async def _events(self, body: bytes) -> AsyncGenerator[str, None]:
        try:
            yield '{"a": "ü"}'
            if body == b"break":
                raise ConnectionLost("cut")
            if body == b"wait":
                await self.go_on.wait()
            if body == b"much":
                for _ in range(PIECES):
                    yield "x" * 10_000
            if body == b"flood":
                while True:
                    yield "x" * 10_000
            yield "two\nlines"
            yield "[DONE]"
        finally:
            self.closed += 1

    async def big(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, "x" * (32 << 20), "text/plain")  # more than the kernel keeps for a connection

    async def metrics(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, self.page, PROMETHEUS)


class Served:
    """A server that runs, and a client."""

    def __init__(self, handlers: Handlers, server: HttpServer, session: aiohttp.ClientSession, port: int) -> None:
        self.handlers = handlers
        self.server = server
        self.session = session
        self.port = port

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def post(self, path: str, data: Any = b"", **more: Any) -> tuple[int, str]:
        async with self.session.post(self.url(path), data=data, **more) as answer:
            return answer.status, await answer.text()

    async def counts(self) -> dict[tuple[str, str], float]:
        """Requests by (route, status), without those for this page."""
        async with self.session.get(self.url("/metrics")) as answer:
            families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
        samples = families["seatrial_http_requests"].samples
        found = {(s.labels["route"], s.labels["status"]): s.value for s in samples}
        return {key: value for key, value in found.items() if key[0] != "/metrics"}


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    handlers = Handlers()
    server = HttpServer(handlers.routes, ServerSettings(**settings))
    host, port = await server.start()
    assert host == "127.0.0.1"
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        try:
            yield Served(handlers, server, session, port)
        finally:
            await server.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


# --- who is let in ---


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(pydantic.ValidationError, match="reachable from other machines and needs a token"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, token=TOKEN).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.8.8.8", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert is_loopback(host)
    ServerSettings(host=host)


@pytest.mark.parametrize("token", ["short", "with a space in the middle", "ümlaut-ümlaut-ümlaut", "tab\tin-the-middle"])
def test_a_weak_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="at least 16 printable ASCII") as caught:
        ServerSettings(token=token)
    assert token not in str(caught.value)
    assert TOKEN not in repr(ServerSettings(token=TOKEN))


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        TOKEN,
        f"bearer {TOKEN}",
        f"Basic {TOKEN}",
        "Bearer ü",
    ],
)
def test_without_the_token_nothing_is_handled(given: str | None) -> None:
    async def body() -> None:
        async with served(token=TOKEN) as it:
            headers = {} if given is None else {"Authorization": given}
            for path in ("/echo", "/metrics", "/nope"):
                async with it.session.post(it.url(path), data=b"{}", headers=headers) as answer:
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert (await answer.json())["error"]["type"] == "authentication_error"
            assert it.handlers.seen == []
            assert (await it.post("/echo", headers={"Authorization": f"Bearer {TOKEN}"}))[0] == 200

    asyncio.run(body())


# --- what is bounded ---


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_is_bounded_however_it_comes(chunked: bool) -> None:
    async def pieces(size: int) -> AsyncGenerator[bytes, None]:
        for _ in range(size // 100):
            yield b"x" * 100
        yield b"x" * (size % 100)

    async def body() -> None:
        async with served() as it:
            for size, status in ((1000, 200), (1001, 413), (1_000_000, 413)):
                data: Any = pieces(size) if chunked else b"x" * size
                got, text = await it.post("/echo", data=data)
                assert got == status
                if status == 413:
                    assert json.loads(text)["error"]["message"] == "the body is longer than 1000 bytes"
            assert len(it.handlers.seen) == 1

    asyncio.run(body())


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def body() -> None:
        async with served(body_timeout_s=0.2) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            assert b"did not arrive within 0.2 s" in await reader.read(), "and the connection is closed"
            writer.close()
            assert it.handlers.seen == []

    asyncio.run(body())


def test_a_body_that_is_not_what_its_head_says_is_the_clients_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with served() as it:
            headers = {"Content-Encoding": "gzip"}
            status, text = await it.post("/echo", data=b"{}", headers=headers, skip_auto_headers=["Content-Encoding"])
            assert status == 400 and json.loads(text)["error"]["message"].startswith("the body cannot be read: ")
            for head in (b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
                writer.write(head)
                assert (await reader.readline()).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
                writer.close()
            assert it.handlers.seen == []

    asyncio.run(body())
    assert caplog.records and not any(record.exc_info for record in caplog.records), "no stack for what a client sends"


def test_a_body_that_says_how_long_it_is_is_refused_before_it_comes() -> None:
    async def body() -> None:
        async with served() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
            async with asyncio.timeout(2):
                assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()

    asyncio.run(body())


def test_connections_on_which_no_whole_head_comes_are_closed_and_others_are_served() -> None:
    async def body() -> None:
        async with served(head_timeout_s=0.6) as it:
            loop = asyncio.get_running_loop()
            slow = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(100)]

            async def drip(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], silent: bool) -> float:
                reader, writer = connection
                began = loop.time()
                with contextlib.suppress(ConnectionError):
                    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\n" if not silent else b"")
                    while not reader.at_eof():
                        if not silent:
                            writer.write(b"X-Slow: 1\r\n")
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.1):
                                await reader.read(1)
                writer.close()
                return loop.time() - began

            dripping = [loop.create_task(drip(one, silent=number % 2 == 0)) for number, one in enumerate(slow)]
            waiting = loop.create_task(it.post("/wait"))  # longer than that, and with its head
            for _ in range(10):  # on a connection that is kept, idle for shorter
                async with asyncio.timeout(1.0):
                    assert (await it.post("/echo", b"12345"))[0] == 200
                await asyncio.sleep(0.2)
            took = await asyncio.gather(*dripping)
            assert 0.5 < min(took) and max(took) < 2.0
            it.handlers.go_on.set()
            assert (await waiting)[0] == 200

    asyncio.run(body())


def test_a_client_that_reads_slowly_holds_its_stream_back() -> None:
    async def body() -> None:
        async with served() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1000)
            writer.write(b"POST /stream HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nflood")
            await reader.readline()
            await asyncio.sleep(0.5)  # an unbounded buffer would have grown by hundreds of MB
            server = next(iter(it.server._runner.server.connections))  # type: ignore[union-attr]
            assert server.transport is not None
            assert server.transport.get_write_buffer_size() < 1 << 20
            writer.close()
            await until(lambda: it.handlers.closed == 1)

    asyncio.run(body())


def test_routes_and_headers() -> None:
    async def body() -> None:
        async with served() as it:
            assert (await it.post("/nope"))[0] == 404
            async with it.session.get(it.url("/echo")) as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            await it.post("/echo?x=1", headers={"X-Seatrial-Idempotent": "false"})
            request = it.handlers.seen[0]
            assert (request.path, request.header("x-seatrial-idempotent")) == ("/echo", "false")

    asyncio.run(body())


# --- streams ---


def test_a_stream_is_server_sent_events() -> None:
    async def body() -> None:
        async with served() as it, it.session.post(it.url("/stream")) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert await answer.text() == 'data: {"a": "ü"}\n\ndata: two\ndata: lines\n\ndata: [DONE]\n\n'
            assert it.handlers.closed == 1

    asyncio.run(body())


def test_a_broken_stream_ends_with_an_error_event() -> None:
    async def body() -> None:
        async with served() as it:
            status, text = await it.post("/stream", b"break")
            events = text.removesuffix("\n\n").split("\n\n")
            assert status == 200 and len(events) == 2
            error = json.loads(events[1].removeprefix("data: "))["error"]
            assert (error["type"], error["code"], error["outcome"]) == ("ConnectionLost", 502, "unknown")
            assert await it.counts() == {("/stream", "502"): 1}, "though its head said 200"

    asyncio.run(body())


@pytest.mark.parametrize("path", ["/wait", "/stream"])
def test_a_client_that_goes_away_cancels_what_it_asked_for(path: str) -> None:
    async def body() -> None:
        async with served() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nwait".encode())
            if path == "/stream":
                await reader.readuntil(b"data:")
            await until(lambda: it.handlers.seen)
            writer.close()
            await until(lambda: it.handlers.cancelled + it.handlers.closed == 1)
            assert await it.counts() == {(path, "499"): 1}

    asyncio.run(body())


# --- the page ---


def test_metrics_are_one_page_that_a_parser_reads() -> None:
    async def body() -> None:
        async with served() as it:
            await it.post("/echo")
            await it.post("/stream")
            for number in range(3):
                await it.post(f"/nope-{number}")
            async with it.session.get(it.url("/metrics")) as answer:
                assert answer.headers["Content-Type"] == PROMETHEUS
                families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
        assert families["mine"].documentation == "Of mine."
        assert families["seatrial_http_requests"].type == "counter"
        samples = families["seatrial_http_requests"].samples
        counts = {(s.labels["route"], s.labels["status"]): s.value for s in samples}
        assert counts == {("/echo", "200"): 1, ("/stream", "200"): 1, ("other", "404"): 3}
        durations = families["seatrial_http_request_duration_seconds"]
        assert durations.type == "histogram"
        assert {s.labels["route"] for s in durations.samples} == {"/echo", "/stream", "other"}
        assert not any(s.name.endswith("_created") for f in families.values() for s in f.samples)

    asyncio.run(body())


def test_a_page_of_the_users_that_is_none_is_an_error_and_no_half_page() -> None:
    async def body() -> None:
        async with served() as it:
            it.handlers.page = "mine{ 7.0 x"
            async with it.session.get(it.url("/metrics")) as answer:
                assert answer.status == 500
                assert (await answer.json())["error"]["type"] == "RemoteError"

    asyncio.run(body())


# --- the end ---


def test_a_port_that_is_taken_is_said_so() -> None:
    async def body() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            server = HttpServer(Handlers().routes, ServerSettings(port=port))
            with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
                await server.start()
            await server.stop()

    asyncio.run(body())


@pytest.mark.parametrize("path", ["/wait", "/stream"])
def test_stopping_lets_what_is_in_flight_finish_and_nothing_new_begin(path: str) -> None:
    async def body() -> None:
        async with served(shutdown_grace_s=10.0) as it:
            call = asyncio.ensure_future(it.post(path, b"wait"))
            await until(lambda: it.handlers.seen)
            stopping = asyncio.ensure_future(it.server.stop())
            await asyncio.sleep(0.1)
            with pytest.raises(aiohttp.ClientConnectorError):
                await it.post("/echo")
            assert not stopping.done()
            it.handlers.go_on.set()
            status, text = await call
            assert status == 200 and ("true" in text or text.endswith("data: [DONE]\n\n"))
            await stopping
            assert it.handlers.cancelled == 0

    asyncio.run(body())


def test_an_idle_connection_is_closed_as_soon_as_the_server_stops() -> None:
    async def body() -> None:
        async with served(shutdown_grace_s=10.0) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            await reader.readuntil(b'{"length": 0}')
            call = asyncio.ensure_future(it.post("/wait"))
            await until(lambda: len(it.handlers.seen) == 2)
            stopping = asyncio.ensure_future(it.server.stop())
            async with asyncio.timeout(2):
                assert await reader.read() == b"", "or it could ask for more while others finish"
            writer.close()
            it.handlers.go_on.set()
            await call
            await stopping

    asyncio.run(body())


def test_stopping_does_not_wait_for_ever() -> None:
    async def body() -> None:
        async with served(shutdown_grace_s=0.3) as it:
            call = asyncio.ensure_future(it.post("/wait"))
            await until(lambda: it.handlers.seen)
            begun = asyncio.get_running_loop().time()
            await it.server.stop()
            assert 0.3 <= asyncio.get_running_loop().time() - begun < 2.0
            with pytest.raises(aiohttp.ClientError):
                await call
            assert it.handlers.cancelled == 1

    asyncio.run(body())


def test_an_idle_connection_does_not_hold_the_end_up() -> None:
    async def body() -> None:
        async with served(shutdown_grace_s=10.0) as it:
            await it.post("/echo")  # the session keeps its connection
            begun = asyncio.get_running_loop().time()
            await it.server.stop()
            assert asyncio.get_running_loop().time() - begun < 1.0

    asyncio.run(body())
