"""The trace store: append, search, export, release, and the references that go with them."""

from __future__ import annotations

import asyncio
import time
import unittest.mock
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import TraceAccessConfig, TraceStoreConfig
from protocol.errors import ActorDied, NoSuchActor, ObjectFreed, TraceConflict, TraceNotFound, TraceReleased
from protocol.evidence import Event
from protocol.messages import ObjectRef
from protocol.ports import ActorHandle, Backend
from protocol.rollout.groups import COMPLETED, RolloutGroup, RolloutState
from protocol.rollout.segments import MASKED, TokenizedSegment
from protocol.rollout.trace_access import TraceAccess
from protocol.rollout.trace_store import RolloutTraceStore
from sim.backend import run_sim


class Recorded:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: str, name: str) -> list[Any]:
        return [event.data[name] for event in self.events if event.kind == kind]


def with_store(
    body: Callable[[Backend, ActorHandle], Awaitable[None]], config: TraceStoreConfig | None = None
) -> Recorded:
    recorded = Recorded()

    async def run(world: Backend) -> None:
        await body(world, await world.spawn(RolloutTraceStore, config, name="traces"))

    run_sim(run, recorder=recorded, copy_always=True)
    return recorded


def seg(text: str, *ids: int, ref: ObjectRef | None = None, request: str = "", step: int = -1) -> TokenizedSegment:
    return TokenizedSegment(text, ids, ids, (-0.5,) * len(ids), ref, request, step)


# --- segments ---


def test_a_segment_left_out_is_masked() -> None:
    made = TokenizedSegment("ab", (1, 2))
    assert made.labels == (MASKED, MASKED) and made.logprobs == (0.0, 0.0) and not made.request_aware


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "a", "token_ids": [1, 2], "labels": [1]}, "2 token_ids, 1 labels"),
        ({"text": "a", "token_ids": [1], "logprobs": [0.1, 0.2]}, "2 logprobs"),
        ({"text": "a", "token_ids": [1], "reward": 1}, "no field 'reward'"),
        ({"token_ids": [1]}, "needs 'text'"),
        ({"text": "a", "token_ids": "12"}, "token_ids must be a list"),
        ({"text": "a", "token_ids": [1], "request_id": "r"}, "has no model_step"),
    ],
)
def test_a_wrong_segment_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TokenizedSegment.from_json(fields)


def test_a_segment_from_json() -> None:
    made = TokenizedSegment.from_json({"text": "a", "token_ids": [7], "request_id": "r", "model_step": 3})
    assert made == TokenizedSegment("a", (7,), request_id="r", model_step=3) and made.request_aware


# --- append, search, export ---


def test_turns_of_three_versions_are_exported_as_they_were_recorded() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        text = ""
        refs = []
        for step in range(3):
            question, answer = f"question {step} ", f"answer {step} "
            refs += [await world.objects.put(b"x", f"turn/{step}"), await world.objects.put(b"y", f"turn/{step}")]
            await store.append(
                "s", text,
                (
                    TokenizedSegment(question, (step, step), experts=refs[-2], request_id=f"r{step}", model_step=step),
                    seg(answer, 10 + step, ref=refs[-1], request=f"r{step}", step=step),
                ),
            )  # fmt: skip
            text += question + answer
        trace = await store.export_training_trace("s", text)
        assert trace.token_ids == (0, 0, 10, 1, 1, 11, 2, 2, 12)
        assert trace.model_steps == (0, 0, 0, 1, 1, 1, 2, 2, 2)
        assert trace.request_ids == ("r0",) * 3 + ("r1",) * 3 + ("r2",) * 3
        assert trace.labels == (MASKED, MASKED, 10, MASKED, MASKED, 11, MASKED, MASKED, 12)
        assert trace.logprobs == (0.0, 0.0, -0.5) * 3
        assert trace.experts == tuple(refs) and trace.shared
        assert (await store.search("s", text + "and more")).token_ids == trace.token_ids
        assert await store.keys("s") == tuple(text[:end] for end in (11, 20, 31, 40, 51, 60))

    with_store(body)


