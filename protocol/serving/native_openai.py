"""OpenAI's chat completions as a session server reads and shows them."""

from __future__ import annotations

import json
from typing import Any

from protocol.serving.native import Answer, Role, StreamReader, decimals, json_object, numbers, text_of
from protocol.serving.sse import ServerEvent, event_bytes


class OpenAIFormat:
    """OpenAI's chat completions, with the extensions of SGLang and, for the ids of an answer, of LMDeploy."""

    name = "openai"

    def generates(self, path: str) -> bool:
        return path.endswith("/v1/chat/completions")

    def belongs(self, path: str) -> bool:
        return True

    def error(self, status: int, message: str) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    def error_event(self, status: int, message: str) -> bytes:
        return event_bytes(json.dumps(self.error(status, message)))

    def is_error(self, body: dict[str, Any]) -> bool:
        return bool(body.get("error")) or body.get("object") == "error"

    def read(self, body: dict[str, Any]) -> Answer:
        choice = _first(body.get("choices"))
        message = choice.get("message")
        message = message if isinstance(message, dict) else {}
        given = choice.get("response_token_ids")
        ids = numbers(choice.get("output_ids") if given is None else given)  # LMDeploy's name, or SGLang's
        stop = choice.get("matched_stop")
        return Answer(
            body,
            text_of(message.get("content")),
            str(choice.get("finish_reason") or ""),
            ids if ids is not None else _sglext(body),
            _logprobs(choice.get("logprobs")),
            stop if type(stop) is int else None,
            message.get("tool_calls"),
        )

    def shown(self, body: dict[str, Any], request_id: str, unasked: tuple[str, ...]) -> dict[str, Any]:
        shown = dict(body)
        if request_id:
            shown["id"] = request_id
        if "return_token_ids" in unasked and isinstance(body.get("choices"), list):
            hidden = ("prompt_token_ids", "response_token_ids", "output_ids")
            shown["choices"] = [
                {key: value for key, value in choice.items() if key not in hidden}
                if isinstance(choice, dict)
                else choice
                for choice in body["choices"]
            ]
        if "logprobs" in unasked and isinstance(shown.get("choices"), list):
            shown["choices"] = [
                {**choice, "logprobs": None} if isinstance(choice, dict) else choice for choice in shown["choices"]
            ]
        if "return_output_ids_in_sglext" in unasked:
            shown.pop("sglext", None)
        return shown

    def reader(self) -> StreamReader:
        return _OpenAIReader(self)


class _OpenAIReader:
    def __init__(self, form: OpenAIFormat) -> None:
        self._form = form
        self._latest: dict[str, Any] = {}
        self._head: dict[str, Any] = {}
        self._texts: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[Any] = []
        self._ids: list[Any] = []  # of LMDeploy, which gives those of each chunk
        self._choice: dict[str, Any] = {}
        self._more: dict[str, Any] = {}

    def feed(self, event: ServerEvent) -> Role:
        if not event.data:
            return "content"  # a comment
        if event.data == "[DONE]":
            return "end"
        chunk = json_object(event.data)
        if chunk is None:
            return "broken"
        self._latest = chunk
        if self._form.is_error(chunk):
            return "error"
        self._head = self._head or {key: chunk.get(key) for key in ("id", "created", "model")}
        for key in ("usage", "metadata", "sglext"):
            if chunk.get(key):
                self._more[key] = chunk[key]
        choice = _first(chunk.get("choices"))
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._texts.append(text_of(delta.get("content")))
            for call in delta.get("tool_calls") or ():
                _add_call(self._calls, call)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            self._logprobs += logprobs["content"]
        if isinstance(choice.get("output_ids"), list):
            self._ids += choice["output_ids"]
        for key in ("finish_reason", "matched_stop"):
            if choice.get(key) is not None:
                self._choice[key] = choice[key]
        return "content"

    def shown(self, event: ServerEvent, request_id: str, unasked: tuple[str, ...]) -> bytes:
        if not event.data or event.data == "[DONE]":
            return event.raw
        shown = self._form.shown(self._latest, request_id, unasked)
        if "sglext" in self._latest and "sglext" not in shown and not shown.get("choices") and not shown.get("usage"):
            return b""  # a chunk that is there for the ids alone
        return event.raw if shown == self._latest else event_bytes(json.dumps(shown), event.name)

    def answer(self) -> Answer:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        logprobs = {"content": self._logprobs} if self._logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, **self._choice}
        if self._ids:
            choice["output_ids"] = self._ids
        return self._form.read({**self._head, "object": "chat.completion", "choices": [choice], **self._more})


def _first(choices: Any) -> dict[str, Any]:
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _sglext(body: dict[str, Any]) -> tuple[int, ...] | None:
    found = body.get("sglext")
    ids = found.get("output_ids") if isinstance(found, dict) else None
    return numbers(ids[0]) if isinstance(ids, list) and ids else None


def _logprobs(value: Any) -> tuple[float, ...] | None:
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        return None
    return decimals([one["logprob"] for one in content if isinstance(one, dict) and "logprob" in one])


def _add_call(calls: dict[int, dict[str, Any]], part: Any) -> None:
    if not isinstance(part, dict):
        return
    call = calls.setdefault(
        int(part.get("index") or 0), {"type": "function", "function": {"name": "", "arguments": ""}}
    )
    if part.get("id"):
        call["id"] = part["id"]
    function = part.get("function")
    for key in ("name", "arguments"):
        if isinstance(function, dict) and function.get(key):
            call["function"][key] += function[key]
