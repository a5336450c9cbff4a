"""The object store of the simulated world: who put a value, who holds it, and when it ended.

It does as Ray's does (tests/contract/test_object_store.py): a value belongs to the process that put it, holds are
counted over all processes, a free is an instruction that says nothing of its success. What Ray would pass over in
silence, a second free or a read after one, is evidence here as there: ``object.freed`` and ``object.read``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from protocol.errors import ObjectError, ObjectFreed, ObjectLost
from protocol.messages import ObjectRef
from sim.actors import cause

if TYPE_CHECKING:
    from sim.world import Process, World

_NS = 1_000_000_000


class _Value:
    """One value. ``holds``: (process id, holder) to how often."""

    __slots__ = ("data", "holds", "owner", "size")

    def __init__(self, data: bytes, size: int, owner: str) -> None:
        self.data = data
        self.size = size
        self.owner = owner
        self.holds: dict[tuple[str, str], int] = {}


class SharedObjects:
    """The object store of a world.

    Args:
        latency_s: of a put or get, beside the time that its bytes take.
        bandwidth: bytes per second of a put or get.
    """

    def __init__(self, world: World, *, latency_s: float = 0.0002, bandwidth: int = 5_000_000_000) -> None:
        self.world = world
        self.latency_s = latency_s
        self.bandwidth = bandwidth
        self.values: dict[str, _Value] = {}
        self._lost: set[str] = set()  # asked for membership only
        world.on_death.append(self._holder_died)

    def port(self, process: Process) -> ObjectsPort:
        """The store as one process sees it (protocol.ports.Objects)."""
        return ObjectsPort(self, process)

    def lasts_s(self, size: int) -> float:
        return self.latency_s + size / self.bandwidth

    def find(self, object_id: str) -> _Value | ObjectError:
        value = self.values.get(object_id)
        if value is not None:
            return value
        if object_id in self._lost:
            return ObjectLost(f"the process that put {object_id} is dead", object=object_id)
        return ObjectFreed(f"{object_id} was freed, or given back by all who held it", object=object_id)

    def give_back(self, value: _Value, object_id: str, hold: tuple[str, str]) -> None:
        count = value.holds.get(hold, 0)
        if count > 1:
            value.holds[hold] = count - 1
        elif count:
            del value.holds[hold]
            if not value.holds:
                del self.values[object_id]

    def _holder_died(self, process: Process, reason: str) -> None:
        """Its own values are lost, and its holds end."""
        for object_id, value in list(self.values.items()):
            if value.owner == process.id:
                del self.values[object_id]
                self._lost.add(object_id)
                continue
            for hold in [hold for hold in value.holds if hold[0] == process.id]:
                del value.holds[hold]
            if not value.holds:
                del self.values[object_id]


class ObjectsPort:
    """protocol.ports.Objects for one process. A dead process's calls have no effect and never return."""

    __slots__ = ("_process", "_shared")

    def __init__(self, shared: SharedObjects, process: Process) -> None:
        self._shared = shared
        self._process = process

    async def put(self, data: bytes, holder: str, *, size_bytes: int | None = None) -> ObjectRef:
        size = len(data) if size_bytes is None else size_bytes
        shared, process = self._shared, self._process
        await asyncio.sleep(shared.lasts_s(size))
        if not process.alive:
            return ObjectRef("")
        object_id = shared.world.new_id("object")
        value = _Value(bytes(data), size, process.id)
        value.holds[process.id, holder] = 1
        shared.world.emit(process, "object.put", cause.get(), object=object_id, holder=holder, size=size)
        shared.values[object_id] = value
        return ObjectRef(object_id)

    async def get(self, ref: ObjectRef) -> bytes:
        shared = self._shared
        found = shared.find(ref.object_id)
        size = found.size if isinstance(found, _Value) else 0
        await asyncio.sleep(shared.lasts_s(size))
        found = shared.find(ref.object_id)  # what counts is the end of the read: a value may go in the middle
        ok = isinstance(found, _Value)
        error = "" if ok else type(found).__name__
        shared.world.emit(self._process, "object.read", cause.get(), object=ref.object_id, ok=ok, error=error)
        if isinstance(found, _Value):
            return found.data
        raise found

    async def borrow(self, ref: ObjectRef, holder: str) -> None:
        shared = self._shared
        await asyncio.sleep(shared.latency_s)
        found = shared.find(ref.object_id)
        error = "" if isinstance(found, _Value) else type(found).__name__
        told = {"object": ref.object_id, "holder": holder, "ok": not error, "error": error}
        shared.world.record(self._process, "object.borrowed", cause.get(), told)
        if not isinstance(found, _Value):
            raise found
        if self._process.alive:
            hold = (self._process.id, holder)
            found.holds[hold] = found.holds.get(hold, 0) + 1

    def give_back(self, ref: ObjectRef, holder: str) -> None:
        if self._process.alive:
            self._shared.world.emit(
                self._process, "object.given_back", cause.get(), object=ref.object_id, holder=holder
            )
            value = self._shared.values.get(ref.object_id)
            if value is not None:
                self._shared.give_back(value, ref.object_id, (self._process.id, holder))

    def free(self, refs: tuple[ObjectRef, ...]) -> None:
        for ref in refs:
            if self._process.alive:
                self._shared.world.emit(self._process, "object.freed", cause.get(), object=ref.object_id)
                self._shared.values.pop(ref.object_id, None)
