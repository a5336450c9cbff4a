"""Elastic rollout replicas: added with the present weights, removed newest first, and never while weights change.

What it promises (scaling.md 7; the shapes are in ``protocol.rollout.elastic_contract``):

- A new replica goes through CONNECTING, HEALTH_CHECKING and WEIGHT_SYNCING before it is routed to, so that none ever
  serves older weights than the others.
- A weight update is refused while replicas drain; a scale-in waits for the update that runs.
- Victims go newest first, all at once: the gateway lets go of them, one sleep for the whole batch, the weight service
  is told (its failure only warns), the process ends, its placement group is removed.
- A victim that is not idle in time is put back and the operation is FAILED, unless its eviction was asked for.
- A key answers for 24 h with the operation (or no-op) that it was first used for, so that a lost reply costs nothing.
- A terminal operation has been cleaned up: it ends when the table says REMOVED of all that was begun, and not before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from pydantic import ValidationError

from protocol.messages import EngineAddress
from protocol.ports import backend
from protocol.rollout.elastic_contract import (
    CANCELLABLE,
    RejectedBody,
    RolloutDecisionBody,
    RolloutInBody,
    RolloutOutBody,
    RolloutStatusBody,
    as_document,
    by_weight,
    normalised,
    sanitised,
    weightiest,
)
from protocol.rollout.elastic_keys import KeyRecord
from protocol.rollout.elastic_lifecycle import RolloutLifecycle, RolloutOperation
from protocol.scaling.bodies import ApiReply, EngineBody, EnginesBody, ErrorBody, HealthBody, MetricsBody
from protocol.scaling.contract import Direction, RecoveryLeave
from protocol.serving.gateway import ReplicaView
from protocol.serving.peer import PEER_LOST


class RolloutScaling(RolloutLifecycle):
    """Control API and manager of a rollout service's replicas. An actor. Arguments: see ``RolloutLifecycle``."""

    # --- submissions ---

    async def scale_out(self, body: dict[str, Any]) -> ApiReply:
        """POST /scale_out: 200, 400, 409 or 422."""
        try:
            asked = RolloutOutBody.model_validate(body)
            urls = tuple(dict.fromkeys(normalised(url) for url in asked.engine_urls or ()))
        except ValueError as error:
            return _error(422, "INVALID_TYPE", _first(error))
        if asked.num_replicas is not None and asked.num_replicas < self._initial:
            return self._rejected(asked.num_replicas)
        earlier = self._replayed("scale_out", asked) or self._busy()
        if earlier is not None:
            return earlier
        fresh = tuple(url for url in urls if url not in self._external)
        delta = len(fresh) if urls else (asked.num_replicas or 0) - self._published
        if delta <= 0:
            return self._remembered("scale_out", asked, self._decision("NOOP", "nothing to add"))
        operation = RolloutOperation(backend().new_id("rollout-scale"), "scale_out", delta, fresh)
        return self._remembered("scale_out", asked, self._admit(operation))

    async def scale_in(self, body: dict[str, Any]) -> ApiReply:
        """POST /scale_in: 200, 400, 409 or 422."""
        try:
            asked = RolloutInBody.model_validate(body)
        except ValidationError as error:
            return _error(422, "INVALID_TYPE", _first(error))
        if asked.num_replicas < self._initial:
            return self._rejected(asked.num_replicas)
        earlier = self._replayed("scale_in", asked) or self._busy()
        if earlier is not None:
            return earlier
        delta = self._published - asked.num_replicas
        if delta <= 0:
            return self._remembered("scale_in", asked, self._decision("NOOP", "nothing to remove"))
        if asked.dry_run:
            names = [address.name for address, _ in self._victims(delta)]
            return self._decision("DRY_RUN", f"{len(names)} would go", replicas=names)
        identity = backend().new_id("rollout-scale")
        operation = RolloutOperation(identity, "scale_in", delta, force=asked.force, evict=asked.evict)
        return self._remembered("scale_in", asked, self._admit(operation))

    async def call_off(self, direction: Direction, request_id: str) -> ApiReply:
        """DELETE of an operation, which cancels it: 200, 404, or 409 where it cannot be cancelled any more."""
        operation = self._operations.get(request_id)
        if operation is None or operation.direction != direction:
            return _unknown(direction, request_id)
        if direction != "scale_out" or operation.status not in CANCELLABLE:
            return _error(409, "NOT_CANCELLABLE", f"{request_id} is {operation.status}; it goes on")
        operation.cancelled = True
        return ApiReply(200, self._status(operation))

    def _replayed(self, direction: Direction, asked: RolloutOutBody | RolloutInBody) -> ApiReply | None:
        """What the key was answered before. This comes before the exclusion: a retry is no conflict with itself."""
        key = asked.idempotency_key
        record = None if key is None else self._keys.find(direction, key, _now())
        if record is None:
            return None
        if record.body != _canonical(asked):
            return _error(409, "IDEMPOTENCY_CONFLICT", f"key {key!r} was used for another request; use a new key")
        if record.request_id is None:
            return record.no_op
        return self._decision(self._operations[record.request_id].status, "replayed", record.request_id)

    def _remembered(self, direction: Direction, asked: RolloutOutBody | RolloutInBody, reply: ApiReply) -> ApiReply:
        """The answer, which its key gives from now on. A dry run is not remembered: it has no effect to repeat."""
        key = asked.idempotency_key
        if key is not None:
            operation = reply.body.get("request_id")
            no_op = reply if operation is None else None
            self._keys.remember(direction, key, KeyRecord(_canonical(asked), _now(), operation, no_op))
        return reply

    def _busy(self) -> ApiReply | None:
        for operation in self._operations.values():
            if not operation.terminal:
                what = f"{operation.direction} {operation.request_id} is {operation.status}; wait for its end"
                return _error(409, "CONFLICT", what)
        return None

    def _rejected(self, target: int) -> ApiReply:
        text = f"num_replicas {target} is below the {self._initial} initial replicas; send more"
        return ApiReply(400, dataclasses.asdict(RejectedBody("REJECTED", text, "REJECTED")))

    def _decision(self, status: str, detail: str, request_id: str | None = None, **more: Any) -> ApiReply:
        capacity = self._slots.capacity()
        external = len(self._external)
        body = RolloutDecisionBody(
            status, self._published, capacity.ready + external, detail, request_id=request_id, **more
        )
        return ApiReply(200, as_document(body))

    def _admit(self, operation: RolloutOperation) -> ApiReply:
        self._operations[operation.request_id] = operation
        over = [name for name, one in self._operations.items() if one.terminal]
        for name in over[: max(0, len(over) - self._config.max_history)]:
            del self._operations[name]
            self._keys.forget(name)
        self._emit_state(operation)
        steps = self._out(operation) if operation.direction == "scale_out" else self._in(operation)
        task = backend().background(self._run(operation, steps), name=f"rollout-{operation.request_id}")
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        return self._decision("PENDING", "admitted", operation.request_id)

    # --- looking ---

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        """GET of an operation: 200 or 404."""
        operation = self._operations.get(request_id)
        if operation is None or operation.direction != direction:
            return _unknown(direction, request_id)
        return ApiReply(200, self._status(operation))

    def _status(self, operation: RolloutOperation) -> dict[str, Any]:
        body = RolloutStatusBody(
            request_id=operation.request_id,
            direction=operation.direction,
            status=operation.status,
            delta=operation.delta,
            created=operation.created,
            removed=operation.removed,
            failed=operation.failed,
            error_message=sanitised(operation.error, self._config.message_chars),
            failure_category=weightiest(operation.categories),
            failure_categories=by_weight(operation.categories),
            cleanup_required=False,
        )
        return dataclasses.asdict(body)

    async def engines(self) -> ApiReply:
        """GET /engines: a replica of several nodes counts once, by the address of its head."""
        views: tuple[ReplicaView, ...] = await self._gateway.call("engines")
        capacity, external = self._slots.capacity(), len(self._external)
        body = EnginesBody(
            engines=[EngineBody(v.address.host, v.address.port, v.in_flight, v.served) for v in views],
            current=capacity.current + external,
            ready=sum(view.routable for view in views),
            occupied=capacity.occupied + external,
            pending_cleanup=capacity.pending_cleanup,
        )
        return ApiReply(200, dataclasses.asdict(body))

    async def metrics(self) -> ApiReply:
        """GET /metrics: the capacity. GPUs are those of the initial replicas, as at start-up."""
        capacity, external, gpus = self._slots.capacity(), len(self._external), self._spec.num_gpus
        body = MetricsBody(
            model_path=self._spec.profile,
            num_gpus=self._initial * gpus,
            num_gpus_per_engine=gpus,
            num_engines=capacity.current + external,
            ready_engines=capacity.ready + external,
            occupied=capacity.occupied + external,
            pending_cleanup=capacity.pending_cleanup,
        )
        return ApiReply(200, as_document(body))

    async def health(self) -> ApiReply:
        """GET /health: whether the gateway answers and a replica is routable."""
        try:
            said = "healthy" if await self.routable() else "unhealthy"
        except PEER_LOST:
            said = "unhealthy"
        return ApiReply(200, dataclasses.asdict(HealthBody(said, {"rollout": said})))

    async def routable(self) -> tuple[str, ...]:
        """Names of the replicas that are routed to."""
        views: tuple[ReplicaView, ...] = await self._gateway.call("engines")
        return tuple(view.address.name for view in views if view.routable)

    # --- weights ---

    async def update_weights(self, path: str) -> ApiReply:
        """Have every replica load an export: 200, 409 while replicas drain, 503 where one did not take it.

        Of a 503 nothing is known for the replicas that it names.
        """
        if self._draining:
            return _error(409, "DRAINING", "replicas are being removed; try again when the scale-in is over")
        async with self._weights:
            addresses = [slot.address for slot in self._slots.all() if slot.published and slot.address is not None]
            addresses += self._external.values()
            failed = [
                text for text in await asyncio.gather(*(self._load(address, path) for address in addresses)) if text
            ]
        if failed:
            return _error(503, "WEIGHTS_UNKNOWN", sanitised("; ".join(failed), self._config.message_chars))
        return ApiReply(200, {"path": path, "replicas": len(addresses)})

    # --- what recovery and the deployment ask ---

    async def may_recover(self, address: EngineAddress) -> RecoveryLeave:
        """Whether recovery may start a dead replica again, and in which group."""
        return self._slots.may_recover(address)

    async def adopt(self, old: EngineAddress, new: EngineAddress) -> bool:
        """Recovery has a new incarnation ready. False: the replica is on its way out, so end it."""
        return self._slots.adopt(old, new)

    async def owned(self) -> tuple[tuple[str, str], ...]:
        """(replica, placement group) of every replica that a scale-out has created."""
        return tuple((slot.name, slot.group) for slot in self._slots.elastic())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _canonical(asked: RolloutOutBody | RolloutInBody) -> str:
    """A submission without its key: what the key stands for."""
    return json.dumps(asked.model_dump(exclude={"idempotency_key"}), sort_keys=True)


def _error(status: int, code: str, detail: str) -> ApiReply:
    return ApiReply(status, dataclasses.asdict(ErrorBody(code, detail)))


def _unknown(direction: Direction, request_id: str) -> ApiReply:
    return _error(404, "UNKNOWN_OPERATION", f"no {direction} has the id {request_id!r}")


def _first(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
