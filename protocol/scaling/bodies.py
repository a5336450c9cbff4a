"""Bodies of the control API of scaling: what may be sent, checked without coercion, and what comes back.

Source: scaling.md 1.2 to 1.6. An OpenAPI document is made of these types (pydantic's ``TypeAdapter`` takes them all).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from protocol.scaling.contract import Direction


class SubmitBody(BaseModel):
    """Body of POST /scale_out and /scale_in (scaling.md 1.2)."""

    model_config = ConfigDict(extra="forbid")

    model_name: StrictStr | None = "default"
    """``default`` (or null): the only configured model."""
    num_replicas: Annotated[StrictInt, Field(gt=0)]
    """Replicas in all, never a difference."""
    timeout_secs: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Budget of the whole operation from its submission; null: the server's default."""
    idempotency_key: StrictStr | None = None
    """The same key with the same body is answered with the same operation, for 24 h."""


@dataclasses.dataclass
class DecisionBody:
    """Answer to POST /scale_out and /scale_in."""

    status: str
    current: int | None
    ready: int | None
    detail: str
    request_id: str | None = None
    """Absent for a no-op, which is no operation."""


@dataclasses.dataclass
class StatusBody:
    """Answer to GET /scale_out/{id} and /scale_in/{id} (scaling.md 1.4)."""

    request_id: str
    direction: Direction
    status: str
    model_name: str
    target: int
    timeout_secs: float | None
    idempotency_key: str | None
    created_at: float
    updated_at: float
    current: int | None
    ready: int | None
    created: int
    removed: int
    failed: int
    cleanup_required: bool
    error_message: str
    detail: str


@dataclasses.dataclass
class ReconcileBody:
    """Answer to POST /scale_out/{id}/reconcile and /scale_in/{id}/reconcile (scaling.md 1.5)."""

    request_id: str
    direction: Direction
    status: str
    cleanup_required: bool
    victim_cleared: bool
    detail: str


@dataclasses.dataclass
class EngineBody:
    host: str
    port: int
    inflight: int
    served: int


@dataclasses.dataclass
class EnginesBody:
    """Answer to GET /engines, for one model (scaling.md 1.6). No evidence that resources were released."""

    engines: list[EngineBody]
    current: int
    ready: int
    occupied: int
    pending_cleanup: int


@dataclasses.dataclass
class MetricsBody:
    """Answer to GET /metrics, for one model. After a failure to ask: the start-up count and ``capacity_error``."""

    model_path: str
    num_gpus: float
    num_gpus_per_engine: float
    num_engines: int
    ready_engines: int | None = None
    occupied: int | None = None
    pending_cleanup: int | None = None
    capacity_error: str | None = None


@dataclasses.dataclass
class ErrorBody:
    """Answer with a 4xx or 5xx. ``error``: a stable code; ``detail``: for people."""

    error: str
    detail: str


@dataclasses.dataclass(frozen=True)
class ApiReply:
    """Status code and JSON body."""

    status: int
    body: dict[str, Any]
