"""The simulated world as one of its processes sees it (``protocol.ports.Backend``), and ``run_sim``, which runs one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from protocol.evidence import check_may_emit
from protocol.ports import ActorHandle, Engines, Limits, Objects, Placement, Signal, Storage
from sim.actor_system import ActorSystem
from sim.actors import ActorProcess, cause
from sim.calls import ActorRef
from sim.loop import background
from sim.placement import SimPlacementGroups
from sim.timings import ns

T = TypeVar("T")


class SimBackend:
    """The ``Backend`` port of one process. When that process is dead, every port is inert."""

    __slots__ = ("process", "system", "placement_groups", "_may_emit", "_me")

    def __init__(self, system: ActorSystem, process: ActorProcess) -> None:
        self.system = system
        self.process = process
        self.placement_groups = SimPlacementGroups(system.placement_table, process)
        self._may_emit: set[str] = set()  # kinds found to be this actor's to emit
        self._me = system.ref(process.name, process.incarnation)

    @property
    def me(self) -> ActorHandle:
        return self._me

    @property
    def node(self) -> str:
        return self.process.node

    @property
    def engines(self) -> Engines:
        if self.system.engines_of is None:
            raise RuntimeError("this run has no engines: set ActorSystem.engines_of before its body starts")
        return self.system.engines_of(self.process)

    @property
    def storage(self) -> Storage:
        if self.system.storage_of is None:
            raise RuntimeError("this run has no storage: set ActorSystem.storage_of before its body starts")
        return self.system.storage_of(self.process)

    @property
    def objects(self) -> Objects:
        if self.system.objects_of is None:
            raise RuntimeError("this run has no object store: set ActorSystem.objects_of before its body starts")
        return self.system.objects_of(self.process)

    async def spawn(
        self,
        cls: type,
        *args: Any,
        name: str,
        node: str | None = None,
        placement: Placement | None = None,
        limits: Limits = Limits(),
        **kwargs: Any,
    ) -> ActorHandle:
        await self.process.living()
        return await self.system.spawn(self.process, cls, args, kwargs, name, node, placement, limits)

    async def kill(self, handle: ActorHandle) -> None:
        await self.signal(handle, "SIGKILL")

    async def signal(self, handle: ActorHandle, signal: Signal) -> None:
        await self.process.living()
        await self.system.signal(self.process, _own(handle), signal)

    async def restart(self, handle: ActorHandle) -> ActorHandle:
        await self.process.living()
        return await self.system.restart(self.process, _own(handle))

    async def lookup(self, name: str) -> ActorHandle:
        await self.process.living()
        await self._ask_head()
        return self.system.lookup(name)

    async def nodes(self) -> tuple[str, ...]:
        await self.process.living()
        await self._ask_head()
        return self.system.cluster.living()

    async def _ask_head(self) -> None:
        """A round trip to the control service."""
        link = self.system.network.link(self.process.node, self.system.cluster.head)
        await asyncio.sleep(2 * link.latency_ns / 1e9)

    def periodic(self, interval_s: float, function: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
        if not interval_s > 0:
            raise ValueError(f"periodic {name!r}: an interval of {interval_s!r} s; it must be positive")

        async def repeat() -> None:
            background.set(True)
            while True:
                await asyncio.sleep(interval_s)
                await function()

        return self.background(repeat(), name=name)

    def background(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = self.process.loop.create_task(coroutine, name=name)
        self.process.own_background(task)
        return task

    async def blocking(self, duration_s: float) -> None:
        if not duration_s >= 0:
            raise ValueError(f"blocking({duration_s!r}): a duration must not be negative")
        self.process.loop.occupy(ns(duration_s))
        await asyncio.sleep(0)  # an occupied loop runs nothing, so this returns when the time has passed

    def wall_time(self) -> float:
        system = self.system
        skew = system.cluster.nodes[self.process.node].skew_ns
        return system.world.wall_epoch_s + (system.world.now_ns + skew) / 1e9

    def new_id(self, prefix: str) -> str:
        if not self.process.alive:
            return f"{prefix}-{0:07d}"  # of a dead process's last step: takes no number, and nobody will see it
        return self.system.world.new_id(prefix)

    def emit(self, kind: str, **fields: Any) -> None:
        process = self.process
        if kind not in self._may_emit:
            check_may_emit(None if process.birth is None else process.birth.spec.cls, kind)
            self._may_emit.add(kind)
        self.system.world.record(process, kind, cause.get(), fields)


def _own(handle: ActorHandle) -> ActorRef:
    if not isinstance(handle, ActorRef):
        raise TypeError(f"a handle of this world is needed, not {type(handle).__name__}")
    return handle


def run_sim(body: Callable[[SimBackend], Awaitable[T]], *, time_limit_s: float | None = None, **options: Any) -> T:
    """Run ``await body(backend)`` as the driver of a simulated world of its own, and return what it returns.

    Args:
        time_limit_s: simulated time after which the run is stopped.
        options: of ``sim.simulation.Simulation``: seed, nodes, gpus_per_node, recorder, explore, copy_always, ...

    Raises:
        SimulationStopped: deadlock, livelock, or the time limit was reached; the report says who waits for whom.
    """
    from sim.simulation import Simulation  # it puts this module's backends together

    with Simulation(**options) as simulation:
        return simulation.run(body, time_limit_s=time_limit_s)
