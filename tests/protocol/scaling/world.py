"""The small world of ``tests.protocol.fake`` with placement groups, and a scaled service in it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

from protocol.config import GatewayConfig, LifecycleConfig, ScalingConfig
from protocol.errors import PlacementError
from protocol.messages import GenerateRequest
from protocol.ports import EngineSpec, Limits, Placement, PlacementState
from protocol.scaling.api import DEFAULT_MODEL, ScaleApi, ScaledModel
from protocol.scaling.bodies import ApiReply
from protocol.scaling.lifecycle import ScaleManager
from protocol.serving.gateway import Gateway
from tests.protocol.fake import FakeBackend, FakeEngine, FakeHandle, fleet, run_in


class FakeGroups:
    """Placement groups that are REMOVED ``removal_s`` after they were asked to be.

    ``create_fails``, ``remove_fails``, ``table_fails``: errors that the next calls raise. ``stuck``: none is CREATED.
    """

    def __init__(self, world: ScalingWorld) -> None:
        self.world = world
        self.states: dict[str, PlacementState] = {}
        self.removals: list[str] = []
        self.created: list[tuple[str, Any, str]] = []
        self.removal_s = 0.01
        self.stuck = False
        self.create_fails: list[BaseException] = []
        self.remove_fails: list[BaseException] = []
        self.table_fails: list[BaseException] = []

    async def create(self, bundles: Any, *, strategy: str, name: str) -> str:
        await asyncio.sleep(0)
        if self.create_fails:
            raise self.create_fails.pop(0)
        group = f"pg-{len(self.states)}"
        self.states[group] = "PENDING"
        self.created.append((name, bundles, strategy))
        return group

    async def wait_created(self, group_id: str, timeout_s: float) -> None:
        await asyncio.sleep(0.006)
        if self.stuck:
            await asyncio.sleep(timeout_s)
            raise PlacementError(f"{group_id} is still PENDING")
        if self.states[group_id] == "REMOVED":
            raise PlacementError(f"{group_id} is REMOVED")
        self.states[group_id] = "CREATED"

    async def remove(self, group_id: str) -> None:
        await asyncio.sleep(0)
        if self.remove_fails:
            raise self.remove_fails.pop(0)
        self.removals.append(group_id)
        asyncio.get_running_loop().call_later(self.removal_s, self.states.__setitem__, group_id, "REMOVED")

    async def table(self) -> dict[str, PlacementState]:
        await asyncio.sleep(0)
        if self.table_fails:
            raise self.table_fails.pop(0)
        return dict(self.states)

    @property
    def open(self) -> list[str]:
        return [group for group, state in self.states.items() if state != "REMOVED"]


class ScalingWorld(FakeBackend):
    """FakeBackend with placement groups. ``kill_fails``, ``spawn_fails``: errors that the next such calls raise."""

    def __init__(self) -> None:
        super().__init__()
        self.placement_groups = FakeGroups(self)
        self.kill_fails: list[BaseException] = []
        self.spawn_fails: list[BaseException] = []
        self.probes_in: list[Placement] = []

    async def spawn(self, cls: type, *args: Any, name: str, limits: Limits = Limits(), **kwargs: Any) -> FakeHandle:
        placement = kwargs.pop("placement", None)
        if placement is not None:
            self.probes_in.append(placement)
            if self.spawn_fails:
                raise self.spawn_fails.pop(0)
        return await super().spawn(cls, *args, name=name, limits=limits, **kwargs)

    async def kill(self, handle: FakeHandle) -> None:
        if self.kill_fails:
            raise self.kill_fails.pop(0)
        handle.dead = True

    def wall_time(self) -> float:
        return 1e9 + asyncio.get_running_loop().time()

    def slots(self, what: str) -> list[str]:
        """Replicas of the ``scale.slot`` events of a kind."""
        return [data["replica"] for data in self.of("scale.slot", what=what)]


def run(body: Callable[[ScalingWorld], Coroutine[Any, Any, Any]], *, limit_s: float = 100_000.0) -> Any:
    """As ``tests.protocol.fake.run``, in a world that has placement groups."""
    return run_in(ScalingWorld, body, limit_s)


@dataclasses.dataclass
class Service:
    """A gateway, a manager and an API over some initial engines."""

    world: ScalingWorld
    gateway: FakeHandle
    manager: FakeHandle
    api: FakeHandle
    initial: tuple[FakeEngine, ...]
    again: dict[str, Callable[[], Coroutine[Any, Any, FakeHandle]]]
    """Start a part as it was deployed."""

    async def restart(self, part: str) -> None:
        """Kill the manager, the API or the gateway, with what it has at work, and start it anew."""
        self.kill(part)
        setattr(self, part, await self.again[part]())

    def kill(self, part: str) -> None:
        handle: FakeHandle = getattr(self, part)
        handle.dead = True
        for task in self.world.tasks:
            if task.get_name().startswith({"manager": "lifecycle-", "api": "watch-"}.get(part, "none")):
                task.cancel()

    async def submit(self, direction: str, target: Any, **more: Any) -> ApiReply:
        reply: ApiReply = await getattr(self.api, direction)({"num_replicas": target, **more})
        return reply

    async def admitted(self, direction: str, target: int, **more: Any) -> str:
        reply = await self.submit(direction, target, **more)
        assert reply.status == 200 and reply.body["status"] == "PENDING", reply
        return str(reply.body["request_id"])

    async def status(self, direction: str, operation: str) -> dict[str, Any]:
        reply = await self.api.status(direction, operation)
        assert reply.status == 200, reply
        body: dict[str, Any] = reply.body
        return body

    async def ended(self, direction: str, operation: str, within_s: float = 2_000.0) -> dict[str, Any]:
        """The operation's status once it is terminal."""
        async with asyncio.timeout(within_s):
            while True:
                body = await self.status(direction, operation)
                if body["status"] in ("ACTIVE", "PARTIAL", "COMPLETED", "FAILED"):
                    return body
                await asyncio.sleep(0.1)

    async def scaled(self, direction: str, target: int, **more: Any) -> dict[str, Any]:
        return await self.ended(direction, await self.admitted(direction, target, **more))

    async def capacity(self) -> tuple[int, int, int, int]:
        found = await self.manager.capacity()
        return found.current, found.ready, found.occupied, found.pending_cleanup

    def engine(self, name: str) -> FakeEngine:
        found = self.world.engines.latest(name)
        assert found is not None
        return found

    def generate(self, seconds: float = 0.01) -> asyncio.Task[Any]:
        """A call through the gateway that takes so long, on whichever replica."""
        for engine in self.world.engines.every:
            engine.duration_s = seconds
        request = GenerateRequest(self.world.new_id("req"), 10, 4)
        return asyncio.get_running_loop().create_task(self.gateway.generate(request))

    async def routable(self) -> list[str]:
        return [view.address.name for view in await self.gateway.engines() if view.routable]


