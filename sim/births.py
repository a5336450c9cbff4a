"""What it takes to start an actor, and a start under way."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from protocol.errors import SeatrialError
from protocol.ports import Limits, Placement
from sim.calls import ActorRef, Method
from sim.network import Letter

if TYPE_CHECKING:
    from sim.actors import ActorProcess


@dataclasses.dataclass(frozen=True, slots=True)
class SpawnSpec:
    """What it takes to start an actor, now and again. ``packed``: (args, kwargs), always serialised."""

    cls: type
    packed: Any
    methods: dict[str, Method]
    limits: Limits
    node: str | None
    placement: Placement | None


class Birth:
    """A spawn under way. Once asked for, it carries on though its spawner may die."""

    __slots__ = ("spec", "name", "spawner", "future", "asked", "settled", "letter", "sent_lc")

    def __init__(self, spec: SpawnSpec, name: str, spawner: ActorProcess | None, letter: Letter) -> None:
        self.spec = spec
        self.name = name
        self.spawner = spawner
        self.future: asyncio.Future[ActorRef] | None = None if spawner is None else spawner.loop.create_future()
        self.asked = False
        self.settled = False
        self.letter = letter
        self.sent_lc = 0 if spawner is None else spawner.lc

    def settle(self, ref: ActorRef | None, error: SeatrialError | None) -> None:
        """At the spawner."""
        if self.future is None or self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            assert ref is not None
            self.future.set_result(ref)
