"""Injecting and healing faults in the simulated world, and the record of what each one met.

A fault is injected and healed synchronously, at an instant or at the emission of an event. What it meets at once
(requests in flight) goes into ``fault.injected``; each later hit is a ``fault.hit``; ``fault.healed`` says whether it
met what it had to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.fault_kinds import IMPLEMENTED, Fault, Site, Target
from sim.timings import ns

if TYPE_CHECKING:
    from sim.clock import Entry


class ActiveFault:
    """A fault that was injected: its number, its count of hits, and its healing."""

    def __init__(
        self, faults: Faults, number: int, name: str, target: Target, params: dict[str, Any],
        must_hit: dict[str, dict[str, int]],
    ) -> None:  # fmt: skip
        self._faults = faults
        self.number = number
        self.name = name
        self.target = target
        self.hits = 0
        self.healed = False
        self.must_hit = must_hit
        self.observed: dict[str, int] = {}
        self._count = params.get("count")
        self._timer: Entry | None = None
        self.fault: Fault = IMPLEMENTED[name](faults.site, target, params, self._hit)

    def _hit(self, what: str) -> None:
        if self.healed:
            return
        self.hits += 1
        world = self._faults.site.world
        world.observe("fault.hit", fault=self.number, what=what, count=self.hits)
        if self._count is not None and self.hits >= self._count:
            # Spent. Healed a moment later, for the hit is reported from inside of what it befell.
            world.clock.call_after(0, self.heal)

    def satisfied(self) -> bool:
        """Whether it has met what it had to."""
        met = {**self.observed, "hits": self.hits}
        return all(met.get(what, 0) >= bound.get("at_least", 1) for what, bound in self.must_hit.items())

    def heal(self) -> None:
        """End it. Idempotent."""
        if self.healed:
            return
        self.fault.heal()
        self.healed = True
        if self._timer is not None:
            self._timer.cancel()
        self._faults.closed(self)

    def heal_after(self, delay_ns: int) -> None:
        self._timer = self._faults.site.world.clock.call_after(delay_ns, self.heal)


class Faults:
    """Injects and heals the faults of one run.

    Args:
        site: what they act on.
        on_idle: called when the last fault in force has healed.
    """

    def __init__(self, site: Site, on_idle: Callable[[], None] | None = None) -> None:
        self.site = site
        self.on_idle = on_idle
        self.active: list[ActiveFault] = []
        self.injected = 0

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
        world = self.site.world
        fault.observed = fault.fault.look()  # before its record, which precedes its effect, as every event's does
        world.observe(
            "fault.injected", fault=fault.number, name=name, target=str(target), params=params, must_hit=must_hit,
            observed=fault.observed,
        )  # fmt: skip
        self.active.append(fault)
        fault.fault.inject()
        if transient:
            fault.heal()
        elif for_s is not None:
            fault.heal_after(ns(for_s))
        return fault

    def closed(self, fault: ActiveFault) -> None:
        """A fault has healed."""
        self.active.remove(fault)
        self.site.world.observe(
            "fault.healed", fault=fault.number, name=fault.name, target=str(fault.target), hits=fault.hits,
            satisfied=fault.satisfied(),
        )  # fmt: skip
        if not self.active and self.on_idle is not None:
            self.on_idle()

    def heal_all(self) -> None:
        """Heal what is still in force, in the order of injection."""
        for fault in list(self.active):
            fault.heal()
