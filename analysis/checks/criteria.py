"""Acceptance criteria: checks with thresholds, which a scenario asks for by name (analysis/acceptance.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from analysis.checks.base import WITNESSES, Check, Group, Handler
from analysis.checks.ledger import Ledger
from protocol.evidence import Event


class Parameters(BaseModel):
    """Base of a criterion's parameters: unknown keys are refused, and bounds that everything is within."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


P = TypeVar("P", bound=Parameters)


class Criterion(Check, Generic[P]):
    """A check with thresholds. Always applicable: the scenario asked for it."""

    group: Group = "acceptance"
    model: ClassVar[type[Parameters]] = Parameters

    def __init__(self, ledger: Ledger, parameters: P) -> None:
        super().__init__(ledger)
        self.parameters = parameters

    @property
    def label(self) -> str:
        given = self.parameters.model_dump(exclude_defaults=True)
        said = ", ".join(f"{key}={_as_in_yaml(value)}" for key, value in given.items())
        return f"{self.name}({said})" if said else self.name

    def fall_short(self, explain: str, *seqs: int) -> None:
        """Less was seen than is asked for: a violation once the run has ended, for before that more may come."""
        (self.violation if self.ledger.ended else self.doubt)(explain, *seqs)


def _as_in_yaml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_in_yaml(value[key])}" for key in sorted(value)) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


class AtLeast(Parameters):
    """Of criteria that count; each says what."""

    at_least: int = Field(default=1, ge=1)


class Fraction(Parameters):
    at_least: float = Field(ge=0, le=1)


class AnsweredFraction(Criterion[Fraction]):
    """At least this fraction of the requests sent ends *done*."""

    name = "answered_fraction"
    expected = "at least the stated fraction"
    model = Fraction

    def __init__(self, ledger: Ledger, parameters: Fraction) -> None:
        super().__init__(ledger, parameters)
        self._answered = 0
        self._failed: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return {"request.done": self._on_done}

    def _on_done(self, event: Event) -> None:
        if event.data["outcome"] == "done":
            self._answered += 1
        elif len(self._failed) < WITNESSES:
            self._failed.append(event.seq)

    def conclude(self) -> None:
        self.judged = self.ledger.requests_sent
        if self.judged and self._answered < self.parameters.at_least * self.judged:
            text = f"{self._answered} of {self.judged} answered, less than {self.parameters.at_least:.4g}"
            if not self.ledger.ended:
                self.doubt(f"{text}, and the evidence has no end", *self._failed)
            else:
                self.violation(text, *self._failed)

    def observed(self) -> str:
        sent = self.ledger.requests_sent
        return f"{self._answered} of {sent}" + (f" ({self._answered / sent:.4%})" if sent else "")


class Latency(Parameters):
    at_most_s: float = Field(gt=0)


