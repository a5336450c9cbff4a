"""Nodes with GPUs and CPUs, and what becomes of them.

A node may be *lost* (its processes end at once, everybody else notices after the health time-out), or be *declared
dead* while its processes act on: zombies. A node cut off from the head node for longer than the health time-out is
one; when the link is repaired its processes are ended and it joins again, empty. Its machine was there all the time, so
its kernel closes their connections, as those of any process that is killed. Of a lost node nobody closes any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from protocol.errors import PlacementError
from sim.clock import Entry, NodeClock
from sim.network import Network
from sim.resources import Resources, fits, show, take, units
from sim.timings import Timings, ns
from sim.world import Process, World


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A machine. ``up``: its processes can run. ``dead``: the control service has declared it dead."""

    name: str
    capacity: Resources
    clock: NodeClock
    free: Resources
    up: bool = True
    dead: bool = False
    skew_ns: int = 0
    """What its wall clock shows beyond true time (``clock_skew``)."""
    processes: dict[str, Process] = dataclasses.field(default_factory=dict)
    silent: Entry | None = None
    """Running while the head hears nothing of it: the health time-out."""
    silent_until: int = 0
    """When that is over, in simulated nanoseconds."""
    epoch: int = 0
    """Rises when it is restored; resources taken before belong to a machine that is gone."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Resources held on a node; give it back with ``Cluster.release``."""

    node: str
    need: Resources
    epoch: int


