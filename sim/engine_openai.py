"""The OpenAI routes of an engine without a model: /v1/chat/completions and /v1/completions.

Shapes are those of SGLang 0.5.23. Source: ../shared/spec/engines.md, section 3.
"""

from __future__ import annotations

import json
from typing import Any

from sim.engine_generate import logprob
from sim.engine_json import DONE, EOS, BadBody, Job, JsonCall, is_prompt, versions
from sim.engine_tokens import Continuation, decode, encode
from sim.engine_types import EngineResult

CHAT = "/v1/chat/completions"
ROUTES = (CHAT, "/v1/completions")
_COMPLETION_TOKENS = 16  # OpenAI's default
_NO_IDS_IN_A_STREAM = (
    "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using "
    "return_token_ids=true."
)


class OpenAICall(JsonCall):
    """A call of one of the two routes, for one choice."""

    def __init__(self, job: Job, *, chat: bool, model: str, include_usage: bool, stream: bool, now_s: float) -> None:
        super().__init__([job], stream=stream, now_s=now_s)
        self._job = job
        self._chat = chat
        self._model = model
        self._include_usage = include_usage
        self._sent = 0
        self._sent_tokens = 0
        self.ids = False
        """Whether the answer names the token ids of its prompt and output: ``return_token_ids``."""
        self.ids_at_the_end = False
        """Whether a stream does, in a chunk of its own: ``return_output_ids_in_sglext``."""
        self.logprobs = False

    @classmethod
    def read(cls, route: str, body: dict[str, Any], *, new_id: str, now_s: float, context_length: int) -> OpenAICall:
        """Raises BadBody."""
        chat = route == CHAT
        if body.get("n", 1) not in (1, None):
            raise BadBody("n: this engine gives one choice a request")
        stream = bool(body.get("stream", False))
        if chat and stream and body.get("return_token_ids"):
            raise BadBody(_NO_IDS_IN_A_STREAM)
        prompt = conversation(body) if chat else _prompt(body.get("prompt"))
        limit = body.get("max_completion_tokens") if chat else None
        limit = body.get("max_tokens") if limit is None else limit
        if limit is None:
            limit = max(1, context_length - len(prompt) - 1) if chat else _COMPLETION_TOKENS
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise BadBody(f"max_tokens must be at least 1, got {json.dumps(limit)[:50]}")
        options = body.get("stream_options")
        call = cls(
            Job(
                str(body.get("rid") or new_id),
                prompt,
                limit,
                bool(body.get("ignore_eos", False)),
                Continuation(prompt),
            ),
            chat=chat,
            model=str(body.get("model") or "default"),
            include_usage=bool(options.get("include_usage", False)) if isinstance(options, dict) else False,
            stream=stream,
            now_s=now_s,
        )
        call.ids = chat and bool(body.get("return_token_ids"))
        call.ids_at_the_end = chat and bool(body.get("return_output_ids_in_sglext"))
        call.logprobs = chat and bool(body.get("logprobs"))
        return call

    def whole(self) -> Any:
        result, text = self._job.ended, self._job.output.text
        said: dict[str, Any] = {"text": text}
        if self._chat:
            message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
            said = {"message": message}
        ids = self._job.output.ids
        told = logprobs_of(ids, 0) if self.logprobs else None
        end: dict[str, Any] = {
            "logprobs": told, "finish_reason": result.finish_reason, "matched_stop": matched(result)
        }  # fmt: skip
        if self.ids:
            end |= {"prompt_token_ids": self._job.prompt, "response_token_ids": list(ids)}
        more = {"sglext": self._sglext()} if self.ids_at_the_end else {}
        return {
            **self._head("chat.completion"),
            "choices": [{"index": 0, **said, **end}],
            "usage": _usage(result),
            "metadata": {"weight_version": result.weight_version, "weight_versions": versions(result)},
            **more,
        }

    def refusal(self, message: str, status: int = 400) -> Any:
        return openai_refusal(message, status)

    def begin(self) -> list[str]:
        return [self._event({"role": "assistant", "content": ""})] if self._chat else []

    def more(self, version: str) -> list[str]:
        """What has come since the last event: a difference, unlike the events of /generate."""
        new = self._new()
        if not new:
            return []
        ids, begin = self._job.output.ids, self._sent_tokens
        self._sent_tokens = len(ids)
        told = logprobs_of(ids[begin:], begin) if self.logprobs else None
        return [self._event({"content": new} if self._chat else new, logprobs=told)]

    def end(self) -> list[str]:
        result = self._job.ended
        finish = (result.finish_reason, matched(result))
        if self._chat:
            events = [*self.more(result.weight_version), self._event({}, *finish)]
        else:
            events = [self._event(self._new(), *finish)]  # the last text and the end in one
        if self.ids_at_the_end:
            events.append(json.dumps({**self._head("chat.completion.chunk"), "choices": [], "sglext": self._sglext()}))
        if self._include_usage:
            usage = {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(result)}
            events.append(json.dumps(usage))
        return [*events, DONE]

    def _new(self) -> str:
        text = self._job.output.text
        new, self._sent = text[self._sent :], len(text)
        return new

    def _sglext(self) -> dict[str, Any]:
        return {"input_ids": self._job.prompt, "output_ids": [list(self._job.output.ids)]}

    def _event(
        self, said: Any, finish: str | None = None, matched: int | None = None, logprobs: dict[str, Any] | None = None
    ) -> str:
        end = {"logprobs": logprobs, "finish_reason": finish, "matched_stop": matched}
        if self._chat:
            choice = {"index": 0, "delta": {"reasoning_content": None, **said}, **end}
            return json.dumps({**self._head("chat.completion.chunk"), "choices": [choice]})
        return json.dumps({**self._head(""), "choices": [{"index": 0, "text": said, **end}], "usage": None})

    def _head(self, kind: str) -> dict[str, Any]:
        kind = kind if self._chat else "text_completion"
        return {"id": self._job.rid, "object": kind, "created": int(self.now_s), "model": self._model}


