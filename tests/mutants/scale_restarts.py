"""Wrong restarts: what was promised before a death is forgotten after it (hazard H12)."""

from __future__ import annotations

from typing import Any

from protocol.config import LifecycleConfig, ScalingConfig
from protocol.scaling.api import ScaleApi
from protocol.scaling.contract import Progress
from protocol.scaling.lifecycle import ScaleManager
from protocol.scaling.placement import Release, release_group
from protocol.scaling.registry import Operation
from protocol.scaling.slots import Slot
from protocol.scaling.watcher import Watcher
from protocol.serving.gateway import Gateway
from tests.mutants.registry import Mutant
from tests.mutants.scale_registries import ApiOfParts


class ApiForgets(ScaleApi):
    """Keeps its operations in memory alone: an id that it accepted is unknown after its restart."""

    def __init__(self, config: ScalingConfig, *args: Any, **more: Any) -> None:
        super().__init__(config.model_copy(update={"journal": ""}), *args, **more)


class ManagerForgets(ScaleManager):
    """Keeps what it owns in memory alone: after its restart nobody removes it."""

    def __init__(self, config: LifecycleConfig, *args: Any) -> None:
        super().__init__(config.model_copy(update={"journal": ""}), *args)


class TakesTheOfferedDown(ScaleManager):
    """Takes a candidate down after a restart, though the gateway was asked to route to it."""

    async def _offer_again(self, lifecycle: Any, slot: Slot) -> bool:
        slot.offered = False
        return False


async def asks_again_at_once(slot: Slot, config: LifecycleConfig, keep: Any) -> Release:
    """Asks for a removal again after a restart without a look whether the first one was accepted."""
    slot.removal_asked = False
    return await release_group(slot, config, keep)


class ForgetsTheClosed(Gateway):
    """Has its replicas again after a restart, and not which of them were closed."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        return {**state, "replicas": [[address, False] for address, _ in state["replicas"]]}


class _LeavesOpen(Watcher):
    async def _close_parked(self, operation: Operation, progress: Progress | None) -> None:
        return


class ParksTheOpen(ApiOfParts):
    """Leaves a parked victim open that had not been closed when its operation's time was up."""

    watcher_class = _LeavesOpen


MUTANTS = (
    Mutant(
        "the parked left open", "M9", "scale_api", ScaleApi, ParksTheOpen, "scale_parked_at_once", "victim_stays_out"
    ),
    Mutant("api forgets", "H12", "scale_api", ScaleApi, ApiForgets, "scale_api_restarted", "operations_end"),
    Mutant(
        "manager forgets", "H12", "scale_manager", ScaleManager, ManagerForgets, "scale_manager_restarted",
        "capacity_returned",
    ),
    Mutant(
        "the offered taken down", "scaling 4", "scale_manager", ScaleManager, TakesTheOfferedDown,
        "scale_manager_restarted_at_publication", "removed_while_idle",
    ),
    Mutant(
        "asked again at once", "M11", "protocol.scaling.lifecycle_steps:release_group", release_group,
        asks_again_at_once, "scale_manager_restarted_at_removal", "groups_released_once",
    ),
    Mutant(
        "the closed forgotten", "scaling 5.2", "gateway", Gateway, ForgetsTheClosed, "scale_gateway_restarted",
        "victim_stays_out",
    ),
)  # fmt: skip
