"""A trainer that trains nothing: its exports are the tiny model, which a genuine SGLang loads."""

from __future__ import annotations

from typing import Protocol

from real import tiny_model


class WeightsSpec(Protocol):
    """What a scenario says of a service's weights (``scenarios.schema.WeightsModel``)."""

    @property
    def shards(self) -> int: ...

    @property
    def shard_gb(self) -> float: ...


class TinyModelTrainer:
    """Stands in for a learner (``protocol.ports.Trainer``). An actor.

    Args:
        weights: number of the shards and what each is said to weigh (in GB); their real size is below 1 MB.
    """

    def __init__(self, weights: WeightsSpec) -> None:
        self._weights = weights
        self._model_step = 0

    async def step(self) -> int:
        """One optimizer step, which takes no time; returns the new model_step."""
        self._model_step += 1
        return self._model_step

    async def shards(self, version: str) -> tuple[tuple[str, bytes, int], ...]:
        """(file name, content, nominal bytes) of each file, by name: a whole folder in Hugging Face layout.

        The same version has the same bytes, always.

        Raises:
            ValueError: more shards than the tiny model has tensors.
        """
        nominal = round(self._weights.shard_gb * 1e9)
        return tuple(
            (name, data, nominal if name.endswith(".safetensors") else len(data))
            for name, data in tiny_model.files(version, self._weights.shards).items()
        )
