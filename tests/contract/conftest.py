"""The two arms of the contract: one body, run in the simulated world and on Ray.

A test asks for ``world`` and gives it ``async def body(backend)``. It then runs twice, and what it asserts holds in
both worlds; the real arm records what Ray does, the simulated one must do the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from protocol.ports import Backend
from tests.real.local_ray import local_ray

T = TypeVar("T")

GPUS = 8
EXPLORED_SEEDS = 5
"""Orders of events beside the default one in which the simulated arm runs every body. Ray picks one of its own."""
BODY_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Arm:
    """One world. ``run(body)`` returns what the body returns; a body that hangs fails after a minute of its world."""

    name: str
    runner: Callable[..., Any]

    def run(self, body: Callable[[Backend], Awaitable[T]]) -> T:
        async def bounded(backend: Backend) -> T:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await body(backend)

        result: T = self.runner(bounded)
        return result


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for all tests: starting it takes five seconds, an actor a few tenths."""
    with local_ray(num_gpus=GPUS):
        yield


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.ray)])
def world(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Arm:
    if request.param == "sim":
        from sim.backend import run_sim

        def in_several_orders(body: Callable[[Backend], Awaitable[Any]]) -> Any:
            for seed in range(1, EXPLORED_SEEDS + 1):
                run_sim(body, seed=seed, explore=True, copy_always=True)
            return run_sim(body)

        return Arm("sim", in_several_orders)
    request.getfixturevalue("ray_session")
    from real.backend import run_real

    return Arm("real", lambda body: run_real(body, folder=str(tmp_path)))
