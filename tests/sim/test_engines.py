"""Engines and the machines that they run on: launches, SIGKILLs, zombies, and what is given back when one ends."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protocol.errors import ConnectionLost, ConnectionRefused, NameTaken, PlacementError, ReadTimeout, SpawnFailed
from protocol.evidence import Event
from protocol.messages import EngineAddress, WeightUpdate
from protocol.ports import EngineSpec, Placement, backend
from protocol.training.checkpoint import hash_weights
from sim.engine_process import EngineProcess
from sim.simulation import Simulation
from tests.contract.faulted import request, until_ready

SPEC = EngineSpec("tiny-cpu")
GPU = ((("GPU", 1.0),),)
HEALTH_S = 15.0


def run(body: Callable[[Any, Simulation], Awaitable[None]], **options: Any) -> list[Event]:
    events: list[Event] = []
    with Simulation(sinks=[events.append], **{"nodes": 2, "gpus_per_node": 1, **options}) as simulation:
        simulation.run(lambda port: body(port, simulation), time_limit_s=3600)
    return events


async def ready(port: Any, name: str, **where: Any) -> EngineAddress:
    address: EngineAddress = await port.engines.launch(SPEC, name=name, **where)
    await until_ready(port.engines.client(address))
    return address


def process(simulation: Simulation, name: str = "chat-0") -> EngineProcess:
    return simulation.engines.processes[name]


def births(events: list[Event]) -> list[tuple[str, int, str]]:
    """(name, incarnation, node) of every engine."""
    return [
        (e.actor, e.inc, e.data["node"]) for e in events if e.kind == "actor.spawned" and e.data["role"] == "engine"
    ]


def free_gpus(simulation: Simulation) -> list[float]:
    return [node.free["GPU"] / 10_000 for node in simulation.cluster.nodes.values()]


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- a machine that is gone ----


@pytest.mark.parametrize("back_after_s", [None, 5.0], ids=["noticed", "back before it was noticed"])
def test_nothing_starts_on_a_machine_that_is_gone(back_after_s: float | None) -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await ready(port, "chat-0", node="node-1")
        await port.engines.terminate("chat-0")
        simulation.cluster.lose("node-1")
        lost_at = now()
        assert "node-1" in await port.nodes()  # nobody knows yet
        launching = asyncio.ensure_future(port.engines.launch(SPEC, name="chat-0", node="node-1"))
        await asyncio.sleep(1)
        with pytest.raises(NameTaken):
            await port.engines.launch(SPEC, name="chat-0", node="node-0")
        if back_after_s is not None:
            await asyncio.sleep(back_after_s - 1)
            simulation.cluster.restore("node-1")
        with pytest.raises(SpawnFailed, match="chat-0") as caught:
            await launching
        assert isinstance(caught.value.attached[0], PlacementError)
        assert now() - lost_at == pytest.approx(HEALTH_S if back_after_s is None else back_after_s, abs=0.01)
        await ready(port, "chat-0", node="node-0")
        if back_after_s is None:
            simulation.cluster.restore("node-1")
        assert free_gpus(simulation) == [0, 1]

    assert births(run(body)) == [("chat-0", 0, "node-1"), ("chat-0", 1, "node-0")]


def test_the_loss_of_an_engines_machine_is_known_when_it_is_noticed() -> None:
    """A supervisor hears nothing of it: until then the name is taken, and a SIGKILL has nobody to obey it."""

    async def body(port: Any, simulation: Simulation) -> None:
        await ready(port, "chat-0", node="node-1")
        simulation.cluster.lose("node-1")
        for after_s, alive in ((1, True), (13.9, True), (0.2, False)):
            await asyncio.sleep(after_s)
            assert await port.engines.alive("chat-0") is alive
            await port.engines.terminate("chat-0")
        await port.engines.launch(SPEC, name="chat-0")

    assert births(run(body))[-1] == ("chat-0", 1, "node-0")


def test_a_start_from_outside_of_the_world_finds_no_machine_either() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        simulation.cluster.lose("node-1")
        with pytest.raises(PlacementError, match="node-1 is gone"):
            simulation.engines.start(SPEC, "chat-0", "node-1", None)
        simulation.engines.start(SPEC, "chat-0", "node-0", None)

    assert births(run(body)) == [("chat-0", 0, "node-0")]


# ---- partitions ----


@pytest.mark.parametrize("way", ["both", "there", "back"])
def test_a_sigkill_crosses_no_partition(way: str) -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await ready(port, "chat-0", node="node-1")
        ends = ("node-1", "node-0") if way == "back" else ("node-0", "node-1")
        block = simulation.network.partition(*ends, one_way=way != "both")
        killing = asyncio.ensure_future(port.engines.terminate("chat-0"))
        await asyncio.sleep(5)
        assert not killing.done()
        assert process(simulation).alive is (way != "back")  # only the answer is kept from coming
        assert await port.engines.alive("chat-0") is (way != "back")
        simulation.network.repair(block)
        await killing
        assert not process(simulation).alive and not await port.engines.alive("chat-0")

    run(body)


@pytest.mark.parametrize("way", ["both", "back"])
def test_a_launch_crosses_no_partition(way: str) -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        ends = ("node-1", "node-0") if way == "back" else ("node-0", "node-1")
        block = simulation.network.partition(*ends, one_way=way != "both")
        launching = asyncio.ensure_future(port.engines.launch(SPEC, name="chat-0", node="node-1"))
        await asyncio.sleep(5)
        assert not launching.done() and ("chat-0" in simulation.engines.processes) is (way == "back")
        assert await port.engines.alive("chat-0")  # for all that is known
        with pytest.raises(PlacementError):  # its GPU is promised
            await port.engines.launch(SPEC, name="chat-1", node="node-1")
        simulation.network.repair(block)
        assert await launching == EngineAddress("chat-0", 0, "node-1", 30000)
        assert free_gpus(simulation) == [1, 0]

    assert births(run(body)) == [("chat-0", 0, "node-1")]


def test_a_launch_that_was_withdrawn_does_not_begin() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        block = simulation.network.partition("node-0", "node-1")
        launching = asyncio.ensure_future(port.engines.launch(SPEC, name="chat-0", node="node-1"))
        await asyncio.sleep(5)
        await port.engines.terminate("chat-0")
        assert not await port.engines.alive("chat-0") and free_gpus(simulation) == [1, 1]
        await ready(port, "chat-0", node="node-0")
        simulation.network.repair(block)
        with pytest.raises(SpawnFailed):
            await launching
        assert free_gpus(simulation) == [0, 1]

    assert births(run(body)) == [("chat-0", 0, "node-0")]


def test_a_launch_into_a_group_that_is_removed_meanwhile_does_not_begin() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await ready(port, "filler", node="node-0")
        group = await port.placement_groups.create(GPU, strategy="PACK", name="g")
        await port.placement_groups.wait_created(group, 5)
        block = simulation.network.partition("node-0", "node-1")
        launching = asyncio.ensure_future(port.engines.launch(SPEC, name="chat-0", placement=Placement(group)))
        await asyncio.sleep(1)
        await port.placement_groups.remove(group)
        await asyncio.sleep(1)
        simulation.network.repair(block)
        with pytest.raises(SpawnFailed):
            await launching
        assert free_gpus(simulation) == [0, 1]

    assert births(run(body)) == [("filler", 0, "node-0")]


class Launcher:
    """Has engines launched, asked and ended from its own node."""

    async def launch(self, name: str, node: str) -> EngineAddress:
        return await backend().engines.launch(SPEC, name=name, node=node)

    async def terminate_after(self, name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await backend().engines.terminate(name)

    async def keep_generating(self, address: EngineAddress) -> None:
        client = backend().engines.client(address)
        for number in range(1000, 2000):
            await client.generate(request(number), connect_timeout_s=1)


def test_a_launch_that_its_askers_machine_took_with_it_frees_the_name() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        launcher = await port.spawn(Launcher, name="launcher", node="node-1")
        block = simulation.network.partition("node-1", "node-2")
        launcher.launch("chat-0", "node-2")
        await asyncio.sleep(1)
        assert await port.engines.alive("chat-0")
        simulation.cluster.lose("node-1")
        assert not await port.engines.alive("chat-0")
        simulation.network.repair(block)
        await ready(port, "chat-0", node="node-2")

    assert births(run(body, nodes=3)) == [("chat-0", 0, "node-2")]


# ---- zombies ----


@pytest.mark.parametrize("cut_off", [True, False], ids=["cut off", "within reach"])
def test_a_zombie_outlives_its_successors_birth_until_its_node_is_back(cut_off: bool) -> None:
    """Two processes under one name: what fencing is for. To everybody else the zombie is dead, and its name free."""

    async def body(port: Any, simulation: Simulation) -> None:
        old = await ready(port, "chat-0", node="node-1")
        neighbour = await port.spawn(Launcher, name="neighbour", node="node-1")
        zombie = process(simulation)
        neighbour.keep_generating(old)
        await asyncio.sleep(1)
        if cut_off:
            block = simulation.network.partition("node-0", "node-1")
        else:
            simulation.cluster.lose("node-1", zombie=True)
        began = now()
        await port.engines.terminate("chat-0")
        assert now() - began == pytest.approx(HEALTH_S if cut_off else 0, abs=0.01)
        assert zombie.alive and not await port.engines.alive("chat-0")
        new = await ready(port, "chat-0")
        assert (new.incarnation, new.host) == (1, "node-0")
        assert (await port.engines.client(new).generate(request(0))).engine_incarnation == 1
        await asyncio.sleep(5)
        assert zombie.alive
        if cut_off:
            simulation.network.repair(block)
        else:
            simulation.cluster.restore("node-1")
        await asyncio.sleep(1)
        assert not zombie.alive and process(simulation).alive
        assert (await port.engines.client(new).generate(request(1))).engine_incarnation == 1
        assert free_gpus(simulation) == [0, 1]

    events = run(body)
    assert births(events) == [("chat-0", 0, "node-1"), ("chat-0", 1, "node-0")]
    born = next(e.t_ns for e in events if e.kind == "actor.spawned" and (e.actor, e.inc) == ("chat-0", 1))
    late = [e for e in events if e.kind == "engine.finished" and (e.actor, e.inc) == ("chat-0", 0) and e.t_ns > born]
    assert len(late) > 10
    assert [(e.inc, e.data["reason"]) for e in events if e.kind == "actor.died" and e.actor == "chat-0"] == [
        (0, "node_lost")
    ]


@pytest.mark.parametrize("how", ["cut off", "declared dead", "lost"])
def test_what_a_caller_sees_of_a_zombie_whose_node_comes_back(how: str) -> None:
    """A zombie's machine was there all the time, and its kernel closes the connections; a lost one closes nothing."""

    async def body(port: Any, simulation: Simulation) -> None:
        old = await ready(port, "chat-0", node="node-1")
        client = port.engines.client(old)
        process(simulation).engine.wedge()  # so that its answer never comes
        waits = asyncio.ensure_future(client.generate(request(1), read_timeout_s=500))
        await asyncio.sleep(1)
        if how == "cut off":
            block = simulation.network.partition("node-0", "node-1")
        else:
            simulation.cluster.lose("node-1", zombie=how != "lost")
        await asyncio.sleep(2 * HEALTH_S)
        assert not waits.done()
        began = now()
        if how == "cut off":
            simulation.network.repair(block)
        else:
            simulation.cluster.restore("node-1")
        error = ReadTimeout if how == "lost" else ConnectionLost
        with pytest.raises(error):
            await waits
        if how != "lost":
            assert now() - began == pytest.approx(0.05, abs=0.01), "as of any process that is killed"
        with pytest.raises(ConnectionRefused):  # the machine is back, and nobody listens there
            await client.get("/ready", connect_timeout_s=5)

    run(body, gpus_per_node=2)


