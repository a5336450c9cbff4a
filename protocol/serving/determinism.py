"""What makes two replicas give the same answer: the seed of a request, the switch, and a backend that keeps the cache.

Source: scaling.md 8. A stochastic request is repeatable only if three things come together: a seed that follows from
the request's content, engines in deterministic mode, and the same server seed everywhere. Deterministic mode without a
backend that keeps the prefix cache is a trap of its own: see :func:`attention_backend`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from protocol.errors import HttpError
from protocol.messages import message
from protocol.ports import EngineOptions

if TYPE_CHECKING:  # engines take this module, and do without pydantic
    from protocol.config import JudgeConfig

GENERATIONS = ("turing", "ampere", "ada", "hopper", "blackwell")
"""Generations of GPUs, oldest first."""
KEEPS_PREFIXES = ("fa3", "fa4", "triton")
"""Attention backends with which SGLang keeps the prefix cache in deterministic mode; with others it switches it off."""

_GREEDY_BELOW = 1e-6  # SGLang takes such a temperature for 0
_MASK = 0x7FFFFFFF


@message
class Sampling:
    """Effective sampling parameters: every default merged in."""

    temperature: float = 0.2
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024

    @property
    def greedy(self) -> bool:
        """Whether it gets no seed: the rule of the contract asks for the temperature alone, whatever top_k says."""
        return self.temperature == 0

    def as_sent(self, seed: int | None = None) -> dict[str, Any]:
        """The ``sampling_params`` of a call. ``seed``: None: none."""
        sent: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
        }
        return sent if seed is None else {**sent, "sampling_seed": seed}


def effective(config: JudgeConfig, asked: Mapping[str, Any]) -> Sampling:
    """The sampling of a call with every default merged in: the request's over the instance's, which has the contract's.

    Args:
        asked: temperature, top_p, top_k and max_new_tokens of the request; a missing one, or None, is not asked for.
    """

    def first(name: str, own: Any) -> Any:
        value = asked.get(name)
        return own if value is None else value

    return Sampling(
        temperature=float(first("temperature", config.temperature)),
        top_p=float(first("top_p", config.top_p)),
        top_k=first("top_k", -1 if config.top_k is None else config.top_k),
        max_new_tokens=first("max_new_tokens", config.max_new_tokens),
    )


def check_sampling(sampling: Sampling, min_p: float) -> None:
    """Refuse what would be sampled in a way that no seed of ours can repeat.

    Raises:
        HttpError: 400, *not done*. A temperature that is no number at all, negative, or so small that an engine takes
            it for 0 while this rule does not; ``min_p`` with a stochastic temperature.
    """
    temperature = sampling.temperature
    if isinstance(temperature, bool) or not math.isfinite(temperature) or temperature < 0:
        raise HttpError(status=400, body=f"temperature {temperature!r} must be a finite number, 0 or more")
    if 0 < temperature < _GREEDY_BELOW:
        raise HttpError(
            status=400,
            body=f"temperature {temperature!r} is ambiguous: send 0 for greedy, or {_GREEDY_BELOW:g} or more",
        )
    if min_p and not sampling.greedy:
        raise HttpError(status=400, body="min_p does not go with sampling here: no seed repeats it; leave it out")


def request_seed(
    model_path: str,
    input_ids: Sequence[int] | str,
    sampling: Sampling,
    given: int | None,
    more: Mapping[str, Any] | None = None,
) -> int | None:
    """The ``sampling_seed`` of a request: the caller's own, none when greedy, else one that follows from its content.

    The first four bytes, big endian, of SHA-256 over canonical JSON of model, input and effective sampling, masked to
    31 bits. So equal requests get equal answers, on any replica and as often as they come.

    Args:
        model_path: of the model, as the ingress is configured.
        input_ids: token ids of the prompt. Its text where there are none, for an ingress has no tokenizer: the same
            prompt in the two ways has two seeds.
        sampling: with every default merged in.
        given: the caller's own seed.
        more: whatever else the request says of sampling (JSON): that is of its content too.
    """
    if given is not None:
        return given
    if sampling.greedy:
        return None
    content = {
        "model": model_path,
        "input_ids": input_ids if isinstance(input_ids, str) else list(input_ids),
        "sampling": {**(more or {}), **sampling.as_sent()},
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:4], "big") & _MASK


def attention_backend(deterministic: bool, gpu: str | None, of_user: str, of_instance: str) -> str:
    """The attention backend to name on an engine's command line; empty: none, the engine chooses.

    Left to itself in deterministic mode the engine of the published runs took flashinfer before it looked whether that
    keeps the prefix cache. It does not; with the cache off and many long prompts of one prefix the scheduler stopped
    for good. So: what one instance was given wins, then what the user set for all, and only where nobody said anything
    and the GPU is known is one chosen: fa3 before Blackwell, flashinfer from Blackwell on, with the cache still off.

    Args:
        gpu: generation of the GPU, None where the probe failed.
        of_user: set for all engines, empty for none; of_instance: in this service's own engine configuration.
    """
    if of_instance:
        return of_instance
    if of_user or not deterministic or gpu is None:
        return of_user
    return "flashinfer" if GENERATIONS.index(gpu) >= GENERATIONS.index("blackwell") else "fa3"


def keeps_prefixes(options: EngineOptions | None) -> bool:
    """Whether an engine with these options has a prefix cache; one that chooses its own backend is taken to err."""
    return options is None or not options.deterministic or options.attention_backend in KEEPS_PREFIXES
