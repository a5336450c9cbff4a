"""Shared storage on a file system that every node mounts (here: a folder of the run)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import shutil
import time
from collections.abc import Iterator

from protocol.errors import DiskFull, StorageError, StorageNotFound
from real.evidence import ProcessLog
from real.faults.storage import pace_of, rest_of_read, write_all, write_fate, write_paced


class FileStorage:
    """The ``Storage`` port on files. A write in progress is visible, as on any file system: a death can leave it torn.

    A rename that has returned outlives a loss of power: what was renamed is complete under its new name (fsync(2): that
    of a file does not bring its folder's entry to the disk).

    Args:
        root: the folder that stands for the storage.
        log: where the calling process's evidence goes.
    """

    def __init__(self, root: str, log: ProcessLog) -> None:
        self._root = pathlib.Path(root)
        self._log = log

    async def write(self, path: str, data: bytes, *, size_bytes: int | None = None, fsync: bool = True) -> None:
        target = self._locate(path)
        size = len(data) if size_bytes is None else size_bytes
        fate = write_fate(self._log.faults, path, size)
        kept = memoryview(data)[: int(len(data) * fate.kept)]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb", buffering=0) as file:
                if fate.pace.percent == 100:
                    write_all(file, kept)
                else:
                    await write_paced(file, kept, size, fate.pace)
                if fsync:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._failed("write", path, error) from error
        if fate.kept < 1:
            self._log.emit("storage.torn", path=path, size=int(size * fate.kept), writer=self._log.actor)
            if fate.full:
                raise self._failed("write", path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return
        self._log.emit(
            "storage.written", path=path, size=size, sha256=hashlib.sha256(data).hexdigest(), fsync=fsync,
            writer=self._log.actor,
        )  # fmt: skip

    async def read(self, path: str) -> bytes:
        pace = pace_of(self._log.faults, path, "read")
        began = time.monotonic()
        try:
            data = self._locate(path).read_bytes()
        except OSError as error:
            raise self._failed("read", path, error) from error
        await rest_of_read(len(data), time.monotonic() - began, pace)
        self._log.emit(
            "storage.read", path=path, size=len(data), reader=self._log.actor, sha256=hashlib.sha256(data).hexdigest()
        )
        return data

    async def rename(self, old: str, new: str) -> None:
        source, target = self._locate(old), self._locate(new)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for folder, _, _ in os.walk(source):  # entries before the name: nobody is to find a part of them under it
                _sync_folder(folder)
            os.rename(source, target)
            synced = list(self._up_from(target))
            for above in synced:
                _sync_folder(above)
            for above in self._up_from(source):
                if above not in synced:
                    with contextlib.suppress(FileNotFoundError):  # removed since, and what it said of the old name
                        _sync_folder(above)
        except OSError as error:
            raise self._failed("rename", old, error) from error
        self._log.emit("storage.renamed", old=old, new=new)

    async def list(self, prefix: str) -> tuple[str, ...]:
        paths = (file.relative_to(self._root).as_posix() for file in self._root.rglob("*") if file.is_file())
        return tuple(sorted(path for path in paths if path.startswith(prefix)))

    async def delete(self, path: str) -> None:
        target = self._locate(path)
        try:
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        except OSError as error:
            raise self._failed("delete", path, error) from error

    def _locate(self, path: str) -> pathlib.Path:
        if path.startswith("/") or not path or ".." in path.split("/"):
            raise ValueError(f"storage path {path!r}: use a relative '/'-separated path without '..'")
        return self._root / path

    def _up_from(self, path: pathlib.Path) -> Iterator[pathlib.Path]:
        """The folders that a path is in, up to the root: any of them may be new."""
        while path != self._root:
            path = path.parent
            yield path

    def _failed(self, op: str, path: str, error: OSError) -> StorageError:
        kind = StorageError
        if error.errno == errno.ENOENT:
            kind = StorageNotFound
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = DiskFull
        self._log.emit("storage.failed", path=path, op=op, error=kind.__name__)
        return kind(f"{op} {path}: {error.strerror}", path=path)


def _sync_folder(path: str | pathlib.Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no fsync of folders, by fsync(2)
            raise
    finally:
        os.close(folder)
