"""Every serving engine of a simulated world: launched and ended, with its port, its GPUs and its weights.

Each is a `sim.engine_process.EngineProcess`; callers reach them through `sim.engine_client`. Weights are really read
from storage: the hash that an engine serves is that of the bytes that were there. A torn file loads without a
complaint, as one whose tail was never written does; only its hash tells.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.errors import NameTaken, PlacementError, SeatrialError
from protocol.ports import EngineSpec, Placement
from protocol.training.checkpoint import MANIFEST, hash_weights
from sim.answer_faults import AnswerFault
from sim.copying import SMALL
from sim.engine_process import EngineProcess
from sim.engine_transfers import Group
from sim.http import settle
from sim.loop import background
from sim.network import CONTROL, Letter, Network
from sim.profiles import load_profile
from sim.resources import Resources, fits, show, take, units
from sim.world import Process, World

if TYPE_CHECKING:
    from sim.cluster import Cluster
    from sim.engine_cost import EngineProfile
    from sim.loop import ActorLoop
    from sim.placement import PlacementGroupTable
    from sim.storage import SharedStorage

PageFault = Callable[[EngineProcess, str, int, str], tuple[int, str]]
"""Takes (process, route, status, body) of a page and gives what the client is to see."""

_FIRST_PORT = 30000

T = TypeVar("T")


@dataclass(slots=True)
class Weights:
    """What a loader found at a path. ``failure`` says why it cannot be loaded, empty when it can."""

    size_bytes: int = 0
    weight_hash: str = ""
    version: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A start that was asked for: its name is taken and its GPUs are, though its node may not have heard of it."""

    name: str
    spec: EngineSpec
    node: str | None
    placement: Placement | None
    profile: EngineProfile
    where: str
    give_back: Callable[[], None]
    by: str
    """Node of whom that asked. When it is lost before the other has heard, nobody tells that any more."""


