"""Exports: weights written so that a reader can tell a whole one from a torn one.

An export is a folder ``PREFIX/ORDER-VERSION`` with its shards and a ``manifest.json`` that has the size and SHA-256 of
each. It is written under ``PREFIX/.tmp-...``, fsynced, and gets its name by one atomic rename: a crash before leaves
nothing that a reader would take for an export. ORDER counts publications, so the newest is the last by name.

The rename proves that the writer finished, not that the bytes are all there (a write may be cut short and reported as a
success), so a reader checks every shard against the manifest before it uses one (scaling.md 9; training.md 8.4, 8.5).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from protocol.config import ExportConfig
from protocol.errors import CorruptExport, Outcome, StorageError, StorageNotFound
from protocol.messages import ExportManifest
from protocol.ports import Storage, Trainer, backend

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"


class Exporter:
    """Publishes the trainer's weights as exports, one at a time. An actor; one for a prefix.

    Args:
        config: where exports go, how long one may take, how many stay.
        trainer: has the weights (``protocol.ports.Trainer``, or a handle of one).
    """

    def __init__(self, config: ExportConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self._one_at_a_time = asyncio.Lock()

    async def export(self, version: str) -> str:
        """Write and publish ``version``; returns the path of the export.

        Writing one version again is harmless: it becomes a newer export of the same bytes.

        Raises:
            StorageError: outcome *not done* when it failed before the rename, *unknown* when the rename failed or the
                time was up (it may be published, or may not).
            DiskFull: *not done*; what was half-written is removed.
        """
        if "/" in version or not version:
            raise StorageError(
                f"export version {version!r}: must be non-empty and without '/'", outcome=Outcome.NOT_DONE, path=version
            )
        try:
            async with asyncio.timeout(self._config.timeout_s), self._one_at_a_time:
                return await self._export(version)
        except TimeoutError as error:
            raise StorageError(
                f"export of version {version} took over {self._config.timeout_s} s", attached=(error,), path=version
            ) from error

    async def _export(self, version: str) -> str:
        port = backend()
        prefix = self._config.prefix
        # What an export that ran out of time, or an exporter that died, has left half-written.
        await _delete(port.storage, f"{prefix}/{_TEMPORARY}")
        temporary = f"{prefix}/{_TEMPORARY}{port.new_id('export')}"
        shards = await self._trainer.shards(version)
        manifest = describe(version, shards)
        try:
            for name, data, nominal_bytes in shards:
                await port.storage.write(f"{temporary}/{name}", data, size_bytes=nominal_bytes, fsync=True)
            # Last, so that a folder with a manifest has had every shard written.
            await port.storage.write(f"{temporary}/{MANIFEST}", encode_manifest(manifest), fsync=True)
            published = await exports(port.storage, prefix)
        except StorageError as error:
            await _delete(port.storage, temporary)
            error.outcome = Outcome.NOT_DONE  # nothing has its name yet
            raise
        path = f"{prefix}/{_order(published[0]) + 1 if published else 1:08d}-{version}"
        await port.storage.rename(temporary, path)
        port.emit("export.published", version=version, path=path, weight_hash=manifest.weight_hash)
        # Only now: pruning first would leave nothing at all if the new one failed.
        for old in published[self._config.keep - 1 :]:
            await _delete(port.storage, old + "/")
        return path


class Export(NamedTuple):
    """A whole export: every shard (name, content) matched the manifest when it was read."""

    path: str
    manifest: ExportManifest
    shards: tuple[tuple[str, bytes], ...]


async def exports(storage: Storage, prefix: str) -> tuple[str, ...]:
    """Paths of the published exports under ``prefix``, newest first. Raises StorageError."""
    found = dict.fromkeys(
        name.partition("/")[0] for name in (path[len(prefix) + 1 :] for path in await storage.list(prefix + "/"))
    )
    names = [name for name in found if name.partition("-")[0].isdigit()]
    return tuple(f"{prefix}/{name}" for name in sorted(names, reverse=True))


async def latest_export(storage: Storage, prefix: str) -> str | None:
    """Path of the newest published export, or None where there is none. It may be torn: see :func:`load_export`."""
    published = await exports(storage, prefix)
    return published[0] if published else None


async def load_export(storage: Storage, path: str) -> Export:
    """Read a whole export and check every shard.

    Raises:
        CorruptExport: *not done*. The manifest or a shard is missing, cut short or altered; the text says which.
        StorageError: the storage failed.
    """
    manifest = await load_manifest(storage, path)
    shards = [(name, await _shard(storage, path, name, size, sha256)) for name, size, sha256 in manifest.shards]
    return Export(path, manifest, tuple(shards))


async def verify_export(storage: Storage, path: str) -> ExportManifest:
    """As :func:`load_export`, but keep one shard at a time: for who only wants to know. Same errors."""
    manifest = await load_manifest(storage, path)
    for name, size, sha256 in manifest.shards:
        await _shard(storage, path, name, size, sha256)
    return manifest


async def _shard(storage: Storage, path: str, name: str, size: int, sha256: str) -> bytes:
    try:
        data = await storage.read(f"{path}/{name}")
    except StorageNotFound as error:
        raise CorruptExport(f"{path}: shard {name} is missing", path=path, attached=(error,)) from error
    if len(data) != size:
        raise CorruptExport(f"{path}: shard {name} has {len(data)} bytes, its manifest says {size}", path=path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptExport(f"{path}: shard {name} does not match the SHA-256 of its manifest", path=path)
    return data


async def load_manifest(storage: Storage, path: str) -> ExportManifest:
    """Read an export's manifest alone. Raises CorruptExport where there is none, or a broken one."""
    try:
        text = await storage.read(f"{path}/{MANIFEST}")
    except StorageNotFound as error:
        raise CorruptExport(f"{path}: no {MANIFEST}", path=path, attached=(error,)) from error
    try:
        manifest = decode_manifest(text)
    except ValueError as error:
        raise CorruptExport(f"{path}: {MANIFEST} is broken: {error}", path=path) from error
    if hash_weights(sha256 for _, _, sha256 in manifest.shards) != manifest.weight_hash:
        raise CorruptExport(f"{path}: the weight_hash of {MANIFEST} is not that of its shards", path=path)
    return manifest


