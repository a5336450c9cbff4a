"""The Ray actor that owns one engine: its processes, its public address, its evidence. It lives as long as the engine.

The engine's GPUs are those of this actor, so Ray gives them back when it ends. The engine dies with it, however it
dies: see `real.engines.leash`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pathlib
import signal as signals
import sys
import urllib.parse
from typing import Any, NamedTuple

import aiohttp
import ray

from protocol.ports import EngineSpec, Signal
from protocol.serving.determinism import keeps_prefixes
from real.census import Census, OwnCard, is_stopped
from real.engines.front import Front
from real.engines.kinds import command, environment, own_version, rank_of
from real.engines.leftovers import Leftovers, new_engine_folder
from real.engines.served import Served
from real.engines.settings import EngineSettings
from real.engines.sockets import FIRST_PRIVATE, reserve
from real.engines.traffic import Traffic
from real.engines.tree import EngineTree, Part
from real.engines.weights import Weights, WeightsNotFound, read_weights
from real.evidence import ProcessLog
from real.faults.links import Links
from real.faults.traffic import FaultyTraffic
from real.hosts import is_loopback
from real.nodes import own_node
from real.registry import NAMESPACE, ProcessIdentity, RunConfig

_FIRST_LOOK_S = 0.02
_LONGEST_LOOK_S = 0.25
_REPLY_S = 0.1  # between the end of an engine and that of its host, so that an answer under way gets out


class Booted(NamedTuple):
    """Where the engine is to be reached, and the Lamport clock of its birth."""

    host: str
    port: int
    lc: int


class Description(NamedTuple):
    """One engine as its host sees it now. ``pids``: process id to command line, empty before the start."""

    port: int
    in_flight: int
    host_pid: int
    main_pid: int
    pids: dict[int, str]


class EngineHost:
    """Owner of one engine process.

    Args:
        identity: name and incarnation of the engine.
        settings: how engines are started.
        spec: what to start.
    """

    def __init__(self, run: RunConfig, identity: ProcessIdentity, settings: EngineSettings, spec: EngineSpec) -> None:
        for folder in run.python_path:
            if folder not in sys.path:
                sys.path.append(folder)
        self._run = run
        self._identity = identity
        self._settings = settings
        self._spec = spec
        self._node = own_node(run.nodes)
        self._log = ProcessLog(
            run.folder, identity.name, identity.incarnation, run.started_ns, run.clock_offset_ns(self._node)
        )
        self._registry = ray.get_actor(run.registry, namespace=NAMESPACE)
        self._address = _own_address()
        self._public = reserve(self._address, settings.first_port)
        self._private = reserve("127.0.0.1", FIRST_PRIVATE)
        self._front: Front | None = None
        self._tree: EngineTree | None = None
        self._card: OwnCard | None = None
        self._life: asyncio.Task[None] | None = None
        self._is_ready = False
        self._dead = False
        self._cleared = asyncio.Event()
        self._port_lost = ""  # to whom, once it is
        self._lost: Part | None = None  # a child that was killed on request: the main process will follow by itself

    # ---- remote ----

    async def boot(self, cause: str | None, lc: int) -> Booted:
        """Record the birth and begin the start; the engine is far from ready when this returns."""
        node = ray.get_runtime_context().get_node_id()
        name, incarnation = self._identity.name, self._identity.incarnation
        wanted = await self._registry.booted.remote(self._run.run, name, incarnation, os.getpid(), node)
        if not wanted or self._dead:  # Ray may start terminate() first: an engine that is dead must not start
            await self._die("killed", "", recorded=False)  # terminated before it was there; who did has recorded it
            return Booted(self._address, self._public.port, self._log.lc)
        kind = f"{self._settings.kind}({self._spec.profile})"
        self._log.answered(lc, cause, "actor.spawned", cls=kind, node=self._node, role="engine")
        self._life = asyncio.get_running_loop().create_task(self._live())
        return Booted(self._address, self._public.port, self._log.lc)

    async def terminate(self, lc: int, recorded: bool) -> None:
        """SIGKILL the engine; its port is free and its processes are gone when this returns.

        ``recorded`` False: the evidence has ended.
        """
        self._log.merge(lc)
        await self._die("killed", "", recorded=recorded)

    async def signal(self, signal: Signal, part: Part | None, lc: int) -> None:
        """Send a real signal to one part of the engine, or (None) to all of it.

        SIGKILL of ``main`` (or of all) is the engine's death, recorded before it is sent. That of another part leaves
        the engine to notice. Raises LookupError: it has no such part, or no process yet.
        """
        self._log.merge(lc)
        if signal == "SIGKILL" and part in (None, "main"):
            return await self._die("killed", "")
        if self._tree is None:
            raise LookupError(f"engine {self._identity.name} has not started its process yet")
        number = signals.Signals[signal]
        if signal == "SIGKILL":
            self._tree.signal(number, part)
            self._lost = part
            return
        if part in (None, "main"):
            self._emit("actor.stopped" if signal == "SIGSTOP" else "actor.continued")
        self._tree.signal(number, part)

    async def lost(self, part: Part) -> None:
        """A fault has killed a child of the engine, which will follow by itself."""
        self._lost = part

    async def describe(self) -> Description:
        in_flight = 0 if self._front is None else self._front.in_flight
        pid, pids = (0, {}) if self._tree is None else (self._tree.pid, self._tree.pids())
        return Description(self._public.port, in_flight, os.getpid(), pid, pids)

    # ---- life ----

    async def _live(self) -> None:
        try:
            tree = await self._start()
        except WeightsNotFound as error:
            await self._die("crashed", str(error))
            return
        except Exception as error:
            await self._die("crashed", f"{type(error).__name__}: {error}")
            raise
        looking = asyncio.get_running_loop().create_task(self._await_ready())
        try:
            status = await tree.wait()
        finally:
            looking.cancel()
        if not self._dead:
            await self._die(*self._cause_of_death(status))

    async def _start(self) -> EngineTree:
        run, spec, log = self._run, self._spec, self._log
        weights: Weights | None = None
        storage = os.path.join(run.folder, "storage")
        if spec.weights_path:
            weights = await read_weights(storage, spec.weights_path, log)
        version, weight_hash = own_version(spec) if weights is None else (weights.version, weights.weight_hash)
        self._front = Front(
            log, port=self._private.port, served=Served(version, weight_hash), storage=storage, traffic=self._traffic(),
            became_ready=self._became_ready, in_flight_changed=self._note_in_flight,
            is_stopped=lambda: self._tree is not None and is_stopped(self._tree.pid),
            tells_sampling=spec.options is not None, token="" if is_loopback(self._address) else run.token,
        )  # fmt: skip
        self._emit("engine.started", port=self._public.port, profile=spec.profile, version=version)
        name = self._identity.name
        if spec.options is not None:
            seed = spec.options.random_seed
            self._emit(
                "engine.options",
                deterministic=spec.options.deterministic,
                attention_backend=spec.options.attention_backend,
                gpu=spec.options.gpu,
                server_seed=rank_of(name) if seed is None else seed,
                keeps_prefixes=keeps_prefixes(spec.options),
            )
        log_name = f"{urllib.parse.quote(name, safe='')}-{self._identity.incarnation}.log"
        leftovers = Leftovers(run.folder, name, self._identity.incarnation)
        temporary = new_engine_folder(run.run, run.folder)
        leftovers.add(temporary)
        line = command(self._settings, spec, weights, name=name, port=self._private.port, temporary=temporary)
        self._private.bound.close()  # the engine is about to bind it; the reservation stays
        self._tree = EngineTree(
            line,
            environment(self._settings, run.python_path, temporary),
            pathlib.Path(run.folder, "logs", log_name),
            leftovers,
        )
        self._card = OwnCard(
            run.folder, name=name, incarnation=self._identity.incarnation, role="engine",
            node=self._node, pid=self._tree.pid,
        )  # fmt: skip
        return self._tree

    def _note_in_flight(self, count: int) -> None:
        if self._card is not None:
            self._card.in_flight = count

    def _traffic(self) -> Traffic:
        """What may happen to the messages of this engine."""
        faults = self._log.faults
        return FaultyTraffic(Links(faults, Census(self._run.folder), self._log), faults)

    async def _await_ready(self) -> None:
        """Open the public port when the private one accepts; watch for the first /ready of 200.

        Callers know the public port already. If another server listens there meanwhile (a bound socket does not keep it
        from that), they would take it for this engine, so the engine is ended.
        """
        front, pause = self._front, _FIRST_LOOK_S
        assert front is not None
        while not self._is_ready:
            try:
                if not front.listens:
                    if self._public.taken():
                        return self._lose_port()
                    _, writer = await asyncio.open_connection("127.0.0.1", self._private.port)
                    writer.close()
                    await front.listen(self._public.bound)
                if await front.get("/ready") == 200:
                    self._became_ready()
                    return
            except (OSError, aiohttp.ClientError) as error:
                if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                    return self._lose_port()  # since the look at it
                # else: not yet
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_LOOK_S)

    def _lose_port(self) -> None:
        assert self._tree is not None
        self._port_lost = f"port {self._public.port} of {self._address}, which it was to have, is another server's now"
        self._tree.signal(signals.SIGKILL)

    def _became_ready(self) -> None:
        if not self._is_ready and self._tree is not None and self._front is not None:
            self._is_ready = True
            served = self._front.served
            self._emit("engine.ready", version=served.version, weight_hash=served.weight_hash)
            self._tree.note_shared_memory()

    def _emit(self, kind: str, **fields: Any) -> None:
        self._log.answered(0, None, kind, **fields)

    # ---- death ----

    def _cause_of_death(self, status: int) -> tuple[str, str]:
        assert self._tree is not None
        words = self._tree.last_words()
        if self._port_lost:
            return "crashed", f"{self._port_lost}\n{words}"
        if self._lost is not None:
            return "exited", f"{self._lost} was killed\n{words}"
        if status < 0:
            number = signals.Signals(-status)
            return ("killed" if number == signals.SIGKILL else "crashed"), f"{number.name}\n{words}"
        return ("exited" if status == 0 else "crashed"), f"exit status {status}\n{words}"

    async def _die(self, reason: str, detail: str, *, recorded: bool = True) -> None:
        """Record the death, then make it complete: no process, no port, no shared memory, and this actor last."""
        if self._dead:
            await self._cleared.wait()
            return
        self._dead = True
        if self._life is not None and self._life is not asyncio.current_task():
            self._life.cancel()  # it may be about to start the process
        if self._front is not None:
            self._front.seal()
        if recorded:
            self._emit("actor.died", reason=reason, detail=detail)
        run, name, incarnation = self._run.run, self._identity.name, self._identity.incarnation
        if self._tree is not None:
            await self._tree.clear()
        if self._front is not None:
            await self._front.close()
        for port in (self._public, self._private):
            port.close()
        await self._registry.condemn.remote(run, name, incarnation)
        self._cleared.set()
        me = ray.get_runtime_context().current_actor
        asyncio.get_running_loop().call_later(_REPLY_S, ray.kill, me)  # Ray calls any other exit a failure


def _own_address() -> str:
    """Where to listen: on loopback while every node is on this machine. Elsewhere the front asks for a token."""
    addresses = {row["NodeManagerAddress"] for row in ray.nodes() if row["Alive"]}
    return "127.0.0.1" if len(addresses) < 2 else str(ray.util.get_node_ip_address())