async def service(
    world: ScalingWorld,
    initial: int = 1,
    *,
    lifecycle: dict[str, Any] | None = None,
    scaling: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    manager: type = ScaleManager,
    api: type = ScaleApi,
) -> Service:
    """Deploy one."""
    again: dict[str, Callable[[], Coroutine[Any, Any, FakeHandle]]] = {
        "gateway": lambda: world.spawn(Gateway, GatewayConfig(**(gateway or {})), name="gateway"),
        "manager": lambda: world.spawn(
            manager, LifecycleConfig(**(lifecycle or {})), door, spec, "engine", addresses, name="manager"
        ),
        "api": lambda: world.spawn(api, ScalingConfig(**(scaling or {})), ((about, door, managing),), name="api"),
    }
    door = await again["gateway"]()
    await fleet(world, initial)
    engines = tuple(world.engines.every)
    for engine in engines:
        await door.add_replica(engine.address)
    spec = EngineSpec("fake")
    addresses = tuple(engine.address for engine in engines)
    managing = await again["manager"]()
    about = ScaledModel(DEFAULT_MODEL, "fake", initial, 1.0)
    front = await again["api"]()
    return Service(world, door, managing, front, engines, again)


__all__ = ["FakeGroups", "ScalingWorld", "Service", "run", "service"]
