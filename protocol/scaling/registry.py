"""The registry: every scale operation that was admitted, which key it came with, and who may be admitted next.

It decides and remembers; it does nothing physical and awaits nothing, so that every decision is one step of the event
loop. What it promises (scaling.md 1.3, 1.7, 1.8, 2.3):

- Decisions in one fixed order: type, range, replay, mutual exclusion, no-op, admission. A replay comes before the
  exclusion, so that the client whose reply was lost gets its operation again and not a conflict with it.
- A key answers for 24 h from its first use, whatever happened since: the same operation with its present state, or the
  same no-op word for word. The same key with another request is a conflict.
- At most one operation of a model, in either direction, is unresolved: not terminal, or terminal and not cleaned up.
- States go forward only. A terminal state is set once (hazard H2: a late second finish must not rewrite history), and
  after that only the cleanup flag may drop.
- Memory is bounded: resolved operations and their keys are evicted, oldest first, unresolved ones never.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

from protocol.config import ScalingConfig
from protocol.errors import Outcome, SeatrialError
from protocol.messages import message
from protocol.scaling.contract import CHAIN, TERMINAL, Capacity, Direction, Progress, State
from protocol.scaling.key_table import KeyTable

Code = Literal["", "INVALID_TYPE", "INVALID_RANGE", "CONFLICT", "IDEMPOTENCY_CONFLICT"]
STATUS_OF: dict[str, int] = {
    "": 200,
    "INVALID_TYPE": 422,
    "INVALID_RANGE": 400,
    "CONFLICT": 409,
    "IDEMPOTENCY_CONFLICT": 409,
}


class IllegalTransition(SeatrialError):
    """A state that cannot follow the one that an operation has; nothing was changed."""

    default_outcome = Outcome.NOT_DONE


@message
class Decision:
    """The answer to a submission. ``code`` is empty when it was admitted, replayed or a no-op.

    Admitted says neither done nor clean: that, only the operation's status says (scaling.md 2.6).
    """

    code: Code
    status: str
    request_id: str | None
    current: int | None
    ready: int | None
    detail: str
    created: bool = False
    """A new operation was made: it must be carried out."""


@dataclasses.dataclass(slots=True)
class Operation:
    """One admitted operation. ``created_s`` is of this loop's clock, ``created_at`` and ``updated_at`` of the epoch."""

    request_id: str
    direction: Direction
    model_name: str
    target: int
    timeout_secs: float | None
    idempotency_key: str | None
    observed_current: int
    observed_ready: int
    created_s: float
    created_at: float
    updated_at: float
    status: State = "PENDING"
    current: int | None = None
    ready: int | None = None
    created: int = 0
    removed: int = 0
    failed: int = 0
    cleanup_required: bool = False
    error_message: str = ""
    detail: str = ""
    handed_over: bool = False
    """The manager has said that it has it. Until then it was not executed either, whatever else is not known."""
    called_off: bool = False
    """The manager has said that it is done with it, or that it will stop."""

    @property
    def terminal(self) -> bool:
        """Its state will not change any more; whether it left something behind is another question."""
        return self.status in TERMINAL[self.direction]

    @property
    def resolved(self) -> bool:
        """Terminal, and known to have left nothing behind."""
        return self.terminal and not self.cleanup_required


_KEPT = tuple(field.name for field in dataclasses.fields(Operation) if field.name != "created_s")


@dataclasses.dataclass(slots=True)
class _Key:
    """What a key has answered. ``fingerprint``: of the request that it came with."""

    fingerprint: tuple[str, int, float | None]
    created_s: float
    request_id: str | None
    no_op: Decision | None


