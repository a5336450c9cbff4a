"""The tiny model and its trainer: whole folders that follow from a version's label, hashed alike by every reader."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pathlib
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load

from protocol.training.checkpoint import MANIFEST, describe, hash_weights
from real import tiny_model
from real.trainer import TinyModelTrainer


class Spec(NamedTuple):
    shards: int = 2
    shard_gb: float = 0.6


def test_the_same_label_has_the_same_bytes_and_another_has_others() -> None:
    one, again, other = tiny_model.files("7"), tiny_model.files("7"), tiny_model.files("8")
    assert one == again
    for name, data in one.items():
        assert (data == other[name]) is not name.endswith(".safetensors"), name


def test_weights_are_the_same_on_every_machine() -> None:
    """Pinned: a run's evidence names weights by hash, and two machines must mean the same ones."""
    tensors = load(tiny_model.files("0", shards=1)["model-00001-of-00001.safetensors"])
    digest = hashlib.sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest()
    assert digest[:16] == "2d844b172e664207"


@pytest.mark.parametrize("shards", [1, 2, 5, 21])
def test_index_names_every_tensor_of_every_shard(shards: int) -> None:
    files = tiny_model.files("1", shards)
    index = json.loads(files[tiny_model.INDEX])
    found: dict[str, str] = {}
    size = 0
    for name, data in files.items():
        if name.endswith(".safetensors"):
            tensors = load(data)
            assert tensors, name
            found |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
            assert all(np.isfinite(tensor).all() and tensor.any() for tensor in tensors.values())
    assert len(set(found.values())) == shards
    assert index == {"metadata": {"total_size": size}, "weight_map": found}


@pytest.mark.parametrize("shards", [0, 22])
def test_number_of_shards_that_cannot_be(shards: int) -> None:
    with pytest.raises(ValueError, match="1 to 21 shards"):
        tiny_model.files("1", shards)


def test_every_token_has_a_text_of_its_own() -> None:
    vocabulary = json.loads(tiny_model.files("1")["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(tiny_model.VOCABULARY))
    assert vocabulary["Ġ" + tiny_model.word(1899).strip()] == 1899


def test_an_export_is_a_whole_folder_whose_hash_any_reader_finds(tmp_path: pathlib.Path) -> None:
    trainer = TinyModelTrainer(Spec(shards=3))
    shards = asyncio.run(trainer.shards("5"))
    assert {name: data for name, data, _ in shards} == tiny_model.files("5", 3)
    for name, data, nominal in shards:
        assert nominal == (600_000_000 if name.endswith(".safetensors") else len(data))
        (tmp_path / name).write_bytes(data)
    (tmp_path / MANIFEST).write_text("{}")
    # Engines hash what lies in the folder, in the order of the names.
    read = sorted(path for path in tmp_path.iterdir() if path.name != MANIFEST)
    assert describe("5", shards).weight_hash == hash_weights(
        hashlib.sha256(path.read_bytes()).hexdigest() for path in read
    )


def test_trainer_counts_its_steps() -> None:
    trainer = TinyModelTrainer(Spec())
    assert [asyncio.run(trainer.step()) for _ in range(2)] == [1, 2]
