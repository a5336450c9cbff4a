"""One call of the model of a scaled service: POST /generate of its control API, through its gateway.

Source: scaling.md 1.1: an optional ``route_key``, and an answer that says which replica gave it. It is sampled as the
judge's contract says (scaling.md 8), by the code of `protocol.serving.judge`: defaults merged, then a seed that follows
from the content; what no seed repeats is refused.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import ValidationError

from protocol.config import JudgeConfig
from protocol.errors import HttpError, Outcome, SeatrialError
from protocol.messages import ForwardReply, ForwardRequest
from protocol.ports import ActorHandle, backend
from protocol.scaling.bodies import ApiReply, ErrorBody, GenerateBody, GeneratedBody, SamplingBody
from protocol.serving.determinism import check_sampling, effective, request_seed
from protocol.serving.http import status_of
from protocol.serving.http_routes import HttpErrorBody

_OURS = ("model_name", "route_key", "stream")


def asked_of(given: Any) -> GenerateBody | ApiReply:
    """The checked body of a call, or the refusal of it (422)."""
    try:
        return GenerateBody.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _error(422, "INVALID_BODY", f"{where}: {first['msg']}" if where else first["msg"])


async def generate(gateway: ActorHandle, asked: GenerateBody, config: JudgeConfig) -> ApiReply:
    """Forward one call. 200; a 4xx of the replica as UPSTREAM_REFUSED; 502, 503 or 504 when it failed.

    A failed call says whether it may have been done: ``outcome`` is ``unknown`` or ``not_done``.

    Args:
        gateway: handle of the Gateway.
        asked: the call.
        config: the instance's own sampling, and the model that seeds are made for.
    """
    try:
        sampling = _sampling_params(asked, config)
    except HttpError as error:
        return _error(int(error.fields["status"]), "INVALID_SAMPLING", str(error.fields["body"]))
    rid = asked.rid or backend().new_id("judge")
    body = {name: value for name, value in asked.model_dump(exclude_none=True).items() if name not in _OURS}
    body["sampling_params"] = sampling
    call = ForwardRequest(rid, "/generate", json.dumps({**body, "rid": rid}), route_key=asked.route_key or "")
    try:
        reply: ForwardReply = await gateway.forward(call)
    except HttpError as error:
        status = int(error.fields["status"])
        if status < 500 and error.outcome is Outcome.NOT_DONE:
            return _error(status, "UPSTREAM_REFUSED", str(error.fields["body"])[:2000])
        return _failed(error)
    except SeatrialError as error:
        return _failed(error)
    return _shown(reply)


def _sampling_params(asked: GenerateBody, config: JudgeConfig) -> dict[str, Any]:
    """What is sent as ``sampling_params``. Raises HttpError, 400, for sampling that nothing can repeat."""
    given = (asked.sampling_params or SamplingBody()).model_dump(exclude_none=True)
    sampling = effective(config, given)
    check_sampling(sampling, given.get("min_p", 0.0))
    more = {name: value for name, value in given.items() if name not in (*sampling.as_sent(), "sampling_seed")}
    prompt = asked.text if asked.input_ids is None else asked.input_ids
    assert prompt is not None  # one of the two is there
    seed = request_seed(config.model_path, prompt, sampling, given.get("sampling_seed"), more)
    return {**more, **sampling.as_sent(seed)}


def _shown(reply: ForwardReply) -> ApiReply:
    try:
        answer = json.loads(reply.body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return _lost(502, "UPSTREAM_ODD", "the replica's answer is no object", Outcome.UNKNOWN)
    found = answer.get("meta_info")
    meta = found if isinstance(found, dict) else {}
    reason, tokens, text = meta.get("finish_reason"), meta.get("completion_tokens"), answer.get("text")
    if isinstance(reason, dict):
        reason = reason.get("type")
    body = GeneratedBody(
        engine_host=reply.host,
        engine_port=reply.port,
        finish_reason=reason if isinstance(reason, str) else None,
        completion_tokens=tokens if type(tokens) is int else None,
        text=text if isinstance(text, str) else None,
        answer=answer,
    )
    return ApiReply(200, dataclasses.asdict(body))


def _failed(error: SeatrialError) -> ApiReply:
    status = status_of(error)
    code = {503: "UNAVAILABLE", 504: "TIMEOUT"}.get(status, "OUTCOME_UNKNOWN")
    return _lost(status, code, error.message, error.outcome)


def _lost(status: int, code: str, detail: str, outcome: Outcome) -> ApiReply:
    return ApiReply(status, dataclasses.asdict(HttpErrorBody(code, detail, outcome.value)))


def _error(status: int, code: str, detail: str) -> ApiReply:
    return ApiReply(status, dataclasses.asdict(ErrorBody(code, detail)))