@pytest.mark.parametrize(
    ("prefix", "segments", "said"),
    [
        ("q", (seg("a", 9),), "differ in token_ids, labels"),
        ("q", (TokenizedSegment("a", (2,), (2,), (-0.25,)),), "differ in logprobs"),
        ("q", (seg("a", 2, request="r", step=1),), "differ in request_id, model_step"),
        ("q", (seg("ab", 2, 3),), "ends in the new one, after 1 characters"),
        ("qx", (seg("a", 2),), "no segment ends where the prefix of 2 characters"),
        ("", (seg("", 1),), "has no text"),
        ("qa", (seg("b", 3, ref=ObjectRef("nowhere")),), "some segments of the conversation have experts"),
        ("qa", (seg("b", 3), seg("c", 4), seg("", 5)), "has no text"),
    ],
)
def test_a_conflicting_write_changes_nothing(prefix: str, segments: tuple[TokenizedSegment, ...], said: str) -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        await store.append("s", "", (seg("q", 1), seg("a", 2)))
        before = await store.export_training_trace("s", "qa")
        with pytest.raises(TraceConflict, match=said) as refused:
            await store.append("s", prefix, segments)
        assert refused.value.outcome.value == "not_done"
        assert await store.export_training_trace("s", "qa") == before
        assert await store.keys("s") == ("q", "qa")

    with_store(body)


def test_an_append_that_is_repeated_is_harmless_and_a_branch_is_kept_beside_the_first() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        ref = await world.objects.put(b"x", "turn/1")
        first = (seg("q", 1, ref=ref, request="r1", step=0),)
        await store.append("s", "", first)
        await store.append("s", "", first)
        world.objects.give_back(ref, "turn/1")
        assert (await store.snapshot()).segments == 1
        assert await world.objects.get(ref) == b"x"
        other = await world.objects.put(b"y", "turn/2")
        await store.append("s", "q", (seg("a", 2, ref=other, request="r2", step=0),))
        await store.append("s", "q", (seg("b", 3, ref=other, request="r3", step=1),))
        assert (await store.export_training_trace("s", "qa")).request_ids == ("r1", "r2")
        assert (await store.export_training_trace("s", "qb")).model_steps == (0, 1)
        await store.release("s")
        with pytest.raises(ObjectFreed):  # the repeated append did not leave a hold behind
            await world.objects.get(ref)

    with_store(body)


def test_a_segment_beside_a_longer_one_is_not_continued_as_it() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        await store.append("s", "", (seg("abc", 1),))
        await store.append("s", "", (seg("ab", 2),))
        for segments in ((seg("ab", 2), seg("cde", 3)), (seg("ab", 2), seg("cd", 4), seg("e", 5))):
            with pytest.raises(TraceConflict, match="would be read as its continuation"):
                await store.append("s", "", segments)
        with pytest.raises(TraceConflict, match="would be read as its continuation"):
            await store.append("s", "ab", (seg("cde", 3),))
        await store.append("s", "ab", (seg("de", 3),))
        assert (await store.export_training_trace("s", "abde")).token_ids == (2, 3)

    with_store(body)


SAID = st.lists(st.tuples(st.integers(0, 5), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)))


@given(SAID)
@settings(max_examples=200, deadline=None)
def test_what_is_exported_is_what_was_appended(turns: list[tuple[int, list[str]]]) -> None:
    """Whatever is refused: the tokens of a stored conversation are those of its own text."""

    async def body(world: Backend, store: ActorHandle) -> None:
        kept = [""]
        for which, texts in turns:
            prefix = kept[which % len(kept)]
            try:
                await store.append("s", prefix, tuple(seg(text, *map(ord, text)) for text in texts))
            except TraceConflict:
                continue
            kept.append(prefix + "".join(texts))
        for key in await store.keys("s"):
            assert "".join(map(chr, (await store.export_training_trace("s", key)).token_ids)) == key

    with_store(body)


def test_two_appends_at_once_are_one_and_a_refusal() -> None:
    """Both have found the same prefix; the one that comes second is refused whole, and its references are let go."""

    async def body(world: Backend, store: ActorHandle) -> None:
        refs = [await world.objects.put(b"x", f"turn/{n}") for n in range(2)]
        ended = await asyncio.gather(
            *(store.append("s", "", (seg("q", n, ref=refs[n], request=f"r{n}", step=0),)) for n in range(2)),
            return_exceptions=True,
        )
        assert sorted(type(end).__name__ for end in ended) == ["NoneType", "TraceConflict"]
        for n in range(2):
            world.objects.give_back(refs[n], f"turn/{n}")
        loser = next(n for n in range(2) if isinstance(ended[n], TraceConflict))
        with pytest.raises(ObjectFreed):
            await world.objects.get(refs[loser])
        assert await world.objects.get(refs[1 - loser]) == b"x"

    with_store(body)


def test_a_reference_that_leads_to_nothing_is_not_recorded() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        gone, kept = await world.objects.put(b"x", "a"), await world.objects.put(b"y", "a")
        world.objects.free((gone,))
        with pytest.raises(ObjectFreed):
            await store.append("s", "", (seg("q", 1, ref=kept), seg("a", 2, ref=gone)))
        assert (await store.snapshot()).sessions == ()
        world.objects.give_back(kept, "a")
        with pytest.raises(ObjectFreed):
            await world.objects.get(kept)

    with_store(body)


def test_a_prompt_must_match_a_key_exactly() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        await store.append("s", "", (seg("q", 1), seg("a", 2)))
        for session, prompt in (("s", "qa "), ("s", ""), ("other", "qa"), ("s", "x")):
            with pytest.raises(TraceNotFound, match="does not match any trace key"):
                await store.export_training_trace(session, prompt)
        assert (await store.export_training_trace("s", "q")).experts == ()

    with_store(body)


# --- releasing ---


def test_sessions_are_released_once_in_the_order_asked_for() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        for name in ("a", "b", "c"):
            await store.append(name, "", (seg("q", 1),))
        assert await store.release_sessions(("c", "x", "a", "c")) == ("c", "a")
        assert await store.release_sessions(("c", "a")) == ()
        assert (await store.snapshot()).sessions == ("b",)
        with pytest.raises(TraceNotFound):
            await store.release("a")
        assert await store.release_all() == ("b",) and await store.release_all() == ()

    with_store(body)


def test_a_session_number_is_its_text() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        await store.append(7, "", (seg("q", 1),))
        assert (await store.search("7", "q")).text == "q"
        assert await store.release_sessions((7,)) == ("7",)

    with_store(body)


def test_ordinary_references_are_freed_and_shared_ones_given_back() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        ordinary, shared = await world.objects.put(b"o", "turn/1"), await world.objects.put(b"s", "turn/2")
        await store.append("o", "", (seg("q", 1, ref=ordinary),))
        await store.append("s", "", (seg("q", 1, ref=shared, request="r", step=0),))
        await world.objects.borrow(shared, "reader")
        for ref, holder in ((ordinary, "turn/1"), (shared, "turn/2")):
            world.objects.give_back(ref, holder)
        await store.release_all()
        with pytest.raises(ObjectFreed):
            await world.objects.get(ordinary)
        assert await world.objects.get(shared) == b"s"
        world.objects.give_back(shared, "reader")
        with pytest.raises(ObjectFreed):
            await world.objects.get(shared)

    recorded = with_store(body)
    assert recorded.of("object.freed", "object") == ["object-0000001"]


# --- what comes after a release ---


def test_a_turn_that_is_written_after_its_session_was_released_is_refused() -> None:
    """Its first one too, of which the store knew nothing when it was asked to release the session."""

    async def body(world: Backend, store: ActorHandle) -> None:
        await store.append("two", "", (seg("q", 1),))
        assert await store.release_sessions(("one", "two")) == ("two",)
        for session, prefix in (("one", ""), ("two", ""), ("two", "q")):
            with pytest.raises(TraceReleased, match=f"session {session} was released") as refused:
                await store.append(session, prefix, (seg("a", 2, request="r", step=0),))
            assert refused.value.outcome.value == "not_done" and refused.value.session == session
        await store.append("three", "", (seg("q", 1),))
        await store.release("three")
        await store.append("four", "", (seg("q", 1),))
        await store.release_all()
        for session in ("three", "four"):
            with pytest.raises(TraceReleased):
                await store.append(session, "", (seg("q", 1),))
        seen = await store.snapshot()
        assert (seen.sessions, seen.segments, seen.tombstones) == ((), 0, 4)
        assert (await store.search("one", "a")).text == ""

    recorded = with_store(body)
    assert recorded.of("trace.refused", "session") == ["one", "two", "two", "three", "four"]
    assert recorded.of("trace.refused", "request") == ["r", "r", "r", "", ""]


