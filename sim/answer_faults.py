"""The fault ``bad_answer`` in the simulated world: answers of engines that are bad as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from sim.links import DEN

if TYPE_CHECKING:
    from sim.world import Process, World


@dataclass(slots=True, eq=False)
class AnswerFault:
    """What shall become of the answers to exchanges that match (patterns as in ``sim.network.Fate``)."""

    what: str
    src: str
    dst: str
    method: str
    count: int | None
    chance: float
    on_hit: Callable[[str], None]
    hits: int = 0

    def befalls(self, world: World, caller: Process, engine: str, path: str) -> bool:
        """Whether it is this exchange's turn; counts it then."""
        if self.count is not None and self.hits >= self.count:
            return False
        if not (fnmatchcase(caller.name, self.src) or fnmatchcase(caller.node, self.src)):
            return False
        if not fnmatchcase(engine, self.dst) or not fnmatchcase(path, self.method):
            return False
        if self.chance < 1 and not world.stream("fate.bad_answer").chance(int(self.chance * DEN), DEN):
            return False
        self.hits += 1
        return True
