"""The operator of a scaled service: calls its control API, follows operations to their end, and records what it sees.

An ordinary client at the edge, so that verdicts need not believe what components say of themselves. It runs in the
driver, in either world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from protocol.config import RolloutScalingConfig, ScalingConfig
from protocol.errors import HttpError, SeatrialError
from protocol.evidence import observer
from protocol.ports import ActorHandle, PlacementState, backend
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import TERMINAL, Direction
from protocol.serving.peer import Peer
from scenarios.faults import ReconcileParams, ScaleInParams, ScaleParams, SyncWeightsParams

_DEFAULTS = ScalingConfig()

_ANSWER_S = 30.0  # longer than the API waits for its manager
_RECONCILE_S = 150.0
_AFTER_DEADLINE_S = 180.0  # an operation may take that much longer than its budget to end
_REMOVED_S = 10.0


@observer
class ScaleOperator:
    """One operator of one service.

    Args:
        service: its name in the scenario.
        api: handle of its ScaleApi.
        manager: handle of its ScaleManager, which is asked only what to take down.
        initial: names of the replicas that it was deployed with.
        default_timeout_s: budget of an operation that names none.
    """

    def __init__(
        self, service: str, api: ActorHandle, manager: ActorHandle, initial: tuple[str, ...], default_timeout_s: float
    ) -> None:
        self._service = service
        self._api = Peer(api, _ANSWER_S)
        self._slow = Peer(api, _RECONCILE_S)
        self._manager = Peer(manager, _ANSWER_S)
        self._initial = initial
        self._default_timeout_s = default_timeout_s
        self._latest: dict[Direction, str] = {}
        self._admitted: dict[str, Direction] = {}

    def take_over(self, operations: Mapping[str, Direction]) -> None:
        """Ask in the end for what somebody else had asked for, and has no more follow."""
        self._admitted |= operations

    # --- verbs ---

    async def scale(self, direction: Direction, params: ScaleParams) -> None:
        """Submit a target, and poll what was admitted until it is terminal and clean.

        An answer that was lost is asked for again only where a key makes that harmless.
        """
        written = {"text": str(params.num_replicas), "float": float(params.num_replicas), "boolean": True}
        body: dict[str, Any] = {"num_replicas": written.get(params.sent_as, params.num_replicas)}
        if params.timeout_s is not None:
            body["timeout_secs"] = params.timeout_s
        if params.idempotency_key is not None:
            body["idempotency_key"] = params.idempotency_key
        if isinstance(params, ScaleInParams):
            body |= {name: True for name in ("force", "evict") if getattr(params, name)}
        reply = await self._submit(direction, body, params)
        operation = None if reply is None or reply.status != 200 else reply.body.get("request_id")
        if not isinstance(operation, str):
            return
        self._latest[direction] = operation
        self._admitted[operation] = direction
        budget_s = self._default_timeout_s if params.timeout_s is None else params.timeout_s
        ends = _now() + budget_s + _AFTER_DEADLINE_S
        while _now() < ends:
            reply = await self._ask("status", direction, operation)
            if reply is not None and (reply.status == 404 or is_over(direction, reply.body)):
                return
            await asyncio.sleep(params.poll_s)

    async def _submit(self, direction: Direction, body: dict[str, Any], params: ScaleParams) -> ApiReply | None:
        attempts = params.attempts if params.idempotency_key is not None else 1
        for _ in range(attempts):
            reply = await self._ask(direction, direction, "", body)
            if reply is not None and reply.status != 503:
                return reply
            await asyncio.sleep(params.poll_s)
        return None

    async def reconcile(self, params: ReconcileParams) -> None:
        """Have the latest operation of a direction cleaned up: again and again until it is clean, or the time is up."""
        operation = self._latest.get(params.direction)
        ends = _now() + params.within_s
        while operation is not None and _now() < ends:
            reply = await self._ask("reconcile", params.direction, operation)
            if reply is not None and reply.status == 200 and is_over(params.direction, reply.body):
                break
            await asyncio.sleep(params.every_s)
        if operation is not None:
            await self._ask("status", params.direction, operation)

    async def cancel(self) -> None:
        """Have the latest scale-out cancelled, once."""
        operation = self._latest.get("scale_out")
        if operation is not None:
            await self._ask("cancel", "scale_out", operation)

    async def sync_weights(self, path: str, params: SyncWeightsParams) -> None:
        """Have the API load an export everywhere, and record what it says; a refusal leads to another try."""
        for attempt in range(params.attempts):
            if attempt:
                await asyncio.sleep(params.retry_s)
            reply: ApiReply | None = await self._quietly(self._slow, "update_weights", path)
            status = 0 if reply is None else reply.status
            code = "" if reply is None else str(reply.body.get("error", ""))
            backend().emit(
                "weights.synced", service=self._service, version=params.version, status=status, code=code
            )  # fmt: skip
            if status != 409:
                return

    # --- what is seen ---

    def deployed_with(self, config: ScalingConfig | RolloutScalingConfig) -> None:
        """Record the bounds of what its API keeps and of how long it takes, where they are not the usual ones."""
        kept = (config.max_history, config.max_idempotency_records)
        if kept != (_DEFAULTS.max_history, _DEFAULTS.max_idempotency_records):
            backend().emit("scale.bounds", service=self._service, max_history=kept[0], max_keys=kept[1])
        if config.idempotency_window_s != _DEFAULTS.idempotency_window_s:
            backend().emit("scale.window", service=self._service, window_s=config.idempotency_window_s)
        if isinstance(config, RolloutScalingConfig):
            return  # its drains take as long as they take
        budget_s, wait_s = config.timeout_s, config.completion_wait_s
        if budget_s != _DEFAULTS.timeout_s or wait_s > _DEFAULTS.completion_wait_s:
            backend().emit("scale.budget", service=self._service, budget_s=budget_s, wait_s=wait_s)

    async def snapshot(self, when: str) -> None:
        """Record what there is of the service: ``deployed`` or ``final``. Then every operation is asked for again."""
        if when == "final":
            for operation, direction in self._admitted.items():
                await self._ask("status", direction, operation)
        reply = await self._quietly(self._api, "engines")
        routed = await self._quietly(self._api, "routable")
        body = {} if reply is None else reply.body
        table = await backend().placement_groups.table()
        backend().emit(
            "scale.snapshot",
            service=self._service,
            when=when,
            initial=list(self._initial),
            routable=[] if routed is None else list(routed),
            current=count_in(body, "current"),
            ready=count_in(body, "ready"),
            occupied=count_in(body, "occupied"),
            pending_cleanup=count_in(body, "pending_cleanup"),
            groups=groups_left(table),
        )

    async def take_down(self) -> None:
        """End what was scaled out, and have its placement groups removed. What nobody owns stays, and is a leak."""
        port = backend()
        owned = await self._quietly(self._manager, "owned") or ()
        for replica, group in owned:
            await port.engines.terminate(replica)
            await port.placement_groups.remove(group)
        ends = _now() + _REMOVED_S
        while owned and _now() < ends:
            table = await port.placement_groups.table()
            if all(table.get(group) == "REMOVED" for _, group in owned):
                return
            await asyncio.sleep(0.05)

    # --- calls ---

    async def _ask(
        self, route: str, direction: Direction, operation: str, body: dict[str, Any] | None = None
    ) -> ApiReply | None:
        """One call, recorded on both sides; None when there was no answer."""
        given = body or {}
        ask = record_asked(self._service, route, direction, operation, given)
        peer = self._slow if route == "reconcile" else self._api
        arguments: tuple[Any, ...] = (given,) if route in TERMINAL else (direction, operation)
        reply = await self._quietly(peer, "call_off" if route == "cancel" else route, *arguments)
        record_answered(ask, route, reply)
        return reply

    async def _quietly(self, peer: Peer, method: str, *arguments: Any) -> Any:
        """None when nothing came back, which evidence shows; a component of the user's own may lack the method."""
        try:
            return await peer.call(method, *arguments)
        except HttpError as error:
            return ApiReply(int(error.fields["status"]), {"error": "HTTP", "detail": str(error)})
        except (SeatrialError, AttributeError):
            return None


