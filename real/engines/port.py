"""The ``Engines`` port on Ray: engines by name, each behind an `EngineHost`."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal as signals
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from protocol.errors import NameTaken, PlacementError, SpawnFailed, portable
from protocol.messages import EngineAddress
from protocol.ports import EngineSpec, Placement, Signal
from real.caller import Caller
from real.engines.client import RealEngineClient, Sessions
from real.engines.host import Booted, Description, EngineHost
from real.engines.traffic import Traffic
from real.engines.tree import Part
from real.evidence import ProcessLog
from real.nodes import living_nodes
from real.registry import NAMESPACE, ProcessIdentity, RunConfig, SpawnSpec, ray_name
from real.spawner import Spawner, awaited

_MAX_CONCURRENCY = 1_000_000
_PLACED_WITHIN_S = 120.0  # GPUs are free when Ray has noticed a death; sixty hosts that start at once take a minute
_TERMINATED_WITHIN_S = 5.0

SendSignal = Callable[[tuple[int, str], signals.Signals], Awaitable[None]]
"""Sends a signal to a process, given as (pid, node)."""


class Launched(NamedTuple):
    """How the latest incarnation of an engine was launched."""

    incarnation: int
    spec: EngineSpec
    node: str | None
    placement: Placement | None


class RealEngines:
    """Engines as one process sees them.

    Args:
        me: that process.
        registry: Ray handle of the run's ``NameRegistry``.
        send_signal: how to reach a process that its host does not reach any more.
        traffic: what may happen to this process's messages to engines.
    """

    def __init__(
        self,
        run: RunConfig,
        me: ProcessIdentity,
        log: ProcessLog,
        caller: Caller,
        registry: Any,
        spawner: Spawner,
        send_signal: SendSignal,
        traffic: Traffic,
    ) -> None:
        assert run.engines is not None
        self._settings = run.engines
        self._run = run
        self._me = me
        self._log = log
        self._caller = caller
        self._registry = registry
        self._spawner = spawner
        self._send_signal = send_signal
        self._sessions = Sessions(run.token)
        self._traffic = traffic

    # ---- the port ----

    async def launch(
        self, spec: EngineSpec, *, name: str, node: str | None = None, placement: Placement | None = None
    ) -> EngineAddress:
        """Start an engine; see ``protocol.ports.Engines``. A wait that is given up leaves the start running.

        Raises:
            NameTaken: *not done*.
            PlacementError: *not done*. No such node or group, or its GPUs did not become free in time.
            SpawnFailed: the engine's host died before it could say where the engine is.
        """
        task = self._caller.keep(self._launch(spec, name, node, placement), name=f"launch of {name}")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(task)

    async def alive(self, name: str) -> bool:
        latest = await self._latest(name)
        if latest is None:
            return False
        if await self._registry.whereabouts.remote(self._run.run, name, latest.incarnation) is not None:
            return True
        await self._report(name, latest.incarnation)
        return False

    async def terminate(self, name: str) -> None:
        await self._end(name, recorded=True)

    async def discard(self, name: str) -> None:
        """As ``terminate``, after the evidence has ended: nothing is recorded."""
        await self._end(name, recorded=False)

    async def _end(self, name: str, *, recorded: bool) -> None:
        latest = await self._latest(name)
        if latest is None:
            return
        run, incarnation = self._run.run, latest.incarnation
        where = await self._registry.whereabouts.remote(run, name, incarnation)
        if where is None:
            return await self._report(name, incarnation, recorded=recorded)
        host = self._host(name, incarnation)
        if host is not None:
            try:
                await asyncio.wait_for(host.terminate.remote(self._log.lc, recorded), _TERMINATED_WITHIN_S)
                return
            except (RayError, TimeoutError):
                pass  # it is dead, or stopped: the kernel ends it, and the engine with it
        with contextlib.suppress(RayError):  # its node is dead, and nobody waits for it any more
            await self._send_signal(where, signals.SIGKILL)
        # Only now: as long as nobody has reached it and its node is not declared dead, it lives and has its name.
        await self._report(name, incarnation, recorded=recorded)

    def client(self, address: EngineAddress) -> RealEngineClient:
        return RealEngineClient(
            address, self._sessions, self._caller, self._log, self._settings.block_tokens, self._traffic
        )

    # ---- for faults ----

    async def signal(self, name: str, signal: Signal, part: Part | None = None) -> None:
        """Send a real signal to the living engine of that name: to one part, or to all of it.

        Raises LookupError: no such living engine, or it has no such part.
        """
        host = await self._living_host(name)
        try:
            await host.signal.remote(signal, part, self._log.lc)
        except RayActorError as error:
            raise LookupError(f"engine {name} died meanwhile") from error
        except ray.exceptions.RayTaskError as error:
            raise LookupError(str(error.cause)) from error

    async def lost(self, name: str, part: Part) -> None:
        """Tell the host of a living engine that a fault has killed a child of it. Raises LookupError."""
        host = await self._living_host(name)
        try:
            await host.lost.remote(part)
        except RayActorError as error:
            raise LookupError(f"engine {name} died meanwhile") from error

    async def describe(self, name: str) -> Description:
        """Ports, processes and generations in flight of the living engine. Raises LookupError: there is none."""
        host = await self._living_host(name)
        try:
            found: Description = await host.describe.remote()
            return found
        except RayActorError as error:
            raise LookupError(f"engine {name} died meanwhile") from error

    async def launched(self, name: str) -> Launched:
        """How the latest engine of that name was launched, dead or alive. Raises LookupError: there was none."""
        latest = await self._latest(name)
        if latest is None:
            raise LookupError(f"no engine is named {name!r}")
        return latest

    async def close(self) -> None:
        """Give back what the clients of this process hold."""
        await self._sessions.close()

    # ---- inside ----

    async def _launch(
        self, spec: EngineSpec, name: str, node: str | None, placement: Placement | None
    ) -> EngineAddress:
        run = self._run.run
        wanted = self._spawn_spec(spec, node, placement)
        own_name = None if self._me.incarnation == 0 else ray_name(run, self._me.name, self._me.incarnation)
        reserved = await self._registry.reserve.remote(run, name, wanted, own_name)
        if reserved is None:
            raise NameTaken(f"an engine named {name} is alive")
        incarnation, number = reserved
        actor: Any = None
        try:
            strategy = await self._spawner.scheduling(wanted)
            self._check_room(spec.num_gpus, wanted)
            actor = self._create(spec, ProcessIdentity(name, incarnation, number), strategy)
            booted = await self._booted(actor, name, spec, wanted)
        except BaseException:
            await self._registry.condemn.remote(run, name, incarnation)
            if actor is not None:
                ray.kill(actor)
            raise
        self._log.merge(booted.lc)
        if placement is not None:
            self._log.emit("placement.entered", group=placement.group_id, process=name, process_inc=incarnation)
        return EngineAddress(name, incarnation, booted.host, booted.port)

    def _spawn_spec(self, spec: EngineSpec, node: str | None, placement: Placement | None) -> SpawnSpec:
        group, bundle = (None, 0) if placement is None else (placement.group_id, placement.bundle)
        payload = pickle.dumps((spec, node, placement))
        return SpawnSpec(
            f"{self._settings.kind}({spec.profile})", payload, (), frozenset(), frozenset(), 0, node, group, bundle
        )

    def _create(self, spec: EngineSpec, identity: ProcessIdentity, strategy: Any) -> Any:
        remote = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_MAX_CONCURRENCY)(EngineHost)
        return remote.options(
            name=ray_name(self._run.run, identity.name, identity.incarnation),
            namespace=NAMESPACE,
            lifetime="detached",
            num_gpus=spec.num_gpus,
            scheduling_strategy=strategy or "SPREAD",
        ).remote(self._run, identity, self._settings, spec)

    def _check_room(self, num_gpus: float, wanted: SpawnSpec) -> None:
        """Refuse at once what no waiting would bring."""
        node = None if wanted.node is None else living_nodes(self._run.nodes).get(wanted.node)
        rows = [row for row in ray.nodes() if row["Alive"] and node in (None, row["NodeID"])]
        most = max((row["Resources"].get("GPU", 0.0) for row in rows), default=0.0)
        if num_gpus > most:
            where = "on no node" if wanted.node is None else f"not on {wanted.node}"
            raise PlacementError(f"an engine of {num_gpus:g} GPUs fits {where}; the most there is {most:g}")

    async def _booted(self, actor: Any, name: str, spec: EngineSpec, wanted: SpawnSpec) -> Booted:
        """The answer of ``boot``. Bounded: without free GPUs, and on a removed group, Ray would wait for ever."""
        loop = asyncio.get_running_loop()
        boot = awaited(actor.boot.remote(self._log.latest, self._log.lc))
        deadline = loop.time() + _PLACED_WITHIN_S
        while not boot.done():
            await asyncio.wait({boot}, timeout=0.1)
            if not boot.done() and wanted.group_id is not None and self._spawner.is_removed(wanted.group_id):
                boot.cancel()
                raise PlacementError(f"placement group {wanted.group_id} was removed while {name!r} started")
            if not boot.done() and loop.time() > deadline:
                boot.cancel()
                raise PlacementError(f"no {spec.num_gpus:g} GPUs became free for {name!r} in {_PLACED_WITHIN_S:g} s")
        try:
            booted: Booted = boot.result()
        except RayActorError as error:
            reason = getattr(error, "cause", None) or error
            raise SpawnFailed(
                f"the host of engine {name!r} did not start: {reason}", attached=(portable(error),)
            ) from error
        except RayError as error:
            raise SpawnFailed(f"Ray could not start engine {name!r}", attached=(portable(error),)) from error
        return booted

    async def _latest(self, name: str) -> Launched | None:
        found = await self._registry.latest.remote(self._run.run, name)
        if found is None:
            return None
        incarnation, wanted = found
        return Launched(incarnation, *pickle.loads(wanted.payload))

    def _host(self, name: str, incarnation: int) -> Any:
        try:
            return ray.get_actor(ray_name(self._run.run, name, incarnation), namespace=NAMESPACE)
        except ValueError:
            return None

    async def _living_host(self, name: str) -> Any:
        latest = await self._latest(name)
        host = None if latest is None else self._host(name, latest.incarnation)
        if host is None:
            raise LookupError(f"no living engine is named {name!r}")
        return host

    async def _report(self, name: str, incarnation: int, *, recorded: bool = True) -> None:
        """Record the death of an engine whose host could not; once in a run, whoever finds it first."""
        if recorded and await self._registry.report.remote(self._run.run, name, incarnation):
            number = self._caller.next_number()
            self._log.emit_for(name, incarnation, number, "actor.died", reason="killed", detail="its host was killed")