def test_a_zombie_obeys_its_own_node() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await ready(port, "chat-0", node="node-1")
        neighbour = await port.spawn(Launcher, name="neighbour", node="node-1")
        neighbour.terminate_after("chat-0", 5)
        await asyncio.sleep(1)
        simulation.cluster.lose("node-1", zombie=True)
        await asyncio.sleep(3)
        assert process(simulation).alive
        await asyncio.sleep(2)
        assert not process(simulation).alive

    events = run(body)
    assert [e.data["reason"] for e in events if e.kind == "actor.died" and e.actor == "chat-0"] == ["killed"]


def test_a_zombie_gives_nothing_back_to_a_bundle_that_was_placed_anew() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await ready(port, "filler", node="node-0")
        group = await port.placement_groups.create(GPU, strategy="PACK", name="g")
        await port.placement_groups.wait_created(group, 5)
        there = Placement(group)
        await ready(port, "chat-0", placement=there)
        zombie = process(simulation)
        await port.engines.terminate("filler")
        simulation.cluster.lose("node-1", zombie=True)
        await port.placement_groups.wait_created(group, 5)
        assert (await ready(port, "chat-1", placement=there)).host == "node-0"
        simulation.cluster.restore("node-1")
        assert not zombie.alive
        with pytest.raises(PlacementError, match="0 GPU free"):
            await port.engines.launch(SPEC, name="chat-2", placement=there)
        await port.engines.terminate("chat-1")
        await ready(port, "chat-2", placement=there)

    run(body)


