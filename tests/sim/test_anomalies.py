"""What asyncio would only log is evidence, whenever and in whichever run the collector finds it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from sim.backend import run_sim
from tests.sim.worlds import Evidence


@pytest.fixture(params=[True, False], ids=["collector on", "collector off"])
def collector(request: pytest.FixtureRequest) -> Iterator[None]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield
    (gc.enable if was else gc.disable)()


class Careless:
    """Leaves behind what it should have looked after."""

    async def forget_failure(self, in_a_cycle: bool) -> None:
        async def fail() -> None:
            raise ValueError("nobody asks")

        task = asyncio.create_task(fail())
        await asyncio.sleep(0.01)
        if in_a_cycle:
            keeper: list[Any] = [task]
            keeper.append(keeper)

    async def forget_generator(self, in_a_cycle: bool) -> None:
        async def count() -> AsyncIterator[int]:
            for number in range(9):
                yield number

        numbers = count()
        await anext(numbers)
        if in_a_cycle:
            keeper: list[Any] = [numbers]
            keeper.append(keeper)


@pytest.mark.parametrize("in_a_cycle", [False, True], ids=["dropped", "in a cycle"])
@pytest.mark.parametrize(
    ("method", "what", "said"),
    [("forget_failure", "unretrieved", "nobody asks"), ("forget_generator", "unfinished_generator", "count")],
)
def test_it_is_recorded_before_the_run_ends(
    collector: None, method: str, what: str, said: str, in_a_cycle: bool
) -> None:
    evidence = Evidence()

    async def body(backend: Any) -> None:
        careless = await backend.spawn(Careless, name="careless")
        other = await backend.spawn(Careless, name="other")  # runs last
        await getattr(careless, method)(in_a_cycle)
        with pytest.raises(AttributeError):
            other.nothing  # noqa: B018

    run_sim(body, recorder=evidence)
    (found,) = evidence.of("run.anomaly")
    assert found.data["what"] == what
    assert found.data["detail"].startswith("careless/1: ") and said in found.data["detail"]
