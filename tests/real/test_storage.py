"""What storage on files brings to the disk, and when: an atomic publish is one only if it outlives a loss of power."""

from __future__ import annotations

import asyncio
import os
import pathlib

import pytest

from protocol.errors import StorageError
from real.evidence import ProcessLog
from real.storage import FileStorage


class Disk:
    """What was brought to the disk, in order: each fsync by what its descriptor was, and each rename."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        fsync, rename = os.fsync, os.rename

        def synced(descriptor: int) -> None:
            path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            kind = "folder" if path.is_dir() else "file"
            self.did.append(f"fsync {kind} {path.relative_to(root)}")
            fsync(descriptor)

        def renamed(old: pathlib.Path, new: pathlib.Path) -> None:
            self.did.append(f"rename {old.relative_to(root)} {new.relative_to(root)}")
            rename(old, new)

        monkeypatch.setattr("real.storage.os.fsync", synced)
        monkeypatch.setattr("real.storage.os.rename", renamed)

    def take(self) -> list[str]:
        did, self.did = self.did, []
        return did


@pytest.fixture
def storage(tmp_path: pathlib.Path) -> FileStorage:
    return FileStorage(str(tmp_path / "storage"), ProcessLog(str(tmp_path), "writer", 1, 0))


@pytest.fixture
def disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "storage", monkeypatch)


def test_a_write_is_on_the_disk_when_it_returns_unless_nobody_asked_for_that(storage: FileStorage, disk: Disk) -> None:
    asyncio.run(storage.write("exports/v7.tmp/shard-0", b"weights"))
    assert disk.take() == ["fsync file exports/v7.tmp/shard-0"]
    asyncio.run(storage.write("exports/v7.tmp/notes", b"", fsync=False))
    assert disk.take() == []


def test_a_published_folder_is_whole_on_the_disk_before_its_name_and_its_name_when_it_returns(
    storage: FileStorage, disk: Disk
) -> None:
    asyncio.run(storage.write("staged/v7/shard-0", b"weights"))
    disk.take()
    asyncio.run(storage.rename("staged/v7", "exports/v7"))
    did = disk.take()
    assert did[:2] == ["fsync folder staged/v7", "rename staged/v7 exports/v7"]
    # 'exports' is new, and so is its own entry in the root.
    assert sorted(did[2:]) == ["fsync folder .", "fsync folder exports", "fsync folder staged"]


def test_a_published_file_has_its_name_on_the_disk(storage: FileStorage, disk: Disk) -> None:
    asyncio.run(storage.write("v7.tmp", b"weights"))
    disk.take()
    asyncio.run(storage.rename("v7.tmp", "v7"))
    assert disk.take() == ["rename v7.tmp v7", "fsync folder ."]


def test_a_rename_is_done_though_somebody_has_removed_the_folder_it_was_in(
    storage: FileStorage, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(storage.write("staged/v7/shard-0", b"weights"))
    rename = os.rename

    def renamed(old: pathlib.Path, new: pathlib.Path) -> None:
        rename(old, new)
        old.parent.rmdir()

    monkeypatch.setattr("real.storage.os.rename", renamed)
    asyncio.run(storage.rename("staged/v7", "exports/v7"))
    assert asyncio.run(storage.list("")) == ("exports/v7/shard-0",)
    assert '"kind":"storage.failed"' not in (tmp_path / "events" / "writer-1.jsonl").read_text()


def test_a_rename_that_may_not_outlive_a_loss_of_power_has_failed(
    storage: FileStorage, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(storage.write("v7.tmp", b"weights"))

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("real.storage.os.fsync", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        asyncio.run(storage.rename("v7.tmp", "v7"))
    log = (tmp_path / "events" / "writer-1.jsonl").read_text()
    assert '"kind":"storage.failed"' in log and '"kind":"storage.renamed"' not in log
