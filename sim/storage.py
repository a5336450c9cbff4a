"""Shared storage of the simulated world: bandwidth, fsync points, torn, slow and full writes.

One SharedStorage a world: a file system that all nodes mount, with one pipe of a given bandwidth, first come, first
served. A write takes effect over its whole duration: a reader, or a crash, in the middle meets a prefix.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protocol.errors import DiskFull, SeatrialError, StorageError, StorageNotFound

if TYPE_CHECKING:
    from sim.loop import ActorLoop
    from sim.world import Process, World

_NS = 1_000_000_000


@dataclass(slots=True)
class File:
    """A file: the bytes that are there, the nominal size that they cost, and whether they survive a node's loss."""

    data: bytes
    size: int
    durable: bool
    writer_node: str
    sha256: str


@dataclass(slots=True)
class Transfer:
    """A read or write under way; ``start_ns`` to ``end_ns`` it moves bytes at the pipe's rate."""

    path: str
    data: bytes
    size: int
    start_ns: int
    end_ns: int
    process: Process
    fsync: bool = False
    cut: float | None = None
    """Fraction of the bytes that really arrive, though the call says success (a torn write)."""


@dataclass(slots=True)
class StorageFault:
    """What a fault does to the paths that start with ``prefix``. ``hit(what)`` is called when it meets one.

    slow_percent: transfers take that many percent of their time. torn: fraction of a write that arrives, reported as a
    success all the same; ``torn_left`` writes are torn. full_after: bytes that still fit before DiskFull.
    """

    prefix: str
    hit: Callable[[str], None]
    slow_percent: int = 100
    torn: float | None = None
    torn_left: int = 0
    full_after: int | None = None


@dataclass(slots=True)
class SharedStorage:
    """The file system of a world.

    Args:
        bandwidth: bytes per second of the one pipe.
        latency_ns: per operation. fsync_ns: added to a write that is fsynced.
    """

    world: World
    bandwidth: int = 1_000_000_000
    latency_ns: int = 1_000_000
    fsync_ns: int = 2_000_000
    files: dict[str, File] = field(default_factory=dict)
    faults: list[StorageFault] = field(default_factory=list)
    writing: dict[str, Transfer] = field(default_factory=dict)
    _free_at: int = 0

    def __post_init__(self) -> None:
        self.world.on_death.append(self._writer_died)

    def port(self, process: Process, loop: ActorLoop) -> StoragePort:
        """Storage as one process sees it (protocol.ports.Storage)."""
        return StoragePort(self, process, loop)

    def read_now(self, path: str) -> File | None:
        """What a reader finds at this instant: a file being written shows the part that has arrived."""
        transfer = self.writing.get(path)
        if transfer is not None:
            return self._partial(transfer)
        return self.files.get(path)

    def begin(self, process: Process, path: str, data: bytes, size: int, *, fsync: bool, write: bool) -> Transfer:
        """Queue a transfer on the pipe. Raises DiskFull (what fits has been written) at the end, see ``finish``."""
        now = self.world.now_ns
        duration = size * _NS // self.bandwidth
        cut = None
        for fault in self.faults:
            if not path.startswith(fault.prefix):
                continue
            if fault.slow_percent != 100:
                duration = duration * fault.slow_percent // 100
                fault.hit(f"{'write' if write else 'read'} {path}")
            if write and fault.torn is not None and fault.torn_left > 0:
                fault.torn_left -= 1
                cut = fault.torn
                fault.hit(f"tear {path}")
        start = max(now, self._free_at)
        end = start + duration
        self._free_at = end
        transfer = Transfer(path, data, size, start, end, process, fsync, cut)
        if write:
            self.writing[path] = transfer
        return transfer

    def finish_write(self, transfer: Transfer) -> SeatrialError | None:
        """The last byte of a write: the file is whole, torn, or cut by a full disk."""
        if self.writing.get(transfer.path) is not transfer:
            return None  # its writer died, or the path was deleted
        del self.writing[transfer.path]
        for fault in self.faults:
            if fault.full_after is not None and transfer.path.startswith(fault.prefix):
                if transfer.size > fault.full_after:
                    fault.hit(f"full {transfer.path}")
                    self._cut(transfer, fault.full_after / max(transfer.size, 1))
                    fault.full_after = 0
                    error = DiskFull(f"no space left for {transfer.path}", path=transfer.path)
                    self._failed(transfer.path, "write", error)
                    return error
                fault.full_after -= transfer.size
        if transfer.cut is not None:
            self._cut(transfer, transfer.cut)
            return None
        digest = hashlib.sha256(transfer.data).hexdigest()
        self.files[transfer.path] = File(
            transfer.data, transfer.size, transfer.fsync, transfer.process.node, digest
        )
        self.world.observe(
            "storage.written",
            path=transfer.path,
            size=transfer.size,
            sha256=digest,
            fsync=transfer.fsync,
            writer=transfer.process.name,
        )
        return None

    def rename(self, old: str, new: str) -> SeatrialError | None:
        """Atomic. A folder is renamed with everything under it. Returns why it was not done."""
        # What is being written ends where it began.
        paths = [path for path in self._at_or_below(old) if path in self.files]
        error: SeatrialError | None = None
        if not paths:
            error = StorageNotFound(f"rename: nothing at {old}", path=old)
        elif any(path != new for path in self._at_or_below(new)):
            error = StorageError(f"rename: {new} is a folder with something in it", path=old)
        if error is not None:
            self._failed(old, "rename", error)
            return error
        for path in paths:
            self.files[new + path[len(old) :]] = self.files.pop(path)
        self.world.observe("storage.renamed", old=old, new=new)
        return None

    def delete(self, path: str) -> SeatrialError | None:
        """A file, or a folder with everything under it. Returns why it was not done."""
        paths = self._at_or_below(path)
        for found in paths:
            self.files.pop(found, None)
            self.writing.pop(found, None)
        if paths:
            return None
        error = StorageNotFound(f"delete: nothing at {path}", path=path)
        self._failed(path, "delete", error)
        return error

    def _at_or_below(self, path: str) -> list[str]:
        names = dict.fromkeys([*self.files, *self.writing])
        return sorted(name for name in names if name == path or name.startswith(path + "/"))

    def node_lost(self, node: str) -> None:
        """What was not fsynced is lost with the node that wrote it."""
        for path in [p for p in sorted(self.files) if self.files[p].writer_node == node and not self.files[p].durable]:
            self.world.observe("storage.torn", path=path, size=0, writer=node)
            del self.files[path]

    def _writer_died(self, process: Process, reason: str) -> None:
        for path in [p for p in sorted(self.writing) if self.writing[p].process is process]:
            transfer = self.writing.pop(path)
            self._cut(transfer, self._fraction(transfer))

    def _fraction(self, transfer: Transfer) -> float:
        now, span = self.world.now_ns, transfer.end_ns - transfer.start_ns
        if now >= transfer.end_ns or span == 0:
            return 1.0
        return max(0, now - transfer.start_ns) / span

    def _partial(self, transfer: Transfer) -> File:
        fraction = self._fraction(transfer)
        data = transfer.data[: int(len(transfer.data) * fraction)]
        size = int(transfer.size * fraction)
        return File(data, size, False, transfer.process.node, hashlib.sha256(data).hexdigest())

    def _cut(self, transfer: Transfer, fraction: float) -> None:
        data = transfer.data[: int(len(transfer.data) * fraction)]
        size = int(transfer.size * fraction)
        digest = hashlib.sha256(data).hexdigest()
        self.files[transfer.path] = File(data, size, transfer.fsync, transfer.process.node, digest)
        self.world.observe("storage.torn", path=transfer.path, size=size, writer=transfer.process.name)

    def _failed(self, path: str, op: str, error: SeatrialError) -> None:
        self.world.observe("storage.failed", path=path, op=op, error=type(error).__name__)


