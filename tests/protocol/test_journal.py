"""What an actor keeps against its own death."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import DiskFull, StorageError
from protocol.journal import Journal
from tests.protocol.fake import FakeBackend, run

PATH = "kept/driver.json"


def test_without_a_folder_nothing_is_kept_and_nothing_is_awaited() -> None:
    async def body(world: FakeBackend) -> None:
        journal = Journal("", lambda: 1)
        for coroutine in (journal.save(), journal.load()):
            with pytest.raises(StopIteration):  # it ends in its first step: no other task came between
                coroutine.send(None)
        assert world.storage.files == {}

    run(body)


def test_the_newest_state_is_found_again() -> None:
    async def body(world: FakeBackend) -> None:
        state: dict[str, Any] = {"n": 0}
        journal = Journal("kept", lambda: state)
        assert await journal.load() is None
        for n in range(3):
            state["n"] = n
            await journal.save()
        assert await Journal("kept", dict).load() == {"n": 2}
        assert list(world.storage.files) == [PATH]

    run(body)


def test_what_was_asked_for_while_a_save_was_under_way_is_saved_at_once_and_together() -> None:
    async def body(world: FakeBackend) -> None:
        states: list[int] = []

        def state() -> int:
            states.append(len(states))
            return states[-1]

        journal = Journal("kept", state)
        await asyncio.gather(*(journal.save() for _ in range(9)))
        assert states == [0, 1] and await journal.load() == 1

    run(body)


def test_a_save_that_failed_leaves_the_one_before_and_is_told() -> None:
    async def body(world: FakeBackend) -> None:
        states = iter((1, 2, 3))
        journal = Journal("kept", lambda: next(states))
        await journal.save()
        world.storage.fail[".new"] = DiskFull("no space left", path=PATH)
        with pytest.raises(DiskFull):
            await journal.save()
        assert await journal.load() == 1
        await journal.save()
        assert await journal.load() == 3

    run(body)


def test_after_a_save_that_failed_the_next_one_writes_though_nothing_has_changed_since_the_one_before() -> None:
    """The failed one may be in storage: its error says nothing of that."""

    async def body(world: FakeBackend) -> None:
        states = iter((1, 2, 1))
        journal = Journal("kept", lambda: next(states))
        await journal.save()
        rename = world.storage.rename

        async def renamed_and_not_answered(old: str, new: str) -> None:
            await rename(old, new)
            raise StorageError("it did not answer", path=new)

        world.storage.rename = renamed_and_not_answered  # type: ignore[method-assign]  # this once
        with pytest.raises(StorageError):
            await journal.save()
        world.storage.rename = rename  # type: ignore[method-assign]  # of this world alone
        assert await Journal("kept", dict).load() == 2
        await journal.save()
        assert await Journal("kept", dict).load() == 1

    run(body)


def test_what_must_be_kept_is_tried_until_it_is() -> None:
    async def body(world: FakeBackend) -> None:
        states = iter((1, 2, 3))
        journal = Journal("kept", lambda: next(states))
        await journal.keep()
        world.storage.fail[".new"] = DiskFull("no space left", path=PATH)
        await journal.keep()
        assert await journal.load() == 3

    run(body)


def test_what_is_there_already_is_not_written_again() -> None:
    async def body(world: FakeBackend) -> None:
        await Journal("kept", lambda: 1).save()
        journal = Journal("kept", lambda: 1)
        assert await journal.load() == 1
        world.storage.fail[".new"] = DiskFull("no space left", path=PATH)
        await journal.save()

    run(body)


def test_what_is_not_what_was_written_is_not_taken_for_nothing() -> None:
    async def body(world: FakeBackend) -> None:
        await Journal("kept", lambda: [1, 2, 3]).save()
        world.storage.files[PATH] = world.storage.files[PATH][:-2]
        with pytest.raises(StorageError, match=r"kept/driver\.json is not what was written.*restore it, or delete it"):
            await Journal("kept", list).load()

    run(body)
