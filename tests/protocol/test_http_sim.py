"""The gateway's HTTP API in a simulated run: the same handlers, called by a component, with engines that are killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from protocol.config import GatewayConfig, HttpConfig
from protocol.errors import NetworkError
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle, EngineSpec, backend
from protocol.serving.gateway import Gateway
from protocol.serving.gateway_api import GatewayApi
from protocol.serving.http import HttpAnswer, HttpRequest
from sim.backend import run_sim
from tests.sim.worlds import Evidence

CHAT = "/v1/chat/completions"
ENGINES = ("genrm-0", "genrm-1")


class Front:
    """A component that answers as an HTTP server would."""

    def __init__(self, gateway: ActorHandle) -> None:
        self._api = GatewayApi(HttpConfig(), gateway)

    async def ask(self, request: HttpRequest, leave_after: int | None = None) -> tuple[int, tuple[str, ...]]:
        """(status, events or the whole body). A reader that leaves reads ``leave_after`` events."""
        answer = await self._api.handle(request)
        if isinstance(answer, HttpAnswer):
            return answer.status, (answer.body,)
        events: list[str] = []
        async for event in answer.events:
            events.append(event)
            if len(events) == leave_after:
                await answer.events.aclose()
        return 200, tuple(events)


def post(path: str, **body: Any) -> HttpRequest:
    return HttpRequest("POST", path, (), json.dumps(body).encode())


def chat(tokens: int, **more: Any) -> HttpRequest:
    messages = [{"role": "user", "content": "Say something."}]
    return post(CHAT, messages=messages, max_tokens=tokens, ignore_eos=True, **more)


async def ready(address: EngineAddress) -> None:
    while True:
        try:
            if (await backend().engines.client(address).get("/ready"))[0] == 200:
                return
        except NetworkError:
            pass
        await asyncio.sleep(0.1)


def simulated(body: Callable[[ActorHandle, ActorHandle], Coroutine[Any, Any, Any]], **world: Any) -> Evidence:
    """Run ``body(front, gateway)`` with two engines that are routed to."""
    evidence = Evidence()

    async def driver(port: Any) -> None:
        gateway = await port.spawn(Gateway, GatewayConfig(), name="gateway")
        for name in ENGINES:
            address = await port.engines.launch(EngineSpec("tiny-cpu"), name=name)
            await ready(address)
            await gateway.add_replica(address)
        front = await port.spawn(Front, gateway, name="front")
        await body(front, gateway)
        await asyncio.sleep(6.0)  # an engine notices within four seconds that a client has gone
        assert [view.in_flight for view in await gateway.engines()] == [0, 0]

    run_sim(driver, recorder=evidence, gpus_per_node=8, **world)
    return evidence


def test_answers_and_streams() -> None:
    async def body(front: ActorHandle, gateway: ActorHandle) -> None:
        status, (text,) = await front.ask(chat(20))
        said = json.loads(text)
        assert (status, said["usage"]["completion_tokens"]) == (200, 20)
        status, events = await front.ask(chat(20, stream=True))
        assert (status, events[-1]) == (200, "[DONE]")
        streamed = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
        assert streamed == said["choices"][0]["message"]["content"]
        status, events = await front.ask(
            post("/generate", text="x", sampling_params={"max_new_tokens": 3}, stream=True)
        )
        assert len(json.loads(events[-2])["output_ids"]) == 3
        status, (text,) = await front.ask(chat(100_000))
        assert status == 400 and "context length" in json.loads(text)["message"]
        for path in ("/health", "/ready", "/engines", "/metrics", "/v1/models"):
            assert (await front.ask(HttpRequest("GET", path)))[0] == 200

    evidence = simulated(body)
    accepted = [event.data["request"] for event in evidence.of("engine.accepted")]
    picked = [event.data["request"] for event in evidence.of("gateway.picked")]
    assert accepted == picked[:3], "the id that the API gave is the one that the engine has; the 400 was not accepted"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies(stream: bool) -> None:
    async def body(front: ActorHandle, gateway: ActorHandle) -> None:
        calls = [front.ask(chat(400, stream=stream)) for _ in range(4)]
        await asyncio.sleep(0.4)
        assert [view.in_flight for view in await gateway.engines()] == [2, 2]
        await backend().engines.terminate(ENGINES[0])
        answers = [await call for call in calls]
        assert all(status == 200 for status, _ in answers)
        lost = [events for _, events in answers if stream and events[-1] != "[DONE]"]
        assert len(lost) == (2 if stream else 0)
        for events in lost:
            error = json.loads(events[-1])["error"]
            assert (error["type"], error["outcome"], error["code"]) == ("ConnectionLost", "unknown", 502)

    evidence = simulated(body)
    moved = evidence.of("gateway.moved")
    assert len(moved) == (0 if stream else 2), "a stream that has begun is never sent again, a whole answer is"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_the_engine(stream: bool) -> None:
    async def body(front: ActorHandle, gateway: ActorHandle) -> None:
        if stream:
            await front.ask(chat(400, stream=True), 5)
        else:
            call = front.ask(chat(400))
            await asyncio.sleep(0.3)
            front.cancel(call)
        await asyncio.sleep(0.1)
        assert [view.in_flight for view in await gateway.engines()] == [0, 0]

    evidence = simulated(body)
    (finished,) = evidence.of("engine.finished")
    assert finished.data["reason"] == ("abort" if stream else "length")


def test_it_replays() -> None:
    async def body(front: ActorHandle, gateway: ActorHandle) -> None:
        calls = [front.ask(chat(30 + n, stream=bool(n % 2))) for n in range(6)]
        await asyncio.gather(*calls)

    runs = [[(e.t_ns, e.kind, e.actor, e.data) for e in simulated(body, seed=3).events] for _ in range(2)]
    assert runs[0] == runs[1]
