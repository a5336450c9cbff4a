"""What tests do on a cluster of two nodes of its own; each runs in a process of its own (test_faults.py)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import ActorDied, NetworkError, PlacementError, ReadTimeout
from protocol.faulting import FaultRefused, Target
from protocol.ports import ActorHandle, EngineSpec
from real.faults.injection import RealFaults
from tests.contract.faulted import Counter, request, until_ready


class Teller(Counter):
    """A counter that tells another one."""

    async def tell(self, other: ActorHandle) -> int:
        told: int = await other.add()
        return told


async def lose_a_node(backend: Any, faults: RealFaults) -> None:
    for name, params, why in (
        ("node-0", {}, "head"),
        ("node-1", {"zombie": True}, "zombie"),
        ("node-7", {}, "no such node"),
    ):
        with pytest.raises(FaultRefused, match=why):
            faults.inject("node_loss", Target(name), params, must_hit={})
    loop = asyncio.get_running_loop()
    counter = await backend.spawn(Counter, name="counter", node="node-1")
    address = await backend.engines.launch(EngineSpec("tiny-cpu"), name="engine-0", node="node-1")
    client = await until_ready(backend.engines.client(address))
    call, generation = counter.work(60), asyncio.ensure_future(client.generate(request(1, 450)))
    await asyncio.sleep(0.3)
    began = loop.time()
    lost = faults.inject("node_loss", Target("node-1"), {}, must_hit={"processes": {"at_least": 2}})
    with pytest.raises(ActorDied):
        await call
    with pytest.raises(NetworkError):
        await generation
    print(f"noticed after {loop.time() - began:.2f} s")
    async with asyncio.timeout(60):
        while await backend.nodes() != ("node-0",):
            await asyncio.sleep(0.1)
    print(f"dead for Ray after {loop.time() - began:.2f} s")
    with pytest.raises(PlacementError):
        await backend.spawn(Counter, name="counter", node="node-1")
    await back_and_empty(backend, lost)
    # Lost again, and back before Ray has noticed that.
    lost = faults.inject("node_loss", Target("node-1"), {}, must_hit={"processes": {"at_least": 2}})
    await asyncio.sleep(1)
    await back_and_empty(backend, lost)


async def back_and_empty(backend: Any, lost: Any) -> None:
    began = asyncio.get_running_loop().time()
    lost.heal()
    print(f"healed after {asyncio.get_running_loop().time() - began:.2f} s")
    assert await backend.nodes() == ("node-0", "node-1")
    again = await backend.spawn(Counter, name="counter", node="node-1")
    assert await again.value() == 0
    address = await backend.engines.launch(EngineSpec("tiny-cpu"), name="engine-0", node="node-1")
    await until_ready(backend.engines.client(address))


async def cut_links(backend: Any, faults: RealFaults) -> None:
    near = await backend.spawn(Teller, name="near", node="node-0")
    far = await backend.spawn(Teller, name="far", node="node-1")
    address = await backend.engines.launch(EngineSpec("tiny-cpu"), name="engine-0", node="node-1")
    client = await until_ready(backend.engines.client(address))

    def cut(source: str, destination: str) -> Any:
        return faults.inject(
            "partition", Target(source=source, destination=destination), {"one_way": True}, must_hit={}
        )

    # A request is held: its effect has not happened. The driver's own link to its node is whole.
    there = cut("node-0", "far")
    telling = near.tell(far)
    await asyncio.sleep(0.5)
    assert await near.value() == 0
    there.heal()
    assert await telling == 1
    # An answer is held: its effect has happened.
    back = cut("far", "node-0")
    adding = asyncio.ensure_future(_result(far.add()))
    with pytest.raises(ReadTimeout):
        await client.get("/ready", connect_timeout_s=1, read_timeout_s=1)
    assert not adding.done()
    back.heal()
    assert await adding == 2 and await far.value() == 2


async def _result(call: Any) -> Any:
    return await call