@pytest.mark.parametrize("way", ["zombie", "cut off", "cut off for a while"])
def test_the_removal_of_a_group_kills_nobody_where_it_is_not_heard(way: str) -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await ready(port, "filler", node="node-0")
        group = await port.placement_groups.create(GPU, strategy="PACK", name="g")
        await port.placement_groups.wait_created(group, 5)
        await ready(port, "chat-0", placement=Placement(group))
        await port.spawn(Launcher, name="actor", placement=Placement(group))
        inside = [process(simulation), simulation.world.processes["actor"]]
        if way == "zombie":
            simulation.cluster.lose("node-1", zombie=True)
        else:
            block = simulation.network.partition("node-0", "node-1")
        await port.placement_groups.remove(group)
        await asyncio.sleep(5)
        assert (await port.placement_groups.table())[group] == "REMOVED"
        assert [one.alive for one in inside] == [True, True]
        if way == "cut off for a while":
            simulation.network.repair(block)
            await asyncio.sleep(1)
            assert [one.death_reason for one in inside] == ["killed", "killed"]
        else:
            await asyncio.sleep(60)
            assert [one.alive for one in inside] == [True, True]
            simulation.cluster.restore("node-1")
            assert [one.death_reason for one in inside] == ["node_lost", "node_lost"]
        assert free_gpus(simulation) == [0, 1]

    run(body)


# ---- weights ----


def test_a_stopped_engine_reads_the_weights_that_are_there_when_it_goes_on() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await port.storage.write("exports/1/shard-0", b"old")
        client = port.engines.client(await ready(port, "chat-0"))
        process(simulation).stop()
        updating = asyncio.ensure_future(client.update_weights(WeightUpdate("exports/1", "1")))
        await asyncio.sleep(1)
        await port.storage.write("exports/1/shard-0", b"new")
        process(simulation).cont()
        assert (await updating).success

    events = run(body)
    loaded = [e.data["weight_hash"] for e in events if e.kind == "engine.weights"]
    assert loaded == [hash_weights([hashlib.sha256(b"new").hexdigest()])]
    order = [e.kind for e in events if e.kind in ("actor.continued", "engine.post", "storage.read")]
    assert order == ["actor.continued", "engine.post", "storage.read"]
