"""Wrong ways to scale rollout replicas (scaling.md 7)."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.messages import EngineAddress
from protocol.ports import backend
from protocol.rollout.elastic import RolloutScaling
from protocol.rollout.elastic_contract import RolloutInBody, RolloutOutBody
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Direction
from protocol.scaling.slots import Slot
from tests.mutants.registry import Mutant


class SaysNothingOfCleanup(RolloutScaling):
    """Says nothing of the cleanup in its status, as a typed answer without the field has it."""

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        reply = await super().status(direction, request_id)
        return ApiReply(reply.status, {name: value for name, value in reply.body.items() if name != "cleanup_required"})


class KeepsNoKeys(RolloutScaling):
    """Takes a key and does not keep it, as the published service has none: a retry is a conflict with its own first."""

    def _replayed(self, direction: Direction, asked: RolloutOutBody | RolloutInBody) -> ApiReply | None:
        return None


class CancelsAnytime(RolloutScaling):
    """Cancels a scale-out whose replica is connected already."""

    async def call_off(self, direction: Direction, request_id: str) -> ApiReply:
        self._operations[request_id].cancelled = True
        return await self.status(direction, request_id)

    async def _sync_and_publish(self, operation: Any, address: EngineAddress) -> None:
        self._look(operation)
        await super()._sync_and_publish(operation, address)


class _NoLock:
    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *error: Any) -> None:
        return None


class UpdatesWhileDraining(RolloutScaling):
    """Neither refuses an update while replicas drain, nor waits with a scale-in for the update that runs."""

    async def start(self) -> None:
        self._weights = _NoLock()  # type: ignore[assignment]  # stands for the lock

    async def update_weights(self, path: str) -> ApiReply:
        self._draining = False
        return await super().update_weights(path)


class PublishesWithoutWeights(RolloutScaling):
    """Routes to a new replica as it started, with the weights of its profile."""

    async def _load(self, address: EngineAddress, path: str) -> str:
        slot = self._slots.named(address.name)
        return "" if slot is not None and slot.candidate else await super()._load(address, path)


class OldestFirst(RolloutScaling):
    """Removes the elastic replicas that have been there longest."""

    def _victims(self, count: int) -> list[tuple[EngineAddress, Slot | None]]:
        return list(reversed(super()._victims(1000)))[:count]


class EndsWithoutLettingGo(RolloutScaling):
    """Ends a replica while the gateway still routes to it."""

    async def _let_go(self, operation: Any, address: EngineAddress, slot: Slot | None) -> None:
        return

    async def _idle(self, address: EngineAddress) -> bool:
        return True


class NeverPutsBack(RolloutScaling):
    """Leaves a victim that was not idle in time where it is, closed for ever."""

    async def _put_back(self, operation: Any, address: EngineAddress, slot: Slot | None) -> None:
        return


class EndsBeforeItIsClean(RolloutScaling):
    """Says that an operation has ended before its placement groups are removed."""

    async def _clean_up(self, slot: Slot) -> None:
        async def later() -> None:
            await asyncio.sleep(3)
            await super(EndsBeforeItIsClean, self)._clean_up(slot)

        await self._replicas.end(slot.name)
        slot.worker = False
        backend().background(later(), name=f"clean-{slot.name}")


def _rollout(name: str, cls: type, scenario: str, check: str, source: str = "scaling 7") -> Mutant:
    return Mutant(name, source, "scale_api", RolloutScaling, cls, scenario, check)


MUTANTS = (
    _rollout("silent on the cleanup", SaysNothingOfCleanup, "rollout_1_2_1", "rollout_status_is_explicit", "M16"),
    _rollout("rollout, keeps no keys", KeepsNoKeys, "rollout_auto_deaf", "same_key_same_operation"),
    _rollout("cancelled at any time", CancelsAnytime, "rollout_cancelled", "rollout_status_is_explicit"),
    _rollout("updated while it drains", UpdatesWhileDraining, "rollout_update_meets_scale_in", "no_end_in_an_update"),
    _rollout("published without weights", PublishesWithoutWeights, "rollout_1_2_1", "occurs"),
    _rollout("rollout, oldest first", OldestFirst, "rollout_3_2", "groups_released_once"),
    _rollout("ended while routed to", EndsWithoutLettingGo, "rollout_1_2_1", "removed_while_idle"),
    _rollout("never put back", NeverPutsBack, "rollout_busy_victim", "reached"),
    _rollout("ended before it is clean", EndsBeforeItIsClean, "rollout_1_2_1", "clean_means_clean"),
)
