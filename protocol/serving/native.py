"""The two formats that agents speak: OpenAI's chat completions and Anthropic's messages (serving.md 5.1, 5.2).

What a session server must know of each: which paths generate, what an error looks like, where a stream ends, where the
id of an answer stands, and what an answer says of its own end. Shapes are those of SGLang 0.5.23.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any, Literal, Protocol

from protocol.serving.sse import ServerEvent

Role = Literal["content", "error", "end", "broken"]
"""content: part of the answer. error: the backend says that it failed. end: the marker. broken: not of the format."""


@dataclasses.dataclass(slots=True)
class Answer:
    """A backend's whole answer, as a hook sees it.

    ``message``: the answer as JSON; of a stream, what its events add up to. ``token_ids``, ``logprobs``: of the output,
    None where the backend gave none. ``finish_reason``: ``stop``, ``length``, ``tool_calls``, ``abort``, ...; empty
    where the answer does not say that it has ended. ``stop_token``: the token that ended it, where it is one.
    """

    message: dict[str, Any]
    text: str
    finish_reason: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    stop_token: int | None = None
    tool_calls: Any = None


class StreamReader(Protocol):
    """Follows the events of one stream."""

    def feed(self, event: ServerEvent) -> Role:
        """What an event is. Raises ValueError, TypeError or OverflowError where a part of it is of another type."""
        ...

    def shown(self, event: ServerEvent, request_id: str, unasked: tuple[str, ...]) -> bytes:
        """The bytes of an event for the client: with the turn's id, without what it did not ask for; maybe none."""
        ...

    def answer(self) -> Answer:
        """What the events so far add up to."""
        ...


class NativeFormat(Protocol):
    """One format."""

    name: str

    def generates(self, path: str) -> bool:
        """Whether a POST to this path is a generation."""
        ...

    def belongs(self, path: str) -> bool:
        """Whether errors on this path are told in this format."""
        ...

    def error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""
        ...

    def error_event(self, status: int, message: str) -> bytes:
        """The event that tells of an error in mid-stream."""
        ...

    def is_error(self, body: dict[str, Any]) -> bool:
        """Whether a body with a 2xx is an error all the same."""
        ...

    def read(self, body: dict[str, Any]) -> Answer:
        """A whole answer."""
        ...

    def shown(self, body: dict[str, Any], request_id: str, unasked: tuple[str, ...]) -> dict[str, Any]:
        """A whole answer for the client: with the turn's id (unless empty), without what it did not ask for."""
        ...

    def reader(self) -> StreamReader:
        """For one stream."""
        ...


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, None where there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def numbers(value: Any) -> tuple[int, ...] | None:
    """Token ids, None where the value is no list of integers."""
    if isinstance(value, list) and all(type(one) is int for one in value):
        return tuple(value)
    return None


def decimals(value: Any) -> tuple[float, ...] | None:
    """Logprobs, None where the value is no list of numbers."""
    if isinstance(value, list) and all(type(one) in (int, float) for one in value):
        with contextlib.suppress(OverflowError):
            return tuple(float(one) for one in value)
    return None


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or parts that have one."""
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
