"""Storage beyond reading and writing: renames and deletions, of files and of folders."""

from __future__ import annotations

import pytest

from protocol.errors import Outcome, StorageError, StorageNotFound
from protocol.ports import Backend
from tests.contract.conftest import Arm


def test_a_rename_moves_a_folder_with_everything_in_it(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        storage = backend.storage
        for name in ("a", "deep/b"):
            await storage.write(f"exports/.tmp-1/{name}", name.encode())
        await storage.write("exports/.tmp-10", b"another")
        await storage.rename("exports/.tmp-1", "exports/00000001-v1")
        assert await storage.list("") == (
            "exports/.tmp-10", "exports/00000001-v1/a", "exports/00000001-v1/deep/b",
        )  # fmt: skip
        assert await storage.read("exports/00000001-v1/deep/b") == b"deep/b"
        with pytest.raises(StorageNotFound):
            await storage.read("exports/.tmp-1/a")

    world.run(body)


def test_a_renamed_file_replaces_the_one_that_is_there(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        storage = backend.storage
        await storage.write("latest", b"old")
        await storage.write("next", b"new")
        await storage.rename("next", "latest")
        assert await storage.list("") == ("latest",)
        assert await storage.read("latest") == b"new"

    world.run(body)


def test_a_rename_that_cannot_be_done_changes_nothing(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        storage = backend.storage
        await storage.write("one/a", b"1")
        await storage.write("two/b", b"2")
        with pytest.raises(StorageNotFound) as missing:
            await storage.rename("three", "four")
        assert missing.value.outcome is Outcome.NOT_DONE
        with pytest.raises(StorageError):
            await storage.rename("one", "two")
        assert await storage.list("") == ("one/a", "two/b")

    world.run(body)


def test_a_file_or_a_folder_is_deleted_and_nothing_beside_it(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        storage = backend.storage
        for path in ("one/a", "one/deep/b", "one-more", "two/c", "two/d"):
            await storage.write(path, path.encode())
        await storage.delete("one")
        assert await storage.list("") == ("one-more", "two/c", "two/d")
        await storage.delete("two/c")
        assert await storage.list("") == ("one-more", "two/d")
        with pytest.raises(StorageNotFound) as missing:
            await storage.delete("two/c")
        assert missing.value.outcome is Outcome.NOT_DONE
        assert await storage.read("two/d") == b"two/d"

    world.run(body)
