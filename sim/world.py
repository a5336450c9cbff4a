"""One simulated run: the kernel, the random streams, the processes, and the evidence they leave.

A World holds everything that a run may change; when it is closed nothing is left at module or class level. Whatever
runs in it is a Process (an actor, an engine, the driver), known by (name, incarnation).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from protocol.event_lines import who
from protocol.evidence import KINDS, Event, Recorder, encode
from sim.kernel import Kernel
from sim.loop import ActorLoop
from sim.random import Stream, Streams

if TYPE_CHECKING:
    from sim.clock import Draw

Hook = Callable[[Event], None]

_new_event = Event.__new__
_BATCH = 512  # lines between two hash updates and writes; bounds what a crash of the simulating process can lose


class Process:
    """Something with a life of its own: (name, incarnation) on a node. Subclasses add what it does.

    ``n`` counts its events, ``lc`` is its Lamport clock; both go into every event it emits.
    """

    __slots__ = (
        "world", "name", "incarnation", "node", "alive", "stopped", "n", "lc", "death_reason", "_who", "_dying",
        "__weakref__",
    )  # fmt: skip

    role = "process"

    def __init__(self, world: World, name: str, incarnation: int, node: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.node = node
        self.alive = True
        self.stopped = False
        self.n = 0
        self.lc = 0
        self.death_reason = ""
        self._who = who(name, incarnation)
        self._dying = False  # its death is recorded, and about to take effect

    @property
    def id(self) -> str:
        return f"{self.name}/{self.incarnation}"

    def die(self, reason: str, detail: str = "") -> None:
        """End now: from this instant every port of this incarnation drops silently.

        Args:
            reason: killed, crashed, node_lost or exited.
            detail: error text of a crash.
        """
        if not self.alive:
            return
        if not self._dying:
            # Recorded first: an event precedes its effect, and a dead process records nothing.
            self._dying = True
            self.world.emit(self, "actor.died", reason=reason, detail=detail)
            if not self.alive:
                return  # an injector that acts at the emission has ended it
        self.alive = False
        self.death_reason = reason
        self.on_die(reason)
        for listener in self.world.on_death:
            listener(self, reason)

    def stop(self) -> None:
        """SIGSTOP: silent to the outside, buffers what arrives."""
        if self.alive and not self.stopped:
            self.world.emit(self, "actor.stopped")
            if self.alive and not self.stopped:  # else an injector has acted at the emission
                self.stopped = True
                self.on_stop()

    def cont(self) -> None:
        """SIGCONT."""
        if self.alive and self.stopped:
            self.world.emit(self, "actor.continued")
            if self.alive and self.stopped:
                self.stopped = False
                self.on_cont()

    def on_die(self, reason: str) -> None: ...

    def on_stop(self) -> None: ...

    def on_cont(self) -> None: ...


class World:
    """Everything of one run.

    Args:
        seed: of every random stream.
        recorder: a consumer of every event; None for none.
        sinks: further consumers of every event, in order, after the recorder.
        batches: consumers of the events some hundred at a time, in order (a judge). The processor's caches
            hold the run or the judge, and not both: with the lines of calls (record), 0.94 of the CPU time of a seed.
        write: takes the encoded JSON lines, some hundred at a time, as bytes (``open(..., "wb").write``); the lines are
            encoded once, for the file and for the digest.
        explore: draw scheduling order and the durations of the world (`around`), and permute equal times, all from
            the seed.
        copy_always: copy declared immutable messages too (the replay proof and the mutants do).
        wall_epoch_s: what the wall clocks of all nodes show at time 0.
    """

    def __init__(
        self,
        *,
        seed: int,
        recorder: Recorder | None = None,
        sinks: Iterable[Callable[[Event], None]] = (),
        batches: Iterable[Callable[[list[Event]], object]] = (),
        write: Callable[[bytes], object] | None = None,
        explore: bool = False,
        copy_always: bool = False,
        wall_epoch_s: float = 1_700_000_000.0,
    ) -> None:
        self.seed = seed
        self.streams = Streams(seed)
        ties: Draw | None = self.streams.stream("kernel.order") if explore else None
        self.kernel = Kernel(ties)
        self.kernel.on_anomaly = self._anomaly
        self.clock = self.kernel.clock
        self.copy_always = copy_always
        self.wall_epoch_s = wall_epoch_s
        self.processes: dict[str, Process] = {}
        self.incarnations: dict[str, int] = {}
        self.on_death: list[Callable[[Process, str], None]] = []
        self.seq = 0
        self.hooks: dict[str, list[Hook]] = {}
        self._sinks: list[Callable[[Event], None]] = [*([recorder.record] if recorder is not None else []), *sinks]
        self._batches = list(batches)
        self._write = write
        # Event and line by turns, since the last flush; where a line is not made yet, the process that it is of.
        self._pending: list[Any] = []
        self._hash = hashlib.sha256()
        self._ids: dict[str, int] = {}
        self._systems: dict[str, Process] = {}
        self.root = Process(self, "world", 0, "")
        """Observer of what no single process sees: faults, fates, storage, the run itself."""

    @property
    def now_ns(self) -> int:
        return self.clock._now

    def stream(self, name: str) -> Stream:
        return self.streams.stream(name)

    def around(self, what: str, duration_ns: int) -> int:
        """How long something takes this time: as long as usual or, in an explored run, a draw around that.

        Args:
            what: names the stream, one for each kind of duration.
            duration_ns: the usual time.
        """
        if self.kernel.explore is None:
            return duration_ns
        return self.streams.stream(f"timings.{what}").around_ns(duration_ns)

    # --- processes ---

    def next_incarnation(self, name: str) -> int:
        number = self.incarnations.get(name, -1) + 1
        self.incarnations[name] = number
        return number

    def os_of(self, node: str) -> Process:
        """What still answers on a node when a process of it is dead: its operating system (connection refused)."""
        system = self._systems.get(node)
        if system is None:
            system = self._systems[node] = Process(self, f"os@{node}", 0, node)
        return system

    def register(self, process: Process, cls: str) -> None:
        """Make it known by name, and record its birth."""
        self.processes[process.name] = process
        self.emit(process, "actor.spawned", cls=cls, node=process.node, role=process.role)

    def new_id(self, prefix: str) -> str:
        """``prefix-0000001``: fixed width, so that no id is a prefix of another (SGLang aborts by prefix)."""
        number = self._ids.get(prefix, 0) + 1
        self._ids[prefix] = number
        return f"{prefix}-{number:07d}"

    # --- evidence ---

    def emit(self, process: Process, kind: str, /, cause: str | None = None, **data: Any) -> Event | None:
        """:meth:`record`, with the fields as keywords."""
        return self.record(process, kind, cause, data)

    def record(
        self, process: Process, kind: str, cause: str | None, data: dict[str, Any], sure: bool = False
    ) -> Event | None:
        """Record an event of ``process``, then run the hooks on its kind: an injector acts *at* the emission.

        Returns None and has no effect when the process is dead. Raises UndeclaredEvent at the emitter, unless ``sure``:
        of data that the world has made, where every field is of exactly its declared type and nobody can change it.
        """
        if not process.alive:
            return None
        # Written out, for it runs ten times a request: the event is filled here, without its __init__.
        event = _new_event(Event)
        event.seq = seq = self.seq + 1
        event.t_ns = t_ns = self.clock._now
        event.kind = kind
        event.actor = process.name
        event.inc = process.incarnation
        event.n = n = process.n + 1
        event.lc = lc = process.lc + 1
        event.cause = cause
        event.data = data
        if sure:
            # Its line is made by flush(), many in a row, as the judge sees many: half of all events are calls.
            line: Any = process
        else:
            try:
                line = KINDS[kind].encode(seq, t_ns, process._who, n, lc, cause, data)
            except (KeyError, ValueError, TypeError):
                encode(event)  # raises UndeclaredEvent, with the explanation
                raise
        process.n = n  # only now: what cannot be recorded takes no number
        process.lc = lc
        self.seq = seq
        pending = self._pending
        pending += (event, line)  # in one step, which no signal cuts in two
        if len(pending) >= 2 * _BATCH:
            self.flush()
        for sink in self._sinks:
            sink(event)
        hooks = self.hooks.get(kind)
        if hooks:
            for hook in hooks:
                hook(event)
        return event

    def observe(self, kind: str, /, cause: str | None = None, **data: Any) -> Event | None:
        """Record an event that the world itself sees."""
        return self.emit(self.root, kind, cause=cause, **data)

    def receive(self, process: Process, lc: int) -> None:
        """Advance a process's Lamport clock by a message that carried ``lc``."""
        if lc > process.lc:
            process.lc = lc

    def hook(self, kind: str, hook: Hook) -> Callable[[], None]:
        """Call ``hook(event)`` synchronously at every emission of ``kind``; returns how to take it off."""
        self.hooks.setdefault(kind, []).append(hook)

        def off() -> None:
            if hook in self.hooks.get(kind, ()):
                self.hooks[kind] = [h for h in self.hooks[kind] if h is not hook]

        return off

    def _anomaly(self, loop: ActorLoop | None, what: str, detail: str) -> None:
        self.observe("run.anomaly", what=what, detail=f"{loop.name}: {detail}" if loop is not None else detail)

    # --- the digest and the end ---

    def flush(self) -> None:
        """Hash and write the lines gathered so far, and hand on the events."""
        pending, self._pending = self._pending, []
        events, lines = pending[::2], pending[1::2]
        for place, line in enumerate(lines):
            if type(line) is not str:
                e = events[place]
                lines[place] = KINDS[e.kind].encode(e.seq, e.t_ns, line._who, e.n, e.lc, e.cause, e.data)
        data = "".join(lines).encode()
        self._hash.update(data)
        if self._write is not None:
            self._write(data)
        for consumer in self._batches:
            consumer(events)

    def digest(self) -> str:
        """SHA-256 over every event, the (time, actor) of every iteration, and the draws of every stream, so far."""
        self.flush()
        final = self._hash.copy()
        final.update(f"{self.kernel.mix} {self.kernel.callbacks} {self.streams.draws()}".encode())
        return final.hexdigest()

    def close(self) -> None:
        """Seal every port and close what is suspended. No event is recorded from here on."""
        self.flush()
        self.root.alive = False
        for name in sorted(self.processes):
            self.processes[name].alive = False
        self.hooks.clear()
        self.kernel.close()
