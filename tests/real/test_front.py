"""The front of one engine, without Ray: its way to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from real.engines import headers
from real.engines.client import Sessions
from real.engines.front import Front
from real.engines.served import Served
from real.engines.traffic import Fate, Message, Traffic
from real.evidence import ProcessLog
from tests.real.engine_world import until


@contextlib.asynccontextmanager
async def fronted(
    folder: pathlib.Path, answer: Any, traffic: Traffic, *, token: str = "", host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Front, str]]:
    """A front before an engine that answers every route by ``answer``, and the front's URL."""
    engine = web.Application()
    engine.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(engine)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ((_, port),) = runner.addresses
    log = ProcessLog(str(folder), "chat-0", 1, time.monotonic_ns())
    front = Front(
        log, port=port, served=Served("default", "x"), storage=str(folder), traffic=traffic,
        became_ready=lambda: None, in_flight_changed=lambda count: None, is_stopped=lambda: False, token=token,
    )  # fmt: skip
    bound = socket.create_server((host, 0))
    try:
        await front.listen(bound)
        yield front, f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        front.seal()
        await front.close()
        await runner.cleanup()
        bound.close()
        log.close()


class Held(Traffic):
    """Holds every part of a stream up from the moment that it is told to, until it is opened."""

    def __init__(self) -> None:
        self.holding = False
        self.opened = asyncio.Event()
        self.met = 0

    @property
    def plain(self) -> bool:
        return not self.holding

    async def part(self, message: Message) -> None:
        self.met += 1
        await self.opened.wait()


def test_every_call_comes_to_the_engine_on_a_connection_of_its_own(tmp_path: pathlib.Path) -> None:
    """On one that was idle an engine that was stopped would close the call with it, unread."""
    came_from: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        came_from.append(request.transport.get_extra_info("peername"))
        return web.Response(text="{}", content_type="application/json")

    async def body() -> None:
        async with (
            fronted(tmp_path, answer, Traffic()) as (_, url),
            aiohttp.ClientSession(url) as session,  # which keeps its own connection to the front
        ):
            for method, route in (("GET", "/ready"), ("GET", "/ready"), ("POST", "/flush_cache"), ("GET", "/metrics")):
                async with session.request(method, route, json={} if method == "POST" else None) as reply:
                    assert reply.status == 200
                    await reply.read()

    asyncio.run(body())
    assert len(came_from) == len(set(came_from)) == 4


def test_where_others_reach_it_only_who_brings_the_runs_token_is_let_in(tmp_path: pathlib.Path) -> None:
    came: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        came.append(request.path)
        assert headers.TOKEN not in request.headers, "the engine is told no secrets"
        return web.Response(text="{}", content_type="application/json")

    async def asked(url: str, token: str) -> int:
        sessions = Sessions(token)  # those of the run's own processes
        try:
            async with sessions.get().post(f"{url}/flush_cache", json={}) as reply:
                await reply.read()
                return reply.status
        finally:
            await sessions.close()

    async def body() -> None:
        token = "the-secret-of-this-run"
        async with fronted(tmp_path, answer, Traffic(), token=token, host="0.0.0.0") as (_, url):
            for wrong in ("", "another", token[:-1]):
                assert await asked(url, wrong) == 401
            before = sorted(path.read_text() for path in (tmp_path / "events").iterdir())
            assert came == [] and before == [""], "nothing is forwarded, and nothing recorded"
            assert await asked(url, token) == 200 and came == ["/flush_cache"]
        with pytest.raises(ValueError, match=r"chat-0/1 on 0\.0\.0\.0, which other machines reach, needs a token"):
            async with fronted(tmp_path, answer, Traffic(), host="0.0.0.0"):
                pass

    asyncio.run(body())


def test_a_stream_that_is_held_up_does_not_hold_the_engine_up(tmp_path: pathlib.Path) -> None:
    go_on = asyncio.Event()

    def event(tokens: int) -> bytes:
        reason = {"type": "length", "length": 20} if tokens == 20 else None
        meta = {"id": "r", "finish_reason": reason, "completion_tokens": tokens, "cached_tokens": 0}
        return (
            b"data: " + json.dumps({"text": "", "meta_info": meta | {"weight_version": "default"}}).encode() + b"\n\n"
        )

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event(1))
        await go_on.wait()
        for tokens in range(2, 21):
            await response.write(event(tokens))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def body() -> bytes:
        traffic = Held()
        async with (
            asyncio.timeout(20),
            fronted(tmp_path, answer, traffic) as (front, url),
            aiohttp.ClientSession(url) as session,
            session.post("/generate", json={"rid": "r", "stream": True}) as reply,
        ):
            assert await reply.content.readuntil(b"\n\n") == event(1)
            traffic.holding = True
            go_on.set()
            rest = asyncio.ensure_future(reply.content.read())
            await until(lambda: front.in_flight == 0)  # at its end, while nothing of it has left
            await asyncio.sleep(0.2)
            assert traffic.met == 20 and not rest.done() and not reply.content.total_bytes > len(event(1))
            traffic.opened.set()
            return await rest

    told = asyncio.run(body())
    events = [part + b"\n\n" for part in told.split(b"\n\n") if part.startswith(b"data: ")]
    assert events == [*map(event, range(2, 21)), b"data: [DONE]\n\n"]


class Late(Traffic):
    """Delivers every generation late."""

    async def request(self, message: Message) -> Fate:
        return Fate("deliver", 0.5) if message.route == "/generate" else Fate()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_late_generation_whose_caller_has_gone_is_stopped_when_somebody_looks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """And is delivered before that: the look comes 0.3 s after it, or the whole interval of a check."""
    monkeypatch.setattr("real.engines.generations._CHECK_S", 0.6)
    came: dict[str, tuple[float, Any]] = {}
    aborted = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        came[request.path] = time.monotonic(), await request.json()
        if request.path == "/generate":
            await aborted.wait()
        else:
            aborted.set()
        return web.Response(status=400)

    async def body() -> None:
        async with fronted(tmp_path, answer, Late()) as (front, url), aiohttp.ClientSession(url) as session:
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                asked = {"rid": "r", "stream": streaming}
                await session.post("/generate", json=asked, timeout=aiohttp.ClientTimeout(total=0.2))
            await until(aborted.is_set)
            await until(lambda: not front.in_flight)
            assert came["/generate"][0] - began >= 0.5 and came["/abort_request"][1] == {"rid": "r"}
            assert came["/abort_request"][0] - came["/generate"][0] >= (0.25 if streaming else 0.5)

    asyncio.run(body())
