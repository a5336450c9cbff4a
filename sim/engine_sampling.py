"""Sampling of an engine that has no model: which token comes where the temperature is above 0.

A model's distribution is stood in for by one rule: at each token there is a gap between the best token and the next
one, drawn from the text before it, up to 5 (in units of log probability). The next one is taken with a probability that
falls from one half at no gap to nothing at three times the temperature. So most tokens do not depend on the draw, and
a few inputs are borderline: at temperature 0.1 some 6 in 100, as in the published runs (2 of 50 judgements flipped).

Where the draw comes from is what the published runs were about (scaling.md 8):

- deterministic mode: from the request's seed (42 without one), its position, and nothing else;
- otherwise: from the engine's one stream, which the server seed begins and *every* sampled token moves on. A seed in
  the request has no effect there.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

PPM = 1_000_000
_WIDEST = 5 * PPM
_SEED_WITHOUT = 42


class SamplingAsked(NamedTuple):
    """What a request asks for. ``temperature_ppm``: of 1, 0 is greedy; ``seed``: None where it has none."""

    temperature_ppm: int
    seed: int | None


class Sampler:
    """The draws of one engine.

    Args:
        deterministic: whether deterministic mode is on.
        server_seed: where its stream begins.
    """

    def __init__(self, deterministic: bool, server_seed: int) -> None:
        self.deterministic = deterministic
        self.server_seed = server_seed
        self.draws = 0
        """Tokens that were sampled from the stream so far."""

    def takes_next_best(self, asked: SamplingAsked, state: int, position: int) -> bool:
        """Whether the token at ``position`` is not the best one. ``state``: stands for the text before it."""
        if self.deterministic:
            seed = _SEED_WITHOUT if asked.seed is None else asked.seed
            drawn = _hash(b"seed", seed, position)
        else:
            drawn = _hash(b"stream", self.server_seed, self.draws)
            self.draws += 1
        gap = _hash(b"gap", state, 0) % _WIDEST
        widest = 3 * asked.temperature_ppm
        if gap >= widest:
            return False
        return drawn % (2 * widest) < widest - gap


def _hash(what: bytes, one: int, other: int) -> int:
    packed = what + one.to_bytes(8, "little") + other.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little")
