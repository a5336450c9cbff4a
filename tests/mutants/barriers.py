"""Wrong controllers, entrypoints, routers and gates in the trouble of ``barrier_scenarios``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from protocol.errors import ActorDied, ReadTimeout, SeatrialError
from protocol.ports import ActorHandle, backend
from protocol.serving.affinity import SessionAffinityRouter
from protocol.serving.barrier import Member
from protocol.serving.controller import RolloutController
from protocol.serving.engine_work import AT_WORK, figures, says_idle
from protocol.serving.entrypoint import Entrypoint
from protocol.serving.gate import RequestGate, RequestLease
from protocol.training.publication import WeightPublisher
from tests.mutants.publishing import IsBornOpen, TakesAnyEpoch
from tests.mutants.registry import Mutant

# --- situations ---


class ForgetsWhatItPublished(WeightPublisher):
    """Does not remember what it has published, as one that was restarted in between."""

    async def publish(self, model_step: int) -> None:
        self._newest = -1
        await super().publish(model_step)


class PausesAtOnce(WeightPublisher):
    """Asks for a native pause just before it first publishes a version, and does not wait until that is through."""

    paused = 0

    async def publish(self, model_step: int) -> None:
        if model_step == self.paused:
            await super().publish(model_step)
            return
        self.paused = model_step
        beside = asyncio.get_running_loop().create_task(self._pause(), name="pause-beside")
        await asyncio.sleep(0)
        try:
            await super().publish(model_step)
        finally:
            await beside

    async def _pause(self) -> None:
        with contextlib.suppress(SeatrialError):
            await self._controller.pause_generation("abort")
            await self._controller.continue_generation()


# --- controllers ---


class ForgetsOldTurns(RolloutController):
    """Takes a gate that was restarted for drained: it has no lease."""

    async def _quiet(self, *_: Any) -> None:
        return None


class KeepsDeadGates(RolloutController):
    """Knows the gates of a barrier by the handles that it began with."""

    async def _found_again(self, member: Member) -> Member:
        if self._barrier is not None:
            raise ActorDied(f"{member.gate.name}/{member.gate.incarnation} is dead")
        return await super()._found_again(member)


class HoldsOnce(RolloutController):
    """Holds health when the barrier begins, and never again."""

    async def _keep_hold(self, own_s: float) -> None:
        if self._barrier is None:
            await super()._keep_hold(own_s)


class ReleasesEarly(RolloutController):
    """Lets health go on as soon as a resumption begins, while backends are paused and gates closed."""

    async def _gates(self, members: Any, stage: str, *rest: Any) -> None:
        if stage == "installed":
            await self._release()
        await super()._gates(members, stage, *rest)


class LooksOnceAndPauses(RolloutController):
    """Looks whether there is a barrier, and pauses natively beside whoever begins one then."""

    def _alone(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if what.endswith("_generation") else super()._alone(what)


# --- others ---


class RetiresAlone(SessionAffinityRouter):
    """Retires a session, and lets its turns that wait at a gate be sent."""

    async def _given_up(self, sessions: list[str]) -> None:
        return None


class TakesAnyVersion(RolloutController):
    """Seals, and has the weights changed, for a version that is older than the installed one, which no gate takes."""

    def _refuse_older(self, model_step: int | None, newest: int) -> None:
        pass


class AsksOnce(Entrypoint):
    """Asks its gate once, for as long as a turn may wait; an answer that is lost is a lease that is nobody's."""

    async def _lease(
        self, gate: ActorHandle, session_id: str, gone: Callable[[], bool]
    ) -> tuple[ActorHandle, RequestLease]:
        name = backend().new_id("lease")
        waits_s = self._config.admission_timeout_s
        try:
            async with asyncio.timeout(waits_s + self._config.call_timeout_s):
                lease: RequestLease = await gate.request(session_id, waits_s, name)
        except TimeoutError:
            raise ReadTimeout(f"{gate.name} did not answer a request of {session_id}") from None
        self._held[name] = gate.incarnation
        return gate, lease


