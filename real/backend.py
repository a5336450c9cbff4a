"""The ``Backend`` port on Ray, and ``run_real``, which runs a driver's coroutine in it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal as signals
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from protocol import ports
from protocol.errors import (
    ActorDied,
    NameTaken,
    NoSuchActor,
    Outcome,
    PlacementError,
    SeatrialError,
    SpawnFailed,
    portable,
)
from real.evidence import ProcessLog
from real.handles import Header, RealCall, RealHandle, RealStream, Reply
from real.placement import POLL_S, RayPlacementGroups, remove_groups_of
from real.registry import NAMESPACE, REGISTRY, NameRegistry, SpawnSpec, ray_name
from real.storage import FileStorage

T = TypeVar("T")

# Ray's limit counts control calls too, which must never wait: out of reach, and data calls are bounded by the host.
MAX_CONCURRENCY = 1_000_000
DRIVER = "driver"
_CALLS_PER_PROCESS = 1 << 32


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every process of a run knows. ``folder`` takes its evidence; ``started_ns`` is its wall-clock start."""

    run: str
    folder: str
    started_ns: int
    python_path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """Who a process is. ``number`` is unique in the run; ids and call numbers are made from it."""

    name: str
    incarnation: int
    number: int
    calls: frozenset[str] = frozenset()
    streams: frozenset[str] = frozenset()