class ScaleRegistry:
    """Operations of one control API.

    Args:
        config: bounds and the replay window.
        new_id: makes operation ids.
        now: seconds of the loop's clock, for the window.
        wall_time: seconds since the epoch, for people.
        emit: takes claims.
    """

    def __init__(
        self,
        config: ScalingConfig,
        *,
        new_id: Callable[[str], str],
        now: Callable[[], float],
        wall_time: Callable[[], float],
        emit: Callable[..., None],
    ) -> None:
        self._config = config
        self._new_id = new_id
        self._now = now
        self._wall_time = wall_time
        self._emit = emit
        self._operations: dict[str, Operation] = {}
        self._unresolved: dict[str, str] = {}  # model -> operation
        self._resolved: OrderedDict[str, None] = OrderedDict()  # in the order of their last change
        self._keys: KeyTable[_Key] = KeyTable(
            config.max_idempotency_records, lambda record: self._expired(record), lambda record: self._held(record)
        )
        self.history_truncated = 0
        """Operations evicted so far."""

    # --- submission ---

    def submit(
        self,
        direction: Direction,
        model: str,
        target: object,
        *,
        timeout_s: float | None,
        key: str | None,
        capacity: Capacity,
        protected: int,
    ) -> Decision:
        """Decide on a request for ``target`` replicas in all (scaling.md 1.3, steps 3 to 8).

        Args:
            target: anything; only an ``int`` that is no ``bool`` passes.
            timeout_s: budget of the whole operation; None: the default.
            key: idempotency key, or None.
            capacity: authoritative, just asked for.
            protected: initial replicas, below which nobody may go.
        """
        decision = self._decide(direction, model, target, timeout_s, key, capacity, protected)
        self._emit(
            "scale.decision",
            direction=direction,
            model=model,
            target=target if type(target) is int else None,
            key=key,
            result=_result(decision),
            operation=decision.request_id or "",
            current=capacity.current,
            ready=capacity.ready,
        )
        return decision

    def _decide(
        self,
        direction: Direction,
        model: str,
        target: object,
        timeout_s: float | None,
        key: str | None,
        capacity: Capacity,
        protected: int,
    ) -> Decision:
        if type(target) is not int:
            return _refused("INVALID_TYPE", f"num_replicas must be an integer, not {type(target).__name__}", capacity)
        if target < protected or target < 1:
            return _refused(
                "INVALID_RANGE", f"num_replicas {target} is below the {protected} initial replicas; send more", capacity
            )
        fingerprint = (model, target, timeout_s)
        if key is not None:
            replay = self._replay(direction, key, fingerprint, capacity)
            if replay is not None:
                return replay
        busy = self._unresolved.get(model)
        if busy is not None:
            other = self._operations[busy]
            what = f"{other.direction} {busy} is {other.status}"
            if other.terminal:
                what += " and its cleanup is pending; reconcile it first"
            return _refused("CONFLICT", what, capacity)
        if (target <= capacity.current) if direction == "scale_out" else (target >= capacity.current):
            decision = Decision(
                "", "NOOP", None, capacity.current, capacity.ready, f"{capacity.current} replicas already"
            )
            if key is not None:
                self._remember(direction, key, _Key(fingerprint, self._now(), None, decision))
            return decision
        return self._admit(direction, model, target, timeout_s, key, capacity)

    def _admit(
        self,
        direction: Direction,
        model: str,
        target: int,
        timeout_s: float | None,
        key: str | None,
        capacity: Capacity,
    ) -> Decision:
        wall = self._wall_time()
        operation = Operation(
            self._new_id("genrm-scale"),
            direction,
            model,
            target,
            timeout_s,
            key,
            capacity.current,
            capacity.ready,
            self._now(),
            wall,
            wall,
        )
        self._operations[operation.request_id] = operation
        self._unresolved[model] = operation.request_id
        if key is not None:
            fingerprint = (model, target, timeout_s)
            self._remember(direction, key, _Key(fingerprint, operation.created_s, operation.request_id, None))
        self._state(operation)
        return Decision("", "PENDING", operation.request_id, capacity.current, capacity.ready, "admitted", created=True)

    def _replay(
        self, direction: Direction, key: str, fingerprint: tuple[str, int, float | None], capacity: Capacity
    ) -> Decision | None:
        """The answer that the key has given before, or None when it is as good as new."""
        self._keys.expire()
        record = self._keys.get((direction, key))
        if record is None or self._expired(record):
            return None
        if record.fingerprint != fingerprint:
            return _refused(
                "IDEMPOTENCY_CONFLICT", f"key {key!r} was used for another request; use a new key", capacity
            )
        if record.no_op is not None:
            return record.no_op
        assert record.request_id is not None
        operation = self._operations[record.request_id]  # a key leaves with its operation
        current, ready = self._shown(operation)
        return Decision("", operation.status, operation.request_id, current, ready, "replayed")

    # --- looking up ---

    def get(self, direction: Direction, request_id: str) -> Operation | None:
        """The operation, or None: unknown, evicted, or of the other direction."""
        operation = self._operations.get(request_id)
        return operation if operation is not None and operation.direction == direction else None

    def unresolved(self, model: str) -> Operation | None:
        """The operation that excludes all others of a model."""
        request_id = self._unresolved.get(model)
        return None if request_id is None else self._operations[request_id]

    @property
    def sizes(self) -> tuple[int, int]:
        """Operations and keys held."""
        return len(self._operations), len(self._keys)

    def _shown(self, operation: Operation) -> tuple[int, int]:
        if operation.current is None or operation.ready is None:
            return operation.observed_current, operation.observed_ready
        return operation.current, operation.ready

    # --- states ---

    def advance(self, operation: Operation, state: State) -> None:
        """Go forward to ``state``, through what lies between.

        Raises:
            IllegalTransition: backwards, out of a terminal state, or to one (that is for :meth:`finish`).
        """
        chain = CHAIN[operation.direction]
        if operation.terminal or state in TERMINAL[operation.direction] or state not in chain:
            raise IllegalTransition(f"{operation.request_id} is {operation.status}; it cannot become {state}")
        behind, ahead = chain.index(operation.status), chain.index(state)
        if ahead <= behind:
            raise IllegalTransition(f"{operation.request_id} is {operation.status}; it cannot go back to {state}")
        for step in chain[behind + 1 : ahead + 1]:
            operation.status = step
            operation.updated_at = self._wall_time()
            self._state(operation)

    def finish(
        self,
        operation: Operation,
        state: State,
        progress: Progress | None,
        *,
        cleanup_required: bool | None = None,
        error: str = "",
    ) -> None:
        """Set the terminal state, once.

        Args:
            progress: the last that was heard of the manager. Without any, capacity is what it was at the submission
                (it is never made up), and the cleanup is pending: nothing says that it is not. One that says all but
                that comes of a manager from before there was such a flag, and is clean (M22).
            cleanup_required: overrides what follows from ``progress``.

        Raises:
            IllegalTransition: not a terminal state, or it has one already.
        """
        if operation.terminal or state not in TERMINAL[operation.direction]:
            raise IllegalTransition(f"{operation.request_id} is {operation.status}; it cannot end as {state}")
        if progress is None:
            operation.current, operation.ready = operation.observed_current, operation.observed_ready
        else:
            operation.current, operation.ready = progress.current, progress.ready
            operation.created, operation.removed = progress.created, progress.removed
            operation.failed = progress.failed
            operation.called_off = operation.called_off or progress.physical_done is True
            error = error or progress.error
        if cleanup_required is None:
            cleanup_required = progress is None or progress.cleanup_required is True
        operation.status = state
        operation.cleanup_required = cleanup_required
        operation.error_message = error
        operation.updated_at = self._wall_time()
        self._emit(
            "scale.terminal",
            operation=operation.request_id,
            direction=operation.direction,
            state=state,
            current=operation.current,
            ready=operation.ready,
            created=operation.created,
            removed=operation.removed,
            failed=operation.failed,
            cleanup_required=cleanup_required,
            error=error,
        )
        self._settle(operation)

    def cleaned(self, operation: Operation, detail: str) -> None:
        """The cleanup of a terminal operation is confirmed: the flag drops, the state stays. Else IllegalTransition."""
        if not operation.terminal:
            raise IllegalTransition(f"{operation.request_id} is {operation.status}; only a terminal one is cleaned up")
        operation.cleanup_required = False
        operation.detail = detail
        operation.updated_at = self._wall_time()
        self._settle(operation)

    def _state(self, operation: Operation) -> None:
        self._emit(
            "scale.state",
            operation=operation.request_id,
            direction=operation.direction,
            state=operation.status,
            model=operation.model_name,
        )

    # --- a restart ---

    def kept(self) -> dict[str, Any]:
        """Everything as a journal takes it. Times are of the epoch there, for a loop's clock begins anew."""
        to_epoch = self._wall_time() - self._now()
        keys = [
            [
                *name,
                list(record.fingerprint),
                round(record.created_s + to_epoch, 3),
                record.request_id,
                None if record.no_op is None else dataclasses.astuple(record.no_op),
            ]
            for name, record in self._keys.items()
        ]
        operations = [[getattr(one, name) for name in _KEPT] for one in self._operations.values()]
        return {"operations": operations, "resolved": list(self._resolved), "keys": keys}

    def restore(self, kept: dict[str, Any]) -> list[Operation]:
        """Be what :meth:`kept` has given; returns the operations that are not terminal."""
        to_loop = self._now() - self._wall_time()
        for values in kept["operations"]:
            given = dict(zip(_KEPT, values, strict=True))
            operation = Operation(**given, created_s=given["created_at"] + to_loop)
            self._operations[operation.request_id] = operation
            if not operation.resolved:
                self._unresolved[operation.model_name] = operation.request_id
        self._resolved.update(dict.fromkeys(kept["resolved"]))
        for direction, key, (model, target, timeout_s), created, request_id, no_op in kept["keys"]:
            decision = None if no_op is None else Decision(*no_op)
            record = _Key((model, target, timeout_s), created + to_loop, request_id, decision)
            self._keys[direction, key] = record
        return [operation for operation in self._operations.values() if not operation.terminal]

    # --- bounds ---

    def _settle(self, operation: Operation) -> None:
        if not operation.resolved:
            return
        if self._unresolved.get(operation.model_name) == operation.request_id:
            del self._unresolved[operation.model_name]
        self._resolved[operation.request_id] = None
        self._resolved.move_to_end(operation.request_id)
        while len(self._resolved) > self._config.max_history:
            oldest, _ = self._resolved.popitem(last=False)
            gone = self._operations.pop(oldest)
            self.history_truncated += 1
            key = gone.idempotency_key
            # The key may have expired and been used again since; then it is that other operation's.
            if key is not None and self._keys_operation(gone.direction, key) == oldest:
                del self._keys[gone.direction, key]

    def _keys_operation(self, direction: Direction, key: str) -> str | None:
        record = self._keys.get((direction, key))
        return None if record is None else record.request_id

    def _remember(self, direction: Direction, key: str, record: _Key) -> None:
        self._keys.remember(direction, key, record)

    def _expired(self, record: _Key) -> bool:
        return self._now() - record.created_s >= self._config.idempotency_window_s

    def _held(self, record: _Key) -> bool:
        """Whether the key's operation is unresolved: neither of them is ever evicted."""
        return record.request_id is not None and not self._operations[record.request_id].resolved


def _refused(code: Code, detail: str, capacity: Capacity) -> Decision:
    status = "REJECTED" if code.startswith("INVALID") else code
    return Decision(code, status, None, capacity.current, capacity.ready, detail)


def _result(decision: Decision) -> str:
    """The word for it in evidence."""
    if decision.code:
        return decision.code
    if decision.created:
        return "ADMITTED"
    return "NOOP" if decision.request_id is None else "REPLAY"
