"""The faults in force in the simulated world (`protocol.faulting`), injected and healed synchronously.

That is at an instant or at the emission of an event. A hit is counted and recorded here, by who met it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protocol import faulting
from protocol.faulting import FaultsInForce, MustHit, Target
from sim.fault_base import Fault, Site
from sim.fault_kinds import IMPLEMENTED
from sim.timings import ns

if TYPE_CHECKING:
    from sim.clock import Entry


class ActiveFault(faulting.ActiveFault):
    """A fault that was injected: its count of hits, and its healing on the simulated clock."""

    def __init__(
        self, faults: Faults, number: int, name: str, target: Target, params: dict[str, Any], must_hit: MustHit
    ) -> None:
        super().__init__(number, name, target, params, must_hit)
        self._faults = faults
        self._hits = 0
        self._timer: Entry | None = None
        self._begun = False
        self.fault: Fault = IMPLEMENTED[name](faults.site, target, params, self._hit)

    @property
    def hits(self) -> int:
        return self._hits

    def _hit(self, what: str) -> None:
        if self.healed:
            return
        self._hits += 1
        self._faults.record("fault.hit", fault=self.number, what=what, count=self._hits)
        if self.limit is not None and self._hits >= self.limit:
            # Spent. Healed a moment later, for the hit is reported from inside of what it befell.
            self._faults.site.world.clock.call_after(0, self.heal)

    def look(self) -> dict[str, int]:
        return self.fault.look()

    def inject(self) -> None:
        self.fault.inject()
        self._begun = True

    def heal(self) -> None:
        if self.healed:
            return
        if self._begun:  # else its injection raised, and there is nothing to take back
            self.fault.heal()
        self.healed = True
        if self._timer is not None:
            self._timer.cancel()
        self._faults.closed(self)

    def heal_after(self, delay_s: float) -> None:
        self._timer = self._faults.site.world.clock.call_after(ns(delay_s), self.heal)


class Faults(FaultsInForce[ActiveFault]):
    """The faults of one simulated run.

    Args:
        site: what they act on.
        on_idle: called when the last fault in force has healed.
    """

    def __init__(self, site: Site, on_idle: Callable[[], None] | None = None) -> None:
        super().__init__(on_idle)
        self.site = site

    def make(self, number: int, name: str, target: Target, params: dict[str, Any], must_hit: MustHit) -> ActiveFault:
        return ActiveFault(self, number, name, target, params, must_hit)

    def record(self, kind: str, **fields: Any) -> None:
        self.site.world.observe(kind, **fields)
