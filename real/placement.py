"""Ray's placement groups behind the ``PlacementGroups`` port.

Ray 2.60 places a group in two steps: raylets put its bundles aside, then they are told to commit them. What was put
aside for a group that is removed between the two is never given back (ray-project/ray issue 64693: ``CommitAllBundles``
gives back what was committed, and nothing was). The row says REMOVED, the GPUs are gone until the raylet ends, and
whoever asks for all of a node is PENDING for ever. So nothing is removed before it has settled: ``until_settled``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from protocol.errors import PlacementError
from protocol.ports import Placement, PlacementState
from real.evidence import ProcessLog
from real.faults.placement import NOWHERE, GroupNotes, Request

POLL_S = 0.01  # GCS answers a look-up in under a millisecond; a group becomes CREATED some 6 ms after it was asked for

SETTLES_WITHIN_S: Final = 5.0
"""Ray places a group in some 6 ms; one that takes so long has lost a node, and is removed as it is."""

# Ray has transitional states; to a caller of the port a group that cannot be used yet is PENDING.
_STATES: dict[str, PlacementState] = {"CREATED": "CREATED", "REMOVED": "REMOVED"}


class RayPlacementGroups:
    """The ``PlacementGroups`` port. A group belongs to the run, not to its maker: it outlives the maker's death.

    Args:
        run: id of the run; ``table`` shows the groups of this run alone.
        log: where the calling process's evidence goes.
        new_id: makes unique names, which Ray asks for.
        notes: what faults have done to the run's groups, and what has been told of them.
    """

    def __init__(self, run: str, log: ProcessLog, new_id: Any, notes: GroupNotes) -> None:
        self._prefix = f"{run}/"
        self._log = log
        self._new_id = new_id
        self._notes = notes
        self._seen: dict[str, PlacementState] = {}

    async def create(self, bundles: tuple[tuple[tuple[str, float], ...], ...], *, strategy: str, name: str) -> str:
        ray_name = f"{self._prefix}{self._new_id('pg')}/{name}"
        for fault in self._log.faults.active("placement_stuck"):
            if self._log.faults.claim(fault, f"create_hangs {name}"):
                group_id = _ask(tuple((*bundle, (NOWHERE, 1.0)) for bundle in bundles), strategy, ray_name)
                self._notes.note_stuck(group_id, Request(bundles, strategy, ray_name))
                break
        else:
            group_id = _ask(bundles, strategy, ray_name)
        self._observe(group_id, "PENDING")
        return group_id

    async def wait_created(self, group_id: str, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (state := self.state(group_id)) != "CREATED":
            if state == "REMOVED":
                raise PlacementError(f"placement group {group_id} is REMOVED")
            if loop.time() >= deadline:
                raise PlacementError(f"placement group {group_id} is still {state} after {timeout_s} s")
            await asyncio.sleep(min(POLL_S, timeout_s))

    async def remove(self, group_id: str) -> None:
        group = self.group(group_id)
        for fault in self._log.faults.active("removal_refused"):
            if self._log.faults.claim(fault, f"remove_refused {group_id}", once=group_id):
                raise PlacementError(f"the removal of placement group {group_id} is refused")
        for _ in until_settled(lambda: placement_group_table(group)):
            await asyncio.sleep(POLL_S)
        self._log.emit("placement.removal_asked", group=group_id, by=self._log.actor)
        for fault in self._log.faults.active("removal_fails"):
            late_s = fault.params.get("late_s")
            what = "remove_fails" if late_s is None else "remove_late"
            if self._log.faults.claim(fault, f"{what} {group_id}", once=group_id):
                if late_s is not None:
                    self._notes.note_removal(group_id, late_s)
                return
        remove_placement_group(group)

    def try_again(self) -> None:
        """Ask anew for every group that a fault has kept from being placed, and that was not removed meanwhile."""
        for group_id, request in self._notes.stuck().items():
            if self.state(group_id) != "PENDING":
                self._notes.forget(group_id)
                continue
            first = self.group(group_id)
            # A name of its own, for Ray knows the first one a while longer; it sorts where the first one did.
            self._notes.replaced(group_id, _ask(request.bundles, request.strategy, request.name + "~"))
            _remove(first)

    def remove_due(self) -> bool:
        """Remove the groups whose late removal is due; whether others wait."""
        for group_id in self._notes.due():
            _remove(self.group(group_id))
        return self._notes.removal_waits()

    async def table(self) -> dict[str, PlacementState]:
        rows = placement_group_table()
        first_ids = self._notes.first_ids()
        table: dict[str, PlacementState] = {}
        for ray_id, row in sorted(rows.items(), key=lambda item: item[1]["name"]):
            group_id = first_ids.get(ray_id, ray_id)
            if row["name"].startswith(self._prefix) and self._notes.ray_id(group_id) == ray_id:
                table[group_id] = self._observe(group_id, _STATES.get(row["state"], "PENDING"))
        return table

    def state(self, group_id: str) -> PlacementState:
        """Raises PlacementError for a group that was never made."""
        row = self._row(group_id)
        return self._observe(group_id, _STATES.get(row["state"], "PENDING"))

    def node_of(self, placement: Placement) -> str:
        """Ray's id of the node that holds a bundle of a CREATED group. Raises PlacementError: no such bundle."""
        nodes = self._row(placement.group_id)["bundles_to_node_id"]
        if placement.bundle not in nodes:
            raise PlacementError(
                f"placement group {placement.group_id} has no bundle {placement.bundle}; it has {len(nodes)} bundles"
            )
        node: str = nodes[placement.bundle]
        return node

    def _row(self, group_id: str) -> dict[str, Any]:
        row: dict[str, Any] = placement_group_table(self.group(group_id))
        if not row or not row.get("name", "").startswith(self._prefix):
            raise PlacementError(f"there is no placement group {group_id} in this run")
        return row

    def group(self, group_id: str) -> PlacementGroup:
        """Ray's object for an id; it says nothing about the group's existence."""
        try:
            return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(self._notes.ray_id(group_id))))
        except ValueError as error:
            raise PlacementError(f"{group_id!r} is no id of a placement group") from error

    def _observe(self, group_id: str, state: PlacementState) -> PlacementState:
        if self._seen.get(group_id) != state:
            self._seen[group_id] = state
            if self._notes.is_news(group_id, state):  # who comes to a group late has not seen it change
                self._log.emit("placement.state", group=group_id, state=state, owner=self._log.actor)
        return state


