"""The gateway: the one entry that forwards generation calls to replicas and counts what is in flight on each.

What it promises (scaling.md 5.1, hazards H4 and H5):

- The replica with the fewest calls in flight gets the next one; among equals, the one that has waited longest.
- A pick counts in the same step of the event loop, so no other pick can see the old count.
- Counts belong to an incarnation, never to an address: a port is used again by the next engine.
- A transport error or a 5xx is retried on another replica, and the count moves there before the back-off: the sum over
  all replicas equals the open calls at every instant. A 4xx and a cancellation are never retried.
- A call of unknown outcome is sent again only if the request says that this is harmless: to another replica if there is
  one, else when the first has let go of it (the id is live there until then, and refused).
- The count is given back once, however the call ends. ``served`` counts successes.
- A stream that breaks after its first event is never sent again: its reader has part of an answer already.
- After a transport error a replica is *suspect*: not routed to until health readmits it. Those that merely could
  not be connected to (nothing was sent, *not done*) are routed to at once where nobody else is left, or most are such.
- With a journal a gateway that was killed has its replicas again, and those whose admission was closed stay closed.
  All others are suspect until health has looked at them. What was in flight is lost, as its callers were told. Where
  storage fails, whoever has changed something waits for the answer until that is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from protocol.config import GatewayConfig
from protocol.errors import ConnectionLost, HttpError, NetworkError, NoReplica, SeatrialError
from protocol.journal import Journal
from protocol.messages import EngineAddress, ForwardReply, ForwardRequest, GenerateRequest, GenerateResult, message
from protocol.ports import EngineClient, backend, data_call
from protocol.serving.dispatch import Dispatcher, concluded
from protocol.serving.gateway_page import page
from protocol.serving.pick_set import Replica

_UNSAVED = 1_000_000  # more changes of the roster than can have been under way when a gateway was killed


@message
class ReplicaView:
    """One replica as the gateway sees it. ``why``: the reason that it is not routable, empty when it is."""

    address: EngineAddress
    in_flight: int
    served: int
    routable: bool
    why: str


@message
class HealthView:
    """What a prober needs of the gateway. ``roster`` is None when it is the one of the version that was named.

    ``suspects``: a transport error since health last judged. ``stalled``: calls in flight and no success in the window.
    """

    version: int
    roster: tuple[EngineAddress, ...] | None
    suspects: tuple[EngineAddress, ...]
    stalled: tuple[EngineAddress, ...]


class Gateway(Dispatcher):
    """Forwards generation calls to the least loaded routable replica. An actor.

    Args:
        config: attempts, back-off and time-outs.
    """

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self._newest: dict[str, int] = {}
        self._roster_version = 0
        self._journal = Journal(config.journal, self._state)

    async def start(self) -> None:
        await super().start()
        found = await self._journal.load()
        if found is None:
            return
        self._newest = dict(found["newest"])
        self._roster_version = found["version"] + _UNSAVED  # another than any that was told: who has one asks again
        for address, closed in found["replicas"]:
            replica = self._known(EngineAddress(*address))
            replica.closed, replica.suspect, replica.why = closed, not closed, "the gateway was started anew"

    def _state(self) -> dict[str, Any]:
        members = [replica for replica in self._replicas.values() if not replica.removed]
        return {
            "newest": list(self._newest.items()),
            "version": self._roster_version,
            "replicas": [[dataclasses.astuple(one.address), one.closed] for one in members],
        }

    # --- data ---

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Send a request to a replica, and to another one when that fails in a way that permits it.

        Raises:
            NoReplica: nothing was routable for ``routable_wait_s``. *Not done* unless an earlier attempt is unknown.
            NetworkError, HttpError: of the last attempt, earlier ones attached, their number in ``attempts``. A 4xx is
                *not done*; the outcome is *unknown* as soon as that of any attempt is.
        """
        config = self._config
        result, replica, failures = await self._dispatch(
            request,
            lambda client: client.generate(
                request, connect_timeout_s=config.connect_timeout_s, read_timeout_s=config.read_timeout_s
            ),
        )
        self._release(request, replica, True)
        return dataclasses.replace(result, attempts=len(failures) + 1) if failures else result

    @data_call
    async def forward(self, request: ForwardRequest) -> ForwardReply:
        """As :meth:`generate`, for a client's own JSON. Raises as it does."""
        config = self._config
        body, replica, failures = await self._dispatch(
            request,
            lambda client: client.forward(
                request.route,
                request.body,
                connect_timeout_s=config.connect_timeout_s,
                read_timeout_s=config.read_timeout_s,
            ),
        )
        self._release(request, replica, True)
        address = replica.address
        return ForwardReply(
            body, replica.name, replica.incarnation, len(failures) + 1, address.host, address.port
        )  # fmt: skip

    @data_call
    async def forward_stream(self, request: ForwardRequest) -> AsyncGenerator[str, None]:
        """As :meth:`forward`, for a streamed answer: the data of each event as it comes, ``[DONE]`` included.

        Retried until the first event has come, never after it: the client has seen part of an answer then. Raises as
        :meth:`generate` does, also after events.
        """
        opened, replica, failures = await self._dispatch(request, lambda client: self._open(client, request))
        event, events = opened
        ok = False
        try:
            async with contextlib.aclosing(events):
                yield event
                async for event in events:
                    replica.progress_at = self._now()
                    yield event
            ok = True
        except (NetworkError, HttpError) as error:
            self._blame(replica, error)
            raise concluded([*failures, error]) from None
        finally:
            self._release(request, replica, ok)

    async def _open(self, client: EngineClient, request: ForwardRequest) -> tuple[str, AsyncGenerator[str, None]]:
        """A stream whose first event has come: (that event, the rest)."""
        config = self._config
        events = client.forward_stream(
            request.route,
            request.body,
            connect_timeout_s=config.connect_timeout_s,
            read_timeout_s=config.read_timeout_s,
        )
        try:
            return await anext(events), events
        except StopAsyncIteration:
            raise ConnectionLost(f"{request.route}: {client.address.name} streamed nothing") from None
        except BaseException:
            await events.aclose()
            raise

    # --- control ---

    async def add_replica(self, address: EngineAddress) -> bool:
        """Route to a replica. The caller vouches for its health (ready, weights validated).

        An older incarnation of the name is removed. Idempotent. Returns False, without effect, when this incarnation
        was removed or a newer one is known: a late message of a superseded recovery must not revive the dead.
        """
        if self._find(address) is not None:
            await self._journal.keep()  # who asked first may not have been answered
            return True
        newest = self._newest.get(address.name, -1)
        if newest >= address.incarnation:
            return False
        older = self._replicas.get((address.name, newest))
        if older is not None:
            self._remove(older, "superseded")
        replica = self._known(address)
        self._newest[address.name] = address.incarnation
        self._roster_version += 1
        self._route(replica)
        await self._journal.keep()
        return True

    async def replace_replica(self, old: EngineAddress, new: EngineAddress) -> bool:
        """As ``add_replica`` of ``new``, but only if ``old`` is still a member: False when it was removed meanwhile."""
        if self._find(new) is None and self._find(old) is None:
            return False
        return await self.add_replica(new)

    async def remove_replica(self, address: EngineAddress) -> bool:
        """Forget a replica: no further pick; its counters stay until its calls have ended. False when not known."""
        replica = self._find(address)
        if replica is None:
            return False
        self._remove(replica, "removed")
        await self._journal.keep()
        return True

    async def set_routable(self, address: EngineAddress, routable: bool, why: str) -> bool:
        """Health's verdict on a replica. Returns whether it is routable now; one closed or removed never is."""
        replica = self._find(address)
        if replica is None:
            return False
        replica.suspect = False
        if routable and not (replica.routable or replica.closed):
            replica.server_errors = 0
            replica.progress_at = self._now()
            self._route(replica)
        elif not routable and replica.routable:
            self._unroute(replica, why)
        elif not routable:
            replica.why = why
        return replica.routable

    async def close_admission(self, address: EngineAddress, why: str) -> bool:
        """No further pick of this incarnation, for ever: health cannot readmit it (scaling.md 2.4 a, 5.2).

        Calls in flight go on; see :meth:`wait_idle`. Idempotent. Returns False when the replica is not known.
        """
        replica = self._find(address)
        if replica is None:
            return False
        replica.closed = True
        replica.suspect = False
        if replica.routable:
            self._unroute(replica, why)
        await self._journal.keep()
        return True

    async def reopen_admission(self, address: EngineAddress) -> bool:
        """Take a closing back, and route to the replica again; whether it is known. Only for whoever closed it."""
        replica = self._find(address)
        if replica is None:
            return False
        replica.closed = False
        if not replica.routable:
            self._route(replica)
        await self._journal.keep()
        return True

    async def wait_idle(self, address: EngineAddress, timeout_s: float) -> bool:
        """Whether the replica has no call in flight, waiting for that up to ``timeout_s``. True when not known."""
        replica = self._replicas.get((address.name, address.incarnation))
        if replica is None or not replica.in_flight:
            return True
        waiter = asyncio.get_running_loop().create_future()
        replica.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
            return True
        except TimeoutError:
            return False

    async def engines(self) -> tuple[ReplicaView, ...]:
        """Every replica with its counters, also those that only drain, in the order in which they were added."""
        return tuple(ReplicaView(r.address, r.in_flight, r.served, r.routable, r.why) for r in self._replicas.values())

    async def roster(self) -> tuple[EngineAddress, ...]:
        """Every replica that has not been removed, routable or not."""
        return tuple(r.address for r in self._replicas.values() if not r.removed)

    async def health_view(self, known_version: int, stall_window_s: float) -> HealthView:
        """What has changed since the roster of ``known_version`` (0: nothing known), and who looks ill from here."""
        stalled_since = self._now() - stall_window_s
        members = [r for r in self._replicas.values() if not r.removed]
        return HealthView(
            self._roster_version,
            None if known_version == self._roster_version else tuple(r.address for r in members),
            tuple(r.address for r in members if r.suspect),
            tuple(r.address for r in members if r.in_flight and r.progress_at <= stalled_since),
        )

    async def metrics(self) -> str:
        """Prometheus text: per replica what is in flight, served and routable; retries and failures by cause."""
        return page(self._replicas.values(), self._retries, self._failures)

    async def models(self) -> str:
        """The text of GET /v1/models of a routable replica, the longest in the roster first.

        Raises:
            NoReplica: nothing is routable, or nobody gave it (attached: why not).
        """
        failures: list[SeatrialError] = []
        config = self._config
        for replica in [r for r in self._replicas.values() if r.routable][: config.attempts]:
            try:
                status, text = await replica.client.get(
                    "/v1/models", connect_timeout_s=config.connect_timeout_s, read_timeout_s=config.connect_timeout_s
                )
                if status == 200:
                    return text
                failures.append(HttpError(status=status, body=text))
            except NetworkError as error:
                failures.append(error)
        raise NoReplica(f"/v1/models: none of {len(failures)} routable replicas gave it", attached=tuple(failures))

    # --- the roster ---

    def _known(self, address: EngineAddress) -> Replica:
        """Make it a member, not routed to."""
        replica = Replica(address, backend().engines.client(address), self._now())
        self._replicas[(address.name, address.incarnation)] = replica
        return replica

    def _find(self, address: EngineAddress) -> Replica | None:
        replica = self._replicas.get((address.name, address.incarnation))
        return None if replica is None or replica.removed else replica

    def _remove(self, replica: Replica, why: str) -> None:
        if replica.removed:
            return
        replica.removed = True
        replica.suspect = False
        if replica.routable:
            self._unroute(replica, why)
        self._roster_version += 1
        if not replica.in_flight:
            del self._replicas[(replica.name, replica.incarnation)]
