"""Injecting and healing faults in the real world, and the record of what each one met: as ``sim/faults.py``.

A fault is injected synchronously, in the driver's loop. What it meets at once goes into ``fault.injected``; each later
hit is a ``fault.hit`` by the process that met it, counted in files (`real.faults.table`); ``fault.healed`` says whether
it met what it had to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from real.census import Census
from real.faults.kinds import (
    ClockSkew,
    Fault,
    Latency,
    Machines,
    MetricsFault,
    Partition,
    PlacementStuck,
    RemovalFails,
    Site,
    StorageFault,
    TabledFault,
    Target,
)
from real.faults.nodes import NodeLoss
from real.faults.processes import RestartEmpty, Sigkill, Sigstop, Slow, Wedge
from real.faults.table import TableWriter

if TYPE_CHECKING:
    from real.backend import RealBackend

IMPLEMENTED: Final[dict[str, type[Fault]]] = {
    "sigkill": Sigkill,
    "restart_empty": RestartEmpty,
    "sigstop": Sigstop,
    "slow": Slow,
    "wedge": Wedge,
    "partition": Partition,
    "latency": Latency,
    "request_lost": TabledFault,
    "reply_lost": TabledFault,
    "delayed_delivery": TabledFault,
    "duplicate": TabledFault,
    "connect_timeout": TabledFault,
    "read_timeout": TabledFault,
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


class ActiveFault:
    """A fault that was injected: its number, its count of hits, and its healing."""

    def __init__(
        self, faults: RealFaults, number: int, name: str, target: Target, params: dict[str, Any],
        must_hit: dict[str, dict[str, int]],
    ) -> None:  # fmt: skip
        self._faults = faults
        self.number = number
        self.name = name
        self.target = target
        self.healed = False
        self.must_hit = must_hit
        self.observed: dict[str, int] = {}
        self.limit: int | None = params.get("count")
        self._timer: asyncio.TimerHandle | None = None
        self.fault = IMPLEMENTED[name](faults.site, number, name, target, params, self._hit)
        self._own_hits = 0

    def _hit(self, what: str) -> None:
        self._own_hits += 1
        self._faults.site.backend.log.emit("fault.hit", fault=self.number, what=what, count=self._own_hits)

    @property
    def hits(self) -> int:
        """What all processes have met so far."""
        return self._own_hits + self._faults.site.writer.hits(self.number)

    def satisfied(self) -> bool:
        """Whether it has met what it had to."""
        met = {**self.observed, "hits": self.hits}
        return all(met.get(what, 0) >= bound.get("at_least", 1) for what, bound in self.must_hit.items())

    def heal(self) -> None:
        """End it. Idempotent."""
        if self.healed:
            return
        self.healed = True
        self._attempt(self.fault.heal, "heal")
        if self._timer is not None:
            self._timer.cancel()
        self._faults.closed(self)

    def inject(self) -> None:
        self._attempt(self.fault.inject, "inject")

    def _attempt(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except Exception as error:  # of Ray or the machine: raised in a timer of the loop it would only be logged
            self._faults.site.failed(f"{what} {self.name} {self.target}", error)

    def heal_after(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.heal)


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
    return RealFaults(Site(backend, TableWriter(folder), Census(folder), bandwidth, machines), on_idle)


class RealFaults:
    """Injects and heals the faults of one run, in the driver's loop.

    Args:
        site: what they act on.
        on_idle: called when the last fault in force has healed.
    """

    def __init__(self, site: Site, on_idle: Callable[[], None] | None = None) -> None:
        self.site = site
        self.on_idle = on_idle
        self.active: list[ActiveFault] = []
        self.injected = 0
        self._poll: asyncio.TimerHandle | None = None

    def inject(
        self,
        name: str,
        target: Target,
        params: dict[str, Any],
        *,
        must_hit: dict[str, dict[str, int]],
        for_s: float | None = None,
        transient: bool = False,
    ) -> ActiveFault:
        """Inject now.

        Args:
            for_s: heal after so many seconds; None: when spent, or at ``heal_all``.
            transient: it is over the moment it is done (sigkill): healing it is somebody else's job.

        Raises:
            FaultRefused: it cannot be done; nothing was done.
        """
        fault = ActiveFault(self, self.injected + 1, name, target, params, must_hit)
        self.injected += 1
        fault.observed = fault.fault.look()  # before its record, which precedes its effect, as every event's does
        self.site.backend.log.emit(
            "fault.injected", fault=fault.number, name=name, target=str(target), params=params, must_hit=must_hit,
            observed=fault.observed,
        )  # fmt: skip
        self.active.append(fault)
        fault.inject()
        if transient:
            fault.heal()
        elif for_s is not None:
            fault.heal_after(for_s)
        if not fault.healed and fault.limit is not None and self._poll is None:
            self._look_for_spent()
        return fault

    def closed(self, fault: ActiveFault) -> None:
        """A fault has healed."""
        self.active.remove(fault)
        self.site.backend.log.emit(
            "fault.healed", fault=fault.number, name=fault.name, target=str(fault.target), hits=fault.hits,
            satisfied=fault.satisfied(),
        )  # fmt: skip
        if not self.active and self.on_idle is not None:
            self.on_idle()

    def heal_all(self) -> None:
        """Heal what is still in force, in the order of injection."""
        for fault in list(self.active):
            fault.heal()

    def _look_for_spent(self) -> None:
        """Heal what has had its last hit. Its hits are other processes', so nobody tells: they are counted."""
        self._poll = None
        limited = [fault for fault in self.active if fault.limit is not None]
        for fault in limited:
            if fault.limit is not None and fault.hits >= fault.limit:
                fault.heal()
        if any(not fault.healed for fault in limited):
            self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._look_for_spent)
