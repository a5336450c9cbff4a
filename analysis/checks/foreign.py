"""Criteria on imported runs: whether what a run says of itself is borne out by what its own recorders kept.

Source: scaling_acceptance.md 8 and scaling_wrong_variants.md, M40 to M54. They judge evidence and know no files.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from analysis.checks.base import Handler, shown
from analysis.checks.criteria import Criterion, Parameters
from analysis.checks.foreign_claims import agrees, truth
from analysis.checks.foreign_rules import UNKNOWN, shortages
from analysis.checks.foreign_training import longest_silence
from analysis.checks.foreign_view import Facts
from analysis.checks.ledger import Ledger
from protocol.evidence import Event

_FILE = "verdicts.json"
_WRAP_UP = ("functional_pass", "cleanup_pass", "PASS", "E2E_PASS", "functional_error", "cleanup_errors")


class Needed(Parameters):
    needed: list[str] = Field(min_length=1)


class FilesRead(Criterion[Needed]):
    """The files of an imported run that its criteria need are there, and could be read."""

    name = "files_read"
    expected = "each of them read"
    model = Needed

    def __init__(self, ledger: Ledger, parameters: Needed) -> None:
        super().__init__(ledger, parameters)
        self._state: dict[str, Event] = {}

    @property
    def label(self) -> str:
        return self.name

    def handlers(self) -> dict[str, Handler]:
        return {"foreign.file": self._on_file}

    def _on_file(self, event: Event) -> None:
        self._state[event.data["name"]] = event

    def conclude(self) -> None:
        for name in self.parameters.needed:
            event = self._state.get(name)
            if event is not None and event.data["state"] == "read":
                self.judged += 1
            else:
                said = "missing" if event is None else f"{event.data['state']} {event.data['detail']}".strip()
                self.doubt(f"{name}: {said}", *(() if event is None else (event.seq,)))

    def observed(self) -> str:
        return f"{self.judged} of {len(self.parameters.needed)} read"


class _OnFacts(Criterion[Any]):
    """Base of the criteria on what happened: folds everything into ``facts``."""

    def __init__(self, ledger: Ledger, parameters: Any) -> None:
        super().__init__(ledger, parameters)
        self.facts = Facts()

    @property
    def label(self) -> str:
        return self.name

    def handlers(self) -> dict[str, Handler]:
        return self.facts.see


class Stated(Parameters):
    pass_key: str = "E2E_PASS"
    """The line of the verdict that says that the run passed; a verdict without it does not (H11)."""
    borne_out: list[str] = []
    """Lines that the evidence must bear out; what else is stated may not be contradicted."""


class StatedVerdict(_OnFacts):
    """A run's own verdict has its pass key, agrees with itself, and is borne out by the run's evidence."""

    name = "stated_verdict"
    expected = "a verdict that passes, is whole, and is borne out"
    model = Stated

    def __init__(self, ledger: Ledger, parameters: Stated) -> None:
        super().__init__(ledger, parameters)
        self._stated: dict[str, dict[str, Any]] = {}  # file -> key -> value
        self._seqs: dict[str, int] = {}
        self._only_stated: list[str] = []

    def handlers(self) -> dict[str, Handler]:
        return {**self.facts.see, "foreign.verdict": self._on_verdict}

    def _on_verdict(self, event: Event) -> None:
        self._stated.setdefault(event.data["file"], {})[event.data["key"]] = event.data["value"]
        self._seqs[event.data["key"]] = event.seq

    def conclude(self) -> None:
        stated = self._stated.get(_FILE)
        if not stated:
            self.doubt(f"{_FILE} states nothing")
            return
        self._passes(stated)
        self._same_twice(stated)
        for key, value in stated.items():
            if key not in _WRAP_UP:
                self._line(key, value, stated)
        for key in self.parameters.borne_out:
            if key not in stated:
                self.violation(f"{_FILE} has no {key}: an assertion that is not there did not hold")

    def _passes(self, stated: dict[str, Any]) -> None:
        key = self.parameters.pass_key
        if key not in stated:
            self.violation(f"{_FILE} has no {key}: a verdict without it is no pass")
        informational = {one.removesuffix("_is_informational") for one, value in stated.items()
                         if one.endswith("_is_informational") and value is True}  # fmt: skip
        gates = {one: value for one, value in stated.items() if isinstance(value, bool) and one not in _WRAP_UP
                 and one not in informational and not one.endswith("_is_informational")}  # fmt: skip
        self.judged += len(gates)
        for one, value in gates.items():
            if not value:
                self._wrong(one, f"{one} is false")
        if not gates:
            self.doubt(f"{_FILE} has no assertion at all")
        if key in stated and stated[key] is not True:
            self._wrong(key, f"{key} is {shown(stated[key])}")
        if stated.get(key) is True and not all(gates.values()):
            self._wrong(key, f"{key} is true, and an assertion is false")
        for one in ("functional_pass", "cleanup_pass", "PASS"):
            if one in stated and stated[one] is not True:
                self._wrong(one, f"{one} is {shown(stated[one])}")
        if stated.get("functional_error"):
            self._wrong("functional_error", f"functional_error: {str(stated['functional_error'])[:200]}")
        if stated.get("cleanup_errors"):
            self._wrong("cleanup_errors", f"cleanup_errors: {shown(stated['cleanup_errors'])[:200]}")

    def _same_twice(self, stated: dict[str, Any]) -> None:
        for file, lines in self._stated.items():
            for key, value in lines.items() if file != _FILE else ():
                if key in stated and stated[key] != value:
                    self._wrong(key, f"{key} is {shown(stated[key])} in {_FILE} and {shown(value)} in {file}")

    def _line(self, key: str, value: Any, stated: dict[str, Any]) -> None:
        # Where determinism is claimed, one flip is too many: the gate was fixed before the run (M50).
        unstable = key == "flip_count" or key.endswith(("instability_rate", "unstable_cases"))
        if unstable and value not in (0, 0.0, []):
            self._wrong(key, f"{key} is {shown(value)[:120]}: the same input was judged differently")
        if "load_total" in key and value in (0, None):
            self._wrong(key, f"{key} is {shown(value)}: without load nothing was shown")
        found = truth(key, self.facts, stated)
        if found is UNKNOWN:
            if key in self.parameters.borne_out:
                self.doubt(f"{key} is {shown(value)}, and nothing in the evidence tells", self._seqs[key])
            elif isinstance(value, bool) or "load_total" in key:
                self._only_stated.append(key)
            return
        self.judged += 1
        if not agrees(value, found):
            self._wrong(key, f"{key} is {shown(value)}, the evidence has {shown(found)}")

    def _wrong(self, key: str, said: str) -> None:
        self.violation(said, self._seqs.get(key, 0))

    def observed(self) -> str:
        more = f"; only stated: {', '.join(self._only_stated)}" if self._only_stated else ""
        return f"{self.judged} lines judged, {self.violations} wrong, {self.doubts} without evidence{more}"


class ResourcesReturned(_OnFacts):
    """In the end as many GPUs are free as at the beginning, no placement group is left, memory is within 500 MiB."""

    name = "resources_returned"
    expected = "as at the first look, or better"
    model = Parameters

    def conclude(self) -> None:
        wrong, self.judged = shortages(self.facts.resources)
        for text, *seqs in wrong:
            self.violation(text, *seqs)
        if not self.judged:
            self.doubt("nobody looked at the resources both at the beginning and at the end")

    def observed(self) -> str:
        return f"{self.judged} figures compared, {self.violations} not as before"


class AtLeast(Parameters):
    at_least: int = Field(ge=1)


class LoadAnswered(_OnFacts):
    """The load of an imported run, of which only sums are known, was there and did not fail."""

    name = "load_answered"
    expected = "so many requests, none failed"
    model = AtLeast

    def conclude(self) -> None:
        for sent, failed in self.facts.loads:
            self.judged += sent
            if failed or not 0 <= failed <= sent:
                self.violation(f"{failed} of {sent} requests failed")
        if not self.facts.loads:
            self.doubt("the load's sums are not on record")
        elif self.judged < self.parameters.at_least:
            self.violation(f"{self.judged} requests, fewer than {self.parameters.at_least}")

    def observed(self) -> str:
        return f"{self.judged} requests"


class VictimsBusy(_OnFacts):
    """Scale-ins were asked for while a request ran on the victim: of an idle one they show nothing (M51)."""

    name = "victims_busy"
    expected = "so many scale-ins with a request on the victim, each looked at before"
    model = AtLeast

    def conclude(self) -> None:
        for one in self.facts.all_of("scale_in"):
            if one.in_flight is None:
                self.doubt(f"nobody looked at the victim of {one.id} before it was asked for")
            elif one.in_flight < 1:
                self.violation(f"the victim of {one.id} was idle")
            else:
                self.judged += 1
            if one.timeout_s is not None and one.dirty_s is not None and one.dirty_s - one.asked_s < one.timeout_s:
                self.violation(f"{one.id} failed before its time of {one.timeout_s:g} s was over")
        if self.judged < self.parameters.at_least and not self.violations:
            self.doubt(f"{self.judged} of {self.parameters.at_least}")

    def observed(self) -> str:
        return f"{self.judged} of {self.parameters.at_least}"


class Stall(Parameters):
    stall_at_most_s: float = Field(gt=0)


class TrainingContinued(_OnFacts):
    """Training got on before, between and after two operations, each step once, and at both edges too (M43 to M45)."""

    name = "training_continued"
    expected = "steps before, between and after; none missing; no longer silence, edges included"
    model = Stall

    def conclude(self) -> None:
        progress = self.facts.progress
        self.judged = sum(len(one) for one in progress.values())
        for what, seen in progress.items():
            numbers = sorted(int(one) for one in seen if one.isdigit())
            if what in ("step", "rollout") and numbers != list(range(len(numbers))):
                self.violation(f"{what}s on record are {numbers}: one is missing")
        for key in ("before_scaling", "between_operations", "after_scale_in"):
            found = truth(f"train_events_{key}", self.facts, {})
            if found is UNKNOWN:
                self.doubt(f"nobody can tell whether there was progress {key.replace('_', ' ')}")
            elif not found:
                self.violation(f"no progress {key.replace('_', ' ')}")
        silence = longest_silence(self.facts)
        if silence is None:
            self.doubt("no progress is on record")
        elif silence[0] > self.parameters.stall_at_most_s:
            self.violation(f"{silence[0]:.0f} s without progress, {silence[1]} sign of it")

    def observed(self) -> str:
        silence = longest_silence(self.facts)
        return f"{self.judged} signs of progress" + (f", longest silence {silence[0]:.0f} s" if silence else "")


class DocumentsAgree(Criterion[Parameters]):
    """Pages beside a run state what is so: digests, commits, withdrawn claims, routes, fields (M40 to M42, M46)."""

    name = "documents_agree"
    expected = "what is stated is found"
    model = Parameters

    def handlers(self) -> dict[str, Handler]:
        return {"foreign.document": self._on_document, "foreign.file": self._on_file}

    def _on_file(self, event: Event) -> None:
        self.judged += event.data["state"] == "read" and event.data["name"].endswith((".md", "openapi.json"))

    def _on_document(self, event: Event) -> None:
        data = event.data
        self.judged += 1
        if data["stated"] != data["found"]:
            said = f"{data['stated'] or 'nothing'!r}, in fact {data['found'] or 'nothing'!r}"
            self.violation(f"{data['name']}: {data['about']} {data['subject']}: {said}", event.seq)

    def observed(self) -> str:
        return f"{self.judged} statements, {self.violations} not so"
