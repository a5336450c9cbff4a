"""Asks the components of a deployment what only they can say: whether all replicas are routed to.

Runs in the driver, in either world. Who is silent has said nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from protocol.errors import ActorDied, NoSuchActor, SeatrialError, message_of
from protocol.ports import ActorHandle, backend

if TYPE_CHECKING:
    from scenarios.deploy import Cell, Service

_ANSWER_S = 5.0


class Unheard(NamedTuple):
    """A component that did not answer: whom, what it was asked, and what came instead."""

    who: str
    asked: str
    why: str


class Routing:
    """Whether every replica of every gateway is routed to and no recovery is at work, as they say themselves.

    Who is silent says nothing: a gateway that is dead or cut off has not routed to anybody by that. A recovery that is
    dead is not at work.
    """

    def __init__(self, services: Iterable[Service]) -> None:
        self._cells = [cell for service in services for cell in service.cells]

    async def is_whole(self) -> bool:
        """Ask until one says no, or nothing."""
        for cell in self._cells:
            # The short answer first: the gateway's is long in a large fleet.
            recovering = await self._recovering(cell)
            if isinstance(recovering, Unheard) or recovering:
                return False
            views = await self._views(cell)
            if isinstance(views, Unheard) or not all(view.routable for view in views):
                return False
        return True

    async def unheard(self) -> list[Unheard]:
        """Who says nothing, of all of them."""
        asks = [look(cell) for cell in self._cells for look in (self._recovering, self._views)]
        return [answer for answer in await asyncio.gather(*asks) if isinstance(answer, Unheard)]

    async def _recovering(self, cell: Cell) -> Any:
        answer = await ask_of(cell, "recovery", "recovering", ())
        return () if isinstance(answer, ActorDied) else _heard(cell.recovery, "recovering", answer)

    async def _views(self, cell: Cell) -> Any:
        return _heard(cell.gateway, "engines", await ask_of(cell, "gateway", "engines", ()))


def _heard(part: ActorHandle, method: str, answer: Any) -> Any:
    if isinstance(answer, BaseException):
        return Unheard(part.name, method, f"{type(answer).__name__}: {message_of(answer)}")
    return answer


async def ask(handle: ActorHandle, method: str, default: Any) -> Any:
    """Ask a component. ``default`` where it is the user's own and has no such method; the error where none answers."""
    asked = getattr(handle, method, None)
    if asked is None:
        return default
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await asked()
    except TimeoutError:
        return TimeoutError(f"no answer within {_ANSWER_S:g} s")
    except SeatrialError as error:
        return error


async def living(handles: Iterable[ActorHandle]) -> list[ActorHandle]:
    """Actors in their present incarnations, without those that were killed and never restarted."""
    found = []
    for handle in handles:
        try:
            found.append(await backend().lookup(handle.name))
        except NoSuchActor:
            continue
    return found


async def ask_of(cell: Cell, part: str, method: str, default: Any) -> Any:
    """As :func:`ask` of a part of a cell; where another incarnation has its name, that is asked, and is the part."""
    answer = await ask(getattr(cell, part), method, default)
    if not isinstance(answer, ActorDied):
        return answer
    try:
        setattr(cell, part, await backend().lookup(getattr(cell, part).name))
    except SeatrialError:
        return answer
    return await ask(getattr(cell, part), method, default)
