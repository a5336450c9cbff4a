"""Answers that no healthy backend gives, as a worn proxy or a dying engine does: the fault ``bad_answer``.

The engine has done its work; what comes back is not what it said. ``scenarios/faults.py`` declares the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Final, Literal, NamedTuple

from protocol.errors import ConnectionLost, NetworkError
from protocol.messages import HttpHead

Pieces = AsyncGenerator[HttpHead | bytes, None]

Bad = Literal[
    "not_json", "not_object", "error_object", "error_event", "truncated", "no_end", "cut_event", "no_finish",
    "server_error", "refused_while_generating", "throttled_while_generating",
]  # fmt: skip

_REFUSALS: Final = {
    "refused_while_generating": (400, "session is occupied"),
    "throttled_while_generating": (429, "too many requests"),
}
_PAGE = b"<html><body>504 Gateway Time-out</body></html>"


class BadAnswer(NamedTuple):
    """What the caller is to get. ``breaks``: the connection is lost after ``body``, before its end."""

    status: int
    content_type: str
    body: bytes
    breaks: bool = False


def distorted(what: str, path: str, content_type: str, body: bytes) -> BadAnswer:
    """A 2xx answer, made bad. Of whole answers and streams; what fits one of the two only falls back on its like.

    not_json, not_object: 2xx with something else. error_object: 2xx with an error. error_event: a stream that ends in
    an error. truncated: the connection breaks in mid-body. no_end: a stream without its last event. cut_event: one that
    ends inside an event. no_finish: one that never says why it ended. server_error: 500 with a page. (For
    refused_while_generating, 400, and throttled_while_generating, 429, there is no answer to distort: see
    :func:`refusal`.)
    """
    streamed = content_type.startswith("text/event-stream")
    if what == "not_json":
        return BadAnswer(200, "text/html", _PAGE)
    if what == "not_object":
        return BadAnswer(200, "application/json", b'["choices"]')
    if what == "server_error":
        return BadAnswer(500, "text/html", _PAGE)
    if what == "error_object" or (what == "error_event" and not streamed):
        return BadAnswer(200, "application/json", json.dumps(_error(path)).encode())
    if not streamed:
        if what == "no_finish":
            return BadAnswer(200, content_type, _unfinished(body))
        return BadAnswer(200, content_type, body[: len(body) // 2], breaks=True)
    events = body.split(b"\n\n")[:-1]
    if what == "error_event":
        name = b"event: error\n" if _anthropic(path) else b""
        last = name + b"data: " + json.dumps(_error(path)).encode()
        return BadAnswer(200, content_type, _joined([*events[: len(events) // 2], last]))
    if what == "no_end":
        return BadAnswer(200, content_type, _joined(events[:-1]))
    if what == "cut_event":
        return BadAnswer(200, content_type, _joined(events[:-2]) + events[-2][: len(events[-2]) // 2])
    if what == "no_finish":
        kept = [event for event in events if b'"finish_reason": "' not in event and b'"stop_reason"' not in event]
        return BadAnswer(200, content_type, _joined(kept))
    return BadAnswer(200, content_type, body[: len(body) // 2], breaks=True)


def refusal(path: str, what: str = "refused_while_generating") -> BadAnswer:
    """A 4xx that is no refusal: the engine generates all the same."""
    status, text = _REFUSALS[what]
    return BadAnswer(status, "application/json", json.dumps(_error(path, text)).encode())


def _error(path: str, text: str = "worker lost") -> dict[str, object]:
    if _anthropic(path):
        return {"type": "error", "error": {"type": "api_error", "message": text}}
    return {"error": {"message": text, "type": "server_error", "code": 500}}


def _anthropic(path: str) -> bool:
    return path.endswith("/v1/messages")


def _unfinished(body: bytes) -> bytes:
    answer = json.loads(body)
    for choice in answer.get("choices") or ():
        choice["finish_reason"] = None
    if "stop_reason" in answer:
        answer["stop_reason"] = None
    return json.dumps(answer).encode()


def _joined(events: list[bytes]) -> bytes:
    return b"".join(event + b"\n\n" for event in events)


async def bad(pieces: Pieces, what: str, path: str) -> Pieces:
    """The pieces of an answer that has gone bad. What is no 2xx is left as it is.

    Raises:
        ConnectionLost: *unknown*, after the pieces, where the bad answer is one that breaks off.
    """
    if what in _REFUSALS:
        # The connection behind the one that answers stays open, so that the engine goes on.
        asyncio.get_running_loop().create_task(_to_the_end(pieces), name=f"unheard {path}")
        for piece in _given(refusal(path, what)):
            yield piece
        return
    async with contextlib.aclosing(pieces):
        head = await anext(pieces)
        assert isinstance(head, HttpHead)
        body = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
    if not 200 <= head.status < 300:
        yield head
        yield body
        return
    answer = distorted(what, path, head.header("content-type"), body)
    for piece in _given(answer):
        yield piece
    if answer.breaks:
        raise ConnectionLost(f"{path}: the connection was lost in mid-body")


def _given(answer: BadAnswer) -> tuple[HttpHead, bytes]:
    return HttpHead(answer.status, (("content-type", answer.content_type),)), answer.body


async def _to_the_end(pieces: Pieces) -> None:
    with contextlib.suppress(NetworkError):
        async with contextlib.aclosing(pieces):
            async for _ in pieces:
                pass
