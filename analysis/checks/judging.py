"""Judgements: seeds that follow from content, and replicas that say the same (scaling.md 8)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from analysis.checks.base import Check, Handler
from analysis.checks.criteria import Criterion, Parameters
from analysis.checks.ledger import Ledger
from protocol.evidence import Event

_MASK = 0x7FFFFFFF


class SeedFromContent(Check):
    """A judgement reaches its engine with the caller's seed, or with the one that follows from its content.

    That one is the first four bytes of the content's hash, masked to 31 bits; a greedy judgement has none. Kills M38
    (no seed of its own) and the variants of M38d (greedy with a seed, the caller's lost, a hash of less than all).
    """

    name = "seed_from_content"
    expected = "the caller's seed, else that of the content, else (greedy) none"
    needs = ("engine.sampling",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._asked: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "judge.asked": self._on_asked,
            "engine.sampling": self._on_sampling,
            "request.done": self._on_done,
        }

    def _on_asked(self, event: Event) -> None:
        self._asked[event.data["request"]] = event

    def _on_sampling(self, event: Event) -> None:
        asked = self._asked.get(event.data["request"])
        if asked is None:
            return
        self.judged += 1
        greedy = event.data["temperature"] == 0
        own = None if greedy else int(asked.data["content"][:8], 16) & _MASK
        expected = own if asked.data["seed"] is None or greedy else asked.data["seed"]
        if greedy and asked.data["seed"] is not None:
            return  # the caller's own wish; it has no effect
        if event.data["seed"] != expected:
            self.violation(
                f"{asked.data['case']} ({asked.data['arm']}) reached {event.actor} with seed {event.data['seed']}, "
                f"not {expected}",
                asked.seq,
                event.seq,
            )

    def _on_done(self, event: Event) -> None:
        self._asked.pop(event.data["request"], None)

    def observed(self) -> str:
        return f"{self.judged} judgements, {self.violations} with another seed"


class Agreement(Parameters):
    arm: Literal["greedy", "sampled"]
    workload: int = Field(default=0, ge=0)
    """Number of the workload in the scenario, from 0."""
    cases: int = Field(ge=1)
    replies: int = Field(ge=1)
    """Over all cases."""
    replicas: int = Field(default=2, ge=1)
    """By how many each case must have been judged."""
    unstable_at_most: int = Field(default=0, ge=0)
    """Cases on which replies differ."""


class JudgementsAgree(Criterion[Agreement]):
    """Every case gets the same verdict from every replica, every time; no reply is cut off or without a verdict.

    A case that too few replicas judged proves nothing, and fails. Kills M38, M38b, M38c.
    """

    name = "judgements_agree"
    expected = "all cases judged by all replicas, alike"
    model = Agreement

    def __init__(self, ledger: Ledger, parameters: Agreement) -> None:
        super().__init__(ledger, parameters)
        self._verdicts: dict[str, dict[int, int]] = {}  # case -> verdict -> seq of the first such reply
        self._replicas: dict[str, dict[str, int]] = {}  # case -> replica -> seq of its first reply
        self._replies = 0

    def handlers(self) -> dict[str, Handler]:
        return {"judge.replied": self._on_replied}

    def _on_replied(self, event: Event) -> None:
        data = event.data
        if data["arm"] != self.parameters.arm or data["workload"] != self.parameters.workload:
            return
        self._replies += 1
        if data["verdict"] is None:
            self.violation(f"a reply to {data['case']} has no verdict", event.seq)
            return
        if data["finish_reason"] != "stop":
            self.violation(f"a reply to {data['case']} was cut off ({data['finish_reason']})", event.seq)
        self._verdicts.setdefault(data["case"], {}).setdefault(data["verdict"], event.seq)
        self._replicas.setdefault(data["case"], {}).setdefault(data["replica"], event.seq)

    def _unstable(self) -> list[str]:
        return [case for case, verdicts in self._verdicts.items() if len(verdicts) > 1]

    def conclude(self) -> None:
        parameters = self.parameters
        self.judged = self._replies
        unstable = self._unstable()
        if len(unstable) > parameters.unstable_at_most:
            seqs = [seq for case in unstable for seq in self._verdicts[case].values()]
            self.violation(f"{len(unstable)} of {len(self._verdicts)} cases differ: {', '.join(unstable[:8])}", *seqs)
        for case, replicas in self._replicas.items():
            if len(replicas) < parameters.replicas:
                self.violation(
                    f"{case} was judged by {', '.join(replicas)} alone; {parameters.replicas} replicas are needed",
                    *replicas.values(),
                )
        if not self.ledger.ended:
            self.doubt("the evidence has no end")
        elif len(self._verdicts) < parameters.cases or self._replies < parameters.replies:
            self.judged = max(1, self._replies)
            self.violation(
                f"{self._replies} replies to {len(self._verdicts)} cases; {parameters.replies} to {parameters.cases} "
                "were to come"
            )

    def observed(self) -> str:
        return f"{len(self._unstable())} of {len(self._verdicts)} cases differ in {self._replies} replies"
