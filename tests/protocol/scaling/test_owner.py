"""Recovery and the owner of scaled replicas: who may be started again, where, and who is told."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.config import AdminConfig, RecoveryConfig
from protocol.messages import EngineAddress
from protocol.ports import EngineSpec, Placement
from protocol.serving.recovery import Recovery
from tests.protocol.fake import FakeHandle
from tests.protocol.scaling.world import ScalingWorld, Service, run, service


async def _recovery(world: ScalingWorld, s: Service) -> FakeHandle:
    return await world.spawn(
        Recovery, RecoveryConfig(backoff_s=0.1), AdminConfig(), s.gateway, EngineSpec("fake"), owner=s.manager,
        name="recovery",
    )  # fmt: skip


def _placements(world: ScalingWorld) -> list[tuple[str, Placement | None]]:
    """Launches from now on: (replica, placement)."""
    seen: list[tuple[str, Placement | None]] = []
    launch = world.engines.launch

    async def noted(spec: EngineSpec, *, name: str, **where: Any) -> EngineAddress:
        seen.append((name, where.get("placement")))
        return await launch(spec, name=name, **where)

    world.engines.launch = noted  # type: ignore[method-assign]
    return seen


def test_a_scaled_replica_comes_back_in_its_own_group_and_its_owner_knows_it() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        recovery = await _recovery(world, s)
        await s.scaled("scale_out", 2)
        seen = _placements(world)
        for name in ("engine-1", "engine-0"):
            s.engine(name).alive = False
            await recovery.recover(s.engine(name).address, "dead")
            await asyncio.sleep(10)
        assert seen == [("engine-1", Placement("pg-0")), ("engine-0", None)]
        assert await s.routable() == ["engine-1", "engine-0"] and s.engine("engine-1").incarnation == 1
        assert (await s.scaled("scale_in", 1))["status"] == "COMPLETED"
        assert not s.engine("engine-1").alive and s.engine("engine-0").alive
        assert world.of("scale.drain", what="confirmed")[0]["replica_inc"] == 1

    run(body)


def test_a_victim_is_left_alone() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, scaling={"poll_interval_s": 30.0})
        recovery = await _recovery(world, s)
        await s.scaled("scale_out", 2)
        seen = _placements(world)
        into = await s.admitted("scale_in", 1)
        await asyncio.sleep(1)
        s.engine("engine-1").alive = False
        await recovery.recover(s.engine("engine-1").address, "dead")
        assert (await s.ended("scale_in", into))["status"] == "COMPLETED"
        await asyncio.sleep(30)
        assert seen == []
        assert [data["detail"] for data in world.of("recovery.step", stage="gave_up")] == ["its owner says draining"]

    run(body)


def test_a_recovery_that_is_under_way_when_its_replica_is_put_in_drain_ends_what_it_started() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        recovery = await _recovery(world, s)
        await s.scaled("scale_out", 2)
        world.engines.startup_s = 20.0
        old = s.engine("engine-1").address
        s.engine("engine-1").alive = False
        await recovery.recover(old, "dead")
        await asyncio.sleep(2)
        into = await s.scaled("scale_in", 1)
        assert into["status"] == "COMPLETED"
        await asyncio.sleep(60)
        assert not s.engine("engine-1").alive and await s.routable() == ["engine-0"]
        assert await s.capacity() == (1, 1, 1, 0) and world.placement_groups.open == []

    run(body)
