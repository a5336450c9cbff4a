"""A collaborator of a long-lived actor, by name: found again after its death."""

from __future__ import annotations

from typing import Any

from protocol.errors import ActorDied, NoSuchActor, Outcome
from protocol.ports import ActorHandle, backend


class Peer:
    """Calls an actor in its current incarnation. Holds no connection; cheap.

    Args:
        handle: any incarnation of the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method. After a death the next call goes to the new incarnation.

        A call that was never sent (ActorDied, *not done*) is made at once on the new incarnation. One whose outcome is
        unknown is not: the caller decides.

        Raises:
            ActorDied: *unknown* when it died during the call, *not done* when no new incarnation lives.
        """
        try:
            return await getattr(self._handle, method)(*args)
        except ActorDied as death:
            try:
                self._handle = await backend().lookup(self._handle.name)
            except NoSuchActor:
                raise death from None  # nobody has restarted it yet: the old handle will say so again
            if death.outcome is not Outcome.NOT_DONE:
                raise
        return await getattr(self._handle, method)(*args)
