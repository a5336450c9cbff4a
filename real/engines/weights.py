"""What an engine loads: the shards of an export, read once by its host, so that evidence says what was there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pathlib
import time
from typing import NamedTuple

from protocol.training.checkpoint import MANIFEST, hash_weights
from real.evidence import ProcessLog
from real.faults.storage import pace_of, rest_of_read

_CHUNK = 1 << 20


class Weights(NamedTuple):
    """An export as it was found. ``folder`` is its absolute path; ``weight_hash`` that of the bytes that were read."""

    folder: str
    version: str
    weight_hash: str
    size_bytes: int


class WeightsNotFound(Exception):
    """There is nothing to load at a path."""


async def read_weights(storage: str, path: str, log: ProcessLog) -> Weights:
    """Read every shard of an export under the folder ``storage``; one ``storage.read`` each, in order of their names.

    A torn shard is read without a complaint, as an engine would: only its hash tells.

    Raises:
        WeightsNotFound: no shard there, or one vanished meanwhile.
    """
    folder = pathlib.Path(storage, path)
    prefix = path.rstrip("/")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)
    if not files:
        raise WeightsNotFound(f"no weights at {path}")
    hashes: list[str] = []
    total = 0
    for file in files:
        name = f"{prefix}/{file.relative_to(folder).as_posix()}"
        pace = pace_of(log.faults, name, "read")
        began = time.monotonic()
        try:
            size, digest = await asyncio.to_thread(_digest, file)
        except OSError as error:
            raise WeightsNotFound(f"{name} vanished while it was read") from error
        await rest_of_read(size, time.monotonic() - began, pace)
        log.emit("storage.read", path=name, size=size, reader=log.actor, sha256=digest)
        hashes.append(digest)
        total += size
    return Weights(str(folder), _version(folder), hash_weights(hashes), total)


def _digest(file: pathlib.Path) -> tuple[int, str]:
    found = hashlib.sha256()
    with open(file, "rb") as opened:
        while chunk := opened.read(_CHUNK):
            found.update(chunk)
        return os.fstat(opened.fileno()).st_size, found.hexdigest()


def _version(folder: pathlib.Path) -> str:
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["version"])
    except (OSError, ValueError, KeyError):
        return ""  # an export without a manifest has weights all the same; they have no name
