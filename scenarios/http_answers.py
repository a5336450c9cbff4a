"""Answers of session servers as a client reads them: is it an answer, an error in the client's own format, or neither?

Written without the session server's own reading of the formats, which is what is tried.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from protocol.messages import HttpHead

PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
Seen = Literal["ok", "error", "foreign_error", "malformed", "incomplete", "broken", "left", "gave_up"]


def body_of(
    form: str, messages: list[dict[str, str]], request: str, output: int, stream: bool, ignore_eos: bool
) -> dict[str, Any]:
    """The body of a turn. ``rid`` is SGLang's: it names the request to the engine."""
    body: dict[str, Any] = {
        "model": "default", "messages": messages, "max_tokens": output, "ignore_eos": ignore_eos, "rid": request,
        "stream": stream,
    }  # fmt: skip
    if form == "openai" and stream:
        body["stream_options"] = {"include_usage": True}
    return body


class HttpAnswer:
    """One answer, as far as it has come.

    Args:
        form: openai or anthropic.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self.status = 0
        self.streamed = False
        self.raw = b""
        self.text = ""
        self.events = 0
        self.over = False
        """The end marker has come."""
        self.finish_reason = ""
        self.completion_tokens = 0
        self.version = ""
        self.model_step = -1
        self.lease = ""
        self._error: Any = None
        self._bad = ""

    @property
    def finished(self) -> bool:
        """A stream has said why it ends; its end marker is still to come."""
        return bool(self.finish_reason)

    def head(self, head: HttpHead) -> None:
        self.status = head.status
        self.streamed = head.header("content-type").startswith("text/event-stream")
        step = head.header("x-seatrial-model-step")
        self.model_step = int(step) if step else -1
        self.lease = head.header("x-seatrial-request-id")

    def feed(self, piece: bytes) -> None:
        """More of the body."""
        self.raw += piece
        if not self.streamed:
            return
        *events, self.raw = self.raw.split(b"\n\n")
        for event in events:
            self._event(event.decode("utf-8", "replace"))

    def _event(self, event: str) -> None:
        data = "\n".join(line[5:].strip() for line in event.split("\n") if line.startswith("data:"))
        if not data:
            return
        self.events += 1
        if data == "[DONE]":
            self.over = True
            return
        try:
            told = json.loads(data)
        except ValueError:
            self._bad = f"an event is no JSON: {data[:60]}"
            return
        if is_error(self._form, told):
            self._error = told
        elif self._form == "openai":
            self._openai(told)
        else:
            self._anthropic(told)

    def _openai(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices") or ():
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self._usage(chunk.get("usage"))
        self._metadata(chunk)

    def _anthropic(self, told: dict[str, Any]) -> None:
        if told["type"] == "message_stop":
            self.over = True
        elif told["type"] == "content_block_delta":
            self.text += told["delta"].get("text", "")
        elif told["type"] == "message_delta":
            self.finish_reason = told["delta"].get("stop_reason") or self.finish_reason
            self._usage(told.get("usage"))

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.completion_tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))

    def _metadata(self, body: dict[str, Any]) -> None:
        if body.get("metadata"):
            self.version = body["metadata"]["weight_version"]

    def judged(self, outcome: str) -> tuple[Seen, str]:
        """What was seen, and a text. ``outcome``: how the reading ended."""
        if outcome == "left":
            return "left", ""
        if outcome == "gave_up":
            return "gave_up", ""
        if outcome == "broken":
            return "broken", f"after {len(self.raw)} bytes and {self.events} events"
        if not self.streamed:
            return self._whole()
        if self._bad:
            return "malformed", self._bad
        if self._error is not None:
            return "error", json.dumps(self._error)
        if self.over and self.finish_reason and not self.raw:
            return "ok", ""
        return "incomplete", f"{self.events} events, end {self.over}, reason {self.finish_reason!r}"

    def _whole(self) -> tuple[Seen, str]:
        text = self.raw.decode("utf-8", "replace")
        try:
            body = json.loads(self.raw)
        except ValueError:
            return ("malformed" if self.status < 300 else "foreign_error"), text
        if is_error(self._form, body):
            return "error", text
        if self.status >= 300:
            return "foreign_error", text
        try:
            self._read(body)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            return "malformed", f"{type(error).__name__}: {error}: {text}"
        return ("ok", "") if self.finish_reason else ("malformed", text)

    def _read(self, body: dict[str, Any]) -> None:
        if self._form == "openai":
            choice = body["choices"][0]
            self.text = choice["message"]["content"]
            self.finish_reason = choice["finish_reason"] or ""
            self._metadata(body)
        else:
            self.text = "".join(block["text"] for block in body["content"])
            self.finish_reason = body["stop_reason"] or ""
        self._usage(body.get("usage"))


def is_error(form: str, body: Any) -> bool:
    """Whether a body or an event is an error in the format of a client, as the client's library would find it."""
    if not isinstance(body, dict):
        return False
    inner = body.get("error")
    told = isinstance(inner, dict) and isinstance(inner.get("message"), str) and isinstance(inner.get("type"), str)
    if form == "anthropic":
        return body.get("type") == "error" and told
    return told or (body.get("object") == "error" and isinstance(body.get("message"), str))  # the latter is SGLang's


@dataclasses.dataclass(frozen=True)
class OtherCall:
    """Something that is no generation, and what an engine answers."""

    method: str
    target: str
    status: int
    key: str = ""
    """A key of the JSON object in the answer."""
    counts: bool = False
    """Its body is a conversation whose tokens are counted."""

    def is_right(self, answer: HttpAnswer) -> bool:
        if answer.status != self.status:
            return False
        try:
            body = json.loads(answer.raw)
        except ValueError:
            return not self.key
        return not self.key or (isinstance(body, dict) and self.key in body)


OTHER_CALLS = (
    OtherCall("POST", "/v1/messages/count_tokens?beta=true", 200, "input_tokens", counts=True),
    OtherCall("GET", "/v1/models", 200, "data"),
    OtherCall("POST", "/nothing/of/the/kind", 404),
)
