"""What a client of elastic rollout replicas may ask for, and what it is told (scaling.md 7).

Much is as for judges (``protocol.scaling``), and some is not: weights change, so a new replica is connected and given
the present ones before it serves; an operation is done as a number of replicas to add or remove; there is no reconcile,
so a terminal operation has been cleaned up, and its status says so. Idempotency keys are kept as for judges: the
published service has none, and an autoscaler whose reply was lost never hears of the operation that it asked for.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from protocol.scaling.contract import MOST_REPLICAS, Direction

RolloutState = Literal[
    "PENDING", "CREATING", "CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", "ACTIVE", "PARTIAL", "CANCELLED",
    "DRAINING", "REMOVING", "COMPLETED", "FAILED",
]  # fmt: skip

ROLLOUT_CHAIN: Final[dict[Direction, tuple[RolloutState, ...]]] = {
    "scale_out": ("PENDING", "CREATING", "CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", "ACTIVE"),
    "scale_in": ("PENDING", "DRAINING", "REMOVING", "COMPLETED"),
}
"""The states of an operation that goes well, in order. FAILED may follow any that is not terminal."""

ROLLOUT_TERMINAL: Final[dict[Direction, tuple[RolloutState, ...]]] = {
    "scale_out": ("ACTIVE", "PARTIAL", "FAILED", "CANCELLED"),
    "scale_in": ("COMPLETED", "FAILED"),
}
CANCELLABLE: Final[tuple[RolloutState, ...]] = ("PENDING", "CREATING")

Category = Literal["", "placement", "launch", "connect", "health", "weights", "unknown"]
CATEGORIES: Final[tuple[Category, ...]] = ("weights", "health", "connect", "launch", "placement", "unknown")
"""Why replicas failed, the weightiest first: of several the first of these is told."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
_SECRET = re.compile(r"(?i)\b(token|key|secret|password|authorization)\b(\s*[=:]\s*|\s+)\S+")


class _Body(BaseModel):
    """What every submission may carry. A client that serves judges too sends the first two as to those."""

    model_config = ConfigDict(extra="forbid")

    idempotency_key: StrictStr | None = None
    """The same key with the same body is answered with the same operation, for 24 h."""
    timeout_secs: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Taken and not kept: each step has its own time-out."""


class RolloutOutBody(_Body):
    """Body of POST /scale_out: a total of replicas, or engines that are there already."""

    num_replicas: Annotated[StrictInt, Field(gt=0, le=MOST_REPLICAS)] | None = None
    """Replicas in all, never a difference."""
    engine_urls: Annotated[list[StrictStr], Field(min_length=1, max_length=1024)] | None = None
    """Engines that somebody else has started; those that are known already are passed over."""

    @model_validator(mode="after")
    def _one(self) -> RolloutOutBody:
        if (self.num_replicas is None) == (self.engine_urls is None):
            raise ValueError("send either num_replicas or engine_urls")
        return self


class RolloutInBody(_Body):
    """Body of POST /scale_in."""

    num_replicas: Annotated[StrictInt, Field(gt=0, le=MOST_REPLICAS)]
    """Replicas in all, never a difference."""
    force: StrictBool = False
    """Do not wait for what is in flight: it moves to other replicas."""
    evict: StrictBool = False
    """A victim that is not idle in time is removed all the same, and not put back."""
    dry_run: StrictBool = False
    """Only say who would go."""


@dataclasses.dataclass
class RolloutDecisionBody:
    """Answer to POST /scale_out and /scale_in. ``replicas``: who would go, of a dry run."""

    status: str
    current: int
    ready: int
    detail: str
    request_id: str | None = None
    replicas: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RolloutStatusBody:
    """Answer to GET of an operation.

    ``cleanup_required`` is always there: a typed answer without it reads *unknown* at every client, for ever (M16). So
    is ``failure_categories``, which an autoscaler takes into its history: every key that a client reads is declared
    here, or it is not on the wire (scaling.md 1.4).
    """

    request_id: str
    direction: Direction
    status: RolloutState
    delta: int
    created: int
    removed: int
    failed: int
    error_message: str
    failure_category: Category
    """The weightiest; empty where nothing failed."""
    failure_categories: list[Category]
    """All of them, each once, the weightiest first."""
    cleanup_required: bool
    """Always false: an operation ends when it is clean, and there is nothing to reconcile."""


@dataclasses.dataclass
class RejectedBody:
    """Answer to a target below the number of initial replicas: an error, and the decision that the contract names."""

    error: str
    detail: str
    status: Literal["REJECTED"]


def normalised(url: str) -> tuple[str, int]:
    """Host and port of an engine's URL; without a scheme it is http.

    Raises:
        ValueError: it names no host and port.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port is None:
        raise ValueError(f"engine URL {url!r} must be http://HOST:PORT")
    return parts.hostname, parts.port


def sanitised(text: str, most: int) -> str:
    """A failure's text as it may be shown: one line, no secrets, at most ``most`` characters."""
    line = _SECRET.sub(lambda found: f"{found[1]}=***", _CONTROL.sub(" ", text)).strip()
    return line if len(line) <= most else line[: most - 3] + "..."


def by_weight(categories: list[Category]) -> list[Category]:
    """Each once, the weightiest first."""
    return [one for one in CATEGORIES if one in categories]


def weightiest(categories: list[Category]) -> Category:
    """The one to tell of several; empty for none."""
    return next(iter(by_weight(categories)), "")


def as_document(body: Any) -> dict[str, Any]:
    """A dataclass as JSON; absent: fields that are None or an empty list."""
    return {name: value for name, value in dataclasses.asdict(body).items() if value is not None and value != []}
