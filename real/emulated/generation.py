"""POST /generate of an emulated engine: bodies, answers and streams as SGLang 0.5.23 shapes them.

Source: ../shared/spec/engines.md, section 3.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from sim.engine_openai import finish, versions
from sim.engine_tokens import Continuation, encode
from sim.engine_types import EngineResult

SAMPLING_KEYS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width", "json_schema",
    "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "watermark",
)  # fmt: skip
_DEFAULT_NEW_TOKENS = 128


class BadRequest(ValueError):
    """A body that is answered with 400; nothing was done."""


@dataclass
class Job:
    """One generation. ``news`` is set whenever ``output`` has grown or ``result`` is there."""

    rid: str
    prompt: list[int]
    max_new: int
    ignore_eos: bool
    output: Continuation
    logprob_start: int | None = None  # None: no logprobs; -1: of the output only
    news: asyncio.Event = field(default_factory=asyncio.Event)
    result: EngineResult | None = None
    received: float = field(default_factory=time.time)

    def end(self, result: EngineResult) -> None:
        finish(self.output, result.spans)
        self.result = result
        self.news.set()

    def grow(self, count: int, weight_hash: str) -> None:
        self.output.extend(count, weight_hash)
        self.news.set()


def parse(body: dict[str, Any]) -> tuple[list[Job], bool]:
    """The jobs of a body, and whether its answer is a list.

    Raises:
        BadRequest: what is wrong with it.
    """
    prompts, many = _prompts(body)
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params must be one object")
    unknown = sorted(key for key in sampling if key not in SAMPLING_KEYS)
    if unknown:
        raise BadRequest(f"Unexpected sampling_params key {unknown[0]!r}; allowed: {', '.join(SAMPLING_KEYS)}")
    copies = _whole(sampling.get("n"), 1, "n")
    max_new = _whole(sampling.get("max_new_tokens"), _DEFAULT_NEW_TOKENS, "max_new_tokens")
    if copies < 1 or max_new < 1:
        raise BadRequest("n and max_new_tokens must be at least 1")
    prompts = [prompt for prompt in prompts for _ in range(copies)]
    many = many or copies > 1
    start = _whole(body.get("logprob_start_len"), -1, "logprob_start_len") if body.get("return_logprob") else None
    ignore_eos = bool(sampling.get("ignore_eos", False))
    return [
        Job(rid, prompt, max_new, ignore_eos, Continuation(prompt), start)
        for rid, prompt in zip(_rids(body.get("rid"), len(prompts)), prompts, strict=True)
    ], many


def _prompts(body: dict[str, Any]) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("Exactly one of text and input_ids should be provided.")
    if ids is not None:
        many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        prompts = ids if many else [ids]
    else:
        many = isinstance(text, list)
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(one, str) for one in texts):
            raise BadRequest("text must be a string or a list of strings")
        prompts = [encode(str(one)) for one in texts]
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(type(token) is int and 0 <= token < 2**31 for token in prompt):
            raise BadRequest("input_ids must be a list of token ids, or a list of such lists")
        if not prompt:
            raise BadRequest("The prompt must have at least one token.")
    return prompts, many


def _rids(given: Any, count: int) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, list):
        if len(given) != count or not all(isinstance(rid, str) for rid in given):
            raise BadRequest(f"rid: {count} request ids are needed")
        return given
    return [str(given)] if count == 1 else [f"{given}_{index}" for index in range(count)]


def _whole(value: Any, default: int, name: str) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} must be an integer, got {value!r}")
    return value


def answer(job: Job) -> dict[str, Any]:
    """The body of a finished job."""
    result = job.result
    assert result is not None
    seconds = result.e2e_ns / 1e9
    meta = {
        "id": job.rid,
        "finish_reason": _reason(result),
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "cached_tokens": result.cached_tokens,
        "weight_version": result.weight_version,
        "weight_versions": versions(result),
        "num_retractions": result.num_retractions,
        "e2e_latency": seconds,
        "queue_time": max(0, result.queue_ns) / 1e9,
        "decode_throughput": _throughput(result),
        "request_received_ts": job.received,
        "request_finished_ts": job.received + seconds,
    }
    if job.logprob_start is not None:
        meta["input_token_logprobs"] = _prompt_logprobs(job.prompt, job.logprob_start)
        meta["output_token_logprobs"] = [_logprob(token, at) for at, token in enumerate(job.output.ids)]
    return {"text": job.output.text, "output_ids": list(job.output.ids), "meta_info": meta}


def event(job: Job, version: str) -> dict[str, Any]:
    """One event of a stream before the last: cumulative text and ids, as SGLang's are."""
    meta = {
        "id": job.rid,
        "finish_reason": None,
        "prompt_tokens": len(job.prompt),
        "completion_tokens": len(job.output.ids),
        "weight_version": version,
    }
    return {"text": job.output.text, "output_ids": list(job.output.ids), "meta_info": meta}


def _reason(result: EngineResult) -> dict[str, Any]:
    if result.finish_reason == "abort":
        return {"type": "abort", "message": result.error, "status_code": None, "err_type": None}
    if result.finish_reason == "stop":
        return {"type": "stop", "matched": 2}
    return {"type": "length", "length": result.completion_tokens}


def _throughput(result: EngineResult) -> float | None:
    """Tokens per second after the first one."""
    decode_ns = result.e2e_ns - result.ttft_ns
    return (result.completion_tokens - 1) * 1e9 / decode_ns if result.ttft_ns >= 0 and decode_ns else None


def _prompt_logprobs(prompt: list[int], start: int) -> list[list[Any]]:
    if start < 0:
        return []
    listed = [_logprob(token, at) for at, token in enumerate(prompt)][start:]
    if start == 0:
        listed[0][0] = None  # nothing comes before the first token
    return listed


def _logprob(token: int, at: int) -> list[Any]:
    return [-((token * 31 + at * 17) % 997 + 1) / 500, token, None]
