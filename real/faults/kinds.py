"""What each fault does in the real world, on the driver's side. ``scenarios/faults.py`` declares names and parameters.

Half of them are only put into the table (`real.faults.table`), where the processes that meet them look; the other half
are signals (`real.faults.processes`) and lost nodes (`real.faults.nodes`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol

from protocol.errors import SeatrialError
from protocol.faulting import FaultRefused, Target
from real.faults.stops import Stops
from real.faults.table import Standing, TableWriter

if TYPE_CHECKING:
    from real.backend import RealBackend
    from real.census import Census


_LOOK_S: Final = 0.05


class Machines(Protocol):
    """The nodes of the run's own cluster (`real.cluster`)."""

    def lose(self, name: str) -> object:
        """End a node and all that runs on it, without grace."""
        ...

    def restore(self, name: str) -> object:
        """Have it again, empty. Returns when it is there."""
        ...


@dataclasses.dataclass(slots=True)
class Slowed:
    """A process that faults slow down: what it consists of, their percents, and who does it (`real.faults.duty`)."""

    pids: list[int]
    percents: list[int] = dataclasses.field(default_factory=list)
    duty: subprocess.Popen[bytes] | None = None


@dataclasses.dataclass(slots=True)
class Site:
    """What faults act on.

    ``bandwidth``: nominal bytes per second of the shared storage. ``machines``: None where the cluster is another's.
    ``slowed``: by the pid of its main process.
    """

    backend: RealBackend
    writer: TableWriter
    census: Census
    bandwidth: float = 0.0
    machines: Machines | None = None
    stops: Stops = dataclasses.field(default_factory=Stops)
    slowed: dict[int, Slowed] = dataclasses.field(default_factory=dict)

    def node_names(self) -> tuple[str, ...]:
        """Of the nodes that the run began with, the head first."""
        return tuple(name for name, _ in self.backend.run.nodes)

    def node_of(self, name: str) -> str:
        """The node that a link's end names, by itself or through a process. Raises FaultRefused."""
        if name in self.node_names():
            return name
        node = self.census.node_of(name)
        if not node:
            raise FaultRefused(f"link end {name!r}: neither a node nor a process")
        return node

    def later(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        """Do something that takes its time. That it fails is an anomaly of the run: its fault is only half done."""

        async def done() -> None:
            try:
                await coroutine
            except (SeatrialError, LookupError) as error:
                self.failed(what, error)

        self.backend.caller.keep(done(), name=what)

    def failed(self, what: str, error: Exception) -> None:
        """Record that a fault is only half done: the run says nothing of it."""
        self.backend.log.emit("run.anomaly", what="fault_half_done", detail=f"{what}: {type(error).__name__}: {error}")


class Fault:
    """One fault of a run, from its injection to its healing: ``look``, ``inject``, then ``heal``, each once.

    Args:
        hit: tells of something that it met at once; what others meet, they tell themselves.
    """

    def __init__(
        self, site: Site, number: int, name: str, target: Target, params: dict[str, Any], hit: Callable[[str], None]
    ) -> None:
        self.site = site
        self.number = number
        self.name = name
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


class TabledFault(Fault):
    """A fault that lies in the table, and that other processes meet."""

    def inject(self) -> None:
        target = self.target
        self.site.writer.put(
            Standing(
                self.number, self.name, self.params, target.name, target.source, target.destination, target.prefix,
                self.links(), self.extra(),
            )
        )  # fmt: skip

    def links(self) -> tuple[tuple[str, str], ...]:
        return ()

    def extra(self) -> dict[str, Any]:
        return {}

    def heal(self) -> None:
        self.site.writer.withdraw(self.number)


class LinkFault(TabledFault):
    """Something about the link between two nodes."""

    def look(self) -> dict[str, int]:
        self.ends = (self.site.node_of(self.target.source), self.site.node_of(self.target.destination))
        return {}

    def links(self) -> tuple[tuple[str, str], ...]:
        return (self.ends,)


class Partition(LinkFault):
    def links(self) -> tuple[tuple[str, str], ...]:
        source, destination = self.ends
        return ((source, destination),) if self.params.get("one_way") else (self.ends, (destination, source))


class StorageFault(TabledFault):
    def extra(self) -> dict[str, Any]:
        return {"bandwidth": self.site.bandwidth}


class MetricsFault(TabledFault):
    """Something about one engine's /metrics page."""

    def look(self) -> dict[str, int]:
        card = self.site.census.find(self.target.name)
        if card is None:
            raise FaultRefused(f"target {self.target.name!r}: there is no such process")
        if card.role != "engine":
            raise FaultRefused(f"{card.name} is no engine: it has no metrics page")
        if not self.site.census.is_alive(card):
            raise FaultRefused(f"target {card.name!r}: it is dead already (incarnation {card.incarnation})")
        return {"in_flight": card.in_flight}


class ClockSkew(TabledFault):
    def look(self) -> dict[str, int]:
        nodes = self.site.node_names()
        if self.target.name not in nodes:
            raise FaultRefused(f"target {self.target.name!r}: no such node; there are {', '.join(nodes)}")
        return {"processes": processes_on(self.site, self.target.name)}

    def inject(self) -> None:
        super().inject()
        self.hit(f"wall clock of {self.target.name}")


class PlacementStuck(TabledFault):
    def heal(self) -> None:
        super().heal()
        self.site.backend.placement_groups.try_again()


class RemovalFails(TabledFault):
    def inject(self) -> None:
        super().inject()
        self._over = False
        self._look()

    def _look(self) -> None:
        # A removal that was asked for in time comes, though the fault has healed by then.
        waits = self.site.backend.placement_groups.remove_due()
        if waits or not self._over:
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def heal(self) -> None:
        super().heal()
        self._over = True


def processes_on(site: Site, node: str) -> int:
    """How many processes of the run live on a node."""
    return sum(card.node == node for card in site.census.living())
