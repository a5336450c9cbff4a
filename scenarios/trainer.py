"""A trainer that trains nothing: the weights of a version are bytes derived from its label."""

from __future__ import annotations

import hashlib

from scenarios.schema import WeightsModel

_SHARD_BYTES = 4096  # real bytes a shard; what it costs is its nominal size


class SyntheticTrainer:
    """Stands in for a learner (``protocol.ports.Trainer``). An actor.

    Args:
        weights: number and nominal size of the shards.
    """

    def __init__(self, weights: WeightsModel) -> None:
        self._weights = weights
        self._model_step = 0

    async def step(self) -> int:
        """One optimizer step, which takes no time; returns the new model_step."""
        self._model_step += 1
        return self._model_step

    async def shards(self, version: str) -> tuple[tuple[str, bytes, int], ...]:
        """(file name, content, nominal bytes) of each shard; the same version has the same bytes, always."""
        nominal = round(self._weights.shard_gb * 1e9)
        names = [
            f"model-{number:05d}-of-{self._weights.shards:05d}.safetensors" for number in range(self._weights.shards)
        ]
        return tuple((name, _content(version, name), nominal) for name in names)


def _content(version: str, name: str) -> bytes:
    blocks = _SHARD_BYTES // 32
    return b"".join(hashlib.sha256(f"{version}/{name}/{block}".encode()).digest() for block in range(blocks))
