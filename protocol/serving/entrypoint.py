"""One entrypoint: takes the turns of sessions, asks the gate for a lease, forwards to its own replica, settles.

The place of the session server (serving.md 2.5): one entrypoint a replica, one gate an entrypoint. Here a turn is a
`GenerateRequest`; JSON, streaming and the trace hooks are the session server's, on the same three steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from protocol.config import EntrypointConfig
from protocol.errors import (
    ActorDied,
    AdmissionTimeout,
    BarrierError,
    CallCancelled,
    ConnectionRefused,
    GateRefused,
    NetworkError,
    NoSuchActor,
    ReadTimeout,
    SeatrialError,
)
from protocol.messages import EngineAddress, GenerateRequest, GenerateResult, message
from protocol.ports import ActorHandle, EngineClient, backend, data_call
from protocol.serving.engine_work import found_idle
from protocol.serving.gate import RequestLease, SettlementReceipt
from protocol.serving.peer import PEER_LOST, Peer
from protocol.serving.settlement import RejectionPattern, answered, failed

_ABORTED = "abort"
_LOOK_S = 0.25
_LONGEST_SLICE = 16
"""A gate that is closed is asked to wait for at most so many call time-outs: it would be long until a grant is missed
whose answer was lost, and a drain waits for that one."""


@message
class TurnResult:
    """A turn's answer. ``model_step``: the version on its lease, -1 without a gate; ``entrypoint``: who answered.

    ``result.request_id`` is the lease's, so that a transcript can be matched with what the gate and the trace have.
    """

    result: GenerateResult
    model_step: int
    entrypoint: str


class Entrypoint:
    """Forwards the turns of sessions to one replica, each under a lease. An actor.

    Args:
        config: time-outs, and which engine it is.
        address: the replica at the start; a later incarnation of it is found through the gateway.
        gateway: handle of the Gateway.
        gate: handle of the RequestGate; None: turns are forwarded without a lease.
    """

    def __init__(
        self, config: EntrypointConfig, address: EngineAddress, gateway: ActorHandle, gate: ActorHandle | None
    ) -> None:
        self._config = config
        self._address = address
        self._gateway = Peer(gateway, config.call_timeout_s)
        self._gate = gate
        self._rejection = RejectionPattern(config)
        self._client: EngineClient
        self._stale = False
        self._aborting = False
        self._turns: dict[asyncio.Task[TurnResult], None] = {}
        self._left: dict[asyncio.Task[TurnResult], None] = {}
        """Those of callers that have gone."""
        self._held: dict[str, int] = {}
        """Leases under which a turn may be running: incarnation of the gate that granted each."""
        self._oldest = 0
        """Leases of incarnations before this one begin nothing any more."""
        self._inherited = False
        """Whether turns of an earlier incarnation of this process may run at the replica: nobody else knows of them."""
        self._mute: int | None = None
        """Incarnation of the replica that lived after this process began, and had no way to say whether any do."""
        self._telling: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        self._client = backend().engines.client(self._address)
        self._inherited = backend().me.incarnation > 1  # the first is 1

    async def stop(self) -> None:
        for task in (*self._turns, *self._telling):
            task.cancel()

    # --- turns ---

    @data_call
    async def generate(self, request: GenerateRequest) -> TurnResult:
        """One turn of ``request.session_id``. The request goes to the replica at most once.

        A caller that gives up does not end the turn: it is awaited to its end and settled all the same (2.3). What is
        not sent by then, for it waits at the gate, is never sent: its session may be retired.

        Raises:
            AdmissionTimeout, GatePoisoned: *not done*. NetworkError, HttpError: of the replica, as they are.
        """
        turn = asyncio.get_running_loop().create_task(self._turn(request), name=f"turn-{request.request_id}")
        self._turns[turn] = None
        turn.add_done_callback(self._ended)
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            if turn in self._turns:
                self._left[turn] = None
            raise

    def _ended(self, turn: asyncio.Task[TurnResult]) -> None:
        del self._turns[turn]
        if self._left:
            self._left.pop(turn, None)
        if not turn.cancelled():
            turn.exception()  # of a caller that gave up nobody else asks

    async def set_aborting(self, aborting: bool) -> None:
        """While set, a turn that is not sent yet is answered as aborted, and one that comes back is relabelled so.

        Set before the replica is told to abort: what slips in between would not be aborted by it (serving.md 3.1).
        """
        self._aborting = aborting

    async def quiet(self, incarnation: int) -> bool:
        """Whether no turn is left that an earlier incarnation of the gate granted; from now on none begins.

        Asked before weights change behind a gate that was restarted: it knows only of the leases that it has granted
        itself. An end of unknown outcome counts as left until the gate that lives has heard of it.

        Where this process was restarted too, both are gone who knew of a turn, and only the replica can say that it
        has ended: not quiet until that was seen with nothing to do, or another process is in its place.

        Args:
            incarnation: of the gate that lives.

        Raises:
            BarrierError: *not done*: the replica has no way to say so; the text names what is missing.
        """
        self._oldest = max(self._oldest, incarnation)
        if any(granted_by < incarnation for granted_by in self._held.values()):
            return False
        if self._inherited and await self._nothing_inherited():
            self._inherited = False
        return not self._inherited

    async def _nothing_inherited(self) -> bool:
        """Whether no turn that an earlier incarnation of this process has sent runs at the replica as it is now."""
        limit_s = self._config.call_timeout_s / 2  # who asks waits for about twice as long
        try:
            client = await self._replica()
            if self._mute is not None and client.address.incarnation > self._mute:
                return True  # begun after this process was: nothing of before it can run there
            async with asyncio.timeout(self._config.call_timeout_s):
                return await found_idle(client, limit_s)
        except (NetworkError, TimeoutError):
            self._stale = True  # dead, perhaps, and another process in its place, where nothing of before can run
            return False
        except BarrierError:
            self._mute = self._address.incarnation
            raise

    async def _turn(self, request: GenerateRequest) -> TurnResult:
        me = backend().me.name
        if self._gate is None:
            return TurnResult(await self._forward(request), -1, me)
        gate, lease = await self._lease(self._gate, request.session_id, self._gone)
        receipt: SettlementReceipt | None = None
        try:
            result = await self._forward(request)
            receipt = self._recorded(lease, answered(result))
        except SeatrialError as error:
            receipt = self._recorded(lease, failed(error, self._rejection))
            raise
        finally:
            await self._settle(gate, lease, receipt)
        return TurnResult(dataclasses.replace(result, request_id=lease.request_id), lease.model_step, me)

    async def _forward(self, request: GenerateRequest) -> GenerateResult:
        if self._aborting:
            return GenerateResult(request.request_id, _ABORTED, request.prompt_tokens, 0)
        client = await self._replica()
        if self._left and self._gone():
            raise ConnectionRefused(f"{request.request_id} is not sent: its caller has gone")
        if self._aborting:  # since then: what is sent into an abort is held, and not aborted
            return GenerateResult(request.request_id, _ABORTED, request.prompt_tokens, 0)
        try:
            result = await client.generate(
                request,
                connect_timeout_s=self._config.connect_timeout_s,
                read_timeout_s=self._config.forward_timeout_s,
            )
        except NetworkError:
            self._stale = True
            raise
        if self._aborting and result.finish_reason != _ABORTED:
            return dataclasses.replace(result, finish_reason=_ABORTED)
        return result

    def _recorded(self, lease: RequestLease, receipt: SettlementReceipt) -> SettlementReceipt:
        """Put the end of a turn on record; a receipt whose end could not be recorded says so."""
        backend().emit("entrypoint.turn", lease=lease.request_id, session=lease.session_id, label=receipt.label)
        return receipt

    # --- the gate ---

    def _gone(self) -> bool:
        """Whether the caller of the turn that is running has gone."""
        return bool(self._left) and asyncio.current_task() in self._left

    async def _lease(
        self, gate: ActorHandle, session_id: str, gone: Callable[[], bool]
    ) -> tuple[ActorHandle, RequestLease]:
        """A lease and the gate that granted it. A gate that is dead and not yet restarted is one that is not open.

        The lease is named here, so that the gate may be asked for it again when an answer does not come. An ask that
        was not answered may still wait at the gate: who leaves without a lease tells it that nothing was sent.

        A gate that is closed is asked to wait in slices, each twice as long as the one before: whoever is asked anew
        waits at the end of the queue.

        Raises:
            ReadTimeout: *unknown*, when the gate does not answer; a lease that it has granted is settled when it does.
            AdmissionTimeout, GatePoisoned, GateRefused: *not done*. ConnectionRefused: *not done*, the caller has gone.
        """
        loop = asyncio.get_running_loop()
        name = backend().new_id("lease")
        ends = loop.time() + self._config.admission_timeout_s
        limit_s = slice_s = self._config.call_timeout_s
        unanswered = False

        def leaves() -> None:
            nobodys = RequestLease(name, session_id, -1, -1)
            self._tell(gate, nobodys, SettlementReceipt(True, True, "failed: never sent"))

        while True:
            left_s = max(ends - loop.time(), 0.0)
            waits_s = min(left_s, slice_s)
            try:
                async with asyncio.timeout(waits_s + limit_s):
                    lease: RequestLease = await gate.request(session_id, waits_s, name)
                if gate.incarnation >= self._oldest:
                    self._held[name] = gate.incarnation
                    return gate, lease
                if not left_s:
                    raise ReadTimeout(f"{gate.name}/{gate.incarnation} is the past, and what came after it not found")
            except AdmissionTimeout:
                slice_s = min(2 * slice_s, _LONGEST_SLICE * limit_s)
                if unanswered and (waits_s == left_s or gone()):
                    leaves()
                if waits_s == left_s:
                    total_s = self._config.admission_timeout_s
                    raise AdmissionTimeout(f"{session_id}: {gate.name} did not open within {total_s} s") from None
                if gone():
                    raise ConnectionRefused(f"a turn of {session_id} is not sent: its caller has gone") from None
                continue
            except (TimeoutError, CallCancelled):
                unanswered = True
                if loop.time() < ends and not gone():
                    continue  # lost, or slow: asking again is harmless
                leaves()
                raise ReadTimeout(f"{gate.name} did not answer a request of {session_id}") from None
            except ActorDied:
                if not left_s:
                    raise  # else whatever it may have granted has gone with it, and nothing was begun
            again = gate
            try:
                again = await backend().lookup(gate.name)
            except NoSuchActor:
                pass
            if again == gate:
                await asyncio.sleep(_LOOK_S)
            self._gate = gate = again

    async def _settle(self, gate: ActorHandle, lease: RequestLease, receipt: SettlementReceipt | None) -> None:
        """Tell the gate until it has heard: the receipt says what is known, and repeating it is harmless."""
        if await self._told(gate, lease, receipt):
            self._held.pop(lease.request_id, None)
        else:
            self._tell(gate, lease, receipt)  # nobody waits for that

    async def _told(self, gate: ActorHandle, lease: RequestLease, receipt: SettlementReceipt | None) -> bool:
        """Whether whoever must know does: a lease is gone with its gate, an unknown end is for the next to know."""
        while True:
            try:
                async with asyncio.timeout(self._config.call_timeout_s):
                    await gate.settle(lease.request_id, receipt)
                return True
            except GateRefused:
                return True  # an earlier telling has arrived
            except (TimeoutError, CallCancelled):
                continue
            except ActorDied:
                return receipt is not None and receipt.safe

    def _tell(self, gate: ActorHandle, lease: RequestLease, receipt: SettlementReceipt | None) -> None:
        """Tell the gate, or the one that comes after it, in the background."""

        async def tell(gate: ActorHandle) -> None:
            while not await self._told(gate, lease, receipt):
                try:
                    gate = await backend().lookup(gate.name)
                except NoSuchActor:
                    pass
                await asyncio.sleep(_LOOK_S)
            self._held.pop(lease.request_id, None)

        task = backend().background(tell(gate), name=f"settle-{lease.request_id}")
        self._telling[task] = None
        task.add_done_callback(lambda done: self._telling.pop(done, None))

    async def _replica(self) -> EngineClient:
        """The client of the replica; after a network error the gateway is asked for its current incarnation."""
        if self._stale:
            try:
                roster: tuple[EngineAddress, ...] = await self._gateway.call("roster")
            except PEER_LOST as error:
                raise ConnectionRefused(f"the gateway does not say where {self._address.name} is: {error}") from error
            for address in roster:
                if address.name == self._address.name and address.incarnation > self._address.incarnation:
                    self._address = address
                    self._client = backend().engines.client(address)
            self._stale = False
        return self._client
