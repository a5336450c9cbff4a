"""Bodies of the autoscaler's HTTP surface: what may be sent, and what comes back. Source: scaling.md 6.6.

What was not observed is null, never 0. The OpenAPI document is made of these types.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from protocol.scaling.decision import Choice
from protocol.scaling.metrics import FrameBody
from protocol.scaling.policy import ROLLOUT


class EnableBody(BaseModel):
    """Body of POST /enable."""

    model_config = ConfigDict(extra="forbid")

    enabled: StrictBool = True


class ServiceQuery(BaseModel):
    """Query of GET /conditions and GET /metrics_history."""

    service: str = ROLLOUT


class ClearQuery(BaseModel):
    """Query of POST /clear_history; without a service: of all."""

    service: str | None = None


class HistoryQuery(BaseModel):
    """Query of GET /scale_history."""

    model_config = ConfigDict(extra="forbid")

    service: str = ROLLOUT
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    action: Annotated[str, Field(pattern="^(scale_out|scale_in)$")] | None = None


@dataclasses.dataclass
class StartedBody:
    """Answer to POST /start."""

    started: bool
    services: list[str]


@dataclasses.dataclass
class ClearedBody:
    """Answer to POST /clear_history: how many requests were forgotten."""

    cleared: int


@dataclasses.dataclass
class AutoscalerHealthBody:
    """Answer to GET /health. ``errors``: what broke a service's latest evaluation or round of metrics."""

    status: str
    started: bool
    enabled: bool
    errors: dict[str, str]


@dataclasses.dataclass
class RequestBody:
    """One request of the autoscaler, as in the history."""

    action: str
    delta: int
    from_engines: int
    to_engines: int
    reason: str
    triggered_conditions: list[str]
    metrics_snapshot: FrameBody | None
    triggered_at: float
    status: str
    request_id: str | None
    completed_at: float | None
    error_message: str | None
    failure_categories: list[str]
    """As the status of its operation has them: that of a rollout service does, a judge's does not (1.4)."""


@dataclasses.dataclass
class PendingBody(RequestBody):
    """A request that is not over. ``cleanup``: true (pending), false (clean) or unknown."""

    cleanup: str


@dataclasses.dataclass
class ServiceBody:
    """One service in GET /status. ``refusal``: why nothing is decided on it at all; empty when something may be."""

    current_engines: int | None
    min_engines: int
    max_engines: int
    last_scale_time: float | None
    last_scale_action: str | None
    last_decision: Choice | None
    pending_requests: list[PendingBody]
    recent_metrics: FrameBody | None
    total_scale_operations: int
    refusal: str


@dataclasses.dataclass
class AutoscalerStatusBody:
    """Answer to GET /status. The fields beside ``services`` are the rollout service's, null when there is none."""

    enabled: bool
    started: bool
    current_engines: int | None
    min_engines: int | None
    max_engines: int | None
    last_scale_time: float | None
    last_scale_action: str | None
    last_decision: Choice | None
    pending_requests: list[PendingBody] | None
    recent_metrics: FrameBody | None
    total_scale_operations: int | None
    services: dict[str, ServiceBody]


@dataclasses.dataclass
class ConditionBody:
    """One condition: what it compares, and for how long it has held without a break (null: it does not hold)."""

    value: float | None
    threshold: float
    met: bool
    held_secs: float | None
    required_secs: float


@dataclasses.dataclass
class ConditionsBody:
    """Answer to GET /conditions. Scale-out takes any one condition, scale-in all of them."""

    service: str
    timestamp: float
    scale_out: dict[str, ConditionBody]
    scale_in: dict[str, ConditionBody]


@dataclasses.dataclass
class HistoryBody:
    """Answer to GET /scale_history, newest first. ``total``: how many there are without the limit."""

    service: str
    total: int
    history: list[RequestBody]


@dataclasses.dataclass
class MetricsHistoryBody:
    """Answer to GET /metrics_history, newest first."""

    service: str
    metrics: list[FrameBody]


def body_of(answer: Any) -> dict[str, Any]:
    """A body as JSON. What was given as plain dictionaries inside of it stays as it is."""
    return {field.name: _plain(getattr(answer, field.name)) for field in dataclasses.fields(answer)}


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