class KeepsADeadController(WeightPublisher):
    """Asks the controller that it was given, for ever, also when that is dead and another one is up."""

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._controller, method)(*args, **kwargs)


class ExportsBeforeItAsks(WeightPublisher):
    """Restarted, it begins with an export, and leaves it to the controller to say that this version is an older one."""

    async def _published(self) -> int:
        return -1 if self._newest is None else self._newest


class BeginsAnew(Entrypoint):
    """Restarted, it knows of no turn, and so says that none is left at its replica."""

    async def start(self) -> None:
        await super().start()
        self._inherited = False


class TakesSilenceForIdleness(Entrypoint):
    """Restarted, it takes a replica whose page of metrics lacks the gauges for one that has nothing to do."""

    async def _nothing_inherited(self) -> bool:
        limit_s = self._config.call_timeout_s / 2
        status, page = await self._client.get("/metrics", connect_timeout_s=limit_s, read_timeout_s=limit_s)
        return status != 200 or not any(figures(page, AT_WORK).values())


class LooksAtMetricsAlone(Entrypoint):
    """Restarted, it waits for gauges that its replica does not show, and every publication for its deadline."""

    async def _nothing_inherited(self) -> bool:
        limit_s = self._config.call_timeout_s / 2
        status, page = await self._client.get("/metrics", connect_timeout_s=limit_s, read_timeout_s=limit_s)
        return status == 200 and says_idle(figures(page, AT_WORK))


def _controller(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "controller", RolloutController, cls, scenario, check)


BARRIER_MUTANTS = (
    _controller("turns of a dead gate forgotten", "G-I1", ForgetsOldTurns, "gate_dies", "no_update_under_lease"),
    _controller("dead gates kept in a barrier", "C-I2", KeepsDeadGates, "gate_dies_resuming", "occurs"),
    _controller("health held once", "C-I4", HoldsOnce, "hold_runs_out", "health_holds_in_a_barrier"),
    _controller(
        "health released before the reopening", "C-9", ReleasesEarly, "hold_runs_out", "health_holds_in_a_barrier"
    ),
    _controller("older version is not refused", "G-I5", TakesAnyVersion, "older_after_newer", "every_wait_ends"),
    _controller("native pause beside a barrier", "C-8, C-I5", LooksOnceAndPauses, "pause_beside", "one_barrier"),
    Mutant(
        "retired turns sent late", "A-I2", "affinity", SessionAffinityRouter, RetiresAlone, "late_turns",
        "one_backend_a_session",
    ),
    Mutant(
        "dead controller kept", "C-I2", "publisher", WeightPublisher, KeepsADeadController, "controller_dies",
        "every_wait_ends",
    ),
    Mutant(
        "older version exported by a restarted publisher", "W-I1", "publisher", WeightPublisher, ExportsBeforeItAsks,
        "publisher_dies", "turn_of_one_version",
    ),
    Mutant("turns of a dead entrypoint forgotten", "G-I1", "entrypoint", Entrypoint, BeginsAnew, "both_die",
           "no_update_under_lease"),
    Mutant("no gauges taken for idleness", "G-I1", "entrypoint", Entrypoint, TakesSilenceForIdleness,
           "both_die_unseen", "no_update_under_lease"),
    Mutant("quiet by gauges alone", "C-I3", "entrypoint", Entrypoint, LooksAtMetricsAlone, "both_die_unseen", "occurs"),
    Mutant("lost grant is nobody's", "G-I4", "entrypoint", Entrypoint, AsksOnce, "lost_grants", "leases_add_up"),
    Mutant(
        "gate born with an old version", "G-I5", "gate", RequestGate, IsBornOpen, "publish_gate_restarted",
        "versions_never_go_back",
    ),
    Mutant(
        "gate opened by an older cycle", "G-I7", "gate", RequestGate, TakesAnyEpoch, "publish_late_reopen",
        "old_epochs_do_nothing",
    ),
)  # fmt: skip
