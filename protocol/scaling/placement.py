"""Placement groups that the manager owns: made for one replica each, and let go of only when the table says so.

Two facts are kept apart (scaling.md 3): that a removal was submitted and accepted, and that the group is REMOVED. A
removal that could not be submitted is submitted again at the next try; one that was accepted never is, only the table
is read. An unknown state is not released, and that ``remove`` has returned says nothing.

Each fact is kept (``keep``) before what may follow from it: a group is noted as asked for before it is, and so is its
removal. Of a removal that was asked for by somebody who was killed then, the table says first whether it was accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.config import LifecycleConfig
from protocol.errors import Outcome, SeatrialError
from protocol.messages import message
from protocol.ports import Backend, Placement, backend
from protocol.scaling.slots import Slot


@message
class Release:
    """Whether a slot's group is confirmed REMOVED, and why not."""

    confirmed: bool
    why: str = ""


class PlacementProbe:
    """An actor that only says where it runs: a group in which it answers can hold a replica."""

    async def where(self) -> str:
        """The node."""
        return backend().node


async def keep_nothing() -> None:
    """For who has no journal."""


async def create_group(
    slot: Slot, gpus: float, config: LifecycleConfig, keep: Callable[[], Awaitable[None]] = keep_nothing
) -> None:
    """Ask for the slot's group and note its ownership before anything else can fail.

    Args:
        keep: makes what is noted durable.

    Raises:
        SeatrialError: *unknown*: there may be a group that nobody can name.
    """
    bundle = tuple((name, amount) for name, amount in (("GPU", gpus), ("CPU", float(config.group_cpus))) if amount)
    slot.group_asked = True
    await keep()
    try:
        slot.group = await backend().placement_groups.create((bundle,), strategy="STRICT_PACK", name=slot.name)
    except SeatrialError as error:
        slot.group_unknown = error.outcome is not Outcome.NOT_DONE
        raise
    await keep()


async def wait_usable(slot: Slot, config: LifecycleConfig, port: Backend | None = None) -> str:
    """Wait until the group is CREATED and a process in it answers; returns its node.

    Args:
        port: the world, where it is not the running actor's own.

    Raises:
        SeatrialError, TimeoutError: it is not usable in time.
    """
    port = port or backend()
    await port.placement_groups.wait_created(slot.group, config.placement_timeout_s)
    async with asyncio.timeout(config.probe_timeout_s):
        probe = await port.spawn(PlacementProbe, name=f"probe-{slot.name}", placement=Placement(slot.group))
        try:
            node: str = await probe.where()
        finally:
            try:
                await port.kill(probe)
            except SeatrialError as error:
                # It must not hide what went wrong before, and whatever is left of it goes with the group.
                why = f"{type(error).__name__}: {error}"
                port.emit("scale.slot", **slot_fields(slot), what="probe_left", detail=why)
    return node


async def release_group(
    slot: Slot, config: LifecycleConfig, keep: Callable[[], Awaitable[None]] = keep_nothing
) -> Release:
    """Have the slot's group removed, once, and wait for REMOVED in the table, up to ``removal_timeout_s``."""
    if slot.group_unknown:
        return Release(False, "its group was asked for with unknown outcome; nobody can name it")
    if not slot.group:
        return Release(True)
    groups = backend().placement_groups
    why = "its removal was submitted; the table does not say REMOVED"
    ends = _now() + config.removal_timeout_s
    if slot.removal_asked and not slot.removal_accepted:
        if await _seen_removed(slot, config, ends) is None:
            return Release(True)  # accepted, and its manager was killed before it could say so
        ends = _now() + config.removal_timeout_s
    if not slot.removal_accepted:
        slot.removal_asked = True
        await keep()
        try:
            await groups.remove(slot.group)
        except SeatrialError as error:
            slot.removal_asked = False
            why = f"its removal was not accepted: {type(error).__name__}: {error}"
            ends = _now()  # one look: it may have had its effect all the same
        else:
            slot.removal_accepted = True
            await keep()
    unread = await _seen_removed(slot, config, ends)
    return Release(True) if unread is None else Release(False, unread or why)


async def _seen_removed(slot: Slot, config: LifecycleConfig, ends: float) -> str | None:
    """Look at the table until it says REMOVED, or the time is over. None: it does; else why it was not read, if so."""
    unread = ""
    while True:
        try:
            if (await backend().placement_groups.table()).get(slot.group) == "REMOVED":
                return None
        except SeatrialError as error:
            unread = f"the table cannot be read: {type(error).__name__}: {error}"
        if _now() >= ends:
            return unread
        await asyncio.sleep(config.removal_poll_s)


def slot_fields(slot: Slot) -> dict[str, object]:
    """The fields of ``scale.slot`` that say which slot it is."""
    return {
        "operation": slot.operation,
        "rank": slot.rank,
        "replica": slot.name,
        "replica_inc": None if slot.address is None else slot.address.incarnation,
        "group": slot.group,
    }


def _now() -> float:
    return asyncio.get_running_loop().time()
