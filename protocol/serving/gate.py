"""The request gate: weights may change only when every admitted generation has ended in a known way.

    OPEN(e, v) -> SEALED(e+1) -> DRAINED(e+1) -> INSTALLED(e+1, v') -> OPEN(e+1, v')

A request needs a *lease*, which is granted while the gate is open and stamped with the version then installed. Whoever
holds it settles it with a receipt. A receipt that does not say that the backend has ended and that the end is on record
is an *unknown* outcome: the gate is **poisoned**, for ever, and no publication can pass it (serving.md 2).

An epoch numbers one cycle of a barrier. What belongs to an older one has no effect, so that a late message of an
abandoned cycle can neither open a gate nor close one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.config import GateConfig
from protocol.errors import AdmissionTimeout, GatePoisoned, GateRefused, WrongEpoch
from protocol.messages import message
from protocol.ports import backend, data_call


@message
class RequestLease:
    """The right to one generation. ``model_step``: the version of the whole turn, however long it takes."""

    request_id: str
    session_id: str
    epoch: int
    model_step: int


@message
class SettlementReceipt:
    """How a generation ended (serving.md 2.3). Safe only when both are true.

    ``backend_ended``: it is known that the backend computes nothing for it any more. ``terminal_recorded``: its end,
    good or bad, is on record. ``label``: completed, aborted, failed, rejected, or what went wrong.
    """

    backend_ended: bool
    terminal_recorded: bool
    label: str

    @property
    def safe(self) -> bool:
        """Whether weights may change in spite of it: else it poisons the gate."""
        return self.backend_ended and self.terminal_recorded


@message
class GateSnapshot:
    """What a gate is at. ``failures``: the unknown outcomes; any makes it poisoned."""

    open: bool
    epoch: int
    model_step: int
    drained: bool
    installed: bool
    active: tuple[str, ...]
    failures: tuple[str, ...]


_ENDED_KEPT = 1024
"""At least so many of the leases that ended last are remembered; see ``RequestGate.request``."""


class RequestGate:
    """Admission and settlement of one entrypoint's generations. An actor.

    Args:
        config: whether it is born closed, and with which version.
    """

    def __init__(self, config: GateConfig) -> None:
        self._open = not config.initially_closed
        self._epoch = 0
        self._model_step = -1 if config.initial_model_step is None else config.initial_model_step
        self._drained = False
        self._installed = False
        """In this epoch."""
        self._active: dict[str, RequestLease] = {}
        self._ended: dict[str, None] = {}
        self._ended_before: dict[str, None] = {}
        self._failures: list[str] = []
        self._waiting: dict[asyncio.Future[None], None] = {}

    # --- leases ---

    @data_call
    async def request(self, session_id: str, timeout_s: float, request_id: str) -> RequestLease:
        """Wait until the gate is open, and be granted a lease.

        Asking again is harmless: who has not heard the answer gets the lease that was granted then, also from a gate
        that is sealed by now. What comes late, after the lease was settled, is refused.

        Args:
            session_id: whose turn it is; not empty.
            timeout_s: longest wait. A waiter is not in flight: it holds up no drain.
            request_id: of the lease, chosen by who asks; no other request has it.

        Raises:
            AdmissionTimeout, GatePoisoned: *not done*; GateRefused, *not done*: without a session id, or the lease has
                been settled.
        """
        if not session_id:
            raise GateRefused("a gated request must carry a session_id")
        if not self._open and request_id not in self._active:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._until(lambda: self._open or bool(self._failures))
            except TimeoutError:
                raise AdmissionTimeout(f"{session_id}: the gate did not open within {timeout_s} s") from None
        self._refuse_poisoned("a request")
        granted = self._active.get(request_id)
        if granted is not None:
            return granted
        if self._has_ended(request_id):
            raise GateRefused(f"lease {request_id} has been settled")
        lease = RequestLease(request_id, session_id, self._epoch, self._model_step)
        self._active[request_id] = lease
        backend().emit(
            "gate.granted",
            lease=request_id,
            session=session_id,
            epoch=lease.epoch,
            model_step=lease.model_step,
            active=len(self._active),
        )
        return lease

    async def settle(self, request_id: str, receipt: SettlementReceipt | None) -> None:
        """End a lease. None is a lease whose holder has nothing to say of it, which is an unknown outcome too.

        Raises GateRefused, *not done*, when the lease is not active: it was settled before, perhaps by this very call
        whose answer was lost, or was never granted. An unknown outcome of a lease that this gate has never had is one
        of an earlier incarnation: it poisons this one.
        """
        lease = self._active.pop(request_id, None)
        ended = lease is None and self._has_ended(request_id)
        if not ended:
            if len(self._ended) >= _ENDED_KEPT:
                self._ended_before, self._ended = self._ended, {}
            self._ended[request_id] = None
        receipt = receipt or SettlementReceipt(False, False, "no receipt")
        if lease is None:
            if not ended and not receipt.safe:
                self._poison(f"{request_id}, of an earlier incarnation: {receipt.label}")
            raise GateRefused(f"lease {request_id} is not active here")
        backend().emit(
            "gate.settled",
            lease=request_id,
            backend_ended=receipt.backend_ended,
            terminal_recorded=receipt.terminal_recorded,
            label=receipt.label,
            active=len(self._active),
        )
        if not receipt.safe:
            self._poison(f"{request_id}: {receipt.label}")
        elif not self._active:
            self._wake()

    # --- one cycle of a barrier ---

    async def seal(self, epoch: int) -> None:
        """Grant nothing from now on. Idempotent for the epoch that the gate is sealed with.

        Raises:
            GatePoisoned, WrongEpoch: *not done*. The epoch is that of an earlier cycle, or this one has reopened.
        """
        self._refuse_poisoned("seal")
        if epoch < self._epoch or (epoch == self._epoch and self._open):
            raise self._wrong("seal", epoch)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._open = self._drained = self._installed = False
        self._changed("sealed")

    async def drain(self, epoch: int, timeout_s: float) -> None:
        """Wait until no lease is active. Time up is an unknown outcome of those that are: the gate is poisoned.

        Raises:
            GatePoisoned: *not done*, now or meanwhile. WrongEpoch: *not done*.
        """
        self._expect("drain", epoch)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self._active or bool(self._failures) or epoch != self._epoch)
        except TimeoutError:
            if self._active and epoch == self._epoch:
                self._poison(f"drain of epoch {epoch}: {len(self._active)} leases active after {timeout_s} s")
        self._refuse_poisoned("drain")
        if epoch != self._epoch:
            raise self._wrong("drain", epoch)
        if not self._drained:
            self._drained = True
            self._changed("drained")

    async def install_version(self, epoch: int, model_step: int) -> None:
        """What leases granted from the reopening on are stamped with. Idempotent for the same epoch and version.

        Raises:
            GatePoisoned, WrongEpoch, GateRefused (not drained, or another version): *not done*.
        """
        self._expect("install_version", epoch)
        if self._installed:
            if model_step != self._model_step:
                raise GateRefused(f"epoch {epoch} has version {self._model_step} installed, not {model_step}")
            return
        if not self._drained:
            raise GateRefused(f"install_version of epoch {epoch}: the gate is not drained")
        if model_step < self._model_step:
            raise GateRefused(f"version {model_step} is older than the installed one, {self._model_step}")
        self._model_step = model_step
        self._installed = True
        self._changed("installed")

    async def reopen(self, epoch: int) -> None:
        """Grant again, with the version that was installed. Idempotent.

        Raises:
            GatePoisoned, WrongEpoch, GateRefused (not installed): *not done*.
        """
        self._expect("reopen", epoch)
        if not self._installed:
            raise GateRefused(f"reopen of epoch {epoch}: no version is installed")
        if not self._open:
            self._open = True
            self._changed("reopened")
            self._wake()

    async def snapshot(self) -> GateSnapshot:
        """What the gate is at."""
        return GateSnapshot(
            self._open,
            self._epoch,
            self._model_step,
            self._drained,
            self._installed,
            tuple(self._active),
            tuple(self._failures),
        )

    # --- inside ---

    def _has_ended(self, request_id: str) -> bool:
        return request_id in self._ended or request_id in self._ended_before

    def _expect(self, what: str, epoch: int) -> None:
        self._refuse_poisoned(what)
        if epoch != self._epoch or (self._open and not self._installed):
            raise self._wrong(what, epoch)

    def _refuse_poisoned(self, what: str) -> None:
        if self._failures:
            raise GatePoisoned(f"{what}: {backend().me.name} is poisoned by {self._failures[0]}")

    def _wrong(self, what: str, epoch: int) -> WrongEpoch:
        now = f"{'open in' if self._open else 'sealed with'} epoch {self._epoch}"
        return WrongEpoch(f"{what} of epoch {epoch}: {backend().me.name} is {now}")

    def _poison(self, why: str) -> None:
        self._open = False
        self._failures.append(why)
        backend().emit("gate.poisoned", why=why, failures=len(self._failures))
        self._wake()

    def _changed(self, what: str) -> None:
        backend().emit("gate.changed", what=what, epoch=self._epoch, model_step=self._model_step)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await waiter
            finally:
                self._waiting.pop(waiter, None)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
