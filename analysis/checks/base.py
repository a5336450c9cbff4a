"""What a check is: a fold over a stream of events that ends in pass, fail or inconclusive.

Source: DESIGN.md, "Evidence and verdicts".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from analysis.checks.ledger import Ledger
from protocol.evidence import Event

Result = Literal["pass", "fail", "inconclusive"]
Group = Literal["invariant", "acceptance", "claim"]
Handler = Callable[[Event], None]

FREQUENT = frozenset(
    ("call.sent", "call.done", "call.fate", "request.sent", "request.done", "turn.sent", "turn.done", "engine.accepted",
     "engine.finished", "gate.granted", "gate.settled", "entrypoint.turn")
)  # fmt: skip
"""Kinds of which a run has so many that who is handed them decides how fast it is judged."""

WITNESSES = 16  # seqs kept a check; the first ones are the ones that explain


class CheckResult(NamedTuple):
    """One row of a verdict."""

    name: str
    group: Group
    result: Result
    observed: str
    expected: str
    judged: int
    """How many facts the check judged. A check that judged none does not pass."""
    witness: tuple[int, ...]
    """Seqs of the events that show it."""
    explain: str
    required: bool
    """Whether this row can make the whole verdict inconclusive."""
    applicable: bool
    """False when none of the event kinds that the check is about occurred; such a row is never a pass."""

    @property
    def title(self) -> str:
        """The name as people see it: an invariant that a scenario also asks for has two rows of one name."""
        return self.name if self.group == "invariant" else f"{self.name} ({self.group})"

    @property
    def standing(self) -> str:
        """The result as people see it: what judged nothing and was not asked for does not count in the verdict."""
        passed_over = self.result == "inconclusive" and not self.required and not self.judged
        return "not judged" if passed_over else self.result

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "witness": list(self.witness)}


def shown(value: Any) -> str:
    """A ``json`` field as text: the same live (tuples, any order of keys) as read back from a file."""
    return json.dumps(value, sort_keys=True)


class Check:
    """Base of all checks.

    A subclass names the event kinds it is about in ``needs``, returns its handlers from ``handlers`` and calls
    ``violation`` or ``doubt`` where it sees one. Its state must be bounded by what is open at a time.

    Args:
        ledger: what all checks of one run share.
    """

    name: ClassVar[str]
    group: Group = "invariant"
    expected: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    """The check is applicable when one of these kinds occurred; empty: always."""
    joins_at: ClassVar[tuple[str, ...]] = ()
    """The check sees none of the ``FREQUENT`` kinds before one of these has occurred; empty: all from the start. For
    a check that can know nothing of them earlier, so that runs without its subject do not pay for it."""
    believes: ClassVar[str] = ""
    """Of a check that decides and yet reads ``component`` kinds: what it takes from them. Empty: it reads none."""
    blame: ClassVar[Literal["fail", "inconclusive"]] = "fail"
    """What a violation makes of the result."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.judged = 0
        self.violations = 0
        self.doubts = 0
        self._witness: list[int] = []
        self._doubt_witness: list[int] = []
        self._first = ""
        self._first_doubt = ""

    @property
    def label(self) -> str:
        """The name of the row; acceptance criteria add their parameters to it."""
        return self.name

    def handlers(self) -> dict[str, Handler]:
        """Event kind to bound method. Bound once, because dispatch is the hottest code of a live run."""
        raise NotImplementedError

    def wants_call(self, method: str) -> bool:
        """Whether it is to see the sends of calls of this method or route, and their ends; by default all of them.

        Half of all events are calls, and most checks are about a few methods. Only these are shown to a check that says
        so here; an end without a send that is open is shown to everybody. The answer must depend on the method alone.
        """
        return True

    def violation(self, explain: str, *seqs: int) -> None:
        """Something that must not be was seen. The first explanation is kept, and the first few witnesses."""
        self.violations += 1
        if not self._first:
            self._first = explain
        if len(self._witness) < WITNESSES:
            self._witness += [seq for seq in seqs if seq not in self._witness]

    def doubt(self, explain: str, *seqs: int) -> None:
        """Something could not be decided."""
        self.doubts += 1
        if not self._first_doubt:
            self._first_doubt = explain
        if len(self._doubt_witness) < WITNESSES:
            self._doubt_witness += [seq for seq in seqs if seq not in self._doubt_witness]

    def conclude(self) -> None:
        """Last look, after the last event: what is still open, totals against thresholds."""

    def observed(self) -> str:
        return f"{self.violations} of {self.judged}"

    def finish(self, *, required: bool, applicable: bool) -> CheckResult:
        """The row of the verdict. A doubt makes the row required: what is undecided may not be passed over."""
        self.conclude()
        result: Result
        if self.violations:
            result, explain, witness = self.blame, self._first, self._witness
            if self.violations > 1:
                explain += f" (and {self.violations - 1} more)"
            if self.ledger.broken is not None:
                result = "inconclusive"
                explain += f"; but {self.ledger.broken.data['detail']}"
        elif self.doubts:
            result, explain, witness = "inconclusive", self._first_doubt, self._doubt_witness
        elif not self.judged:
            result, witness = "inconclusive", []
            absent = f"not applicable: no {' or '.join(self.needs)} in this run"
            explain = "nothing was judged" if applicable else absent
        else:
            result, explain, witness = "pass", "", []
        undecided = result == "inconclusive" and bool(self.violations or self.doubts)
        applicable = applicable or bool(self.judged or self.violations or self.doubts)  # what was seen is not hidden
        seqs = tuple(witness[:WITNESSES])
        return self.row(result, explain, seqs, required=required or undecided, applicable=applicable)

    def row(
        self, result: Result, explain: str, witness: tuple[int, ...] = (), *, required: bool, applicable: bool
    ) -> CheckResult:
        return CheckResult(
            name=self.label,
            group=self.group,
            result=result,
            observed=self.observed(),
            expected=self.expected,
            judged=self.judged,
            witness=witness,
            explain=explain,
            required=required,
            applicable=applicable,
        )
