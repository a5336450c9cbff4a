"""How rollout replicas are added and removed, step by step. What ``protocol.rollout.elastic`` is made on.

One operation is one background task. Source: scaling.md 7.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from protocol.config import AdminConfig, LifecycleConfig, RolloutScalingConfig
from protocol.errors import PlacementError, SeatrialError
from protocol.messages import EngineAddress, WeightUpdate
from protocol.ports import ActorHandle, EngineSpec, Placement, backend
from protocol.rollout.elastic_contract import (
    ROLLOUT_CHAIN,
    ROLLOUT_TERMINAL,
    Category,
    RolloutState,
    sanitised,
)
from protocol.rollout.elastic_keys import ReplayKeys
from protocol.scaling.contract import Direction
from protocol.scaling.placement import create_group, release_group, slot_fields, wait_usable
from protocol.scaling.replicas import Replicas
from protocol.scaling.slots import Slot, Slots
from protocol.serving.admin import post_update_weights
from protocol.serving.gateway import ReplicaView
from protocol.serving.peer import PEER_LOST, Peer
from protocol.training.checkpoint import latest_export, load_manifest


class _Failed(Exception):
    """A replica could not be added."""

    def __init__(self, category: Category, why: str) -> None:
        super().__init__(why)
        self.category: Category = category


@dataclasses.dataclass(slots=True)
class RolloutOperation:
    """One operation. ``delta``: replicas to add or to remove."""

    request_id: str
    direction: Direction
    delta: int
    urls: tuple[tuple[str, int], ...] = ()
    force: bool = False
    evict: bool = False
    status: RolloutState = "PENDING"
    cancelled: bool = False
    created: int = 0
    removed: int = 0
    failed: int = 0
    error: str = ""
    categories: list[Category] = dataclasses.field(default_factory=list)

    @property
    def terminal(self) -> bool:
        return self.status in ROLLOUT_TERMINAL[self.direction]


class RolloutLifecycle:
    """Operations on the replicas of one rollout service, and their weights.

    Args:
        config: what is particular to rollout replicas.
        lifecycle: time-outs of every step.
        admin: how weights are posted.
        gateway: handle of the Gateway that routes to the replicas.
        spec: how a replica is started.
        service: replicas are named ``SERVICE-RANK``.
        initial: the replicas that are there already; they are protected.
        weight_service: is told of replicas that go (``unregister``), where there is one.
    """

    def __init__(
        self,
        config: RolloutScalingConfig,
        lifecycle: LifecycleConfig,
        admin: AdminConfig,
        gateway: ActorHandle,
        spec: EngineSpec,
        service: str,
        initial: tuple[EngineAddress, ...],
        weight_service: ActorHandle | None = None,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._admin = admin
        self._gateway = Peer(gateway, lifecycle.call_timeout_s)
        self._weight_service = None if weight_service is None else Peer(weight_service, lifecycle.call_timeout_s)
        self._replicas = Replicas(lifecycle, self._gateway)
        self._spec = spec
        self._initial = len(initial)
        self._slots = Slots(service, initial)
        self._external: dict[tuple[str, int], EngineAddress] = {}
        self._operations: dict[str, RolloutOperation] = {}
        self._keys = ReplayKeys(
            config.idempotency_window_s,
            config.max_idempotency_records,
            lambda name: not self._operations[name].terminal,
        )
        self._draining = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._weights: asyncio.Lock

    async def start(self) -> None:
        self._weights = asyncio.Lock()

    async def stop(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    @property
    def _published(self) -> int:
        return self._slots.published + len(self._external)

    # --- weights ---

    async def _load(self, address: EngineAddress, path: str) -> str:
        """Empty when the replica has them; otherwise why not."""
        try:
            manifest = await load_manifest(backend().storage, path)
            reply = await post_update_weights(
                backend().engines.client(address), WeightUpdate(path, manifest.version), self._admin
            )
            return "" if reply.success else f"{address.name}: {reply.status} {reply.body}"
        except SeatrialError as error:
            return f"{address.name}: {type(error).__name__}: {error}"

    # --- an operation ---

    async def _run(self, operation: RolloutOperation, steps: Any) -> None:
        try:
            end: RolloutState = await steps
        except SeatrialError as error:
            operation.error, end = f"{type(error).__name__}: {error}", "FAILED"
        finally:
            self._draining = False
        operation.status = end
        self._emit_terminal(operation)

    def _reach(self, operation: RolloutOperation, state: RolloutState) -> None:
        """Forward only: the next replica of one operation goes through the same states again."""
        chain = ROLLOUT_CHAIN[operation.direction]
        if chain.index(state) > chain.index(operation.status):
            operation.status = state
            self._emit_state(operation)

    # --- out ---

    async def _out(self, operation: RolloutOperation) -> RolloutState:
        await asyncio.sleep(0)
        for number in range(operation.delta):
            if operation.cancelled:
                break
            try:
                if operation.urls:
                    await self._connect(operation, *operation.urls[number])
                else:
                    await self._make(operation)
            except _Failed as failure:
                if not failure.category:
                    break  # cancelled, and cleaned up
                operation.failed += 1
                operation.error = operation.error or str(failure)
                operation.categories.append(failure.category)
                break
            operation.created += 1
        if operation.created == operation.delta:
            return "ACTIVE"
        if operation.cancelled and not operation.failed:
            return "PARTIAL" if operation.created else "CANCELLED"
        return "PARTIAL" if operation.created else "FAILED"

    async def _make(self, operation: RolloutOperation) -> None:
        slot = self._slots.append(operation.request_id)
        self._emit_slot(slot, "candidate")
        category: Category = "placement"
        try:
            self._reach(operation, "CREATING")
            await create_group(slot, self._spec.num_gpus, self._lifecycle)
            self._emit_slot(slot, "owns_group")
            await wait_usable(slot, self._lifecycle)
            self._look(operation)
            category = "launch"
            slot.worker = True
            slot.address = await backend().engines.launch(self._spec, name=slot.name, placement=Placement(slot.group))
            self._emit_slot(slot, "launched")
            self._look(operation)
            self._reach(operation, "CONNECTING")
            category = "connect"
            await self._replicas.wait_ready(slot.address, lambda: None)
            category = "health"
            self._reach(operation, "HEALTH_CHECKING")
            async with asyncio.timeout(self._lifecycle.health_timeout_s):
                await self._replicas.wait_generating(slot.address, lambda: None)
            category = "weights"
            await self._sync_and_publish(operation, slot.address)
            slot.candidate = False
        except (_Failed, SeatrialError, TimeoutError) as error:
            await self._clean_up(slot)
            if isinstance(error, _Failed):
                raise
            found: Category = "placement" if isinstance(error, PlacementError) else category
            raise _Failed(found, f"{slot.name}: {type(error).__name__}: {error}") from None
        self._emit_slot(slot, "published")

    def _look(self, operation: RolloutOperation) -> None:
        if operation.cancelled:
            raise _Failed("", "cancelled")

    async def _sync_and_publish(self, operation: RolloutOperation, address: EngineAddress) -> None:
        """The present weights, and then the gateway, while no update can come between the two."""
        async with self._weights:
            self._reach(operation, "WEIGHT_SYNCING")
            path = await latest_export(backend().storage, self._config.export_prefix)
            why = "" if path is None else await self._load(address, path)
            if why:
                raise _Failed("weights", why)
            self._reach(operation, "READY")
            while True:
                try:
                    if not await self._gateway.call("add_replica", address):
                        raise _Failed("connect", f"{address.name}: the gateway knows a later incarnation")
                    return
                except PEER_LOST:
                    await asyncio.sleep(self._lifecycle.poll_interval_s)

    async def _connect(self, operation: RolloutOperation, host: str, port: int) -> None:
        """An engine that somebody else has started, and will end."""
        self._reach(operation, "CONNECTING")
        address = EngineAddress(f"external-{host}-{port}", 0, host, port)
        client = backend().engines.client(address)
        timeout_s = self._lifecycle.request_timeout_s
        try:
            async with asyncio.timeout(self._lifecycle.health_timeout_s):
                while True:
                    status, _ = await client.get("/ready", connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
                    if status == 200:
                        break
                    await asyncio.sleep(self._lifecycle.poll_interval_s)
                self._reach(operation, "HEALTH_CHECKING")
                await self._replicas.wait_generating(address, lambda: None)
        except (SeatrialError, TimeoutError) as error:
            raise _Failed("connect", f"{host}:{port}: {type(error).__name__}: {error}") from None
        await self._sync_and_publish(operation, address)
        self._external[host, port] = address

    # --- in ---

    def _victims(self, count: int) -> list[tuple[EngineAddress, Slot | None]]:
        """The newest first: engines of others, which came by themselves, before replicas of our own."""
        external: list[tuple[EngineAddress, Slot | None]] = [(one, None) for one in reversed(self._external.values())]
        own = [(slot.address, slot) for slot in reversed(self._slots.elastic()) if slot.address is not None]
        return [*external, *own][:count]

    async def _in(self, operation: RolloutOperation) -> RolloutState:
        victims = self._victims(operation.delta)
        self._draining = True  # from here on an update is refused; the one that runs is waited for
        async with self._weights:
            self._reach(operation, "DRAINING")
            for address, slot in victims:
                await self._let_go(operation, address, slot)
            if not operation.force:
                await asyncio.sleep(self._config.drain_sleep_s)  # one for the whole batch
            busy = [] if operation.force else [one for one in victims if not await self._idle(one[0])]
            for address, slot in busy if not operation.evict else ():
                operation.failed += 1
                operation.error = operation.error or f"{address.name} was not idle in time, and serves on"
                await self._put_back(operation, address, slot)
                victims = [one for one in victims if one[0] != address]
            self._reach(operation, "REMOVING")
            for address, slot in victims:
                await self._remove(operation, address, slot)
        return "FAILED" if operation.failed else "COMPLETED"

    async def _let_go(self, operation: RolloutOperation, address: EngineAddress, slot: Slot | None) -> None:
        if slot is not None:
            slot.operation, slot.draining = operation.request_id, True
            self._emit_drain(operation, slot, "chosen")
        while True:
            try:
                await self._gateway.call("close_admission", address, "scale-in")
                return
            except PEER_LOST:
                await asyncio.sleep(self._lifecycle.poll_interval_s)

    async def _idle(self, address: EngineAddress) -> bool:
        try:
            views: tuple[ReplicaView, ...] = await self._gateway.call("engines")
        except PEER_LOST:
            return False  # nothing is known, so it is not idle
        return all(view.in_flight == 0 for view in views if view.address == address)

    async def _put_back(self, operation: RolloutOperation, address: EngineAddress, slot: Slot | None) -> None:
        if slot is not None:
            self._emit_drain(operation, slot, "restored")
        while True:
            try:
                await self._gateway.call("reopen_admission", address)
                break
            except PEER_LOST:
                await asyncio.sleep(self._lifecycle.poll_interval_s)
        if slot is not None:
            slot.draining = False

    async def _remove(self, operation: RolloutOperation, address: EngineAddress, slot: Slot | None) -> None:
        if self._weight_service is not None:
            try:
                await self._weight_service.call("unregister", address.name)
            except SeatrialError as error:
                operation.error = operation.error or f"warning: {address.name} is still registered for weights: {error}"
        await self._replicas.forget_route(address)
        if slot is None:
            self._external.pop((address.host, address.port), None)
        else:
            await self._clean_up(slot)
        operation.removed += 1

    # --- both ---

    async def _clean_up(self, slot: Slot) -> None:
        """End its process and its group, however long the table takes to say so: nobody comes to clean up later."""
        slot.unreleased = slot.candidate
        if slot.worker:
            detail = await self._replicas.end(slot.name)
            slot.worker = False
            self._emit_slot(slot, "stopped", detail)
        while not (release := await release_group(slot, self._lifecycle)).confirmed:
            self._emit_slot(slot, "unreleased", release.why)
            await asyncio.sleep(self._lifecycle.removal_poll_s)
        slot.held = slot.unreleased = slot.candidate = slot.draining = False
        slot.retired = True
        self._emit_slot(slot, "retired")

    def _emit_state(self, operation: RolloutOperation) -> None:
        backend().emit(
            "scale.state",
            operation=operation.request_id,
            direction=operation.direction,
            state=operation.status,
            model="rollout",
        )

    def _emit_terminal(self, operation: RolloutOperation) -> None:
        capacity = self._slots.capacity()
        backend().emit(
            "scale.terminal",
            operation=operation.request_id,
            direction=operation.direction,
            state=operation.status,
            current=capacity.current + len(self._external),
            ready=capacity.ready + len(self._external),
            created=operation.created,
            removed=operation.removed,
            failed=operation.failed,
            cleanup_required=False,
            error=sanitised(operation.error, self._config.message_chars),
        )

    def _emit_slot(self, slot: Slot, what: str, detail: str = "") -> None:
        backend().emit("scale.slot", **slot_fields(slot), what=what, detail=detail)

    def _emit_drain(self, operation: RolloutOperation, slot: Slot, what: str) -> None:
        assert slot.address is not None
        backend().emit(
            "scale.drain",
            operation=operation.request_id,
            replica=slot.name,
            replica_inc=slot.address.incarnation,
            rank=slot.rank,
            generation=0,
            what=what,
        )
