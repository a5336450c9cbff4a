"""What the two halves of scaling say to each other: the control API that keeps operations, the manager that does them.

Source: scaling.md 1.9 (the contract), 2.1 and 2.2 (the chains of states), 5.2 (the proof of drain).
"""

from __future__ import annotations

from typing import Final, Literal

from protocol.errors import Outcome, SeatrialError
from protocol.messages import EngineAddress, message
from protocol.ports import Placement

Direction = Literal["scale_out", "scale_in"]
MOST_REPLICAS: Final = 10**12
"""A total that is asked for is no larger, as in a scenario: evidence holds whole numbers of 64 bits."""
State = Literal[
    "PENDING", "CREATING", "HEALTH_CHECKING", "READY", "ACTIVE", "PARTIAL", "DRAINING", "REMOVING", "COMPLETED",
    "FAILED",
]  # fmt: skip

CHAIN: Final[dict[Direction, tuple[State, ...]]] = {
    "scale_out": ("PENDING", "CREATING", "HEALTH_CHECKING", "READY", "ACTIVE"),
    "scale_in": ("PENDING", "DRAINING", "REMOVING", "COMPLETED"),
}
"""The states of an operation that goes well, in order. FAILED may follow any that is not terminal."""

TERMINAL: Final[dict[Direction, tuple[State, ...]]] = {
    "scale_out": ("ACTIVE", "PARTIAL", "FAILED"),
    "scale_in": ("COMPLETED", "FAILED"),
}


@message
class Victim:
    """A replica in drain, and at the same time the proof that it is idle.

    One operation drains several victims under one id, one address serves several engines, and a confirmation may come
    late or twice. Only the whole of this says which drain is meant. ``generation`` counts drains of the manager.
    ``rank``: None of a manager that does not say it; that is no identity, and nothing follows from it (M3).
    """

    address: EngineAddress
    rank: int | None
    generation: int


@message
class Progress:
    """How far the manager is with an operation.

    A terminal ``phase`` alone proves nothing: only with ``physical_done`` has its lifecycle stopped (scaling.md 2.5).
    ``current`` and ``ready`` are capacities; ``created``, ``removed`` and ``failed`` count replicas of this operation.
    ``victim``: the replica being drained or removed, until its placement group is REMOVED; ``victim_stopped``: its
    process is gone, or the gateway has forgotten it for good, so that nothing can be in flight on it.

    A manager of the user's own may not say everything: ``cleanup_required`` None, of one that knows no such flag, is
    taken for clean where the rest of the progress is there (2.3); ``physical_done`` None is not done (2.5).
    """

    phase: State
    current: int
    ready: int
    created: int
    removed: int
    failed: int
    victim: Victim | None
    cleanup_required: bool | None
    physical_done: bool | None
    victim_stopped: bool = False
    error: str = ""


@message
class Capacity:
    """Numbers of replicas (scaling.md 2.7); always ``ready <= current <= occupied``, ``pending_cleanup <= occupied``.

    ``current``: published, also while they drain, and victims whose group is not REMOVED. ``ready``: published and not
    draining. ``occupied``: all that may hold a GPU.
    """

    current: int
    ready: int
    occupied: int
    pending_cleanup: int


@message
class CleanupReport:
    """What became of a request to go on with the cleanup of an operation.

    ``known``: False when the manager has lost the operation. ``running``: its lifecycle, or another cleanup, is at work
    and nothing was done. ``pending``: something is still not confirmed gone.
    """

    known: bool
    running: bool = False
    pending: bool = False
    victim_cleared: bool = False
    detail: str = ""


@message
class RecoveryLeave:
    """Whether a replica may be started again by recovery, and where. ``why``: the reason that it may not."""

    allowed: bool
    placement: Placement | None = None
    why: str = ""


class LifecycleRefused(SeatrialError):
    """The manager will not begin an operation; nothing was done."""

    default_outcome = Outcome.NOT_DONE
