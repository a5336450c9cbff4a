"""What is no proof, taken for one: of a drain, of an end, of a clean one, of a rank that may live."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from protocol.errors import SeatrialError
from protocol.messages import EngineAddress
from protocol.ports import Placement, backend
from protocol.scaling.api import ScaleApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import CleanupReport, Direction, Progress, Victim
from protocol.scaling.drain import DrainGate
from protocol.scaling.lifecycle import ScaleManager
from protocol.scaling.registry import Operation, ScaleRegistry
from protocol.scaling.watcher import Watcher
from protocol.serving.recovery import Recovery
from tests.mutants.registry import Mutant
from tests.mutants.scale_registries import ApiOfParts

# --- situations: managers of the user's own ---


class OmitsTheRank(ScaleManager):
    """Does not say which rank its victim has while that drains; it takes a confirmation that names it in full."""

    async def progress(self, operation: str) -> Progress | None:
        progress = await super().progress(operation)
        if progress is None or progress.victim is None or progress.phase != "DRAINING":
            return progress
        return dataclasses.replace(progress, victim=dataclasses.replace(progress.victim, rank=None))


class CompletesEarly(ScaleManager):
    """Says COMPLETED once a victim's process is gone, and that nothing is pending; also that it is still at work."""

    done: bool | None = False

    async def progress(self, operation: str) -> Progress | None:
        progress = await super().progress(operation)
        if progress is None or progress.phase != "REMOVING":
            return progress
        return dataclasses.replace(
            progress, phase="COMPLETED", victim=None, cleanup_required=False, physical_done=self.done
        )

    async def reconcile(self, operation: str, proof: Victim | None) -> CleanupReport:
        lifecycle = self._lifecycles.get(operation)
        if lifecycle is not None and lifecycle.phase == "REMOVING":
            return CleanupReport(known=True, victim_cleared=True, detail="no victim is left")
        return await super().reconcile(operation, proof)


class CompletesEarlyAndSilent(CompletesEarly):
    """Says COMPLETED once a victim's process is gone, and not whether it is at work."""

    done = None


class KnowsNoFlag(ScaleManager):
    """Is from before there was a flag for the cleanup: its progress says all but that."""

    async def progress(self, operation: str) -> Progress | None:
        progress = await super().progress(operation)
        return None if progress is None else dataclasses.replace(progress, cleanup_required=None)


class HasTheDeadRecovered(ScaleManager):
    """Has recovery look after everything of its service that is dead, whatever it is, once a second."""

    _looking: asyncio.Task[None] | None = None

    async def begin(self, operation: str, direction: Direction, target: int) -> bool:
        if self._looking is None:
            self._looking = backend().periodic(1.0, self._look, name="recover-all")
        return await super().begin(operation, direction, target)

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await super().stop()

    async def _look(self) -> None:
        port = backend()
        try:
            recovery = await port.lookup(port.me.name.replace("manager-", "recovery-"))
            for slot in self._slots.all():
                if slot.address is not None and not slot.initial and not await port.engines.alive(slot.name):
                    await recovery.recover(slot.address, "dead")
        except SeatrialError:
            return


# --- proofs of drain ---


class _Nameless(Watcher):
    async def _drain(self, operation: Operation, progress: Progress) -> None:
        victim = progress.victim
        if victim is not None and victim.rank is None and progress.phase == "DRAINING":
            if await self._gate.idle(victim):
                await self._manager.call("confirm_drained", operation.request_id, victim)
        else:
            await super()._drain(operation, progress)


class ConfirmsWithoutRank(ApiOfParts):
    """Confirms the drain of a victim whose rank it was not told."""

    watcher_class = _Nameless


class TrustsTheNameless(OmitsTheRank):
    """Takes a confirmation that names no rank for one of the victim that it waits for."""

    async def confirm_drained(self, operation: str, proof: Victim) -> bool:
        lifecycle = self._lifecycles.get(operation)
        if proof.rank is None and lifecycle is not None and lifecycle.victim is not None:
            proof = lifecycle.victim
        return await super().confirm_drained(operation, proof)


class _OutIsClosed(DrainGate):
    async def close(self, victim: Victim) -> bool:
        await super().close(victim)
        return True


