"""The manager of a scaled service, which may be the user's own and lack a method (scaling.md 1.3 and 1.5)."""

from __future__ import annotations

from typing import Any

from protocol.errors import Outcome, SeatrialError
from protocol.serving.peer import Peer


class NoHook(SeatrialError):
    """The manager has no such method; nothing was called."""

    default_outcome = Outcome.NOT_DONE


class ManagerPeer(Peer):
    """As Peer; a method that the manager does not have is NoHook instead of an AttributeError.

    That is looked for before the call: an AttributeError of a manager that is broken inside says nothing of its hooks.
    """

    async def _once(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not hasattr(self._handle, method):
            raise NoHook(f"{self._handle.name} has no method {method!r}")
        return await super()._once(method, args, kwargs)
