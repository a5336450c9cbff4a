"""What a backend may answer to one turn: any text, and answers with parts of other types than they should have."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from protocol.config import SessionServerConfig
from protocol.messages import HttpHead, RawRequest
from protocol.serving.downstream import Downstream
from protocol.serving.formats import FORMATS
from protocol.serving.native import NativeFormat
from protocol.serving.settlement import RejectionPattern
from protocol.serving.turn_forward import Ending, TurnForward
from protocol.serving.turn_hooks import NoHooks, Turn

ANTHROPIC, OPENAI = FORMATS
CONFIG = SessionServerConfig()
USAGE: dict[str, Any] = {"output_tokens": 2}

WHOLE: dict[str, dict[str, Any]] = {
    "openai": {
        "choices": [
            {
                "message": {"content": "hi", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                "finish_reason": "stop", "matched_stop": 7, "output_ids": [1, 7],
                "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2}]},
            }
        ],
        "usage": USAGE, "sglext": {"output_ids": [[1, 7]]},
    },
    "anthropic": {
        "type": "message", "content": [{"type": "text", "text": "hi"}, {"type": "tool_use", "id": "t", "input": {}}],
        "stop_reason": "end_turn", "usage": USAGE, "token_ids": [1, 7], "logprobs": [-1.0, -2], "matched_stop": 7,
    },
}  # fmt: skip
EVENTS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        {"choices": [{"delta": {"content": "hi"}, "logprobs": {"content": [{"logprob": -1.0}]}, "output_ids": [1]}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop", "matched_stop": 7}], "usage": USAGE},
    ],
    "anthropic": [
        {"type": "message_start", "message": {"type": "message", "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USAGE, "logprobs": [-1.0, -2.0]},
    ],
}
END = {"openai": b"data: [DONE]\n\n", "anthropic": b'event: message_stop\ndata: {"type": "message_stop"}\n\n'}
ODD = (None, True, 0, 10**400, 1.5, float("inf"), float("nan"), "x", "\ud800", [], [None], [[1]], ["x"], {}, {"a": 1})

formats = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


class Backend:
    """Gives one answer."""

    def __init__(self, kind: str, body: bytes) -> None:
        self._head = HttpHead(200, (("content-type", kind),))
        self._body = body

    async def exchange(self, request: RawRequest, **limits: float) -> AsyncGenerator[HttpHead | bytes, None]:
        yield self._head
        yield self._body


def stream_of(form: NativeFormat, events: list[Any]) -> bytes:
    """As SGLang writes it: UTF-8, nothing escaped that need not be."""
    text = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    return text.encode("utf-8", "replace") + END[form.name]


def forwarded(form: NativeFormat, kind: str, body: bytes) -> tuple[Ending, bytes]:
    """How the turn has ended, and the body that its client has read."""

    async def forward() -> tuple[Ending, bytes]:
        out = Downstream()
        ask: Any = None  # of the backend, which NoHooks never does
        turn = Turn(form.name, "/", {}, "s", False, True, "req-1", 0, ask, ("return_token_ids", "logprobs"))
        backend: Any = Backend(kind, body)
        rejection = RejectionPattern(CONFIG)
        ending = await TurnForward(
            CONFIG, backend, NoHooks(), rejection, form, turn, out, aborting=lambda: False
        ).run(RawRequest("POST", "/", (), b"{}"))  # fmt: skip
        ending.tell()
        out.end()
        return ending, b"".join([piece async for piece in out.pieces() if isinstance(piece, bytes)])

    return asyncio.run(forward())


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def with_odd(value: Any, at: tuple[Any, ...], odd: Any) -> Any:
    changed = inner = copy.deepcopy(value)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = odd
    return changed


@formats
@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x1c", "\x0b", "字", "\U0001f600"], ids=ascii)
def test_a_stream_is_cut_at_its_line_ends_and_at_nothing_that_a_model_says(form: NativeFormat, separator: str) -> None:
    said = json.dumps(EVENTS[form.name]).replace('"hi"', json.dumps(f"a{separator}b"))
    ending, body = forwarded(form, "text/event-stream", stream_of(form, json.loads(said)))
    assert ending.receipt.label == "completed" and body.endswith(END[form.name])


@formats
def test_a_media_type_is_one_in_any_case(form: NativeFormat) -> None:
    ending, _ = forwarded(form, "Text/Event-Stream; charset=utf-8", stream_of(form, EVENTS[form.name]))
    assert ending.receipt.label == "completed"


@formats
def test_whatever_stands_where_in_an_answer_the_client_is_told_in_its_format(form: NativeFormat) -> None:
    for at in places(WHOLE[form.name]):
        for odd in ODD:
            answer = json.dumps(with_odd(WHOLE[form.name], at, odd)).encode()
            ending, body = forwarded(form, "application/json", answer)
            assert form.is_error(json.loads(body)) == (ending.receipt.label != "completed"), (at, odd)


@formats
def test_whatever_stands_where_in_a_stream_its_end_is_told_if_and_only_if_it_is_one(form: NativeFormat) -> None:
    for number, event in enumerate(EVENTS[form.name]):
        for at in places(event):
            for odd in ODD:
                events = [*EVENTS[form.name]]
                events[number] = with_odd(event, at, odd)
                ending, body = forwarded(form, "text/event-stream", stream_of(form, events))
                if ending.receipt.label == "completed":
                    assert body.endswith(END[form.name]), (number, at, odd)
                else:
                    last = json.loads(body.decode().rstrip().rpartition("data: ")[2])
                    assert form.is_error(last) and not ending.receipt.safe, (number, at, odd)


@formats
def test_logprobs_that_are_no_numbers_are_none(form: NativeFormat) -> None:
    """The response hook then refuses the turn, which has ended: its gate is not poisoned (serving.md 2.3)."""
    for odd in (None, "x", [1], 10**400, True):
        at = ("logprobs", 0) if form is ANTHROPIC else ("choices", 0, "logprobs", "content", 0, "logprob")
        assert form.read(with_odd(WHOLE[form.name], at, odd)).logprobs is None
    assert form.read(WHOLE[form.name]).logprobs == (-1.0, -2.0)
