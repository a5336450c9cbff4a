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
    far, of which the first ``stored`` characters are known to be in the trace store. ``prompt`` is what it began with.
    ``attempt`` counts how often it was run. ``model_steps``: versions that its tokens were generated under, each once,
    oldest first. ``experts`` are references: of a traced rollout the session's, which the store frees; ``shared`` ones
    are never freed by hand.
    """

    rollout_id: str
    session_id: str
    status: str = INIT
    attempt: int = 0
    prompt: str = ""
    text: str = ""
    stored: int = 0
    turns: int = 0
    model_steps: tuple[int, ...] = ()
    experts: tuple[ObjectRef, ...] = ()
    shared: bool = False
    reward: float | None = None

    def without_experts(self) -> RolloutState:
        """The same without its references: they were freed, or somebody else keeps them now."""
        return dataclasses.replace(self, experts=())

    def staleness(self, step: int) -> int:
        """Of its oldest token, were it trained on in ``step``; 0 without any (rollout.md 6.2)."""
        return step - self.model_steps[0] - 1 if self.model_steps else 0

    def reset(self) -> RolloutState:
        """For another rollout of the same prompt: what was generated is forgotten, session and prompt are kept.

        Nothing is freed: the references of a session belong to its trace, which still has them (S-17).
        """
        stored = min(self.stored, len(self.prompt))
        return RolloutState(self.rollout_id, self.session_id, EXPIRED, self.attempt, self.prompt, self.prompt, stored)


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
        """Of its members that are traced."""
        return tuple(member.session_id for member in self.members if member.session_id)


def dispose(members: Iterable[RolloutState]) -> None:
    """Free the references of states that nobody will use again, but for shared ones, which end with their last holder.

    References of a session that the trace store has released are freed already: take them off before.
    """
    own = [ref for member in members if not member.shared for ref in member.experts]
    if own:
        backend().objects.free(tuple(own))
