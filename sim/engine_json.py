"""JSON bodies of generation calls: what the routes /generate, /v1/chat/completions and /v1/completions share.

Pure of any world: ``sim/engine_forward.py`` answers these calls in simulated time, ``real/emulated`` behind HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.engine import SimEngine
from sim.engine_sampling import SamplingAsked
from sim.engine_tokens import Continuation, prefix_blocks
from sim.engine_types import EngineResult

DONE = "[DONE]"
EOS = 2
"""Id of the end-of-sequence token, which ``matched`` names when an answer ends by itself."""


class BadBody(ValueError):
    """A body that SGLang answers with 400; nothing was done."""


def _nobody() -> None:
    pass


@dataclass(slots=True, eq=False)
class Job:
    """One generation. ``news`` is called whenever ``output`` has grown or ``result`` is there.

    Args:
        prompt: token ids; ``max_new``: the most output tokens; ``output``: what is said, as far as it has come.
        logprob_start: from which prompt token on log probabilities are wanted; -1: of the output only; None: none.
    """

    rid: str
    prompt: list[int]
    max_new: int
    ignore_eos: bool
    output: Continuation
    logprob_start: int | None = None
    result: EngineResult | None = None
    news: Callable[[], None] = _nobody

    def submit(self, engine: SimEngine, *, stream: bool) -> None:
        """Hand it in. Raises EngineNotListening (nothing was done)."""
        engine.submit(
            self.rid,
            len(self.prompt),
            self.max_new,
            prefix_blocks(self.prompt, engine.profile.prefix_block_tokens),
            done=self._end,
            ignore_eos=self.ignore_eos,
            eos_after=self.output.natural_length,
            on_token=(lambda _, count: self._grow(count, engine.weight_hash)) if stream else None,
        )

    def _grow(self, count: int, weight_hash: str) -> None:
        self.output.extend(count, weight_hash)
        if count < (self.max_new if self.ignore_eos else min(self.max_new, self.output.natural_length)):
            self.news()  # else the end follows at once, and its event brings the last token

    def _end(self, result: EngineResult) -> None:
        for _, _, end, weight_hash in result.spans:
            self.output.extend(end, weight_hash)
        self.result = result
        self.news()

    @property
    def ended(self) -> EngineResult:
        """The result. Only of a job that has one."""
        assert self.result is not None
        return self.result


class JsonCall:
    """One call with a JSON body: its jobs, and the shapes of its answers. Subclasses are the routes.

    Events of a stream are given as the data of server-sent events, without ``data:``.

    Args:
        now_s: seconds since the epoch by the engine's clock, for the time stamps in answers.
    """

    named_events = False
    """Whether an event of a stream names its type beside its data, as Anthropic's do."""
    refused_in_stream = False
    """Whether a refused stream is answered 200 with an event that tells (/generate), or with its status (OpenAI)."""

    def __init__(self, jobs: list[Job], *, stream: bool, now_s: float) -> None:
        self.jobs = jobs
        self.stream = stream
        self.now_s = now_s
        self.asked: SamplingAsked | None = None
        """How it is sampled, where the route says so."""

    def submit(self, engine: SimEngine) -> None:
        """Hand every job in. Raises EngineNotListening (nothing was done)."""
        for job in self.jobs:
            job.submit(engine, stream=self.stream)

    @property
    def refused(self) -> EngineResult | None:
        """The result of the first job that was refused, if any was."""
        return next((job.ended for job in self.jobs if job.ended.status != 200), None)

    def whole(self) -> Any:
        """The body of the answer; every job has ended."""
        raise NotImplementedError

    def refusal(self, message: str, status: int = 400) -> Any:
        """The body of a refusal."""
        raise NotImplementedError

    def begin(self) -> list[str]:
        """Events before the first token."""
        return []

    def more(self, version: str) -> list[str]:
        """Events for what the output has gained. ``version``: the label of the weights now."""
        raise NotImplementedError

    def end(self) -> list[str]:
        """The last events, ``[DONE]`` included."""
        raise NotImplementedError


def event_text(event: str, *, named: bool) -> str:
    """An event of a stream as it is sent."""
    name = f"event: {json.loads(event)['type']}\n" if named else ""
    return f"{name}data: {event}\n\n"


def versions(result: EngineResult) -> list[dict[str, Any]]:
    """``weight_versions``: labels by output token."""
    return [{"version": label, "start": start, "end": end} for label, start, end in result.weight_versions]


def whole_number(value: Any, default: int, name: str) -> int:
    """An integer of a body, ``default`` for null. Raises BadBody."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadBody(f"{name} must be an integer, got {json.dumps(value)[:50]}")
    return value


def is_prompt(value: Any) -> bool:
    """Whether ``value`` is a list of token ids."""
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a body; an empty body is an empty one. Raises BadBody."""
    try:
        body = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise BadBody("the body is not JSON") from None
    if not isinstance(body, dict):
        raise BadBody("the body must be a JSON object")
    return body
