"""Wrong registries, watchers, drains and managers of scaling."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from protocol.config import LifecycleConfig
from protocol.errors import ReadTimeout, SeatrialError
from protocol.messages import EngineAddress
from protocol.ports import backend
from protocol.scaling.api import ScaleApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Capacity, Direction, Progress, Victim
from protocol.scaling.drain import DrainGate
from protocol.scaling.lifecycle import ScaleManager
from protocol.scaling.placement import Release, release_group, wait_usable
from protocol.scaling.registry import Operation, ScaleRegistry
from protocol.scaling.slots import Slot
from protocol.scaling.watcher import Watcher
from protocol.serving.gateway import Gateway
from protocol.serving.recovery import Recovery
from scenarios.scaling import groups_left
from sim.engines import SharedEngines
from tests.mutants.registry import Mutant
from tests.mutants.scale_registries import (
    AnswersForTheForgotten,
    ApiOfParts,
    BusyWithOthers,
    CoercesTargets,
    ConflictBeforeReplay,
    EvictsTheUnresolved,
    ExcludesByDirection,
    ExcludesEverybody,
    FingerprintWithoutTimeout,
    ForgetsNoOps,
    FreesWhatIsDirty,
    KeepsEverything,
    KeysOfBothDirections,
    NoOpsForEver,
    TakesNothingForClean,
    WindowSlides,
)

# --- the API ---


class ReconcilesWithoutLooking(ScaleApi):
    """Goes on with a parked victim without asking the gateway what is in flight on it."""

    async def _look_before(self, model: Any, operation: Operation) -> ApiReply | Victim | None:
        progress: Progress = await model.manager.call("progress", operation.request_id)
        return progress.victim


class NeverWithoutVictim(ScaleApi):
    """Refuses to reconcile a scale-in that names no victim, also when the manager is done with it."""

    async def _look_before(self, model: Any, operation: Operation) -> ApiReply | Victim | None:
        found = await super()._look_before(model, operation)
        return found if found is not None else ApiReply(503, {"error": "VICTIM_UNKNOWN", "detail": "no victim"})


class GuessesCapacity(ScaleApi):
    """Takes the number of routable replicas for the capacity when the manager does not answer."""

    async def _capacity(self, model: Any) -> Capacity:
        try:
            return await super()._capacity(model)
        except SeatrialError:
            ready = sum(view.routable for view in await self._views(model))
            return Capacity(ready, ready, ready, 0)


class WatchesOnlyWhatWasAnswered(ScaleApi):
    """Hands an operation over once, and watches it only if that was answered."""

    def _watch(self, model: Any, operation: Operation) -> None:
        async def once() -> None:
            try:
                await model.manager.call("begin", operation.request_id, operation.direction, operation.target)
            except SeatrialError as error:
                operation.detail = f"not handed over: {error}"
                return
            super(WatchesOnlyWhatWasAnswered, self)._watch(model, operation)

        backend().background(once(), name=f"hand-over-{operation.request_id}")


# --- watchers ---


class _Zeros(Watcher):
    async def watch(self, operation: Operation) -> None:
        try:
            await self._watch(operation, [])
        except Exception as error:
            zero = Progress("FAILED", 0, 0, 0, 0, 0, None, False, True, error=str(error))
            self._registry.finish(operation, "FAILED", zero)


class FillsWithZeros(ApiOfParts):
    """When its watcher breaks it says that there are no replicas, and that all is clean."""

    watcher_class = _Zeros


class _Lenient(ScaleRegistry):
    def finish(self, operation: Operation, *args: Any, **kwargs: Any) -> None:
        if operation.terminal:
            operation.status = "PENDING"
        super().finish(operation, *args, **kwargs)


class _GoesOn(Watcher):
    async def _give_up(self, operation: Operation, *rest: Any) -> None:
        await super()._give_up(operation, *rest)
        for _ in range(60):
            await asyncio.sleep(self._config.poll_interval_s)
            progress = await self._look(operation, [])
            if progress is not None and progress.phase == "COMPLETED":
                self._registry.finish(operation, "COMPLETED", progress)
                return


class FinishesTwice(ApiOfParts):
    """Gives an operation up and ends it once more when the manager is heard again."""

    registry_class = _Lenient
    watcher_class = _GoesOn


# --- drains ---


class _Unclosed(DrainGate):
    async def close(self, victim: Victim) -> bool:
        return True

    async def in_flight(self, address: EngineAddress) -> int | None:
        views = await self._gateway.call("engines")
        return next((view.in_flight for view in views if view.address == address), None)


class LeavesAdmissionOpen(ApiOfParts):
    """Waits for a victim to be idle without closing it at the gateway."""

    gate_class = _Unclosed


class _SilenceIsIdle(DrainGate):
    async def in_flight(self, address: EngineAddress) -> int | None:
        return await super().in_flight(address) or 0


class TakesSilenceForIdle(ApiOfParts):
    """Takes a gateway that does not answer for one that has nothing in flight."""

    gate_class = _SilenceIsIdle


class ClosesForAWhile(Gateway):
    """Takes a victim out of the pick set, and lets health put it back."""

    async def close_admission(self, address: EngineAddress, why: str) -> bool:
        found = await super().close_admission(address, why)
        for replica in self._replicas.values():
            if replica.address == address:
                replica.closed = False
        return found


# --- managers ---


class AnyConfirmation(ScaleManager):
    """Takes every confirmation for the one that it waits for."""

    async def confirm_drained(self, operation: str, proof: Victim) -> bool:
        lifecycle = self._lifecycles.get(operation)
        victim = proof if lifecycle is None or lifecycle.victim is None else lifecycle.victim
        return await super().confirm_drained(operation, victim)


class OldestFirst(ScaleManager):
    """Removes the elastic replica that has been there longest."""

    async def start(self) -> None:
        slots = self._slots
        slots.newest_victim = lambda: next(  # type: ignore[method-assign]
            (slot for slot in slots.elastic() if not slot.draining), None
        )


class InitialToo(ScaleManager):
    """Removes whichever replica is the oldest, those of the deployment included."""

    async def start(self) -> None:
        slots = self._slots
        slots.newest_victim = lambda: next(  # type: ignore[method-assign]
            (slot for slot in slots._slots if slot.published and not slot.draining), None
        )


class AnotherVictim(ScaleManager):
    """Leaves a parked victim alone and removes another replica in its place."""

    async def _clean_up(self, lifecycle: Any, proof: Victim | None) -> str:
        parked, others = lifecycle.slot, [slot for slot in self._slots.elastic() if not slot.draining]
        if not others:
            return await super()._clean_up(lifecycle, proof)
        parked.draining = False
        return await self._remove(lifecycle, others[0])


class DoneAtAbort(ScaleManager):
    """Says at an abort that it is done, while its lifecycle still waits for a placement group."""

    async def abort(self, operation: str, direction: Direction, handed_over: bool) -> bool:
        found = await super().abort(operation, direction, handed_over)
        lifecycle = self._lifecycles[operation]
        lifecycle.phase, lifecycle.physical_done = "FAILED", True
        return found


class OwnsLate(ScaleManager):
    """Notes that it owns a placement group only once a process can run in it."""

    async def _roll_back(self, slot: Slot) -> str:
        if slot.address is None:
            slot.group = ""
        return await super()._roll_back(slot)


class ParksToTheEnd(ScaleManager):
    """Waits for a drain to its own time-out, also after an abort, and lets nobody clean up before."""

    def __init__(self, config: LifecycleConfig, *args: Any) -> None:
        super().__init__(config.model_copy(update={"abort_ends_drain": False}), *args)


class PublishesAtLaunch(ScaleManager):
    """Publishes a replica as soon as it is launched."""

    async def start(self) -> None:
        async def at_once(address: EngineAddress, checkpoint: Any) -> None:
            return

        self._replicas.wait_ready = at_once  # type: ignore[method-assign]
        self._replicas.wait_generating = at_once  # type: ignore[method-assign]


class PublishesTooLate(ScaleManager):
    """Does not look for an abort before it publishes."""

    def _checkpoint(self, lifecycle: Any) -> None:
        return


class StumblingManager(ScaleManager):
    """A right manager whose progress cannot be told once, in a drain."""

    _told = 0

    async def progress(self, operation: str) -> Progress | None:
        if self._lifecycles[operation].phase == "DRAINING":
            self._told += 1
            if self._told == 2:
                raise ValueError("not to be told")
        return await super().progress(operation)


class RevivesTheDrained(Recovery):
    """Starts every dead replica again, without asking who owns it."""

    async def start(self) -> None:
        self._owner = None


async def submitted_means_tried(slot: Slot, config: LifecycleConfig, keep: Any) -> Release:
    """Takes a removal that it has tried to submit for one that was accepted."""
    try:
        return await release_group(slot, config, keep)
    finally:
        slot.removal_accepted = True


async def submits_again(slot: Slot, config: LifecycleConfig, keep: Any) -> Release:
    """Submits a removal again at every try."""
    slot.removal_asked = slot.removal_accepted = False
    return await release_group(slot, config, keep)


async def returned_means_removed(slot: Slot, config: LifecycleConfig, keep: Any) -> Release:
    """Takes the return of the call that removes a placement group for its removal."""
    await backend().placement_groups.remove(slot.group)
    return Release(True)


class _HardToKill:
    """A world in which nobody knows whether a probe is gone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(backend(), name)

    async def kill(self, handle: Any) -> None:
        raise ReadTimeout(f"whether {handle.name} is gone is not known")


