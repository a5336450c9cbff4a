"""Bodies of the control API of scaling: what may be sent, checked without coercion, and what comes back.

Source: scaling.md 1.2 to 1.6. An OpenAPI document is made of these types (pydantic's ``TypeAdapter`` takes them all).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

from protocol.scaling.contract import MOST_REPLICAS, Direction


class SubmitBody(BaseModel):
    """Body of POST /scale_out and /scale_in (scaling.md 1.2)."""

    model_config = ConfigDict(extra="forbid")

    model_name: StrictStr | None = "default"
    """``default`` (or null): the only configured model."""
    num_replicas: Annotated[StrictInt, Field(gt=0, le=MOST_REPLICAS)]
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
    """One replica in GET /engines. ``inflight``: calls of its gateway to it now; ``served``: answered ones."""

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
class EnginesOfAllBody:
    """Answer to GET /engines with several models, or one that has a name."""

    instances: dict[str, EnginesBody]


@dataclasses.dataclass
class MetricsOfAllBody:
    """Answer to GET /metrics with several models, or one that has a name."""

    instances: dict[str, MetricsBody]


@dataclasses.dataclass
class HealthBody:
    """Answer to GET /health: ``healthy`` or ``unhealthy``, by model and in all."""

    status: str
    instances: dict[str, str]


class SamplingBody(BaseModel):
    """How a call is sampled: what is left out or null is the instance's own (scaling.md 8). Others are handed on."""

    model_config = ConfigDict(extra="allow")

    temperature: Annotated[float, Field(strict=True)] | None = None
    """0: greedy, no seed goes along. Above 0 it does: the caller's, or one that follows from the content."""
    top_p: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    top_k: StrictInt | None = None
    min_p: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    """Not with a temperature above 0: no seed would repeat it."""
    max_new_tokens: StrictInt | None = None
    sampling_seed: StrictInt | None = None


class GenerateBody(BaseModel):
    """Body of POST /generate: one call of the model, as SGLang takes it, and what says where it goes.

    Exactly one of ``text`` and ``input_ids``. Other fields of SGLang's route are handed on as they are.
    """

    model_config = ConfigDict(extra="allow")

    model_name: StrictStr | None = "default"
    text: StrictStr | None = None
    input_ids: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)] | None = None
    sampling_params: SamplingBody | None = None
    rid: Annotated[StrictStr, Field(min_length=1, max_length=200)] | None = None
    """Id of the request; without it, it gets one."""
    route_key: Annotated[StrictStr, Field(min_length=1, max_length=200)] | None = None
    """Calls with the same key go to the same replica while it is routable."""
    stream: Literal[False] = False
    """Streams are the gateway's."""

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids, one of them")
        if self.rid is not None and not self.rid.isprintable():
            raise ValueError("rid must be printable")
        return self


@dataclasses.dataclass
class GeneratedBody:
    """Answer to POST /generate: what is read most, and under ``answer`` all that the replica said."""

    engine_host: str
    engine_port: int
    finish_reason: str | None
    completion_tokens: int | None
    text: str | None
    answer: dict[str, Any]


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
