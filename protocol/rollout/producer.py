"""The producer: rolls groups out, and decides what becomes of each (rollout.md 6.1, 6.4).

A group that failed or is filtered is over: its sessions are released and its references freed before it is forgotten.
Any other goes into the replay buffer, and its sessions stay.
"""

from __future__ import annotations

import asyncio
import dataclasses

from protocol.config import ProducerConfig, TraceAccessConfig
from protocol.errors import SeatrialError
from protocol.messages import message
from protocol.ports import ActorHandle, backend
from protocol.rollout.groups import ABORTED, COMPLETED, EXPIRED, FAILED, FILTERED, RolloutGroup
from protocol.rollout.trace_access import TraceAccess


@message
class ProducedCounts:
    """What was produced, in members of groups, each counted once a run (rollout.md 6.8)."""

    produced: int = 0
    failed: int = 0
    filtered: int = 0
    raw_rewards: int = 0
    """Members of completed groups with a reward, counted before filtering."""
    groups: int = 0
    """Groups that were run, again or for the first time."""


class Producer:
    """Runs groups on agents, so many at once. An actor.

    Args:
        config: how many at once, and what is filtered.
        access: how the trace store is reached.
        store: its name.
        buffer: handle of the ReplayBuffer.
        agents: handles of those who run episodes: ``sample(number)`` draws a group, ``run_group(group)`` runs it.
    """

    def __init__(
        self,
        config: ProducerConfig,
        access: TraceAccessConfig,
        store: str,
        buffer: ActorHandle,
        agents: tuple[ActorHandle, ...],
    ) -> None:
        self._config = config
        self._traces = TraceAccess(access, store)
        self._buffer = buffer
        self._agents = agents
        self._drawn = 0
        self._busy = 0
        self._counts = ProducedCounts()

    async def produce(self, groups: int) -> ProducedCounts:
        """Draw so many groups more, and run them, with those that come back from the buffer, to an end.

        Returns:
            Counts over the whole life of this producer.
        """
        until = self._drawn + groups
        async with asyncio.TaskGroup() as workers:
            for number in range(self._config.groups_at_once):
                workers.create_task(self._work(number, until), name=f"producer-{number}")
        return self._counts

    async def _work(self, worker: int, until: int) -> None:
        agent = self._agents[worker % len(self._agents)]
        while True:
            self._busy += 1
            try:
                group = await self._next(agent, until)
                if group is not None:
                    await self._roll_out(agent, group)
                    continue
            finally:
                self._busy -= 1
            if not self._busy:
                return
            await asyncio.sleep(self._config.poll_s)  # what others are at may yet come back

    async def _next(self, agent: ActorHandle, until: int) -> RolloutGroup | None:
        """What is to be rolled out again goes before what is new."""
        again: RolloutGroup | None = await self._buffer.take((EXPIRED, ABORTED))
        if again is not None or self._drawn >= until:
            return again
        number, self._drawn = self._drawn, self._drawn + 1
        drawn: RolloutGroup = await agent.sample(number)
        return drawn

    async def _roll_out(self, agent: ActorHandle, group: RolloutGroup) -> None:
        try:
            done: RolloutGroup = await agent.run_group(group)
        except SeatrialError:  # the agents are dead, and with them what they had
            done = dataclasses.replace(
                group, members=tuple(dataclasses.replace(member, status=FAILED) for member in group.members)
            )
        status = self._judged(done)
        self._count(done, status)
        if status in (FAILED, FILTERED):
            backend().emit("producer.discarded", group=done.group_id, status=status, sessions=list(done.sessions))
            await self._discard(done)
            if status == FAILED and self._config.failure_pause_s:
                await asyncio.sleep(self._config.failure_pause_s)
        else:
            await self._buffer.put(done)

    def _judged(self, group: RolloutGroup) -> str:
        """The group's status; FILTERED also where it is complete and teaches nothing."""
        rewards = [member.reward for member in group.members]
        if group.status == COMPLETED and self._config.filter_equal_rewards and len(rewards) > 1:
            if all(reward == rewards[0] for reward in rewards):
                return FILTERED
        return group.status

    async def _discard(self, group: RolloutGroup) -> None:
        """Nobody will use the group again."""
        await self._traces.release_and_discard_rollout_groups((group,))

    def _count(self, group: RolloutGroup, status: str) -> None:
        members = len(group.members)
        rewarded = sum(member.reward is not None for member in group.members)
        self._counts = dataclasses.replace(
            self._counts,
            produced=self._counts.produced + members,
            failed=self._counts.failed + members * (status == FAILED),
            filtered=self._counts.filtered + members * (status == FILTERED),
            raw_rewards=self._counts.raw_rewards + rewarded * (group.status == COMPLETED),
            groups=self._counts.groups + 1,
        )
