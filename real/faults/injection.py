"""The faults in force in the real world (`protocol.faulting`), injected synchronously in the driver's loop.

A hit is recorded by the process that met it, and counted in files (`real.faults.table`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from protocol import faulting
from protocol.faulting import FaultsInForce, MustHit, Target
from real.faults.kinds import (
    ClockSkew,
    Fault,
    LinkFault,
    Machines,
    MetricsFault,
    Partition,
    PlacementStuck,
    RemovalFails,
    Site,
    StorageFault,
    TabledFault,
)
from real.faults.nodes import NodeLoss
from real.faults.processes import RestartEmpty, Sigkill, Sigstop, Sigterm, Slow, Wedge
from real.faults.table import TableWriter

if TYPE_CHECKING:
    from real.backend import RealBackend

IMPLEMENTED: Final[dict[str, type[Fault]]] = {
    "sigkill": Sigkill,
    "sigterm": Sigterm,
    "restart_empty": RestartEmpty,
    "sigstop": Sigstop,
    "slow": Slow,
    "wedge": Wedge,
    "partition": Partition,
    "latency": LinkFault,
    "request_lost": TabledFault,
    "reply_lost": TabledFault,
    "delayed_delivery": TabledFault,
    "duplicate": TabledFault,
    "connect_timeout": TabledFault,
    "read_timeout": TabledFault,
    "bad_answer": TabledFault,
    "slow_export": StorageFault,
    "torn_export": StorageFault,
    "disk_full": StorageFault,
    "clock_skew": ClockSkew,
    "metrics_missing": MetricsFault,
    "metrics_stale": MetricsFault,
    "metrics_nan": MetricsFault,
    "placement_stuck": PlacementStuck,
    "removal_fails": RemovalFails,
    "removal_refused": TabledFault,
    "node_loss": NodeLoss,
}
"""By the names of ``scenarios.faults`` (a test compares the two)."""

_POLL_S = 0.02


class ActiveFault(faulting.ActiveFault):
    """A fault that was injected: its count of hits over all processes, and its healing on the driver's loop."""

    def __init__(
        self, faults: RealFaults, number: int, name: str, target: Target, params: dict[str, Any], must_hit: MustHit
    ) -> None:
        super().__init__(number, name, target, params, must_hit)
        self._faults = faults
        self._timer: asyncio.TimerHandle | None = None
        self.fault = IMPLEMENTED[name](faults.site, number, name, target, params, self._hit)
        self._own_hits = 0

    def _hit(self, what: str) -> None:
        self._own_hits += 1
        self._faults.record("fault.hit", fault=self.number, what=what, count=self._own_hits)

    @property
    def hits(self) -> int:
        return self._own_hits + self._faults.site.writer.hits(self.number)

    def look(self) -> dict[str, int]:
        return self.fault.look()

    def inject(self) -> None:
        self._attempt(self.fault.inject, "inject")

    def heal(self) -> None:
        if self.healed:
            return
        self.healed = True
        self._attempt(self.fault.heal, "heal")
        if self._timer is not None:
            self._timer.cancel()
        self._faults.closed(self)

    def heal_after(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.heal)

    def _attempt(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except Exception as error:  # of Ray or the machine: raised in a timer of the loop it would only be logged
            self._faults.site.failed(f"{what} {self.name} {self.target}", error)


def real_faults(
    backend: RealBackend,
    *,
    bandwidth: float = 0.0,
    machines: Machines | None = None,
    on_idle: Callable[[], None] | None = None,
) -> RealFaults:
    """The faults of a run, for its driver.

    Args:
        backend: the driver's.
        bandwidth: nominal bytes per second of the shared storage; a slow export takes a percentage of that time.
        machines: the nodes, where the run has started them.
        on_idle: called when the last fault in force has healed.
    """
    folder = backend.run.folder
    return RealFaults(Site(backend, TableWriter(folder), backend.census, bandwidth, machines), on_idle)


class RealFaults(FaultsInForce[ActiveFault]):
    """The faults of one real run, in the driver's loop.

    Args:
        site: what they act on.
        on_idle: called when the last fault in force has healed.
    """

    def __init__(self, site: Site, on_idle: Callable[[], None] | None = None) -> None:
        super().__init__(on_idle)
        self.site = site
        self._poll: asyncio.TimerHandle | None = None

    def make(self, number: int, name: str, target: Target, params: dict[str, Any], must_hit: MustHit) -> ActiveFault:
        return ActiveFault(self, number, name, target, params, must_hit)

    def record(self, kind: str, **fields: Any) -> None:
        self.site.backend.log.emit(kind, **fields)

    def inject(
        self,
        name: str,
        target: Target,
        params: dict[str, Any],
        *,
        must_hit: MustHit,
        for_s: float | None = None,
        transient: bool = False,
    ) -> ActiveFault:
        fault = super().inject(name, target, params, must_hit=must_hit, for_s=for_s, transient=transient)
        if not fault.healed and fault.limit is not None and self._poll is None:
            self._look_for_spent()
        return fault

    def _look_for_spent(self) -> None:
        """Heal what has had its last hit. Its hits are other processes', so nobody tells: they are counted."""
        self._poll = None
        limited = [fault for fault in self.active if fault.limit is not None]
        for fault in limited:
            if fault.limit is not None and fault.hits >= fault.limit:
                fault.heal()
        if any(not fault.healed for fault in limited):
            self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._look_for_spent)
