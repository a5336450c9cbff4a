"""Faults as both worlds keep them: what one is aimed at, its way from injection to healing, and the record of that.

What a fault *does* is each world's own (``sim/fault_kinds.py``, ``real/faults/kinds.py``); when it counts as met, and
which events tell of it, must not differ between them. Source: DESIGN.md, "Faults".
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

MustHit = Mapping[str, Mapping[str, int]]
"""What a fault has to meet: ``{"in_flight": {"at_least": 3}}``."""


class FaultRefused(Exception):
    """A fault that cannot be done to this target; the text says why. Nothing was done."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a fault is aimed at. Which fields count depends on the fault.

    ``name``: a process or node. ``source``, ``destination``: a link, as process or node names (``*`` for any).
    ``prefix``: of storage paths.
    """

    name: str = ""
    source: str = "*"
    destination: str = "*"
    prefix: str = ""

    def __str__(self) -> str:
        if self.name:
            return self.name
        return self.prefix or f"{self.source}>{self.destination}"


class ActiveFault(abc.ABC):
    """A fault that was injected: its number, what it has met, and its healing.

    Args:
        params: its own; ``count`` is the hit with which it is spent.
        must_hit: what it has to meet.
    """

    def __init__(self, number: int, name: str, target: Target, params: dict[str, Any], must_hit: MustHit) -> None:
        self.number = number
        self.name = name
        self.target = target
        self.limit: int | None = params.get("count")
        self.must_hit = must_hit
        self.observed: dict[str, int] = {}
        """What it met at once."""
        self.healed = False

    @property
    @abc.abstractmethod
    def hits(self) -> int:
        """What it has met so far."""

    @abc.abstractmethod
    def look(self) -> dict[str, int]:
        """What it is about to meet, without any effect. Raises FaultRefused: it cannot be done."""

    @abc.abstractmethod
    def inject(self) -> None:
        """Do it."""

    @abc.abstractmethod
    def heal(self) -> None:
        """End it. Idempotent."""

    @abc.abstractmethod
    def heal_after(self, delay_s: float) -> None:
        """End it so many seconds from now."""

    def satisfied(self) -> bool:
        """Whether it has met what it had to."""
        met = {**self.observed, "hits": self.hits}
        return all(met.get(what, 0) >= bound.get("at_least", 1) for what, bound in self.must_hit.items())


F = TypeVar("F", bound=ActiveFault)


class FaultsInForce(abc.ABC, Generic[F]):
    """Injects and heals the faults of one run.

    Args:
        on_idle: called when the last fault in force has healed.
    """

    def __init__(self, on_idle: Callable[[], None] | None = None) -> None:
        self.on_idle = on_idle
        self.active: list[F] = []
        self.injected = 0

    @abc.abstractmethod
    def make(self, number: int, name: str, target: Target, params: dict[str, Any], must_hit: MustHit) -> F:
        """A fault of this world, not yet injected."""

    @abc.abstractmethod
    def record(self, kind: str, **fields: Any) -> None:
        """Record an event, before its effect."""

    def inject(
        self,
        name: str,
        target: Target,
        params: dict[str, Any],
        *,
        must_hit: MustHit,
        for_s: float | None = None,
        transient: bool = False,
    ) -> F:
        """Inject now.

        Args:
            for_s: heal after so many seconds; None: when spent, or at ``heal_all``.
            transient: it is over the moment it is done (sigkill): healing it is somebody else's job.

        Raises:
            FaultRefused: it cannot be done; nothing was done.
        """
        fault = self.make(self.injected + 1, name, target, params, must_hit)
        self.injected += 1
        fault.observed = fault.look()  # before its record, which precedes its effect, as every event's does
        if "processes" in must_hit and "in_flight" in fault.observed:
            fault.observed["processes"] = 1  # a process: it is alive, or that look had refused it
        self.record(
            "fault.injected", fault=fault.number, name=name, target=str(target), params=params, must_hit=must_hit,
            observed=fault.observed,
        )  # fmt: skip
        self.active.append(fault)
        fault.inject()
        if transient:
            fault.heal()
        elif for_s is not None:
            fault.heal_after(for_s)
        return fault

    def closed(self, fault: F) -> None:
        """A fault has healed."""
        self.active.remove(fault)
        self.record(
            "fault.healed", fault=fault.number, name=fault.name, target=str(fault.target), hits=fault.hits,
            satisfied=fault.satisfied(),
        )  # fmt: skip
        if not self.active and self.on_idle is not None:
            self.on_idle()

    def heal_all(self) -> None:
        """Heal what is still in force, in the order of injection."""
        for fault in list(self.active):
            fault.heal()