def openai_refusal(message: str, status: int = 400) -> dict[str, Any]:
    """The body of a refusal on these routes."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}


def conversation(body: dict[str, Any]) -> list[int]:
    """The prompt of a chat: ``input_ids`` as they are, or else the messages, rendered and encoded. Raises BadBody."""
    ids = body.get("input_ids")
    if ids is None:
        return encode(render(body.get("messages")))
    if not is_prompt(ids) or not ids:
        raise BadBody("input_ids must be one list of token ids, and not empty")
    return list(ids)


def logprobs_of(ids: list[int], begin: int) -> dict[str, Any]:
    """``logprobs`` of a choice: one entry a token, ``begin`` the position of the first."""
    return {
        "content": [
            {"token": decode([token]), "logprob": logprob(token, at)[0], "bytes": list(decode([token]).encode()),
             "top_logprobs": []}
            for at, token in enumerate(ids, begin)
        ]
    }  # fmt: skip


def render(messages: Any) -> str:
    """A conversation as a prompt's text: a marked block a message, and the beginning of the answer. Raises BadBody."""
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
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) != len(content):
            raise BadBody("messages: this engine reads text parts only")
        content = "".join(texts)
    elif content is not None and not isinstance(content, str):
        raise BadBody("messages: content must be text")
    calls = message.get("tool_calls")
    return (content or "") + (json.dumps(calls, sort_keys=True) if calls else "")


def _prompt(prompt: Any) -> list[int]:
    ids = encode(prompt) if isinstance(prompt, str) else prompt
    if not is_prompt(ids) or not ids:
        raise BadBody("prompt must be one text or one list of token ids, and not empty")
    return list(ids)


def matched(result: EngineResult) -> int | None:
    """``matched_stop``: the token that ended the answer, None where none did."""
    return EOS if result.finish_reason == "stop" else None


def _usage(result: EngineResult) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "completion_tokens": result.completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }
