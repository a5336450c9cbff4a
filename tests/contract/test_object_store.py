"""The object store: who owns a value, who holds it, and what a reader finds when it is gone. One body, two arms."""

from __future__ import annotations

import asyncio
import pathlib
import types

import pytest

from protocol.errors import ActorDied, ObjectError, ObjectFreed, ObjectLost
from protocol.evidence import Event, decode
from protocol.messages import ObjectRef
from protocol.ports import Backend, backend
from tests.contract.conftest import Arm

SOON_S = 10.0


class Keeper:
    """Puts, borrows, reads, gives back and frees, as it is told."""

    async def put(self, data: bytes, holder: str) -> ObjectRef:
        return await backend().objects.put(data, holder)

    async def get(self, ref: ObjectRef) -> bytes:
        return await backend().objects.get(ref)

    async def borrow(self, ref: ObjectRef, holder: str) -> None:
        await backend().objects.borrow(ref, holder)

    async def give_back(self, ref: ObjectRef, holder: str) -> None:
        backend().objects.give_back(ref, holder)

    async def free(self, ref: ObjectRef) -> None:
        backend().objects.free((ref,))


async def gone(world: Backend, ref: ObjectRef) -> type[ObjectError]:
    """What a reader gets once the value is gone. An end is an instruction: a moment may pass."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await world.objects.get(ref)
            except ObjectError as error:
                assert error.outcome.value == "not_done" and error.fields["object"] == ref.object_id
                return type(error)
            await asyncio.sleep(0.05)


async def stays(world: Backend, ref: ObjectRef, data: bytes) -> None:
    """It is still there after a time in which an end would have been carried out."""
    await asyncio.sleep(0.5)
    assert await world.objects.get(ref) == data


def test_a_value_is_read_by_any_process(world: Arm) -> None:
    async def body(world: Backend) -> None:
        a = await world.spawn(Keeper, name="a")
        b = await world.spawn(Keeper, name="b")
        small, large = await a.put(b"experts", "turn"), await a.put(bytes(300_000), "turn")
        assert await b.get(small) == b"experts" and await a.get(small) == b"experts"
        assert await world.objects.get(large) == bytes(300_000)
        own = await world.objects.put(b"of the driver", "driver")
        assert await b.get(own) == b"of the driver"
        assert len({small, large, own}) == 3

    world.run(body)


def test_a_freed_value_is_gone_for_everybody_and_a_second_free_is_silent(world: Arm) -> None:
    async def body(world: Backend) -> None:
        a = await world.spawn(Keeper, name="a")
        b = await world.spawn(Keeper, name="b")
        ref, other = await a.put(b"x", "turn"), await a.put(b"y", "turn")
        await b.borrow(ref, "tree")
        await b.free(ref)
        assert await gone(world, ref) is ObjectFreed
        for who in (a, b):
            with pytest.raises(ObjectFreed):
                await who.get(ref)
        with pytest.raises(ObjectFreed):
            await a.borrow(ref, "late")
        await a.free(ref)
        await b.give_back(ref, "tree")
        await stays(world, other, b"y")

    world.run(body)


def test_the_last_who_gives_back_ends_it(world: Arm) -> None:
    async def body(world: Backend) -> None:
        a = await world.spawn(Keeper, name="a")
        b = await world.spawn(Keeper, name="b")
        ref = await a.put(b"x", "turn")
        await b.borrow(ref, "tree")
        await b.borrow(ref, "reader")
        await a.give_back(ref, "turn")
        await a.give_back(ref, "turn")  # not held any more: nothing
        await stays(world, ref, b"x")
        await b.give_back(ref, "tree")
        await stays(world, ref, b"x")
        await b.give_back(ref, "reader")
        assert await gone(world, ref) is ObjectFreed

    world.run(body)


def test_a_hold_taken_twice_is_given_back_twice(world: Arm) -> None:
    async def body(world: Backend) -> None:
        ref = await world.objects.put(b"x", "twice")
        await world.objects.borrow(ref, "twice")
        world.objects.give_back(ref, "twice")
        await stays(world, ref, b"x")
        world.objects.give_back(ref, "twice")
        assert await gone(world, ref) is ObjectFreed

    world.run(body)


def test_a_value_dies_with_the_process_that_put_it_though_others_hold_it(world: Arm) -> None:
    async def body(world: Backend) -> None:
        a = await world.spawn(Keeper, name="a")
        b = await world.spawn(Keeper, name="b")
        ref, kept = await a.put(b"x", "turn"), await b.put(b"y", "turn")
        await b.borrow(ref, "tree")
        await world.kill(a)
        with pytest.raises(ActorDied):
            await a.get(ref)
        assert await gone(world, ref) is ObjectLost
        with pytest.raises(ObjectLost):
            await b.borrow(ref, "late")
        await stays(world, kept, b"y")

    world.run(body)


def test_every_step_is_evidence(world: Arm, tmp_path: pathlib.Path) -> None:
    """A second free and a read after it are passed over in silence; what a verdict reads has both."""

    async def body(world: Backend) -> str:
        a = await world.spawn(Keeper, name="a")
        ref = await a.put(b"xyz", "turn")
        await a.borrow(ref, "tree")
        await a.give_back(ref, "turn")
        await a.get(ref)
        await a.free(ref)
        await a.free(ref)
        assert await gone(world, ref) is ObjectFreed
        with pytest.raises(ObjectFreed):
            await a.get(ref)
        return ref.object_id

    recorded: list[Event] = []
    if world.name == "sim":
        from sim.backend import run_sim

        recorder = types.SimpleNamespace(record=recorded.append)
        ref = run_sim(body, recorder=recorder)  # type: ignore[arg-type]  # all of a Recorder
    else:
        ref = world.run(body)
        for file in sorted((tmp_path / "events").iterdir()):
            recorded += map(decode, file.read_text(encoding="utf-8").splitlines())
    seen = [
        tuple(event.data.get(field) for field in ("holder", "size", "ok", "error"))
        for event in recorded
        if event.data.get("object") == ref and event.actor == "a"
    ]
    kinds = [event.kind for event in recorded if event.data.get("object") == ref and event.actor == "a"]
    assert list(zip(kinds, seen, strict=True)) == [
        ("object.put", ("turn", 3, None, None)),
        ("object.borrowed", ("tree", None, True, "")),
        ("object.given_back", ("turn", None, None, None)),
        ("object.read", (None, None, True, "")),
        ("object.freed", (None, None, None, None)),
        ("object.freed", (None, None, None, None)),
        ("object.read", (None, None, False, "ObjectFreed")),
    ]