class Cluster:
    """The nodes of a world.

    Args:
        nodes: how many; they are named ``node-0`` on. The first is the head: control service and driver live there.
        gpus_per_node, cpus_per_node: what each has.
        drift_ppb: each node's clock drifts by a draw from -this to +this, in parts per billion.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        timings: Timings,
        *,
        nodes: int = 1,
        gpus_per_node: float = 8,
        cpus_per_node: float = 64,
        drift_ppb: int = 0,
    ) -> None:
        if nodes < 1:
            raise ValueError(f"a cluster of {nodes} nodes: it needs at least one")
        self.world = world
        self.network = network
        self.timings = timings
        self.on_declared_dead: list[Callable[[str, list[Process]], None]] = []
        """Called with a node's name, and the processes that still run there (zombies)."""
        self.on_lost: list[Callable[[str], None]] = []
        """Called when a node is lost, after its processes have ended: what it had not fsynced is gone."""
        self.on_freed: list[Callable[[], None]] = []
        """Called when resources are freed, or a node is back."""
        self.nodes: dict[str, Node] = {}
        capacity = units((("CPU", cpus_per_node), ("GPU", gpus_per_node)))
        clocks = world.stream("cluster.clocks")
        for index in range(nodes):
            # Origins far apart: a clock reading that crosses nodes must not look plausible.
            origin = clocks.uniform_ns(0, 10**14)
            drift = clocks.below(2 * drift_ppb + 1) - drift_ppb if drift_ppb else 0
            node = Node(f"node-{index}", dict(capacity), NodeClock(origin, drift), dict(capacity))
            self.nodes[node.name] = node
        self.head = "node-0"
        world.on_death.append(self._process_died)
        network.on_change.append(self._check_health)
        network.machine_is_up = lambda name: self.nodes[name].up

    # --- nodes ---

    def node(self, name: str) -> Node:
        """Raises PlacementError: no such node."""
        try:
            return self.nodes[name]
        except KeyError:
            raise PlacementError(f"there is no node {name!r}; nodes are {', '.join(self.nodes)}") from None

    def clock_of(self, name: str) -> NodeClock:
        return self.node(name).clock

    def alive(self, name: str) -> bool:
        node = self.node(name)
        return node.up and not node.dead

    def in_touch(self, one: str, other: str) -> bool:
        """Whether a process on ``one`` can have something done on ``other`` now, and be told so.

        Not on a machine that is gone, nor on one declared dead, unless it is on that itself.
        """
        if one == other:
            return self.node(other).up
        reachable = self.network.reachable
        return self.alive(other) and reachable(one, other) and reachable(other, one)

    def living(self) -> tuple[str, ...]:
        """Nodes that the control service believes to be alive (a loss shows after the health time-out)."""
        return tuple(name for name, node in self.nodes.items() if not node.dead)

    def choose(self, wanted: str | None, near: str) -> str:
        """The node for a process: the wanted one, else the asker's own, else the first living one.

        Raises PlacementError (not done): no such node, or it is dead.
        """
        if wanted is not None:
            if self.node(wanted).dead:
                raise PlacementError(f"node {wanted!r} is dead")
            return wanted
        if not self.node(near).dead:
            return near
        living = self.living()
        if not living:
            raise PlacementError("no living node")
        return living[0]

    def enter(self, process: Process) -> None:
        """A process runs on its node until it dies."""
        self.node(process.node).processes[process.id] = process

    def _process_died(self, process: Process, reason: str) -> None:
        node = self.nodes.get(process.node)
        if node is not None:
            node.processes.pop(process.id, None)

    # --- resources ---

    def reserve(self, name: str, need: Resources) -> Reservation:
        """Take resources of a node.

        Raises:
            PlacementError: not done: no such node, or it has not got them.
        """
        node = self.node(name)
        if not fits(need, node.free):
            raise PlacementError(f"node {name!r} has not got {show(need)} free; it has {show(node.free)}")
        take(need, node.free)
        return Reservation(name, need, node.epoch)

    def release(self, reservation: Reservation) -> None:
        """Give resources back, once."""
        node = self.node(reservation.node)
        if node.epoch == reservation.epoch:
            take(reservation.need, node.free, -1)
            self.resources_freed()

    def resources_freed(self) -> None:
        for listener in self.on_freed:
            listener()

    # --- losing nodes ---

    def lose(self, name: str, *, zombie: bool = False) -> None:
        """Lose a node: its processes end now, and the others notice after the health time-out.

        With ``zombie`` the opposite: everybody takes it for dead from now on, and its processes act on.
        """
        node = self.node(name)
        if node.dead or not node.up:
            return
        self.world.observe("node.lost", node=name, zombie=zombie)
        if zombie:
            self._declare_dead(node)
            return
        node.up = False
        self.network.drop_waiting(name)
        if node.silent is not None:
            node.silent.cancel()
        self._fall_silent(node, self._declare_dead)
        for process in list(node.processes.values()):
            process.die("node_lost")
        for listener in self.on_lost:
            listener(name)

    def restore(self, name: str) -> None:
        """The node is back, empty; whatever still ran on it, zombies, is ended by its own machine."""
        node = self.node(name)
        if node.up and not node.dead:
            return
        self._declare_dead(node)
        if node.silent is not None:
            node.silent.cancel()
            node.silent = None
        for process in list(node.processes.values()):
            process.die("node_lost")
        node.up, node.dead = True, False
        node.epoch += 1
        node.free = dict(node.capacity)
        self.world.observe("node.restored", node=name)
        self.resources_freed()

    def _declare_dead(self, node: Node) -> None:
        if node.dead:
            return
        node.dead = True
        processes = list(node.processes.values())
        for listener in self.on_declared_dead:
            listener(node.name, processes)

    # --- health ---

    def _fall_silent(self, node: Node, then: Callable[[Node], None]) -> None:
        timeout = self.world.around("health_timeout", ns(self.timings.health_timeout_s))
        node.silent_until = self.world.now_ns + timeout
        node.silent = self.world.clock.call_after(timeout, then, node)

    def silence_left_ns(self, name: str) -> int:
        """How long until the loss of a node shows; of one that is not silent, how long that would take."""
        node = self.nodes[name]
        if node.silent is None:
            return ns(self.timings.health_timeout_s)
        return max(0, node.silent_until - self.world.now_ns)

    def _check_health(self) -> None:
        """After a partition or a repair: who can still talk to the head, both ways?"""
        for node in self.nodes.values():
            if node.name == self.head or not node.up:
                continue
            heard = self.network.reachable(node.name, self.head) and self.network.reachable(self.head, node.name)
            if not heard and node.silent is None and not node.dead:
                self._fall_silent(node, self._unheard)
            elif heard and node.silent is not None:
                if node.dead:
                    self.restore(node.name)
                else:
                    node.silent.cancel()
                    node.silent = None

    def _unheard(self, node: Node) -> None:
        if node.up and not node.dead:
            self.world.observe("node.lost", node=node.name, zombie=True)
            self._declare_dead(node)
