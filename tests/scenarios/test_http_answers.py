"""Answers as an agent at the edge reads them: what is an answer, what an error, and what neither."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.messages import HttpHead
from scenarios.http_answers import HttpAnswer, is_error

OPENAI: Any = {
    "choices": [{"message": {"content": " 1 2"}, "finish_reason": "length"}],
    "usage": {"completion_tokens": 2}, "metadata": {"weight_version": "3"},
}  # fmt: skip
ANTHROPIC: Any = {
    "type": "message", "content": [{"type": "text", "text": " 1 2"}], "stop_reason": "max_tokens",
    "usage": {"output_tokens": 2},
}  # fmt: skip
ERRORS: dict[str, Any] = {
    "openai": {"error": {"message": "no", "type": "server_error"}},
    "anthropic": {"type": "error", "error": {"type": "api_error", "message": "no"}},
}


def read(form: str, body: bytes, *, status: int = 200, kind: str = "application/json", outcome: str = "read") -> Any:
    answer = HttpAnswer(form)
    answer.head(HttpHead(status, (("Content-Type", kind), ("x-seatrial-model-step", "4"))))
    for at in range(0, len(body), 7):
        answer.feed(body[at : at + 7])
    return answer, answer.judged(outcome)[0]


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


@pytest.mark.parametrize(("form", "body"), [("openai", OPENAI), ("anthropic", ANTHROPIC)])
def test_whole_answers(form: str, body: Any) -> None:
    answer, seen = read(form, json.dumps(body).encode())
    assert (seen, answer.text, answer.completion_tokens, answer.model_step) == ("ok", " 1 2", 2, 4)
    assert read(form, json.dumps(ERRORS[form]).encode(), status=500)[1] == "error"
    assert read(form, json.dumps(ERRORS[form]).encode())[1] == "error", "also with a 2xx"
    assert read(form, b"<html>")[1] == "malformed"
    assert read(form, b"[1]")[1] == "malformed"
    assert read(form, b'{"choices": []}')[1] == "malformed"
    assert read(form, json.dumps(body).replace("length", "").replace("max_tokens", "").encode())[1] == "malformed"
    assert read(form, b'{"detail": "Internal Server Error"}', status=500)[1] == "foreign_error"
    assert read(form, b"<html>", status=502)[1] == "foreign_error"


def test_the_error_of_one_format_is_none_in_the_other() -> None:
    assert not is_error("anthropic", ERRORS["openai"])
    assert is_error("openai", {"object": "error", "message": "SGLang's own"})


CHUNK = {"choices": [{"delta": {"content": " 1"}, "finish_reason": None}]}
LAST = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
DELTA = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": " 1"}}
END = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
STOP = {"type": "message_stop"}


@pytest.mark.parametrize(
    ("form", "events", "seen"),
    [
        ("openai", (CHUNK, LAST, b"[DONE]"), "ok"),
        ("openai", (CHUNK, LAST), "incomplete"),
        ("openai", (CHUNK, b"[DONE]"), "incomplete"),
        ("openai", (CHUNK, ERRORS["openai"]), "error"),
        ("openai", (CHUNK, ERRORS["openai"], b"[DONE]"), "error"),
        ("openai", (CHUNK, b"oops", LAST, b"[DONE]"), "malformed"),
        ("anthropic", (DELTA, END, STOP), "ok"),
        ("anthropic", (DELTA, STOP), "incomplete"),
        ("anthropic", (DELTA, END), "incomplete"),
        ("anthropic", (DELTA, ERRORS["anthropic"]), "error"),
    ],
)
def test_streams(form: str, events: Any, seen: str) -> None:
    answer, found = read(form, stream(*events), kind="text/event-stream")
    assert found == seen
    if seen == "ok":
        assert answer.text == " 1" and answer.over


def test_a_stream_that_is_cut_in_an_event_is_incomplete() -> None:
    assert read("openai", stream(CHUNK, LAST, b"[DONE]")[:-4], kind="text/event-stream")[1] == "incomplete"


@pytest.mark.parametrize("outcome", ["left", "broken", "gave_up"])
def test_how_the_reading_ended_comes_first(outcome: str) -> None:
    assert read("openai", b"", outcome=outcome)[1] == outcome
