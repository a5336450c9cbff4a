"""What the replay buffer keeps, what expires, and whose sessions go with it (rollout.md 6.1, 6.2; E15, E16)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from protocol.config import ReplayBufferConfig, TraceAccessConfig
from protocol.errors import RemoteError
from protocol.ports import ActorHandle, Backend
from protocol.rollout.groups import ABORTED, COMPLETED, EXPIRED, FAILED, FILTERED, INIT, RolloutGroup, RolloutState
from protocol.rollout.replay_buffer import ReplayBuffer
from protocol.rollout.segments import TokenizedSegment
from protocol.rollout.trace_store import RolloutTraceStore
from sim.backend import run_sim


def member(name: str, status: str = COMPLETED, *steps: int, session: bool = True) -> RolloutState:
    return RolloutState(
        name, name if session else "", status, 1, "prompt ", "prompt answer ", 14, 1, steps, reward=1.0
    )  # fmt: skip


def group(name: str, *members: RolloutState) -> RolloutGroup:
    return RolloutGroup(name, members)


def run(config: ReplayBufferConfig, body: Callable[[Backend, ActorHandle, ActorHandle], Awaitable[None]]) -> None:
    async def started(world: Backend) -> None:
        store = await world.spawn(RolloutTraceStore, name="traces")
        buffer = await world.spawn(ReplayBuffer, config, TraceAccessConfig(), "traces", name="buffer")
        await body(world, store, buffer)

    run_sim(started, copy_always=True)


async def record(store: ActorHandle, *sessions: str) -> None:
    for session in sessions:
        await store.append(session, "", (TokenizedSegment("prompt ", (1,)), TokenizedSegment("answer ", (2,))))


@pytest.mark.parametrize(
    ("statuses", "whole"),
    [
        ((COMPLETED, COMPLETED), COMPLETED),
        ((COMPLETED, FILTERED), FILTERED),
        ((FILTERED, EXPIRED), EXPIRED),
        ((EXPIRED, ABORTED), ABORTED),
        ((ABORTED, FAILED), FAILED),
        ((INIT, COMPLETED), COMPLETED),
    ],
)
def test_the_worst_member_is_the_groups_status(statuses: tuple[str, ...], whole: str) -> None:
    assert group("g", *(member(str(n), status) for n, status in enumerate(statuses))).status == whole


@pytest.mark.parametrize(
    ("interval", "most", "version", "fresh", "stale"), [(4, 0, 4, 8, 9), (4, 1, 4, 12, 13), (1, 0, 3, 4, 5)]
)
def test_the_boundary_of_staleness(interval: int, most: int, version: int, fresh: int, stale: int) -> None:
    """The examples of rollout.md 6.2: stale from (max_staleness + 1) x interval on, by the oldest version."""

    async def body(world: Backend, store: ActorHandle, buffer: ActorHandle) -> None:
        await buffer.put(group("g", member("a", COMPLETED, version, version + 2)))
        await buffer.refresh(fresh)
        assert await buffer.count(COMPLETED) == 1
        await buffer.refresh(stale)
        assert await buffer.count(COMPLETED) == 0 and await buffer.count(EXPIRED) == 1

    run(ReplayBufferConfig(max_staleness=most, sync_weights_interval=interval, keep_expired=True), body)


def test_an_expired_group_that_comes_again_keeps_its_sessions_and_its_fresh_members() -> None:
    async def body(world: Backend, store: ActorHandle, buffer: ActorHandle) -> None:
        await record(store, "a", "b")
        assert await buffer.put(group("g", member("a", COMPLETED, 0), member("b", COMPLETED, 2))) == COMPLETED
        await buffer.refresh(3)
        again = await buffer.take((EXPIRED, ABORTED))
        old, fresh = again.members
        assert old.status == EXPIRED and old.text == "prompt " and old.stored == 7 and old.turns == 0
        assert old.model_steps == () and old.reward is None and old.session_id == "a" and old.attempt == 1
        assert fresh == member("b", COMPLETED, 2)
        assert (await store.snapshot()).sessions == ("a", "b")
        assert (await store.search("a", "prompt and more")).text == "prompt "

    run(ReplayBufferConfig(max_staleness=0, keep_expired=True), body)


def test_an_expired_group_that_is_dropped_releases_its_sessions_and_no_others() -> None:
    async def body(world: Backend, store: ActorHandle, buffer: ActorHandle) -> None:
        await record(store, "a", "b", "c", "d", "e")
        await buffer.put(group("g", member("a", COMPLETED, 0), member("b", COMPLETED, 1)))
        await buffer.put(group("h", member("c", ABORTED, 1)))
        await buffer.put(group("i", member("d", ABORTED)))
        await buffer.refresh(2)
        assert (await store.snapshot()).sessions == ("c", "d", "e") and await buffer.dropped() == 1
        assert await buffer.put(group("j", member("e", COMPLETED, 0))) == EXPIRED
        assert (await store.snapshot()).sessions == ("c", "d")
        assert [one.group.group_id for one in await buffer.contents()] == ["h", "i"]

    run(ReplayBufferConfig(max_staleness=0), body)


@pytest.mark.parametrize("status", [FAILED, FILTERED])
def test_what_is_over_is_not_stored(status: str) -> None:
    async def body(world: Backend, store: ActorHandle, buffer: ActorHandle) -> None:
        with pytest.raises(RemoteError, match="its producer discards it"):
            await buffer.put(group("g", member("a", status)))
        assert await buffer.count() == 0

    run(ReplayBufferConfig(), body)


def test_batches_and_retries_are_taken_oldest_first_and_whole() -> None:
    async def body(world: Backend, store: ActorHandle, buffer: ActorHandle) -> None:
        for name, status in (("a", ABORTED), ("b", COMPLETED), ("c", EXPIRED), ("d", COMPLETED)):
            await buffer.put(group(name, member(name, status)))
        assert await buffer.take_batch(3) == () and await buffer.count() == 4
        assert [one.group_id for one in await buffer.take_batch(2)] == ["b", "d"]
        assert (await buffer.take((EXPIRED, ABORTED))).group_id == "c"
        assert (await buffer.take((EXPIRED, ABORTED))).group_id == "a"
        assert await buffer.take((EXPIRED, ABORTED)) is None and await buffer.count() == 0

    run(ReplayBufferConfig(max_staleness=9, keep_expired=True), body)


def test_the_buffer_answers_while_the_store_does_not() -> None:
    async def body(world: Backend, store: ActorHandle, buffer: ActorHandle) -> None:
        await record(store, "a", "b")
        await buffer.put(group("g", member("a", COMPLETED, 0)))
        await buffer.put(group("h", member("b", COMPLETED, 1)))
        await world.signal(store, "SIGSTOP")
        dropping = asyncio.ensure_future(buffer.refresh(2))
        await asyncio.sleep(3)
        assert not dropping.done()
        async with asyncio.timeout(0.1):
            assert await buffer.count() == 1
            assert [one.group.group_id for one in await buffer.contents()] == ["h"]
        await world.signal(store, "SIGCONT")
        await dropping
        assert (await store.snapshot()).sessions == ("b",)

    run(ReplayBufferConfig(max_staleness=0), body)
