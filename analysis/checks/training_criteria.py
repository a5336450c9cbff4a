"""Acceptance criteria on training while its judge is scaled (scaling_acceptance.md 5)."""

from __future__ import annotations

from pydantic import Field

from analysis.checks.base import Handler
from analysis.checks.criteria import Criterion, Parameters
from analysis.checks.ledger import Ledger
from protocol.evidence import Event


class Continuity(Parameters):
    steps: int = Field(ge=1)
    """Training steps, each with one rollout."""
    samples: int = Field(ge=1)
    """Of each rollout."""
    stall_at_most_s: float = Field(gt=0)
    """Longest time without any training event, from the start of the workload to the end of training."""


class TrainingContinues(Criterion[Continuity]):
    """Training went on while its judge was scaled out and in.

    Three things are asserted of progress (a step that began or ended, a rollout that landed): some before the scale-out
    was submitted, some between its end and the submission of the scale-in, some after the end of that. Of the windows
    of the operations themselves nothing is: they may be shorter than one iteration (M43). Rollouts are counted by their
    number, as each may be told of twice (M44), and a stall counts at both edges too (M45).
    """

    name = "training_continues"
    expected = "progress before, between and after, every step and sample, no long stall"
    model = Continuity

    def __init__(self, ledger: Ledger, parameters: Continuity) -> None:
        super().__init__(ledger, parameters)
        self._ask: dict[str, Event] = {}
        self._out: tuple[int, int] | None = None  # of the first scale-out: submitted, done; done is 0 before it is
        self._in: tuple[int, int] | None = None
        self._latest: Event | None = None
        self._progress = {"before": 0, "between": 0, "after": 0}
        self._steps: dict[str, dict[int, int]] = {"started": {}, "ended": {}}
        self._rollouts: dict[int, int] = {}
        self._longest_ns = 0
        self._longest: tuple[int, ...] = ()
        self._finished: Event | None = None

    def handlers(self) -> dict[str, Handler]:
        return {
            "run.workload": self._mark,
            "train.step": self._on_step,
            "train.rollout": self._on_rollout,
            "train.finished": self._on_finished,
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
        }

    # --- the operations ---

    def _on_asked(self, event: Event) -> None:
        data = event.data
        self._ask[data["ask"]] = event
        if data["route"] == "scale_out" and self._out is None:
            self._out = (event.seq, 0)
        elif data["route"] == "scale_in" and self._in is None:
            self._in = (event.seq, 0)

    def _on_answered(self, event: Event) -> None:
        data, asked = event.data, self._ask.pop(event.data["ask"], None)
        if asked is None or data["status"] != 200:
            return
        if asked.data["route"] != "status":
            return
        if asked.data["direction"] == "scale_out" and data["state"] == "ACTIVE" and self._out and not self._out[1]:
            self._out = (self._out[0], event.seq)
        if asked.data["direction"] == "scale_in" and data["state"] == "COMPLETED" and self._in and not self._in[1]:
            self._in = (self._in[0], event.seq)

    # --- progress ---

    def _mark(self, event: Event) -> None:
        if self._latest is not None and event.t_ns - self._latest.t_ns > self._longest_ns:
            self._longest_ns = event.t_ns - self._latest.t_ns
            self._longest = (self._latest.seq, event.seq)
        self._latest = event

    def _go_on(self, event: Event) -> None:
        self.judged += 1
        self._mark(event)
        if self._out is None:
            self._progress["before"] += 1
        elif self._out[1] and self._in is None:
            self._progress["between"] += 1
        elif self._in is not None and self._in[1]:
            self._progress["after"] += 1

    def _on_step(self, event: Event) -> None:
        self._go_on(event)
        self._steps[event.data["what"]].setdefault(event.data["step"], event.seq)

    def _on_rollout(self, event: Event) -> None:
        self._go_on(event)
        self._rollouts.setdefault(event.data["rollout"], event.seq)
        if event.data["samples"] != self.parameters.samples:
            self.violation(
                f"rollout {event.data['rollout']} has {event.data['samples']} of {self.parameters.samples} samples",
                event.seq,
            )

    def _on_finished(self, event: Event) -> None:
        self._mark(event)
        self._finished = event

    def conclude(self) -> None:
        parameters = self.parameters
        if not self.ledger.ended:
            self.doubt("the evidence has no end")
            return
        latest = () if self._latest is None else (self._latest.seq,)
        if self._finished is None:
            self.judged = max(1, self.judged)
            self.violation("training did not come to its end", *latest)
        for what, found in (
            *((f"steps {name}", seen) for name, seen in self._steps.items()),
            ("rollouts", self._rollouts),
        ):
            if len(found) != parameters.steps:
                self.violation(f"{len(found)} {what}, not {parameters.steps}", *found.values(), *latest)
        if self._longest_ns > parameters.stall_at_most_s * 1e9:
            self.violation(
                f"no progress for {self._longest_ns / 1e9:.1f} s, longer than {parameters.stall_at_most_s:g} s",
                *self._longest,
            )
        for what, operation in (("scale-out", self._out), ("scale-in", self._in)):
            if operation is None or not operation[1]:
                self.violation(f"there is no {what} that went well, so nothing can be said of continuity", *latest)
        for when, count in self._progress.items():
            if not count:
                self.violation(f"no progress {when} the operations", *latest)

    def observed(self) -> str:
        counted = ", ".join(f"{count} {when}" for when, count in self._progress.items())
        return f"{len(self._rollouts)} rollouts; progress: {counted}; longest stall {self._longest_ns / 1e9:.1f} s"
