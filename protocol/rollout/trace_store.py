"""The trace store: what the sessions of a run have said, as tokens, from the first turn until it has been trained on.

A singleton actor, named; `protocol.rollout.trace_access` finds it. Session to prefix tree of segments (serving.md 5.3
to 5.5). Who may release a session is not the store's to say: see docs/traces.md.

**Tombstones.** A session that is released leaves a tombstone, whether it was here or not: a turn of it that comes late,
its first one perhaps, is refused, for it would make the session anew and nobody would release that. A tombstone is
forgotten ``tombstone_ttl_s`` after the release, which must be longer than any turn of the session can be on its way; or
earlier, oldest first, when there are more than ``max_tombstones``. So a session id is never used again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import TypeVar

from protocol.config import TraceStoreConfig
from protocol.errors import SeatrialError, TraceConflict, TraceNotFound, TraceReleased
from protocol.messages import ObjectRef
from protocol.ports import backend
from protocol.rollout.prefix_tree import PrefixTree
from protocol.rollout.segments import StoreSnapshot, TokenizedSegment, TraceMatch, TrainingTrace
from protocol.tombstones import Tombstones

T = TypeVar("T")


class RolloutTraceStore:
    """Session to prefix tree. An actor; what a method changes it changes in one step, so no call sees half of another.

    A session id is taken as ``str(session_id)``: what writes and what cleans up must mean the same session.

    Args:
        config: how long released sessions are remembered.
    """

    def __init__(self, config: TraceStoreConfig | None = None) -> None:
        limits = config or TraceStoreConfig()
        self._tombstones = Tombstones(limits.tombstone_ttl_s, limits.max_tombstones)
        self._trees: dict[str, PrefixTree[TokenizedSegment]] = {}
        # Session to the last match: its last segment, how many there are, and their tokens. What is stored never
        # changes, so the next match of the same conversation goes on from there.
        self._matched: dict[str, tuple[TokenizedSegment | None, int, tuple[int, ...]]] = {}

    # --- writing and reading ---

    async def append(self, session_id: str, prefix: str, segments: tuple[TokenizedSegment, ...]) -> None:
        """Write what follows ``prefix`` in one conversation: all of the segments, or none (single-phase).

        ``prefix`` is empty or a stored conversation; each segment then stands at the key that ends with its text. A
        segment that is there already with the same content is left as it is, so repeating an append whose outcome is
        unknown is harmless. The store borrows the expert reference of each segment that it takes; whoever put it there
        gives back his own hold once this has returned.

        Raises:
            ObjectFreed, ObjectLost (*not done*): an expert reference leads to nothing.
            TraceConflict (*not done*): another content stands at one of the keys, ``prefix`` is not stored, a segment
                has no text, some segments of the conversation have experts and others none, or a stored segment that
                is not of the conversation ends in the new ones: it would cut one in two, or be read as continued.
            TraceReleased (*not done*): the session was released.
        """
        session = str(session_id)
        borrowed: list[ObjectRef] = []
        try:
            for _, segment in self._new_keys(session, prefix, segments):
                if segment.experts is not None:
                    await backend().objects.borrow(segment.experts, holder(session))
                    borrowed.append(segment.experts)
            # Again: another append, or a release, may have come in between.
            new = self._new_keys(session, prefix, segments)
        except SeatrialError:
            for ref in borrowed:
                backend().objects.give_back(ref, holder(session))
            raise
        tree = self._trees.setdefault(session, PrefixTree())
        for key, segment in new:
            tree.insert(key, segment)
            if segment.experts is not None:
                borrowed.remove(segment.experts)
        for ref in borrowed:
            backend().objects.give_back(ref, holder(session))
        backend().emit(
            "trace.appended",
            session=session,
            segments=len(new),
            kept=len(segments) - len(new),
            model_step=segments[-1].model_step if segments else -1,
            request=segments[-1].request_id if segments else "",
        )

    def _new_keys(
        self, session: str, prefix: str, segments: tuple[TokenizedSegment, ...]
    ) -> list[tuple[str, TokenizedSegment]]:
        """What an append adds. Raises TraceConflict, TraceReleased."""
        self._tombstones.expire(_now())
        if session in self._tombstones:
            backend().emit(
                "trace.refused",
                session=session,
                segments=len(segments),
                request=segments[-1].request_id if segments else "",
            )
            raise TraceReleased(
                f"session {session} was released: what is written to it now comes late", session=session
            )
        tree = self._trees.get(session)
        last = None if tree is None or not prefix else tree.at(prefix)
        if prefix and last is None:
            raise TraceConflict(f"session {session}: no segment ends where the prefix of {len(prefix)} characters does")
        key = prefix
        new: list[tuple[str, TokenizedSegment]] = []
        for segment in segments:
            if not segment.text:
                raise TraceConflict(f"session {session}: a segment of {len(segment.token_ids)} tokens has no text")
            if last is not None and (last.experts is None) != (segment.experts is None):
                raise TraceConflict(f"session {session}: some segments of the conversation have experts, others none")
            there = None if tree is None or new else tree.edge_after(key, segment.text)
            key += segment.text
            last = segment
            if there is None:
                new.append((key, segment))
            elif there[0] != segment.text:
                raise TraceConflict(
                    f"session {session}: a stored segment ends in the new one, after {len(there[0])} characters"
                )
            elif there[1] != segment:
                raise TraceConflict(
                    f"session {session}: another segment stands at the key of {len(key)} characters "
                    f"(they differ in {_difference(there[1], segment)})"
                )
        kept = len(new[0][0]) - len(new[0][1].text) if new else len(key)
        if tree is not None and tree.reach(key) != kept:
            raise TraceConflict(
                f"session {session}: a stored segment that begins after fewer than {kept} characters, or there, ends "
                "in the new ones: they would be read as its continuation"
            )
        return new

    async def search(self, session_id: str, text: str) -> TraceMatch:
        """The longest stored prefix of ``text``; an empty match where the session is not here."""
        tree = self._trees.get(str(session_id))
        if tree is None:
            return TraceMatch("", (), 0)
        found, segments = tree.search(text)
        last, count, tokens = self._matched.get(str(session_id), (None, 0, ()))
        if not count or count > len(segments) or segments[count - 1] is not last:
            count, tokens = 0, ()
        tokens += _joined(segment.token_ids for segment in segments[count:])
        self._matched[str(session_id)] = (segments[-1] if segments else None, len(segments), tokens)
        return TraceMatch(found, tokens, len(segments))

    async def export_training_trace(self, session_id: str, prompt: str) -> TrainingTrace:
        """The conversation that ends with exactly ``prompt``, as it is trained on.

        Raises:
            TraceNotFound (*not done*): ``prompt`` does not match any trace key of the session, or an edge of it has
                no value, or some segments have experts and others none.
        """
        session = str(session_id)
        tree = self._trees.get(session)
        way = None if tree is None else tree.get(prompt)
        if way is None:
            raise TraceNotFound(f"session {session}: the prompt does not match any trace key", session=session)
        segments = [segment for segment in way if segment is not None]
        experts = tuple(segment.experts for segment in segments if segment.experts is not None)
        if len(segments) != len(way) or (experts and len(experts) != len(segments)):
            raise TraceNotFound(f"session {session}: the trace has a hole on the way to its key", session=session)
        return TrainingTrace(
            session,
            prompt,
            _joined(segment.token_ids for segment in segments),
            _joined(segment.labels for segment in segments),
            _joined(segment.logprobs for segment in segments),
            tuple(segment.model_step for segment in segments for _ in segment.token_ids),
            tuple(segment.request_id for segment in segments for _ in segment.token_ids),
            experts,
            any(segment.request_aware for segment in segments),
        )

    async def keys(self, session_id: str) -> tuple[str, ...]:
        """Every stored conversation of a session, a beginning before what continues it."""
        tree = self._trees.get(str(session_id))
        return () if tree is None else tuple(key for key, _ in tree.items())

    async def snapshot(self) -> StoreSnapshot:
        """What is here now."""
        trees = self._trees.values()
        tokens = sum(len(segment.token_ids) for tree in trees for segment in tree.values())
        return StoreSnapshot(tuple(self._trees), sum(map(len, trees)), tokens, len(self._tombstones))

    # --- releasing ---

    async def release(self, session_id: str) -> None:
        """Release one session. Raises TraceNotFound (*not done*) where it is not here."""
        if str(session_id) not in self._trees:
            raise TraceNotFound(f"session {session_id} is not in the trace store", session=str(session_id))
        self._bury((str(session_id),))
        self._release((str(session_id),))

    async def release_sessions(self, session_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Release those of the sessions that are here, each once, in one step; returns them in the order asked for.

        Absent ones are over as well: nothing is written to them from now on. Repeating it is harmless, and does not
        prolong a tombstone; the second answer is empty.
        """
        asked = tuple(dict.fromkeys(map(str, session_ids)))
        here = tuple(name for name in asked if name in self._trees)
        self._bury(asked)
        self._release(here)
        return here

    async def release_all(self) -> tuple[str, ...]:
        """Release every session; returns them."""
        here = tuple(self._trees)
        self._bury(here)
        self._release(here)
        return here

    def _bury(self, sessions: tuple[str, ...]) -> None:
        """Nothing is written to these any more."""
        now = _now()
        self._tombstones.expire(now)
        self._tombstones.add(sessions, now)

    def _release(self, sessions: Iterable[str]) -> None:
        """Trees go first, references after: whoever asks in between finds no session, not a dangling one."""
        for session in sessions:
            segments = self._trees.pop(session).clear()
            self._matched.pop(session, None)
            own: list[ObjectRef] = []
            for segment in segments:
                if segment.experts is not None:
                    if segment.request_aware:
                        backend().objects.give_back(segment.experts, holder(session))
                    else:
                        own.append(segment.experts)
            if own:
                backend().objects.free(tuple(own))
            backend().emit("trace.released", session=session, segments=len(segments), freed=len(own))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _joined(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(itertools.chain.from_iterable(parts))


def holder(session: str) -> str:
    """The name under which the store holds the references of a session."""
    return f"trace/{session}"


def _difference(old: TokenizedSegment | None, new: TokenizedSegment) -> str:
    """Which fields differ, for a person."""
    if old is None:
        return "a key without a value"
    names = ("token_ids", "labels", "logprobs", "experts", "request_id", "model_step")
    return ", ".join(name for name in names if getattr(old, name) != getattr(new, name))
