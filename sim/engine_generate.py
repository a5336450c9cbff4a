"""POST /generate of an engine without a model: bodies, answers and streams as SGLang 0.5.23 shapes them.

Source: ../shared/spec/engines.md, section 3.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from sim.engine_json import DONE, EOS, BadBody, Job, JsonCall, is_prompt, versions, whole_number
from sim.engine_sampling import PPM, Sampler, SamplingAsked
from sim.engine_tokens import Continuation, encode
from sim.engine_types import EngineResult

ROUTE = "/generate"
SAMPLING_KEYS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width", "json_schema",
    "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "watermark",
)  # fmt: skip
_DEFAULT_NEW_TOKENS = 128
_GREEDY_BELOW = 1e-6


class UnknownField(BadBody):
    """A key that SGLang's schema does not have. Its refusal has the text alone, and no stream."""


class GenerateCall(JsonCall):
    """A /generate call. ``many``: its answer is a list."""

    refused_in_stream = True

    def __init__(self, jobs: list[Job], many: bool, *, stream: bool, now_s: float) -> None:
        super().__init__(jobs, stream=stream, now_s=now_s)
        self._many = many

    @classmethod
    def read(cls, body: dict[str, Any], sampler: Sampler, *, new_id: str, now_s: float) -> GenerateCall:
        """Greedy where ``temperature`` is absent: the model has no sampling defaults of its own. Raises BadBody."""
        prompts, many = _prompts(body)
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise BadBody("sampling_params must be one object")
        unknown = sorted(key for key in sampling if key not in SAMPLING_KEYS)
        if unknown:
            expected = ", ".join(f"`{key}`" for key in SAMPLING_KEYS)
            raise UnknownField(f"unknown field `{unknown[0]}`, expected one of {expected}")
        copies = whole_number(sampling.get("n"), 1, "n")
        max_new = whole_number(sampling.get("max_new_tokens"), _DEFAULT_NEW_TOKENS, "max_new_tokens")
        if copies < 1 or max_new < 1:
            raise BadBody("n and max_new_tokens must be at least 1")
        prompts = [prompt for prompt in prompts for _ in range(copies)]
        many = many or copies > 1
        start = whole_number(body.get("logprob_start_len"), -1, "logprob_start_len")
        ignore_eos = bool(sampling.get("ignore_eos", False))
        stream = bool(body.get("stream", False))
        if stream and many:
            raise BadBody("this engine streams one answer at a time")
        asked = _asked(sampling)
        draw = functools.partial(sampler.takes_next_best, asked) if asked.temperature_ppm else None
        wanted = start if body.get("return_logprob") else None
        jobs = [
            Job(rid, prompt, max_new, ignore_eos, Continuation(prompt, draw), wanted)
            for rid, prompt in zip(_rids(body.get("rid"), new_id, len(prompts)), prompts, strict=True)
        ]
        call = cls(jobs, many, stream=stream, now_s=now_s)
        call.asked = asked
        return call

    def whole(self) -> Any:
        answers = [self._answer(job) for job in self.jobs]
        return answers if self._many else answers[0]

    def refusal(self, message: str, status: int = 400) -> Any:
        return generate_refusal(message)

    def more(self, version: str) -> list[str]:
        """Cumulative text and ids, as SGLang's are."""
        job = self.jobs[0]
        meta = {
            "id": job.rid,
            "finish_reason": None,
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(job.output.ids),
            "weight_version": version,
        }
        return [json.dumps({"text": job.output.text, "output_ids": job.output.ids, "meta_info": meta})]

    def end(self) -> list[str]:
        refused = self.refused
        last = self._answer(self.jobs[0]) if refused is None else stream_refusal(refused.error, refused.status)
        return [json.dumps(last), DONE]

    def _answer(self, job: Job) -> dict[str, Any]:
        result = job.ended
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
            "request_received_ts": self.now_s,
            "request_finished_ts": self.now_s + seconds,
        }
        if job.logprob_start is not None:
            meta["input_token_logprobs"] = _prompt_logprobs(job.prompt, job.logprob_start)
            meta["output_token_logprobs"] = [logprob(token, at) for at, token in enumerate(job.output.ids)]
        return {"text": job.output.text, "output_ids": list(job.output.ids), "meta_info": meta}


def generate_refusal(message: str) -> dict[str, Any]:
    """The body of a 400 to /generate and to the admin routes."""
    return {"error": {"message": message}}


def stream_refusal(message: str, status: int = 400) -> dict[str, Any]:
    """The one event of a refused stream, whose status is 200."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": status, "retryable": False}}


def _prompts(body: dict[str, Any]) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadBody("Exactly one of text and input_ids should be provided.")
    if ids is not None:
        many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        prompts = ids if many else [ids]
    else:
        many = isinstance(text, list)
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(one, str) for one in texts):
            raise BadBody("text must be a string or a list of strings")
        prompts = [encode(str(one)) for one in texts]
    if not prompts or not all(is_prompt(prompt) and prompt for prompt in prompts):
        raise BadBody("a prompt must be a text or a list of token ids, and have at least one token")
    return prompts, many


def _asked(sampling: dict[str, Any]) -> SamplingAsked:
    seed = sampling.get("sampling_seed")
    if seed is not None:
        seed = whole_number(seed, 0, "sampling_seed")
    temperature = sampling.get("temperature")
    if temperature is None or sampling.get("top_k") == 1:
        return SamplingAsked(0, seed)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 1000:
        raise BadBody(f"temperature must be a non-negative number, got {json.dumps(temperature)[:50]}")
    return SamplingAsked(0 if temperature < _GREEDY_BELOW else round(temperature * PPM), seed)


def _rids(given: Any, new_id: str, count: int) -> list[str]:
    if isinstance(given, list):
        if len(given) != count or not all(isinstance(rid, str) for rid in given):
            raise BadBody(f"rid: {count} request ids are needed")
        if len(dict.fromkeys(given)) != count:
            raise BadBody("Duplicate request IDs detected within the request")
        return given
    rid = str(given or new_id)
    return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]


def _reason(result: EngineResult) -> dict[str, Any]:
    if result.finish_reason == "abort":
        return {"type": "abort", "message": result.error, "status_code": None, "err_type": None}
    if result.finish_reason == "stop":
        return {"type": "stop", "matched": EOS}
    return {"type": "length", "length": result.completion_tokens}


def _throughput(result: EngineResult) -> float | None:
    """Tokens per second after the first one."""
    decode_ns = result.e2e_ns - result.ttft_ns
    return (result.completion_tokens - 1) * 1e9 / decode_ns if result.ttft_ns >= 0 and decode_ns else None


def _prompt_logprobs(prompt: list[int], start: int) -> list[list[Any]]:
    if start < 0:
        return []
    listed = [logprob(token, at) for at, token in enumerate(prompt)]
    listed[0][0] = None  # nothing comes before the first token
    return listed[start:]


def logprob(token: int, at: int) -> list[Any]:
    """Of a token at a position, as [logprob, id, text]."""
    return [-((token * 31 + at * 17) % 997 + 1) / 500, token, None]