def test_a_refused_release_leaves_no_tombstone() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        with pytest.raises(TraceNotFound):
            await store.release("s")
        await store.append("s", "", (seg("q", 1),))
        assert (await store.snapshot()).sessions == ("s",)

    with_store(body)


def test_a_release_in_the_middle_of_an_append_is_the_end_of_it() -> None:
    """While references are borrowed: the session does not come back, and nothing of it stays borrowed."""

    async def body(world: Backend) -> None:
        store = await world.spawn(RolloutTraceStore, name="traces")
        refs = [await world.objects.put(b"x", "turn/1") for _ in range(3)]
        segments = tuple(seg(f"{n}", n, ref=ref, request="r", step=0) for n, ref in enumerate(refs))
        append = asyncio.ensure_future(store.append("s", "", segments))
        await asyncio.sleep(world_delay)
        await store.release_sessions(("s",))
        refused = False
        try:
            await append
        except TraceReleased:
            refused = True
        refusals.append(refused)
        assert (await store.snapshot()).sessions == ()
        for ref in refs:
            world.objects.give_back(ref, "turn/1")
            with pytest.raises(ObjectFreed):
                await world.objects.get(ref)

    refusals: list[bool] = []
    for number in range(24):
        world_delay = number * 1e-4
        run_sim(body, seed=number)
    assert True in refusals and False in refusals, "the release came between the borrows of some, after others"


def test_tombstones_are_forgotten_by_time_and_by_number() -> None:
    async def body(world: Backend, store: ActorHandle) -> None:
        await store.release_sessions(("a",))
        await asyncio.sleep(60)
        await store.release_sessions(("a", "b"))  # which does not prolong it
        await asyncio.sleep(50)
        await store.append("a", "", (seg("q", 1),))  # 110 s later nothing of it is on its way any more
        with pytest.raises(TraceReleased):
            await store.append("b", "", (seg("q", 1),))
        for number in range(20):
            await store.release_sessions((f"s-{number}",))
            assert (await store.snapshot()).tombstones <= 3
        await store.append("s-16", "", (seg("q", 1),))
        with pytest.raises(TraceReleased):
            await store.append("s-17", "", (seg("q", 1),))
        await asyncio.sleep(101)
        await store.release_all()
        assert (await store.snapshot()).tombstones == 2, "of those released now"

    with_store(body, TraceStoreConfig(tombstone_ttl_s=100, max_tombstones=3))


# --- access ---


class Owner:
    """Reaches the store as components do."""

    def __init__(self) -> None:
        self.traces = TraceAccess(TraceAccessConfig(), "store")

    async def get(self) -> tuple[str, int]:
        store = await self.traces.get_store()
        return store.name, store.incarnation

    async def existing(self) -> int | None:
        store = await self.traces.get_existing_store()
        return None if store is None else store.incarnation

    async def kept(self) -> bool:
        return self.traces._kept is not None

    async def sessions(self) -> tuple[str, ...]:
        found: tuple[str, ...] = (await self.traces.call("snapshot")).sessions
        return found

    async def release(self, sessions: list[Any]) -> list[str]:
        return sorted(await self.traces.release_existing_sessions(sessions))

    async def discard(self, groups: tuple[RolloutGroup, ...]) -> None:
        await self.traces.release_and_discard_rollout_groups(groups)


def test_many_who_want_a_store_get_one() -> None:
    async def body(world: Backend) -> None:
        owners = [await world.spawn(Owner, name=f"owner-{n}") for n in range(6)]
        assert len(set(await asyncio.gather(*(owner.get() for owner in owners)))) == 1

    for seed in range(5):
        run_sim(body, seed=seed, explore=True)


def test_a_handle_does_not_outlive_its_store() -> None:
    async def body(world: Backend) -> None:
        owner = await world.spawn(Owner, name="owner")
        assert await owner.existing() is None  # never made by asking
        _, first = await owner.get()
        store = await world.lookup("store")
        await store.append("s", "", (seg("q", 1),))
        assert await owner.sessions() == ("s",)
        await world.kill(store)
        await asyncio.sleep(1)
        with pytest.raises(ActorDied):
            await owner.sessions()
        with pytest.raises(NoSuchActor):
            await owner.sessions()
        assert await owner.existing() is None and not await owner.kept()
        assert await owner.release(["s"]) == []
        _, second = await owner.get()
        assert second > first and await owner.sessions() == ()

    run_sim(body)


