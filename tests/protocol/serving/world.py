"""A fleet of entrypoints with gates in the small world of ``tests.protocol.fake``, and who publishes to it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from protocol.config import (
    AdminConfig,
    AffinityConfig,
    ControllerConfig,
    EntrypointConfig,
    ExportConfig,
    GateConfig,
    GatewayConfig,
    HealthConfig,
)
from protocol.messages import GenerateRequest
from protocol.ports import EngineSpec, Limits
from protocol.serving.affinity import SessionAffinityRouter
from protocol.serving.barrier import Member
from protocol.serving.controller import RolloutController
from protocol.serving.entrypoint import Entrypoint, TurnResult
from protocol.serving.gate import GateSnapshot, RequestGate
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from protocol.training.checkpoint import Exporter
from protocol.training.publication import WeightPublisher
from tests.protocol.fake import FakeBackend, FakeEngine, FakeHandle, FakeTrainer

CONTROLLER = ControllerConfig(call_timeout_s=1)
ENTRYPOINT = EntrypointConfig(forward_timeout_s=30, admission_timeout_s=40)
AFFINITY = AffinityConfig()
GATE = GateConfig()
ADMIN = AdminConfig(reconcile_timeout_s=5, read_timeout_s=5, update_timeout_s=20)


@dataclasses.dataclass
class Fleet:
    """``entry-N`` with ``gate-N`` before ``e-N``; all behind one controller, one router and one publisher."""

    world: FakeBackend
    engines: list[FakeEngine]
    gates: list[FakeHandle]
    servers: list[FakeHandle]
    gateway: FakeHandle
    prober: FakeHandle
    controller: FakeHandle
    router: FakeHandle
    publisher: FakeHandle
    exporter: FakeHandle
    turns: int = 0

    async def turn(self, session: str, index: int | None = None) -> TurnResult:
        """One turn, through the router or to one entrypoint."""
        self.turns += 1
        request = GenerateRequest(f"req-{self.turns:04d}", 8, 4, session_id=session, idempotent=False)
        if index is not None:
            return await self.servers[index].generate(request)
        return await self.router.handle(request)

    def begin(self, session: str, index: int) -> asyncio.Task[TurnResult]:
        return asyncio.get_running_loop().create_task(self.turn(session, index))

    async def snapshots(self) -> list[GateSnapshot]:
        return [await gate.snapshot() for gate in self.gates]

    async def opened(self, model_step: int = 0) -> Fleet:
        """After the first publication."""
        await self.publisher.publish(model_step)
        return self

    def posts(self, route: str) -> list[int]:
        return [sum(posted == route for posted, _ in engine.posts) for engine in self.engines]

    def stages(self) -> list[str]:
        return [data["stage"] for data in self.world.of("controller.stage")]


async def fleet_of(
    world: FakeBackend,
    count: int,
    *,
    controller: ControllerConfig = CONTROLLER,
    entrypoint: EntrypointConfig = ENTRYPOINT,
    affinity: AffinityConfig = AFFINITY,
    gate: GateConfig = GATE,
    classes: dict[str, type] | None = None,
) -> Fleet:
    """Spawn one. ``classes``: other ones in the place of ours, by the same names as under ``components``."""
    given = classes or {}
    gateway = await world.spawn(Gateway, GatewayConfig(), name="gateway")
    engines, gates, servers = [], [], []
    for index in range(count):
        await world.engines.launch(EngineSpec("fake"), name=f"e-{index}")
        engine = world.engines.every[-1]
        engines.append(engine)
        await gateway.add_replica(engine.address)
        gates.append(await world.spawn(given.get("gate", RequestGate), gate, name=f"gate-{index}"))
        servers.append(
            await world.spawn(
                given.get("entrypoint", Entrypoint),
                entrypoint,
                engine.address,
                gateway,
                gates[-1],
                name=f"entry-{index}",
            )
        )
    prober = await world.spawn(HealthProber, HealthConfig(), gateway, name="prober", limits=Limits())
    pairs = tuple(zip([engine.name for engine in engines], servers, strict=True))
    router = await world.spawn(given.get("affinity", SessionAffinityRouter), affinity, pairs, name="router")
    members = tuple(Member(e.name, g, s) for e, g, s in zip(engines, gates, servers, strict=True))
    control = await world.spawn(
        given.get("controller", RolloutController),
        controller,
        ADMIN,
        members,
        gateway,
        prober,
        router,
        name="controller",
    )
    exporter = await world.spawn(Exporter, ExportConfig(), FakeTrainer(), name="exporter")
    publisher = await world.spawn(given.get("publisher", WeightPublisher), ADMIN, control, exporter, name="publisher")
    return Fleet(world, engines, gates, servers, gateway, prober, control, router, publisher, exporter)


async def raised(awaitable: Any) -> BaseException:
    """The error that it raises; it must raise one."""
    try:
        await awaitable
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")
