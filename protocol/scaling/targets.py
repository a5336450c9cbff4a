"""The control API of a scaled service as the autoscaler calls it.

``actor://NAME`` is the actor of that name, found anew after its death; it answers as
:class:`protocol.scaling.api.ScaleApi` does. Other URLs are for a world that can reach them: it overrides
:meth:`protocol.scaling.autoscaler_api.AutoscalerApi.connect` (over HTTP: ``real.scale_target``).
"""

from __future__ import annotations

from typing import Any, Protocol

from protocol.errors import ConnectionRefused
from protocol.ports import backend
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Direction
from protocol.serving.peer import Peer

_SCHEME = "actor://"
_ANSWER_S = 30.0  # longer than an API waits for its manager
_RECONCILE_S = 150.0


class ServiceTarget(Protocol):
    """One service's control API. Every call may raise SeatrialError, whose outcome says what is known of its effect."""

    @property
    def url(self) -> str:
        """As the autoscaler's configuration has it."""
        ...

    async def engines(self) -> ApiReply:
        """GET /engines (scaling.md 1.6)."""
        ...

    async def submit(self, direction: Direction, body: dict[str, Any]) -> ApiReply:
        """POST /scale_out or /scale_in (1.2)."""
        ...

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        """GET of an operation (1.4)."""
        ...

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        """POST .../reconcile (1.5)."""
        ...

    async def close(self) -> None:
        """Give back what the connection holds. A call after it connects anew."""
        ...


class ActorTarget:
    """A ServiceTarget that is an actor. Its calls are bounded, and find the actor again after its death."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._peers: tuple[Peer, Peer] | None = None

    async def _call(self, method: str, *arguments: Any) -> ApiReply:
        if self._peers is None:
            handle = await backend().lookup(self.url.removeprefix(_SCHEME))
            self._peers = Peer(handle, _ANSWER_S), Peer(handle, _RECONCILE_S)
        reply: ApiReply = await self._peers[method == "reconcile"].call(method, *arguments)
        return reply

    async def engines(self) -> ApiReply:
        return await self._call("engines")

    async def submit(self, direction: Direction, body: dict[str, Any]) -> ApiReply:
        return await self._call(direction, body)

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        return await self._call("status", direction, request_id)

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        return await self._call("reconcile", direction, request_id)

    async def close(self) -> None:
        self._peers = None


class NoWayThere:
    """A ServiceTarget that cannot be reached from this world: every call is refused, so nothing is decided on it."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def engines(self) -> ApiReply:
        raise ConnectionRefused(f"there is no way to {self.url} from here; a URL is actor://NAME")

    async def submit(self, direction: Direction, body: dict[str, Any]) -> ApiReply:
        return await self.engines()

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        return await self.engines()

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        return await self.engines()

    async def close(self) -> None:
        return None


def connect(url: str) -> ServiceTarget:
    """The target at a URL. Nothing is sent."""
    return ActorTarget(url) if url.startswith(_SCHEME) else NoWayThere(url)
