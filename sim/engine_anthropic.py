"""Anthropic's route of an engine without a model: /v1/messages, and what it counts on /v1/messages/count_tokens.

Shapes are those of SGLang 0.5.23 (entrypoints/anthropic/serving.py), which tells an abort as ``end_turn``. Beyond it,
and as LMDeploy has it, ``return_token_ids`` gives ``token_ids`` and ``logprobs``, and then an abort is told as such:
with SGLang's own answers no turn of this format can be recorded token by token.
"""

from __future__ import annotations

import json
from typing import Any

from sim.engine_generate import logprob
from sim.engine_json import BadBody, Job, JsonCall
from sim.engine_openai import conversation, matched
from sim.engine_tokens import Continuation
from sim.engine_types import EngineResult

ROUTE = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class AnthropicCall(JsonCall):
    """A call of /v1/messages."""

    named_events = True

    def __init__(self, job: Job, *, model: str, stream: bool, ids: bool, now_s: float) -> None:
        super().__init__([job], stream=stream, now_s=now_s)
        self._job = job
        self._model = model
        self._ids = ids
        self._sent = 0

    @classmethod
    def read(cls, body: dict[str, Any], *, new_id: str, now_s: float) -> AnthropicCall:
        """Raises BadBody."""
        limit = body.get("max_tokens")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise BadBody("max_tokens: must be positive")
        if not body.get("model"):
            raise BadBody("model: Model is required")
        prompt = prompt_of(body)
        job = Job(
            str(body.get("rid") or new_id), prompt, limit, bool(body.get("ignore_eos", False)), Continuation(prompt)
        )
        return cls(
            job,
            model=str(body["model"]),
            stream=bool(body.get("stream", False)),
            ids=bool(body.get("return_token_ids")),
            now_s=now_s,
        )

    def whole(self) -> Any:
        result = self._job.ended
        return {
            **self._head(),
            "content": [{"type": "text", "text": self._job.output.text}],
            "stop_reason": self._reason(result),
            "usage": {"input_tokens": result.prompt_tokens, "output_tokens": result.completion_tokens},
            **self._more(result),
        }

    def refusal(self, message: str, status: int = 400) -> Any:
        return anthropic_refusal(message)

    def begin(self) -> list[str]:
        usage = {"input_tokens": len(self._job.prompt), "output_tokens": 0}
        start = {"type": "message_start", "message": {**self._head(), "content": [], "usage": usage}}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [json.dumps(start), json.dumps(block)]

    def more(self, version: str) -> list[str]:
        text = self._job.output.text
        new, self._sent = text[self._sent :], len(text)
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": new}}
        return [json.dumps(delta)] if new else []

    def end(self) -> list[str]:
        result = self._job.ended
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": self._reason(result)},
            "usage": {"output_tokens": result.completion_tokens},
            **self._more(result),
        }
        last = [{"type": "content_block_stop", "index": 0}, delta, {"type": "message_stop"}]
        return [*self.more(result.weight_version), *map(json.dumps, last)]

    def _head(self) -> dict[str, Any]:
        return {"id": f"msg_{self._job.rid}", "type": "message", "role": "assistant", "model": self._model}

    def _reason(self, result: EngineResult) -> str:
        if self._ids and result.finish_reason == "abort":
            return "abort"
        return _REASONS.get(result.finish_reason, "end_turn")

    def _more(self, result: EngineResult) -> dict[str, Any]:
        if not self._ids:
            return {}
        ids = self._job.output.ids
        logprobs = [logprob(token, at)[0] for at, token in enumerate(ids)]
        return {"token_ids": list(ids), "logprobs": logprobs, "matched_stop": matched(result)}


def prompt_of(body: dict[str, Any]) -> list[int]:
    """The prompt's ids; ``system`` is a message of its own, and the first. Raises BadBody."""
    messages, system = body.get("messages"), body.get("system")
    if system and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    return conversation({**body, "messages": messages})


def anthropic_refusal(message: str) -> dict[str, Any]:
    """The body of a 400 on this route."""
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