@dataclass(slots=True)
class SharedEngines:
    """Every engine of a world.

    Args:
        cluster, groups: whose GPUs the engines take.
        fast_path: let engines skip ahead (results are equal without; the proof runs both).
    """

    world: World
    network: Network
    storage: SharedStorage
    cluster: Cluster
    groups: PlacementGroupTable
    fast_path: bool = True
    processes: dict[str, EngineProcess] = field(default_factory=dict)
    specs: dict[str, tuple[EngineSpec, str | None, Placement | None]] = field(default_factory=dict)
    page_faults: list[PageFault] = field(default_factory=list)
    answer_faults: list[AnswerFault] = field(default_factory=list)
    transfer_groups: dict[str, Group] = field(default_factory=dict)
    _profiles: dict[str, EngineProfile] = field(default_factory=dict)
    _ports: dict[str, set[int]] = field(default_factory=dict)
    _held: dict[str, Callable[[], None]] = field(default_factory=dict)  # by process id: how to give its GPUs back
    _launches: dict[str, Launch] = field(default_factory=dict)  # by name: those that have not begun
    _zombies: dict[str, EngineProcess] = field(default_factory=dict)  # by id: alive, though a later one has the name
    _unnoticed: dict[str, str] = field(default_factory=dict)  # id -> node: of a machine whose loss nobody knows of yet
    _asked: dict[str, list[asyncio.Future[Any]]] = field(default_factory=dict)  # by node: who waits for its answer
    _count: int = 0

    def __post_init__(self) -> None:
        self.cluster.on_declared_dead.append(self._node_declared_dead)
        self.cluster.on_lost.append(self._node_lost)

    def next_index(self) -> int:
        self._count += 1
        return self._count

    # --- starting ---

    def start(self, spec: EngineSpec, name: str, node: str | None, placement: Placement | None) -> EngineProcess:
        """Start a process at once, as a supervisor outside of the world would.

        Raises NameTaken or PlacementError (not done): a machine that is gone starts nothing, noticed or not.
        """
        launch = self.ask(spec, name, node, placement)
        if not self.cluster.node(launch.where).up:
            self._withdraw(launch)
            raise PlacementError(f"node {launch.where} is gone")
        return self.begin(launch)

    def where_again(self, name: str) -> str:
        """On which node ``start`` puts the latest engine of that name, as it was launched, once that is dead.

        Raises NameTaken or PlacementError: it cannot, as things are.
        """
        if name in self._launches:
            raise NameTaken(f"another engine named {name} is being started")
        spec, node, placement = self.specs[name]
        if placement is not None:
            return self.groups.node_of(placement)
        process, need = self.processes[name], units([("GPU", spec.num_gpus)])
        where = self.cluster.choose(node or self._emptiest(process, need), self.cluster.head)
        free = dict(self.cluster.nodes[where].free)
        if where == process.node and process.alive:
            take(need, free, -1)
        if not fits(need, free):
            raise PlacementError(f"node {where!r} has not got {show(need)} free; it has {show(free)}")
        return where

    def ask(self, spec: EngineSpec, name: str, node: str | None, placement: Placement | None, by: str = "") -> Launch:
        """Take a name and GPUs, for an asker on node ``by``. Raises NameTaken or PlacementError (not done)."""
        if self.is_known(name):
            raise NameTaken(f"an engine named {name} is alive, or being started")
        profile = self._profiles.get(spec.profile)
        if profile is None:
            profile = self._profiles[spec.profile] = load_profile(spec.profile)
        if spec.options is not None and spec.options.startup_s is not None:
            profile = profile.replace(startup_ns=round(spec.options.startup_s * 1e9))
        where, give_back = self._take_gpus(spec.num_gpus, node, placement)
        launch = self._launches[name] = Launch(name, spec, node, placement, profile, where, give_back, by)
        return launch

    def begin(self, launch: Launch) -> EngineProcess:
        """What its node does. Raises PlacementError (not done): withdrawn, or its placement group has gone."""
        name, spec, placement, where = launch.name, launch.spec, launch.placement, launch.where
        if self._launches.get(name) is not launch:
            raise PlacementError(f"the start of {name} on {where} was withdrawn")
        if placement is not None and not self.groups.holds(placement, where):
            self._withdraw(launch)
            raise PlacementError(f"{placement} was removed while {name} was started in it")
        del self._launches[name]
        options = spec.options
        port = self._free_port(where)
        process = EngineProcess(self, name, self.world.next_incarnation(name), where, port, launch.profile, options)
        self.cluster.enter(process)
        if placement is not None:
            self.world.observe(
                "placement.entered", group=placement.group_id, process=name, process_inc=process.incarnation
            )
            self.groups.enter(process, placement)
        old = self.processes.get(name)
        if old is not None and old.alive:
            # A zombie: it lives on under a key of its own, so that the end of the run seals it too.
            self._zombies[old.id] = self.world.processes[old.id] = old
        self.processes[name] = process
        self._held[process.id] = launch.give_back
        self.specs[name] = (spec, launch.node, placement)
        self.world.register(process, cls=f"SimEngine({spec.profile})")
        if options is not None:
            process.report_options(options)
        if spec.weights_path:
            self.read_weights(process, spec.weights_path, lambda found: self._start_with(process, found))
        else:
            process.engine.start()
        return process

    def _withdraw(self, launch: Launch) -> None:
        del self._launches[launch.name]
        launch.give_back()

    def _start_with(self, process: EngineProcess, found: Weights) -> None:
        if found.failure:
            process.die("crashed", found.failure)
        else:
            process.engine.start(version=found.version, weight_hash=found.weight_hash, size_bytes=found.size_bytes)

    def _take_gpus(
        self, num_gpus: float, node: str | None, placement: Placement | None
    ) -> tuple[str, Callable[[], None]]:
        need = units([("GPU", num_gpus)])
        if placement is not None:
            where = self.groups.node_of(placement)
            return where, self.groups.reserve(placement, need)
        where = self.cluster.choose(node or self._emptiest(), self.cluster.head)
        reservation = self.cluster.reserve(where, need)
        return reservation.node, lambda: self.cluster.release(reservation)

    def _emptiest(self, leaving: EngineProcess | None = None, of_it: Resources | None = None) -> str | None:
        """The emptiest living node, the first of equals. ``leaving``: what that process has counts as free."""

        def free(name: str) -> int:
            more = of_it["GPU"] if of_it and leaving is not None and leaving.alive and leaving.node == name else 0
            return self.cluster.nodes[name].free.get("GPU", 0) + more

        return max(self.cluster.living(), key=free, default=None)

    def _free_port(self, node: str) -> int:
        # The lowest free one, as the real allocator does: a new engine gets the port of one that died (hazard H5).
        taken = self._ports.setdefault(node, set())
        port = _FIRST_PORT
        while port in taken:
            port += 1
        taken.add(port)
        return port

    def listener(self, host: str, port: int) -> EngineProcess | None:
        """Who listens at an address now, living or (nobody has taken its port since) dead."""
        everyone = (*self._zombies.values(), *self.processes.values())
        found = [p for p in everyone if p.host == host and p.port == port]
        return next((p for p in found if p.alive), found[-1] if found else None)

    def freed(self, process: EngineProcess) -> None:
        """A process ended: its port and its GPUs are free."""
        self._ports[process.node].discard(process.port)
        self._held.pop(process.id)()
        self._zombies.pop(process.id, None)
        if process.death_reason == "node_lost" and not self.cluster.node(process.node).dead:
            self._unnoticed[process.id] = process.node

    # --- what others know, and what they have a node do ---

    def is_known(self, name: str, asker: str | None = None) -> bool:
        """Whether a supervisor takes an engine of that name for alive.

        One that is being started is, and one whose node is silent, until that is declared dead. What lives on there as
        a zombie is alive for its own node alone (``asker``).
        """
        process = self.processes.get(name)
        if name in self._launches:
            return True
        return process is not None and (self.reached(process, asker) is not None or process.id in self._unnoticed)

    def reached(self, process: EngineProcess | None, asker: str | None) -> EngineProcess | None:
        """The process, unless it is dead, or is taken for dead by the node ``asker``."""
        if process is None or not process.alive:
            return None
        return process if process.node == asker or not self.cluster.node(process.node).dead else None

    async def end(self, name: str, asker: Process, loop: ActorLoop) -> None:
        """SIGKILL; returns when it is obeyed, or the node declared dead. One to the dead is silent."""
        launch = self._launches.get(name)
        if launch is not None:
            self._withdraw(launch)
            return
        process = self.reached(self.processes.get(name), asker.node)
        if process is None:
            return
        try:
            await self.have_done("SIGKILL", process.node, asker, loop, lambda: process.die("killed"))
        except PlacementError:
            return  # declared dead, and the name is free

    async def have_done(self, what: str, node: str, asker: Process, loop: ActorLoop, action: Callable[[], T]) -> T:
        """Have a node do something: at once while it is in touch, else by messages, which wait for the repair.

        Raises PlacementError: the node was declared dead before its answer came. What ``action`` raises, it raises.
        """
        if self.cluster.in_touch(asker.node, node):
            return action()
        network, system = self.network, self.world.os_of(node)
        answer: asyncio.Future[T] = loop.create_future()
        letter = Letter(network.next_number(), what, background.get(), f"{asker.name}/{asker.incarnation}/{asker.n}")

        def arrives() -> None:
            if not self.cluster.alive(node):
                return  # silence, until its loss is noticed
            value: T | SeatrialError
            try:
                value = action()
            except SeatrialError as error:
                value = error
            network.send(system, asker, CONTROL, letter, SMALL, loop.deliver, settle, answer, value)

        waiting = self._asked.setdefault(node, [])
        waiting.append(answer)
        network.send(asker, system, CONTROL, letter, SMALL, arrives)
        try:
            return await answer
        finally:
            waiting.remove(answer)

    def _node_lost(self, node: str) -> None:
        for launch in [launch for launch in self._launches.values() if launch.by == node]:
            self._withdraw(launch)

    def _node_declared_dead(self, node: str, zombies: list[Process]) -> None:
        for launch in [launch for launch in self._launches.values() if launch.where == node]:
            self._withdraw(launch)
        self._unnoticed = {process: where for process, where in self._unnoticed.items() if where != node}
        for answer in self._asked.pop(node, []):
            loop: Any = answer.get_loop()
            loop.deliver(settle, answer, PlacementError(f"node {node} was lost"))

    # --- pages and weights ---

    def distort(self, process: EngineProcess, route: str, status: int, text: str) -> tuple[int, str]:
        """A page as it leaves the engine: (status, body), after the metrics faults."""
        for fault in self.page_faults:
            status, text = fault(process, route, status, text)
        return status, text

    def read_weights(self, process: EngineProcess, path: str, have: Callable[[Weights], None]) -> None:
        """Read every shard under ``path`` through storage, one after another, then call ``have``; never if it dies."""
        storage, clock = self.storage, self.world.clock
        prefix = path.rstrip("/") + "/"
        names = [name for name in sorted(storage.files) if name.startswith(prefix)]
        shards = [name for name in names if not name.endswith("/" + MANIFEST)]
        if not shards:
            have(Weights(failure=f"no weights at {path}"))
            return
        hashes: list[str] = []
        total = 0

        def go_on() -> None:
            # Not engine.serve, which answers only once the engine has started: this may be what it starts with.
            if process.alive and not process.engine.postponed(next_shard):
                next_shard()

        def next_shard() -> None:
            nonlocal total
            if len(hashes) == len(shards):
                have(Weights(total, hash_weights(hashes), self._version(path)))
                return
            name = shards[len(hashes)]
            found = storage.read_now(name)
            if found is None:
                have(Weights(failure=f"{name} vanished while it was read"))
                return
            transfer = storage.begin(process, name, found.data, found.size, fsync=False, write=False)
            total += found.size
            hashes.append(hashlib.sha256(found.data).hexdigest())
            self.world.observe("storage.read", path=name, size=found.size, reader=process.name, sha256=hashes[-1])
            clock.call_at(transfer.end_ns, go_on)

        go_on()

    def _version(self, path: str) -> str:
        found = self.storage.read_now(f"{path.rstrip('/')}/{MANIFEST}")
        if found is None:
            return ""
        try:
            return str(json.loads(found.data)["version"])
        except (ValueError, KeyError):
            return ""
