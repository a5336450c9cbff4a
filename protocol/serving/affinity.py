"""The session affinity router: a session stays on one backend for its whole life, across publications (serving.md 4).

Its KV prefix, its trace and its gate are there, so a bound session is never moved: while its backend is unhealthy or
gone it is refused. A request is forwarded at most once, whatever becomes of it.

**Tombstones.** A retired session leaves a tombstone, so that a late request of it gets 410 instead of a new binding. A
tombstone is forgotten ``tombstone_ttl_s`` after the retirement, which must be longer than any request of the session
can be under way; or earlier, oldest first, when there are more than ``max_tombstones``. Tombstones never count against
``max_sessions``: a run of any length ends in 503 only when that many episodes are open at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from protocol.config import AffinityConfig
from protocol.errors import ActorDied, HttpError, NetworkError, Outcome, ReadTimeout
from protocol.messages import GenerateRequest, message
from protocol.ports import ActorHandle, backend, data_call
from protocol.serving.entrypoint import TurnResult
from protocol.serving.gateway import ReplicaView
from protocol.serving.peer import PEER_LOST, Peer
from protocol.tombstones import Tombstones


@message
class BackendCounts:
    """One backend as the router counts it."""

    name: str
    healthy: bool
    in_flight: int
    assigned: int


@message
class AffinitySnapshot:
    """What a router holds. ``bindings``: sessions bound, to removed backends too."""

    backends: tuple[BackendCounts, ...]
    bindings: int
    tombstones: int


class RoutedBackend:
    """One backend as the router keeps it."""

    __slots__ = ("name", "handle", "healthy", "in_flight", "assigned", "suspect_until")

    def __init__(self, name: str, handle: ActorHandle) -> None:
        self.name = name
        self.handle = handle
        self.healthy = True
        self.in_flight = 0
        self.assigned = 0
        self.suspect_until = 0.0


class SessionAffinityRouter:
    """Routes turns by session. An actor.

    Args:
        config: how many sessions, and how long retired ones are remembered.
        backends: (name of the replica, handle of its entrypoint) pairs.
        gateway: handle of the Gateway, which is asked who is routable; None: only set_backend says so.
    """

    def __init__(
        self,
        config: AffinityConfig,
        backends: tuple[tuple[str, ActorHandle], ...],
        gateway: ActorHandle | None = None,
    ) -> None:
        self._config = config
        self._backends = {name: RoutedBackend(name, handle) for name, handle in backends}
        self._bindings: dict[str, str] = {}
        self._tombstones = Tombstones(config.tombstone_ttl_s, config.max_tombstones)
        self._gateway = None if gateway is None else Peer(gateway, config.call_timeout_s)
        self._open: dict[str, list[tuple[ActorHandle, Any]]] = {}  # session -> its turns that may be sent yet, as calls
        self._ending: dict[asyncio.Future[None], None] = {}
        self._sync_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._gateway is not None:
            self._sync_task = backend().periodic(self._config.sync_interval_s, self._sync, name="affinity-sync")

    async def stop(self) -> None:
        if self._sync_task is not None:
            self._sync_task.cancel()

    # --- turns ---

    @data_call
    async def handle(self, request: GenerateRequest) -> TurnResult:
        """Forward a turn to the backend of its session, which a new session is bound to here.

        Raises:
            HttpError: *not done*: 400 without a session id, 410 for a retired session, 503 when there is no capacity or
                no healthy backend for it.
            ReadTimeout: *unknown*, after ``forward_timeout_s``. CallCancelled: *unknown*, it was retired meanwhile.
            SeatrialError: of the backend, as it is; nothing is replayed.
        """
        session = request.session_id
        try:
            name = self._acquire(session)
        except HttpError as error:
            status = error.fields["status"]
            backend().emit(
                "affinity.refused", session=session, request=request.request_id, status=status, why=error.message
            )
            raise
        target = self._backends[name]
        target.in_flight += 1
        turn = (target.handle, target.handle.generate(request))
        self._open.setdefault(session, []).append(turn)
        try:
            async with asyncio.timeout(self._config.forward_timeout_s):
                result: TurnResult = await turn[1]
                return result
        except (NetworkError, ActorDied):
            self._suspect(target)
            raise
        except TimeoutError:
            waited = self._config.forward_timeout_s
            raise ReadTimeout(f"{name} did not answer {request.request_id} within {waited} s") from None
        finally:
            target.in_flight -= 1
            self._over(session, turn)

    def _suspect(self, target: RoutedBackend) -> None:
        target.suspect_until = _now() + self._config.suspect_s

    def _over(self, session: str, turn: tuple[ActorHandle, Any]) -> None:
        turns = self._open[session]
        turns.remove(turn)
        if not turns:
            del self._open[session]
            for ending in self._ending:
                if not ending.done():
                    ending.set_result(None)

    async def acquire(self, session_id: str) -> str:
        """The backend of a session, bound now if it is new. Raises HttpError as :meth:`handle`."""
        return self._acquire(session_id)

    def _acquire(self, session: str) -> str:
        if not session:
            raise refused(400, "a routed request must carry a session_id")
        self._tombstones.expire(_now())
        if session in self._tombstones:
            raise refused(410, f"session {session} is retired")
        bound = self._bindings.get(session)
        if bound is not None:
            found = self._backends.get(bound)
            if found is None or not found.healthy:
                why = "is gone" if found is None else "is not healthy"
                raise refused(503, f"session {session} is bound to {bound}, which {why}")
            return bound
        if len(self._bindings) >= self._config.max_sessions:
            raise refused(503, f"{len(self._bindings)} sessions are bound, as many as may be")
        chosen = self._least_loaded()
        chosen.assigned += 1
        self._bindings[session] = chosen.name
        backend().emit("affinity.bound", session=session, target=chosen.name, assigned=chosen.assigned)
        return chosen.name

    def _least_loaded(self) -> RoutedBackend:
        """Of the healthy backends. Raises HttpError (503) without one."""
        healthy = [one for one in self._backends.values() if one.healthy]
        if not healthy:
            raise refused(503, f"none of {len(self._backends)} backends is healthy")
        now = _now()
        trusted = [one for one in healthy if one.suspect_until <= now] or healthy
        return min(trusted, key=lambda one: (one.in_flight, one.assigned))  # the first of equals, by age

    # --- control ---

    async def set_backend(self, name: str, healthy: bool) -> None:
        """Health of a backend. Bindings are untouched. Unknown names are ignored: it was removed meanwhile."""
        found = self._backends.get(name)
        if found is not None:
            found.healthy = healthy

    async def replace_backends(self, backends: tuple[tuple[str, ActorHandle], ...]) -> None:
        """A new table. Bindings to backends that stay are kept, and their counts; those to others fail from now on."""
        old = self._backends
        self._backends = {}
        for name, handle in backends:
            kept = old.get(name)
            if kept is None:
                kept = RoutedBackend(name, handle)
                kept.assigned = sum(bound == name for bound in self._bindings.values())  # it was here before
            kept.handle = handle
            self._backends[name] = kept

    async def retire_sessions(self, session_ids: tuple[str, ...]) -> None:
        """The episodes are over. Unknown ids get tombstones too. Idempotent: a repetition does not prolong one.

        Turns of theirs that are under way have lost their callers. The entrypoints are told, so that none is sent to a
        backend from now on (A-I2); one that is sent already runs to its end there.

        Raises ReadTimeout, *unknown*, after ``retire_timeout_s``: an entrypoint does not say so, and a turn that waits
        at its gate may be sent yet. All of them are retired then too, and repeating it is harmless.
        """
        self._bury(session_ids)
        await self._until_unsent(session_ids)

    def _bury(self, sessions: tuple[str, ...]) -> None:
        """Unbind sessions and set their tombstones: from now on no turn of theirs is taken."""
        now = _now()
        expired = self._tombstones.expire(now)
        unbound = 0
        for session in sessions:
            bound = self._bindings.pop(session, None)
            if bound is not None:
                unbound += 1
                if bound in self._backends:
                    self._backends[bound].assigned -= 1
        expired += self._tombstones.add(sessions, now)
        backend().emit(
            "affinity.retired",
            sessions=len(sessions),
            bound=unbound,
            tombstones=len(self._tombstones),
            expired=expired,
        )

    async def _until_unsent(self, sessions: tuple[str, ...]) -> None:
        """Wait until nothing of buried sessions can be sent any more, within one deadline. Raises ReadTimeout."""
        left = [session for session in sessions if self._may_be_sent(session)]
        if not left:
            return
        try:
            async with asyncio.timeout(self._config.retire_timeout_s):
                await self._given_up(left)
        except TimeoutError:
            late = next((session for session in left if self._may_be_sent(session)), left[0])
            raise ReadTimeout(f"turns of {late} may still be sent: who has them does not answer") from None

    def _may_be_sent(self, session: str) -> bool:
        """Whether somebody has a turn of a buried session and has not said that he will not send it."""
        return session in self._open

    async def _given_up(self, sessions: list[str]) -> None:
        """Give up the turns that are under way of sessions, and wait until they have ended."""
        for session in sessions:
            for handle, call in self._open.get(session, ()):
                handle.cancel(call)
        while any(session in self._open for session in sessions):
            ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ending[ending] = None
            try:
                await ending
            finally:
                del self._ending[ending]

    async def snapshot(self) -> AffinitySnapshot:
        """What is bound, remembered and in flight."""
        counts = (BackendCounts(b.name, b.healthy, b.in_flight, b.assigned) for b in self._backends.values())
        return AffinitySnapshot(tuple(counts), len(self._bindings), len(self._tombstones))

    # --- inside ---

    async def _sync(self) -> None:
        assert self._gateway is not None
        try:
            views: Iterable[ReplicaView] = await self._gateway.call("engines")
        except PEER_LOST:
            return  # its next incarnation is asked in an interval
        routable = {view.address.name: view.routable for view in views}
        for found in self._backends.values():
            found.healthy = routable.get(found.name, False)


def refused(status: int, why: str) -> HttpError:
    """What a router refuses before anything is forwarded."""
    return HttpError(why, status=status, body=why, outcome=Outcome.NOT_DONE)


def _now() -> float:
    return asyncio.get_running_loop().time()
