"""How one call finds its replica: picked, counted, and moved to another one when it fails in a way that permits it.

The data path of `protocol.serving.gateway`, whose module text says what it promises (scaling.md 5.1).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from protocol.config import GatewayConfig
from protocol.errors import HttpError, NetworkError, NoReplica, Outcome, SeatrialError
from protocol.messages import ForwardRequest, GenerateRequest
from protocol.ports import EngineClient, backend
from protocol.serving.pick_set import PickSet, Replica

Key = tuple[str, int]
UNREACHED = "ConnectTimeout"
"""Why a replica is suspect to which no connection came about."""
STILL_RUNS = "StillRuns"
"""Why a call moves on from a replica that refused its id: an earlier attempt of the same call runs there."""
Dispatched = GenerateRequest | ForwardRequest
T = TypeVar("T")


class Dispatcher:
    """Replicas with their counts, and the way of a call to one of them. What Gateway is made on.

    Args:
        config: attempts, back-off and time-outs.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._replicas: dict[Key, Replica] = {}
        self._picks = PickSet()
        self._some_routable = asyncio.Event()
        self._retries: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._emit: Callable[..., None]
        self._now: Callable[[], float]

    async def start(self) -> None:
        self._emit = backend().emit
        self._now = asyncio.get_running_loop().time

    async def _dispatch(
        self, request: Dispatched, send: Callable[[EngineClient], Awaitable[T]]
    ) -> tuple[T, Replica, list[SeatrialError]]:
        """Pick, send and retry: the answer, the replica that gave it, *still counted*, and the failures before it."""
        if not self._picks.size:
            await self._wait_routable()
        config = self._config
        replica: Replica | None = self._pick(request)
        failures: list[SeatrialError] = []
        tried: list[Replica] = []
        left: dict[Replica, float] = {}  # where an attempt may still run, since when nobody waits for it
        answered = False
        try:
            while True:
                assert replica is not None, "a send goes to a replica that is counted"
                try:
                    answer = await send(replica.client)
                    answered = True
                    return answer, replica, failures
                except (NetworkError, HttpError) as error:
                    tried.append(replica)
                    self._blame(replica, error)
                    why = type(error).__name__
                    if replica in left and _is_duplicate(error):
                        why = STILL_RUNS
                        failures.insert(-1, error)  # what is to be told is that an attempt was not answered
                        again = request.idempotent and len(failures) < config.attempts
                    else:
                        failures.append(error)
                        again = self._may_retry(request, error, len(failures))
                    if not again:
                        raise concluded(failures) from None
                    if why == STILL_RUNS or (isinstance(error, NetworkError) and error.outcome is Outcome.UNKNOWN):
                        left[replica] = self._now()
                    replica = self._elsewhere(request, replica, tried, why, failures)
                await asyncio.sleep(config.backoff_s * len(failures))
                while True:
                    if replica is not None and not replica.routable:
                        # It left the pick set while this call slept: what is not sent yet must not go there.
                        replica = self._elsewhere(request, replica, [*tried, replica], replica.why, failures)
                    if replica is None:
                        await self._wait_routable()
                        replica = self._pick(request, tried)
                    wait_s = self._held_s(replica, left)
                    if wait_s <= 0:
                        break
                    await asyncio.sleep(wait_s)
        except NoReplica as error:
            raise concluded([*failures, error], len(failures)) from None
        finally:
            if replica is not None and not answered:
                self._release(request, replica, False)

    def _pick(self, request: Dispatched, tried: Sequence[Replica] = ()) -> Replica:
        """Pick and count in one step. Something must be routable, and nothing awaited since that was seen.

        One of those ``tried`` only where there is no other.
        """
        key = request.route_key if isinstance(request, ForwardRequest) else ""
        if key:
            replica = self._pick_by(key)
        else:
            replica = (self._picks.pick_other(tried) if tried else None) or self._picks.pick()
        if replica.in_flight == 1:
            replica.progress_at = self._now()
        self._emit(
            "gateway.picked",
            request=request.request_id,
            replica=replica.name,
            replica_inc=replica.incarnation,
            in_flight=replica.in_flight,
        )
        return replica

    def _pick_by(self, key: str) -> Replica:
        """The routable replica that a key falls to, counted. When one leaves, only its own keys move."""
        members = [replica for replica in self._replicas.values() if replica.routable]
        best = max(members, key=lambda one: hashlib.blake2b(f"{one.name}/{key}".encode(), digest_size=8).digest())
        self._picks.count(best, +1)
        return best

    def _elsewhere(
        self, request: Dispatched, old: Replica, tried: list[Replica], why: str, failures: list[SeatrialError]
    ) -> Replica | None:
        """The replica that a retry goes to, counted. None: nobody is routable, so it waits, uncounted, as a new call.

        Raises the failure when the only routable replica is the one that failed, unless nothing was sent to it, or it
        runs an earlier attempt.
        """
        new = self._move(request, old, tried, why)
        if new is None:
            if old.routable and why in (UNREACHED, STILL_RUNS):
                return old
            if self._picks.size:
                raise concluded(failures)
            # All are suspects at once, say after a burst of lost replies. Health readmits those that are well.
            self._release(request, old, False)
        return new

    async def _wait_routable(self) -> None:
        try:
            async with asyncio.timeout(self._config.routable_wait_s):
                while not self._picks.size:
                    await self._some_routable.wait()
        except TimeoutError:
            known = len(self._replicas)
            self._failures["NoReplica"] = self._failures.get("NoReplica", 0) + 1
            waited = self._config.routable_wait_s
            raise NoReplica(f"none of {known} replicas was routable for {waited} s") from None

    def _may_retry(self, request: Dispatched, error: SeatrialError, sent: int) -> bool:
        if isinstance(error, HttpError) and error.fields["status"] < 500:
            return False
        return sent < self._config.attempts and (error.outcome is Outcome.NOT_DONE or request.idempotent)

    def _held_s(self, replica: Replica, left: Mapping[Replica, float]) -> float:
        """How long a call waits yet before it goes to a replica, where an earlier attempt of it may still run."""
        return left[replica] + self._config.let_go_s - self._now() if replica in left else 0.0

    def _move(self, request: Dispatched, old: Replica, tried: list[Replica], why: str) -> Replica | None:
        """Count on another replica, then no longer on this one, in one step: there is no instant without a count."""
        new = self._picks.pick_other(tried) or self._picks.pick_other([old])
        if new is None:
            return None
        self._uncount(old)
        if new.in_flight == 1:
            new.progress_at = self._now()
        self._retries[why] = self._retries.get(why, 0) + 1
        self._emit(
            "gateway.moved",
            request=request.request_id,
            replica=new.name,
            replica_inc=new.incarnation,
            old=old.name,
            old_inc=old.incarnation,
            why=why,
        )
        return new

    def _release(self, request: Dispatched, replica: Replica, ok: bool) -> None:
        if ok:
            replica.served += 1
            replica.server_errors = 0
            replica.progress_at = self._now()
        self._uncount(replica)
        self._emit(
            "gateway.released",
            request=request.request_id,
            replica=replica.name,
            replica_inc=replica.incarnation,
            in_flight=replica.in_flight,
            ok=ok,
        )

    def _uncount(self, replica: Replica) -> None:
        if replica.routable:
            self._picks.count(replica, -1)
        else:
            replica.in_flight -= 1
        if not replica.in_flight:
            for waiter in replica.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            replica.waiters.clear()
            if replica.removed:
                self._replicas.pop((replica.name, replica.incarnation), None)

    def _blame(self, replica: Replica, error: SeatrialError) -> None:
        why = type(error).__name__
        self._failures[why] = self._failures.get(why, 0) + 1
        if isinstance(error, HttpError):
            if error.fields["status"] < 500:
                return
            replica.server_errors += 1
            if replica.server_errors < self._config.server_errors_to_suspect:
                return
        if replica.routable:
            replica.suspect = True
            self._unroute(replica, why)

    # --- the pick set ---

    def _route(self, replica: Replica) -> None:
        replica.routable = True
        replica.why = ""
        self._picks.add(replica)
        self._some_routable.set()
        self._emit("gateway.routable", replica=replica.name, replica_inc=replica.incarnation)

    def _unroute(self, replica: Replica, why: str) -> None:
        self._picks.discard(replica)
        replica.routable = False
        replica.why = why
        if not self._picks.size:
            self._some_routable.clear()
        self._emit("gateway.unroutable", replica=replica.name, replica_inc=replica.incarnation, why=why)
        if why == UNREACHED or not self._picks.size:
            self._route_to_the_unreached()

    def _route_to_the_unreached(self) -> None:
        """Those that merely could not be connected to are routed to again where nobody else is left, or most are such.

        Nothing was sent to them, so that trying them costs no more than waiting; and that most fell ill at once is less
        likely than that the way to them is bad, or that this process was kept from running. They stay suspect: health
        looks at them all the same, and its word counts.
        """
        members = [replica for replica in self._replicas.values() if not (replica.closed or replica.removed)]
        unreached = [one for one in members if one.suspect and not one.routable and one.why == UNREACHED]
        if not self._picks.size or 2 * len(unreached) > len(members):
            for replica in unreached:
                self._route(replica)


def _is_duplicate(error: SeatrialError) -> bool:
    """Whether SGLang refused an id that is live there (engines.md 3)."""
    return (
        isinstance(error, HttpError)
        and error.fields["status"] == 400
        and "Duplicate request ID" in str(error.fields.get("body", ""))
    )


def concluded(failures: list[SeatrialError], attempts: int | None = None) -> SeatrialError:
    """The last error, with the earlier ones attached. One attempt of unknown outcome makes the whole unknown."""
    *earlier, error = failures
    error.attached = (*error.attached, *earlier)
    error.fields = {**error.fields, "attempts": len(failures) if attempts is None else attempts}
    if any(e.outcome is Outcome.UNKNOWN for e in earlier):
        error.outcome = Outcome.UNKNOWN
    return error
