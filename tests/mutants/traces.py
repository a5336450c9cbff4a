"""Wrong owners of traces: learners, evaluators, producers, buffers, workers and trace stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from protocol.errors import TraceConflict
from protocol.ports import ActorHandle, backend, data_call
from protocol.rollout.groups import EXPIRED, RolloutGroup, RolloutState, dispose
from protocol.rollout.prefix_tree import PrefixTree
from protocol.rollout.producer import Producer
from protocol.rollout.replay_buffer import ReplayBuffer, StoredGroup
from protocol.rollout.segments import TokenizedSegment
from protocol.rollout.trace_access import TraceAccess
from protocol.rollout.trace_store import RolloutTraceStore, holder
from protocol.training.evaluator import Evaluator
from protocol.training.learner import Learner, TrainWorker
from tests.mutants.registry import Mutant

# --- who releases what ---


class ReleasesEverything(Learner):
    """Releases every session after each batch, while others are at work."""

    async def _clean_up(self, batch: tuple[RolloutGroup, ...]) -> str:
        await self._traces.release_and_discard_rollout_groups(batch)
        await self._traces.call("release_all")
        return "all"


class ListsThenReleases(Learner):
    """Asks what the buffer holds, lists the store, and releases the difference: three calls for one decision."""

    async def _clean_up(self, batch: tuple[RolloutGroup, ...]) -> str:
        await self._traces.release_and_discard_rollout_groups(batch)
        held: tuple[StoredGroup, ...] = await self._buffer.contents()
        kept = {session for one in held for session in one.group.sessions}
        seen = await self._traces.call("snapshot")
        await self._traces.release_existing_sessions(session for session in seen.sessions if session not in kept)
        return "all"


class EvaluatesAndReleasesEverything(Evaluator):
    """Releases every session at the end of an evaluation."""

    async def _clean_up(self, own: list[RolloutGroup]) -> None:
        await super()._clean_up(own)
        await self._traces.call("release_all")


class ForgetsTheSessions(Producer):
    """Discards failed and filtered groups without releasing their sessions."""

    async def _discard(self, group: RolloutGroup) -> None:
        dispose(member for member in group.members if not member.session_id)


class ReleasesWhatComesAgain(ReplayBuffer):
    """Releases the sessions of expired groups that will be rolled out again."""

    async def refresh(self, step: int) -> None:
        await super().refresh(step)
        expired = [group for group in self._groups.values() if group.status == EXPIRED]
        await self._traces.release_existing_sessions(
            member.session_id for group in expired for member in group.members if member.status == EXPIRED
        )


class ReleasesAlthoughNotEmpty(Learner):
    """Alone, and so it releases every session, although the buffer has groups that are still to be trained on."""

    async def _clean_up(self, batch: tuple[RolloutGroup, ...]) -> str:
        await self._traces.release_and_discard_rollout_groups(batch)
        await self._traces.call("release_all")
        return "all"


# --- references ---


class FreesTwice(Learner):
    """Disposes of the references of sessions whose release has freed them."""

    async def _clean_up(self, batch: tuple[RolloutGroup, ...]) -> str:
        members = [member for group in batch for member in group.members]
        await self._traces.release_existing_sessions(member.session_id for member in members if member.session_id)
        dispose(members)
        return "own"


class ForgetsUntraced(Learner):
    """Takes the references off every state, also off those whose session the store never had."""

    async def _clean_up(self, batch: tuple[RolloutGroup, ...]) -> str:
        members = [member for group in batch for member in group.members]
        await self._traces.release_existing_sessions(member.session_id for member in members if member.session_id)
        dispose(member.without_experts() for member in members)
        return "own"


class FreesAtReset(ReplayBuffer):
    """Frees the references of a state that it resets, which its trace still has."""

    def _reset(self, member: RolloutState) -> RolloutState:
        backend().objects.free(member.experts)
        return member.reset()


class FreesAfterReading(TrainWorker):
    """Frees the references of a batch after its own read."""

    @data_call
    async def fit(self, groups: tuple[RolloutGroup, ...]) -> int:
        read = await super().fit(groups)
        backend().objects.free(tuple(ref for group in groups for member in group.members for ref in member.experts))
        return read


# --- waiting and finding ---


class ReleasesUnderItsLock(ReplayBuffer):
    """Waits for the trace store, group by group, inside of the lock that every access needs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = asyncio.Lock()

    async def put(self, group: RolloutGroup) -> str:
        async with self._lock:
            return await super().put(group)

    async def refresh(self, step: int) -> None:
        async with self._lock:
            await super().refresh(step)

    async def take(self, statuses: tuple[str, ...]) -> RolloutGroup | None:
        async with self._lock:
            return await super().take(statuses)

    async def take_batch(self, groups: int) -> tuple[RolloutGroup, ...]:
        async with self._lock:
            return await super().take_batch(groups)

    async def contents(self) -> tuple[StoredGroup, ...]:
        async with self._lock:
            return await super().contents()

    async def _drop(self, groups: tuple[RolloutGroup, ...]) -> None:
        for group in groups:
            await super()._drop((group,))