def _ask(bundles: tuple[tuple[tuple[str, float], ...], ...], strategy: str, name: str) -> str:
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy, name=name, lifetime="detached")
    group_id: str = group.id.hex()
    return group_id


def until_settled(look: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Yields as long as a removal would come while Ray places the group; the caller waits ``POLL_S`` each time.

    A group that waits for others to go is tried again every second or so, and its row does not say whether a trial is
    under way: it has settled when it is seen twice after the same trial. What is left is a trial that begins, and finds
    room, between the last look and the removal a millisecond later.

    Args:
        look: the group's row in Ray's table; empty where there is none.
    """
    ends = time.monotonic() + SETTLES_WITHIN_S
    tried = None
    while (row := look()) and row["state"] not in ("CREATED", "REMOVED") and time.monotonic() < ends:
        how, trial = row["stats"]["scheduling_state"], row["stats"]["scheduling_attempt"]
        if row["state"] != "PREPARED":
            if how == "INFEASIBLE":  # not tried again until a node joins
                return
            if how in ("NO_RESOURCES", "FAILED_TO_COMMIT_RESOURCES"):
                if trial == tried:
                    return
                tried = trial
        yield


def _remove(group: PlacementGroup) -> None:
    for _ in until_settled(lambda: placement_group_table(group)):
        time.sleep(POLL_S)
    remove_placement_group(group)


def groups_of(run: str) -> list[tuple[str, str]]:
    """(name, state) of the groups of a run that are not REMOVED."""
    rows = placement_group_table().values()
    named = ((row["name"].removeprefix(f"{run}/"), row["state"]) for row in rows if row["name"].startswith(f"{run}/"))
    return sorted(group for group in named if group[1] != "REMOVED")


def remove_groups_of(run: str) -> None:
    """Remove the groups that a run left behind; they belong to no process and would hold their resources for ever."""
    for group_id, row in placement_group_table().items():
        if row["name"].startswith(f"{run}/") and row["state"] != "REMOVED":
            _remove(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
