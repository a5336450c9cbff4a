"""The ``Backend`` port on Ray, and ``run_real``, which runs a driver's coroutine in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal as signals
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from protocol import ports
from protocol.errors import NoSuchActor
from protocol.evidence import check_may_emit
from real.caller import Caller
from real.census import Census, OwnCard
from real.clocks import measure_clocks
from real.engines.leftovers import clear_leftovers
from real.engines.port import RealEngines
from real.engines.settings import EngineSettings
from real.evidence import ProcessLog
from real.faults.links import Links
from real.faults.placement import GroupNotes
from real.faults.traffic import FaultyTraffic
from real.handles import RealHandle
from real.nodes import living_nodes, name_nodes, own_node
from real.object_store import RayObjects, end_ledger
from real.placement import RayPlacementGroups, remove_groups_of
from real.registry import NAMESPACE, NameRegistry, ProcessIdentity, RunConfig, registry_name
from real.spawner import Spawner, spec_of
from real.storage import FileStorage

T = TypeVar("T")

DRIVER = "driver"
_REGISTRY_ANSWERS_S = 5.0
_TOKEN_BYTES = 24


class RealBackend:
    """The world as one process on Ray sees it. One a process, also in the driver's."""

    def __init__(self, run: RunConfig, identity: ProcessIdentity) -> None:
        self.run = run
        self._node = own_node(run.nodes)
        self._ray_node: str = ray.get_runtime_context().get_node_id()
        self.log = ProcessLog(
            run.folder, identity.name, identity.incarnation, run.started_ns, run.clock_offset_ns(self._node)
        )
        self.census = Census(run.folder, self._dead_of)
        links = Links(self.log.faults, self.census, self.log)
        self.caller = Caller(run, identity, self.log, links)
        self._me = RealHandle(self.caller, identity.name, identity.incarnation, identity.calls, identity.streams)
        self.hosts: type | None = None
        """The class of the actor in this process; None in the driver's."""
        self._registry = ray.get_actor(run.registry, namespace=NAMESPACE)
        self._storage = FileStorage(os.path.join(run.folder, "storage"), self.log)
        self._objects = RayObjects(run.run, f"{identity.name}/{identity.incarnation}", self.log, self.new_id)
        self._groups = RayPlacementGroups(run.run, self.log, self.new_id, GroupNotes(run.folder))
        self._spawner = Spawner(run, identity, self.log, self.caller, self._registry, self._groups)
        self._engines: RealEngines | None = None
        if run.engines is not None:
            self._engines = RealEngines(
                run, identity, self.log, self.caller, self._registry, self._spawner, self._send_signal,
                FaultyTraffic(links, self.log.faults),
            )  # fmt: skip
        self.crashed: Callable[[BaseException], None] = self.crash
        self.ray_has_ended = False
        """Set by who saw it: the run's end then asks Ray for nothing."""
        self.registry_pid = 0
        """In the driver: of the registry's process, which is on the driver's machine."""

    # ---- the port ----

    @property
    def me(self) -> RealHandle:
        return self._me

    @property
    def node(self) -> str:
        return self._node

    @property
    def placement_groups(self) -> RayPlacementGroups:
        return self._groups

    @property
    def engines(self) -> RealEngines:
        if self._engines is None:
            raise RuntimeError("this run has no serving engines: call run_real with engines=EngineSettings(...)")
        return self._engines

    @property
    def storage(self) -> FileStorage:
        return self._storage

    @property
    def objects(self) -> RayObjects:
        return self._objects

    async def spawn(
        self,
        cls: type,
        *args: Any,
        name: str,
        node: str | None = None,
        placement: ports.Placement | None = None,
        limits: ports.Limits = ports.Limits(),
        **kwargs: Any,
    ) -> RealHandle:
        spec = spec_of(cls, args, kwargs, data_calls=limits.data_calls, node=node, placement=placement)
        return await self._spawner.start(spec, name)

    async def kill(self, handle: ports.ActorHandle) -> None:
        if handle.name == DRIVER and handle.incarnation == 0:
            raise ValueError("the driver is no actor and cannot be killed")
        if handle == self._me:
            self.log.emit("actor.died", reason="killed", detail="")
            os.kill(os.getpid(), signals.SIGKILL)
        where = await self._registry.condemn.remote(self.run.run, handle.name, handle.incarnation)
        if where is not None:
            number = self.caller.next_number()
            self.log.emit_for(handle.name, handle.incarnation, number, "actor.died", reason="killed", detail="")
            await self._send_signal(where, signals.SIGKILL)

    async def signal(self, handle: ports.ActorHandle, signal: ports.Signal) -> None:
        if signal == "SIGKILL":
            return await self.kill(handle)
        where = await self._registry.whereabouts.remote(self.run.run, handle.name, handle.incarnation)
        if where is not None:
            kind = {"SIGSTOP": "actor.stopped", "SIGCONT": "actor.continued"}[signal]
            self.log.emit_for(handle.name, handle.incarnation, self.caller.next_number(), kind)
            await self._send_signal(where, signals.Signals[signal])

    async def restart(self, handle: ports.ActorHandle) -> RealHandle:
        spec = await self._registry.spec.remote(self.run.run, handle.name, handle.incarnation)
        await self.kill(handle)
        return await self._spawner.start(spec, handle.name)

    async def lookup(self, name: str) -> RealHandle:
        found = await self._registry.find.remote(self.run.run, name)
        if found is None:
            raise NoSuchActor(f"no living actor is named {name!r}")
        return RealHandle(self.caller, name, *found)

    async def nodes(self) -> tuple[str, ...]:
        return tuple(living_nodes(self.run.nodes))

    def periodic(self, interval_s: float, function: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await function()

        return self.background(repeat(), name=name)

    def background(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = self.caller.keep(coroutine, name=name)
        task.add_done_callback(self._background_ended)
        return task

    async def blocking(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def wall_time(self) -> float:
        return time.time() + self.log.faults.wall_skew_s(self.node)

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{self.caller.next_number():016x}"

    def emit(self, kind: str, **fields: Any) -> None:
        check_may_emit(self.hosts, kind)
        self.log.emit(kind, **fields)

    # ---- life and death ----

    def own_process(self) -> None:
        """Make this the backend of its process. Ray's event loops are not ours to mark, so it is kept per process."""
        ports._process_backend.append(self)
        me = self._me
        self.card = OwnCard(
            self.run.folder, name=me.name, incarnation=me.incarnation, role="actor" if me.incarnation else "driver",
            node=self.node, pid=os.getpid(),
        )  # fmt: skip

    def leave_process(self) -> None:
        ports._process_backend.remove(self)
        self.log.close()

    async def register(self) -> None:
        me = self._me
        await self._registry.booted.remote(self.run.run, me.name, me.incarnation, os.getpid(), self._ray_node)

    async def registered_as_started(self) -> None:
        await self._registry.started.remote(self.run.run, self._me.name, self._me.incarnation)

    def bury(self, name: str, incarnation: int) -> None:
        """Have everybody know a death that was recorded here. Returns before they do."""
        self._registry.report.remote(self.run.run, name, incarnation)

    async def start_again(self, name: str, incarnation: int) -> None:
        """Start an actor as that incarnation of it was started. Raises NameTaken: it lives."""
        spec = await self._registry.spec.remote(self.run.run, name, incarnation)
        await self._spawner.start(spec, name)

    def crash(self, error: BaseException) -> NoReturn:
        """End this process at once, as a failure of its own; no ``finally`` runs."""
        self.log.emit("actor.died", reason="crashed", detail=f"{type(error).__name__}: {error}")
        os._exit(1)

    def _dead_of(self, processes: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Of processes on other machines, those that the registry knows to be dead. Blocks for some milliseconds."""
        if self.ray_has_ended:
            return []
        try:
            asked = self._registry.dead_of.remote(self.run.run, processes)
            dead: list[tuple[str, int]] = ray.get(asked, timeout=_REGISTRY_ANSWERS_S)
        except RayError:  # then nobody knows, and who is not known to be dead must not be called so
            return []
        return dead

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)

    async def _send_signal(self, where: tuple[int, str], number: signals.Signals) -> None:
        pid, node = where
        if pid == 0:
            return  # it never came so far as to tell its pid
        if node == self._ray_node:
            _deliver(pid, number)
        else:
            remote = ray.remote(num_cpus=0)(_deliver)
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            await remote.options(scheduling_strategy=there).remote(pid, number)

    async def end_run(self) -> None:
        """End what the run has left, stopped processes and placement groups included.

        A Ray that has ended can be asked for nothing: its calls wait for a minute, and then end this process.
        """
        try:
            await self._end_actors()
        finally:  # also where somebody does not want to wait for the rest
            if self._engines is not None:
                await self._engines.close()

    async def _end_actors(self) -> None:
        await self.caller.give_up()
        if self.ray_has_ended:
            return
        if self._engines is not None:
            names = [card.name for card in self.census.everybody() if card.role == "engine"]
            await asyncio.gather(*(self._engines.discard(name) for name in names))
            clear_leftovers(self.run.folder)
        remove_groups_of(self.run.run)
        end_ledger(self.run.run)
        for name, pid, node in await self._registry.close.remote(self.run.run):
            await self._send_signal((pid, node), signals.SIGKILL)
            with contextlib.suppress(ValueError):  # Ray has noticed its death already
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def _deliver(pid: int, number: signals.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it died by itself a moment ago, and Ray does not know it yet
        os.kill(pid, number)


def run_real(
    body: Callable[[Any], Coroutine[Any, Any, T]],
    *,
    folder: str | None = None,
    python_path: tuple[str, ...] | None = None,
    engines: EngineSettings | None = None,
    run: str | None = None,
    begins: Callable[[asyncio.Task[Any]], None] = lambda _: None,
) -> T:
    """Run a driver's coroutine in the real world, on the Ray cluster that this process is connected to.

    Args:
        body: ``async def body(backend)``.
        folder: takes the evidence (``events/``) and the shared storage (``storage/``); a new temporary one by default.
        python_path: where actors look for classes beside their own path; this process's ``sys.path`` by default.
        engines: how serving engines are started; without it the run has none.
        run: its id, unique on the cluster; a new one by default.
        begins: called with the task whose cancellation ends the run in order, before anything of it runs.

    Returns:
        What ``body`` returns. Every actor of the run is dead then.

    Raises:
        RuntimeError: Ray is not initialised.
    """
    if not ray.is_initialized():
        raise RuntimeError("run_real needs a connection to Ray: call ray.init() first")
    if folder is None:
        folder = tempfile.mkdtemp(prefix="seatrial-")
    if python_path is None:
        python_path = tuple(os.path.abspath(entry) for entry in sys.path if os.path.isdir(entry or "."))
    if run is None:
        run = f"run-{time.time_ns():x}-{os.getpid()}"
    nodes = name_nodes()
    clocks = measure_clocks(nodes)
    config = RunConfig(
        run, registry_name(), folder, time.monotonic_ns(), python_path, engines, nodes,
        clocks.offsets_ns, clocks.error_ns, secrets.token_urlsafe(_TOKEN_BYTES),
    )  # fmt: skip
    remote = ray.remote(num_cpus=0, max_restarts=0)(NameRegistry)
    # On the driver's node, which is never lost: a node that is must not take the names of all others with it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    registry = remote.options(
        name=config.registry, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, scheduling_strategy=here
    ).remote()
    registry_pid = ray.get(registry.open.remote(run))
    backend = RealBackend(config, ProcessIdentity(DRIVER, 0, 0))
    backend.registry_pid = registry_pid
    backend.own_process()
    backend.log.emit("actor.spawned", cls="", node=backend.node, role="driver")
    try:
        return asyncio.run(_drive(body, backend, begins))
    finally:
        backend.leave_process()


async def _drive(
    body: Callable[[Any], Coroutine[Any, Any, T]], backend: RealBackend, begins: Callable[[asyncio.Task[Any]], None]
) -> T:
    """Run the body; a failed background task of the driver is the driver's failure."""
    own = asyncio.current_task()
    assert own is not None
    begins(own)
    task = asyncio.ensure_future(body(backend))
    failures: list[BaseException] = []

    def crashed(error: BaseException) -> None:
        failures.append(error)
        task.cancel()

    backend.crashed = crashed
    try:
        return await task
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise
    finally:
        await backend.end_run()