def test_who_learns_of_an_old_death_only_now_asks_the_store_that_came_after() -> None:
    """Its sessions are there: an ActorDied of unknown outcome is no reason to leave them behind."""

    async def body(world: Backend) -> None:
        owner = await world.spawn(Owner, name="owner")
        await owner.get()
        store = await world.lookup("store")
        again = await world.restart(store)
        await again.append("s", "", (seg("q", 1),))
        assert await owner.release(["s", 4, "s"]) == ["s"]

    for seed in range(5):
        run_sim(body, seed=seed, explore=True)


def test_each_reference_of_discarded_groups_is_freed_exactly_once() -> None:
    """Of a released session by the store, of the others by the disposal; shared ones are nobody's to free."""

    async def body(world: Backend) -> None:
        owner = await world.spawn(Owner, name="owner")
        await owner.get()
        store = await world.lookup("store")
        refs = [await world.objects.put(b"x", f"turn/{n}") for n in range(4)]
        await store.append("traced", "", (seg("q", 1, ref=refs[0]),))
        await store.append("aware", "", (seg("q", 1, ref=refs[1], request="r", step=0),))
        for n in range(2):
            world.objects.give_back(refs[n], f"turn/{n}")
        members = (
            RolloutState("a", "traced", COMPLETED, experts=(refs[0],)),
            RolloutState("b", "aware", COMPLETED, experts=(refs[1],), shared=True),
            RolloutState("c", "", COMPLETED, experts=(refs[2],)),
            RolloutState("d", "lost", COMPLETED, experts=(refs[3],)),
        )
        await owner.discard((RolloutGroup("g", members[:2]), RolloutGroup("h", members[2:])))
        assert (await store.snapshot()).sessions == ()
        for ref in refs:
            with pytest.raises(ObjectFreed):
                await world.objects.get(ref)

    recorded = Recorded()
    run_sim(body, recorder=recorded)
    freed = recorded.of("object.freed", "object")
    assert sorted(freed) == ["object-0000001", "object-0000003", "object-0000004"]
    assert recorded.of("call.sent", "method").count("release_sessions") == 1


# --- depth ---


def test_five_thousand_turns() -> None:
    """Recorded, found, exported and released, each turn two segments deeper, in a time that does not explode."""

    async def body(world: Backend, store: ActorHandle) -> None:
        text = ""
        for turn in range(5_000):
            found = await store.search("s", text)
            assert len(found.text) == len(text) and found.segments == 2 * turn
            await store.append("s", found.text, (seg(f"u{turn} ", turn), seg(f"a{turn} ", turn, turn)))
            text += f"u{turn} a{turn} "
        trace = await store.export_training_trace("s", text)
        assert len(trace.token_ids) == 15_000
        assert (await store.snapshot()).segments == 10_000 and len(await store.keys("s")) == 10_000
        assert await store.release_sessions(("s",)) == ("s",)

    began = time.process_time()

    async def run(world: Backend) -> None:
        await body(world, await world.spawn(RolloutTraceStore, name="traces"))

    run_sim(run)
    assert time.process_time() - began < 60


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=12), st.lists(st.text("ab", max_size=8), max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_match_has_the_tokens_of_its_text_whatever_was_asked_before(keys: list[str], texts: list[str]) -> None:
    """A token is a letter here, so the tokens of a match can be read off its text."""

    async def check() -> None:
        store = RolloutTraceStore()
        for key in keys:
            found = await store.search("s", key)
            if len(found.text) < len(key):
                rest = key[len(found.text) :]
                await store.append("s", found.text, (seg(rest, *map(ord, rest)),))
            for text in (key, *texts):
                match = await store.search("s", text)
                assert match.token_ids == tuple(map(ord, match.text)) and text.startswith(match.text)
                assert match.text == max((k for k in await store.keys("s") if text.startswith(k)), key=len, default="")

    with unittest.mock.patch("protocol.rollout.trace_store.backend"):
        asyncio.run(check())
