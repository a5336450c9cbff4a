"""What each fault does in the simulated world. `scenarios/faults.py` declares the names, parameters and targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from protocol.errors import NameTaken, NoSuchActor, PlacementError, message_of
from protocol.faulting import FaultRefused, Target
from sim.actors import ActorProcess
from sim.answer_faults import AnswerFault
from sim.cluster import Node
from sim.engine_process import EngineProcess
from sim.network import Fate, FateKind
from sim.placement import PlacementFault
from sim.storage import StorageFault
from sim.timings import ns
from sim.world import Process, World

if TYPE_CHECKING:
    from sim.actor_system import ActorSystem
    from sim.cluster import Cluster
    from sim.engine import SimEngine
    from sim.engines import SharedEngines
    from sim.network import Network
    from sim.storage import SharedStorage


@dataclass(slots=True)
class Site:
    """What faults act on.

    ``stops``: how many faults hold which process stopped; it goes on when the last of them has healed. ``slowed``: the
    percents of the faults that slow it down; they multiply.
    """

    world: World
    network: Network
    system: ActorSystem
    cluster: Cluster
    storage: SharedStorage
    engines: SharedEngines
    stops: Counter[str] = field(default_factory=Counter)
    slowed: dict[str, list[int]] = field(default_factory=dict)


class Fault:
    """One fault of a run, from its injection to its healing: ``look``, ``inject``, then ``heal``, each once."""

    def __init__(self, site: Site, target: Target, params: dict[str, Any], hit: Callable[[str], None]) -> None:
        self.site = site
        self.target = target
        self.params = params
        self.hit = hit

    def look(self) -> dict[str, int]:
        """What it is about to meet, without any effect. Raises FaultRefused: it cannot be done."""
        return {}

    def inject(self) -> None:
        """Do it."""
        raise NotImplementedError(type(self).__name__)  # abstract: every class below has its own

    def heal(self) -> None:
        """Take it back, as far as that is this fault's to do."""


class ProcessFault(Fault):
    """Something about one living process."""

    process: Process

    def look(self) -> dict[str, int]:
        name = self.target.name
        found: Process | None = self.site.engines.processes.get(name) or self.site.world.processes.get(name)
        if found is None:
            raise FaultRefused(f"target {name!r}: there is no such process")
        if not found.alive:
            raise FaultRefused(f"target {name!r}: it is dead already (incarnation {found.incarnation})")
        self.process = found
        if isinstance(found, EngineProcess):
            return {"in_flight": found.in_flight}
        key = (found.name, found.incarnation)
        calls = self.site.system.open_calls.values()
        return {"in_flight": sum((call.ref_name, call.ref_incarnation) == key for call in calls)}


class Sigkill(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        self._part = self.params.get("part", "main")
        if self._part != "main" and not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"sigkill of the {self._part}: {self.process.name} is no engine and has no such part")
        return observed

    def inject(self) -> None:
        if isinstance(self.process, EngineProcess) and self._part != "main":
            self.process.engine.lose_child(self._part)
        else:
            self.process.die("killed")


class Sigterm(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        if not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"sigterm: {self.process.name} is no engine; use sigkill for an actor")
        return observed

    def inject(self) -> None:
        assert isinstance(self.process, EngineProcess)
        self.process.engine.sigterm()