class LatencyP99(Criterion[Latency]):
    """The 99th percentile of the latency of answered requests, as the client sees it."""

    name = "latency_p99"
    expected = "at most the stated seconds"
    model = Latency

    def __init__(self, ledger: Ledger, parameters: Latency) -> None:
        super().__init__(ledger, parameters)
        self._bins: dict[int, int] = {}
        self._slow: list[int] = []
        self._limit_ns = round(parameters.at_most_s * 1e9)

    def handlers(self) -> dict[str, Handler]:
        return {"request.done": self._on_done}

    def _on_done(self, event: Event) -> None:
        request = self.ledger.requests.get(event.data["request"])
        if request is None or event.data["outcome"] != "done":
            return
        self.judged += 1
        took = event.t_ns - request.sent_ns
        key = latency_bin(took)
        self._bins[key] = self._bins.get(key, 0) + 1
        if took > self._limit_ns and len(self._slow) < WITNESSES:
            self._slow.append(event.seq)

    def _p99_ns(self) -> int:
        left = -(-self.judged * 99 // 100)
        for key in sorted(self._bins):
            left -= self._bins[key]
            if left <= 0:
                return latency_bin_top(key)
        return 0

    def conclude(self) -> None:
        if self.judged and self._p99_ns() > self._limit_ns:
            self.violation(f"p99 is {self._p99_ns() / 1e9:.3f} s, over {self.parameters.at_most_s:g} s", *self._slow)

    def observed(self) -> str:
        return f"{self._p99_ns() / 1e9:.3f} s over {self.judged} answers (bins of 1/64)"


def latency_bin(ns: int) -> int:
    """A bin whose width is at most 1/64 of its value; integers only, so that every machine agrees."""
    shift = max(0, ns.bit_length() - 7)
    return (shift << 7) | (ns >> shift)


def latency_bin_top(key: int) -> int:
    """The largest value of a bin, in ns: percentiles are stated from above."""
    shift, mantissa = key >> 7, key & 127
    return ((mantissa + 1) << shift) - 1


class Happens(Parameters):
    event: str = "scale.terminal"
    state: str | None = None
    """Short for ``where: {state: ...}``."""
    where: dict[str, str | int | float | bool] = {}
    """Fields that must be equal; ``actor`` and ``inc`` may be named too."""
    nth: int = Field(default=1, ge=1)
    within_s: float = Field(gt=0)
    after: str | None = None
    """Count time (and events) from the first event of this kind; from the start of the run by default."""


class Reached(Criterion[Happens]):
    """The n-th event that matches comes within a time."""

    name = "reached"
    expected = "the event, in time"
    model = Happens

    def __init__(self, ledger: Ledger, parameters: Happens) -> None:
        super().__init__(ledger, parameters)
        self._from: Event | None = None
        self._found: Event | None = None
        self._count = 0
        self._where = dict(parameters.where)
        if parameters.state is not None:
            self._where["state"] = parameters.state

    def handlers(self) -> dict[str, Handler]:
        start = self.parameters.after or "run.workload"
        if start == self.parameters.event:
            return {start: self._on_both}
        return {start: self._on_start, self.parameters.event: self._on_event}

    def _on_both(self, event: Event) -> None:
        self._on_event(event)
        self._on_start(event)

    def _on_start(self, event: Event) -> None:
        if self._from is None:
            self._from = event

    def _on_event(self, event: Event) -> None:
        if self._from is None or self._found is not None or not matches(event, self._where):
            return
        self._count += 1
        if self._count == self.parameters.nth:
            self._found = event

    def conclude(self) -> None:
        if self._from is None:
            return
        limit_ns = round(self.parameters.within_s * 1e9)
        if self._found is not None:
            self.judged = 1
            took = self._found.t_ns - self._from.t_ns
            if took > limit_ns:
                text = f"came after {took / 1e9:.3f} s, later than {self.parameters.within_s:g} s"
                self.violation(text, self._found.seq)
        elif self.ledger.ended or self.ledger.last_ns - self._from.t_ns > limit_ns:
            self.judged = 1
            self.violation(f"{self._count} of {self.parameters.nth} such events came", self._from.seq)
        else:
            self.doubt("the evidence ends before the time was up", self._from.seq)

    def observed(self) -> str:
        if self._found is None or self._from is None:
            return f"{self._count} such events"
        return f"after {(self._found.t_ns - self._from.t_ns) / 1e9:.3f} s"


def matches(event: Event, where: Mapping[str, object]) -> bool:
    """Whether an event has these fields; ``actor`` and ``inc`` mean the event's own where no field has the name."""
    for key, value in where.items():
        if key in event.data:
            if event.data[key] != value:
                return False
        elif key == "actor":
            if event.actor != value:
                return False
        elif key != "inc" or event.inc != value:
            return False
    return True


class Count(Parameters):
    event: str
    where: dict[str, str | int | float | bool] = {}
    at_least: int = Field(default=0, ge=0)
    at_most: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _can_be_met(self) -> Count:
        if self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(
                f"at_least {self.at_least} is more than at_most {self.at_most}, so that nothing can meet both; lower "
                "at_least or raise at_most"
            )
        return self


class Occurs(Criterion[Count]):
    """How often an event happens in the run."""

    name = "occurs"
    expected = "between at_least and at_most times"
    model = Count

    def __init__(self, ledger: Ledger, parameters: Count) -> None:
        super().__init__(ledger, parameters)
        self._count = 0
        self._seqs: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return {self.parameters.event: self._on_event}

    def _on_event(self, event: Event) -> None:
        if matches(event, self.parameters.where):
            self._count += 1
            if len(self._seqs) < WITNESSES:
                self._seqs.append(event.seq)

    def conclude(self) -> None:
        least, most = self.parameters.at_least, self.parameters.at_most
        if most is not None and self._count > most:
            self.judged = 1
            self.violation(f"{self._count} times, more than {most}", *self._seqs)
        elif not self.ledger.ended:
            self.doubt("the evidence has no end")
        else:
            self.judged = 1
            if self._count < least:
                self.violation(f"{self._count} times, less than {least}", *self._seqs)

    def observed(self) -> str:
        return f"{self._count} times"


class PerRequest(Parameters):
    at_most: float = Field(gt=0)


class EventsPerRequest(Criterion[PerRequest]):
    """Evidence stays affordable: events of the whole run by requests sent."""

    name = "events_per_request"
    expected = "at most the stated number"
    model = PerRequest

    def handlers(self) -> dict[str, Handler]:
        return {}

    def conclude(self) -> None:
        self.judged = self.ledger.requests_sent
        if self.ledger.events > self.parameters.at_most * self.judged and self.judged:
            self.violation(f"{self.ledger.events} events for {self.judged} requests")

    def observed(self) -> str:
        sent = self.ledger.requests_sent
        return f"{self.ledger.events / sent:.2f}" if sent else "no requests"
