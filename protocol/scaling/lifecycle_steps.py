"""The steps of a lifecycle: a replica made and offered to the gateway; a victim drained, ended, its group removed.

What they promise, the text of `protocol.scaling.lifecycle` says. Each step is kept before the next one can be seen.
"""

from __future__ import annotations

import asyncio

from protocol.config import LifecycleConfig
from protocol.errors import SeatrialError
from protocol.journal import Journal
from protocol.messages import EngineAddress
from protocol.ports import EngineSpec, Placement, backend
from protocol.scaling.contract import State, Victim
from protocol.scaling.lifecycle_state import Lifecycle
from protocol.scaling.placement import create_group, release_group, slot_fields, wait_usable
from protocol.scaling.replicas import Replicas
from protocol.scaling.slots import Slot, Slots
from protocol.serving.peer import PEER_LOST, Peer


class Stopped(Exception):
    """The lifecycle cannot go on; the text says why."""


class LifecycleSteps:
    """What ScaleManager is made on."""

    _config: LifecycleConfig
    _gateway: Peer
    _replicas: Replicas
    _spec: EngineSpec
    _slots: Slots
    _journal: Journal
    _generation: int

    def _checkpoint(self, lifecycle: Lifecycle) -> None:
        if lifecycle.aborted:
            raise Stopped("aborted")

    # --- out ---

    async def _scale_out(self, lifecycle: Lifecycle) -> State:
        while self._slots.published < lifecycle.target:
            self._checkpoint(lifecycle)
            slot = self._slots.append(lifecycle.operation)
            try:
                await self._make(lifecycle, slot)
            except (Stopped, SeatrialError, TimeoutError) as error:
                lifecycle.failed += 1
                why = str(error) if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"
                left = await self._roll_back(slot)
                raise Stopped(f"{slot.name}: {why}" + (f"; {left}" if left else "")) from None
        return "ACTIVE"

    async def _out_again(self, lifecycle: Lifecycle) -> State:
        """Go on after a restart, when the replica that was under way is in or gone."""
        for slot in self._slots.of(lifecycle.operation):
            if not slot.candidate:
                continue
            before = slot.unreleased
            if before or not await self._offer_again(lifecycle, slot):
                lifecycle.failed += 0 if before else 1
                left = await self._roll_back(slot)
                if before or left:
                    why = "it failed before its manager was started anew"
                    raise Stopped(f"{slot.name}: {left or why}")
        return await self._scale_out(lifecycle)

    async def _offer_again(self, lifecycle: Lifecycle, slot: Slot) -> bool:
        """Whether a candidate is in that the gateway may have taken already."""
        if not slot.offered or slot.address is None or lifecycle.aborted:
            return False
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                await self._publish(slot, slot.address)
        except (Stopped, SeatrialError, TimeoutError):
            return False
        await self._count_in(lifecycle, slot)
        return True

    async def _count_in(self, lifecycle: Lifecycle, slot: Slot) -> None:
        lifecycle.created += 1
        await self._journal.keep()
        self._emit_slot(slot, "published")

    async def _make(self, lifecycle: Lifecycle, slot: Slot) -> None:
        config = self._config
        lifecycle.phase = "CREATING"
        self._emit_slot(slot, "candidate")
        await create_group(slot, self._spec.num_gpus, config, self._journal.keep)
        self._emit_slot(slot, "owns_group")
        self._checkpoint(lifecycle)
        await wait_usable(slot, config)
        self._checkpoint(lifecycle)
        slot.worker = True  # from here on a process may be there, whatever launch() comes to
        await self._journal.keep()
        slot.address = await backend().engines.launch(self._spec, name=slot.name, placement=Placement(slot.group))
        await self._journal.keep()
        self._emit_slot(slot, "launched")
        await self._replicas.wait_ready(slot.address, lambda: self._checkpoint(lifecycle))
        self._checkpoint(lifecycle)
        lifecycle.phase = "HEALTH_CHECKING"
        async with asyncio.timeout(config.health_timeout_s):
            await self._replicas.wait_generating(slot.address, lambda: self._checkpoint(lifecycle))
            self._checkpoint(lifecycle)
            lifecycle.phase = "READY"
            await self._publish(slot, slot.address)
        await self._count_in(lifecycle, slot)

    async def _publish(self, slot: Slot, address: EngineAddress) -> None:
        """The point of no return. Idempotent at the gateway, so that a lost answer is asked for again."""
        slot.offered = True
        await self._journal.keep()
        while True:
            try:
                if not await self._gateway.call("add_replica", address):
                    raise Stopped("the gateway knows a later incarnation, or has removed this one")
                slot.candidate = False
                return
            except PEER_LOST:
                await asyncio.sleep(self._config.poll_interval_s)

    async def _roll_back(self, slot: Slot) -> str:
        """Take a candidate down. Returns what is left of it, empty when it is confirmed gone."""
        slot.unreleased = True
        await self._journal.keep()
        if slot.offered and slot.address is not None and not await self._replicas.withdraw(slot.address):
            # Calls may be on it. Its process and its group stay until the gateway says otherwise.
            return "it may be routed to; it is kept"
        slot.offered = False
        await self._end_process(slot)
        release = await release_group(slot, self._config, self._journal.keep)
        if release.confirmed:
            await self._retire(slot)
        else:
            self._emit_slot(slot, "unreleased", release.why)
        return release.why

    # --- in ---

    async def _scale_in(self, lifecycle: Lifecycle) -> State:
        while self._slots.published > lifecycle.target:
            self._checkpoint(lifecycle)
            slot = self._slots.newest_victim()
            if slot is None or slot.address is None:
                raise Stopped("only initial replicas are left, and they are protected")
            slot.operation = lifecycle.operation
            await self._drain(lifecycle, slot, slot.address)
            await self._take_away(lifecycle, slot)
        return "COMPLETED"

    async def _in_again(self, lifecycle: Lifecycle) -> State:
        """Go on after a restart, with the same victim."""
        slot = lifecycle.slot
        if slot is not None and slot.address is not None:
            if slot.worker and not slot.fencing:  # else its drain was proven, and its row may be gone
                await self._drain(lifecycle, slot, slot.address)
            await self._take_away(lifecycle, slot)
        return await self._scale_in(lifecycle)

    async def _take_away(self, lifecycle: Lifecycle, slot: Slot) -> None:
        lifecycle.phase = "REMOVING"
        left = await self._remove(lifecycle, slot)
        if left:
            lifecycle.failed += 1
            raise Stopped(f"{slot.name}: {left}")

    async def _drain(self, lifecycle: Lifecycle, slot: Slot, address: EngineAddress) -> None:
        """Wait for the proof that the victim is idle. Raises Stopped when it does not come: the victim is parked."""
        self._generation += 1
        # What a confirmation must name is there before anybody can see that the replica drains.
        lifecycle.slot, lifecycle.victim = slot, Victim(address, slot.rank, self._generation)
        lifecycle.drained = False
        slot.draining = True
        await self._journal.keep()
        lifecycle.phase = "DRAINING"
        self._emit_drain(lifecycle.operation, lifecycle.victim, "chosen")
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                while not lifecycle.drained and not (lifecycle.aborted and self._config.abort_ends_drain):
                    lifecycle.changed.clear()
                    await lifecycle.changed.wait()
        except TimeoutError:
            pass  # what follows asks for the proof, not for the time
        if not lifecycle.drained:
            lifecycle.failed += 1
            why = "aborted" if lifecycle.aborted else f"no proof of drain within {self._config.drain_timeout_s:g} s"
            self._emit_drain(lifecycle.operation, lifecycle.victim, "parked")
            raise Stopped(f"{slot.name} is parked: {why}")

    async def _settle(self, lifecycle: Lifecycle) -> None:
        """Name the victim by the incarnation that the gateway has: one that recovery was given leave to publish may not
        have got there, and never will from now on unless its message is under way."""
        slot, victim = lifecycle.slot, lifecycle.victim
        if slot is None or slot.address is None or slot.predecessor is None or victim is None or lifecycle.drained:
            return
        known = await self._replicas.members(slot.address, slot.predecessor)
        slot.fenced = slot.fencing and known == ()
        if not known or lifecycle.victim != victim or lifecycle.drained:
            return  # not known, or changed meanwhile
        if known[0] == slot.address:
            slot.predecessor = None  # published, and the one before it is gone for good
        if known[0] == victim.address:
            return
        self._generation += 1
        lifecycle.victim = Victim(known[0], slot.rank, self._generation)
        await self._journal.keep()
        self._emit_drain(lifecycle.operation, lifecycle.victim, "chosen")

    async def _remove(self, lifecycle: Lifecycle, slot: Slot) -> str:
        """End a drained victim. Returns what is left of it, empty when it is confirmed gone."""
        old, new = slot.predecessor, slot.address
        if old is not None and new is not None and lifecycle.victim is not None and lifecycle.victim.address == old:
            slot.fencing = True
            await self._journal.keep()
            await self._replicas.forget_route(old)
            if await self._replicas.members(old, new) != ():
                lifecycle.drained = False
                return "the gateway may have a later incarnation; it is kept"
            slot.predecessor = None
        await self._end_process(slot)
        slot.held = True
        if slot.address is not None:
            await self._replicas.forget_route(slot.address)
        release = await release_group(slot, self._config, self._journal.keep)
        if not release.confirmed:
            self._emit_slot(slot, "held", release.why)
            return release.why
        lifecycle.removed += 1
        lifecycle.slot = lifecycle.victim = None
        await self._retire(slot)
        return ""

    # --- both ---

    async def _end_process(self, slot: Slot) -> None:
        if slot.worker:
            detail = await self._replicas.end(slot.name)
            slot.worker = False
            slot.held = slot.draining
            await self._journal.keep()
            self._emit_slot(slot, "stopped", detail)

    async def _retire(self, slot: Slot) -> None:
        slot.held = slot.unreleased = slot.candidate = slot.draining = False
        slot.retired = True
        await self._journal.keep()
        self._emit_slot(slot, "retired")

    async def _clean_up(self, lifecycle: Lifecycle, proof: Victim | None) -> str:
        left = ""
        if lifecycle.slot is not None and lifecycle.victim is not None:
            if proof != lifecycle.victim:
                return f"{lifecycle.slot.name} is parked, and no proof of its drain came along"
            left = await self._remove(lifecycle, lifecycle.slot)
        for slot in self._slots.of(lifecycle.operation):
            if slot.unreleased:
                left = await self._roll_back(slot) or left
        return left

    def _emit_slot(self, slot: Slot, what: str, detail: str = "") -> None:
        backend().emit("scale.slot", **slot_fields(slot), what=what, detail=detail)

    def _emit_drain(self, operation: str, victim: Victim, what: str) -> None:
        backend().emit(
            "scale.drain",
            operation=operation,
            replica=victim.address.name,
            replica_inc=victim.address.incarnation,
            rank=-1 if victim.rank is None else victim.rank,
            generation=victim.generation,
            what=what,
        )
