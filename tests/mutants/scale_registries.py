"""Wrong registries: what an API of scaling decides, remembers and forgets."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.ports import backend
from protocol.scaling.api import ScaleApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Capacity, Direction, Progress
from protocol.scaling.drain import DrainGate
from protocol.scaling.registry import Decision, Operation, ScaleRegistry
from protocol.scaling.watcher import Watcher


class ApiOfParts(ScaleApi):
    """The right API with the parts that a mutant names."""

    registry_class: type[ScaleRegistry] = ScaleRegistry
    watcher_class: type[Watcher] = Watcher
    gate_class: type[DrainGate] = DrainGate

    async def start(self) -> None:
        await super().start()
        port = backend()
        self._registry = self.registry_class(
            self._config,
            new_id=port.new_id,
            now=asyncio.get_running_loop().time,
            wall_time=port.wall_time,
            emit=port.emit,
        )
        for model in self._models.values():
            model.gate = self.gate_class(model.gateway)
            model.watcher = self.watcher_class(self._config, self._registry, model.manager, model.gate)


class _ConflictFirst(ScaleRegistry):
    def _decide(self, direction: Direction, model: str, *rest: Any) -> Decision:
        if self._unresolved.get(model) is not None:
            capacity: Capacity = rest[3]
            return Decision("CONFLICT", "CONFLICT", None, capacity.current, capacity.ready, "busy")
        return super()._decide(direction, model, *rest)


class ConflictBeforeReplay(ApiOfParts):
    """Looks for an operation under way before it looks for the key: a retry conflicts with itself."""

    registry_class = _ConflictFirst


class _Recomputed(ScaleRegistry):
    def _replay(self, direction: Direction, key: str, *rest: Any) -> Decision | None:
        record = self._keys.get((direction, key))
        return None if record is not None and record.no_op is not None else super()._replay(direction, key, *rest)


class ForgetsNoOps(ApiOfParts):
    """Computes a no-op anew when its key comes again."""

    registry_class = _Recomputed


class _NoTimeout(ScaleRegistry):
    def _replay(self, direction: Direction, key: str, fingerprint: Any, capacity: Capacity) -> Decision | None:
        record = self._keys.get((direction, key))
        if record is not None and record.fingerprint[:2] == fingerprint[:2]:
            fingerprint = record.fingerprint
        return super()._replay(direction, key, fingerprint, capacity)


class FingerprintWithoutTimeout(ApiOfParts):
    """Takes two requests for the same though their time-outs differ."""

    registry_class = _NoTimeout


class _OneNamespace(ScaleRegistry):
    def _replay(self, direction: Direction, key: str, *rest: Any) -> Decision | None:
        return super()._replay("scale_out", key, *rest)

    def _remember(self, direction: Direction, key: str, record: Any) -> None:
        super()._remember("scale_out", key, record)


class KeysOfBothDirections(ApiOfParts):
    """Keeps the keys of both directions in one namespace."""

    registry_class = _OneNamespace


class _Sliding(ScaleRegistry):
    def _replay(self, direction: Direction, key: str, *rest: Any) -> Decision | None:
        found = super()._replay(direction, key, *rest)
        if found is not None and not found.code:
            self._keys[direction, key].created_s = self._now()
        return found


class WindowSlides(ApiOfParts):
    """Extends the window of a key with every replay."""

    registry_class = _Sliding


class CoercesTargets(ApiOfParts):
    """Takes "2", 2.0 and true for numbers of replicas."""

    async def _submit(self, direction: Direction, given: dict[str, Any]) -> ApiReply:
        return await super()._submit(direction, {**given, "num_replicas": int(float(given["num_replicas"]))})


class ExcludesEverybody(ScaleApi):
    """Admits one operation over all services."""

    async def _submit(self, direction: Direction, given: dict[str, Any]) -> ApiReply:
        storage = backend().storage
        if await storage.list("scale-lock/"):
            return ApiReply(409, {"error": "CONFLICT", "detail": "another service is scaled"})
        reply = await super()._submit(direction, given)
        if "request_id" in reply.body:
            await storage.write(f"scale-lock/{reply.body['request_id']}", b"held")
        return reply


class _ByDirection(ScaleRegistry):
    def _decide(self, direction: Direction, model: str, *rest: Any) -> Decision:
        busy = self._unresolved.get(model)
        if busy is not None and self._operations[busy].direction != direction:
            held = self._unresolved.pop(model)
            decision = super()._decide(direction, model, *rest)
            self._unresolved.setdefault(model, held)
            return decision
        return super()._decide(direction, model, *rest)


class ExcludesByDirection(ApiOfParts):
    """Excludes only operations of the same direction."""

    registry_class = _ByDirection


class _FreesAtTheEnd(ScaleRegistry):
    def finish(self, operation: Operation, *args: Any, **kwargs: Any) -> None:
        super().finish(operation, *args, **kwargs)
        self._unresolved.pop(operation.model_name, None)


class FreesWhatIsDirty(ApiOfParts):
    """Admits the next operation as soon as one is terminal, clean or not."""

    registry_class = _FreesAtTheEnd


class _ForEver(ScaleRegistry):
    def _settle(self, operation: Operation) -> None:
        if operation.resolved and self._unresolved.get(operation.model_name) == operation.request_id:
            del self._unresolved[operation.model_name]


class KeepsEverything(ApiOfParts):
    """Never forgets an operation."""

    registry_class = _ForEver


class _KeepsNoOps(ScaleRegistry):
    def _held(self, record: Any) -> bool:
        return record.no_op is not None or super()._held(record)

    def _expired(self, record: Any) -> bool:
        return record.no_op is None and super()._expired(record)


class NoOpsForEver(ApiOfParts):
    """Keeps the keys of no-ops for ever: neither their number nor their age counts."""

    registry_class = _KeepsNoOps


class _Dangling(ScaleRegistry):
    """Keys stay when their operation goes."""

    def _keys_operation(self, direction: Direction, key: str) -> str | None:
        return None

    def _held(self, record: Any) -> bool:
        return record.request_id in self._operations and super()._held(record)

    def _replay(self, direction: Direction, key: str, fingerprint: Any, capacity: Capacity) -> Decision | None:
        record = self._keys.get((direction, key))
        if record is not None and record.request_id is not None and record.request_id not in self._operations:
            status = "ACTIVE" if direction == "scale_out" else "COMPLETED"
            return Decision("", status, record.request_id, capacity.current, capacity.ready, "replayed")
        return super()._replay(direction, key, fingerprint, capacity)


class AnswersForTheForgotten(ApiOfParts):
    """Answers a key with an operation that it has forgotten."""

    registry_class = _Dangling


class BusyWithOthers(ApiOfParts):
    """A right API that carries another model too, whose operations come and go ten times a second."""

    async def start(self) -> None:
        await super().start()
        self._others = backend().periodic(0.1, self._another, name="another-model")

    async def _another(self) -> None:
        capacity = Capacity(1, 1, 1, 0)
        decision = self._registry.submit(
            "scale_out", "another", 2, timeout_s=None, key=None, capacity=capacity, protected=1
        )
        if decision.request_id is not None:
            operation = self._registry.get("scale_out", decision.request_id)
            assert operation is not None
            done = Progress("ACTIVE", 2, 2, 1, 0, 0, None, False, True)
            self._registry.finish(operation, "ACTIVE", done)

    async def stop(self) -> None:
        self._others.cancel()
        await super().stop()


class _EvictsTheOldest(ScaleRegistry):
    def _settle(self, operation: Operation) -> None:
        super()._settle(operation)
        for oldest in list(self._operations)[: max(0, len(self._operations) - self._config.max_history)]:
            self._operations.pop(oldest)
            self._resolved.pop(oldest, None)
            self._unresolved = {model: one for model, one in self._unresolved.items() if one != oldest}


class EvictsTheUnresolved(BusyWithOthers):
    """Forgets the oldest operations, whatever they are."""

    registry_class = _EvictsTheOldest


class _SilenceIsClean(ScaleRegistry):
    def finish(self, operation: Operation, state: Any, progress: Progress | None, **more: Any) -> None:
        if progress is None:
            more["cleanup_required"] = False
        super().finish(operation, state, progress, **more)


class TakesNothingForClean(ApiOfParts):
    """Takes an operation of whose manager nothing was heard for a clean one."""

    registry_class = _SilenceIsClean
