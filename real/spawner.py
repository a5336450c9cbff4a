"""Starting actors on Ray: names, placement, construction, and what is left when one of them fails."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from protocol.errors import NameTaken, Outcome, PlacementError, SpawnFailed, bare, portable
from protocol.ports import Placement
from real.caller import Caller, died
from real.evidence import ProcessLog
from real.handles import RealHandle, Reply
from real.nodes import living_nodes, name_of
from real.placement import POLL_S, RayPlacementGroups
from real.registry import NAMESPACE, ProcessIdentity, RunConfig, SpawnSpec, ray_name

# Ray's limit counts control calls too, which must never wait: out of reach, and data calls are bounded by the host.
MAX_CONCURRENCY = 1_000_000


class Spawner:
    """Starts actors on behalf of one process.

    Args:
        me: that process, by which the registry knows whether a reserved name is still being started.
        registry: Ray handle of the run's ``NameRegistry``.
    """

    def __init__(
        self,
        run: RunConfig,
        me: ProcessIdentity,
        log: ProcessLog,
        caller: Caller,
        registry: Any,
        groups: RayPlacementGroups,
    ) -> None:
        self._run = run
        self._me = me
        self._log = log
        self._caller = caller
        self._registry = registry
        self._groups = groups

    async def start(self, spec: SpawnSpec, name: str) -> RealHandle:
        """Start an actor from its spec.

        A wait that is given up leaves the start running: it must still free the name if it fails.
        """
        task = self._caller.keep(self._start(spec, name), name=f"spawn of {name}")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(task)

    async def _start(self, spec: SpawnSpec, name: str) -> RealHandle:
        run = self._run.run
        own_name = None if self._me.incarnation == 0 else ray_name(run, self._me.name, self._me.incarnation)
        reserved = await self._registry.reserve.remote(run, name, spec, own_name)
        if reserved is None:
            raise NameTaken(f"a living actor is named {name!r}")
        incarnation, number = reserved
        handle = RealHandle(self._caller, name, incarnation, spec.calls, spec.streams)
        try:
            strategy = await self.scheduling(spec)
            identity = ProcessIdentity(name, incarnation, number, spec.calls, spec.streams)
            self._caller.adopt(handle, self._create(handle, identity, strategy))
            answer = await self._booted(handle, spec)
        except BaseException:
            await self._discard(handle)
            raise
        self._log.merge(answer.lc)
        if answer.what == "error":
            await self._discard(handle)
            raise SpawnFailed(
                f"actor {name!r} ({spec.cls}) did not start: {bare(answer.value)}", attached=(answer.value,)
            )
        return handle

    def _create(self, handle: RealHandle, identity: ProcessIdentity, strategy: Any) -> Any:
        from real.actors import ActorHost

        # Detached, because Ray ends an actor with its maker otherwise, and a component outlives its spawner.
        remote = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=MAX_CONCURRENCY)(ActorHost)
        return remote.options(
            name=ray_name(self._run.run, handle.name, handle.incarnation),
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=strategy,
        ).remote(self._run, identity)

    def is_removed(self, group_id: str) -> bool:
        """Whether a placement group is gone, so that nothing will ever start in it."""
        return self._groups.state(group_id) == "REMOVED"

    async def scheduling(self, spec: SpawnSpec) -> Any:
        """Ray's strategy for a spec. Everything that would let Ray hang for ever is refused here."""
        given = self._run.nodes
        nodes = living_nodes(given) if spec.node is not None else {}
        if spec.node is not None and spec.node not in nodes:
            raise PlacementError(f"no living node is named {spec.node!r}; there are {', '.join(nodes)}")
        if spec.group_id is None:
            return None if spec.node is None else NodeAffinitySchedulingStrategy(nodes[spec.node], soft=False)
        while self._groups.state(spec.group_id) == "PENDING":
            await asyncio.sleep(POLL_S)
        await self._groups.wait_created(spec.group_id, 0)
        placement = Placement(spec.group_id, spec.bundle)
        holder = name_of(self._groups.node_of(placement), given)
        if spec.node is not None and spec.node != holder:
            raise PlacementError(f"{placement} is on node {holder}, not on {spec.node}")
        return PlacementGroupSchedulingStrategy(
            placement_group=self._groups.group(spec.group_id), placement_group_bundle_index=spec.bundle
        )

    async def _booted(self, handle: RealHandle, spec: SpawnSpec) -> Reply:
        """The answer of ``boot``. Watches the group meanwhile: on a removed one Ray would never answer."""
        boot = awaited(self._caller.peer(handle).boot.remote(spec, self._log.latest, self._log.lc))
        while not boot.done():
            await asyncio.wait({boot}, timeout=0.1 if spec.group_id is not None else None)
            if not boot.done() and spec.group_id is not None and self._groups.state(spec.group_id) == "REMOVED":
                boot.cancel()
                raise PlacementError(f"placement group {spec.group_id} was removed while {handle.name!r} started")
        try:
            answer: Reply = boot.result()
        except RayActorError as error:
            reason = died(handle, "start", Outcome.UNKNOWN)
            raise SpawnFailed(f"actor {handle.name!r} died while it started", attached=(reason,)) from error
        except RayError as error:
            raise SpawnFailed(f"Ray could not start actor {handle.name!r}", attached=(portable(error),)) from error
        return answer

    async def _discard(self, handle: RealHandle) -> None:
        """End what is left of a spawn that failed, and free the name."""
        await self._registry.condemn.remote(self._run.run, handle.name, handle.incarnation)
        peer = self._caller.peer(handle)
        self._caller.bury(handle)
        if peer is not None:
            ray.kill(peer)


def awaited(asked: Any) -> asyncio.Future[Any]:
    """The answer to a call of Ray's. Who is cancelled leaves it behind, and asyncio would print its error."""
    answer = asyncio.ensure_future(asked)
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return answer


def spec_of(
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    data_calls: int,
    node: str | None,
    placement: Placement | None,
) -> SpawnSpec:
    """Serialise a spawn. Raises TypeError for a class whose methods a handle would hide."""
    calls, streams = remote_methods(cls)
    payload, buffers = pack((cls, args, kwargs))
    group, bundle = (None, 0) if placement is None else (placement.group_id, placement.bundle)
    qualified = f"{cls.__module__}.{cls.__qualname__}"
    return SpawnSpec(qualified, payload, buffers, calls, streams, data_calls, node, group, bundle)


def remote_methods(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """The names of a class's remote methods: (calls, async generators).

    Raises:
        TypeError: a remote method has a name that a handle uses itself, so that it could never be called.
    """
    calls, streams = set(), set()
    for name in dir(cls):
        if name.startswith("_"):
            continue
        member: Callable[..., Any] = inspect.getattr_static(cls, name)
        member = getattr(member, "__func__", member)
        if inspect.isasyncgenfunction(member):
            streams.add(name)
        elif inspect.iscoroutinefunction(member):
            calls.add(name)
    hidden = sorted((calls | streams) & {"name", "incarnation", "ordered", "cancel"})
    if hidden:
        raise TypeError(f"{cls.__qualname__}.{hidden[0]}: a handle has a member of this name; rename the method")
    return frozenset(calls), frozenset(streams)


def pack(value: Any) -> tuple[bytes, tuple[bytes, ...]]:
    """Pickle with buffers out of band: arrays come back read-only, as they do from Ray's own messages."""
    buffers: list[Any] = []
    payload = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return payload, tuple(buffer.raw().tobytes() for buffer in buffers)
