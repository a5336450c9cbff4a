"""Rollouts and groups of rollouts: what is produced, stored, trained on and disposed of (rollout.md 6.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from protocol.messages import ObjectRef, message
from protocol.ports import backend

INIT, COMPLETED, ABORTED, EXPIRED, FAILED, FILTERED = "INIT", "COMPLETED", "ABORTED", "EXPIRED", "FAILED", "FILTERED"
_WORST_FIRST = (FAILED, ABORTED, EXPIRED, FILTERED)


@message
class RolloutState:
    """One rollout of a prompt.

    ``session_id`` is empty for one that is not traced; its references are then its own. ``text`` is the conversation so
    far, a key of the trace store. ``model_steps``: versions that its tokens were generated under, oldest first, each
    once. ``experts`` are references: of a traced rollout the session's, which the store frees; ``shared`` ones are
    never freed by hand.
    """

    rollout_id: str
    session_id: str
    status: str = INIT
    text: str = ""
    turns: int = 0
    tokens: int = 0
    model_steps: tuple[int, ...] = ()
    experts: tuple[ObjectRef, ...] = ()
    shared: bool = False
    reward: float | None = None

    def without_experts(self) -> RolloutState:
        return dataclasses.replace(self, experts=())

    def staleness(self, step: int) -> int:
        """Of its oldest token, were it trained on in ``step``; 0 without any (rollout.md 6.2)."""
        return step - self.model_steps[0] - 1 if self.model_steps else 0


@message
class RolloutGroup:
    """The rollouts of one prompt: the unit of scheduling, storage and batches."""

    group_id: str
    members: tuple[RolloutState, ...]

    @property
    def status(self) -> str:
        """COMPLETED unless a member is worse; then the worst, in the order FAILED, ABORTED, EXPIRED, FILTERED."""
        statuses = [member.status for member in self.members]
        return next((status for status in _WORST_FIRST if status in statuses), COMPLETED)

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(member.session_id for member in self.members if member.session_id)


def dispose(members: Iterable[RolloutState]) -> None:
    """Free what states refer to, but for shared references, which end with the last who holds them."""
    own = [ref for member in members if not member.shared for ref in member.experts]
    if own:
        backend().objects.free(tuple(own))
