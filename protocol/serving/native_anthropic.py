"""Anthropic's messages as a session server reads and shows them."""

from __future__ import annotations

import json
from typing import Any

from protocol.serving.native import Answer, Role, StreamReader, decimals, json_object, numbers, text_of
from protocol.serving.sse import ServerEvent, event_bytes

_ANTHROPIC_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


class AnthropicFormat:
    """Anthropic's messages.

    SGLang 0.5.23 gives no token ids on this route, and tells an abort as ``end_turn``; other backends may give
    ``token_ids``, ``logprobs`` and a ``stop_reason`` of ``abort``, which are read here.
    """

    name = "anthropic"

    def generates(self, path: str) -> bool:
        return path.endswith("/v1/messages")

    def belongs(self, path: str) -> bool:
        return "/v1/messages" in path

    def error(self, status: int, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": _ANTHROPIC_ERRORS.get(status, "api_error"), "message": message}}

    def error_event(self, status: int, message: str) -> bytes:
        return event_bytes(json.dumps(self.error(status, message)), "error")

    def is_error(self, body: dict[str, Any]) -> bool:
        return body.get("type") == "error" or bool(body.get("error"))

    def read(self, body: dict[str, Any]) -> Answer:
        content = body.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        reason = str(body.get("stop_reason") or "")
        stop = body.get("matched_stop")
        return Answer(
            body,
            "".join(text_of(block.get("text")) for block in blocks if block.get("type") == "text"),
            _FINISH.get(reason, reason),
            numbers(body.get("token_ids")),
            decimals(body.get("logprobs")),
            stop if type(stop) is int else None,
            [block for block in blocks if block.get("type") == "tool_use"] or None,
        )

    def shown(self, body: dict[str, Any], request_id: str, unasked: tuple[str, ...]) -> dict[str, Any]:
        hidden = ("token_ids", "logprobs", "matched_stop") if "return_token_ids" in unasked else ()
        shown = {key: value for key, value in body.items() if key not in hidden}
        if request_id:
            shown["id"] = request_id
        return shown

    def reader(self) -> StreamReader:
        return _AnthropicReader(self)


class _AnthropicReader:
    def __init__(self, form: AnthropicFormat) -> None:
        self._form = form
        self._latest: dict[str, Any] = {}
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, str] = {}

    def feed(self, event: ServerEvent) -> Role:
        if not event.data:
            return "content"
        told = json_object(event.data)
        if told is None:
            return "broken"
        self._latest = told
        kind = told.get("type")
        if self._form.is_error(told):
            return "error"
        if kind == "message_stop":
            return "end"
        if kind == "message_start" and isinstance(told.get("message"), dict):
            self._message.update(told["message"])
        elif kind == "content_block_start" and isinstance(told.get("content_block"), dict):
            self._blocks[int(told.get("index") or 0)] = dict(told["content_block"])
        elif kind == "content_block_delta" and isinstance(told.get("delta"), dict):
            self._add(int(told.get("index") or 0), told["delta"])
        elif kind == "message_delta":
            delta = told.get("delta")
            self._message.update(delta if isinstance(delta, dict) else {})
            for key in ("token_ids", "logprobs", "matched_stop"):
                if key in told:
                    self._message[key] = told[key]
            if isinstance(told.get("usage"), dict):
                self._message["usage"] = {**(self._message.get("usage") or {}), **told["usage"]}
        return "content"

    def _add(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks.setdefault(index, {"type": "text", "text": ""})
        if isinstance(delta.get("text"), str):
            block["text"] = block.get("text", "") + delta["text"]
        elif isinstance(delta.get("thinking"), str):
            block["thinking"] = block.get("thinking", "") + delta["thinking"]
        elif isinstance(delta.get("partial_json"), str):
            self._arguments[index] = self._arguments.get(index, "") + delta["partial_json"]

    def shown(self, event: ServerEvent, request_id: str, unasked: tuple[str, ...]) -> bytes:
        told = self._latest
        if event.data and told.get("type") == "message_start" and request_id and isinstance(told.get("message"), dict):
            told = {**told, "message": {**told["message"], "id": request_id}}
        elif event.data and told.get("type") == "message_delta":
            told = self._form.shown(told, "", unasked)
        return event.raw if told is self._latest or told == self._latest else event_bytes(json.dumps(told), event.name)

    def answer(self) -> Answer:
        for index, text in self._arguments.items():
            self._blocks[index]["input"] = json_object(text) or {}
        self._arguments = {}
        return self._form.read({**self._message, "content": [self._blocks[index] for index in sorted(self._blocks)]})
