"""Wrong publications in the other part of what their item says: pauses, continues, targets, retirements."""

from __future__ import annotations

from typing import Any

from protocol.errors import BarrierError, Outcome
from protocol.evidence import observer
from protocol.serving.admin import AdminResult
from protocol.serving.controller import RolloutController
from protocol.training.publication import WeightPublisher
from scenarios.agents import AgentClient
from tests.mutants.registry import Mutant

# --- controllers ---


class ContinuesOneByOne(RolloutController):
    """Continues each backend right after its own installation, while others have the version before."""

    async def _gates(self, members: Any, stage: str, method: str, deadline: float, arguments: Any) -> None:
        if method != "install_version" or self._barrier is None:
            await super()._gates(members, stage, method, deadline, arguments)
            return
        for member in members:
            await self._ask(member.gate, method, arguments, deadline)
            alone = {member.name: self._barrier.topology[member.name]}
            await super()._post(alone, "continued", "/continue_generation", {}, deadline)


class TakesAFailedPauseForOne(RolloutController):
    """Only notes that a backend did not pause, and has its weights changed all the same."""

    async def _post(self, topology: Any, stage: str, route: str, *further: Any) -> tuple[AdminResult, ...]:
        try:
            return await super()._post(topology, stage, route, *further)
        except BarrierError:
            if stage != "paused":
                raise
            return ()


# --- publishers ---


class PublishesToNobody(WeightPublisher):
    """Finds nobody to update, and goes on as if that version were published."""

    async def publish(self, model_step: int) -> None:
        try:
            await super().publish(model_step)
        except BarrierError as error:
            if error.outcome is not Outcome.NOT_DONE:
                raise


# --- agents ---


@observer
class RetiresOnSuccess(AgentClient):
    """Retires the session of an episode that went well, and leaves that of one that failed."""

    async def _over(self, session: str, turns: int, done: bool) -> None:
        if done:
            await super()._over(session, turns, done)
        else:
            self._tell_end(session, turns, done, retired=False)


def _controller(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "controller", RolloutController, cls, scenario, check)


MUTANTS = (
    _controller("continued one by one", "C-3", ContinuesOneByOne, "publish", "publication_order"),
    _controller("failed pause taken for one", "C-13", TakesAFailedPauseForOne, "pause_unreached", "publication_order"),
    Mutant(
        "published to nobody", "W-3", "publisher", WeightPublisher, PublishesToNobody, "ranks_nobody",
        "published_is_served",
    ),
    Mutant(
        "failed episodes not retired", "A-4", "scenarios.deploy:AgentClient", AgentClient, RetiresOnSuccess,
        "sessions_killed", "router_empty_at_the_end",
    ),
)  # fmt: skip
