"""The control API of scaling, as plain handlers: request in, status code and body out. One code for both worlds.

Source: scaling.md 1.1 to 1.6. What a handler answers to a POST is never proof that anything is done or clean; only the
status of an operation, or its reconcile, says ``cleanup_required: false`` (2.6).

With a journal an API that was killed knows every operation and key again, and watches on what was not over: nothing is
told of an operation that is not kept (hazard H12). Without one it begins anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from protocol.config import JudgeConfig, ScalingConfig
from protocol.errors import SeatrialError, StorageError
from protocol.journal import Journal
from protocol.messages import message
from protocol.ports import ActorHandle, backend, data_call
from protocol.scaling.bodies import (
    ApiReply,
    DecisionBody,
    EngineBody,
    EnginesBody,
    EnginesOfAllBody,
    ErrorBody,
    HealthBody,
    MetricsBody,
    ReconcileBody,
    StatusBody,
    SubmitBody,
)
from protocol.scaling.contract import Capacity, CleanupReport, Direction, Progress, Victim
from protocol.scaling.drain import DrainGate
from protocol.scaling.hooks import ManagerPeer, NoHook
from protocol.scaling.judge import asked_of, generate
from protocol.scaling.registry import STATUS_OF, Operation, ScaleRegistry
from protocol.scaling.watcher import Watcher
from protocol.serving.gateway import ReplicaView
from protocol.serving.peer import PEER_LOST, Peer

DEFAULT_MODEL = "__default__"
"""Internal name of the only model where it was given none."""


@message
class ScaledModel:
    """One model as the API is set up: who serves it, who scales it, how many replicas are protected."""

    name: str
    model_path: str
    initial: int
    gpus_per_replica: float


class _Model:
    def __init__(
        self, about: ScaledModel, door: ActorHandle, gateway: Peer, manager: Peer, cleaner: Peer, watcher: Watcher
    ) -> None:
        self.about = about
        self.door = door
        """The gateway itself: its calls have time-outs of their own."""
        self.gateway = gateway
        self.manager = manager
        self.cleaner = cleaner
        self.watcher = watcher
        self.gate = DrainGate(gateway)


class ScaleApi:
    """The control API of one or several models. An actor.

    Args:
        config: bounds, intervals and time-outs.
        models: (model, its Gateway, its ScaleManager).
        judges: how calls of a model are sampled where they do not say, by its name; default: the contract's defaults.
    """

    def __init__(
        self,
        config: ScalingConfig,
        models: tuple[tuple[ScaledModel, ActorHandle, ActorHandle], ...],
        judges: Mapping[str, JudgeConfig] | None = None,
    ) -> None:
        self._config = config
        self._given = models
        self._judges = {about.name: JudgeConfig(model_path=about.model_path) for about, *_ in models} | dict(
            judges or {}
        )
        self._models: dict[str, _Model] = {}
        self._watches: dict[asyncio.Task[None], None] = {}
        self._registry: ScaleRegistry
        self._journal: Journal

    async def start(self) -> None:
        port, config = backend(), self._config
        self._registry = ScaleRegistry(
            config,
            new_id=port.new_id,
            now=asyncio.get_running_loop().time,
            wall_time=port.wall_time,
            emit=port.emit,
        )
        for about, gateway_handle, manager_handle in self._given:
            gateway = Peer(gateway_handle, config.call_timeout_s)
            manager = ManagerPeer(manager_handle, config.progress_timeout_s)
            cleaner = ManagerPeer(manager_handle, config.reconcile_timeout_s)
            watcher = Watcher(config, self._registry, manager, DrainGate(gateway))
            self._models[about.name] = _Model(about, gateway_handle, gateway, manager, cleaner, watcher)
        self._journal = Journal(config.journal, self._registry.kept)
        found = await self._journal.load()
        for operation in [] if found is None else self._registry.restore(found):
            self._watch(self._models[operation.model_name], operation)

    async def stop(self) -> None:
        for task in tuple(self._watches):
            task.cancel()

    # --- submission ---

    async def scale_out(self, body: Any) -> ApiReply:
        """POST /scale_out: 200, 400, 409, 422 or 503."""
        return await self._submit("scale_out", body)

    async def scale_in(self, body: Any) -> ApiReply:
        """POST /scale_in: 200, 400, 409, 422 or 503."""
        return await self._submit("scale_in", body)

    async def _submit(self, direction: Direction, given: Any) -> ApiReply:
        try:
            asked = SubmitBody.model_validate(given)
        except ValidationError as error:
            return _error(422, "INVALID_TYPE", _first(error))
        model = self._resolve(asked.model_name)
        if model is None:
            return self._unknown_model(asked.model_name)
        try:
            await model.gateway.call("roster")
        except SeatrialError as error:
            return _error(503, "DISCOVERY_FAILED", f"the gateway does not answer: {error.message}")
        try:
            capacity = await self._capacity(model)
        except SeatrialError as error:
            # Strict: to guess here is to admit what must not be admitted (M21).
            return _error(503, "CAPACITY_UNKNOWN", f"nothing was admitted: {error.message}")
        decision = self._registry.submit(
            direction,
            model.about.name,
            asked.num_replicas,
            timeout_s=asked.timeout_secs,
            key=asked.idempotency_key,
            capacity=capacity,
            protected=model.about.initial,
        )
        if decision.code:
            return _error(STATUS_OF[decision.code], decision.code, decision.detail)
        if decision.created and decision.request_id is not None:
            operation = self._registry.get(direction, decision.request_id)
            assert operation is not None
            self._watch(model, operation)
        if decision.request_id is not None or (asked.idempotency_key is not None and not decision.created):
            try:
                await self._journal.save()
            except StorageError as error:
                return _error(503, "NOT_KEPT", f"{error.message}; ask again with the same key")
        answer = DecisionBody(
            status=decision.status,
            request_id=decision.request_id,
            current=decision.current,
            ready=decision.ready,
            detail=decision.detail,
        )
        body = dataclasses.asdict(answer)
        if decision.request_id is None:
            del body["request_id"]
        return ApiReply(200, body)

    def _watch(self, model: _Model, operation: Operation) -> None:
        task = backend().background(self._watched(model, operation), name=f"watch-{operation.request_id}")
        self._watches[task] = None
        task.add_done_callback(lambda done: self._watches.pop(done, None))

    async def _watched(self, model: _Model, operation: Operation) -> None:
        await self._journal.keep()  # nothing is begun that a restart would not know of
        await model.watcher.watch(operation)
        await self._journal.keep()

    # --- operations ---

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        """GET /scale_out/{id} and /scale_in/{id}: 200 or 404. The only proof that an operation is clean."""
        operation = self._registry.get(direction, request_id)
        if operation is None:
            return _unknown(direction, request_id)
        shown = StatusBody(**{field.name: getattr(operation, field.name) for field in dataclasses.fields(StatusBody)})
        await self._journal.keep()  # what it is said to be once, it does not go back behind; it may go on meanwhile
        return ApiReply(200, dataclasses.asdict(shown))

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        """POST .../{id}/reconcile: go on with the cleanup of that operation, and nothing else. 200, 404, 409 or 503.

        One that is not terminal is refused with 409: its ``cleanup_required: false`` is no promise yet.
        """
        operation = self._registry.get(direction, request_id)
        if operation is None:
            return _unknown(direction, request_id)
        if not operation.terminal:
            return _error(409, "LIFECYCLE_RUNNING", f"it is {operation.status}; try again later")
        if not operation.cleanup_required:
            return self._reconciled(operation, True, "already clean")
        model = self._models[operation.model_name]
        try:
            await self._call_off(model, operation)
            proof: Victim | None = None
            if direction == "scale_in":
                refusal = await self._look_before(model, operation)
                if isinstance(refusal, ApiReply):
                    return refusal
                proof = refusal
            report: CleanupReport = await model.cleaner.call("reconcile", request_id, proof)
        except NoHook as error:
            return _error(503, "NO_RECONCILE_HOOK", f"{error.message}; an operator must look")
        except SeatrialError as error:
            return _error(503, "MANAGER_UNKNOWN", f"the manager does not answer: {error.message}; try again")
        if not report.known:
            return _error(503, "STATE_LOST", "the manager does not know this operation any more")
        if report.running:
            return _error(409, "LIFECYCLE_RUNNING", f"{report.detail}; try again later")
        if not report.pending and operation.cleanup_required:
            self._registry.cleaned(operation, report.detail)
            await self._journal.keep()
        return self._reconciled(operation, report.victim_cleared, report.detail)

    async def _call_off(self, model: _Model, operation: Operation) -> None:
        """Tell the manager that the operation is over, where its watcher could not.

        One that was begun and not executed, or is not known to have been begun, stands still from then on, and is done.
        """
        if operation.called_off and operation.handed_over:
            return
        try:
            await model.manager.call("abort", operation.request_id, operation.direction, operation.handed_over)
        except NoHook:
            return  # whether its lifecycle is at work, it says itself
        operation.called_off = True

    async def _look_before(self, model: _Model, operation: Operation) -> ApiReply | Victim | None:
        """What must be known before a scale-in may go on: who the victim is, and that it is idle (M1, M4, M5)."""
        try:
            progress: Progress | None = await model.manager.call("progress", operation.request_id)
        except NoHook:
            raise
        except SeatrialError as error:
            return _error(503, "VICTIM_UNKNOWN", f"the manager does not answer: {error.message}; try again")
        if progress is None:
            return _error(503, "STATE_LOST", "the manager does not know this operation any more")
        if progress.victim is None:
            # scaling.md 1.5 says COMPLETED alone. But a scale-in of several victims that was aborted after one of them
            # was gone, and one that was never executed, is FAILED and has no victim either: it would exclude all others
            # for ever. Without a victim, done, and nothing held: there is nothing that could be in flight on anything.
            nothing_held = progress.phase == "COMPLETED" or progress.cleanup_required is False
            if progress.physical_done is True and nothing_held:
                return None
            return _error(503, "VICTIM_UNKNOWN", f"no victim is named and the operation is {progress.phase}")
        if progress.victim.rank is None:
            return _error(503, "VICTIM_UNKNOWN", f"{progress.victim.address.name} is named without its rank; try again")
        closed = await model.gate.close(progress.victim)  # its watcher may have died before it did
        in_flight = await model.gate.in_flight(progress.victim.address)
        name = progress.victim.address.name
        if not progress.victim_stopped and not closed:
            # Not routable for the moment is not closed: health may readmit it while it is being ended.
            return _error(503, "VICTIM_UNKNOWN", f"the gateway does not say that {name} is closed; try again")
        if in_flight is None and not progress.victim_stopped:
            return _error(503, "VICTIM_UNKNOWN", f"the gateway does not say what is in flight on {name}; try again")
        if in_flight:
            return _error(409, "IN_FLIGHT", f"{in_flight} calls are in flight on {name}; try again later")
        return progress.victim

    def _reconciled(self, operation: Operation, victim_cleared: bool, detail: str) -> ApiReply:
        backend().emit(
            "scale.reconciled",
            operation=operation.request_id,
            direction=operation.direction,
            state=operation.status,
            cleanup_required=operation.cleanup_required,
            detail=detail,
        )
        body = ReconcileBody(
            request_id=operation.request_id,
            direction=operation.direction,
            status=operation.status,
            cleanup_required=operation.cleanup_required,
            victim_cleared=victim_cleared,
            detail=detail,
        )
        return ApiReply(200, dataclasses.asdict(body))

    # --- the model itself ---

    @data_call
    async def generate(self, body: Any) -> ApiReply:
        """POST /generate: one judgement (scaling.md 8). 200, 400, 422, a 4xx of the replica, 502, 503 or 504."""
        asked = asked_of(body)
        if isinstance(asked, ApiReply):
            return asked
        model = self._resolve(asked.model_name)
        if model is None:
            return self._unknown_model(asked.model_name)
        return await generate(model.door, asked, self._judges[model.about.name])

    # --- what there is ---

    async def engines(self) -> ApiReply:
        """GET /engines: replicas with their counters, and the capacity or what stands in for it. Flat for one model."""
        found = {name: await self._engines(model) for name, model in self._models.items()}
        only = list(found) == [DEFAULT_MODEL]
        return ApiReply(200, dataclasses.asdict(found[DEFAULT_MODEL] if only else EnginesOfAllBody(found)))

    async def _engines(self, model: _Model) -> EnginesBody:
        views = await self._views(model)
        listed = [
            EngineBody(host=v.address.host, port=v.address.port, inflight=v.in_flight, served=v.served) for v in views
        ]
        ready = sum(view.routable for view in views)
        try:
            capacity = await self._capacity(model)
        except SeatrialError:
            capacity = Capacity(len(views), ready, len(views), 0)  # lenient: only who decides must not guess
        return EnginesBody(
            engines=listed,
            current=capacity.current,
            ready=ready,
            occupied=capacity.occupied,
            pending_cleanup=capacity.pending_cleanup,
        )

    async def metrics(self) -> ApiReply:
        """GET /metrics: capacity by model. What could not be asked for is absent."""
        bodies = {name: dataclasses.asdict(await self._metrics(model)) for name, model in self._models.items()}
        found = {name: {k: v for k, v in body.items() if v is not None} for name, body in bodies.items()}
        return ApiReply(200, found[DEFAULT_MODEL] if list(found) == [DEFAULT_MODEL] else {"instances": found})

    async def _metrics(self, model: _Model) -> MetricsBody:
        about = model.about
        body = MetricsBody(
            model_path=about.model_path,
            num_gpus=about.initial * about.gpus_per_replica,
            num_gpus_per_engine=about.gpus_per_replica,
            num_engines=about.initial,
        )
        try:
            capacity = await self._capacity(model)
        except SeatrialError as error:
            body.capacity_error = error.message
            return body
        body.num_engines, body.ready_engines = capacity.current, capacity.ready
        body.occupied, body.pending_cleanup = capacity.occupied, capacity.pending_cleanup
        return body

    async def health(self) -> ApiReply:
        """GET /health: per model, and overall, whether somebody answers and a replica is routable."""
        found = {name: any(v.routable for v in await self._views(model)) for name, model in self._models.items()}
        said = {name: "healthy" if well else "unhealthy" for name, well in found.items()}
        status = "healthy" if all(found.values()) else "unhealthy"
        return ApiReply(200, dataclasses.asdict(HealthBody(status, said)))

    async def routable(self) -> tuple[str, ...]:
        """Names of the replicas that are routed to, of every model."""
        views = [view for model in self._models.values() for view in await self._views(model)]
        return tuple(view.address.name for view in views if view.routable)

    async def unresolved(self) -> tuple[str, ...]:
        """Operations that are not terminal, or not clean: ``MODEL:ID``."""
        found = ((name, self._registry.unresolved(name)) for name in self._models)
        return tuple(f"{name}:{operation.request_id}" for name, operation in found if operation is not None)

    async def _views(self, model: _Model) -> tuple[ReplicaView, ...]:
        try:
            views: tuple[ReplicaView, ...] = await model.gateway.call("engines")
        except PEER_LOST:
            return ()
        return views

    async def _capacity(self, model: _Model) -> Capacity:
        """Raises SeatrialError when the manager does not answer, or has no such method and the gateway does not.

        A manager without it leaves the gateway's list to be counted, in both modes (scaling.md 1.3).
        """
        try:
            capacity: Capacity = await model.manager.call("capacity")
        except NoHook:
            views: tuple[ReplicaView, ...] = await model.gateway.call("engines")
            capacity = Capacity(len(views), sum(view.routable for view in views), len(views), 0)
        return capacity

    def _unknown_model(self, name: str | None) -> ApiReply:
        return _error(400, "UNKNOWN_MODEL", f"model {name!r} is none of {sorted(self._models)}")

    def _resolve(self, name: str | None) -> _Model | None:
        if name in self._models:
            return self._models[name]
        if name in (None, "default") and len(self._models) == 1:
            return next(iter(self._models.values()))
        return None


def _error(status: int, code: str, detail: str) -> ApiReply:
    return ApiReply(status, dataclasses.asdict(ErrorBody(code, detail)))


def _unknown(direction: Direction, request_id: str) -> ApiReply:
    return _error(404, "UNKNOWN_OPERATION", f"no {direction} has the id {request_id!r}")


def _first(error: ValidationError) -> str:
    """What is wrong with a submission, and what to send for the key that is wrong."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    said = f"{where}: {first['msg']}" if where else str(first["msg"])
    return f"{said}; {_RIGHT.get(where, _RIGHT[''])}"


_RIGHT: Final = {
    "": "send a JSON object with num_replicas, and with what is wanted of model_name, timeout_secs, idempotency_key",
    "model_name": "model_name is a string; default, null or none at all is the only configured model",
    "num_replicas": "num_replicas is the total number of replicas, an integer from 1 to 10**12",
    "timeout_secs": "timeout_secs is the budget of the whole operation in seconds, a number above 0; null: the default",
    "idempotency_key": "idempotency_key is a string; null or none at all: without a key",
}