async def usable_with_a_stubborn_probe(slot: Slot, config: LifecycleConfig) -> str:
    """The right function, where probes cannot be ended."""
    return await wait_usable(slot, config, _HardToKill())  # type: ignore[arg-type]  # it is one, by its attributes


async def a_probe_must_be_killed(slot: Slot, config: LifecycleConfig) -> str:
    """Gives a candidate up when the process that probed its group cannot be ended."""
    node = await usable_with_a_stubborn_probe(slot, config)
    await _HardToKill().kill(await backend().lookup(f"probe-{slot.name}"))
    return node


class FirstPortOfTheGroup(SharedEngines):
    """Takes the index of a replica's GPU in its own group, which is 0, for that on the machine."""

    def _free_port(self, node: str) -> int:
        port = 30_000
        self._ports.setdefault(node, set()).add(port)
        return port

    def freed(self, process: Any) -> None:
        self._ports[process.node].add(process.port)
        super().freed(process)


def every_row_counts(table: Mapping[str, str]) -> int:
    """Counts every row of the table of placement groups, those too that are REMOVED."""
    return len(table)


def _api(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "scale_api", ScaleApi, cls, scenario, check)


def _manager(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "scale_manager", ScaleManager, cls, scenario, check)


def _release(name: str, source: str, function: Any, scenario: str, check: str) -> Mutant:
    where = "protocol.scaling.lifecycle_steps:release_group"
    return Mutant(name, source, where, release_group, function, scenario, check)