class StoragePort:
    """protocol.ports.Storage for one process. A dead process's calls have no effect and never return."""

    __slots__ = ("_shared", "_process", "_loop")

    def __init__(self, shared: SharedStorage, process: Process, loop: ActorLoop) -> None:
        self._shared = shared
        self._process = process
        self._loop = loop

    async def write(self, path: str, data: bytes, *, size_bytes: int | None = None, fsync: bool = True) -> None:
        """Write a whole file. Raises DiskFull (done in part: what fitted is there)."""
        shared = self._shared
        size = len(data) if size_bytes is None else size_bytes
        await self._after(shared.latency_ns)
        if not self._process.alive:
            return
        transfer = shared.begin(self._process, path, bytes(data), size, fsync=fsync, write=True)
        error = await self._at(transfer.end_ns, shared.finish_write, transfer)
        if error is not None:
            raise error
        if fsync:
            await self._after(shared.fsync_ns)

    async def read(self, path: str) -> bytes:
        """Raises StorageNotFound (not done)."""
        shared = self._shared
        await self._after(shared.latency_ns)
        found = shared.read_now(path)
        if found is None:
            error = StorageNotFound(f"nothing at {path}", path=path)
            shared._failed(path, "read", error)
            raise error
        transfer = shared.begin(self._process, path, found.data, found.size, fsync=False, write=False)
        await self._at(transfer.end_ns, _nothing)
        shared.world.observe(
            "storage.read", path=path, size=found.size, reader=self._process.name, sha256=found.sha256
        )
        return found.data

    async def rename(self, old: str, new: str) -> None:
        await self._after(self._shared.latency_ns)
        if self._process.alive and (error := self._shared.rename(old, new)) is not None:
            raise error

    async def list(self, prefix: str) -> tuple[str, ...]:
        await self._after(self._shared.latency_ns)
        names = dict.fromkeys([*self._shared.files, *self._shared.writing])
        return tuple(sorted(path for path in names if path.startswith(prefix)))

    async def delete(self, path: str) -> None:
        await self._after(self._shared.latency_ns)
        if self._process.alive and (error := self._shared.delete(path)) is not None:
            raise error

    async def _after(self, delay_ns: int) -> None:
        await self._at(self._shared.world.now_ns + delay_ns, _nothing)

    def _at(self, t_ns: int, effect: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Let ``effect`` happen in the world at ``t_ns`` and give its value to this actor."""
        future = self._loop.create_future()

        def fire() -> None:
            value = effect(*args)
            self._loop.deliver(_give, future, value)

        self._shared.world.clock.call_at(t_ns, fire)
        return future


def _nothing() -> None:
    return None


def _give(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
