"""One simulated world put together: kernel, network, cluster, actors, storage, engines, faults.

``run_sim`` (sim.backend) runs a body in one.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from protocol.evidence import Event, Recorder
from sim.actor_system import ActorSystem
from sim.clock import SimulationStopped
from sim.cluster import Cluster
from sim.engine_client import EnginesPort
from sim.engines import SharedEngines
from sim.fault_base import Site
from sim.faults import Faults
from sim.loop import ActorLoop
from sim.network import Network
from sim.object_store import SharedObjects
from sim.placement import PlacementGroupTable
from sim.storage import SharedStorage
from sim.timings import Timings, ns
from sim.virtual import Virtual
from sim.watchdog import HANG_AFTER_S, Watchdog
from sim.world import World

T = TypeVar("T")


class Simulation:
    """A world and everything in it; a context manager, for closing it seals every port and frees what it held.

    Args:
        seed: of every random stream.
        nodes, gpus_per_node, cpus_per_node: the cluster.
        recorder, sinks, batches, write: consumers of the evidence (``sim.world.World``).
        explore: draw delays, durations, scheduling order and the order of equal times from the seed.
        copy_always: copy declared immutable messages too.
        timings: durations of the world.
        costs_s: service cost of a message by actor name or class name, beside ``timings.call_cost_s``.
        drift_ppb: bound of the nodes' clock drift, parts per billion.
        wall_epoch_s: what wall clocks show at time 0.
        fast_path: let engines skip ahead and messages take the short way; results are equal without.
        hang_after_s: real seconds in which a callback of an actor must come back; None: the watchdog's.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        nodes: int = 1,
        gpus_per_node: float = 8,
        cpus_per_node: float = 64,
        recorder: Recorder | None = None,
        sinks: Iterable[Callable[[Event], None]] = (),
        batches: Iterable[Callable[[list[Event]], object]] = (),
        write: Callable[[bytes], object] | None = None,
        explore: bool = False,
        copy_always: bool = False,
        timings: Timings | None = None,
        costs_s: Mapping[str, float] | None = None,
        drift_ppb: int = 0,
        wall_epoch_s: float = 1_700_000_000.0,
        fast_path: bool = True,
        hang_after_s: float | None = None,
    ) -> None:
        self.timings = Timings() if timings is None else timings
        self.world = World(
            seed=seed,
            recorder=recorder,
            sinks=sinks,
            batches=batches,
            write=write,
            explore=explore,
            copy_always=copy_always,
            wall_epoch_s=wall_epoch_s,
        )
        self.network = Network(self.world, self.timings, fast_path=fast_path)
        self.cluster = Cluster(
            self.world,
            self.network,
            self.timings,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            cpus_per_node=cpus_per_node,
            drift_ppb=drift_ppb,
        )
        self.placement_table = PlacementGroupTable(self.cluster)
        self.system = ActorSystem(
            self.world, self.network, self.cluster, self.placement_table, self.timings, costs_s
        )
        self.storage = SharedStorage(self.world)
        self.system.storage_of = lambda process: self.storage.port(process, process.loop)
        self.cluster.on_lost.append(self.storage.node_lost)
        self.objects = SharedObjects(self.world)
        self.system.objects_of = self.objects.port
        self.engines = SharedEngines(
            self.world, self.network, self.storage, self.cluster, self.placement_table, fast_path=fast_path
        )
        self.system.engines_of = lambda process: EnginesPort(self.engines, process, process.loop)
        self.faults = Faults(
            Site(self.world, self.network, self.system, self.cluster, self.storage, self.engines)
        )
        self.driver = self.system.driver(self.cluster.head)
        self.backend = self.driver.loop.seatrial_backend
        self._virtual = Virtual(
            self.world.streams, wall_ns=self._wall_ns, on_anomaly=lambda *anomaly: self.world._anomaly(*anomaly)
        )
        self.system.on_class = self._adopt
        self._body_open = False
        self._hang_after_s = HANG_AFTER_S if hang_after_s is None else hang_after_s
        previous = self.world.kernel.open_work
        self.world.kernel.open_work = lambda: [*previous(), *(["the driver's body"] if self._body_open else [])]

    def __enter__(self) -> Self:
        self._virtual.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.world.close()
        finally:
            self._virtual.__exit__()

    def run(self, body: Callable[[Any], Awaitable[T]], *, time_limit_s: float | None = None) -> T:
        """Run ``await body(backend)`` in the driver to its end, inside ``with``. May be called again.

        Raises:
            SimulationStopped: deadlock, livelock, an endless callback, or the time limit was reached.
        """

        async def main() -> T:
            return await body(self.backend)

        limit = None if time_limit_s is None else self.world.now_ns + ns(time_limit_s)
        task = self.driver.task(main(), "body")
        self._body_open = True
        try:
            with Watchdog(self.world.kernel, self._hang_after_s):
                reason = self.world.kernel.run(task.done, until_ns=limit)
        finally:
            self._body_open = False
        if reason != "completed":
            raise SimulationStopped(reason, self.world.kernel.report(f"{time_limit_s} s of simulated time are over"))
        result: T = task.result()
        return result

    def _adopt(self, cls: type) -> None:
        module = sys.modules.get(cls.__module__)
        if module is not None:
            self._virtual.adopt(module)

    def _wall_ns(self, loop: ActorLoop) -> int:
        node = self.cluster.nodes[loop.seatrial_backend.process.node]
        return round(self.world.wall_epoch_s * 1e9) + self.world.now_ns + node.skew_ns