def groups_left(table: Mapping[str, PlacementState]) -> int:
    """Placement groups that hold something: the table keeps those that are REMOVED (tombstones; scaling.md 3)."""
    return sum(state != "REMOVED" for state in table.values())


def is_over(direction: Direction, answer: dict[str, Any]) -> bool:
    """Whether an answer says that its operation is terminal and clean."""
    return answer.get("status") in (*TERMINAL[direction], "CANCELLED") and answer.get("cleanup_required") is False


def record_asked(service: str, route: str, direction: Direction, operation: str, body: Mapping[str, Any]) -> str:
    """Record a question to a control API, before it leaves; returns its id."""
    port = backend()
    ask = port.new_id("ask")
    port.emit(
        "scale.asked",
        ask=ask,
        service=service,
        route=route,
        direction=direction,
        operation=operation,
        target=count_in(body, "num_replicas"),
        key=body.get("idempotency_key"),
        timeout_s=body.get("timeout_secs"),
    )
    named = body.get("engine_urls")
    if isinstance(named, list):
        port.emit("scale.connects", ask=ask, engines=len(named))
    return ask


def record_answered(ask: str, route: str, reply: ApiReply | None) -> None:
    """Record what came of a question; None: no answer."""
    answer = {} if reply is None else reply.body
    backend().emit(
        "scale.answered",
        ask=ask,
        status=0 if reply is None else reply.status,
        code=str(answer.get("error", "")),
        operation=str(answer.get("request_id") or ""),
        state=str(answer.get("status", "")),
        cleanup=cleanup_in(answer) if route in ("status", "reconcile", "cancel") else "unknown",
        current=count_in(answer, "current"),
        ready=count_in(answer, "ready"),
    )


def cleanup_in(answer: Mapping[str, Any]) -> str:
    """The three-state reading of scaling.md 2.6."""
    flag = answer.get("cleanup_required")
    return ("true" if flag else "false") if isinstance(flag, bool) else "unknown"


def count_in(answer: Mapping[str, Any], name: str) -> int | None:
    """A count as the API gives it; None where it gives none."""
    value = answer.get(name)
    return value if type(value) is int else None


def _now() -> float:
    return asyncio.get_running_loop().time()
