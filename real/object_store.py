"""The object store of the real world: values in Ray's, and a ledger of who holds them.

Ray 2.60 has no ``ray.internal.free`` any more (removed in 2026, ray-project/ray#64037): a value ends when the last
``ray.ObjectRef`` to it is gone, and only then. So one process of a run, the ledger, has the only lasting one, and drops
it when a value is freed or given back by all. The value itself stays where Ray put it, and belongs to the process that
put it: when that one dies Ray answers ``OwnerDiedError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import OwnerDiedError, RayError, ReferenceCountingAssertionError

from protocol.errors import ObjectError, ObjectFreed, ObjectLost
from protocol.messages import ObjectRef
from real.registry import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable

    from real.evidence import ProcessLog


class ObjectLedger:
    """Who holds which value. A plain Ray actor: one thread, calls of one process in their order."""

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}
        self._holds: dict[str, dict[str, int]] = {}

    def keep(self, object_id: str, boxed: list[Any], hold: str) -> None:
        """``boxed``: a list of one ray.ObjectRef, which so arrives as a reference and not as the value."""
        self._refs[object_id] = boxed[0]
        self._holds[object_id] = {hold: 1}

    def find(self, object_id: str) -> list[Any]:
        """The ray.ObjectRef, or nothing."""
        return [self._refs[object_id]] if object_id in self._refs else []

    def borrow(self, object_id: str, hold: str) -> list[Any]:
        """As ``find``, and the value is held under that name from now on."""
        if object_id in self._refs:
            holds = self._holds[object_id]
            holds[hold] = holds.get(hold, 0) + 1
        return self.find(object_id)

    def give_back(self, object_id: str, hold: str) -> None:
        holds = self._holds.get(object_id, {})
        if hold in holds:
            holds[hold] -= 1
            if not holds[hold]:
                del holds[hold]
            if not holds:
                self.free([object_id])

    def free(self, object_ids: list[str]) -> None:
        for object_id in object_ids:
            self._refs.pop(object_id, None)
            self._holds.pop(object_id, None)


class RayObjects:
    """The ``Objects`` port of one process.

    Args:
        run: id of the run; its ledger is made with the first value.
        me: name and incarnation of the process.
        log: takes its evidence, each event before its effect.
        new_id: makes the ids of values.
    """

    def __init__(self, run: str, me: str, log: ProcessLog, new_id: Callable[[str], str]) -> None:
        self._name = ledger_name(run)
        self._me = me
        self._log = log
        self._new_id = new_id
        self._found: Any = None

    @property
    def _ledger(self) -> Any:
        if self._found is None:
            remote = ray.remote(num_cpus=0, max_restarts=0)(ObjectLedger)
            # Detached, for it must outlive the process that happens to need it first; the run's end ends it.
            self._found = remote.options(
                name=self._name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
            ).remote()
        return self._found

    async def put(self, data: bytes, holder: str, *, size_bytes: int | None = None) -> ObjectRef:
        object_id = self._new_id("object")
        size = len(data) if size_bytes is None else size_bytes
        self._log.emit("object.put", object=object_id, holder=holder, size=size)
        await self._ledger.keep.remote(object_id, [ray.put(bytes(data))], self._hold(holder))
        return ObjectRef(object_id)

    async def get(self, ref: ObjectRef) -> bytes:
        data, error = await self._read(ref, await self._ledger.find.remote(ref.object_id))
        name = "" if error is None else type(error).__name__
        self._log.emit("object.read", object=ref.object_id, ok=error is None, error=name)
        if error is not None:
            raise error
        return data

    async def borrow(self, ref: ObjectRef, holder: str) -> None:
        boxed = await self._ledger.borrow.remote(ref.object_id, self._hold(holder))
        _, error = await self._read(ref, boxed)
        name = "" if error is None else type(error).__name__
        self._log.emit("object.borrowed", object=ref.object_id, holder=holder, ok=error is None, error=name)
        if error is not None:
            raise error

    def give_back(self, ref: ObjectRef, holder: str) -> None:
        self._log.emit("object.given_back", object=ref.object_id, holder=holder)
        self._ledger.give_back.remote(ref.object_id, self._hold(holder))

    def free(self, refs: tuple[ObjectRef, ...]) -> None:
        for ref in refs:
            self._log.emit("object.freed", object=ref.object_id)
        if refs:
            self._ledger.free.remote([ref.object_id for ref in refs])

    def _hold(self, holder: str) -> str:
        return f"{self._me}: {holder}"

    async def _read(self, ref: ObjectRef, boxed: list[Any]) -> tuple[bytes, ObjectError | None]:
        """The value, or why it is gone."""
        freed = ObjectFreed(f"{ref.object_id} was freed, or given back by all who held it", object=ref.object_id)
        if not boxed:
            return b"", freed
        try:
            return await boxed[0], None
        except ReferenceCountingAssertionError:  # the ledger dropped it while this process was asking its owner
            return b"", freed
        except OwnerDiedError:
            return b"", ObjectLost(f"the process that put {ref.object_id} is dead", object=ref.object_id)
        except RayError as error:
            return b"", ObjectLost(f"Ray lost {ref.object_id}: {type(error).__name__}", object=ref.object_id)


def ledger_name(run: str) -> str:
    return f"seatrial-objects-{run}"


def end_ledger(run: str) -> None:
    """End the ledger of a run, if it ever had one."""
    try:
        ray.kill(ray.get_actor(ledger_name(run), namespace=NAMESPACE))
    except ValueError:
        return
