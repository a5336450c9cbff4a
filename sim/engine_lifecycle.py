"""The process around a simulated engine: start-up, signals, death of children, faults, and its timers.

Source: ../shared/spec/engines.md, section 3, "signals".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import simpy
from simpy.events import Event

from sim.engine_cost import EngineProfile
from sim.engine_scheduler import Scheduler
from sim.engine_types import DETOKENIZER_DEATH_NS, SCHEDULER_DEATH_NS, AdminDone, AdminResult, Request

Emit = Callable[..., None]
Around = Callable[[str, int], int]
"""Takes (what, usual nanoseconds) and gives how long it takes this time (``World.around``)."""


def as_usual(what: str, duration_ns: int) -> int:
    """An engine outside of an explored run: everything takes its usual time."""
    return duration_ns


class EngineNotListening(RuntimeError):
    """A call to a process that has exited or has not opened its port: nothing was done (connection refused)."""


class EngineLifecycle:
    """Life and death of one engine process. Arguments: see ``SimEngine``."""

    def __init__(
        self,
        env: simpy.Environment,
        profile: EngineProfile,
        name: str,
        port: int,
        emit: Emit | None,
        on_exit: Callable[[str], None] | None,
        scheduler: Scheduler,
        around: Around = as_usual,
    ) -> None:
        self.env: Any = env  # its ``now`` is an int, which SimPy's type does not say
        self.profile = profile
        self.name = name
        self.port = port
        self.version = profile.weights_version
        self.started_version = profile.weights_version  # what /server_info says, always
        self.reported_version = profile.weights_version  # what /model_info says: unchanged by a load whose flush fails
        self.weight_hash = f"{profile.name}:{profile.weights_version}"
        self.model_path = profile.model_path
        self.alive = False
        self.listening = False
        self.frozen = False
        self.unhealthy = False
        self.terminating = False
        self.cache_outlived = False  # the prefix cache holds what earlier weights computed: its flush was refused
        self.startup_ns = 0
        self.ready_ns = 0
        self.scheduler = scheduler
        self.live: dict[str, Request] = {}
        self.emit = emit
        self._on_exit = on_exit
        self._around = around
        self._thaw_backlog: list[Callable[[], None]] = []
        self._wedges = 0

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        version: str | None = None,
        weight_hash: str | None = None,
        size_bytes: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Start the process: it listens and is ready after its start-up time. Call once.

        Args:
            version, weight_hash: of the weights it starts with; the profile's own by default.
            size_bytes: of those weights, where they differ from the profile's (longer or shorter to load).
            on_ready: called when /ready first answers 200.
        """
        if self.alive or self.scheduler.dead:
            raise RuntimeError(f"engine {self.name}: start() is for a new object, once")
        self.alive = True
        self.version = self.version if version is None else version
        self.started_version = self.reported_version = self.version
        self.weight_hash = self.weight_hash if weight_hash is None else weight_hash
        duration = self.profile.startup_ns
        if size_bytes is not None:
            duration += self.profile.weight_load_ns(size_bytes) - self.profile.weight_load_ns(self.profile.weight_bytes)
        self.startup_ns = max(1, duration)
        self.record("engine.started", port=self.port, profile=self.profile.name, version=self.version)
        self.after(self.startup_ns, lambda: self._started(on_ready))

    def _started(self, on_ready: Callable[[], None] | None) -> None:
        self.listening = True
        self.ready_ns = self.env.now
        self.record("engine.ready", version=self.version, weight_hash=self.weight_hash)
        if on_ready is not None:
            on_ready()

    def kill(self) -> None:
        """SIGKILL: from now on nothing of this process happens, and no callback of it fires."""
        self.alive = False
        self.listening = False
        self.scheduler.kill()
        self.live.clear()
        self._thaw_backlog.clear()

    def sigterm(self) -> None:
        """SIGTERM: /health fails at once, requests go on and new ones are still accepted; it exits at a poll that finds
        none left. After a failed health check it exits at the first poll, but waits for a core dump first.

        The polls come every 5 s from the time when it was ready: SGLang's ``sigterm_watchdog`` sleeps 5 s at a time
        from its warm-up on, and a signal does not wake it.
        """
        if self.postponed(self.sigterm) or self.terminating:
            return
        self.terminating = True
        self.record("engine.leaving")
        poll_ns = self.profile.sigterm_poll_ns
        asleep_ns = (self.env.now - self.ready_ns) % poll_ns if self.listening else 0
        self.after(poll_ns - asleep_ns, self._sigterm_poll)

    def _sigterm_poll(self) -> None:
        profile = self.profile
        if self.unhealthy:
            self.after(profile.coredump_wait_ns + profile.sigterm_exit_ns, lambda: self._exit("sigterm_forced"))
        elif self.live:
            self.after(profile.sigterm_poll_ns, self._sigterm_poll)
        else:
            self.after(profile.sigterm_exit_ns, lambda: self._exit("sigterm"))

    def lose_child(self, child: Literal["scheduler", "detokenizer"]) -> None:
        """SIGKILL of a child process: silence for 5.9 s or 66 s, then the whole tree exits."""
        self.wedge()
        delay = {"scheduler": SCHEDULER_DEATH_NS, "detokenizer": DETOKENIZER_DEATH_NS}[child]
        self.after(self._around(f"{child}_death", delay), lambda: self._exit(f"{child}_died"))

    def _exit(self, reason: str) -> None:
        self.kill()
        if self._on_exit is not None:
            self._on_exit(reason)

    # --- faults -------------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """SIGSTOP: no progress, no timer, no answer; what callers send is buffered by the kernel."""
        if not self.frozen and self.alive:
            self.frozen = True
            self._hold(+1)

    def thaw(self) -> None:
        """SIGCONT: the iteration under way ends, then expired timers and buffered calls run in the order they came."""
        if not self.frozen:
            return
        self.frozen = False
        self._hold(-1)
        self._at(2, lambda _: self._run_backlog())  # the scheduler's overdue boundary comes 1 ns after the thaw

    def _run_backlog(self) -> None:
        backlog, self._thaw_backlog = self._thaw_backlog, []
        for index, action in enumerate(backlog):
            if self.frozen:
                self._thaw_backlog = backlog[index:] + self._thaw_backlog
                return
            action()

    def wedge(self) -> None:
        """The scheduler stops, the process lives: HTTP answers from old state, generations never end."""
        self._hold(+1)

    def unwedge(self) -> None:
        """End of one wedge."""
        if self._wedges > (1 if self.frozen else 0):
            self._hold(-1)

    def _hold(self, change: int) -> None:
        before, self._wedges = self._wedges, self._wedges + change
        if before == 0 and self._wedges:
            self.scheduler.hold()
        elif before and self._wedges == 0:
            self.scheduler.unhold()

    def slow(self, factor_ppm: int) -> None:
        """Multiply the cost of every further iteration: 2_000_000 is twice as slow, 1_000_000 as the profile says."""
        if factor_ppm <= 0:
            raise ValueError(f"slow: factor {factor_ppm} ppm; must be positive")
        self.scheduler.push(self._do_slow, factor_ppm)

    def _do_slow(self, factor_ppm: int) -> None:
        self.scheduler.slow(factor_ppm)

    def serve(self, action: Callable[[], None]) -> None:
        """Run ``action`` (the rendering of a GET) as soon as the process can: now, or after SIGCONT; never if dead."""
        if not self.postponed(action) and self.alive:
            action()

    # --- machinery ----------------------------------------------------------------------------------------------------

    def check_listening(self) -> None:
        """Raises EngineNotListening."""
        if not self.listening:
            raise EngineNotListening(f"engine {self.name} does not listen")

    def postponed(self, action: Callable[[], None]) -> bool:
        """Whether the process is stopped; then ``action`` runs after SIGCONT."""
        if self.frozen:
            self._thaw_backlog.append(action)
        return self.frozen

    def reply(self, done: AdminDone | None, result: AdminResult) -> None:
        """Answer an admin call after the usual delay."""
        if done is not None:
            self.after(self.profile.admin_reply_ns, lambda: done(result))

    def flush(self) -> bool:
        """Empty the prefix cache unless that is refused."""
        flushed = self.scheduler.flush()
        if flushed and self.cache_outlived:
            self.cache_outlived = False
            self.record("engine.flushed")
        return flushed

    def record(self, kind: str, **fields: Any) -> None:
        """Emit evidence, where there is somebody to take it."""
        if self.emit is not None:
            self.emit(kind, **fields)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """A timer of this process: dropped when it dies, late when it is stopped."""

        def fire(_: Event) -> None:
            if self.frozen:
                self._thaw_backlog.append(action)
            elif self.alive:
                action()

        self._at(delay_ns, fire)

    def _at(self, delay_ns: int, callback: Callable[[Event], None]) -> None:
        event = Event(self.env)
        event._ok = True
        event._value = None
        event.callbacks.append(callback)
        self.env.schedule(event, delay=delay_ns)
