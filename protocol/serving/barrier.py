"""A publication barrier as data, and how one stage is done everywhere at once. What RolloutController is made on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from protocol.errors import BarrierError, GatePoisoned, Outcome, SeatrialError
from protocol.messages import EngineAddress, message
from protocol.ports import ActorHandle

Stage = Literal["sealing", "drained", "resuming"]
Topology = dict[str, EngineAddress]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One entrypoint: ``name`` of the replica that it serves, its gate, and the server in front of both."""

    name: str
    gate: ActorHandle
    server: ActorHandle

    def with_gate(self, gate: ActorHandle) -> Member:
        return dataclasses.replace(self, gate=gate)


@message
class BarrierView:
    """A barrier as others see it. ``stage``: sealing, drained or resuming (opened in part).

    ``fenced``: entrypoints that were taken out of it by name; their gates stay closed when it ends.
    """

    epoch: int
    stage: str
    entrypoints: tuple[str, ...]
    fenced: tuple[str, ...] = ()


class Barrier:
    """One seal-to-reopen cycle over a frozen set of entrypoints."""

    def __init__(self, epoch: int, members: tuple[Member, ...], topology: Topology) -> None:
        self.epoch = epoch
        self.members = members
        self.topology = topology
        self.stage: Stage = "sealing"
        self.fenced: dict[str, str] = {}
        """Entrypoints that were taken out of it: why."""

    def view(self) -> BarrierView:
        return BarrierView(self.epoch, self.stage, tuple(self.topology), tuple(self.fenced))

    @property
    def going_on(self) -> tuple[Member, ...]:
        """The entrypoints that will be opened."""
        return tuple(member for member in self.members if member.name not in self.fenced)

    @property
    def active(self) -> Topology:
        """The backends of those."""
        return {name: address for name, address in self.topology.items() if name not in self.fenced}


async def everywhere(stage: str, parts: tuple[Any, ...], one: Callable[[Any], Awaitable[None]]) -> None:
    """Do one thing to all parts at once, and wait for all of them to end, whatever becomes of any.

    Raises:
        GatePoisoned: *not done*, when any of them is that.
        BarrierError: else, with the first failures attached; *not done* only when every part says so.
    """
    ended = await asyncio.gather(*(one(part) for part in parts), return_exceptions=True)
    failures = [error for error in ended if isinstance(error, BaseException)]
    for error in failures:
        if not isinstance(error, SeatrialError):
            raise error
    if not failures:
        return
    poisoned = [error for error in failures if isinstance(error, GatePoisoned)]
    first = (poisoned or failures)[0]
    nothing = len(failures) == len(parts) and all(
        isinstance(error, SeatrialError) and error.outcome is Outcome.NOT_DONE for error in failures
    )
    text = f"{stage}: {len(failures)} of {len(parts)} failed, first: {first}"
    kind = GatePoisoned if poisoned else BarrierError
    raise kind(
        text,
        outcome=Outcome.NOT_DONE if poisoned or nothing else Outcome.UNKNOWN,
        attached=tuple(failures[:8]),
        stage=stage,
        failed=len(failures),
    )
