"""What takes the place of a learner, as an actor of either world."""

from __future__ import annotations

import pytest

from protocol.ports import Backend
from real.trainer import TinyModelTrainer
from scenarios.schema import WeightsModel
from scenarios.trainer import SyntheticTrainer
from tests.contract.conftest import Arm

WEIGHTS = WeightsModel(shards=2, shard_gb=0.25)


@pytest.mark.parametrize("trainer", [SyntheticTrainer, TinyModelTrainer])
def test_steps_count_up_and_a_version_has_the_same_bytes_always(world: Arm, trainer: type) -> None:
    async def body(backend: Backend) -> None:
        learner = await backend.spawn(trainer, WEIGHTS, name="trainer")
        assert [await learner.step() for _ in range(3)] == [1, 2, 3]
        first, again, other = [await learner.shards(version) for version in ("v1", "v1", "v2")]
        assert first == again
        names = [name for name, _, _ in first]
        assert names == sorted(names) and names == [name for name, _, _ in other]
        shards = [(name, data, size) for name, data, size in first if name.endswith(".safetensors")]
        assert len(shards) == WEIGHTS.shards and {size for _, _, size in shards} == {250_000_000}
        assert all(isinstance(data, bytes) and data for _, data, _ in first)
        assert {name: data for name, data, _ in first} != {name: data for name, data, _ in other}
        await backend.kill(learner)
        reborn = await backend.restart(learner)
        assert await reborn.step() == 1 and await reborn.shards("v1") == first

    world.run(body)
