"""Shared storage on a file system that every node mounts (here: a folder of the run)."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
import shutil

from protocol.errors import DiskFull, StorageError, StorageNotFound
from real.evidence import ProcessLog


class FileStorage:
    """The ``Storage`` port on files. A write in progress is visible, as on any file system: a death can leave it torn.

    Args:
        root: the folder that stands for the storage.
        log: where the calling process's evidence goes.
    """

    def __init__(self, root: str, log: ProcessLog) -> None:
        self._root = pathlib.Path(root)
        self._log = log

    async def write(self, path: str, data: bytes, *, size_bytes: int | None = None, fsync: bool = True) -> None:
        target = self._locate(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                if fsync:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._failed("write", path, error) from error
        self._log.emit(
            "storage.written", path=path, size=len(data) if size_bytes is None else size_bytes,
            sha256=hashlib.sha256(data).hexdigest(), fsync=fsync, writer=self._log.actor,
        )  # fmt: skip

    async def read(self, path: str) -> bytes:
        try:
            data = self._locate(path).read_bytes()
        except OSError as error:
            raise self._failed("read", path, error) from error
        self._log.emit(
            "storage.read", path=path, size=len(data), reader=self._log.actor, sha256=hashlib.sha256(data).hexdigest()
        )
        return data

    async def rename(self, old: str, new: str) -> None:
        source, target = self._locate(old), self._locate(new)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(source, target)
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

    def _failed(self, op: str, path: str, error: OSError) -> StorageError:
        kind = StorageError
        if error.errno == errno.ENOENT:
            kind = StorageNotFound
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = DiskFull
        self._log.emit("storage.failed", path=path, op=op, error=kind.__name__)
        return kind(f"{op} {path}: {error.strerror}", path=path)
