"""What every agent does at its service: sends a turn and records what it sees, and retires a session in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.errors import ActorDied, ReadTimeout, SeatrialError
from protocol.messages import GenerateRequest
from protocol.ports import ActorHandle, backend
from protocol.serving.entrypoint import TurnResult
from scenarios.client import record_answer, record_error, record_gave_up

_RETIRE_S = 30.0


async def send_turn(
    emit: Callable[..., None], router: ActorHandle, request: GenerateRequest, service: str, turn: int, patience_s: float
) -> TurnResult | None:
    """Send a turn and wait for its answer; None: it failed, or the agent's patience ended.

    Args:
        emit: of the agent, an observer.
        router: handle of the SessionAffinityRouter.
        request: with the session's id and its prompt.
        service: its name in the scenario.
        turn: number in the session, from 0.
        patience_s: longest wait.
    """
    name, session = request.request_id, request.session_id
    emit("turn.sent", request=name, session=session, service=service, turn=turn)
    emit(
        "request.sent",
        request=name,
        prompt_tokens=request.prompt_tokens,
        max_new_tokens=request.max_new_tokens,
        idempotent=request.idempotent,
    )
    try:
        async with asyncio.timeout(patience_s):
            answer: TurnResult = await router.handle(request)
    except SeatrialError as error:
        record_error(emit, name, error, attempts=1)
        return None
    except TimeoutError:
        record_gave_up(emit, name)
        return None
    result = answer.result
    emit(
        "turn.done",
        request=name,
        session=session,
        model_step=answer.model_step,
        lease=result.request_id,
        entrypoint=answer.entrypoint,
        finish_reason=result.finish_reason,
    )
    record_answer(emit, name, result)
    return answer


async def retire(controller: ActorHandle, session: str) -> bool:
    """Tell the RolloutController that an episode is over, whatever became of it (A-I6); whether it acknowledged.

    Which does no harm twice: it is told again where a message was lost, and so is whoever came after it.
    """
    try:
        async with asyncio.timeout(_RETIRE_S):
            while True:
                try:
                    await controller.retire_route_sessions((session,))
                    return True
                except ActorDied:
                    controller = await backend().lookup(controller.name)
                except ReadTimeout:
                    continue
    except (SeatrialError, TimeoutError):
        return False
