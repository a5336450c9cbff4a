"""Engines as processes: what ``terminate`` ends, and what is free afterwards."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from protocol.errors import ConnectionLost, ConnectionRefused, NameTaken, Outcome
from protocol.ports import EngineSpec
from tests.contract.faulted import FaultedArm, Faults, ready_engine, request, told


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.ray)])
def world(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> FaultedArm:
    if request.param == "real":
        request.getfixturevalue("ray_session")
    return FaultedArm(request.param, tmp_path)


def test_terminate_is_a_sigkill_after_which_name_and_resources_are_free(world: FaultedArm) -> None:
    async def body(backend: Any, faults: Faults) -> None:
        engines = backend.engines
        await engines.terminate("engine-0")  # nobody has the name: silent
        client = await ready_engine(backend)
        old = client.address
        with pytest.raises(NameTaken):
            await engines.launch(EngineSpec("tiny-cpu"), name="engine-0")
        call = asyncio.ensure_future(client.generate(request(1, 400)))
        await faults.busy("engine-0")
        await engines.terminate("engine-0")
        with pytest.raises(ConnectionLost) as lost:
            await call
        assert lost.value.outcome is Outcome.UNKNOWN
        async with asyncio.timeout(10):
            while await engines.alive("engine-0"):
                await asyncio.sleep(0.05)
        with pytest.raises(ConnectionRefused):
            await client.get("/ready", connect_timeout_s=1, read_timeout_s=1)
        await engines.terminate("engine-0")  # it is dead: silent
        new = (await ready_engine(backend)).address
        assert (new.name, new.incarnation) == ("engine-0", old.incarnation + 1)
        await engines.terminate("engine-0")

    events = world.run(body)
    died = [event for event in events if event.actor == "engine-0" and event.kind == "actor.died"]
    assert told(died, "actor.died", "reason") == [("killed",), ("killed",)]


def test_a_stopped_engine_is_ended_too(world: FaultedArm) -> None:
    async def body(backend: Any, faults: Faults) -> None:
        await ready_engine(backend)
        faults.inject("sigstop", "engine-0", for_s=30)
        assert await backend.engines.alive("engine-0")
        await backend.engines.terminate("engine-0")
        async with asyncio.timeout(10):
            while await backend.engines.alive("engine-0"):
                await asyncio.sleep(0.05)

    world.run(body)
