"""The guard of a run on a cluster that somebody else has started: it ends the run there when the driver is gone.

On a cluster of the run's own the warden ends every process, and placement groups end with Ray. Elsewhere they would
outlive a driver that was killed, on machines that its warden does not reach. The guard waits for an actor that Ray ends
with the driver; then it ends the run's actors and engines, and removes its placement groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from real.placement import remove_groups_of
from real.registry import NAMESPACE, REGISTRY

_SIGNAL_S: Final = 10.0


class Life:
    """Lives as long as the driver that made it."""

    async def stay(self) -> None:
        await asyncio.Event().wait()


class Guard:
    """Waits for the end of the driver, and then ends the run.

    Args:
        run: id of the run.
        life: Ray handle of a `Life` that the driver owns.
    """

    def __init__(self, run: str, life: Any) -> None:
        self._run = run
        self._life = life

    async def begin(self) -> None:
        """Start waiting; returns at once."""
        self._waiting = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        with contextlib.suppress(RayActorError):
            await self._life.stay.remote()
        await asyncio.to_thread(end_of, self._run)
        os._exit(0)


def post_guard(run: str) -> Any:
    """Start the guard of a run; returns what ``relieve`` takes. Call it in the driver, before anything is spawned."""
    life = ray.remote(num_cpus=0, max_restarts=0)(Life).remote()
    remote = ray.remote(num_cpus=0, max_restarts=0)(Guard)
    guard = remote.options(name=f"{run}/guard", namespace=NAMESPACE, lifetime="detached").remote(run, life)
    ray.get(guard.begin.remote(), timeout=60)
    return guard, life


def relieve(posted: Any) -> None:
    """End the guard, after the run has ended by itself; and the registry of names, if this was its last run."""
    for actor in posted:
        ray.kill(actor)
    with contextlib.suppress(ValueError, RayError):
        registry = ray.get_actor(REGISTRY, namespace=NAMESPACE)
        if not ray.get(registry.runs.remote(), timeout=10):
            ray.kill(registry)


def end_of(run: str) -> None:
    """End what a run has left on the cluster: actors, engines, stopped processes, placement groups."""
    registry = ray.get_actor(REGISTRY, namespace=NAMESPACE)
    remove_groups_of(run)
    for name, pid, node in ray.get(registry.close.remote(run)):
        if pid:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            sent = ray.remote(num_cpus=0)(_kill).options(scheduling_strategy=there).remote(pid)
            with contextlib.suppress(RayError):  # its node is gone, and it with it
                ray.get(sent, timeout=_SIGNAL_S)
        with contextlib.suppress(ValueError):  # Ray has noticed its death already
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    if not ray.get(registry.runs.remote()):
        ray.kill(registry)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