class RealBackend:
    """The world as one process on Ray sees it. One a process, also in the driver's."""

    def __init__(self, run: RunConfig, identity: ProcessIdentity) -> None:
        self.run = run
        self.log = ProcessLog(run.folder, identity.name, identity.incarnation, run.started_ns)
        self._identity = identity
        self._me = RealHandle(self, identity.name, identity.incarnation, identity.calls, identity.streams)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._registry = ray.get_actor(REGISTRY, namespace=NAMESPACE)
        self._numbers = 0
        self._peers: dict[RealHandle, Any] = {}
        self._dead: set[RealHandle] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself holds a task only weakly
        self._storage = FileStorage(os.path.join(run.folder, "storage"), self.log)
        self._groups = RayPlacementGroups(run.run, self.log, self.new_id)
        self.crashed: Callable[[BaseException], None] = self.crash

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
    def engines(self) -> ports.Engines:
        raise NotImplementedError("the real world has no serving engines yet; run this scenario with --backend sim")

    @property
    def storage(self) -> FileStorage:
        return self._storage

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
        from real.actors import pack, remote_methods

        calls, streams = remote_methods(cls)
        payload, buffers = pack((cls, args, kwargs))
        group, bundle = (placement.group_id, placement.bundle) if placement is not None else (None, 0)
        qualified = f"{cls.__module__}.{cls.__qualname__}"
        spec = SpawnSpec(qualified, payload, buffers, calls, streams, limits.data_calls, node, group, bundle)
        return await self._to_the_end(self._start(spec, name))

    async def kill(self, handle: ports.ActorHandle) -> None:
        if handle.name == DRIVER and handle.incarnation == 0:
            raise ValueError("the driver is no actor and cannot be killed")
        if handle == self._me:
            self.log.emit("actor.died", reason="killed", detail="")
            os.kill(os.getpid(), signals.SIGKILL)
        where = await self._registry.condemn.remote(self.run.run, handle.name, handle.incarnation)
        if where is not None:
            number = self.next_number()
            self.log.emit_for(handle.name, handle.incarnation, number, "actor.died", reason="killed", detail="")
            self._send_signal(where, signals.SIGKILL)

    async def signal(self, handle: ports.ActorHandle, signal: ports.Signal) -> None:
        if signal == "SIGKILL":
            return await self.kill(handle)
        where = await self._registry.whereabouts.remote(self.run.run, handle.name, handle.incarnation)
        if where is not None:
            kind = {"SIGSTOP": "actor.stopped", "SIGCONT": "actor.continued"}[signal]
            self.log.emit_for(handle.name, handle.incarnation, self.next_number(), kind)
            self._send_signal(where, signals.Signals[signal])

    async def restart(self, handle: ports.ActorHandle) -> RealHandle:
        spec = await self._registry.spec.remote(self.run.run, handle.name, handle.incarnation)
        await self.kill(handle)
        return await self._to_the_end(self._start(spec, handle.name))

    async def lookup(self, name: str) -> RealHandle:
        found = await self._registry.find.remote(self.run.run, name)
        if found is None:
            raise NoSuchActor(f"no living actor is named {name!r}")
        return RealHandle(self, name, *found)

    async def nodes(self) -> tuple[str, ...]:
        # Ray keeps no order of creation; its head node is the first one.
        living = [node for node in ray.nodes() if node["Alive"]]
        living.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]))
        return tuple(node["NodeID"] for node in living)

    def periodic(self, interval_s: float, function: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await function()

        return self.background(repeat(), name=name)

    def background(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = self._keep(coroutine, name=name)
        task.add_done_callback(self._background_ended)
        return task

    async def blocking(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def wall_time(self) -> float:
        return time.time()

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{self.next_number():016x}"

    def emit(self, kind: str, **fields: Any) -> None:
        self.log.emit(kind, **fields)

    # ---- calls ----

    def next_number(self) -> int:
        """A number that no other process of the run makes."""
        self._numbers += 1
        return self._identity.number * _CALLS_PER_PROCESS + self._numbers

    def send(self, handle: RealHandle, method: str, /, *args: Any, **kwargs: Any) -> RealCall:
        """Send a call now. Raises what Ray raises for an argument that cannot be serialised."""
        number = self.next_number()
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        peer = self._peer(handle)
        if peer is None:
            reply.set_exception(_died(handle, method, Outcome.NOT_DONE))
            return RealCall(number, reply)
        ref = self._submit(number, handle, method, lambda header: peer.call.remote(header, args, kwargs))
        self._keep(self._receive(number, handle, method, ref, reply), name=f"reply of {method}")
        return RealCall(number, reply)

    def send_stream(self, handle: RealHandle, method: str, /, *args: Any, **kwargs: Any) -> RealStream:
        """Start an async generator now."""
        number = self.next_number()
        stream = RealStream(number, lambda: self.cancel_call(handle, number))
        peer = self._peer(handle)
        if peer is None:
            stream.ended(_died(handle, method, Outcome.NOT_DONE))
            return stream
        remote = peer.stream.options(num_returns="streaming")
        refs = self._submit(number, handle, method, lambda header: remote.remote(header, args, kwargs))
        self._keep(self._receive_stream(number, handle, method, refs, stream), name=f"items of {method}")
        return stream

    def cancel_call(self, handle: RealHandle, number: int) -> None:
        peer = self._peer(handle)
        if peer is not None:
            peer.cancel.remote(number)

    def _submit(self, number: int, handle: RealHandle, method: str, send: Callable[[Header], T]) -> T:
        sent = self.log.emit("call.sent", call=number, target=handle.name, target_inc=handle.incarnation, method=method)
        try:
            return send(Header(number, method, sent, self.log.lc, handle.next_order()))
        except Exception as error:
            self.log.emit("call.done", call=number, outcome=Outcome.NOT_DONE.value, error=type(error).__name__)
            raise

    async def _receive(
        self, number: int, handle: RealHandle, method: str, ref: Any, reply: asyncio.Future[Any]
    ) -> None:
        try:
            answer: Reply = await ref
        except RayError as failure:
            translated = self._translated(handle, method, failure)
            self._ended(number, translated, None, 0)
            reply.set_exception(translated)
            return
        error = answer.value if answer.what == "error" else None
        self._ended(number, error, answer.cause, answer.lc)
        if error is None:
            reply.set_result(answer.value)
        else:
            reply.set_exception(error)

    async def _receive_stream(
        self, number: int, handle: RealHandle, method: str, refs: Any, stream: RealStream
    ) -> None:
        error: BaseException | None = None
        answer: Reply | None = None
        try:
            async for ref in refs:
                answer = await ref
                if answer.what != "value":
                    break
                stream.arrived(answer.value)
        except RayError as failure:
            error = self._translated(handle, method, failure)
        else:
            error = answer.value if answer is not None and answer.what == "error" else None
        self._ended(number, error, answer.cause if answer else None, answer.lc if answer else 0)
        stream.ended(error)

    def _ended(self, number: int, error: BaseException | None, cause: str | None, lc: int) -> None:
        outcome = Outcome.DONE if error is None else getattr(error, "outcome", Outcome.UNKNOWN)
        name = "" if error is None else type(error).__name__
        self.log.answered(lc, cause, "call.done", call=number, outcome=outcome.value, error=name)

    def _translated(self, handle: RealHandle, method: str, error: RayError) -> SeatrialError:
        """Ray's error for a call whose answer did not come, as ours."""
        if isinstance(error, ActorDiedError):
            self._dead.add(handle)
        if isinstance(error, RayActorError):
            # ActorUnavailableError as well: the connection broke, and nobody knows what became of the call.
            return _died(handle, method, Outcome.UNKNOWN)
        cause = error.cause if isinstance(error, RayTaskError) else error
        remote = portable(cause)
        assert isinstance(remote, SeatrialError)
        return remote

    def _peer(self, handle: RealHandle) -> Any:
        """The Ray actor behind a handle; None when this process knows it dead."""
        if handle in self._dead:
            return None
        if handle not in self._peers:
            try:
                name = ray_name(self.run.run, handle.name, handle.incarnation)
                self._peers[handle] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                self._dead.add(handle)
                return None
        return self._peers[handle]

    # ---- life and death ----

    def own_process(self) -> None:
        """Make this the backend of its process. Ray's event loops are not ours to mark, so it is kept per process."""
        ports._process_backend.append(self)

    def leave_process(self) -> None:
        ports._process_backend.remove(self)
        self.log.close()

    async def register(self) -> None:
        await self._registry.booted.remote(self.run.run, self._me.name, self._me.incarnation, os.getpid(), self._node)

    async def registered_as_started(self) -> None:
        await self._registry.started.remote(self.run.run, self._me.name, self._me.incarnation)

    def crash(self, error: BaseException) -> NoReturn:
        """End this process at once, as a failure of its own; no ``finally`` runs."""
        self.log.emit("actor.died", reason="crashed", detail=f"{type(error).__name__}: {error}")
        os._exit(1)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)

    def _keep(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _to_the_end(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a spawn. A wait that is given up leaves it running: it must still free the name if it fails."""
        task = self._keep(coroutine, name="spawn")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(task)

    async def _start(self, spec: SpawnSpec, name: str) -> RealHandle:
        run = self.run.run
        own_name = None if self._identity.incarnation == 0 else ray_name(run, self._me.name, self._me.incarnation)
        reserved = await self._registry.reserve.remote(run, name, spec, own_name)
        if reserved is None:
            raise NameTaken(f"a living actor is named {name!r}")
        incarnation, number = reserved
        handle = RealHandle(self, name, incarnation, spec.calls, spec.streams)
        try:
            strategy = await self._scheduling(spec)
            identity = ProcessIdentity(name, incarnation, number, spec.calls, spec.streams)
            self._peers[handle] = self._create(handle, identity, strategy)
            answer = await self._booted(handle, spec)
        except BaseException:
            await self._discard(handle)
            raise
        self.log.merge(answer.lc)
        if answer.what == "error":
            await self._discard(handle)
            raise SpawnFailed(f"actor {name!r} ({spec.cls}) did not start: {answer.value}", attached=(answer.value,))
        return handle

    def _create(self, handle: RealHandle, identity: ProcessIdentity, strategy: Any) -> Any:
        from real.actors import ActorHost

        # Detached, because Ray ends an actor with its maker otherwise, and a component outlives its spawner.
        remote = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=MAX_CONCURRENCY)(ActorHost)
        return remote.options(
            name=ray_name(self.run.run, handle.name, handle.incarnation),
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=strategy,
        ).remote(self.run, identity)

    async def _scheduling(self, spec: SpawnSpec) -> Any:
        """Ray's strategy for a spec. Everything that would let Ray hang for ever is refused here."""
        if spec.node is not None and spec.node not in await self.nodes():
            raise PlacementError(f"no living node is named {spec.node!r}; there are {', '.join(await self.nodes())}")
        if spec.group_id is None:
            return None if spec.node is None else NodeAffinitySchedulingStrategy(spec.node, soft=False)
        while self._groups.state(spec.group_id) == "PENDING":
            await asyncio.sleep(POLL_S)
        await self._groups.wait_created(spec.group_id, 0)
        placement = ports.Placement(spec.group_id, spec.bundle)
        holder = self._groups.node_of(placement)
        if spec.node is not None and spec.node != holder:
            raise PlacementError(f"{placement} is on node {holder}, not on {spec.node}")
        return PlacementGroupSchedulingStrategy(
            placement_group=self._groups.group(spec.group_id), placement_group_bundle_index=spec.bundle
        )

    async def _booted(self, handle: RealHandle, spec: SpawnSpec) -> Reply:
        """The answer of ``boot``. Watches the group meanwhile: on a removed one Ray would never answer."""
        boot = asyncio.ensure_future(self._peers[handle].boot.remote(spec, self.log.latest, self.log.lc))
        while not boot.done():
            await asyncio.wait({boot}, timeout=0.1 if spec.group_id is not None else None)
            if not boot.done() and spec.group_id is not None and self._groups.state(spec.group_id) == "REMOVED":
                boot.cancel()
                raise PlacementError(f"placement group {spec.group_id} was removed while {handle.name!r} started")
        try:
            answer: Reply = boot.result()
        except RayActorError as error:
            died = _died(handle, "start", Outcome.UNKNOWN)
            raise SpawnFailed(f"actor {handle.name!r} died while it started", attached=(died,)) from error
        except RayError as error:
            raise SpawnFailed(f"Ray could not start actor {handle.name!r}", attached=(portable(error),)) from error
        return answer

    async def _discard(self, handle: RealHandle) -> None:
        """End what is left of a spawn that failed, and free the name."""
        await self._registry.condemn.remote(self.run.run, handle.name, handle.incarnation)
        self._dead.add(handle)
        peer = self._peers.pop(handle, None)
        if peer is not None:
            ray.kill(peer)

    def end(self, name: str, pid: int, node: str) -> None:
        """End an actor of a run that is over, stopped or not."""
        self._send_signal((pid, node), signals.SIGKILL)
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            pass  # Ray has noticed its death already

    def _send_signal(self, where: tuple[int, str], number: signals.Signals) -> None:
        pid, node = where
        if pid == 0:
            return  # it never came so far as to tell its pid
        if node == self._node:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it died by itself a moment ago, and Ray does not know it yet
        else:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(num_cpus=0)(os.kill).options(scheduling_strategy=strategy).remote(pid, int(number))


def _died(handle: RealHandle, method: str, outcome: Outcome) -> ActorDied:
    return ActorDied(f"{handle.name}/{handle.incarnation} is dead; call of {method!r}", outcome=outcome)


def run_real(
    body: Callable[[Any], Coroutine[Any, Any, T]],
    *,
    folder: str | None = None,
    python_path: tuple[str, ...] | None = None,
) -> T:
    """Run a driver's coroutine in the real world, on the Ray cluster that this process is connected to.

    Args:
        body: ``async def body(backend)``.
        folder: takes the evidence (``events/``) and the shared storage (``storage/``); a new temporary one by default.
        python_path: where actors look for classes beside their own path; this process's ``sys.path`` by default.

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
    started_ns = time.time_ns()
    run = RunConfig(f"run-{started_ns:x}-{os.getpid()}", folder, started_ns, python_path)
    remote = ray.remote(num_cpus=0, max_restarts=0)(NameRegistry)
    registry = remote.options(name=REGISTRY, namespace=NAMESPACE, lifetime="detached", get_if_exists=True).remote()
    ray.get(registry.open.remote(run.run))
    backend = RealBackend(run, ProcessIdentity(DRIVER, 0, 0))
    backend.own_process()
    backend.log.emit("actor.spawned", cls="", node=backend.node, role="driver")
    try:
        return asyncio.run(_drive(body, backend))
    finally:
        backend.leave_process()
        remove_groups_of(run.run)
        for name, pid, node in ray.get(registry.close.remote(run.run)):
            backend.end(name, pid, node)


async def _drive(body: Callable[[Any], Coroutine[Any, Any, T]], backend: RealBackend) -> T:
    """Run the body; a failed background task of the driver is the driver's failure."""
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
