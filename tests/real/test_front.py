"""The front of one engine, without Ray: its way to the engine."""

from __future__ import annotations

import asyncio
import pathlib
import socket
import time
from typing import Any

import aiohttp
from aiohttp import web

from real.engines.front import Front
from real.engines.served import Served
from real.engines.traffic import Traffic
from real.evidence import ProcessLog


def test_every_call_comes_to_the_engine_on_a_connection_of_its_own(tmp_path: pathlib.Path) -> None:
    """On one that was idle an engine that was stopped would close the call with it, unread."""
    came_from: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        came_from.append(request.transport.get_extra_info("peername"))
        return web.Response(text="{}", content_type="application/json")

    async def body() -> None:
        engine = web.Application()
        engine.router.add_route("*", "/{any:.*}", answer)
        runner = web.AppRunner(engine)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ((_, port),) = runner.addresses
        log = ProcessLog(str(tmp_path), "chat-0", 1, time.monotonic_ns())
        front = Front(
            log, port=port, served=Served("default", "x"), storage=str(tmp_path), traffic=Traffic(),
            became_ready=lambda: None, in_flight_changed=lambda count: None,
        )  # fmt: skip
        bound = socket.create_server(("127.0.0.1", 0))
        await front.listen(bound)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with aiohttp.ClientSession(url) as session:  # which keeps its own connection to the front
            for method, route in (("GET", "/ready"), ("GET", "/ready"), ("POST", "/flush_cache"), ("GET", "/metrics")):
                async with session.request(method, route, json={} if method == "POST" else None) as reply:
                    assert reply.status == 200
                    await reply.read()
        front.seal()
        await front.close()
        await runner.cleanup()
        log.close()

    asyncio.run(body())
    assert len(came_from) == len(set(came_from)) == 4
