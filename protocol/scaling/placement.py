"""Placement groups that the manager owns: made for one replica each, and let go of only when the table says so.

Two facts are kept apart (scaling.md 3): that a removal was submitted and accepted, and that the group is REMOVED. A
removal that could not be submitted is submitted again at the next try; one that was accepted never is, only the table
is read. An unknown state is not released, and that ``remove`` has returned says nothing.
"""

from __future__ import annotations

import asyncio

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


async def create_group(slot: Slot, gpus: float, config: LifecycleConfig) -> None:
    """Ask for the slot's group and note its ownership before anything else can fail.

    Raises:
        SeatrialError: *unknown*: there may be a group that nobody can name.
    """
    bundle = tuple((name, amount) for name, amount in (("GPU", gpus), ("CPU", float(config.group_cpus))) if amount)
    try:
        slot.group = await backend().placement_groups.create((bundle,), strategy="STRICT_PACK", name=slot.name)
    except SeatrialError as error:
        slot.group_unknown = error.outcome is not Outcome.NOT_DONE
        raise


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


async def release_group(slot: Slot, config: LifecycleConfig) -> Release:
    """Have the slot's group removed, once, and wait for REMOVED in the table, up to ``removal_timeout_s``."""
    if slot.group_unknown:
        return Release(False, "its group was asked for with unknown outcome; nobody can name it")
    if not slot.group:
        return Release(True)
    groups = backend().placement_groups
    why = "its removal was submitted; the table does not say REMOVED"
    ends = _now() + config.removal_timeout_s
    if not slot.removal_accepted:
        try:
            await groups.remove(slot.group)
            slot.removal_accepted = True
        except SeatrialError as error:
            why = f"its removal was not accepted: {type(error).__name__}: {error}"
            ends = _now()  # one look: it may have had its effect all the same
    while True:
        try:
            if (await groups.table()).get(slot.group) == "REMOVED":
                return Release(True)
        except SeatrialError as error:
            why = f"the table cannot be read: {type(error).__name__}: {error}"
        if _now() >= ends:
            return Release(False, why)
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
