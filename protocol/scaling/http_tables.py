"""Routes of the two control APIs of scaling over HTTP, and what serves them in front of an actor.

One table each: it is served, described (`protocol.openapi`) and documented (docs/api.md). Source: scaling.md 1.1, 6.6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from protocol.config import HttpConfig
from protocol.ports import ActorHandle, backend
from protocol.scaling.autoscaler_bodies import (
    AutoscalerHealthBody,
    AutoscalerStatusBody,
    ClearedBody,
    ClearQuery,
    ConditionsBody,
    EnableBody,
    HistoryBody,
    HistoryQuery,
    MetricsHistoryBody,
    ServiceQuery,
    StartedBody,
)
from protocol.scaling.bodies import (
    DecisionBody,
    EnginesBody,
    EnginesOfAllBody,
    GenerateBody,
    GeneratedBody,
    HealthBody,
    MetricsBody,
    MetricsOfAllBody,
    ReconcileBody,
    StatusBody,
    SubmitBody,
)
from protocol.scaling.contract import Direction
from protocol.scaling.policy import AutoscalerConfig
from protocol.serving.http import Handler, Refusal
from protocol.serving.http_routes import ApiAnswer, ControlRoutes, Route
from protocol.serving.peer import Peer

_ANSWER_S: Final = 30.0  # longer than an API waits for its manager
_SLOW_S: Final = 150.0
More = Mapping[tuple[str, str], Handler]
_SUBMIT_ERRORS: Final = {
    400: ("UNKNOWN_MODEL", "INVALID_RANGE"),
    409: ("CONFLICT", "IDEMPOTENCY_CONFLICT"),
    422: ("INVALID_TYPE",),
    503: ("DISCOVERY_FAILED", "CAPACITY_UNKNOWN", "NOT_KEPT"),
}


def _of(direction: Direction) -> tuple[Route, ...]:
    words = direction.replace("_", "-")
    path = f"/{direction}"
    return (
        Route(
            "POST", path, direction,
            f"Submit a {words}: a total number of replicas. 200 says that it is admitted, not that it is done.",
            DecisionBody, body=SubmitBody, errors=_SUBMIT_ERRORS,
        ),
        Route(
            "GET", path + "/{id}", "status",
            f"The status of a {words}. Only here, and in a reconcile, is cleanup_required: false a proof.",
            StatusBody, fixed=(direction,), errors={404: ("UNKNOWN_OPERATION",)},
        ),
        Route(
            "POST", path + "/{id}/reconcile", "reconcile",
            f"Go on with the cleanup of that same {words}: no new id, no new victim, no re-scaling.",
            ReconcileBody, fixed=(direction,), slow=True,
            errors={
                404: ("UNKNOWN_OPERATION",),
                409: ("LIFECYCLE_RUNNING", "IN_FLIGHT"),
                503: ("MANAGER_UNKNOWN", "NO_RECONCILE_HOOK", "STATE_LOST", "VICTIM_UNKNOWN"),
            },
        ),
    )  # fmt: skip


SCALE_ROUTES: Final[tuple[Route, ...]] = (
    *_of("scale_out"),
    *_of("scale_in"),
    Route(
        "GET", "/engines", "engines", "Replicas with their counters, and the capacity. No evidence of a release.",
        EnginesBody | EnginesOfAllBody,
    ),
    Route(
        "GET", "/metrics", "metrics", "The capacity by model. What could not be asked for is absent.",
        MetricsBody | MetricsOfAllBody,
    ),
    Route("GET", "/health", "health", "Whether a replica is routable, by model and in all.", HealthBody),
    Route(
        "POST", "/generate", "generate",
        "One call of the model, sampled so that it can be repeated, and which replica answered.",
        GeneratedBody, body=GenerateBody, slow=True,
        # A 4xx of the replica comes with its own status; these are the ones that SGLang gives.
        errors={
            400: ("UNKNOWN_MODEL", "INVALID_SAMPLING", "UPSTREAM_REFUSED"),
            422: ("INVALID_BODY", "UPSTREAM_REFUSED"),
            502: ("OUTCOME_UNKNOWN", "UPSTREAM_ODD"),
            503: ("UNAVAILABLE",),
            504: ("TIMEOUT",),
        },
    ),
)  # fmt: skip
"""Of the control API of a scaled service, ``protocol.scaling.api.ScaleApi``."""

_NO_SERVICE: Final = {404: ("UNKNOWN_SERVICE",)}

AUTOSCALER_ROUTES: Final[tuple[Route, ...]] = (
    Route(
        "GET", "/status", "status", "Every service: replicas, bounds, last decision, what is open, latest metrics.",
        AutoscalerStatusBody,
    ),
    Route(
        "GET", "/conditions", "conditions", "Each condition with its value, its threshold and how long it has held.",
        ConditionsBody, query=ServiceQuery, errors=_NO_SERVICE,
    ),
    Route(
        "GET", "/scale_history", "scale_history", "What is over, newest first.", HistoryBody, query=HistoryQuery,
        errors={**_NO_SERVICE, 422: ("INVALID_CONFIG",)},
    ),
    Route(
        "GET", "/metrics_history", "metrics_history", "What was observed, newest first.", MetricsHistoryBody,
        query=ServiceQuery, errors=_NO_SERVICE,
    ),
    Route(
        "POST", "/clear_history", "clear_history", "Forget what is over, of one service or of all.", ClearedBody,
        query=ClearQuery, errors=_NO_SERVICE,
    ),
    Route("GET", "/config", "get_config", "The configuration. What is answered can be sent back.", AutoscalerConfig),
    Route(
        "PATCH", "/config", "patch_config",
        "Change the configuration by a JSON merge patch (RFC 7396); null takes a key out. All of it or nothing.",
        AutoscalerConfig, body=dict[str, Any], slow=True,
        errors={409: ("TARGET_BUSY",), 422: ("INVALID_CONFIG", "INVALID_PATCH")},
    ),
    Route(
        "POST", "/enable", "enable", "Decide, or decide nothing.", AutoscalerConfig, body=EnableBody,
        body_optional=True, errors={422: ("INVALID_CONFIG",)},
    ),
    Route("POST", "/start", "activate", "Collect and decide from now on; before that, nothing happens.", StartedBody),
    Route("GET", "/health", "health", "Whether it was started, and what broke.", AutoscalerHealthBody),
)  # fmt: skip
"""Of the autoscaler, ``protocol.scaling.autoscaler_api.AutoscalerApi``."""


def scale_routes(config: HttpConfig, api: ActorHandle) -> ControlRoutes:
    """Serves SCALE_ROUTES in front of a ScaleApi."""
    return in_front_of(SCALE_ROUTES, config, api)


def autoscaler_routes(config: HttpConfig, api: ActorHandle, more: More | None = None) -> ControlRoutes:
    """Serves AUTOSCALER_ROUTES in front of an AutoscalerApi. ``more``: handlers of further routes."""
    return in_front_of(AUTOSCALER_ROUTES, config, api, more)


def in_front_of(
    routes: tuple[Route, ...], config: HttpConfig, api: ActorHandle, more: More | None = None
) -> ControlRoutes:
    """Serves a table of routes in front of the actor whose methods they name."""
    quick, slow = Peer(api, _ANSWER_S), Peer(api, _SLOW_S)

    async def ask(route: Route, arguments: tuple[Any, ...], query: dict[str, str]) -> ApiAnswer:
        if route.handler == "generate":
            return await _generate(api, arguments)
        try:
            answer: ApiAnswer = await (slow if route.slow else quick).call(route.handler, *arguments, **query)
        except AttributeError:
            raise _lacks(api.name, route.handler) from None
        return answer

    return ControlRoutes(
        routes, ask, max_body_bytes=config.max_body_bytes, retry_after_s=config.retry_after_s, more=more
    )  # fmt: skip


async def _generate(api: ActorHandle, arguments: tuple[Any, ...]) -> ApiAnswer:
    """The gateway bounds it. A client that has gone wants no answer, so the call is asked to stop."""
    port = backend()
    current = await port.lookup(api.name)
    try:
        call = current.generate(*arguments)
    except AttributeError:
        raise _lacks(api.name, "generate") from None
    try:
        answer: ApiAnswer = await call
        return answer
    except asyncio.CancelledError:
        current.cancel(call)
        raise


def _lacks(actor: str, method: str) -> Refusal:
    return Refusal(501, f"{actor} has no method {method!r}, which this route needs", "not_implemented")
