"""What each fault does in the simulated world. `scenarios/faults.py` declares the names, parameters and targets.

Faults of processes and between them are in `sim.fault_processes` and `sim.fault_links`; those of storage, nodes and
placement groups are here, and so is the table of all.
"""

from __future__ import annotations

from protocol.faulting import FaultRefused
from sim.cluster import Node
from sim.fault_base import Fault
from sim.fault_links import (
    BadAnswer,
    ConnectTimeout,
    DelayedDelivery,
    Duplicate,
    Latency,
    Partition,
    ReadTimeout,
    ReplyLost,
    RequestLost,
)
from sim.fault_processes import (
    MetricsMissing,
    MetricsNan,
    MetricsStale,
    RestartEmpty,
    Sigkill,
    Sigstop,
    Sigterm,
    Slow,
    Wedge,
)
from sim.placement import PlacementFault
from sim.storage import StorageFault
from sim.timings import ns


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
