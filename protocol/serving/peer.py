"""A collaborator of a long-lived actor, by name: bounded calls, and found again after its death."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.errors import ActorDied, CallCancelled, NoSuchActor, Outcome, ReadTimeout
from protocol.ports import ActorHandle, backend

PEER_LOST = (ActorDied, CallCancelled, ReadTimeout)
"""What a call may raise without any fault of its arguments. Its outcome says what is known of the effect."""


class Peer:
    """Calls an actor in its current incarnation. Holds no connection; cheap.

    Args:
        handle: any incarnation of the actor.
        timeout_s: longest wait for an answer. A lost reply must not stop its caller for ever. None: as long as it
            takes, for whom deadlines of its own bind.
    """

    def __init__(self, handle: ActorHandle, timeout_s: float | None) -> None:
        self._handle = handle
        self._timeout_s = timeout_s

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method. After a death the next call goes to the new incarnation.

        A call that was never sent (ActorDied, *not done*) is made at once on the new incarnation. One whose outcome is
        unknown is not: the caller decides.

        Raises:
            ActorDied: *unknown* when it died during the call, *not done* when no new incarnation lives.
            ReadTimeout, CallCancelled: *unknown*.
            SeatrialError: whatever the method raised.
        """
        try:
            return await self._once(method, args, kwargs)
        except ActorDied as death:
            try:
                self._handle = await backend().lookup(self._handle.name)
            except NoSuchActor:
                raise death from None  # nobody has restarted it yet: the old handle will say so again
            if death.outcome is not Outcome.NOT_DONE:
                raise
        return await self._once(method, args, kwargs)

    async def _once(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await getattr(self._handle, method)(*args, **kwargs)
        except TimeoutError:
            raise ReadTimeout(f"{self._handle.name}.{method} did not answer within {self._timeout_s} s") from None
