"""A gateway's HTTP API as an actor on Ray, in front of engines that Ray actors own: the whole way of one call."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from protocol.config import GatewayConfig, HttpConfig
from protocol.ports import EngineSpec
from protocol.serving.gateway import Gateway
from real.engines.settings import EngineSettings
from real.http_server import HttpFront, ServerSettings
from tests.real.engine_world import events_of, first_port, kinds_of, launched

if TYPE_CHECKING:
    from real.backend import RealBackend

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

TOKEN = "a-token-of-some-length"


def chat(tokens: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say something."}]
    return {"messages": messages, "max_tokens": tokens, "stream": stream, "ignore_eos": True}


def test_calls_over_http(tmp_path: pathlib.Path) -> None:
    from real.backend import run_real

    async def body(backend: RealBackend) -> None:
        gateway = await backend.spawn(Gateway, GatewayConfig(), name="gateway")
        for name in ("genrm-0", "genrm-1"):
            client = await launched(backend, name, EngineSpec("tiny-cpu", num_gpus=0))
            await gateway.add_replica(client.address)
        front = await backend.spawn(HttpFront, ServerSettings(token=TOKEN), HttpConfig(), gateway, name="front")
        host, port = await front.address()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(f"http://{host}:{port}", headers=headers) as session:
            await calls(session, backend, gateway)
        await front.stop()
        with pytest.raises(OSError):
            await asyncio.open_connection(host, port)

    async def calls(session: aiohttp.ClientSession, backend: RealBackend, gateway: Any) -> None:
        async def post(tokens: int) -> tuple[int, Any]:
            async with session.post("/v1/chat/completions", json=chat(tokens, stream=False)) as answer:
                return answer.status, await answer.json()

        status, said = await post(10)
        assert (status, said["usage"]["completion_tokens"]) == (200, 10)
        async with session.post("/v1/chat/completions", json=chat(10, stream=True)) as answer:
            streamed = [line[6:] for line in (await answer.text()).split("\n\n") if line]
        text = "".join(json.loads(data)["choices"][0]["delta"].get("content") or "" for data in streamed[:-1])
        assert (text, streamed[-1]) == (said["choices"][0]["message"]["content"], "[DONE]")
        status, said = await post(100_000)
        assert status == 400 and "context length" in said["message"]

        # A client that leaves: the handler's cancellation goes to the gateway, and from there to the engine.
        leaving = asyncio.ensure_future(post(480))
        while not sum(view.in_flight for view in await gateway.engines()):
            await asyncio.sleep(0.01)
        leaving.cancel()
        async with asyncio.timeout(2.0):
            while sum(view.in_flight for view in await gateway.engines()):
                await asyncio.sleep(0.01)

        # One engine dies under two calls and two streams.
        whole = [asyncio.ensure_future(post(400)) for _ in range(2)]
        async with asyncio.timeout(5.0):
            while sum(view.in_flight for view in await gateway.engines()) < 2:  # one at each, and so the streams
                await asyncio.sleep(0.01)
        streams = [await session.post("/v1/chat/completions", json=chat(400, stream=True)) for _ in range(2)]
        await backend.engines.terminate("genrm-0")
        assert [(await call)[0] for call in whole] == [200, 200]
        ends = [(await stream.text()).removesuffix("\n\n").split("\n\n")[-1] for stream in streams]
        assert ends.count("data: [DONE]") == 1
        (error,) = (json.loads(end[6:])["error"] for end in ends if end != "data: [DONE]")
        assert (error["type"], error["outcome"]) == ("ConnectionLost", "unknown")
        async with session.get("/metrics") as answer:
            page = await answer.text()
        assert 'seatrial_http_requests_total{route="/v1/chat/completions",status="502"} 1.0' in page
        assert 'seatrial_http_requests_total{route="/v1/chat/completions",status="499"} 1.0' in page

    settings = EngineSettings("emulated", sys.executable, first_port=first_port())
    run_real(body, folder=str(tmp_path), engines=settings)
    events = events_of(tmp_path)
    picked = [event.data["request"] for event in kinds_of(events, "gateway", "gateway.picked")]
    accepted = {event.data["request"] for event in events if event.kind == "engine.accepted"}
    assert len(set(picked)) == len(picked) == 8
    assert accepted == set(picked), "the id in the gateway's evidence is the one that the engines' fronts saw"
