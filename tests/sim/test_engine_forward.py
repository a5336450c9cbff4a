"""JSON generation calls at simulated engines: what a gateway forwards, and posts to the same routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from protocol.errors import ConnectionLost, ConnectionRefused, HttpError
from protocol.messages import AdminReply, GenerateRequest
from protocol.ports import Backend, EngineClient, EngineSpec
from sim.backend import run_sim
from tests.sim.worlds import Evidence

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "ignore_eos": True}
CHAT = "/v1/chat/completions"


def at_engine(body: Any, **options: Any) -> Any:
    """``await body(client, backend)`` with one engine that is ready."""

    async def run(backend: Backend) -> Any:
        address = await backend.engines.launch(EngineSpec(profile="tiny-cpu"), name="engine-0")
        client = backend.engines.client(address)
        with pytest.raises(ConnectionRefused):
            await client.forward(CHAT, json.dumps(HELLO))  # it has not loaded yet
        await asyncio.sleep(3)
        return await body(client, backend)

    return run_sim(run, **options)


async def _stream(client: EngineClient, route: str, body: dict[str, Any]) -> list[str]:
    events = client.forward_stream(route, json.dumps({**body, "stream": True}))
    async with contextlib.aclosing(events):
        return [event async for event in events]


def test_a_chat_is_forwarded_and_its_stream_says_the_same() -> None:
    async def body(client: EngineClient, _: Backend) -> None:
        answer = json.loads(await client.forward(CHAT, json.dumps(HELLO)))
        text = answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens"] == text.count(" ") == 40
        assert answer["metadata"]["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]
        *events, done = await _stream(client, CHAT, HELLO)
        assert done == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        reply = await client.post(CHAT, dict(HELLO))
        assert json.loads(reply.body)["choices"] == answer["choices"] and reply.status == 200
        whole = await client.post(CHAT, {**HELLO, "stream": True})
        assert whole.body.endswith("data: [DONE]\n\n") and whole.body.count("data: ") > 20

    at_engine(body)


def test_generate_takes_json_too() -> None:
    async def body(client: EngineClient, _: Backend) -> None:
        asked = {"input_ids": [1, 2], "rid": "mine", "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
        answer = json.loads(await client.forward("/generate", json.dumps(asked)))
        assert answer["meta_info"]["id"] == "mine" and len(answer["output_ids"]) == 9
        *_, last, done = await _stream(client, "/generate", asked)
        assert json.loads(last)["output_ids"] == answer["output_ids"] and done == "[DONE]"
        refused = await _stream(client, "/generate", {"input_ids": [1] * 600})
        assert json.loads(refused[0])["error"]["code"] == 400 and refused[1:] == ["[DONE]"]

    at_engine(body)


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", '{"messages": []}', '{"messages": [{"role": "user"}], "n": 2}']
)
def test_a_bad_body_is_refused(text: str) -> None:
    async def body(client: EngineClient, _: Backend) -> None:
        with pytest.raises(HttpError) as caught:
            await client.forward(CHAT, text)
        assert caught.value.status == 400 and json.loads(caught.value.body)["object"] == "error"
        if text.startswith("{"):
            reply = await client.post(CHAT, json.loads(text))
            assert reply == AdminReply(400, caught.value.body, False)

    at_engine(body)


def test_a_prompt_that_is_too_long_is_refused_before_a_stream_begins() -> None:
    async def body(client: EngineClient, _: Backend) -> None:
        long = {"messages": [{"role": "user", "content": "word " * 600}]}
        for call in (client.forward(CHAT, json.dumps(long)), _stream(client, CHAT, long)):
            with pytest.raises(HttpError, match="longer than the model's context length"):
                await call

    at_engine(body)


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_stream_keeps_its_order_whatever_the_network_does(seed: int) -> None:
    async def body(client: EngineClient, _: Backend) -> None:
        *events, done = await _stream(
            client, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 16}}
        )
        lengths = [len(json.loads(event)["output_ids"]) for event in events]
        assert lengths == sorted(set(lengths)) and done == "[DONE]"

    at_engine(body, seed=seed, explore=True, copy_always=True)


@pytest.mark.parametrize("seed", range(1, 6))
def test_counts_of_tokens_never_fall_whatever_the_network_does(seed: int) -> None:
    async def body(client: EngineClient, _: Backend) -> None:
        counts = [count async for count in client.stream(GenerateRequest("r-0000001", 50, 300))]
        assert counts == sorted(counts) and counts[-1] == 300

    at_engine(body, seed=seed, explore=True)


def test_a_client_that_goes_away_is_noticed_and_a_death_breaks_the_stream() -> None:
    async def body(client: EngineClient, backend: Backend) -> None:
        events = client.forward_stream(CHAT, json.dumps({**HELLO, "max_tokens": 400, "stream": True}))
        await anext(events)
        await events.aclose()
        await asyncio.sleep(0.45)  # looked for after 0.3 s
        loads = json.loads((await client.get("/v1/loads"))[1])["loads"][0]
        assert loads["num_running_reqs"] == 0
        events = client.forward_stream(CHAT, json.dumps({**HELLO, "max_tokens": 400, "stream": True}))
        await anext(events)
        await backend.engines.terminate("engine-0")
        with pytest.raises(ConnectionLost):
            async for _ in events:
                pass

    at_engine(body)


def test_evidence_names_the_request_and_its_cause() -> None:
    recorder = Evidence()

    async def body(client: EngineClient, _: Backend) -> None:
        await client.forward(CHAT, json.dumps({**HELLO, "rid": "mine"}))

    at_engine(body, recorder=recorder)
    accepted = next(event for event in recorder.events if event.kind == "engine.accepted")
    sent = [event for event in recorder.events if event.kind == "call.sent"][-1]
    assert accepted.data["request"] == "mine"
    assert accepted.cause == f"{sent.actor}/{sent.inc}/{sent.n}"
    finished = next(event for event in recorder.events if event.kind == "engine.finished")
    assert finished.data["completion_tokens"] == 40
