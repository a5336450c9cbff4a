"""One operation as the manager sees it, and how that outlives the manager."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from protocol.messages import EngineAddress
from protocol.scaling.contract import Direction, State, Victim
from protocol.scaling.slots import Slot, Slots


class Lifecycle:
    """One operation: what is to be done, and how far it is."""

    def __init__(self, operation: str, direction: Direction, target: int) -> None:
        self.operation = operation
        self.direction = direction
        self.target = target
        self.phase: State = "PENDING"
        self.aborted = False
        self.task: asyncio.Task[None] | None = None
        self.cleaning = False
        self.created = 0
        self.removed = 0
        self.failed = 0
        self.slot: Slot | None = None
        """The slot of ``victim``."""
        self.victim: Victim | None = None
        self.drained = False
        self.changed = asyncio.Event()
        self.ending = False
        """Its last step is done, and that is being made durable."""
        self.physical_done = False
        self.error = ""

    def never_executed(self, why: str) -> None:
        """End it, unless it has ended: it was begun, and nothing of it was done."""
        if not self.physical_done:
            self.phase, self.physical_done, self.error = "FAILED", True, why


_KEPT = ("phase", "aborted", "created", "removed", "failed", "error")


def kept(lifecycle: Lifecycle) -> dict[str, Any]:
    """As a journal takes it."""
    return {
        "begun": [lifecycle.operation, lifecycle.direction, lifecycle.target],
        "executed": lifecycle.task is not None,
        "done": lifecycle.physical_done or lifecycle.ending,
        "victim": None if lifecycle.victim is None else dataclasses.astuple(lifecycle.victim),
        "slot": None if lifecycle.slot is None else lifecycle.slot.rank,
        "values": [getattr(lifecycle, name) for name in _KEPT],
    }


def restored(found: dict[str, Any], slots: Slots) -> Lifecycle:
    """What :func:`kept` has given. That a proof of drain had come is not kept: it is asked for anew."""
    lifecycle = Lifecycle(*found["begun"])
    for name, value in zip(_KEPT, found["values"], strict=True):
        setattr(lifecycle, name, value)
    lifecycle.physical_done = found["done"]
    if found["victim"] is not None:
        address, rank, generation = found["victim"]
        lifecycle.victim = Victim(EngineAddress(*address), rank, generation)
    lifecycle.slot = None if found["slot"] is None else slots.all()[found["slot"]]
    return lifecycle
