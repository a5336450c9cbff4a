"""The manager: makes and removes replicas, and owns what they run in.

One lifecycle is one background task that does one operation, replica by replica. Outside of it, calls only read
(``progress``, ``capacity``), raise a flag (``abort``, ``confirm_drained``) or go on with a cleanup (``reconcile``).

- **Out** (scaling.md 3 and 4): a rank that is a candidate; its placement group, owned from the moment it exists; a
  process in it answers; the engine is launched, is ready, generates; a last look for an abort; the gateway takes it.
  Whatever goes wrong on the way, the candidate is taken down, also when it succeeds after an abort. A replica that
  *may* be routed to (the gateway's answer was lost) is withdrawn there before its process is touched.
- **In** (scaling.md 5): the newest elastic replica is put in drain, its identity known before anybody can see it; the
  watcher proves that it is idle; its process ends, its group is removed and seen REMOVED; then the next one. A victim
  without proof is parked: it stays unroutable, keeps its process and its group, and nobody else is chosen in its place.
  One whose recovery was under way is named by the incarnation that the gateway has, which may change once.
- ``physical_done`` is said after the last of this, and not before: a terminal phase alone would let a second lifecycle
  begin while the first one still owns a group.
- With a journal a manager that was killed goes on with what it was at: each step is kept before the next one can be
  seen or done. A candidate that was offered to the gateway is offered again, any other one is taken down and made
  anew; a victim has its drain proven anew, under a new generation; a removal that may have been accepted is looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from protocol.config import LifecycleConfig
from protocol.errors import SeatrialError, StorageError
from protocol.journal import Journal
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle, EngineSpec, Placement, backend
from protocol.scaling.contract import (
    Capacity,
    CleanupReport,
    Direction,
    LifecycleRefused,
    Progress,
    RecoveryLeave,
    State,
    Victim,
)
from protocol.scaling.lifecycle_state import Lifecycle, kept, restored
from protocol.scaling.placement import create_group, release_group, slot_fields, wait_usable
from protocol.scaling.replicas import Replicas
from protocol.scaling.slots import Slot, Slots
from protocol.serving.peer import PEER_LOST, Peer


class _Stopped(Exception):
    """The lifecycle cannot go on; the text says why."""


class ScaleManager:
    """Owns the replicas of one service and their placement groups. An actor.

    Args:
        config: time-outs of every step.
        gateway: handle of the Gateway that is to route to the replicas.
        spec: how a replica is started.
        service: replicas are named ``SERVICE-RANK``.
        initial: the replicas that are there already. They are protected: never chosen as victims.
    """

    def __init__(
        self,
        config: LifecycleConfig,
        gateway: ActorHandle,
        spec: EngineSpec,
        service: str,
        initial: tuple[EngineAddress, ...],
    ) -> None:
        self._config = config
        self._gateway = Peer(gateway, config.call_timeout_s)
        self._replicas = Replicas(config, self._gateway)
        self._spec = spec
        self._initial = len(initial)
        self._slots = Slots(service, initial)
        self._lifecycles: dict[str, Lifecycle] = {}
        self._generation = 0
        self._journal = Journal(config.journal, self._state)

    async def start(self) -> None:
        found = await self._journal.load()
        if found is None:
            return
        self._generation = found["generation"]
        self._slots.restore(found["slots"])
        for one in found["lifecycles"]:
            lifecycle = restored(one, self._slots)
            self._lifecycles[lifecycle.operation] = lifecycle
            if one["executed"] and not lifecycle.physical_done:
                self._at_work(lifecycle, self._out_again if lifecycle.direction == "scale_out" else self._in_again)

    def _state(self) -> dict[str, Any]:
        lifecycles = [kept(lifecycle) for lifecycle in self._lifecycles.values()]
        return {"generation": self._generation, "slots": self._slots.kept(), "lifecycles": lifecycles}

    async def stop(self) -> None:
        for lifecycle in self._lifecycles.values():
            if lifecycle.task is not None:
                lifecycle.task.cancel()

    # --- what the watcher asks ---

    async def begin(self, operation: str, direction: Direction, target: int) -> bool:
        """Take an operation on. Idempotent: False when it is known already.

        Raises:
            LifecycleRefused: *not done*. Below the initial replicas, another lifecycle is at work, or replicas of
                several GPUs (scaling.md 1.9).
        """
        if operation in self._lifecycles:
            await self._keep()  # who began it may have been killed before that was kept
            return False
        if target < self._initial:
            raise LifecycleRefused(f"{operation}: {target} is below the {self._initial} initial replicas")
        if self._spec.num_gpus > 1:
            raise LifecycleRefused(f"{operation}: replicas of {self._spec.num_gpus:g} GPUs are not scaled")
        for other in self._lifecycles.values():
            if other.task is None:
                other.never_executed("superseded before it was executed")
            elif not other.physical_done:
                raise LifecycleRefused(f"{operation}: {other.operation} is at work")
        self._lifecycles[operation] = Lifecycle(operation, direction, target)
        self._forget()
        await self._keep()
        return True

    async def execute(self, operation: str) -> bool:
        """Start an operation that was begun. Idempotent: False when it runs, has run, or is not known."""
        lifecycle = self._lifecycles.get(operation)
        if lifecycle is None or lifecycle.task is not None or lifecycle.physical_done:
            return False
        self._at_work(lifecycle, self._scale_out if lifecycle.direction == "scale_out" else self._scale_in)
        await self._keep()
        return True

    def _at_work(self, lifecycle: Lifecycle, steps: Callable[[Lifecycle], Coroutine[Any, Any, State]]) -> None:
        lifecycle.task = backend().background(self._run(lifecycle, steps), name=f"lifecycle-{lifecycle.operation}")

    async def progress(self, operation: str) -> Progress | None:
        """How far it is; None when it is not known here."""
        lifecycle = self._lifecycles.get(operation)
        if lifecycle is None:
            return None
        await self._settle(lifecycle)
        capacity = self._slots.capacity()
        return Progress(
            phase=lifecycle.phase,
            current=capacity.current,
            ready=capacity.ready,
            created=lifecycle.created,
            removed=lifecycle.removed,
            failed=lifecycle.failed,
            victim=lifecycle.victim,
            cleanup_required=self._dirty(lifecycle),
            physical_done=lifecycle.physical_done,
            victim_stopped=lifecycle.slot is not None and (lifecycle.slot.fenced or not lifecycle.slot.worker),
            error=lifecycle.error,
        )

    async def confirm_drained(self, operation: str, proof: Victim) -> bool:
        """The gateway has closed ``proof`` and has nothing in flight on it. Returns whether that was waited for.

        It must name the replica that is in drain *now*, in every part: late, repeated and partial ones are ignored.
        """
        lifecycle = self._lifecycles.get(operation)
        waited_for = (
            lifecycle is not None
            and lifecycle.phase == "DRAINING"
            and not lifecycle.drained
            and not lifecycle.physical_done
            and lifecycle.victim == proof
        )
        if waited_for:
            assert lifecycle is not None
            lifecycle.drained = True
            lifecycle.changed.set()
        self._emit_drain(operation, proof, "confirmed" if waited_for else "ignored")
        return waited_for

    async def abort(self, operation: str, direction: Direction, handed_over: bool) -> bool:
        """Stop as soon as it is safe; ``progress`` says when that is. Idempotent. False when it is not known here.

        Args:
            handed_over: the watcher knows that this manager had the operation. Otherwise one that is not known never
                got here, and must not be begun by a message that comes late.
        """
        lifecycle = self._lifecycles.get(operation)
        if lifecycle is None:
            if handed_over:
                return False
            lifecycle = self._lifecycles[operation] = Lifecycle(operation, direction, self._initial)
        lifecycle.aborted = True
        lifecycle.changed.set()
        if lifecycle.task is None:
            lifecycle.never_executed("aborted before it was executed")
        await self._keep()
        return True

    async def capacity(self) -> Capacity:
        """The authoritative numbers."""
        return self._slots.capacity()

    async def reconcile(self, operation: str, proof: Victim | None) -> CleanupReport:
        """Go on with the cleanup of a finished operation: no new victim, nothing else (scaling.md 1.5).

        Args:
            proof: the parked victim, which the gateway has seen idle; None where none is named.
        """
        lifecycle = self._lifecycles.get(operation)
        if lifecycle is None:
            return CleanupReport(known=False)
        if not lifecycle.physical_done or lifecycle.cleaning:
            return CleanupReport(known=True, running=True, pending=True, detail="its lifecycle is at work")
        lifecycle.cleaning = True
        try:
            why = await self._clean_up(lifecycle, proof)
        finally:
            lifecycle.cleaning = False
        pending = self._dirty(lifecycle)
        return CleanupReport(True, False, pending, lifecycle.victim is None, why if pending else "clean")

    # --- what recovery and the deployment ask ---

    async def may_recover(self, address: EngineAddress) -> RecoveryLeave:
        """Whether recovery may start a dead replica again, and in which group. Never one that is on its way out."""
        return self._slots.may_recover(address)

    async def adopt(self, old: EngineAddress, new: EngineAddress) -> bool:
        """Recovery has a new incarnation ready to be published. False: the replica is on its way out, so end it."""
        adopted = self._slots.adopt(old, new)
        if adopted:
            await self._keep()
        return adopted

    async def owned(self) -> tuple[tuple[str, str], ...]:
        """(replica, placement group) of every published replica that a scale-out has created."""
        return tuple((slot.name, slot.group) for slot in self._slots.elastic())

    # --- a lifecycle ---

    async def _run(self, lifecycle: Lifecycle, steps: Callable[[Lifecycle], Coroutine[Any, Any, State]]) -> None:
        try:
            phase = await steps(lifecycle)
        except _Stopped as stopped:
            lifecycle.error = str(stopped)
            phase = "PARTIAL" if lifecycle.direction == "scale_out" and lifecycle.created else "FAILED"
        lifecycle.phase = phase
        lifecycle.ending = True
        await self._keep()
        lifecycle.physical_done = True

    async def _keep(self) -> None:
        """Have what is so kept before anything follows from it; where that fails nothing goes on."""
        while True:
            try:
                await self._journal.save()
                return
            except StorageError:
                await asyncio.sleep(self._config.poll_interval_s)

    def _checkpoint(self, lifecycle: Lifecycle) -> None:
        if lifecycle.aborted:
            raise _Stopped("aborted")

    def _dirty(self, lifecycle: Lifecycle) -> bool:
        return any(
            slot.held or slot.unreleased or (slot.draining and not slot.retired)
            for slot in self._slots.of(lifecycle.operation)
        )

    def _forget(self) -> None:
        """Drop the oldest finished operations beyond the bound; one that is at work or dirty stays."""
        excess = len(self._lifecycles) - self._config.max_history
        for operation in list(self._lifecycles)[: max(0, excess)]:
            lifecycle = self._lifecycles[operation]
            if lifecycle.physical_done and not self._dirty(lifecycle):
                del self._lifecycles[operation]

    # --- out ---

    async def _scale_out(self, lifecycle: Lifecycle) -> State:
        while self._slots.published < lifecycle.target:
            self._checkpoint(lifecycle)
            slot = self._slots.append(lifecycle.operation)
            try:
                await self._make(lifecycle, slot)
            except (_Stopped, SeatrialError, TimeoutError) as error:
                lifecycle.failed += 1
                why = str(error) if isinstance(error, _Stopped) else f"{type(error).__name__}: {error}"
                left = await self._roll_back(slot)
                raise _Stopped(f"{slot.name}: {why}" + (f"; {left}" if left else "")) from None
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
                    raise _Stopped(f"{slot.name}: {left or why}")
        return await self._scale_out(lifecycle)

    async def _offer_again(self, lifecycle: Lifecycle, slot: Slot) -> bool:
        """Whether a candidate is in that the gateway may have taken already."""
        if not slot.offered or slot.address is None or lifecycle.aborted:
            return False
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                await self._publish(slot, slot.address)
        except (_Stopped, SeatrialError, TimeoutError):
            return False
        await self._count_in(lifecycle, slot)
        return True

    async def _count_in(self, lifecycle: Lifecycle, slot: Slot) -> None:
        lifecycle.created += 1
        await self._keep()
        self._emit_slot(slot, "published")

    async def _make(self, lifecycle: Lifecycle, slot: Slot) -> None:
        config = self._config
        lifecycle.phase = "CREATING"
        self._emit_slot(slot, "candidate")
        await create_group(slot, self._spec.num_gpus, config, self._keep)
        self._emit_slot(slot, "owns_group")
        self._checkpoint(lifecycle)
        await wait_usable(slot, config)
        self._checkpoint(lifecycle)
        slot.worker = True  # from here on a process may be there, whatever launch() comes to
        await self._keep()
        slot.address = await backend().engines.launch(self._spec, name=slot.name, placement=Placement(slot.group))
        await self._keep()
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
        await self._keep()
        while True:
            try:
                if not await self._gateway.call("add_replica", address):
                    raise _Stopped("the gateway knows a later incarnation, or has removed this one")
                slot.candidate = False
                return
            except PEER_LOST:
                await asyncio.sleep(self._config.poll_interval_s)

    async def _roll_back(self, slot: Slot) -> str:
        """Take a candidate down. Returns what is left of it, empty when it is confirmed gone."""
        slot.unreleased = True
        await self._keep()
        if slot.offered and slot.address is not None and not await self._replicas.withdraw(slot.address):
            # Calls may be on it. Its process and its group stay until the gateway says otherwise.
            return "it may be routed to; it is kept"
        slot.offered = False
        await self._end_process(slot)
        release = await release_group(slot, self._config, self._keep)
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
                raise _Stopped("only initial replicas are left, and they are protected")
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
            raise _Stopped(f"{slot.name}: {left}")

    async def _drain(self, lifecycle: Lifecycle, slot: Slot, address: EngineAddress) -> None:
        """Wait for the proof that the victim is idle. Raises _Stopped when it does not come: the victim is parked."""
        self._generation += 1
        # What a confirmation must name is there before anybody can see that the replica drains.
        lifecycle.slot, lifecycle.victim = slot, Victim(address, slot.rank, self._generation)
        lifecycle.drained = False
        slot.draining = True
        await self._keep()
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
            raise _Stopped(f"{slot.name} is parked: {why}")

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
        await self._keep()
        self._emit_drain(lifecycle.operation, lifecycle.victim, "chosen")

    async def _remove(self, lifecycle: Lifecycle, slot: Slot) -> str:
        """End a drained victim. Returns what is left of it, empty when it is confirmed gone."""
        old, new = slot.predecessor, slot.address
        if old is not None and new is not None and lifecycle.victim is not None and lifecycle.victim.address == old:
            slot.fencing = True
            await self._keep()
            await self._replicas.forget_route(old)
            if await self._replicas.members(old, new) != ():
                lifecycle.drained = False
                return "the gateway may have a later incarnation; it is kept"
            slot.predecessor = None
        await self._end_process(slot)
        slot.held = True
        if slot.address is not None:
            await self._replicas.forget_route(slot.address)
        release = await release_group(slot, self._config, self._keep)
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
            await self._keep()
            self._emit_slot(slot, "stopped", detail)

    async def _retire(self, slot: Slot) -> None:
        slot.held = slot.unreleased = slot.candidate = slot.draining = False
        slot.retired = True
        await self._keep()
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
