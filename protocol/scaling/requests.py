"""The life cycle of an autoscaler's requests: placeholder, submission, adoption, status, cleanup, history.

Source: scaling.md 6.5. Three answers that look alike are kept apart here:

- A submission whose outcome is *unknown* may have been accepted: its placeholder stays and it is sent again under the
  same key, which makes that harmless. One that was refused has left nothing behind: its placeholder is dropped.
- An accepted submission has one way into the books, whichever attempt it was accepted at (M18), and whatever state a
  replay shows: that is never proof of cleanliness (M17).
- A terminal operation is over only when the service says ``cleanup_required: false``. ``true`` and no answer at all
  are both not clean (M16, M19), and a reconcile of that same operation is asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Literal

from protocol.errors import Outcome, SeatrialError
from protocol.ports import backend
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Direction
from protocol.scaling.decision import Choice, Streak
from protocol.scaling.metrics import Frame
from protocol.scaling.targets import ServiceTarget

TERMINAL: Final[dict[Direction, tuple[str, ...]]] = {
    "scale_out": ("ACTIVE", "PARTIAL", "FAILED", "CANCELLED"),
    "scale_in": ("COMPLETED", "FAILED"),
}
SUBMITTING: Final = "SUBMITTING"
KEPT_HISTORY: Final = 1000
_ATTEMPTS = 2  # of one submission, before the next evaluation takes it up again
_NOT_SHOWN = ("key", "target", "timeout_s", "cleanup", "uncertain")
Cleanup = Literal["true", "false", "unknown"]


@dataclasses.dataclass(slots=True)
class ScaleRequest:
    """One request. The fields of a history item (scaling.md 6.6), and what it takes to follow it."""

    key: str
    action: Direction
    delta: int
    from_engines: int
    to_engines: int
    reason: str
    triggered_conditions: list[str]
    metrics_snapshot: dict[str, Any]
    triggered_at: float
    target: ServiceTarget
    """Where it was sent: the service may have moved since."""
    timeout_s: float | None = None
    """Budget that it was sent with. The configuration may say another one since, but a key stands for one request: with
    another body it would be a conflict, and the operation that was accepted under it would be nobody's."""
    status: str = SUBMITTING
    request_id: str | None = None
    cleanup: Cleanup = "unknown"
    uncertain: bool = False
    """A submission of it was sent, and nobody knows whether it was accepted."""
    completed_at: float | None = None
    error_message: str | None = None
    failure_categories: list[str] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """Its operation, or its key before there is one."""
        return self.request_id or self.key

    @property
    def resolved(self) -> bool:
        """Terminal, and known to be clean."""
        return self.status in TERMINAL[self.action] and self.cleanup == "false"

    def item(self) -> dict[str, Any]:
        """As in the history."""
        shown = dataclasses.asdict(dataclasses.replace(self, target=None))  # type: ignore[arg-type]  # not shown
        return {name: value for name, value in shown.items() if name not in _NOT_SHOWN}


@dataclasses.dataclass(slots=True)
class ServiceState:
    """What is known of a service beyond one evaluation; outlives a change of configuration (M35)."""

    pending: list[ScaleRequest] = dataclasses.field(default_factory=list)
    history: deque[ScaleRequest] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT_HISTORY))
    """Oldest first."""
    streaks: dict[str, Streak] = dataclasses.field(default_factory=dict)
    last_action: Direction | None = None
    last_action_s: float = 0.0
    """Of the loop's clock; for the cooldown, which begins when a request is accepted."""
    last_action_at: float | None = None
    """Seconds since the epoch; for people."""
    last_choice: Choice | None = None
    last_error: str = ""
    accepted: int = 0
    seen_frame_s: float | None = None
    changed_s: float = float("-inf")
    """When an operation was last found to be over: what was observed before shows another number of replicas."""
    busy: bool = False
    """An evaluation is under way."""

    def open_request(self) -> ScaleRequest | None:
        """A request that is not terminal, or not known to be clean."""
        return next((request for request in self.pending if not request.resolved), None)