class RestartEmpty(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        try:
            if isinstance(self.process, EngineProcess):
                self.site.engines.where_again(self.process.name)
            else:
                self.site.system.where_again(self.process.name)
        except (NameTaken, NoSuchActor, PlacementError) as error:
            raise FaultRefused(f"restart_empty: {self.process.name} could not start again: {error}") from error
        return observed

    def inject(self) -> None:
        self.process.die("killed")
        name = self.process.name
        try:
            if isinstance(self.process, EngineProcess):
                spec, node, placement = self.site.engines.specs[name]
                self.site.engines.start(spec, name, node, placement)
            else:
                self.site.system.restart_from_outside(name)
        except (NameTaken, NoSuchActor, PlacementError) as error:
            # Something else was done at the emission of fault.injected. Too late to refuse: it is dead already.
            detail = f"restart of {name}: {type(error).__name__}: {message_of(error)}"
            self.site.world.observe("run.anomaly", what="fault_half_done", detail=detail)


class Sigstop(ProcessFault):
    def inject(self) -> None:
        self.site.stops[self.process.id] += 1
        self.process.stop()

    def heal(self) -> None:
        stops, held = self.site.stops, self.process.id
        stops[held] -= 1
        if not stops[held]:
            del stops[held]
            self.process.cont()


class Slow(ProcessFault):
    def inject(self) -> None:
        self.site.slowed.setdefault(self.process.id, []).append(self.params["percent"])
        self._set()

    def heal(self) -> None:
        self.site.slowed[self.process.id].remove(self.params["percent"])
        if self.process.alive:
            self._set()

    def _set(self) -> None:
        """What it takes now: all that slows it down, one on top of the other, as slow exports are."""
        ppm = 1_000_000
        for percent in self.site.slowed[self.process.id]:
            ppm = ppm * percent // 100
        if isinstance(self.process, EngineProcess):
            self.process.engine.slow(max(1, ppm))
        elif isinstance(self.process, ActorProcess):
            self.process.loop.slow_percent = max(1, ppm // 10_000)


class Wedge(ProcessFault):
    engine: SimEngine

    def look(self) -> dict[str, int]:
        observed = super().look()
        if not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"wedge: {self.process.name} is no engine; use sigstop for an actor")
        self.engine = self.process.engine
        return observed

    def inject(self) -> None:
        self.engine.wedge()

    def heal(self) -> None:
        if self.process.alive:
            self.engine.unwedge()


class LinkFault(Fault):
    """Something about the link between two nodes."""

    def look(self) -> dict[str, int]:
        self.ends = (node_of(self.site, self.target.source), node_of(self.site, self.target.destination))
        return {}


class Partition(LinkFault):
    def inject(self) -> None:
        one_way = bool(self.params.get("one_way", False))
        self._block = self.site.network.partition(*self.ends, one_way=one_way, on_hit=self.hit)

    def heal(self) -> None:
        self.site.network.repair(self._block)


class Latency(LinkFault):
    """A hit is a call, however many of its messages are late: every event of a stream is one."""

    def inject(self) -> None:
        self._met: set[int] = set()
        self._off = self.site.network.slow_down(*self.ends, self.params["extra_s"], self._slowed)

    def _slowed(self, call: int, what: str) -> None:
        if call not in self._met:
            self._met.add(call)
            self.hit(what)

    def heal(self) -> None:
        self._off()


class MessageFault(Fault):
    """A fate of single messages (sim/network.py)."""

    kind: ClassVar[FateKind]

    def inject(self) -> None:
        self._fate = self.site.network.arm(
            Fate(
                self.kind_of(),
                src=self.target.source,
                dst=self.target.destination,
                method=self.params.get("method", "*"),
                count=self.params.get("count"),
                chance=self.params.get("chance", 1.0),
                delay_s=self.params.get("delay_s", 0.0),
                on_hit=self.hit,
            )
        )

    def kind_of(self) -> FateKind:
        return self.kind

    def heal(self) -> None:
        self.site.network.disarm(self._fate)


class RequestLost(MessageFault):
    kind = "request_lost"


class ReplyLost(MessageFault):
    kind = "reply_lost"


class DelayedDelivery(MessageFault):
    def kind_of(self) -> FateKind:
        return "error_now" if self.params.get("error_now") else "delayed"


class Duplicate(MessageFault):
    kind = "duplicated"


class ConnectTimeout(MessageFault):
    kind = "connect_timeout"


class ReadTimeout(MessageFault):
    kind = "read_timeout"


class BadAnswer(Fault):
    """Answers of engines to exchanges byte for byte (sim/answer_faults.py)."""

    def inject(self) -> None:
        params = self.params
        self._fault = AnswerFault(
            params["what"],
            self.target.source,
            self.target.destination,
            params.get("method", "*"),
            params.get("count"),
            params.get("chance", 1.0),
            self.hit,
        )
        self.site.engines.answer_faults.append(self._fault)

    def heal(self) -> None:
        self.site.engines.answer_faults.remove(self._fault)


class StorageFaultBase(Fault):
    """Something about the storage under ``target.prefix``."""

    def inject(self) -> None:
        self._fault = self.make()
        self.site.storage.faults.append(self._fault)

    def make(self) -> StorageFault:
        raise NotImplementedError(type(self).__name__)  # abstract

    def heal(self) -> None:
        self.site.storage.faults.remove(self._fault)


class SlowExport(StorageFaultBase):
    def make(self) -> StorageFault:
        return StorageFault(self.target.prefix, self.hit, slow_percent=self.params["percent"])


class TornExport(StorageFaultBase):
    def make(self) -> StorageFault:
        return StorageFault(
            self.target.prefix, self.hit, torn=self.params["fraction"], torn_left=self.params.get("count", 1)
        )


class DiskFull(StorageFaultBase):
    def make(self) -> StorageFault:
        return StorageFault(self.target.prefix, self.hit, full_after=self.params["free_bytes"])


class MetricsFault(ProcessFault):
    """Something about one engine's /metrics page."""

    def look(self) -> dict[str, int]:
        observed = super().look()
        if not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"{self.process.name} is no engine: it has no metrics page")
        return observed

    def inject(self) -> None:
        self._stale: str | None = None
        process = self.process

        def page(asked: EngineProcess, route: str, status: int, text: str) -> tuple[int, str]:
            if asked is not process or route != "/metrics":
                return status, text
            self.hit(f"{route} of {asked.name}")
            return self.change(status, text)

        self._page = page
        self.site.engines.page_faults.append(page)

    def change(self, status: int, text: str) -> tuple[int, str]:
        raise NotImplementedError(type(self).__name__)  # abstract

    def heal(self) -> None:
        self.site.engines.page_faults.remove(self._page)


