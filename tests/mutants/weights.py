"""Wrong weight updates: wrong ranks and orders, controllers and publishers that hide what failed (serving.md 9.5)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from protocol.errors import SeatrialError
from protocol.messages import EngineAddress, ExportManifest, WeightUpdate
from protocol.ports import EngineClient, backend
from protocol.serving.admin import post_admin, post_update_weights
from protocol.serving.barrier import Topology
from protocol.serving.controller import RolloutController
from protocol.training.publication import WeightPublisher
from protocol.training.ranks import TrainingRank
from protocol.training.transports import Binding, Failure
from protocol.training.weight_sync import RESUME, WeightSync
from tests.mutants.registry import Mutant

# --- ranks ---


class BindsOnce(TrainingRank):
    """Binds to the engines of the first update, for ever."""

    async def bind(self, binding: Binding) -> bool:
        return False if self._transport is not None else await super().bind(binding)


@dataclasses.dataclass(frozen=True, slots=True)
class _Named(Binding):
    def signature(self) -> str:
        return " ".join(sorted(target.address.name for target in self.targets))


class SignsByName(TrainingRank):
    """Takes a binding for the old one while the names in it are the same."""

    async def bind(self, binding: Binding) -> bool:
        named = _Named(*(getattr(binding, field.name) for field in dataclasses.fields(binding)))
        return await super().bind(named)


# --- orders ---


class LeavesTheOthersWaiting(WeightSync):
    """When a rank fails nobody tells the others, who have no deadline of their own."""

    async def _by_all(self, stage: str, method: str, version: str, deadline: float) -> tuple[Failure, ...]:
        return await super()._by_all(stage, method, version, deadline + 1e6)

    async def _give_up(self, update: str, why: str) -> None:
        return None


class OffloadsTooEarly(WeightSync):
    """Gives the trainer's memory away before the last bucket is over."""

    async def _by_all(self, stage: str, method: str, version: str, deadline: float) -> tuple[Failure, ...]:
        await self._everywhere("offloaded", "offload")
        return await super()._by_all(stage, method, version, deadline)


class TakesKvFirst(WeightSync):
    """Takes the KV memory back before the weights."""

    async def _post(
        self, stage: str, targets: Sequence[EngineAddress], route: str, body: dict[str, Any]
    ) -> dict[str, Failure]:
        if route == RESUME:
            other = {"weights": "kv_cache", "kv_cache": "weights"}[body["tags"][0]]
            body = {"tags": [other]}
        return await super()._post(stage, targets, route, body)


# --- publishers and controllers ---


class ChangesTheLabelOnly(WeightPublisher):
    """Finds nobody to update, and says that all serve the new version."""

    async def _update(self, path: str, manifest: ExportManifest) -> None:
        for address in await self._controller.targets():
            body = {"new_version": manifest.version, "abort_all_requests": False}
            await post_admin(backend().engines.client(address), "/update_weight_version", body, self._admin)


class ChangesTheWeightsOnly(WeightPublisher):
    """Has the weights loaded without their version: engines keep the label of the ones before."""

    async def _load(self, client: EngineClient, path: str, manifest: ExportManifest) -> None:
        await post_update_weights(client, WeightUpdate(path, ""), self._admin)


class LabelsFirst(WeightPublisher):
    """Has the engines say the new version, opens the gates, and lets the weights come meanwhile."""

    async def _by_ranks(self, sync: WeightSync, targets: tuple[EngineAddress, ...], manifest: ExportManifest) -> None:
        for address in targets:
            body = {"new_version": manifest.version, "abort_all_requests": False}
            await post_admin(backend().engines.client(address), "/update_weight_version", body, self._admin)
        backend().background(self._later(sync, targets, manifest.version), name="later")
        await asyncio.sleep(0.05)

    async def _later(self, sync: WeightSync, targets: tuple[EngineAddress, ...], version: str) -> None:
        try:
            await sync.update(version, targets)
        except SeatrialError:
            return


class FlushesTooEarly(WeightPublisher):
    """Flushes the prefix caches while turns still run, and not again."""

    seen: tuple[EngineAddress, ...] = ()

    async def publish(self, model_step: int) -> None:
        self._flush = False
        for address in self.seen:
            try:
                await post_admin(backend().engines.client(address), "/flush_cache", {}, self._admin)
            except SeatrialError:
                continue
        await super().publish(model_step)

    async def _update(self, path: str, manifest: ExportManifest) -> None:
        self.seen = await self._controller.targets()
        await super()._update(path, manifest)


class OpensAllTheSame(RolloutController):
    """Opens every entrypoint, whether or not the update got into it."""

    async def fence(self, failed: tuple[tuple[str, str], ...]) -> None:
        return None

    async def _check_served(self, topology: Topology, version: str, deadline: float) -> None:
        return None


class ReckonsWithTheInactive(RolloutController):
    """Pauses and updates entrypoints that nobody is routed to, as if they were active."""

    async def _inactive(self, topology: Topology) -> list[tuple[str, str]]:
        return []


def _of(component: str, twin: type) -> Any:
    def make(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
        return Mutant(name, source, component, twin, cls, scenario, check)

    return make


_rank = _of("rank", TrainingRank)
_sync = _of("weight_sync", WeightSync)
_publisher = _of("publisher", WeightPublisher)
_controller = _of("controller", RolloutController)

MUTANTS = (
    _rank("bound once", "W-1", BindsOnce, "ranks_fence", "updates_meet_the_living"),
    _rank("signature by name", "W-2", SignsByName, "ranks_fence", "updates_meet_the_living"),
    _publisher("label without weights", "W-3", ChangesTheLabelOnly, "disk_twice", "served_version"),
    _publisher("weights without label", "W-I2", ChangesTheWeightsOnly, "disk_twice", "label_follows_weights"),
    _publisher("label first, weights later", "W-4", LabelsFirst, "ranks_ipc", "nothing_runs_on_part_weights"),
    _publisher("flush before the drain", "W-6", FlushesTooEarly, "publish_busy", "no_stale_prefix"),
    _sync("ranks left waiting", "W-7", LeavesTheOthersWaiting, "ranks_restart", "every_rank_leaves"),
    _controller("partial failure opened", "W-8", OpensAllTheSame, "ranks_fence", "publication_order"),
    _sync("trainer offloaded early", "W-9", OffloadsTooEarly, "ranks_ipc", "serves_the_trainers_weights"),
    _sync("KV memory first", "W-10", TakesKvFirst, "ranks_ipc", "memory_order"),
    _controller("inactive target updated", "W-11", ReckonsWithTheInactive, "disk_inactive", "occurs"),
)