class ScaleRequests:
    """Sends and follows the requests of one service.

    Args:
        service: its name.
        state: where they are kept.
    """

    def __init__(self, service: str, state: ServiceState) -> None:
        self._service = service
        self._state = state

    async def submit(
        self, choice: Choice, frame: Frame, current: int, target: ServiceTarget, timeout_s: float | None
    ) -> None:
        """Ask for what was decided. The placeholder is there before anything is sent (M35).

        Args:
            choice: not ``none``.
            frame: that it was decided on.
            current: replicas that it was decided on.
            target: the service.
            timeout_s: budget of the operation; None: the service's default.
        """
        assert choice.action != "none"
        port = backend()
        request = ScaleRequest(
            key=port.new_id(f"autoscale-{self._service}"),
            action=choice.action,
            delta=choice.delta,
            from_engines=current,
            to_engines=current + choice.delta if choice.action == "scale_out" else current - choice.delta,
            reason=choice.reason,
            triggered_conditions=list(choice.triggered),
            metrics_snapshot=frame.snapshot(),
            triggered_at=port.wall_time(),
            target=target,
            timeout_s=timeout_s,
        )
        self._state.pending.append(request)
        self._emit(request, "submitting")
        await self._send(request)

    async def follow(self) -> None:
        """Look after every open request: send again what may not have arrived, ask for the state of the rest."""
        for request in tuple(self._state.pending):
            if request.status == SUBMITTING:
                await self._send(request)
            else:
                await self._look(request)

    # --- submission ---

    async def _send(self, request: ScaleRequest) -> None:
        body: dict[str, Any] = {"num_replicas": request.to_engines, "idempotency_key": request.key}
        if request.timeout_s is not None and request.action == "scale_out":
            body["timeout_secs"] = request.timeout_s
        for _ in range(_ATTEMPTS):
            try:
                reply = await request.target.submit(request.action, body)
            except SeatrialError as error:
                request.error_message = error.message
                if error.outcome is not Outcome.NOT_DONE:
                    self._doubt(request)
                continue
            self._answered(request, reply)
            return
        if not request.uncertain:
            self._close(request, "REJECTED", request.error_message)

    def _answered(self, request: ScaleRequest, reply: ApiReply) -> None:
        status, operation = reply.body.get("status"), reply.body.get("request_id")
        if reply.status == 200 and isinstance(operation, str):
            self._adopt(request, operation)
        elif reply.status == 200 and status == "NOOP":
            self._close(request, "NOOP", None)
        elif 400 <= reply.status < 500 or (reply.status == 503 and not request.uncertain):
            # Refused before any effect. A 503 comes before the look at the key (1.3): it says nothing of an attempt
            # before this one, whereas a refusal with 4xx does.
            refused = "CONFLICT" if reply.status == 409 else "REJECTED"
            self._close(request, refused, str(reply.body.get("detail", reply.body.get("error", ""))))
        else:
            request.error_message = f"HTTP {reply.status}"
            self._doubt(request)

    def _doubt(self, request: ScaleRequest) -> None:
        request.uncertain = True
        self._emit(request, "unknown")

    def _adopt(self, request: ScaleRequest, operation: str) -> None:
        """The one way of an accepted request into the books. The state in the answer is not looked at."""
        state = self._state
        request.request_id = operation
        request.status = "PENDING"
        request.cleanup = "unknown"
        request.uncertain = False
        request.error_message = None
        state.last_action = request.action
        state.last_action_s = asyncio.get_running_loop().time()
        state.last_action_at = backend().wall_time()
        state.accepted += 1
        self._emit(request, "accepted")

    # --- afterwards ---

    async def _look(self, request: ScaleRequest) -> None:
        assert request.request_id is not None
        try:
            reply = await request.target.status(request.action, request.request_id)
        except SeatrialError:
            return  # asked again at the next evaluation
        if reply.status == 404:
            # Accepted and not known any more: its state is lost, which is neither success nor a reason to wait (M54).
            self._close(request, "ERROR", "the service does not know this operation any more")
            return
        self._take(request, reply)
        if request.status in TERMINAL[request.action] and not request.resolved:
            self._emit(request, "not_clean")
            try:
                reply = await request.target.reconcile(request.action, request.request_id)
            except SeatrialError:
                return
            self._take(request, reply)
        if request.resolved:
            self._close(request, request.status, request.error_message)

    def _take(self, request: ScaleRequest, reply: ApiReply) -> None:
        """Believe a status or a reconcile; nothing else says anything of the cleanup."""
        body: Mapping[str, Any] = reply.body
        if reply.status != 200 or not isinstance(body.get("status"), str):
            return
        request.status = body["status"]
        flag = body.get("cleanup_required")
        request.cleanup = ("true" if flag else "false") if isinstance(flag, bool) else "unknown"
        if body.get("error_message"):
            request.error_message = str(body["error_message"])
        categories = body.get("failure_categories")
        if isinstance(categories, list):
            request.failure_categories = [str(one) for one in categories]

    def _close(self, request: ScaleRequest, status: str, error: str | None) -> None:
        request.status = status
        request.error_message = error
        request.completed_at = backend().wall_time()
        self._state.pending.remove(request)
        if request.request_id is not None:
            self._state.changed_s = asyncio.get_running_loop().time()
        self._state.history.append(request)
        self._emit(request, "closed")

    def _emit(self, request: ScaleRequest, what: str) -> None:
        backend().emit(
            "autoscaler.request",
            service=self._service,
            key=request.key,
            action=request.action,
            target=request.to_engines,
            operation=request.request_id or "",
            state=request.status,
            cleanup=request.cleanup,
            what=what,
        )
