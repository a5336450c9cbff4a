"""What every fault of the simulated world is made on: the site that it acts on, and its three steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protocol.faulting import Target
from sim.world import World

if TYPE_CHECKING:
    from sim.actor_system import ActorSystem
    from sim.cluster import Cluster
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
