"""Tests of the real world alone; what both worlds keep is in tests/contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.local_ray import local_ray


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    with local_ray(num_gpus=8):
        yield