class ReconcilesTheUnclosed(ScaleApi):
    """Goes on with a victim that is out of the pick set for the moment, as if its admission were closed."""

    async def _look_before(self, model: Any, operation: Operation) -> ApiReply | Victim | None:
        right, model.gate = model.gate, _OutIsClosed(model.gateway)
        try:
            return await super()._look_before(model, operation)
        finally:
            model.gate = right


# --- proofs of an end ---


class CompletedIsEnough(ScaleApi):
    """Reconciles a scale-in without a victim when its manager says COMPLETED, at work or not."""

    def is_done(self, progress: Progress) -> bool:
        return progress.phase == "COMPLETED"

    async def _look_before(self, model: Any, operation: Operation) -> ApiReply | Victim | None:
        progress: Progress = await model.manager.call("progress", operation.request_id)
        if progress.victim is None and self.is_done(progress):
            return None
        return await super()._look_before(model, operation)


class SilentIsDone(CompletedIsEnough):
    """Reconciles a scale-in without a victim when its manager says COMPLETED, and not that it is at work."""

    def is_done(self, progress: Progress) -> bool:
        return progress.phase == "COMPLETED" and progress.physical_done is not False


class _MissingIsPending(ScaleRegistry):
    def finish(self, operation: Operation, state: Any, progress: Progress | None, **more: Any) -> None:
        if progress is not None and progress.cleanup_required is None:
            more["cleanup_required"] = True
        super().finish(operation, state, progress, **more)


class TakesAMissingFlagForDirty(ApiOfParts):
    """Takes an operation whose manager knows no flag for the cleanup for one that is not clean."""

    registry_class = _MissingIsPending


# --- ranks that are over ---


class RevivesCandidates(Recovery):
    """Starts a dead candidate again, whose scale-out has failed."""

    over: tuple[str, ...] = ("candidate", "unreleased")

    async def _replace(self, old: EngineAddress, why: str) -> None:
        assert self._owner is not None
        leave = await self._owner.call("may_recover", old)
        if leave.why not in self.over:
            await super()._replace(old, why)
            return
        new = await backend().engines.launch(self._spec, name=old.name)
        await self._wait_ready(backend().engines.client(new))
        self._step(new, "ready")
        await asyncio.sleep(3600)


class RevivesTheRetired(RevivesCandidates):
    """Starts a rank again that was retired, and whose placement group is REMOVED."""

    over = ("retired",)


def whatever_is_free(group: str) -> None:
    """Starts a replica on the first device that is free, and not on that of its own placement group."""


def _of(component: str, twin: type) -> Any:
    def make(name: str, source: str, cls: Any, scenario: str, check: str) -> Mutant:
        return Mutant(name, source, component, twin, cls, scenario, check)

    return make


_api = _of("scale_api", ScaleApi)
_recovery = _of("recovery", Recovery)
_REUSED = "ranks_are_not_reused"

MUTANTS = (
    _api("confirmed without a rank", "M3", ConfirmsWithoutRank, "scale_nameless_victim", "reached"),
    _of("scale_manager", OmitsTheRank)(
        "nameless confirmation taken", "M3", TrustsTheNameless, "scale_nameless_proof", "reached"
    ),
    _api("completed is enough", "M5", CompletedIsEnough, "scale_completed_early", "clean_means_clean"),
    _api("silent is done", "M5", SilentIsDone, "scale_completed_unknown", "clean_means_clean"),
    _recovery("dead candidate revived", "M15", RevivesCandidates, "scale_dead_candidate", _REUSED),
    _recovery("retired rank revived", "M15", RevivesTheRetired, "scale_retired", _REUSED),
    _of("protocol.scaling.lifecycle_steps:Placement", Placement)(
        "another device than its group's", "M15b", whatever_is_free, "scale_1_2_1", "clean_means_clean"
    ),
    _api("missing flag is dirty", "M22", TakesAMissingFlagForDirty, "scale_without_a_flag", "reached"),
    _api("out is closed", "scaling 1.5", ReconcilesTheUnclosed, "scale_open_admission", "removed_while_idle"),
)
