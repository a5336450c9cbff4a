"""The session server in the simulated world: forwarding, both formats, the held-back end, the fail-closed table."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from protocol.errors import ConnectionLost
from protocol.messages import RawRequest
from protocol.ports import ActorHandle
from protocol.serving.native import Answer
from protocol.serving.turn_hooks import NoHooks, TraceHooks, Turn
from tests.protocol.serving.session_world import CHAT, MESSAGES, PATHS, Stage, prompt, staged, turn

both = pytest.mark.parametrize("path", PATHS)
streamed = pytest.mark.parametrize("stream", [False, True])


def said(path: str, seen: Any, stream: bool) -> str:
    """The text that a client has read."""
    if not stream:
        body = seen.json
        text: str = body["content"][0]["text"] if path == MESSAGES else body["choices"][0]["message"]["content"]
        return text
    texts = []
    for data in seen.events:
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if path == MESSAGES:
            texts.append(event.get("delta", {}).get("text", ""))
        else:
            texts += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(texts)


@both
@streamed
def test_a_turn_is_forwarded_and_recorded(path: str, stream: bool) -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(turn(path, stream=stream))
        assert (seen.status, seen.error) == (200, "")
        if stream:
            assert seen.ended
        else:
            assert int(dict(seen.headers)["content-length"]) == len(seen.body)
        text = said(path, seen, stream)
        assert len(text.split()) == 20
        assert b"token_ids" not in seen.body and b"sglext" not in seen.body, "nobody asked for them"
        (read, whole) = await stage.store.keys("s-1")
        assert (read, whole) == (prompt("Say something."), prompt("Say something.") + text)
        trace = await stage.store.export_training_trace("s-1", whole)
        assert sum(label != -100 for label in trace.labels) == 20

    evidence = staged(body)
    (seen,) = evidence.of("engine.prompt")
    assert set(seen.data["unasked"]) <= {"input_ids", "return_token_ids", "return_output_ids_in_sglext"}


@both
def test_the_next_turn_is_sent_as_the_tokens_that_were_recorded(path: str) -> None:
    async def body(stage: Stage) -> None:
        first = said(path, await stage.ask(turn(path)), False)
        messages = [
            {"role": "user", "content": "Say something."},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And more."},
        ]
        assert (await stage.ask(turn(path, messages=messages))).status == 200
        assert len(await stage.store.keys("s-1")) == 4

    one, two = staged(body).of("engine.prompt")
    assert one.data["continues"] == ""
    assert two.data["continues"] == one.data["request"]


@both
def test_a_client_gets_what_it_asked_for(path: str) -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(turn(path, return_token_ids=True))
        assert b"token_ids" in seen.body

    staged(body)


def test_with_a_lease_the_answer_has_its_id() -> None:
    async def body(stage: Stage) -> None:
        assert stage.gate is not None
        for path in PATHS:
            for stream in (False, True):
                seen = await stage.ask(turn(path, session=f"{path}-{stream}", stream=stream))
                lease = dict(seen.headers)["x-seatrial-request-id"]
                first = json.loads(seen.events[0]) if stream else seen.json
                assert first.get("message", first)["id"] == lease
                assert dict(seen.headers)["x-seatrial-model-step"] == "0"
                trace = await stage.store.export_training_trace(
                    f"{path}-{stream}", (await stage.store.keys(f"{path}-{stream}"))[-1]
                )
                assert set(trace.request_ids) == {lease} and set(trace.model_steps) == {0}
        assert not (await stage.gate.snapshot()).active

    evidence = staged(body, gated=True)
    for event in evidence.of("engine.prompt"):
        assert not {"session_id", "request_id", "model_step"} & set(event.data["unasked"]), "these never leave"
    assert [event.data["label"] for event in evidence.of("gate.settled")] == ["completed"] * 4


class SlowHooks(TraceHooks):
    """Takes two seconds to record."""

    async def on_response(self, turn: Turn, answer: Answer) -> None:
        await asyncio.sleep(2.0)
        await super().on_response(turn, answer)


@both
@streamed
def test_the_end_is_told_after_the_hook(path: str, stream: bool) -> None:
    async def body(stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        asked = asyncio.ensure_future(stage.ask(turn(path, stream=stream)))
        await asyncio.sleep(1.9)
        assert not asked.done() and await stage.store.keys("s-1") == ()
        began = loop.time()
        seen = await asked
        assert seen.ended or not stream
        assert loop.time() - began > 0.1 and await stage.store.keys("s-1")

    staged(body, hooks=SlowHooks)


# --- clients who leave ---


@both
@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 6])
def test_a_client_who_leaves_loses_nothing(path: str, pieces: int) -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(turn(path, stream=True, tokens=40), leave_after=pieces)
        assert not seen.ended
        await asyncio.sleep(5.0)
        assert len(await stage.store.keys("s-1")) == 2

    evidence = staged(body, gated=True)
    (finished,) = evidence.of("engine.finished")
    assert finished.data["reason"] == "length", "the backend's answer is read to its end"
    assert [event.data["label"] for event in evidence.of("gate.settled")] == ["completed"]


@both
def test_a_client_who_leaves_a_whole_answer(path: str) -> None:
    async def body(stage: Stage) -> None:
        assert (await stage.ask(turn(path, tokens=200), leave_after=0)).status == 0
        await asyncio.sleep(10.0)
        assert len(await stage.store.keys("s-1")) == 2

    (finished,) = staged(body).of("engine.finished")
    assert finished.data["reason"] == "length"


# --- the table ---

NATIVE_ERROR = {CHAT: lambda body: body["error"]["message"], MESSAGES: lambda body: body["error"]["message"]}


def is_native_error(path: str, body: Any) -> bool:
    if path == MESSAGES:
        return bool(body["type"] == "error" and body["error"]["type"] and body["error"]["message"])
    return bool(set(body) == {"error"} and body["error"]["message"])


@both
@streamed
@pytest.mark.parametrize("what", ["not_json", "not_object", "truncated", "no_end", "cut_event", "no_finish"])
def test_a_malformed_answer_is_an_error(path: str, stream: bool, what: str) -> None:
    async def body(stage: Stage) -> None:
        stage.spoil(what)
        seen = await stage.ask(turn(path, stream=stream))
        whole = not stream or what in ("not_json", "not_object")
        if whole:
            assert seen.status >= 500 and is_native_error(path, seen.json)
        else:
            assert seen.status == 200 and not seen.ended and is_native_error(path, json.loads(seen.events[-1]))
        assert await stage.store.keys("s-1") == ()
        again = await stage.ask(turn(path, stream=stream))
        assert again.status == 200, "without a gate the next turn goes on"

    staged(body)


@both
@streamed
@pytest.mark.parametrize("what", ["error_object", "error_event", "server_error"])
def test_an_error_of_the_backend_is_passed_on(path: str, stream: bool, what: str) -> None:
    async def body(stage: Stage) -> None:
        stage.spoil(what)
        seen = await stage.ask(turn(path, stream=stream))
        if what == "server_error":
            assert (seen.status, seen.body[:6]) == (500, b"<html>"), "byte for byte"
        elif what == "error_event" and stream:
            assert "worker lost" in seen.events[-1] and not seen.ended
        else:
            assert (seen.status, seen.json["error"]["message"]) == (200, "worker lost"), "not wrapped again"
        assert await stage.store.keys("s-1") == ()

    staged(body)


@both
def test_a_too_long_context_is_a_safe_refusal(path: str) -> None:
    async def body(stage: Stage) -> None:
        assert stage.gate is not None
        seen = await stage.ask(turn(path, tokens=100_000))
        assert seen.status == 400 and b"context length" in seen.body
        assert not (await stage.gate.snapshot()).failures

    (settled,) = staged(body, gated=True).of("gate.settled")
    assert settled.data["label"] == "rejected: context length"


@pytest.mark.parametrize("what", ["not_json", "truncated", "no_end", "server_error", "refused_while_generating"])
def test_what_is_not_known_to_have_ended_poisons(what: str) -> None:
    async def body(stage: Stage) -> None:
        assert stage.gate is not None
        stage.spoil(what)
        await stage.ask(turn(CHAT, stream=True))
        assert (await stage.gate.snapshot()).failures
        seen = await stage.ask(turn(CHAT))
        assert seen.status == 503 and is_native_error(CHAT, seen.json)

    staged(body, gated=True)


@both
def test_other_paths_are_forwarded_as_they_are(path: str) -> None:
    async def body(stage: Stage) -> None:
        messages = [{"role": "user", "content": "x"}]
        counted = json.dumps({"model": "m", "messages": messages, "session_id": 7}).encode()
        seen = await stage.ask(RawRequest("POST", "/v1/messages/count_tokens?beta=true", (), counted))
        assert (seen.status, list(seen.json)) == (200, ["input_tokens"])
        assert (await stage.ask(RawRequest("GET", "/v1/models"))).json["object"] == "list"
        assert (await stage.ask(RawRequest("POST", "/flush_cache"))).status == 200
        assert (await stage.ask(RawRequest("POST", "/nothing/here"))).status == 404
        assert (await stage.ask(RawRequest("POST", "/v1/responses"))).status == 501

    evidence = staged(body)
    (counted,) = evidence.of("engine.prompt")
    assert counted.data["unasked"] == [], "no session id, and nothing put in"


@pytest.mark.parametrize("path", [CHAT[:-1] + "%73", "/v1%2fchat/completions", CHAT + "/", MESSAGES + "/?beta=true"])
def test_a_generation_is_one_however_its_path_is_written(path: str) -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(RawRequest("POST", path, (), b'{"messages": []}'))  # servers decode, and redirect
        assert seen.status == 400 and b"must carry a session_id" in seen.body
        assert (await stage.ask(RawRequest("POST", "/v1/response%73"))).status == 501

    assert not staged(body, gated=True).of("engine.prompt")


@both
def test_a_recorded_turn_has_one_answer(path: str) -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(turn(path, n=2))
        assert seen.status == 400 and is_native_error(path, seen.json) and b"n=2" in seen.body
        assert (await stage.ask(turn(path, n=1))).status == 200

    assert len(staged(body).of("engine.prompt")) == 1


@pytest.mark.parametrize("raw", [b"", b"no json", b"[1]", b'{"messages": [], "session_id": true}'])
def test_a_generation_that_cannot_be_read_is_refused(raw: bytes) -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(RawRequest("POST", CHAT, (), raw))
        assert seen.status == 400 and is_native_error(CHAT, seen.json)

    assert not staged(body).of("engine.prompt")


@both
@pytest.mark.parametrize("text", ["\ud800", "\u2028\x85\x00", "<|im_end|>", ""], ids=ascii)
def test_any_text_is_one_that_an_agent_may_say(path: str, text: str) -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(turn(path, text, session=text or "s-1"))
        assert seen.status == 200
        assert len(await stage.store.keys(text or "s-1")) == 2

    staged(body)


def test_an_evaluation_is_not_recorded() -> None:
    async def body(stage: Stage) -> None:
        seen = await stage.ask(turn(CHAT, return_token_ids=False))
        assert seen.status == 200
        assert await stage.store.keys("s-1") == ()

    (sent,) = staged(body).of("engine.prompt")
    assert sent.data["unasked"] == ["return_token_ids"], "as the client sent it"


# --- hooks that fail ---


class Failing(NoHooks):
    """Fails where it is told to."""

    def __init__(self, store: ActorHandle, where: str = "response") -> None:
        self.where = where

    async def on_request(self, turn: Turn) -> None:
        if self.where == "request":
            raise RuntimeError("no prompt")

    async def on_response(self, turn: Turn, answer: Answer) -> None:
        if self.where == "response":
            raise ConnectionLost("the store is away")

    async def on_end(self, turn: Turn, label: str) -> None:
        if self.where == "end":
            raise RuntimeError("not on record")


@both
@streamed
@pytest.mark.parametrize("where", ["request", "response", "end"])
def test_a_hook_that_fails(path: str, stream: bool, where: str) -> None:
    async def body(stage: Stage) -> None:
        assert stage.gate is not None
        seen = await stage.ask(turn(path, stream=stream))
        if stream and where != "request":
            assert not seen.ended and is_native_error(path, json.loads(seen.events[-1]))
        else:
            assert seen.status == 500 and is_native_error(path, seen.json)
        assert bool((await stage.gate.snapshot()).failures) == (where == "end")

    evidence = staged(body, gated=True, hooks=lambda store: Failing(store, where))
    assert len(evidence.of("engine.accepted")) == (where != "request")


@both
def test_an_aborted_turn_is_no_turn(path: str) -> None:
    async def body(stage: Stage) -> None:
        assert stage.gate is not None
        asked = asyncio.ensure_future(stage.ask(turn(path, tokens=300)))
        await asyncio.sleep(0.5)
        await stage.ask(RawRequest("POST", "/abort_request", (), b'{"abort_all": true}'))
        seen = await asked
        assert seen.status == 503 and is_native_error(path, seen.json)
        assert await stage.store.keys("s-1") == () and not (await stage.gate.snapshot()).failures

    evidence = staged(body, gated=True)
    assert [event.data["label"] for event in evidence.of("gate.settled")] == ["aborted"]


@both
def test_a_turn_that_ends_after_its_session_was_released_is_told_and_not_recorded(path: str) -> None:
    """Its agent has given the episode up meanwhile: nobody would ever release what the first turn would leave."""

    async def body(stage: Stage) -> None:
        assert stage.gate is not None
        asked = asyncio.ensure_future(stage.ask(turn(path, tokens=300)))
        await asyncio.sleep(0.3)
        assert await stage.store.release_sessions(("s-1",)) == ()
        seen = await asked
        assert seen.status == 500 and is_native_error(path, seen.json) and b"s-1 was released" in seen.body
        assert (await stage.store.snapshot()).sessions == ()
        assert not (await stage.gate.snapshot()).failures, "the backend has ended: a failed attempt, which is safe"

    evidence = staged(body, gated=True)
    assert [event.data["label"] for event in evidence.of("gate.settled")] == ["failed: response hook"]
    assert [event.data["session"] for event in evidence.of("trace.refused")] == ["s-1"]


def test_a_session_id_is_one_id_as_text_or_number() -> None:
    async def body(stage: Stage) -> None:
        assert (await stage.ask(turn(CHAT, session=17))).status == 200
        assert await stage.store.release_sessions(("17",)) == ("17",)

    staged(body)
