"""The half of ``InjectorPort`` that both worlds do alike: steps' faults, on the faults in force of the world."""

from __future__ import annotations

from typing import Any

from protocol.faulting import FaultRefused, FaultsInForce, Target
from scenarios.injector import Aim, StepRefused


class FaultPort:
    """Base of the stages. ``faults``: of the run, set before the first step fires."""

    faults: FaultsInForce[Any]

    def __init__(self) -> None:
        self._timed: set[int] = set()  # numbers of faults with a time to heal at; asked for membership only

    def inject(
        self,
        name: str,
        aim: Aim,
        params: dict[str, Any],
        *,
        must_hit: dict[str, dict[str, int]],
        for_s: float | None,
        transient: bool,
    ) -> None:
        target = Target(aim.name, aim.source, aim.destination, aim.prefix)
        try:
            fault = self.faults.inject(name, target, params, must_hit=must_hit, for_s=for_s, transient=transient)
        except FaultRefused as error:
            raise StepRefused(str(error)) from error
        if for_s is not None:
            self._timed.add(fault.number)

    def heal_all(self) -> None:
        self.faults.heal_all()

    def active(self) -> int:
        return len(self.faults.active)

    def timed(self) -> int:
        return sum(fault.number in self._timed for fault in self.faults.active)
