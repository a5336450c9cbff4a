"""The guard of a run on a cluster that somebody else has started: it ends there what the run's warden cannot reach.

On a cluster of the run's own the warden ends every process, and placement groups end with Ray. Elsewhere the run's
detached actors and its groups would outlive a driver that was killed, and so would processes and folders on machines
that its warden does not reach. The guard waits for the end of an actor that Ray ends with the driver. Then it does on
every node what the warden does on the driver's machine, has Ray forget what it still knows of the run, and ends itself.
At the normal end the driver asks it for the same, so there is no second way that is never tried.

It needs nothing of the run to do that: no registry, which may not be there yet, or no more; and it carries no mark, by
which the warden would end it before its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import Any, Final, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from real.engines.leftovers import clear_engine_folders, clear_leftovers
from real.nodes import name_nodes
from real.object_store import ledger_name
from real.placement import groups_of, remove_groups_of
from real.registry import NAMESPACE, registry_name
from real.warden import MARK, Sweeper

_POSTED_WITHIN_S: Final = 60.0
_NODE_WITHIN_S: Final = 45.0  # Ray starts a process there first; a sweep itself takes 20 s at most
_ENDED_WITHIN_S: Final = 150.0
_AGAIN_S: Final = 1.0
_UNMARKED: Final = {"env_vars": {MARK: ""}}
"""Whatever ends a run must not be ended by its mark."""


class Left(NamedTuple):
    """What a run may leave on a cluster: names by which it is found.

    ``registry``: Ray name of the registry of its processes. ``folder``: of the run, while it is there.
    """

    run: str
    registry: str
    folder: str


class Life:
    """Lives as long as the driver that made it."""

    def ready(self) -> None:
        """Answers when it is there."""

    async def stay(self) -> None:
        await asyncio.Event().wait()


class Guard:
    """Waits for the end of the driver, and then ends the run. It waits from its birth on: a driver that is killed now
    would never ask for it.

    Args:
        left: what to end.
        life: Ray handle of a `Life` that the driver owns.
    """

    def __init__(self, left: Left, life: Any) -> None:
        self._left = left
        self._life = life
        self._one_at_a_time = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def ready(self) -> None:
        """Answers when it is there."""

    def end(self) -> list[str]:
        """End what the run has left; returns a line for each thing that would not."""
        with self._one_at_a_time:
            return end_of(self._left)

    def _watch(self) -> None:
        try:
            _until_death(self._life)
            overdue = threading.Timer(2 * _ENDED_WITHIN_S, os._exit, (1,))  # whatever Ray does not answer
            overdue.daemon = True
            overdue.start()
            self.end()
        finally:
            os._exit(0)


def _until_death(life: Any) -> None:
    """Returns when a `Life` that has been there is dead. Any other error of Ray's says nothing of the driver."""
    while True:
        try:
            ray.get(life.stay.remote())
        except RayError as error:
            if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                return
        time.sleep(_AGAIN_S)  # it may be out of reach for a while; Ray answers at once then


def new_life() -> Any:
    """A `Life` of the calling driver, on the driver's node: the loss of another one does not end it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, max_restarts=0)(Life).options(scheduling_strategy=here).remote()


class Posted(NamedTuple):
    """A guard at its post: Ray handles of it and of the driver's `Life`, and what it is to end."""

    guard: Any
    life: Any
    left: Left


def post_guard(run: str, folder: str) -> Posted:
    """Start the guard of a run; returns what ``relieve`` takes. Call it in the driver, before anything is spawned.

    Raises:
        RayError: the cluster does not start it; nothing of it is left.
    """
    left, life = Left(run, registry_name(), folder), new_life()
    try:  # before there is a guard, which would wait for ever for the end of one that never came
        ray.get(life.ready.remote(), timeout=_POSTED_WITHIN_S)
    except BaseException:
        ray.kill(life)
        raise
    head = NodeAffinitySchedulingStrategy(name_nodes()[0][1], soft=True)  # who loses that node has no cluster
    guard = (
        ray.remote(num_cpus=0, max_restarts=0)(Guard)
        .options(
            name=f"{run}/guard", namespace=NAMESPACE, lifetime="detached", runtime_env=_UNMARKED,
            scheduling_strategy=head,
        )
        .remote(left, life)
    )  # fmt: skip
    try:
        ray.get(guard.ready.remote(), timeout=_POSTED_WITHIN_S)
    except BaseException:
        for actor in (guard, life):
            ray.kill(actor)
        raise
    return Posted(guard, life, left)


def relieve(posted: Posted) -> list[str]:
    """Have the guard end what the run has left on the cluster, and end it. Returns a line for each thing that stays."""
    try:
        still = _ended_by(posted)
    except RayError as error:
        still = [f"what the run has left on its cluster was not ended: {type(error).__name__}"]
    with contextlib.suppress(RayError):
        for actor in (posted.guard, posted.life):
            ray.kill(actor)
    return still


def _ended_by(posted: Posted) -> list[str]:
    try:
        still: list[str] = ray.get(posted.guard.end.remote(), timeout=_ENDED_WITHIN_S)
        return still
    except RayActorError:  # somebody has killed it: then its work is the driver's
        return end_of(posted.left)


def end_of(left: Left) -> list[str]:
    """End what a run has left on the cluster: processes, actors, placement groups, folders of engines, shared memory.

    Returns:
        A line for each thing that is still there.
    """
    deadline = time.monotonic() + _ENDED_WITHIN_S - 2 * _NODE_WITHIN_S
    while True:
        names = _actors_of(left)
        still = _end_on_every_node(left)
        for name in names:  # also those that have no process yet
            with contextlib.suppress(ValueError, RayError):  # Ray has noticed its death
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        groups = [name for name, _ in groups_of(left.run)]
        remove_groups_of(left.run)
        if not names and not groups:  # another look otherwise: what was being made just then
            return still
        if time.monotonic() > deadline:
            return still + [f"actor {name}" for name in names] + [f"placement group {name}" for name in groups]


def _actors_of(left: Left) -> list[str]:
    """Ray names of the run's actors, dead ones left out as far as Ray knows."""
    named = [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == NAMESPACE]
    more = (left.registry, ledger_name(left.run))
    guard = f"{left.run}/guard"
    return [name for name in named if name in more or (name.startswith(f"{left.run}/") and name != guard)]


def _end_on_every_node(left: Left) -> list[str]:
    remote = ray.remote(num_cpus=0, max_retries=0)(end_here)
    sent = {}
    for row in ray.nodes():
        if row["Alive"]:
            there = NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
            asked = remote.options(scheduling_strategy=there, runtime_env=_UNMARKED).remote(left.run, left.folder)
            sent[asked] = row["NodeManagerAddress"]
    deadline = time.monotonic() + _NODE_WITHIN_S
    still = []
    for asked, where in sent.items():
        try:
            still += [f"{where}: {line}" for line in ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))]
        except RayError as error:
            still.append(f"{where}: nobody looked for what is left there ({type(error).__name__})")
    return still


def end_here(run: str, folder: str) -> list[str]:
    """End what a run has left on this machine, as its warden does where the driver was."""
    sweeper = Sweeper(run, "")
    still = [f"process {pid} did not end: {command}" for pid, command in sweeper.sweep().left]
    clear_leftovers(folder)
    clear_engine_folders(run)
    sweeper.remove()
    return still
