"""Routes of the control API of elastic rollout replicas over HTTP, and what serves them in front of an actor.

Served, described and documented from this table, as those of ``protocol.scaling.http_tables``. Source: scaling.md 7.
Weights are not updated here: that is for the trainer of the deployment, which has a handle of the service.
"""

from __future__ import annotations

from typing import Final

from protocol.config import HttpConfig
from protocol.ports import ActorHandle
from protocol.rollout.elastic_contract import (
    RejectedBody,
    RolloutDecisionBody,
    RolloutInBody,
    RolloutOutBody,
    RolloutStatusBody,
)
from protocol.scaling.bodies import EnginesBody, HealthBody, MetricsBody
from protocol.scaling.http_tables import in_front_of
from protocol.serving.http_routes import ControlRoutes, Route

_SUBMIT_ERRORS: Final = {
    400: ("REJECTED",),
    409: ("CONFLICT", "IDEMPOTENCY_CONFLICT"),
    422: ("INVALID_TYPE",),
}
_REJECTED: Final = {400: RejectedBody}
_UNKNOWN: Final = {404: ("UNKNOWN_OPERATION",)}

ROLLOUT_ROUTES: Final[tuple[Route, ...]] = (
    Route(
        "POST", "/scale_out", "scale_out",
        "Submit a scale-out: a total number of replicas, or the URLs of engines that run already. 200 says that it is "
        "admitted, not that it is done.",
        RolloutDecisionBody, body=RolloutOutBody, errors=_SUBMIT_ERRORS, error_types=_REJECTED,
    ),
    Route(
        "GET", "/scale_out/{id}", "status", "The status of a scale-out. A terminal one has been cleaned up.",
        RolloutStatusBody, fixed=("scale_out",), errors=_UNKNOWN,
    ),
    Route(
        "DELETE", "/scale_out/{id}", "call_off",
        "Cancel a scale-out that has connected no replica yet. Its status says when it has ended.",
        RolloutStatusBody, fixed=("scale_out",), errors={**_UNKNOWN, 409: ("NOT_CANCELLABLE",)},
    ),
    Route(
        "POST", "/scale_in", "scale_in",
        "Submit a scale-in: a total number of replicas, the newest go. 200 says that it is admitted, not that it is "
        "done.",
        RolloutDecisionBody, body=RolloutInBody, errors=_SUBMIT_ERRORS, error_types=_REJECTED,
    ),
    Route(
        "GET", "/scale_in/{id}", "status", "The status of a scale-in. A terminal one has been cleaned up.",
        RolloutStatusBody, fixed=("scale_in",), errors=_UNKNOWN,
    ),
    Route(
        "GET", "/engines", "engines", "Replicas with their counters, and the capacity. No evidence of a release.",
        EnginesBody,
    ),
    Route("GET", "/metrics", "metrics", "The capacity.", MetricsBody),
    Route("GET", "/health", "health", "Whether a replica is routable.", HealthBody),
)  # fmt: skip
"""Of the control API of rollout replicas, ``protocol.rollout.elastic.RolloutScaling``."""


def rollout_routes(config: HttpConfig, api: ActorHandle) -> ControlRoutes:
    """Serves ROLLOUT_ROUTES in front of a RolloutScaling."""
    return in_front_of(ROLLOUT_ROUTES, config, api)
