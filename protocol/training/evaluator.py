"""The evaluator: runs groups of its own to see how good a version is, and leaves nothing of them (serving.md 5.4)."""

from __future__ import annotations

import asyncio

from protocol.config import EvaluatorConfig, TraceAccessConfig
from protocol.errors import SeatrialError
from protocol.messages import message
from protocol.ports import ActorHandle
from protocol.rollout.groups import RolloutGroup
from protocol.rollout.trace_access import TraceAccess


@message
class EvaluationCounts:
    """``rounds`` begun, ``failed`` of them, and ``rewards`` given in all."""

    rounds: int = 0
    failed: int = 0
    rewards: int = 0


class Evaluator:
    """Evaluates every so often until it is told to finish. An actor.

    Training groups are none of its business: it neither takes nor releases any, whatever becomes of its own (T-I6).

    Args:
        config: size of an evaluation, and how often.
        access: how the trace store is reached.
        store: its name.
        agents: handles of those who run episodes, as for the Producer; ``sample(number, evaluation=True)``.
    """

    def __init__(
        self, config: EvaluatorConfig, access: TraceAccessConfig, store: str, agents: tuple[ActorHandle, ...]
    ) -> None:
        self._config = config
        self._traces = TraceAccess(access, store)
        self._agents = agents
        self._finishing = asyncio.Event()
        self._rounds = 0
        self._failed = 0
        self._rewards = 0

    async def run(self) -> EvaluationCounts:
        """Evaluate, wait, and again, until ``finish``."""
        while not self._finishing.is_set():
            try:
                await self.evaluate()
            except SeatrialError:
                self._failed += 1
            try:
                async with asyncio.timeout(self._config.interval_s):
                    await self._finishing.wait()
            except TimeoutError:
                continue
        return EvaluationCounts(self._rounds, self._failed, self._rewards)

    async def finish(self) -> None:
        """End after the evaluation that is under way."""
        self._finishing.set()

    async def evaluate(self) -> int:
        """One evaluation; returns how many rewards were given.

        Raises:
            SeatrialError: an agent failed. What the evaluation has put into the trace store is released all the same.
        """
        agents = self._agents
        first = self._rounds * self._config.groups
        self._rounds += 1
        own: list[RolloutGroup] = []
        try:
            for number in range(first, first + self._config.groups):
                own.append(await agents[number % len(agents)].sample(number, evaluation=True))
            runs = [agents[number % len(agents)].run_group(group) for number, group in enumerate(own, first)]
            ended = await asyncio.gather(*runs, return_exceptions=True)
            own = [run if isinstance(run, RolloutGroup) else group for run, group in zip(ended, own, strict=True)]
            for run in ended:
                if isinstance(run, BaseException):
                    raise run
            given = sum(member.reward is not None for group in own for member in group.members)
            self._rewards += given
            return given
        finally:
            await self._clean_up(own)

    async def _clean_up(self, own: list[RolloutGroup]) -> None:
        """Release the evaluation's own sessions, and no others."""
        await self._traces.release_and_discard_rollout_groups(own)
