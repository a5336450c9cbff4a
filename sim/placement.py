"""Placement groups, as Ray 2.60 keeps them (shared/spec/engines.md, section 5).

CREATED some 6 ms after they are asked for if they fit, else PENDING until resources are freed; REMOVED rows stay in the
table; a second removal is silent; actors in a removed group are killed. When a node dies, the bundles on it are placed
anew, and the group is PENDING until they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

from protocol.errors import PlacementError
from protocol.ports import Placement, PlacementState
from sim.clock import Entry
from sim.cluster import Cluster, Reservation
from sim.copying import SMALL
from sim.network import CONTROL, Letter
from sim.resources import Resources, fits, show, take, units
from sim.timings import ns
from sim.world import Process

if TYPE_CHECKING:
    from sim.actors import ActorProcess
    from sim.loop import ActorLoop

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclasses.dataclass(slots=True, eq=False)
class Bundle:
    """One bundle, and, once it is placed, what it holds on its node and what of that is free."""

    need: Resources
    held: Reservation | None = None
    free: Resources = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, eq=False)
class PlacementGroup:
    """A row of the table."""

    id: str
    name: str
    bundles: tuple[Bundle, ...]
    strategy: str
    owner: str
    state: PlacementState = "PENDING"
    processes: dict[str, Process] = dataclasses.field(default_factory=dict)
    waiters: list[tuple[ActorLoop, asyncio.Future[None]]] = dataclasses.field(default_factory=list)
    asked: bool = False
    """The control service has got to it (``placement_s`` after it was asked for)."""


@dataclasses.dataclass(slots=True, eq=False)
class PlacementFault:
    """What befalls placement groups whose name matches, while it is armed.

    Attributes:
        kind: create_hangs (PENDING until disarmed), create_late, remove_fails (asking for removal has no effect),
            remove_late, remove_refused (an error, and nothing is done).
        name: of the group; ``*`` and ``?`` match as in a shell.
        delay_s: of the late ones.
        on_hit: told of each group that it meets, once.
    """

    kind: Literal["create_hangs", "create_late", "remove_fails", "remove_late", "remove_refused"]
    name: str = "*"
    delay_s: float = 0.0
    on_hit: Callable[[str], None] | None = None
    met: dict[str, None] = dataclasses.field(default_factory=dict)


class PlacementGroupTable:
    """All groups of a world.

    Args:
        cluster: whose resources they take.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.network = cluster.network
        self.timings = cluster.timings
        self.groups: dict[str, PlacementGroup] = {}
        self._faults: list[PlacementFault] = []
        self._retry: Entry | None = None
        cluster.on_freed.append(self._resources_freed)
        cluster.on_declared_dead.append(self._node_died)
        cluster.world.on_death.append(self._process_died)

    # --- what callers ask for ---

    def create(self, bundles: tuple[tuple[tuple[str, float], ...], ...], strategy: str, name: str, owner: str) -> str:
        """A new group, PENDING. Raises PlacementError (not done): bad strategy or bundles."""
        if strategy not in STRATEGIES:
            raise PlacementError(f"unknown strategy {strategy!r}; use one of {', '.join(STRATEGIES)}")
        if not bundles or not all(bundles):
            raise PlacementError("a placement group needs at least one bundle, and each bundle at least one resource")
        made = tuple(Bundle(units(bundle)) for bundle in bundles)
        group = PlacementGroup(self.world.new_id("pg"), name, made, strategy, owner)
        self.groups[group.id] = group
        self._set_state(group, "PENDING")
        delay = self.world.around("placement", ns(self.timings.placement_s))
        late = self._met("create_late", group)
        if late is not None:
            delay += ns(late.delay_s)
        self.world.clock.call_after(delay, self._ask, group)
        return group.id

    def remove(self, group_id: str, by: str) -> None:
        """Submit the removal. Raises PlacementError (not done): there never was such a group, or it is refused."""
        group = self.group(group_id)
        if self._met("remove_refused", group) is not None:
            raise PlacementError(f"the removal of placement group {group_id} is refused")
        self.world.observe("placement.removal_asked", group=group_id, by=by)
        if group.state == "REMOVED" or self._met("remove_fails", group) is not None:
            return
        delay = self.world.around("removal", ns(self.timings.removal_s))
        late = self._met("remove_late", group)
        if late is not None:
            delay += ns(late.delay_s)
        self.world.clock.call_after(delay, self._removed, group)

    def group(self, group_id: str) -> PlacementGroup:
        """Raises PlacementError (not done): there never was such a group."""
        try:
            return self.groups[group_id]
        except KeyError:
            raise PlacementError(f"there is no placement group {group_id!r}") from None

    async def when_created(self, group_id: str, loop: ActorLoop) -> None:
        """Return when it is CREATED. Raises PlacementError: unknown, or REMOVED before it was."""
        group = self.group(group_id)
        while group.state == "PENDING":
            future: asyncio.Future[None] = loop.create_future()
            group.waiters.append((loop, future))
            try:
                await future
            finally:
                group.waiters = [waiter for waiter in group.waiters if waiter[1] is not future]
        if group.state == "REMOVED":
            raise PlacementError(f"placement group {group_id} is REMOVED")

    def node_of(self, placement: Placement) -> str:
        """The node of a bundle of a CREATED group. Raises PlacementError (not done)."""
        bundle = self._bundle(placement)
        if bundle.held is None:
            raise PlacementError(f"placement group {placement.group_id} is {self.groups[placement.group_id].state}")
        return bundle.held.node

    def enter(self, process: Process, placement: Placement) -> None:
        """A process runs in a group: its removal kills it."""
        self.group(placement.group_id).processes[process.id] = process

    def holds(self, placement: Placement, node: str) -> bool:
        """Whether the group still has that bundle on that node."""
        held = self._bundle(placement).held
        return held is not None and held.node == node

    def reserve(self, placement: Placement, need: Resources) -> Callable[[], None]:
        """Take resources of a bundle; returns how to give them back. Raises PlacementError (not done): not free."""
        bundle = self._bundle(placement)
        if bundle.held is None or not fits(need, bundle.free):
            raise PlacementError(
                f"bundle {placement.bundle} of {placement.group_id} has {show(bundle.free)} free, not {show(need)}"
            )
        take(need, bundle.free)
        held = bundle.held

        def give_back() -> None:
            if bundle.held is held:  # else it was placed anew, or removed: what was taken went with the old place
                take(need, bundle.free, -1)

        return give_back

    def _bundle(self, placement: Placement) -> Bundle:
        bundles = self.group(placement.group_id).bundles
        if not 0 <= placement.bundle < len(bundles):
            raise PlacementError(
                f"placement group {placement.group_id} has no bundle {placement.bundle}; it has {len(bundles)}"
            )
        return bundles[placement.bundle]

    # --- faults ---

    def arm(self, fault: PlacementFault) -> PlacementFault:
        self._faults.append(fault)
        return fault

    def disarm(self, fault: PlacementFault) -> None:
        """Idempotent. Groups that hung are tried again."""
        self._faults = [armed for armed in self._faults if armed is not fault]
        self._resources_freed()

    def _met(self, kind: str, group: PlacementGroup) -> PlacementFault | None:
        for fault in self._faults:
            if fault.kind == kind and fnmatchcase(group.name, fault.name):
                if group.id not in fault.met:
                    fault.met[group.id] = None
                    if fault.on_hit is not None:
                        fault.on_hit(f"{kind} {group.id} {group.name}")
                return fault
        return None

    # --- what the control service does ---

    def _ask(self, group: PlacementGroup) -> None:
        group.asked = True
        self._try(group)

    def _try(self, group: PlacementGroup) -> None:
        if group.state != "PENDING" or not group.asked or self._met("create_hangs", group) is not None:
            return
        plan = self._plan(group)
        if plan is None:
            return
        for bundle, node in plan:
            bundle.held = self.cluster.reserve(node, bundle.need)
            bundle.free = dict(bundle.need)
        self._set_state(group, "CREATED")

    def _plan(self, group: PlacementGroup) -> list[tuple[Bundle, str]] | None:
        """Nodes for the bundles that have none, or None if they do not all fit."""
        open_nodes = [name for name in self.cluster.nodes if self.cluster.alive(name)]
        placed = [bundle.held.node for bundle in group.bundles if bundle.held is not None]
        if group.strategy != "STRICT_PACK":
            return self._fill(group, open_nodes, placed)
        for name in open_nodes:
            if all(node == name for node in placed):
                plan = self._fill(group, [name], placed)
                if plan is not None:
                    return plan
        return None

    def _fill(self, group: PlacementGroup, names: list[str], placed: list[str]) -> list[tuple[Bundle, str]] | None:
        free = {name: dict(self.cluster.nodes[name].free) for name in names}
        here = {name: placed.count(name) for name in names}
        plan: list[tuple[Bundle, str]] = []
        for bundle in group.bundles:
            if bundle.held is not None:
                continue
            fitting = [name for name in names if fits(bundle.need, free[name])]
            if group.strategy == "STRICT_SPREAD":
                fitting = [name for name in fitting if not here[name]]
            if not fitting:
                return None
            if group.strategy == "PACK":
                chosen = max(fitting, key=lambda name: here[name])  # the first of the fullest
            else:
                chosen = min(fitting, key=lambda name: here[name])
            take(bundle.need, free[chosen])
            here[chosen] += 1
            plan.append((bundle, chosen))
        return plan

    def _removed(self, group: PlacementGroup) -> None:
        if group.state == "REMOVED":
            return
        self._set_state(group, "REMOVED")
        for process in list(group.processes.values()):
            self._have_killed(process, f"placement group {group.id} was removed")
        for bundle in group.bundles:
            held, bundle.held, bundle.free = bundle.held, None, {}
            if held is not None:
                self.cluster.release(held)

    def _have_killed(self, process: Process, why: str) -> None:
        """Have its node's raylet kill it: now, or when that is reached again. One declared dead kills nobody."""
        head, node = self.cluster.head, process.node

        def kill() -> None:
            if self.cluster.alive(node):
                process.die("killed", why)

        if self.cluster.in_touch(head, node):
            kill()
        elif self.cluster.alive(node):
            letter = Letter(self.network.next_number(), "removal", False, "")
            self.network.send(self.world.os_of(head), self.world.os_of(node), CONTROL, letter, SMALL, kill)

    def _set_state(self, group: PlacementGroup, state: PlacementState) -> None:
        self.world.observe("placement.state", group=group.id, state=state, owner=group.owner)
        group.state = state
        if state != "PENDING":
            for loop, future in group.waiters:
                loop.deliver(_wake, future)

    def _resources_freed(self) -> None:
        if self._retry is None and any(group.state == "PENDING" for group in self.groups.values()):
            delay = self.world.around("placement_retry", ns(self.timings.placement_retry_s))
            self._retry = self.world.clock.call_after(delay, self._try_all)

    def _try_all(self) -> None:
        self._retry = None
        for group in self.groups.values():
            self._try(group)

    def _node_died(self, name: str, zombies: list[Process]) -> None:
        for group in self.groups.values():
            lost = [bundle for bundle in group.bundles if bundle.held is not None and bundle.held.node == name]
            for bundle in lost:
                assert bundle.held is not None
                self.cluster.release(bundle.held)
                bundle.held, bundle.free = None, {}
            if lost and group.state == "CREATED":
                self._set_state(group, "PENDING")
        self._resources_freed()

    def _process_died(self, process: Process, reason: str) -> None:
        for group in self.groups.values():
            group.processes.pop(process.id, None)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SimPlacementGroups:
    """The ``PlacementGroups`` port of one process."""

    def __init__(self, table: PlacementGroupTable, process: ActorProcess) -> None:
        self._table = table
        self._process = process

    async def create(self, bundles: tuple[tuple[tuple[str, float], ...], ...], *, strategy: str, name: str) -> str:
        await self._process.living()
        return self._table.create(bundles, strategy, name, self._process.name)

    async def wait_created(self, group_id: str, timeout_s: float) -> None:
        await self._process.living()
        try:
            async with asyncio.timeout(timeout_s):
                await self._table.when_created(group_id, self._process.loop)
        except TimeoutError:
            raise PlacementError(f"placement group {group_id} is still PENDING after {timeout_s} s") from None

    async def remove(self, group_id: str) -> None:
        await self._process.living()
        self._table.remove(group_id, self._process.name)

    async def table(self) -> dict[str, PlacementState]:
        await self._process.living()
        return {group.id: group.state for group in self._table.groups.values()}
