"""A request gate as a user might have written it: a door, a list of who is inside, an audit line for each admission."""

import asyncio

from protocol.errors import AdmissionTimeout, GatePoisoned, GateRefused, WrongEpoch
from protocol.serving.gate import GateSnapshot, RequestLease


class Gate:
    """Admits turns while it is open, and lets weights change when nobody is inside."""

    def __init__(self, config):
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._epoch = 0
        self._version = -1
        self._drained = self._installed = False
        self._inside = {}
        self._failures = []

    # What the entrypoint asks.

    async def request(self, session_id, timeout_s, request_id):
        try:
            async with asyncio.timeout(timeout_s):
                if request_id not in self._inside:  # else it is asked for again: the answer was lost
                    await self._pass_the_door(session_id)
        except TimeoutError:
            raise AdmissionTimeout(f"{session_id} waited {timeout_s} s") from None
        self._refuse_poisoned()
        if request_id not in self._inside:
            self._inside[request_id] = RequestLease(request_id, session_id, self._epoch, self._version)
            self._idle.clear()
        return self._inside[request_id]

    async def _pass_the_door(self, session_id):
        await self._open.wait()
        await self._audit(session_id)  # the planted defect: the door may be shut by the time the audit line is written

    async def _audit(self, session_id):
        await asyncio.sleep(0.03)  # stands for the write of a line somewhere else

    async def settle(self, request_id, receipt):
        if self._inside.pop(request_id, None) is None:
            raise GateRefused(f"{request_id} is not inside")
        if receipt is None or not receipt.safe:
            self._failures.append(request_id)
            self._open.set()  # who waits is refused
        if not self._inside or self._failures:
            self._idle.set()

    # What the controller asks, in this order.

    async def snapshot(self):
        inside, failures = tuple(self._inside), tuple(self._failures)
        return GateSnapshot(
            self._open.is_set(), self._epoch, self._version, self._drained, self._installed, inside, failures
        )

    async def seal(self, epoch):
        self._refuse_poisoned()
        if epoch < self._epoch or (epoch == self._epoch and self._open.is_set()):
            raise WrongEpoch(f"seal of epoch {epoch} in epoch {self._epoch}")
        if epoch > self._epoch:
            self._open.clear()
            self._epoch, self._drained, self._installed = epoch, False, False

    async def drain(self, epoch, timeout_s):
        self._expect(epoch)
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._failures.append(f"{len(self._inside)} turns never ended")
        self._expect(epoch)
        self._drained = True

    async def install_version(self, epoch, model_step):
        self._expect(epoch)
        if not self._drained or (self._installed and model_step != self._version):
            raise GateRefused(f"version {model_step} cannot be installed")
        self._version, self._installed = model_step, True

    async def reopen(self, epoch):
        self._expect(epoch)
        if not self._installed:
            raise GateRefused("no version is installed")
        self._open.set()

    def _expect(self, epoch):
        self._refuse_poisoned()
        if epoch != self._epoch:
            raise WrongEpoch(f"epoch {epoch} in epoch {self._epoch}")

    def _refuse_poisoned(self):
        if self._failures:
            raise GatePoisoned(f"poisoned by {self._failures[0]}")


class CarefulGate(Gate):
    """The same without the defect: whoever has passed the door looks again whether it is still open."""

    async def _pass_the_door(self, session_id):
        while True:
            await super()._pass_the_door(session_id)
            if self._open.is_set():
                return
