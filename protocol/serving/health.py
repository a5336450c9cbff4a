"""Health: which replicas may be routed to, and which must be replaced.

Three questions, cheapest first (engines.md 3 has the facts):

- *Does it answer?* GET /ready, 1 ms, every ``interval_s``. A number of failures in a row takes a replica out.
- *Does it get anything done?* A wedged engine answers /ready and makes no progress. The gateway knows who has calls in
  flight and no success for a while; only those are asked for their token counters, twice. Equal counters are a wedge;
  where the engine also says that it has nothing to do, the answers may just have been lost: a token decides.
- *May it come back?* Only after /ready and a generated token (/health_generate, which takes 1 s at least and up to
  20 s: never with a 1 s time-out, never as the regular probe). The gateway's suspects go through the same door.

A dead or wedged replica is reported to recovery at once, one that merely does not answer after ``replace_after_s``:
a stopped process that continues in time is readmitted (scaling.md 9).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from protocol.config import HealthConfig
from protocol.errors import ConnectionRefused, NetworkError, ReadTimeout
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle, EngineClient, backend
from protocol.serving.engine_work import AT_WORK, figures, says_idle
from protocol.serving.gateway import HealthView
from protocol.serving.peer import PEER_LOST, Peer

# One of these moves while an engine works: tokens decoded, tokens prefilled, KV in use, requests that start or end.
_PROGRESS = (
    "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:num_used_tokens",
    "sglang:num_running_reqs",
)


class _Progress(NamedTuple):
    """What the metrics page of an engine says of its work."""

    counters: tuple[float, ...]
    idle: bool
    """It says that nothing runs there and nothing waits."""


class _Watched:
    """What is known of one incarnation."""

    __slots__ = (
        "address",
        "client",
        "failures",
        "healthy",
        "ill_since",
        "reported_at",
        "told",
        "looking",
        "readmitting",
        "leaving",
    )

    def __init__(self, address: EngineAddress, client: EngineClient) -> None:
        self.address = address
        self.client = client
        self.failures = 0
        """In a row."""
        self.healthy = True
        self.ill_since = 0.0
        self.reported_at: float | None = None
        self.told = True
        """The gateway has acknowledged the verdict."""
        self.looking = False
        """A longer look (stall check, readmission) is under way."""
        self.leaving = False
        """It was sent SIGTERM: it ends when nothing is in flight, and never comes back."""
        self.readmitting = False
        """The look asks /ready itself; the regular probe would count its failures twice."""


class HealthProber:
    """Probes the gateway's replicas, routes around the ill ones, and has the dead ones replaced. An actor.

    Args:
        config: intervals, time-outs and numbers.
        gateway: handle of the Gateway; its roster is what is probed.
        recovery: handle of Recovery, or None when nothing replaces a replica.
    """

    def __init__(self, config: HealthConfig, gateway: ActorHandle, recovery: ActorHandle | None = None) -> None:
        self._config = config
        self._gateway = Peer(gateway, config.call_timeout_s)
        self._recovery = None if recovery is None else Peer(recovery, config.call_timeout_s)
        self._version = 0
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._slots: list[list[_Watched]] = [[] for _ in range(config.slots)]
        self._held_until = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._looks: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        config = self._config
        self._tasks.append(backend().periodic(config.sync_interval_s, self._sync, name="health-sync"))
        if config.look_for_leaving_s:
            self._tasks.append(
                backend().periodic(config.look_for_leaving_s, self._look_for_leaving, name="health-leaving")
            )
        for index in range(config.slots):
            probe = self._slot_probe(index, config.interval_s * index / config.slots)
            self._tasks.append(backend().periodic(config.interval_s, probe, name=f"health-slot-{index}"))

    async def stop(self) -> None:
        for task in (*self._tasks, *self._looks):
            task.cancel()

    # --- control ---

    async def hold(self, for_s: float) -> None:
        """Judge nothing for that long: replicas are paused on purpose, and /ready says 503 then. Replaces any hold."""
        self._held_until = self._now() + for_s

    async def resume(self) -> None:
        """End the hold."""
        self._held_until = 0.0

    async def unhealthy(self) -> tuple[EngineAddress, ...]:
        """The replicas that are ill in this prober's mind."""
        return tuple(w.address for w in self._watched.values() if not w.healthy)

    # --- the gateway's view ---

    async def _sync(self) -> None:
        """Follow the roster, and take a longer look at those who look ill from the gateway."""
        try:
            view: HealthView = await self._gateway.call("health_view", self._version, self._config.stall_window_s)
        except PEER_LOST:
            self._version = 0  # perhaps one that starts anew, with another roster under the same number
            return
        if view.roster is not None:
            self._version = view.version
            self._follow(view.roster)
        if self._now() < self._held_until:
            return
        for address in view.suspects:
            self._look(address, self._readmit)
        for address in view.stalled:
            self._look(address, self._check_stall, of_ill=False)

    def _follow(self, roster: tuple[EngineAddress, ...]) -> None:
        engines = backend().engines
        old, self._watched = self._watched, {}
        for address in roster:
            key = (address.name, address.incarnation)
            self._watched[key] = old.get(key) or _Watched(address, engines.client(address))
        self._slots = [[] for _ in range(self._config.slots)]
        for index, watched in enumerate(self._watched.values()):
            self._slots[index % self._config.slots].append(watched)

    def _look(
        self, address: EngineAddress, look: Callable[[_Watched], Awaitable[None]], *, of_ill: bool = True
    ) -> None:
        """Start a longer look at a replica unless one is under way. It ends within its time-outs.

        Args:
            of_ill: also at one that is out already. A check for a wedge there tells nothing and delays its readmission.
        """
        watched = self._watched.get((address.name, address.incarnation))
        if watched is None or watched.looking or not (watched.healthy or of_ill):
            return
        watched.looking = True

        async def bounded() -> None:
            try:
                await look(watched)
            finally:
                watched.looking = False

        task = backend().background(bounded(), name=f"health-look-{address.name}")
        self._looks[task] = None
        task.add_done_callback(lambda done: self._looks.pop(done, None))

    # --- does it answer? ---

    def _slot_probe(self, index: int, offset_s: float) -> Callable[[], Awaitable[None]]:
        started = False

        async def probe() -> None:
            nonlocal started
            if not started:
                started = True
                await asyncio.sleep(offset_s)  # the slots share out the interval
            if self._now() >= self._held_until:
                await asyncio.gather(*(self._probe(watched) for watched in self._slots[index]))

        return probe

    async def _probe(self, watched: _Watched) -> None:
        if watched.readmitting:
            return
        why, refused = await self._ready(watched)
        if self._now() < self._held_until:
            return  # asked before the hold, answered in it
        if why:
            await self._failed(watched, why, refused)
        elif watched.healthy:
            watched.failures = 0
        elif watched.leaving:
            if self._now() - watched.ill_since >= self._config.replace_after_s:
                await self._report(watched, "leaving, and still there")
        else:
            self._look(watched.address, self._readmit)

    async def _ready(self, watched: _Watched) -> tuple[str, bool]:
        """Why a replica is not ready, empty when it is, and whether nobody listens there at all."""
        timeout_s = self._config.probe_timeout_s
        try:
            status, _ = await watched.client.get("/ready", connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
        except NetworkError as error:
            return type(error).__name__, isinstance(error, ConnectionRefused)
        return ("" if status == 200 else f"/ready {status}"), False

    async def _failed(self, watched: _Watched, why: str, refused: bool) -> None:
        if not self._is_watched(watched):
            return
        watched.failures += 1
        # A supervisor's word for a death; without it a refused connection is one failure more.
        dead = refused and not await backend().engines.alive(watched.address.name)
        if watched.healthy and (dead or watched.failures >= self._config.failures_to_unroutable):
            await self._take_out(watched, "dead" if dead else why)
        if watched.healthy:
            return
        if not watched.told:
            await self._route(watched, False, why)
        if dead or self._now() - watched.ill_since >= self._config.replace_after_s:
            await self._report(watched, "dead" if dead else f"unhealthy: {why}")

    async def _take_out(self, watched: _Watched, why: str) -> None:
        watched.healthy = False
        watched.ill_since = self._now()
        watched.reported_at = None
        self._emit_changed(watched, why)
        await self._route(watched, False, why)

    async def _route(self, watched: _Watched, routable: bool, why: str) -> bool:
        """Tell the gateway. Returns whether it routes there now; a lost answer has the next probe tell it again."""
        try:
            routed = bool(await self._gateway.call("set_routable", watched.address, routable, why))
        except PEER_LOST:
            watched.told = False
            return False
        watched.told = True
        return routed

    async def _report(self, watched: _Watched, why: str) -> None:
        if self._recovery is None:
            return
        now = self._now()
        if watched.reported_at is not None and now - watched.reported_at < self._config.report_interval_s:
            return
        watched.reported_at = now
        try:
            await self._recovery.call("recover", watched.address, why)
        except PEER_LOST:
            watched.reported_at = None  # perhaps not heard: the next probe reports again, which is harmless

    # --- has it been told to end? ---

    async def _look_for_leaving(self) -> None:
        if self._now() >= self._held_until:
            for watched in tuple(self._watched.values()):
                if watched.healthy:
                    self._look(watched.address, self._check_leaving)

    async def _check_leaving(self, watched: _Watched) -> None:
        """After SIGTERM /health is 503 while /ready says 200 and new requests are taken, each of which delays the end.

        It is taken out, and left to end by itself; a report has it replaced when its process is gone.
        """
        try:
            status, _ = await watched.client.get(
                "/health",
                connect_timeout_s=self._config.probe_timeout_s,
                read_timeout_s=self._config.generate_timeout_s,
            )
        except NetworkError:
            return  # the regular probe sees that too
        if status != 503 or self._now() < self._held_until or not self._is_watched(watched):
            return
        why, _ = await self._ready(watched)
        if not why and watched.healthy:  # else it is paused, or ill in another way
            watched.leaving = True
            await self._take_out(watched, "leaving")

    # --- does it get anything done? ---

    async def _check_stall(self, watched: _Watched) -> None:
        before = await self._progress(watched)
        if before is None and ((await self._ready(watched))[0] or not watched.healthy):
            return  # for the regular probe to judge; a look that goes on would stand in the way of readmission
        await asyncio.sleep(self._config.stall_check_s)
        if not watched.healthy:
            return  # taken out meanwhile
        after = await self._progress(watched)
        if before is None or after is None:
            # No counters to compare (no metrics, or no answer): let it generate.
            stalled = await self._generates(watched) is False
        elif before.counters == after.counters and after.idle:
            # Calls are open whose answers were lost on the way, or it is stuck with streams that no gauge shows. A
            # failed /health_generate makes genuine SGLang answer /ready with 503: the regular probe takes that one out.
            stalled = await self._generates(watched) is False
        else:
            stalled = before.counters == after.counters
        if not stalled or not watched.healthy:
            return
        why, _ = await self._ready(watched)
        if not why:  # else it is paused or does not answer: for the regular probe to judge
            await self._wedged(watched)

    async def _wedged(self, watched: _Watched) -> None:
        if self._now() < self._held_until or not self._is_watched(watched):
            return
        if watched.healthy:
            await self._take_out(watched, "wedged")
        await self._report(watched, "wedged")

    async def _progress(self, watched: _Watched) -> _Progress | None:
        """What its page says of its work, or None where that cannot be had."""
        timeout_s = self._config.probe_timeout_s
        try:
            status, text = await watched.client.get("/metrics", connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
            if status != 200:
                return None
            totals = figures(text, _PROGRESS + AT_WORK)
        except (NetworkError, ValueError):
            return None
        counters = tuple(totals.get(name, 0.0) for name in _PROGRESS)
        if totals.keys().isdisjoint(_PROGRESS) or not all(map(math.isfinite, counters)):
            # NaN equals nothing, so a wedge behind it would never be seen; infinity always equals itself.
            return None
        return _Progress(counters, says_idle(totals))

    # --- may it come back? ---

    async def _readmit(self, watched: _Watched) -> None:
        watched.readmitting = True
        try:
            why, refused = await self._ready(watched)
            generates = await self._generates(watched) if not why else None
        finally:
            watched.readmitting = False
        if self._now() < self._held_until:
            return
        if generates is False:
            await self._wedged(watched)
        elif not generates:
            await self._failed(watched, why or "lost while it generated", refused)
        else:
            watched.failures = 0
            if await self._route(watched, True, "") and not watched.healthy:
                watched.healthy = True
                self._emit_changed(watched, "ready and generating")

    async def _generates(self, watched: _Watched) -> bool | None:
        """Whether a token comes out. None: the connection failed, which says nothing about the scheduler."""
        try:
            status, _ = await watched.client.get(
                "/health_generate",
                connect_timeout_s=self._config.probe_timeout_s,
                read_timeout_s=self._config.generate_timeout_s,
            )
        except ReadTimeout:
            return False
        except NetworkError:
            return None
        return status == 200

    def _is_watched(self, watched: _Watched) -> bool:
        """Whether the gateway still has this incarnation: a look may outlast it."""
        return self._watched.get((watched.address.name, watched.address.incarnation)) is watched

    def _emit_changed(self, watched: _Watched, why: str) -> None:
        backend().emit(
            "health.changed",
            replica=watched.address.name,
            replica_inc=watched.address.incarnation,
            healthy=watched.healthy,
            failures=watched.failures,
            why=why,
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