def describe(version: str, shards: Iterable[tuple[str, bytes, int]]) -> ExportManifest:
    """The manifest of ``(name, content, nominal bytes)`` shards. Sizes in it are those of the content."""
    listed = tuple((name, len(data), hashlib.sha256(data).hexdigest()) for name, data, _ in shards)
    return ExportManifest(version, hash_weights(sha256 for _, _, sha256 in listed), listed)


def hash_weights(shard_sha256s: Iterable[str]) -> str:
    """The hash of weights: what an engine computes from the shards that it really read. 16 hexadecimal digits."""
    return hashlib.sha256("\n".join(shard_sha256s).encode()).hexdigest()[:16]


def encode_manifest(manifest: ExportManifest) -> bytes:
    """The file MANIFEST of an export: UTF-8 JSON, which ``decode_manifest`` reads."""
    shards = [{"name": name, "size": size, "sha256": sha256} for name, size, sha256 in manifest.shards]
    whole = {"version": manifest.version, "weight_hash": manifest.weight_hash, "shards": shards}
    return json.dumps(whole, indent=1).encode()


def decode_manifest(text: bytes) -> ExportManifest:
    """Raises ValueError with what is wrong."""
    try:
        raw = json.loads(text)
        shards = tuple((str(s["name"]), int(s["size"]), str(s["sha256"])) for s in raw["shards"])
        return ExportManifest(str(raw["version"]), str(raw["weight_hash"]), shards)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _order(path: str) -> int:
    return int(path.rpartition("/")[2].partition("-")[0])


async def _delete(storage: Storage, prefix: str) -> None:
    for path in await storage.list(prefix):
        await storage.delete(path)
