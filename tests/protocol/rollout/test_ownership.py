"""Producer, learner and evaluator on one store, interleaved at every point: every order of their steps (E10, E12).

The steps are those of the components: what each awaits of the store is one step. Nothing else runs, so that every order
is one of three merged sequences, and all of them can be gone through.
"""

from __future__ import annotations

import asyncio
import itertools
import unittest.mock
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from protocol.config import TraceAccessConfig
from protocol.errors import TraceError
from protocol.messages import ObjectRef
from protocol.rollout.groups import COMPLETED, RolloutGroup, RolloutState
from protocol.rollout.segments import TokenizedSegment
from protocol.rollout.trace_access import TraceAccess
from protocol.rollout.trace_store import RolloutTraceStore

Step = Callable[[], Awaitable[None]]


class Ended(Exception):
    """A value was used after its end, or ended twice."""


class CountedObjects:
    """The object store, down to what ownership is about."""

    def __init__(self) -> None:
        self.holds: dict[str, list[str]] = {}
        self.over: set[str] = set()

    def new(self, name: str, held_as: str) -> ObjectRef:
        self.holds[name] = [held_as]
        return ObjectRef(name)

    async def borrow(self, ref: ObjectRef, holder: str) -> None:
        self.read(ref)
        self.holds[ref.object_id].append(holder)

    def give_back(self, ref: ObjectRef, holder: str) -> None:
        if ref.object_id not in self.over:
            self.holds[ref.object_id].remove(holder)
            if not self.holds[ref.object_id]:
                self.over.add(ref.object_id)

    def free(self, refs: tuple[ObjectRef, ...]) -> None:
        for ref in refs:
            self.read(ref)
            self.over.add(ref.object_id)

    def read(self, ref: ObjectRef) -> None:
        if ref.object_id in self.over:
            raise Ended(ref.object_id)


class Direct(TraceAccess):
    """Calls a store that is an object, with nobody in between."""

    def __init__(self, store: RolloutTraceStore) -> None:
        super().__init__(TraceAccessConfig(), "store")
        self._store = store

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._store, method)(*args)


class Small:
    """One group waits in the buffer; the producer makes another one and begins a third; an evaluation goes on.

    Args:
        aware: whether segments are request-aware.
        release_all: a learner that releases everything after its batch (S-1).
    """

    def __init__(self, aware: bool, release_all: bool = False) -> None:
        self.objects = CountedObjects()
        self.store = RolloutTraceStore()
        self.traces = Direct(self.store)
        self.aware = aware
        self.release_all = release_all
        self.buffer: list[RolloutGroup] = []
        self.taken: list[RolloutGroup] = []
        self.emit = lambda *_, **__: None

    async def record(self, session: str, turn: int) -> None:
        text = "".join(f"{session}{n} " for n in range(turn))
        found = await self.store.search(session, text)
        assert found.text == text, f"{session}: recorded {text!r}, found {found.text!r}"
        request = f"{session}/{turn}"
        ref = self.objects.new(request, f"turn/{request}")
        segment = TokenizedSegment(
            f"{session}{turn} ", (turn,), experts=ref, request_id=request if self.aware else "", model_step=turn
        )
        await self.store.append(session, text, (segment,))
        self.objects.give_back(ref, f"turn/{request}")

    async def put(self, session: str, turns: int) -> None:
        text = "".join(f"{session}{n} " for n in range(turns))
        trace = await self.store.export_training_trace(session, text)
        member = RolloutState(session, session, COMPLETED, experts=trace.experts, shared=trace.shared)
        self.buffer.append(RolloutGroup(f"group {session}", (member,)))

    async def take(self) -> None:
        self.taken = [self.buffer.pop(0)] if self.buffer else []

    async def read(self) -> None:
        for group in self.taken:
            for ref in group.members[0].experts:
                self.objects.read(ref)

    async def clean_up(self) -> None:
        if self.taken and self.release_all:
            await self.store.release_all()
        else:
            await self.traces.release_and_discard_rollout_groups(self.taken)
        self.taken = []

    def programs(self) -> tuple[list[Step], list[Step], list[Step]]:
        producer: list[Step] = [
            lambda: self.record("a", 0), lambda: self.record("a", 1), lambda: self.put("a", 2),
            lambda: self.record("b", 0),
        ]  # fmt: skip

        async def again() -> None:
            await self.take()
            await self.clean_up()

        learner: list[Step] = [self.take, self.read, self.clean_up, again]

        async def leave() -> None:
            await self.traces.release_existing_sessions(["e", "e"])

        evaluator: list[Step] = [lambda: self.record("e", 0), lambda: self.record("e", 1), leave]
        return producer, learner, evaluator

    async def run(self, order: tuple[int, ...]) -> None:
        """Raises AssertionError or Ended where somebody's session is gone, or a value is used after its end."""
        await self.record("c", 0)
        await self.put("c", 1)
        steps = [iter(program) for program in self.programs()]
        for who in order:
            await next(steps[who])()
        there = (await self.store.snapshot()).sessions
        waiting = {session for group in self.buffer for session in group.sessions}
        assert set(there) == waiting | {"b"}, f"left in the store: {there}"
        alive = {name for name in self.objects.holds if name not in self.objects.over}
        assert alive == {name for name in self.objects.holds if name.split("/")[0] in there}, alive


def orders() -> Iterator[tuple[int, ...]]:
    """Every merge of sequences of 4, 4 and 3 steps: 11,550."""
    places = range(11)
    for producer in itertools.combinations(places, 4):
        rest = [place for place in places if place not in producer]
        for learner in itertools.combinations(rest, 4):
            yield tuple(0 if place in producer else 1 if place in learner else 2 for place in places)


async def failing(aware: bool, release_all: bool) -> tuple[int, int]:
    """(orders, failing ones)."""
    tried = failed = 0
    now: list[Small] = []
    with (
        unittest.mock.patch("protocol.rollout.trace_store.backend", lambda: now[-1]),
        unittest.mock.patch("protocol.rollout.groups.backend", lambda: now[-1]),
    ):
        for order in orders():
            now[:] = [Small(aware, release_all)]
            tried += 1
            try:
                await now[-1].run(order)
            except (AssertionError, Ended, TraceError):
                failed += 1
    return tried, failed


@pytest.mark.parametrize("aware", [False, True])
def test_in_every_order_each_releases_its_own_and_nothing_else(aware: bool) -> None:
    assert asyncio.run(failing(aware, release_all=False)) == (11_550, 0)


def test_a_learner_that_releases_everything_fails_in_most_orders_and_not_in_all() -> None:
    """Why one run shows nothing: the cleanup may come before the producer's next insert (E11)."""
    tried, failed = asyncio.run(failing(True, release_all=True))
    assert tried == 11_550 and tried // 2 < failed < tried
