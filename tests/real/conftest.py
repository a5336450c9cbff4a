"""Tests of the real world alone; what both worlds keep is in tests/contract."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from real import tiny_model
from tests.real.local_ray import local_ray
from tests.real.sglang_server import Keeper


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    with local_ray(num_gpus=8):
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of exports of the tiny model: versions 1 and 2, and 1 again in other shards."""
    folder = tmp_path_factory.mktemp("models")
    for version in ("1", "2"):
        tiny_model.write(folder / version, version)
    tiny_model.write(folder / "1 again", "1", shards=5)
    return folder


@pytest.fixture(scope="session")
def keeper(models: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    kept = Keeper(tmp_path_factory.mktemp("servers"), models / "1")
    try:
        yield kept
    finally:
        kept.close()
