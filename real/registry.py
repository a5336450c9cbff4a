"""Who carries which name: incarnations, addresses and spawn arguments of every run of a driver.

Ray's own named actors are its source of truth for death. This registry adds what they lack: an incarnation that rises
when a name is used again, and the serialised arguments that a restart needs after the process is gone.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import ray

from real.engines.settings import EngineSettings
from real.nodes import Named

NAMESPACE = "seatrial"


def registry_name() -> str:
    """Ray name of the calling driver's registry. Each has its own: the end of one must not take it from another."""
    return f"seatrial-registry-{ray.get_runtime_context().get_job_id()}"


def ray_name(run: str, name: str, incarnation: int) -> str:
    """The name of a process's Ray actor; one incarnation of one run, so that an old handle never reaches a new one."""
    return f"{run}/{name}#{incarnation}"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every process of a run knows.

    ``registry``: Ray name of the registry of its processes. ``folder`` takes its evidence; ``started_ns`` is the
    driver's ``CLOCK_MONOTONIC`` at its start. ``nodes``: names of the nodes that it began with. ``clock_offsets_ns``:
    node name to how far its machine's clock is ahead of the driver's, where that is another machine;
    ``clock_error_ns`` bounds the difference of any two that is left then. ``token`` is the run's secret: what the
    fronts of engines ask of every call, where other machines reach them. Only the run's processes are given it.
    """

    run: str
    registry: str
    folder: str
    started_ns: int
    python_path: tuple[str, ...]
    engines: EngineSettings | None = None
    nodes: Named = ()
    clock_offsets_ns: tuple[tuple[str, int], ...] = ()
    clock_error_ns: int = 0
    token: str = dataclasses.field(default="", repr=False)

    def clock_offset_ns(self, node: str) -> int:
        return dict(self.clock_offsets_ns).get(node, 0)


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """Who a process is. ``number`` is unique in the run; ids and call numbers are made from it."""

    name: str
    incarnation: int
    number: int
    calls: frozenset[str] = frozenset()
    streams: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class SpawnSpec:
    """What it takes to start an actor, now and again.

    ``payload`` is the pickled (class, args, kwargs) with ``buffers`` kept out of band, so that arrays arrive read-only
    as they do in messages. ``calls`` and ``streams`` are the names of the class's remote methods.
    """

    cls: str
    payload: bytes
    buffers: tuple[bytes, ...]
    calls: frozenset[str]
    streams: frozenset[str]
    data_calls: int
    node: str | None
    group_id: str | None
    bundle: int


@dataclasses.dataclass
class _Incarnation:
    number: int
    spec: SpawnSpec
    spawner: str | None  # Ray name of the process that spawns it; None for the driver, whose death ends the run
    state: Literal["starting", "alive", "dead"] = "starting"
    pid: int = 0
    node: str = ""
    reported: bool = False


@dataclasses.dataclass
class _Run:
    names: dict[str, list[_Incarnation]] = dataclasses.field(default_factory=dict)
    processes: int = 0


class NameRegistry:
    """The Ray actor behind ``spawn``, ``lookup``, ``restart`` and ``kill``. Synchronous: one request at a time."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def open(self, run: str) -> int:
        """A run begins. Returns the pid of this process, without which the run cannot go on."""
        self._runs[run] = _Run()
        return os.getpid()

    def reserve(self, run: str, name: str, spec: SpawnSpec, spawner: str | None) -> tuple[int, int] | None:
        """Take a name: (incarnation, number of the process in this run), or None while a living actor has it."""
        state = self._runs[run]
        past = state.names.setdefault(name, [])
        if past and not self._is_dead(run, name, past[-1]):
            return None
        state.processes += 1
        past.append(_Incarnation(len(past) + 1, spec, spawner))
        return len(past), state.processes

    def booted(self, run: str, name: str, incarnation: int, pid: int, node: str) -> bool:
        """The process runs; its class may not have started yet. False: it was declared dead before it could say so."""
        entry = self._runs[run].names[name][incarnation - 1]
        entry.pid, entry.node = pid, node
        return entry.state != "dead"

    def started(self, run: str, name: str, incarnation: int) -> None:
        """``start()`` has returned: from here a lookup finds it."""
        entry = self._runs[run].names[name][incarnation - 1]
        if entry.state == "starting":
            entry.state = "alive"

    def condemn(self, run: str, name: str, incarnation: int) -> tuple[int, str] | None:
        """Declare it dead before it is killed: (pid, node), or None where it was dead already."""
        entry = self._runs[run].names[name][incarnation - 1]
        if self._is_dead(run, name, entry):
            return None
        entry.state = "dead"
        entry.reported = True  # whoever condemns it records its death
        return entry.pid, entry.node

    def report(self, run: str, name: str, incarnation: int) -> bool:
        """Take it upon oneself to record a death that nobody was there to record: True once for each."""
        entry = self._runs[run].names[name][incarnation - 1]
        entry.state = "dead"
        entry.reported, before = True, entry.reported
        return not before

    def latest(self, run: str, name: str) -> tuple[int, SpawnSpec] | None:
        """(incarnation, spec) of the last that had a name, in whatever state; None when nobody had it."""
        past = self._runs[run].names.get(name, [])
        return (past[-1].number, past[-1].spec) if past else None

    def whereabouts(self, run: str, name: str, incarnation: int) -> tuple[int, str] | None:
        """(pid, node) of a living process, None for a dead one."""
        entry = self._runs[run].names[name][incarnation - 1]
        return None if self._is_dead(run, name, entry) else (entry.pid, entry.node)

    def dead_of(self, run: str, processes: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of some processes, (name, incarnation) each, that are dead. One that it does not know is not."""
        names = self._runs[run].names
        return [
            (name, incarnation)
            for name, incarnation in processes
            if 0 < incarnation <= len(names.get(name, ())) and self._is_dead(run, name, names[name][incarnation - 1])
        ]

    def find(self, run: str, name: str) -> tuple[int, frozenset[str], frozenset[str]] | None:
        """(incarnation, calls, streams) of the living incarnation of a name."""
        past = self._runs[run].names.get(name, [])
        if not past or past[-1].state != "alive" or self._is_dead(run, name, past[-1]):
            return None
        return past[-1].number, past[-1].spec.calls, past[-1].spec.streams

    def spec(self, run: str, name: str, incarnation: int) -> SpawnSpec:
        return self._runs[run].names[name][incarnation - 1].spec

    def close(self, run: str) -> list[tuple[str, int, str]]:
        """Forget a run; returns (Ray name, pid, node) of what may still be alive."""
        state = self._runs[run]
        del self._runs[run]
        return [
            (ray_name(run, name, entry.number), entry.pid, entry.node)
            for name, past in state.names.items()
            for entry in past
            if not self._is_dead(run, name, entry)
        ]

    def _is_dead(self, run: str, name: str, entry: _Incarnation) -> bool:
        if entry.state == "dead" or _exists(ray_name(run, name, entry.number)):
            return entry.state == "dead"
        # No such Ray actor: it died, or its spawner has yet to create it, or died before it could.
        if entry.state == "alive" or entry.pid or (entry.spawner is not None and not _exists(entry.spawner)):
            entry.state = "dead"
        return entry.state == "dead"


def _exists(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True
