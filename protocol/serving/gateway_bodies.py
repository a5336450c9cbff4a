"""Bodies of the gateway's HTTP API, and its routes as data (docs/api.md, `protocol.openapi`)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from protocol.serving.gateway import ReplicaView
from protocol.serving.http_routes import Route


class ForwardedBody(BaseModel):
    """A JSON object as SGLang or OpenAI's clients send it. It is handed on as it is; these fields are looked at."""

    model_config = ConfigDict(extra="allow")

    stream: StrictBool | None = None
    """true: server-sent events."""
    rid: Annotated[str, Field(min_length=1, max_length=200)] | list[str] | None = None
    """Id of the request; a list where several completions are asked for. Without it, it gets one."""


@dataclasses.dataclass
class AliveBody:
    """Answer to GET /health: the gateway answers."""

    status: str


@dataclasses.dataclass
class ReadyBody:
    """Answer to GET /ready: how many replicas are routable, one at least."""

    status: str
    routable: int


@dataclasses.dataclass
class ReplicasBody:
    """Answer to GET /engines."""

    engines: list[ReplicaView]


@dataclasses.dataclass
class GatewayError:
    """``outcome``: ``not_done`` (ask again) or ``unknown`` (it may have been done). ``attempts``: sends to replicas."""

    message: str
    type: str
    code: int
    outcome: str
    attempts: int | None = None
    upstream_status: int | None = None


@dataclasses.dataclass
class GatewayErrorBody:
    """What the gateway answers when it fails or refuses; a replica's own 4xx comes as the replica wrote it."""

    error: GatewayError


GATEWAY_ERRORS: Final[dict[int, tuple[str, ...]]] = {
    400: ("invalid_request_error",),
    401: ("authentication_error",),
    404: ("not_found",),
    405: ("method_not_allowed",),
    408: ("request_timeout",),
    413: ("request_too_large",),
    500: (),
    501: ("not_implemented",),
    502: (),
    503: ("NoReplica",),
    504: ("ReadTimeout",),
}
"""Status to values of ``type``; none listed: the name of the error, whatever it is."""

_SAYS = "It goes to a replica as it is, and is retried on another one where that is harmless."

GATEWAY_ROUTES: Final[tuple[Route, ...]] = (
    Route("POST", "/generate", "forward", f"SGLang's own route. {_SAYS}", dict[str, Any], body=ForwardedBody),
    Route("POST", "/v1/chat/completions", "forward", f"OpenAI's route. {_SAYS}", dict[str, Any], body=ForwardedBody),
    Route("POST", "/v1/completions", "forward", f"OpenAI's route. {_SAYS}", dict[str, Any], body=ForwardedBody),
    Route("GET", "/v1/models", "models", "The answer of a replica.", dict[str, Any]),
    Route("GET", "/health", "health", "200 as long as the gateway answers.", AliveBody),
    Route("GET", "/ready", "ready", "200 with a routable replica, else 503.", ReadyBody),
    Route("GET", "/engines", "engines", "Every replica: calls in flight, served, routable or why not.", ReplicasBody),
    Route("GET", "/metrics", "metrics", "Prometheus text: the gateway's counters and the server's.", str),
)
"""Of the gateway. ``handler`` names the method of GatewayApi, without its underscore."""
