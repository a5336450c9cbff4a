"""The contract of placement groups (Ray's, observed in spec/engines.md section 5): one body, a sim arm and a real arm.

Both worlds have one node with eight GPUs here.
"""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import ActorDied, NameTaken, NoSuchActor, Outcome, PlacementError, SpawnFailed
from protocol.ports import Backend, Placement, PlacementState, backend
from tests.contract.components import Self, Worker
from tests.contract.conftest import GPUS, Arm

HALF = ((("GPU", GPUS / 2), ("CPU", 0.1)),)
WHOLE = ((("GPU", GPUS / 2),), (("GPU", GPUS / 2),))
TOO_MUCH = ((("GPU", GPUS * 2.0),),)


async def state(backend: Backend, group: str) -> PlacementState:
    return (await backend.placement_groups.table())[group]


async def until(backend: Backend, group: str, wanted: PlacementState) -> None:
    while await state(backend, group) != wanted:
        await asyncio.sleep(0.01)


def test_a_group_is_pending_then_created_then_a_tombstone(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        assert await groups.table() == {}
        group = await groups.create(HALF, strategy="PACK", name="elastic-0")
        assert await state(backend, group) in ("PENDING", "CREATED")
        await groups.wait_created(group, 10.0)
        assert await state(backend, group) == "CREATED"
        await groups.remove(group)
        await until(backend, group, "REMOVED")
        await asyncio.sleep(0.3)
        assert await groups.table() == {group: "REMOVED"}  # the row stays

    world.run(body)


def test_a_group_that_does_not_fit_waits_for_the_first_to_go(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        first = await groups.create(WHOLE, strategy="PACK", name="first")
        await groups.wait_created(first, 10.0)
        second = await groups.create(HALF, strategy="PACK", name="second")
        await asyncio.sleep(0.3)
        assert await groups.table() == {first: "CREATED", second: "PENDING"}
        await groups.remove(first)
        await groups.wait_created(second, 10.0)
        assert await groups.table() == {first: "REMOVED", second: "CREATED"}

    world.run(body)


def test_two_groups_share_a_node_that_holds_both(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        made = [await groups.create(HALF, strategy="PACK", name="same name") for _ in range(2)]
        assert made[0] != made[1]
        for group in made:
            await groups.wait_created(group, 10.0)

    world.run(body)


def test_removal_is_silent_twice_and_of_a_pending_group(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        pending = await groups.create(TOO_MUCH, strategy="PACK", name="too much")
        for _ in range(2):
            await groups.remove(pending)
            await until(backend, pending, "REMOVED")
        await groups.remove(pending)
        assert await state(backend, pending) == "REMOVED"

    world.run(body)


def test_what_is_removed_right_after_it_was_asked_for_holds_nothing(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        for pause_s in (0.0, 0.0, 0.001, 0.0, 0.002, 0.0):
            group = await groups.create(HALF, strategy="PACK", name="early")
            await asyncio.sleep(pause_s)
            await groups.remove(group)
            await until(backend, group, "REMOVED")
        whole = await groups.create(WHOLE, strategy="PACK", name="whole")
        await groups.wait_created(whole, 10.0)

    world.run(body)


def test_a_wait_that_times_out_leaves_the_group_as_it_is(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        first = await groups.create(WHOLE, strategy="PACK", name="first")
        await groups.wait_created(first, 10.0)
        second = await groups.create(HALF, strategy="PACK", name="second")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(PlacementError, match="PENDING") as caught:
            await groups.wait_created(second, 0.2)
        assert caught.value.outcome is Outcome.NOT_DONE
        assert 0.199 <= loop.time() - began < 5.0  # a float clock may lose the last bits
        assert await state(backend, second) == "PENDING"
        await groups.remove(first)
        await groups.wait_created(second, 10.0)

    world.run(body)


def test_waiting_for_a_removed_or_unknown_group_fails_at_once(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        group = await groups.create(HALF, strategy="PACK", name="group")
        await groups.remove(group)
        await until(backend, group, "REMOVED")
        async with asyncio.timeout(5.0):
            with pytest.raises(PlacementError, match="REMOVED"):
                await groups.wait_created(group, 3600.0)
            with pytest.raises(PlacementError):
                await groups.wait_created("no such group", 3600.0)

    world.run(body)


def test_removal_ends_a_wait(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        group = await groups.create(TOO_MUCH, strategy="PACK", name="too much")
        waiting = asyncio.create_task(groups.wait_created(group, 3600.0))
        await asyncio.sleep(0.1)
        await groups.remove(group)
        async with asyncio.timeout(5.0):
            with pytest.raises(PlacementError, match="REMOVED"):
                await waiting

    world.run(body)


def test_spawn_in_a_group(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        group = await groups.create(WHOLE, strategy="PACK", name="group")
        (node,) = await backend.nodes()
        for bundle in (0, 1):  # right after creation: spawn waits until the group is CREATED
            actor = await backend.spawn(Self, name=f"a-{bundle}", placement=Placement(group, bundle))
            assert await actor.who() == (f"a-{bundle}", 1, node)
        await backend.spawn(Self, name="a-2", placement=Placement(group, 0), node=node)
        with pytest.raises(PlacementError):
            await backend.spawn(Self, name="a-3", placement=Placement(group, 2))  # there is no third bundle
        with pytest.raises(NoSuchActor):
            await backend.lookup("a-3")

    world.run(body)


def test_spawn_on_a_removed_or_unknown_group_fails_promptly(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        group = await groups.create(HALF, strategy="PACK", name="group")
        await groups.wait_created(group, 10.0)
        await groups.remove(group)
        await until(backend, group, "REMOVED")
        async with asyncio.timeout(5.0):  # Ray alone would hang for ever
            for gone in (group, "ab" * 18, "no such group"):
                with pytest.raises(PlacementError) as caught:
                    await backend.spawn(Worker, name="w", placement=Placement(gone))
                assert caught.value.outcome is Outcome.NOT_DONE
        assert await (await backend.spawn(Worker, name="w")).ping() == "pong"  # the name is free

    world.run(body)


def test_nothing_is_born_into_a_group_that_is_removed_meanwhile(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        group = await groups.create(HALF, strategy="PACK", name="group")
        await groups.wait_created(group, 10.0)
        born = asyncio.create_task(backend.spawn(Worker, name="w", placement=Placement(group)))
        await asyncio.sleep(0.05)
        await groups.remove(group)
        async with asyncio.timeout(20.0):
            # Ray tells of the group, or of a process of it that was killed in its birth; it may have been quicker yet.
            with pytest.raises((PlacementError, SpawnFailed, ActorDied)):
                await (await born).work("a", 3600)
            with pytest.raises(NoSuchActor):
                await backend.lookup("w")
        assert await (await backend.spawn(Worker, name="w")).ping() == "pong"  # the name is free

    world.run(body)


def test_spawn_on_a_pending_group_waits_and_ends_with_its_removal(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        first = await groups.create(WHOLE, strategy="PACK", name="first")
        await groups.wait_created(first, 10.0)
        second = await groups.create(HALF, strategy="PACK", name="second")
        never = await groups.create(TOO_MUCH, strategy="PACK", name="never")
        on_second = asyncio.create_task(backend.spawn(Worker, name="on-second", placement=Placement(second)))
        on_never = asyncio.create_task(backend.spawn(Worker, name="on-never", placement=Placement(never)))
        await asyncio.sleep(0.3)
        assert not on_second.done() and not on_never.done()
        await groups.remove(first)
        await groups.remove(never)
        assert await (await on_second).ping() == "pong"
        with pytest.raises(PlacementError):
            await on_never

    world.run(body)


def test_actor_dies_with_its_group(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        groups = backend.placement_groups
        group = await groups.create(HALF, strategy="PACK", name="group")
        inside = await backend.spawn(Worker, name="inside", placement=Placement(group))
        outside = await backend.spawn(Worker, name="outside")
        call = inside.work("a", 3600)
        await inside.ping()
        await groups.remove(group)
        with pytest.raises(ActorDied) as caught:
            await call
        assert caught.value.outcome is Outcome.UNKNOWN
        with pytest.raises(ActorDied):
            await inside.ping()
        with pytest.raises(NoSuchActor):
            await backend.lookup("inside")
        with pytest.raises(PlacementError):  # its arguments name a group that is gone
            await backend.restart(inside)
        assert await outside.ping() == "pong"

    world.run(body)


def test_group_outlives_its_maker(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        maker = await backend.spawn(GroupMaker, name="maker")
        group = await maker.make()
        await backend.placement_groups.wait_created(group, 10.0)
        await backend.kill(maker)
        await asyncio.sleep(0.5)
        assert await state(backend, group) == "CREATED"

    world.run(body)


def test_a_spawner_that_dies_while_it_waits_for_a_group_frees_the_name(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        group = await backend.placement_groups.create(TOO_MUCH, strategy="PACK", name="too much")
        spawner = await backend.spawn(GroupMaker, name="spawner")
        call = spawner.spawn_in(group, "child")
        await asyncio.sleep(0.2)
        with pytest.raises(NameTaken):
            await backend.spawn(Worker, name="child")
        await backend.kill(spawner)
        with pytest.raises(ActorDied):
            await call
        child = await backend.spawn(Worker, name="child")
        assert await child.ping() == "pong"

    world.run(body)


class GroupMaker:
    async def spawn_in(self, group: str, name: str) -> None:
        await backend().spawn(Worker, name=name, placement=Placement(group))

    async def make(self) -> str:
        return await backend().placement_groups.create(HALF, strategy="PACK", name="made by an actor")
