"""The control API of rollout replicas, really served: ``python -m tests.real.served_rollouts``.

As ``tests.real.served_scaling``, in a cluster that has room for five more replicas. The first line says where.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from protocol.config import HttpConfig
from protocol.errors import ConnectionRefused, PlacementError
from real.http_control import Served
from real.http_server import ServerSettings
from scenarios.outside import OutsideFront
from tests.protocol.rollout.test_elastic import exported, rollout
from tests.protocol.scaling.world import FakeGroups, ScalingWorld
from tests.real.served_control import Engines, serve_until_told

NAME = "rollout"
ROOM = 5


class Groups(FakeGroups):
    """A cluster of so many GPUs."""

    async def create(self, bundles: Any, *, strategy: str, name: str) -> str:
        if len(self.open) >= ROOM:
            raise PlacementError(f"no room for {name}")
        return await super().create(bundles, strategy=strategy, name=name)


class Nobody:
    """At an address where nothing listens."""

    async def get(self, route: str, **_: Any) -> Any:
        raise ConnectionRefused(f"nobody is there for {route}")


async def serve() -> None:
    world = ScalingWorld()
    world.engines, world.placement_groups = Engines(world, Nobody()), Groups(world)
    asyncio.get_running_loop().seatrial_backend = world  # type: ignore[attr-defined]  # a mark, looked for by name
    made = await rollout(world, drain_sleep_s=0.2)
    await exported(world, "9")
    outside = await world.spawn(OutsideFront, NAME, made.api, name="outside")
    settings = ServerSettings(shutdown_grace_s=2.0)
    served = Served(NAME, outside, None, "rollout")
    await serve_until_told(world, settings, HttpConfig(max_body_bytes=65_536), served, made.api)


if __name__ == "__main__":
    asyncio.run(serve())
    sys.exit(0)