_KEYS = "same_key_same_operation"

MUTANTS = (
    _api("reconcile without looking", "M1", ReconcilesWithoutLooking, "scale_parked", "removed_while_idle"),
    _manager("any confirmation counts", "M2, M3", AnyConfirmation, "scale_confirmed_twice", "removed_while_idle"),
    _api("silence is idle", "M1, M3", TakesSilenceForIdle, "scale_count_lost", "removed_while_idle"),
    _api("no reconcile without a victim", "M4", NeverWithoutVictim, "scale_deaf_watcher", "reached"),
    _manager("done at the abort", "M5, M6", DoneAtAbort, "scale_stuck", "clean_means_clean"),
    _api("admission left open", "M7", LeavesAdmissionOpen, "scale_1_2_1", "victim_stays_out"),
    Mutant(
        "a victim readmitted", "M9", "gateway", Gateway, ClosesForAWhile, "scale_parked_and_stopped", "victim_stays_out"
    ),
    _manager("another victim", "M9", AnotherVictim, "scale_parked", "groups_released_once"),
    _manager("oldest first", "M10", OldestFirst, "scale_3_2", "groups_released_once"),
    _manager("initial replicas too", "M10", InitialToo, "scale_1_2_1", "protected_alive"),
    _release("tried is submitted", "M11", submitted_means_tried, "scale_removal_refused", "groups_released_once"),
    _release("submitted again", "M11", submits_again, "scale_removal_late", "groups_released_once"),
    _manager("owned too late", "M12", OwnsLate, "scale_unplaceable", "clean_means_clean"),
    _release("returned is removed", "M13", returned_means_removed, "scale_unplaceable_late", "clean_means_clean"),
    Mutant(
        "the drained revived",
        "M15",
        "recovery",
        Recovery,
        RevivesTheDrained,
        "scale_killed_victim",
        "ranks_are_not_reused",
    ),
    Mutant(
        "a probe must be killed",
        "M14",
        "protocol.scaling.lifecycle_steps:wait_usable",
        usable_with_a_stubborn_probe,
        a_probe_must_be_killed,
        "scale_1_2_1",
        "reached",
    ),
    Mutant(
        "local index taken for the device",
        "M15b",
        "sim.simulation:SharedEngines",
        SharedEngines,
        FirstPortOfTheGroup,
        "scale_1_2_1",
        "one_engine_an_address",
    ),
    Mutant(
        "tombstones counted",
        "M15c",
        "scenarios.scaling:groups_left",
        groups_left,
        every_row_counts,
        "scale_there_and_back",
        "capacity_returned",
    ),
    _api("nothing heard is clean", "M22", TakesNothingForClean, "scale_mute_manager", "clean_means_clean"),
    _api("history without a bound", "M24", KeepsEverything, "scale_often", "memory_is_bounded"),
    _api("no-ops for ever", "M25", NoOpsForEver, "scale_many_keys", "memory_is_bounded"),
    _api("keys of the forgotten", "M25", AnswersForTheForgotten, "scale_often", "memory_is_bounded"),
    Mutant(
        "the unresolved evicted",
        "M26",
        "scale_api",
        BusyWithOthers,
        EvictsTheUnresolved,
        "scale_parked_among_others",
        "operations_end",
    ),
    _api("zeros after a crash", "M20", FillsWithZeros, "scale_stumble", "clean_means_clean"),
    _api("capacity guessed", "M21", GuessesCapacity, "scale_unknown_capacity", "clean_means_clean"),
    _api("conflict before replay", "M27", ConflictBeforeReplay, "scale_keys", _KEYS),
    _api("a window that slides", "M28a", WindowSlides, "scale_day", _KEYS),
    _api("no-op recomputed", "M28b", ForgetsNoOps, "scale_keys", _KEYS),
    _api("time-out not in the fingerprint", "M28c", FingerprintWithoutTimeout, "scale_keys", _KEYS),
    _api("one namespace of keys", "M28d", KeysOfBothDirections, "scale_keys", _KEYS),
    _api("targets coerced", "M23", CoercesTargets, "scale_careless", "only_integers_admitted"),
    _api("one exclusion for all", "M29a", ExcludesEverybody, "scale_two_services", "reached"),
    _api("exclusion by direction", "M29b", ExcludesByDirection, "scale_both_ways", "one_operation_at_a_time"),
    _api("dirty is free", "M29c", FreesWhatIsDirty, "scale_parked_then_out", "one_operation_at_a_time"),
    _api("handed over once", "H1", WatchesOnlyWhatWasAnswered, "scale_lost_handover", "operations_end"),
    _api("finished twice", "H2", FinishesTwice, "scale_deaf_watcher", "operations_end"),
    _manager("parked to the end", "H3", ParksToTheEnd, "scale_parked_briefly", "reached"),
    _manager("published at launch", "scaling 4", PublishesAtLaunch, "scale_1_2_1", "no_route_before_health"),
    _manager("published too late", "scaling 4", PublishesTooLate, "scale_late", "occurs"),
)
