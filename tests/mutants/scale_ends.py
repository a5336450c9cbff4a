"""Wrong ends of scale operations: over, not clean, and nobody can clean them up."""

from __future__ import annotations

from typing import Any

from protocol.messages import EngineAddress
from protocol.scaling.api import ScaleApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Victim
from protocol.scaling.lifecycle import ScaleManager
from protocol.scaling.registry import Operation
from tests.mutants.registry import Mutant


class OnlyTheCompleted(ScaleApi):
    """Reconciles a scale-in without a victim only if it is COMPLETED, not one that was aborted between two victims."""

    async def _look_before(self, model: Any, operation: Operation) -> ApiReply | Victim | None:
        found = await super()._look_before(model, operation)
        if found is not None:
            return found
        progress = await model.manager.call("progress", operation.request_id)
        if progress.phase == "COMPLETED":
            return None
        return ApiReply(503, {"error": "VICTIM_UNKNOWN", "detail": f"the operation is {progress.phase}"})


class LeavesTheUnexecuted(ScaleApi):
    """Does not tell the manager that an operation is over: one that was begun and never executed stays at work."""

    async def _call_off(self, model: Any, operation: Operation) -> None:
        return


class ForgetsThePredecessor(ScaleManager):
    """Knows a replica by what recovery has announced alone: where that is not published, nobody may try again."""

    async def adopt(self, old: EngineAddress, new: EngineAddress) -> bool:
        slot = self._slots.named(new.name)
        if slot is not None and slot.address == new:
            return True
        found = await super().adopt(old, new)
        if slot is not None:
            slot.predecessor = None
        return found


class NamesWhatWasAnnounced(ScaleManager):
    """Names a victim by the incarnation that recovery has announced, also where the gateway has the one before it."""

    async def _settle(self, lifecycle: Any) -> None:
        return


MUTANTS = (
    Mutant("only the completed", "M4", "scale_api", ScaleApi, OnlyTheCompleted, "scale_between_two", "reached"),
    Mutant("the unexecuted left", "H1", "scale_api", ScaleApi, LeavesTheUnexecuted, "scale_never_executed", "reached"),
    Mutant(
        "the predecessor forgotten", "scaling 3", "scale_manager", ScaleManager, ForgetsThePredecessor,
        "scale_unpublished", "reached",
    ),
    Mutant(
        "a victim that nobody routes to", "scaling 5.2", "scale_manager", ScaleManager, NamesWhatWasAnnounced,
        "scale_unpublished_victim", "reached",
    ),
)  # fmt: skip
