"""A routed proxy over HTTP: addresses, statuses, and what each failure says of the outcome."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from protocol.errors import ConnectionLost, ConnectionRefused, ConnectTimeout, ReadTimeout  # noqa: E402
from protocol.serving.registration import CHAT, DELETE, NEW  # noqa: E402
from real.http_proxy import HttpProxy  # noqa: E402

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Served:
    def __init__(self, handler: Handler) -> None:
        self.seen: list[tuple[str, dict[str, Any], str]] = []
        self._handler = handler

    async def __aenter__(self) -> Served:
        async def note(request: web.Request) -> web.StreamResponse:
            self.seen.append((request.path, json.loads(await request.text()), request.headers["Authorization"]))
            return await self._handler(request)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", note)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._runner.cleanup()


async def yes(_: web.Request) -> web.StreamResponse:
    return web.json_response({"ok": True})


async def post(proxy: HttpProxy, route: str, body: dict[str, Any], read_timeout_s: float = 5.0) -> Any:
    try:
        return await proxy.post(route, body, connect_timeout_s=1.0, read_timeout_s=read_timeout_s)
    finally:
        await proxy.close()


@pytest.mark.parametrize("public", ["", "/", "/v1", "/v1/"])
def test_addresses_are_put_together_once(public: str) -> None:
    async def body() -> None:
        async with Served(yes) as served:
            proxy = pickle.loads(pickle.dumps(HttpProxy(served.url + "/", served.url + public)))
            for route in (NEW, DELETE, CHAT):
                reply = await post(pickle.loads(pickle.dumps(proxy)), route, {"model_name": "m"})
                assert reply.success and reply.status == 200
            assert [path for path, _, _ in served.seen] == [NEW, DELETE, CHAT]
            assert served.seen[0][1] == {"model_name": "m"} and served.seen[0][2] == "Bearer sk-admin"

    asyncio.run(body())


@pytest.mark.parametrize("status", [400, 503])
def test_a_refusal_is_an_answer(status: int) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="no")

    async def body() -> None:
        async with Served(refuse) as served:
            reply = await post(HttpProxy(served.url, served.url), NEW, {})
            assert (reply.status, reply.body, reply.success) == (status, "no", False)

    asyncio.run(body())


def test_an_answer_that_stalls_is_unknown_and_a_lost_one_too() -> None:
    async def stall(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    async def drop(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def body() -> None:
        async with Served(stall) as served:
            with pytest.raises(ReadTimeout):
                await post(HttpProxy(served.url, served.url), NEW, {}, 0.2)
        async with Served(drop) as served:
            with pytest.raises(ConnectionLost):
                await post(HttpProxy(served.url, served.url), NEW, {})

    asyncio.run(body())


def test_a_slow_answer_is_one_as_long_as_parts_of_it_come() -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(6):
            await asyncio.sleep(0.25)
            await response.write(b".")
        return response

    async def body() -> None:
        async with Served(drip) as served:
            reply = await post(HttpProxy(served.url, served.url), NEW, {}, 1.0)
            assert (reply.status, reply.body) == (200, "......")

    asyncio.run(body())


def test_an_answer_that_is_no_text_is_an_answer() -> None:
    async def bytes_of(_: web.Request) -> web.StreamResponse:
        return web.Response(status=500, body=b"no \xff", headers={"Content-Type": "text/plain; charset=utf-8"})

    async def body() -> None:
        async with Served(bytes_of) as served:
            reply = await post(HttpProxy(served.url, served.url), NEW, {})
            assert (reply.status, reply.body, reply.success) == (500, "no \ufffd", False)

    asyncio.run(body())


@pytest.mark.parametrize(
    "url", ["http://a..b:1", f"http://{'a' * 64}:1", "http://.:1", "http://[::1", "http://x:99999", "ftp://x:1", "x"]
)
def test_a_url_or_a_host_that_is_none_is_not_done(url: str) -> None:
    """Nothing was sent: aiohttp says so with a UnicodeError, which is no error of ours, or with one of its own."""
    with pytest.raises(ConnectionRefused, match="none|no URL"):
        asyncio.run(post(HttpProxy(url, url), NEW, {}))


def test_nobody_there_is_not_done() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"  # bound, and nobody listens
        with pytest.raises(ConnectionRefused):
            asyncio.run(post(HttpProxy(url, url), NEW, {}))


def test_a_connection_that_is_not_taken_is_a_connect_time_out() -> None:
    async def body() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            waiting = []
            try:
                for _ in range(4):  # the backlog takes a few; whoever comes then hears nothing
                    one = socket.socket()
                    one.setblocking(False)
                    one.connect_ex(address)
                    waiting.append(one)
                await asyncio.sleep(0.2)
                proxy = HttpProxy(f"http://127.0.0.1:{address[1]}", "http://127.0.0.1:1")
                with pytest.raises(ConnectTimeout):
                    await post(proxy, NEW, {}, 2.0)
            finally:
                for one in waiting:
                    one.close()

    asyncio.run(body())