class KeepsADeadHandle(TraceAccess):
    """Keeps the first handle to the trace store that it has got, for ever."""

    _first: ActorHandle | None = None

    async def call(self, method: str, *args: Any) -> Any:
        if self._first is None:
            self._first = await self.get_existing_store()
        return await getattr(self._first, method)(*args)


# --- the store ---


class WritesInTwoPhases(RolloutTraceStore):
    """Writes placeholders first, and leaves them where the second phase is refused."""

    async def append(self, session_id: str, prefix: str, segments: tuple[TokenizedSegment, ...]) -> None:
        tree: PrefixTree[TokenizedSegment] = self._trees.setdefault(session_id, PrefixTree())
        key, before = prefix, []
        for segment in segments:
            key += segment.text
            before.append((key, tree.at(key)))
            tree.insert(key, TokenizedSegment(segment.text, ()))
        for (_, old), segment in zip(before, segments, strict=True):
            if old is not None and old != segment:
                raise TraceConflict(f"session {session_id}: another segment stands there")
        for (key, old), segment in zip(before, segments, strict=True):
            tree.insert(key, segment)
            if old is None and segment.experts is not None:
                await backend().objects.borrow(segment.experts, holder(session_id))


class OverwritesConflicts(RolloutTraceStore):
    """Replaces a segment by another one that is written at its key."""

    async def append(self, session_id: str, prefix: str, segments: tuple[TokenizedSegment, ...]) -> None:
        try:
            await super().append(session_id, prefix, segments)
        except TraceConflict:
            key = prefix
            for segment in segments:
                key += segment.text
                if segment.experts is not None:
                    await backend().objects.borrow(segment.experts, holder(session_id))
                self._trees[session_id].insert(key, segment)


class ForgetsWhoWasReleased(RolloutTraceStore):
    """Takes what is written late to a released session, which so comes back."""

    def _bury(self, sessions: tuple[str, ...]) -> None:
        pass


class WalksByRecursion(RolloutTraceStore):
    """Walks a trace by recursion when it releases it, one level a segment."""

    def _release(self, sessions: Iterable[str]) -> None:
        here = tuple(sessions)
        for session in here:
            _count_below(self._trees[session]._root)
        super()._release(here)


def _count_below(node: Any) -> int:
    return 1 + sum(_count_below(child) for child in node.children.values())


def _learner(name: str, source: str, cls: type, check: str, scenario: str = "traces") -> Mutant:
    return Mutant(name, source, "learner", Learner, cls, scenario, check)


def _buffer(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "replay_buffer", ReplayBuffer, cls, scenario, check)


def _store(name: str, source: str, cls: type, scenario: str, check: str, seeds: tuple[int, ...] = (1, 2, 3)) -> Mutant:
    return Mutant(name, source, "trace_store", RolloutTraceStore, cls, scenario, check, seeds)


MUTANTS = (
    _learner("learner releases everything", "S-1", ReleasesEverything, "trace_survives"),
    _learner("learner lists, then releases", "S-2", ListsThenReleases, "trace_survives"),
    Mutant(
        "evaluator releases everything", "S-3", "evaluator", Evaluator, EvaluatesAndReleasesEverything, "traces",
        "trace_survives",
    ),
    Mutant(
        "producer forgets sessions", "S-4", "producer", Producer, ForgetsTheSessions, "traces", "store_holds_the_buffer"
    ),
    _buffer("buffer releases what comes again", "S-5", ReleasesWhatComesAgain, "traces_expiring", "trace_survives"),
    _learner("learner frees twice", "S-6", FreesTwice, "reference_freed_once"),
    _learner("learner forgets untraced", "S-7", ForgetsUntraced, "no_reference_left"),
    _buffer("buffer releases under its lock", "S-8", ReleasesUnderItsLock, "traces_stalled", "buffer_answers"),
    Mutant(
        "dead store's handle kept", "S-9", "scenarios.rollouts:TraceAccess", TraceAccess, KeepsADeadHandle,
        "traces_lost", "store_is_found_again",
    ),
    _store("trace store writes in two phases", "S-10", WritesInTwoPhases, "traces_dense", "trace_is_the_transcript"),
    _store(
        "trace store forgets who was released", "A-5, S-I5", ForgetsWhoWasReleased, "traces_late",
        "store_holds_the_buffer",
    ),
    _store("trace store overwrites", "S-16", OverwritesConflicts, "traces", "trace_is_the_transcript"),
    _buffer("buffer frees at reset", "S-17", FreesAtReset, "traces_expiring", "reference_freed_once"),
    _learner(
        "lone learner releases everything", "S-18", ReleasesAlthoughNotEmpty, "trace_survives", "traces_alone"
    ),
    _store("trace store walks by recursion", "S-19", WalksByRecursion, "traces_deep", "store_holds_the_buffer", (1,)),
    Mutant(
        "worker frees after reading", "S-21", "train_worker", TrainWorker, FreesAfterReading, "traces",
        "reference_freed_once",
    ),
)  # fmt: skip
