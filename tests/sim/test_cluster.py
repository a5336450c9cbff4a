"""Nodes that are lost and come back, and what placement groups do that Ray's contract test cannot make them do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import ActorDied, NoSuchActor, PlacementError, SpawnFailed
from protocol.ports import Placement, backend
from sim.backend import SimBackend
from sim.placement import PlacementFault
from sim.resources import units
from sim.simulation import Simulation
from sim.timings import Timings
from tests.sim.worlds import Echo, Evidence

QUICK = Timings(spawn_s=0.01, health_timeout_s=15.0)
GPU = (("GPU", 1.0),)
HALF = (("GPU", 4.0), ("CPU", 0.1))


def simulation(nodes: int = 2, evidence: Evidence | None = None) -> Simulation:
    return Simulation(nodes=nodes, gpus_per_node=8, timings=QUICK, recorder=evidence)


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- nodes ----


def test_the_loss_of_a_node_is_noticed_after_the_health_timeout() -> None:
    evidence = Evidence()
    with simulation(evidence=evidence) as world:

        async def body(backend: SimBackend) -> None:
            echo = await backend.spawn(Echo, name="echo", node="node-1")
            call = echo.slow(1)
            await asyncio.sleep(0.1)
            began = now()
            world.cluster.lose("node-1")
            assert await backend.nodes() == ("node-0", "node-1")  # nobody knows yet
            late = echo.echo("to nobody")
            for pending in (call, late):
                with pytest.raises(ActorDied):
                    await pending
            assert now() - began == pytest.approx(15.0, abs=0.001)
            assert await backend.nodes() == ("node-0",)
            with pytest.raises(PlacementError, match="node-1"):
                await backend.spawn(Echo, name="x", node="node-1")
            world.cluster.restore("node-1")
            again = await backend.restart(echo)
            assert await again.history() == []

        world.run(body)
    assert [(event.actor, event.data["reason"]) for event in evidence.of("actor.died")] == [("echo", "node_lost")]
    assert [event.kind for event in evidence.of("node.lost", "node.restored")] == ["node.lost", "node.restored"]


def test_a_spawn_on_a_node_that_is_lost_meanwhile_fails() -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            world.cluster.lose("node-1")
            with pytest.raises(SpawnFailed) as caught:
                await backend.spawn(Echo, name="x", node="node-1")
            assert isinstance(caught.value.attached[0], PlacementError)
            await backend.spawn(Echo, name="x")

        world.run(body)


def test_a_zombie_acts_on_until_its_node_is_restored() -> None:
    with simulation(evidence=(evidence := Evidence())) as world:

        async def body(backend: SimBackend) -> None:
            keeper = await backend.spawn(Echo, name="keeper")
            zombie = await backend.spawn(Zombie, keeper, name="zombie", node="node-1")
            call = zombie.beat()
            world.cluster.lose("node-1", zombie=True)
            with pytest.raises(ActorDied):
                await call
            with pytest.raises(NoSuchActor):
                await backend.lookup("zombie")
            successor = await backend.spawn(Zombie, keeper, name="zombie")
            before = len(await keeper.history())
            await asyncio.sleep(3)
            assert len(await keeper.history()) >= before + 2  # it still writes
            world.cluster.restore("node-1")
            after = len(await keeper.history())
            await asyncio.sleep(3)
            assert len(await keeper.history()) == after
            assert await backend.lookup("zombie") == successor

        world.run(body)
    assert evidence.of("node.lost")[0].data["zombie"] is True


def test_zombies_of_one_node_reach_each_other_and_learn_of_each_others_deaths() -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> list[Any]:
            echo = await backend.spawn(Echo, name="echo", node="node-1")
            keeper = await backend.spawn(Echo, name="keeper")
            pair = await backend.spawn(Pair, echo, keeper, name="pair", node="node-1")
            pair.go()
            await asyncio.sleep(0.5)
            world.cluster.lose("node-1", zombie=True)
            await asyncio.sleep(5)
            history: list[Any] = await keeper.history()
            return history

        assert world.run(body) == ["pong", "ActorDied"]


class Pair:
    """Calls a neighbour, kills it in the middle of a second call, and reports both outcomes to a third."""

    def __init__(self, neighbour: Any, keeper: Any) -> None:
        self.neighbour = neighbour
        self.keeper = keeper

    async def go(self) -> None:
        await asyncio.sleep(1)
        await self.keeper.echo(await self.neighbour.echo("pong"))
        call = self.neighbour.slow(100)
        await asyncio.sleep(0.1)
        await backend().kill(self.neighbour)
        try:
            async with asyncio.timeout(1):
                await call
        except (ActorDied, TimeoutError) as error:
            await self.keeper.echo(type(error).__name__)


class Zombie:
    def __init__(self, keeper: Any) -> None:
        self.keeper = keeper

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(1)
            await self.keeper.echo("still here")


def test_nodes_have_clocks_of_their_own_and_skew_steps_only_the_wall() -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            here = await backend.spawn(Echo, name="here", node="node-0")
            there = await backend.spawn(Echo, name="there", node="node-1")
            assert abs(await here.at() - await there.at()) > 1
            wall, clock = backend.wall_time(), now()
            world.cluster.node("node-0").skew_ns = 3_600_000_000_000
            assert backend.wall_time() == pytest.approx(wall + 3600)
            assert now() == clock

        world.run(body)


# ---- placement groups ----


async def group(backend: SimBackend, *bundles: Any, strategy: str = "PACK", name: str = "g") -> str:
    group_id: str = await backend.placement_groups.create(tuple(bundles), strategy=strategy, name=name)
    return group_id


async def state(backend: SimBackend, group_id: str) -> str:
    return (await backend.placement_groups.table())[group_id]


@pytest.mark.parametrize(
    ("strategy", "bundles", "expected"),
    [
        ("PACK", [HALF, HALF], ["node-0", "node-0"]),
        ("PACK", [HALF, HALF, HALF], ["node-0", "node-0", "node-1"]),
        ("SPREAD", [GPU, GPU, GPU], ["node-0", "node-1", "node-0"]),
        ("STRICT_SPREAD", [GPU, GPU], ["node-0", "node-1"]),
        ("STRICT_SPREAD", [GPU, GPU, GPU], None),
        ("STRICT_PACK", [HALF, HALF], ["node-0", "node-0"]),
        ("STRICT_PACK", [HALF, HALF, HALF], None),
    ],
)
def test_strategies(strategy: str, bundles: list[Any], expected: list[str] | None) -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            group_id = await group(backend, *bundles, strategy=strategy)
            if expected is None:
                with pytest.raises(PlacementError, match="PENDING"):
                    await backend.placement_groups.wait_created(group_id, 1.0)
                return
            await backend.placement_groups.wait_created(group_id, 1.0)
            nodes = [world.placement_table.node_of(Placement(group_id, i)) for i in range(len(bundles))]
            assert nodes == expected

        world.run(body)


def test_strict_pack_looks_for_a_node_with_room() -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            await backend.placement_groups.wait_created(await group(backend, HALF), 1.0)
            group_id = await group(backend, HALF, HALF, strategy="STRICT_PACK")
            await backend.placement_groups.wait_created(group_id, 1.0)
            assert world.placement_table.node_of(Placement(group_id, 1)) == "node-1"

        world.run(body)


def test_states_take_the_times_that_ray_takes() -> None:
    evidence = Evidence()
    with simulation(nodes=1, evidence=evidence) as world:

        async def body(backend: SimBackend) -> None:
            first = await group(backend, HALF, HALF)
            await backend.placement_groups.wait_created(first, 1.0)
            second = await group(backend, HALF)
            await asyncio.sleep(1)
            await backend.placement_groups.remove(first)
            assert await state(backend, first) == "CREATED"  # returning is no proof of removal
            await backend.placement_groups.wait_created(second, 1.0)

        world.run(body)
    times = {(e.data["group"], e.data["state"]): e.t_ns for e in evidence.of("placement.state")}
    first, second = "pg-0000001", "pg-0000002"
    assert times[first, "CREATED"] - times[first, "PENDING"] == 6_000_000
    assert times[second, "CREATED"] - times[first, "REMOVED"] == 74_000_000


@pytest.mark.parametrize(
    ("strategy", "bundles", "why"),
    [("TIGHT", (GPU,), "TIGHT"), ("PACK", (), "at least one bundle"), ("PACK", ((("GPU", -1.0),),), "GPU")],
)
def test_bad_groups_are_refused(strategy: str, bundles: Any, why: str) -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            with pytest.raises(PlacementError, match=why):
                await backend.placement_groups.create(bundles, strategy=strategy, name="g")
            assert await backend.placement_groups.table() == {}

        world.run(body)


def test_a_group_loses_its_node_is_pending_and_placed_anew() -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            group_id = await group(backend, GPU, GPU, strategy="STRICT_SPREAD")
            await backend.placement_groups.wait_created(group_id, 1.0)
            stays = await backend.spawn(Echo, name="stays", placement=Placement(group_id, 0))
            goes = await backend.spawn(Echo, name="goes", placement=Placement(group_id, 1))
            world.cluster.lose("node-1")
            with pytest.raises(ActorDied):
                await goes.echo(1)
            assert await state(backend, group_id) == "PENDING"
            world.cluster.restore("node-1")
            await backend.placement_groups.wait_created(group_id, 1.0)
            assert await stays.echo(1) == 1
            again = await backend.restart(goes)
            assert await again.echo(1) == 1

        world.run(body)


def test_resources_are_given_back_exactly() -> None:
    with simulation(nodes=1) as world:

        async def body(backend: SimBackend) -> None:
            for _ in range(3):
                groups = [await group(backend, (("GPU", 0.1), ("CPU", 0.1))) for _ in range(80)]
                for group_id in groups:
                    await backend.placement_groups.wait_created(group_id, 10.0)
                node = world.cluster.node("node-0")
                assert node.free["GPU"] == 0
                for group_id in groups:
                    await backend.placement_groups.remove(group_id)
                await asyncio.sleep(1)
                assert node.free == node.capacity == units((("CPU", 64), ("GPU", 8)))

        world.run(body)


# ---- faults of placement ----


def test_creation_hangs_until_the_fault_is_disarmed() -> None:
    hits: list[str] = []
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            fault = world.placement_table.arm(PlacementFault("create_hangs", name="big*", on_hit=hits.append))
            other = await group(backend, GPU, name="small")
            hung = await group(backend, GPU, name="big-1")
            await backend.placement_groups.wait_created(other, 1.0)
            with pytest.raises(PlacementError, match="PENDING"):
                await backend.placement_groups.wait_created(hung, 600.0)
            world.placement_table.disarm(fault)
            await backend.placement_groups.wait_created(hung, 1.0)

        world.run(body)
    assert hits == ["create_hangs pg-0000002 big-1"]


def test_creation_and_removal_that_are_late() -> None:
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            table = world.placement_table
            table.arm(PlacementFault("create_late", delay_s=3.0))
            table.arm(PlacementFault("remove_late", delay_s=5.0))
            began = now()
            group_id = await group(backend, GPU)
            await backend.placement_groups.wait_created(group_id, 10.0)
            assert now() - began == pytest.approx(3.006, abs=1e-6)
            await backend.placement_groups.remove(group_id)
            await asyncio.sleep(4.9)
            assert await state(backend, group_id) == "CREATED"
            await asyncio.sleep(0.2)
            assert await state(backend, group_id) == "REMOVED"

        world.run(body)


def test_removal_that_fails_leaves_group_and_actors_until_it_is_asked_for_again() -> None:
    hits: list[str] = []
    with simulation() as world:

        async def body(backend: SimBackend) -> None:
            group_id = await group(backend, GPU)
            echo = await backend.spawn(Echo, name="echo", placement=Placement(group_id))
            fault = world.placement_table.arm(PlacementFault("remove_fails", on_hit=hits.append))
            for _ in range(2):
                await backend.placement_groups.remove(group_id)  # silent, as Ray is
            await asyncio.sleep(60)
            assert await state(backend, group_id) == "CREATED"
            assert await echo.echo(1) == 1
            world.placement_table.disarm(fault)
            await asyncio.sleep(60)
            assert await state(backend, group_id) == "CREATED"
            await backend.placement_groups.remove(group_id)
            with pytest.raises(ActorDied):
                await echo.slow(100)

        world.run(body)
    assert hits == ["remove_fails pg-0000001 g"]
