"""The OpenAI routes of an engine: /v1/chat/completions and /v1/completions as SGLang 0.5.23 shapes them.

Pure functions from bodies to bodies; who runs the generation in between is the caller's matter. ``sim/engine_chat.py``
does so for simulated engines, ``real/emulated`` behind HTTP. Source: ../shared/spec/engines.md, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sim.engine_tokens import Continuation, encode
from sim.engine_types import EngineResult

ROUTES = ("/v1/chat/completions", "/v1/completions")
DONE = "data: [DONE]\n\n"


class BadBody(ValueError):
    """A body that SGLang answers with 400; nothing was done."""


@dataclass(slots=True)
class OpenAIRequest:
    """A parsed body. ``prompt``: token ids; ``max_new``: the most output tokens; ``output``: what will be said."""

    chat: bool
    rid: str
    model: str
    prompt: list[int]
    max_new: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    output: Continuation


def parse(route: str, body: dict[str, Any], *, new_id: str, model: str, context_length: int) -> OpenAIRequest:
    """Read a body of ``route``. ``new_id``: the request's id where the body has no ``rid``; ``model``: likewise.

    Raises:
        BadBody: what is wrong with it.
    """
    chat = route == ROUTES[0]
    if body.get("n", 1) not in (1, None):
        raise BadBody("n: this engine gives one choice a request")
    prompt = encode(render(body.get("messages"))) if chat else _prompt(body.get("prompt"))
    if not prompt:
        raise BadBody("the prompt is empty")
    limit = body.get("max_completion_tokens") if chat else None
    limit = body.get("max_tokens") if limit is None else limit
    if limit is None:
        limit = context_length - len(prompt) - 1 if chat else 16  # what the context leaves; OpenAI's default
    if isinstance(limit, bool) or not isinstance(limit, int) or (limit < 1 and len(prompt) < context_length):
        raise BadBody(f"max_tokens must be at least 1, got {limit!r}.")
    options = body.get("stream_options") or {}
    output = Continuation(prompt)
    return OpenAIRequest(
        chat,
        str(body.get("rid") or new_id),
        str(body.get("model") or model),
        prompt,
        max(1, limit),
        bool(body.get("ignore_eos", False)),
        bool(body.get("stream", False)),
        bool(options.get("include_usage", False)) if isinstance(options, dict) else False,
        output,
    )


def render(messages: Any) -> str:
    """The prompt's text: one marked block a message, and the beginning of the answer."""
    if not isinstance(messages, list) or not messages:
        raise BadBody("messages must be a non-empty list of {role, content}")
    blocks = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadBody("messages: every message needs a role")
        blocks.append(f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n")
    return "".join(blocks) + "<|im_start|>assistant\n"


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise BadBody("messages: this engine reads text parts only")
        content = "".join(texts)
    elif content is not None and not isinstance(content, str):
        raise BadBody("messages: content must be text")
    calls = message.get("tool_calls")
    return (content or "") + (json.dumps(calls, sort_keys=True) if calls else "")


def _prompt(prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**32 for token in prompt):
        return prompt
    raise BadBody("prompt must be one text or one list of token ids")


def error_body(message: str, status: int = 400) -> dict[str, Any]:
    """The body of a refusal."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}


def response(request: OpenAIRequest, result: EngineResult, created: int) -> dict[str, Any]:
    """The body of a whole answer. ``created``: seconds since the epoch."""
    choice: dict[str, Any] = {"index": 0}
    if request.chat:
        choice["message"] = {
            "role": "assistant", "content": request.output.text, "reasoning_content": None, "tool_calls": None,
        }  # fmt: skip
    else:
        choice["text"] = request.output.text
    choice |= {"logprobs": None, "finish_reason": result.finish_reason, "matched_stop": _matched(result)}
    return {
        **_head(request, created, "chat.completion" if request.chat else "text_completion"),
        "choices": [choice],
        "usage": _usage(result),
        "metadata": metadata(result),
    }


def metadata(result: EngineResult) -> dict[str, Any]:
    """Which weights made the answer: the last label, and the label of each span of output tokens."""
    return {"weight_version": result.weight_version, "weight_versions": versions(result)}


def versions(result: EngineResult) -> list[dict[str, Any]]:
    """``weight_versions``: labels by output token."""
    return [{"version": label, "start": start, "end": end} for label, start, end in result.weight_versions]


class Stream:
    """The events of one streamed answer, each a ``data:`` line. Deltas, unlike /generate, whose text is cumulative."""

    def __init__(self, request: OpenAIRequest, created: int) -> None:
        self._request = request
        self._created = created
        self._sent = 0

    def begin(self) -> str:
        """What comes before the first token: the role, in a chat."""
        return self._event({"role": "assistant", "content": ""}) if self._request.chat else ""

    def more(self) -> str:
        """What the output has gained since the last event; "" if nothing."""
        text = self._request.output.text
        new, self._sent = text[self._sent :], len(text)
        if not new:
            return ""
        return self._event({"content": new} if self._request.chat else new)

    def end(self, result: EngineResult) -> str:
        """The rest, the finish reason, the usage if asked for, and ``[DONE]``."""
        request = self._request
        last = self._event({} if request.chat else "", result.finish_reason, _matched(result))
        if request.include_usage:
            chunk = _head(request, self._created, _chunk_kind(request))
            last += sse(chunk | {"choices": [], "usage": _usage(result)})
        return self.more() + last + DONE

    def _event(self, delta: Any, finish: str | None = None, matched: int | None = None) -> str:
        request = self._request
        choice = {"index": 0, "delta" if request.chat else "text": delta, "logprobs": None}
        choice |= {"finish_reason": finish, "matched_stop": matched}
        return sse(_head(request, self._created, _chunk_kind(request)) | {"choices": [choice], "usage": None})


def sse(document: Any) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(document)}\n\n"


def finish(output: Continuation, spans: Iterable[tuple[str, int, int, str]]) -> None:
    """Say the rest of ``output``, each span with the weights that computed it."""
    for _, _, end, weight_hash in spans:
        output.extend(end, weight_hash)


def _head(request: OpenAIRequest, created: int, kind: str) -> dict[str, Any]:
    return {"id": request.rid, "object": kind, "created": created, "model": request.model}


def _chunk_kind(request: OpenAIRequest) -> str:
    return "chat.completion.chunk" if request.chat else "text_completion"


def _matched(result: EngineResult) -> int | None:
    return 2 if result.finish_reason == "stop" else None  # the id of the end-of-sequence token


def _usage(result: EngineResult) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "completion_tokens": result.completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }
