"""Slots: the manager's book of replicas, one permanent rank each, and the capacity that follows from it.

A rank is never used again, so that nothing late (a recovery, a proof, a removal) can mean another replica than it
meant when it was sent (scaling.md 2.7 and 3).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from protocol.messages import EngineAddress, replica_name
from protocol.ports import Placement
from protocol.scaling.contract import Capacity, RecoveryLeave


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """One rank. ``initial``: there at deployment, in resources that somebody else owns; never a victim."""

    rank: int
    name: str
    initial: bool = False
    address: EngineAddress | None = None
    predecessor: EngineAddress | None = None
    """The incarnation before ``address``, which recovery has adopted and may not have published: the gateway may have
    either of the two."""
    fencing: bool = False
    """The gateway was asked to forget ``predecessor``, without which it never takes ``address``."""
    fenced: bool = False
    """And it has said since that it has neither."""
    operation: str = ""
    """The operation that created it, or that drains it."""
    group: str = ""
    """The placement group that this manager owns for it; noted as soon as the group exists."""
    worker: bool = False
    """Its process may live."""
    candidate: bool = False
    """Not published yet."""
    offered: bool = False
    """The gateway was asked to route to it, so it may do so whatever came back."""
    draining: bool = False
    held: bool = False
    """A victim whose process is gone and whose group is not confirmed REMOVED."""
    unreleased: bool = False
    """A candidate that failed and is not confirmed gone."""
    group_asked: bool = False
    """A group was asked for, or is about to be."""
    group_unknown: bool = False
    """A group was asked for and the outcome is unknown: there may be one that nobody can name."""
    removal_asked: bool = False
    """The removal of its group was submitted, or is about to be, and was not refused."""
    removal_accepted: bool = False
    """The removal of its group was submitted and accepted: from now on only the table is read."""
    retired: bool = False
    """For ever."""

    @property
    def published(self) -> bool:
        """A replica that counts: it has become a worker, and nobody can take it back any more."""
        return self.worker and not self.candidate


_ADDRESSES = ("address", "predecessor")
_KEPT = tuple(field.name for field in dataclasses.fields(Slot) if field.name not in _ADDRESSES)


class Slots:
    """All ranks of one service.

    Args:
        service: replicas are named ``SERVICE-RANK``.
        initial: the replicas that are there already; rank 0 and up.
    """

    def __init__(self, service: str, initial: tuple[EngineAddress, ...]) -> None:
        self._service = service
        self._slots = [
            Slot(rank, address.name, initial=True, address=address, worker=True) for rank, address in enumerate(initial)
        ]
        self._by_name = {slot.name: slot for slot in self._slots}

    def append(self, operation: str) -> Slot:
        """A new rank, a candidate from its first moment on."""
        rank = len(self._slots)
        slot = Slot(rank, replica_name(self._service, rank), operation=operation, candidate=True)
        self._slots.append(slot)
        self._by_name[slot.name] = slot
        return slot

    def named(self, name: str) -> Slot | None:
        """The slot of a replica, retired ones included."""
        return self._by_name.get(name)

    def all(self) -> tuple[Slot, ...]:
        """Every rank there ever was."""
        return tuple(self._slots)

    def of(self, operation: str) -> list[Slot]:
        """The slots that an operation has created or drains, by rank."""
        return [slot for slot in self._slots if slot.operation == operation]

    def elastic(self) -> list[Slot]:
        """Published replicas that a scale-out has created, draining or not, by rank."""
        return [slot for slot in self._slots if slot.published and not slot.initial]

    def newest_victim(self) -> Slot | None:
        """The published elastic replica of the highest rank that is not draining; None: only initial ones are left."""
        for slot in reversed(self._slots):
            if slot.published and not (slot.initial or slot.draining or slot.held):
                return slot
        return None

    @property
    def published(self) -> int:
        """Published replicas, those in drain included."""
        return sum(slot.published for slot in self._slots)

    def capacity(self) -> Capacity:
        """The numbers of scaling.md 2.7."""
        live = sum(slot.worker for slot in self._slots)
        pending = sum(slot.held or slot.unreleased for slot in self._slots)
        counted_live = sum(slot.worker and (slot.held or slot.unreleased) for slot in self._slots)
        return Capacity(
            current=self.published + sum(slot.held and not slot.worker for slot in self._slots),
            ready=sum(slot.published and not slot.draining for slot in self._slots),
            occupied=live + pending - counted_live,
            pending_cleanup=pending,
        )

    # --- a restart of their manager ---

    def kept(self) -> list[Any]:
        """Every rank as a journal takes it; of one that is retired, its name."""
        return [
            slot.name
            if slot.retired
            else [
                [getattr(slot, name) for name in _KEPT],
                *(None if one is None else dataclasses.astuple(one) for one in (slot.address, slot.predecessor)),
            ]
            for slot in self._slots
        ]

    def restore(self, kept: list[Any]) -> None:
        """Be what :meth:`kept` has given. A group whose creation was under way then, nobody can name."""
        self._slots = [_restored(rank, one) for rank, one in enumerate(kept)]
        self._by_name = {slot.name: slot for slot in self._slots}

    # --- recovery ---

    def may_recover(self, address: EngineAddress) -> RecoveryLeave:
        """Whether recovery may start this replica again: never one that is on its way out, or not yet in.

        The one before an incarnation that was adopted may be named too: a recovery whose publication came to nothing
        begins anew with it. Whether there is one to begin, the gateway knows, which it asks next.
        """
        slot = self._by_name.get(address.name)
        if slot is None:
            return RecoveryLeave(False, why="no replica of this service")
        if address not in (slot.address, slot.predecessor):
            return RecoveryLeave(False, why="superseded by another incarnation")
        for reason in ("retired", "candidate", "draining", "held", "unreleased"):
            if getattr(slot, reason):
                return RecoveryLeave(False, why=reason)
        return RecoveryLeave(True, Placement(slot.group) if slot.group else None)

    def adopt(self, old: EngineAddress, new: EngineAddress) -> bool:
        """Recovery has a new incarnation ready. False: the replica is on its way out meanwhile, or has a later one."""
        if not self.may_recover(old).allowed:
            return False
        slot = self._by_name[old.name]
        if slot.address == new:
            return True
        if slot.address is not None and slot.address.incarnation > new.incarnation:
            return False  # late
        slot.predecessor, slot.address = old, new
        return True


def _restored(rank: int, kept: Any) -> Slot:
    if isinstance(kept, str):
        return Slot(rank, kept, retired=True)
    values, *addresses = kept
    slot = Slot(**dict(zip(_KEPT, values, strict=True)))
    slot.address, slot.predecessor = (None if one is None else EngineAddress(*one) for one in addresses)
    slot.group_unknown = slot.group_unknown or (slot.group_asked and not slot.group)
    return slot
