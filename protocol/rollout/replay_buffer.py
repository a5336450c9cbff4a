"""The replay buffer: groups of rollouts that are waiting, to be trained on or to be rolled out again (rollout.md 6.7).

What it holds may still be needed, so nobody releases the sessions of a group that is in it. A group that it drops for
good it releases itself: first it takes the group out, then it asks the trace store, one call for all. In between it
answers everybody else.
"""

from __future__ import annotations

import dataclasses

from protocol.config import ReplayBufferConfig, TraceAccessConfig
from protocol.messages import message
from protocol.ports import backend
from protocol.rollout.groups import ABORTED, COMPLETED, EXPIRED, RolloutGroup, RolloutState, dispose
from protocol.rollout.trace_access import TraceAccess

STORED = (COMPLETED, ABORTED, EXPIRED)


@message
class StoredGroup:
    """A group as it lies in the buffer. ``number``: of its put; a group that comes back has another one."""

    group: RolloutGroup
    number: int


class ReplayBuffer:
    """Groups by status, oldest first. An actor; every change is made in one step, so it needs no lock.

    Args:
        config: staleness, and what becomes of expired groups.
        access: how the trace store is reached.
        store: its name.
    """

    def __init__(self, config: ReplayBufferConfig, access: TraceAccessConfig, store: str) -> None:
        self._config = config
        self._traces = TraceAccess(access, store)
        self._groups: dict[int, RolloutGroup] = {}
        self._puts = 0
        self._step = 1
        self._dropped = 0

    async def put(self, group: RolloutGroup) -> str:
        """Store a group; returns the status under which it lies here, or EXPIRED also where it was dropped.

        Raises:
            ValueError: a FAILED or FILTERED group; its producer releases and discards it.
        """
        if group.status not in STORED:
            raise ValueError(f"group {group.group_id} is {group.status}: its producer discards it")
        group = self._aged(group)
        if group.status == EXPIRED and not self._config.keep_expired:
            await self._drop((group,))
            return EXPIRED
        self._puts += 1
        self._groups[self._puts] = group
        backend().emit("buffer.put", group=group.group_id, status=group.status, sessions=list(group.sessions))
        return group.status

    async def refresh(self, step: int) -> None:
        """From now on groups are judged as if trained on in ``step``; those that are stale by then expire."""
        self._step = step
        dropped: list[RolloutGroup] = []
        for number, group in tuple(self._groups.items()):
            aged = self._aged(group)
            if aged.status == EXPIRED and not self._config.keep_expired:
                dropped.append(aged)
                del self._groups[number]
            else:
                self._groups[number] = aged
        if dropped:
            await self._drop(tuple(dropped))

    async def take_batch(self, groups: int) -> tuple[RolloutGroup, ...]:
        """The oldest COMPLETED groups, so many of them, or none at all where there are fewer."""
        ready = [number for number, group in self._groups.items() if group.status == COMPLETED]
        if len(ready) < groups:
            return ()
        return tuple(self._groups.pop(number) for number in ready[:groups])

    async def take(self, statuses: tuple[str, ...]) -> RolloutGroup | None:
        """One group to roll out again: the oldest of the first of these statuses that there is."""
        for status in statuses:
            for number, group in self._groups.items():
                if group.status == status:
                    return self._groups.pop(number)
        return None

    async def count(self, status: str | None = None) -> int:
        """Groups of a status, or all."""
        return sum(status is None or group.status == status for group in self._groups.values())

    async def contents(self) -> tuple[StoredGroup, ...]:
        """Everything that is here, oldest first."""
        return tuple(StoredGroup(group, number) for number, group in self._groups.items())

    async def dropped(self) -> int:
        """Groups that expired and were dropped for good, so far."""
        return self._dropped

    def _aged(self, group: RolloutGroup) -> RolloutGroup:
        """The group with its stale members expired: reset where they will be rolled out again. Fresh ones stay."""
        limit = (self._config.max_staleness + 1) * self._config.sync_weights_interval
        stale = [member for member in group.members if member.staleness(self._step) >= limit]
        if not stale:
            return group
        kept = self._config.keep_expired
        backend().emit(
            "buffer.expired",
            group=group.group_id,
            kept=kept,
            sessions=[member.session_id for member in stale if member.session_id],
        )
        if not kept:
            members = tuple(dataclasses.replace(member, status=EXPIRED) for member in group.members)
        else:
            members = tuple(self._reset(member) if member in stale else member for member in group.members)
        return dataclasses.replace(group, members=members)

    def _reset(self, member: RolloutState) -> RolloutState:
        if not member.session_id:
            dispose((member,))  # of a session they are its trace's, which still has them
        return member.reset()

    async def _drop(self, groups: tuple[RolloutGroup, ...]) -> None:
        """Release what nobody will roll out again. The groups are out of the buffer already."""
        self._dropped += len(groups)
        await self._traces.release_and_discard_rollout_groups(groups)
