"""What trace hooks send to LMDeploy, and read of it: ids in the place of a conversation (serving.md 5.1)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from protocol.rollout.segments import TokenizedSegment, TraceMatch
from protocol.serving.native import json_object
from protocol.serving.native_anthropic import AnthropicFormat
from protocol.serving.native_openai import OpenAIFormat
from protocol.serving.sse import ServerEvent
from protocol.serving.turn_hooks import TraceHooks, Turn

QUESTION = {"role": "user", "content": "Hi"}


class Store:
    """Has nothing, and keeps what is appended."""

    name = "traces"

    def __init__(self) -> None:
        self.segments: tuple[TokenizedSegment, ...] = ()

    async def search(self, session: str, text: str) -> TraceMatch:
        return TraceMatch("", (), 0)

    async def append(self, session: str, prefix: str, segments: tuple[TokenizedSegment, ...]) -> None:
        self.segments = segments


def refusal(form: str, body: dict[str, Any]) -> str:
    """Why LMDeploy v0.16.0 answers 400, empty where it does not: its check of ids, read off its source."""
    if body.get("messages") and body.get("input_ids") is not None:
        return "input_ids cannot be used when messages is non-empty."
    if form == "anthropic":
        return next((key for key in ("system", "tools", "tool_choice") if body.get(key)), "")
    return ""


def turn_of(form: str, engine: str, stream: bool, routes: list[str]) -> Turn:
    async def ask(route: str, body: dict[str, Any]) -> dict[str, Any]:
        routes.append(route)
        return {"/tokenize": {"tokens": [1, 2, 3]}, "/v1/encode": {"input_ids": [1, 2, 3], "length": 3}}[route]

    body = {"model": "m", "messages": [QUESTION], "stream": stream}
    if form == "anthropic":
        body |= {"system": "Be brief.", "tools": [{"name": "look"}], "tool_choice": {"type": "auto"}}
    path = "/v1/messages" if form == "anthropic" else "/v1/chat/completions"
    return Turn(form, path, body, "s", stream, True, "r", 2, ask, engine=engine)


@pytest.mark.parametrize("form", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_lmdeploy_is_sent_ids_and_no_conversation(form: str, stream: bool) -> None:
    async def body() -> None:
        routes: list[str] = []
        turn = turn_of(form, "lmdeploy 0.16", stream, routes)
        await TraceHooks(Store()).on_request(turn)  # type: ignore[arg-type]  # with the two methods that are called
        assert refusal(form, turn.body) == "" and turn.body["messages"] == []
        assert turn.body["input_ids"] == [1, 2, 3] and routes == ["/v1/encode"]
        assert turn.body["return_token_ids"] is True and turn.body["logprobs"] is True
        other = turn_of(form, "sglang 0.5.23", stream, routes)
        await TraceHooks(Store()).on_request(other)  # type: ignore[arg-type]  # as above
        assert other.body["messages"] == [QUESTION] and refusal(form, other.body), "so it has to be told apart"

    asyncio.run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_lmdeploy_is_recorded_with_its_ids(stream: bool) -> None:
    async def body() -> None:
        store, hooks_of = Store(), OpenAIFormat()
        hooks = TraceHooks(store)  # type: ignore[arg-type]  # with the two methods that are called
        turn = turn_of("openai", "lmdeploy 0.16", stream, [])
        await hooks.on_request(turn)
        said = [("Hel", [7]), ("lo", [8, 9])]
        if stream:
            reader = hooks_of.reader()
            for number, (text, ids) in enumerate(said):
                choice = {
                    "index": 0, "delta": {"content": text}, "output_ids": ids, "logprobs": logprobs(ids),
                    "finish_reason": "stop" if number else None,
                }  # fmt: skip
                data = json.dumps({"id": "1", "choices": [choice]})
                event = ServerEvent(data=data, raw=f"data: {data}\n\n".encode())
                reader.feed(event)
                assert b"output_ids" not in reader.shown(event, "r", turn.unasked), "its client did not ask for them"
            answer = reader.answer()
        else:
            choice = {
                "index": 0, "message": {"role": "assistant", "content": "Hello"}, "output_ids": [7, 8, 9],
                "logprobs": logprobs([7, 8, 9]), "finish_reason": "stop",
            }  # fmt: skip
            whole = json_object(json.dumps({"id": "1", "choices": [choice]}))
            assert whole is not None
            answer = hooks_of.read(whole)
            assert "output_ids" not in json.dumps(hooks_of.shown(whole, "r", turn.unasked))
        await hooks.on_response(turn, answer)
        read, spoken = store.segments
        assert read.token_ids == (1, 2, 3) and "Hi" in read.text
        assert (spoken.text, spoken.token_ids, spoken.logprobs) == ("Hello", (7, 8, 9), (-0.5,) * 3)

    asyncio.run(body())


def logprobs(ids: list[int]) -> dict[str, Any]:
    return {"content": [{"token": str(one), "logprob": -0.5} for one in ids]}


def test_the_error_of_lmdeploy_is_an_error_in_either_format() -> None:
    told = {"message": "m", "type": "invalid_request_error", "code": 400, "param": None, "object": "error"}
    assert OpenAIFormat().is_error(told)
    assert AnthropicFormat().is_error({"type": "error", "error": {"type": "invalid_request_error", "message": "m"}})
