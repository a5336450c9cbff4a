"""Every serving engine of a simulated world: launched and ended, with its port, its GPUs and its weights.

Each is a `sim.engine_process.EngineProcess`; callers reach them through `sim.engine_client`. Weights are really read
from storage: the hash that an engine serves is that of the bytes that were there. A torn file loads without a
complaint, as one whose tail was never written does; only its hash tells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.errors import NameTaken
from protocol.ports import EngineSpec, Placement
from protocol.training.checkpoint import MANIFEST, hash_weights
from sim.answer_faults import AnswerFault
from sim.engine_process import EngineProcess
from sim.engine_transfers import Group
from sim.network import Network
from sim.profiles import load_profile
from sim.resources import units
from sim.world import World

if TYPE_CHECKING:
    from sim.cluster import Cluster
    from sim.engine_cost import EngineProfile
    from sim.placement import PlacementGroupTable
    from sim.storage import SharedStorage

PageFault = Callable[[EngineProcess, str, int, str], tuple[int, str]]
"""Takes (process, route, status, body) of a page and gives what the client is to see."""

_FIRST_PORT = 30000


@dataclass(slots=True)
class Weights:
    """What a loader found at a path. ``failure`` says why it cannot be loaded, empty when it can."""

    size_bytes: int = 0
    weight_hash: str = ""
    version: str = ""
    failure: str = ""


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
    _count: int = 0

    def next_index(self) -> int:
        self._count += 1
        return self._count

    def start(self, spec: EngineSpec, name: str, node: str | None, placement: Placement | None) -> EngineProcess:
        """Start a process. Raises NameTaken or PlacementError (not done)."""
        old = self.processes.get(name)
        if old is not None and old.alive:
            raise NameTaken(f"an engine named {name} is alive (incarnation {old.incarnation})")
        profile = self._profiles.get(spec.profile)
        if profile is None:
            profile = self._profiles[spec.profile] = load_profile(spec.profile)
        options = spec.options
        if options is not None and options.startup_s is not None:
            profile = profile.replace(startup_ns=round(options.startup_s * 1e9))
        where, give_back = self._take_gpus(spec.num_gpus, node, placement)
        port = self._free_port(where)
        process = EngineProcess(self, name, self.world.next_incarnation(name), where, port, profile, options)
        self.cluster.enter(process)
        if placement is not None:
            self.world.observe(
                "placement.entered", group=placement.group_id, process=name, process_inc=process.incarnation
            )
            self.groups.enter(process, placement)
        self.processes[name] = process
        self._held[process.id] = give_back
        self.specs[name] = (spec, node, placement)
        self.world.register(process, cls=f"SimEngine({spec.profile})")
        if options is not None:
            process.report_options(options)
        if spec.weights_path:
            self.read_weights(process, spec.weights_path, lambda found: self._start_with(process, found))
        else:
            process.engine.start()
        return process

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
            self.groups.reserve(placement, need)
            return where, lambda: self.groups.release(placement, need)
        if node is None:
            # The emptiest living node, the first of equals.
            living = self.cluster.living()
            node = max(living, key=lambda name: self.cluster.nodes[name].free.get("GPU", 0), default=None)
        reservation = self.cluster.reserve(self.cluster.choose(node, self.cluster.head), need)
        return reservation.node, lambda: self.cluster.release(reservation)

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
        found = [p for p in self.processes.values() if p.host == host and p.port == port]
        return next((p for p in found if p.alive), found[-1] if found else None)

    def freed(self, process: EngineProcess) -> None:
        """A process ended: its port and its GPUs are free."""
        self._ports[process.node].discard(process.port)
        self._held.pop(process.id)()

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

        next_shard()

    def _version(self, path: str) -> str:
        found = self.storage.read_now(f"{path.rstrip('/')}/{MANIFEST}")
        if found is None:
            return ""
        try:
            return str(json.loads(found.data)["version"])
        except (ValueError, KeyError):
            return ""
