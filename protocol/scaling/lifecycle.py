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

from collections.abc import Callable, Coroutine
from typing import Any

from protocol.config import LifecycleConfig
from protocol.journal import Journal
from protocol.messages import EngineAddress
from protocol.ports import ActorHandle, EngineSpec, backend
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
from protocol.scaling.lifecycle_steps import LifecycleSteps, Stopped
from protocol.scaling.replicas import Replicas
from protocol.scaling.slots import Slots
from protocol.serving.peer import Peer


class ScaleManager(LifecycleSteps):
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
            await self._journal.keep()  # who began it may have been killed before that was kept
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
        await self._journal.keep()
        return True

    async def execute(self, operation: str) -> bool:
        """Start an operation that was begun. Idempotent: False when it runs, has run, or is not known."""
        lifecycle = self._lifecycles.get(operation)
        if lifecycle is None or lifecycle.task is not None or lifecycle.physical_done:
            return False
        self._at_work(lifecycle, self._scale_out if lifecycle.direction == "scale_out" else self._scale_in)
        await self._journal.keep()
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
        await self._journal.keep()
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
            await self._journal.keep()
        return adopted

    async def owned(self) -> tuple[tuple[str, str], ...]:
        """(replica, placement group) of every published replica that a scale-out has created."""
        return tuple((slot.name, slot.group) for slot in self._slots.elastic())

    # --- a lifecycle ---

    async def _run(self, lifecycle: Lifecycle, steps: Callable[[Lifecycle], Coroutine[Any, Any, State]]) -> None:
        try:
            phase = await steps(lifecycle)
        except Stopped as stopped:
            lifecycle.error = str(stopped)
            phase = "PARTIAL" if lifecycle.direction == "scale_out" and lifecycle.created else "FAILED"
        lifecycle.phase = phase
        lifecycle.ending = True
        await self._journal.keep()
        lifecycle.physical_done = True

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