class MetricsMissing(MetricsFault):
    def change(self, status: int, text: str) -> tuple[int, str]:
        return 404, '{"detail":"Not Found"}'


class MetricsStale(MetricsFault):
    def change(self, status: int, text: str) -> tuple[int, str]:
        if self._stale is None:
            self._stale = text
        return status, self._stale


class MetricsNan(MetricsFault):
    def change(self, status: int, text: str) -> tuple[int, str]:
        return status, "\n".join(
            line if line.startswith("#") or not line else line.rsplit(" ", 1)[0] + " NaN" for line in text.split("\n")
        )


class NodeFault(Fault):
    """Something about one node."""

    node: Node

    def look(self) -> dict[str, int]:
        if self.target.name not in self.site.cluster.nodes:
            known = ", ".join(self.site.cluster.nodes)
            raise FaultRefused(f"target {self.target.name!r}: no such node; there are {known}")
        self.node = self.site.cluster.nodes[self.target.name]
        return {"processes": len(self.node.processes)}


class ClockSkew(NodeFault):
    def inject(self) -> None:
        self.node.skew_ns += ns(self.params["step_s"])
        self.hit(f"wall clock of {self.node.name}")

    def heal(self) -> None:
        self.node.skew_ns -= ns(self.params["step_s"])


class NodeLoss(NodeFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        if self.node.dead or not self.node.up:
            raise FaultRefused(f"target {self.node.name!r}: it is lost already")
        return observed

    def inject(self) -> None:
        zombie = bool(self.params.get("zombie", False))
        self.site.cluster.lose(self.node.name, zombie=zombie)
        if not zombie:
            self.site.storage.node_lost(self.node.name)
        self.hit(f"node {self.node.name}")

    def heal(self) -> None:
        self.site.cluster.restore(self.node.name)


class PlacementStuck(Fault):
    def inject(self) -> None:
        self._fault = PlacementFault("create_hangs", self.target.name or "*", on_hit=self.hit)
        self.site.system.placement_table.arm(self._fault)

    def heal(self) -> None:
        self.site.system.placement_table.disarm(self._fault)


class RemovalFails(Fault):
    def inject(self) -> None:
        late_s = self.params.get("late_s")
        name = self.target.name or "*"
        if late_s is None:
            self._fault = PlacementFault("remove_fails", name, on_hit=self.hit)
        else:
            self._fault = PlacementFault("remove_late", name, delay_s=late_s, on_hit=self.hit)
        self.site.system.placement_table.arm(self._fault)

    def heal(self) -> None:
        self.site.system.placement_table.disarm(self._fault)


class RemovalRefused(Fault):
    def inject(self) -> None:
        self._fault = PlacementFault("remove_refused", self.target.name or "*", on_hit=self.hit)
        self.site.system.placement_table.arm(self._fault)

    def heal(self) -> None:
        self.site.system.placement_table.disarm(self._fault)


def node_of(site: Site, name: str) -> str:
    """The node that a link's end names, by itself or through a process. Raises FaultRefused."""
    if name in site.cluster.nodes:
        return name
    process: Process | None = site.engines.processes.get(name) or site.world.processes.get(name)
    if process is None:
        raise FaultRefused(f"link end {name!r}: neither a node nor a process")
    return process.node


IMPLEMENTED: dict[str, type[Fault]] = {
    "sigkill": Sigkill,
    "sigterm": Sigterm,
    "restart_empty": RestartEmpty,
    "sigstop": Sigstop,
    "slow": Slow,
    "wedge": Wedge,
    "partition": Partition,
    "latency": Latency,
    "request_lost": RequestLost,
    "reply_lost": ReplyLost,
    "delayed_delivery": DelayedDelivery,
    "duplicate": Duplicate,
    "connect_timeout": ConnectTimeout,
    "read_timeout": ReadTimeout,
    "bad_answer": BadAnswer,
    "slow_export": SlowExport,
    "torn_export": TornExport,
    "disk_full": DiskFull,
    "clock_skew": ClockSkew,
    "metrics_missing": MetricsMissing,
    "metrics_stale": MetricsStale,
    "metrics_nan": MetricsNan,
    "placement_stuck": PlacementStuck,
    "removal_fails": RemovalFails,
    "removal_refused": RemovalRefused,
    "node_loss": NodeLoss,
}
"""By the names of ``scenarios.faults`` (a test compares the two)."""
