"""Acceptance criteria of publications: the recorded facts E1, E3 and E4 (acceptance_xtuner.md 10.1)."""

from __future__ import annotations

from pydantic import Field

from analysis.checks.base import WITNESSES, Handler
from analysis.checks.criteria import AtLeast, Criterion, Parameters
from analysis.checks.ledger import Ledger
from protocol.evidence import Event


class ModelSteps(Parameters):
    model_steps: list[int] = Field(min_length=1)
    at_least: int = Field(default=1, ge=1)
    """Turns stamped with each."""


class TurnsAtVersions(Criterion[ModelSteps]):
    """Real requests were answered at each of these versions, and at no other (E3)."""

    name = "turns_at_versions"
    expected = "at least the stated number of turns at each version, none at another"
    model = ModelSteps

    def __init__(self, ledger: Ledger, parameters: ModelSteps) -> None:
        super().__init__(ledger, parameters)
        self._counts: dict[int, int] = {}
        self._seq_of: dict[int, int] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"turn.done": self._on_turn}

    def _on_turn(self, event: Event) -> None:
        self.judged += 1
        step = event.data["model_step"]
        self._counts[step] = self._counts.get(step, 0) + 1
        self._seq_of.setdefault(step, event.seq)

    def conclude(self) -> None:
        for step, count in self._counts.items():
            if step not in self.parameters.model_steps:
                self.violation(f"{count} turns are stamped {step}", self._seq_of[step])
        for step in self.parameters.model_steps:
            count = self._counts.get(step, 0)
            if self.judged and count < self.parameters.at_least:
                seqs = [self._seq_of[step]] if count else list(self._seq_of.values())
                self.fall_short(f"{count} turns are stamped {step}, less than {self.parameters.at_least}", *seqs)

    def observed(self) -> str:
        return ", ".join(f"{self._counts[step]} at {step}" for step in sorted(self._counts)) or "no turns"


class SessionsAcrossUpdates(Criterion[AtLeast]):
    """Episodes that lived across an update: consecutive turns at two versions, on one backend, all complete (E4)."""

    name = "sessions_across_updates"
    expected = "at least the stated number of episodes"
    model = AtLeast

    def __init__(self, ledger: Ledger, parameters: AtLeast) -> None:
        super().__init__(ledger, parameters)
        self._open: dict[str, list[Event]] = {}
        self._across = 0
        self._seqs: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return {"turn.done": self._on_turn, "session.ended": self._on_ended}

    def _on_turn(self, event: Event) -> None:
        self._open.setdefault(event.data["session"], []).append(event)

    def _on_ended(self, event: Event) -> None:
        turns = self._open.pop(event.data["session"], [])
        self.judged += 1
        whole = event.data["outcome"] == "completed" and all(t.data["finish_reason"] != "abort" for t in turns)
        steps = [turn.data["model_step"] for turn in turns]
        if whole and len(set(steps)) > 1 and steps == sorted(steps) and len({t.data["entrypoint"] for t in turns}) == 1:
            self._across += 1
        elif len(self._seqs) < WITNESSES:
            self._seqs.append(event.seq)

    def conclude(self) -> None:
        if self.judged and self._across < self.parameters.at_least:
            self.fall_short(f"{self._across} of {self.judged} episodes lived across an update", *self._seqs)

    def observed(self) -> str:
        return f"{self._across} of {self.judged} episodes"


class PrefixHits(Criterion[AtLeast]):
    """Generations that began with a cached prefix: without any, nothing is shown of what a cache may be used for."""

    name = "prefix_hits"
    expected = "at least the stated number of generations with cached tokens"
    model = AtLeast

    def __init__(self, ledger: Ledger, parameters: AtLeast) -> None:
        super().__init__(ledger, parameters)
        self._hits = 0
        self._last = 0

    def handlers(self) -> dict[str, Handler]:
        return {"engine.finished": self._on_finished}

    def _on_finished(self, event: Event) -> None:
        self.judged += 1
        self._hits += event.data["cached_tokens"] > 0
        self._last = event.seq

    def conclude(self) -> None:
        if self.judged and self._hits < self.parameters.at_least:
            self.fall_short(f"{self._hits} of {self.judged} generations used a cached prefix", self._last)

    def observed(self) -> str:
        return f"{self._hits} of {self.judged} generations"


class DistinctWeights(Criterion[AtLeast]):
    """The updates are real: so many distinct weights were served, each under a version of its own (E1)."""

    name = "distinct_weights"
    expected = "at least the stated number of weight hashes, one a published version"
    model = AtLeast

    def __init__(self, ledger: Ledger, parameters: AtLeast) -> None:
        super().__init__(ledger, parameters)
        self._by_hash: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"engine.weights": self._on_weights}

    def _on_weights(self, event: Event) -> None:
        self.judged += 1
        first = self._by_hash.setdefault(event.data["weight_hash"], event)
        if first.data["version"] != event.data["version"]:
            self.violation(
                f"the weights {event.data['weight_hash']} are served as {first.data['version']!r} and "
                f"{event.data['version']!r}",
                first.seq,
                event.seq,
            )

    def conclude(self) -> None:
        if self.judged and len(self._by_hash) < self.parameters.at_least:
            seqs = [event.seq for event in self._by_hash.values()]
            self.fall_short(f"{len(self._by_hash)} distinct weights, less than {self.parameters.at_least}", *seqs)

    def observed(self) -> str:
        return f"{len(self._by_hash)} distinct weights in {self.judged} updates"
