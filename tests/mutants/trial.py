"""Runs a mutant and its twin, and says whether the mutant is caught (how credit works: DESIGN.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from analysis.checks.base import CheckResult
from analysis.verdict import Judge, Verdict
from scenarios.load import parse
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage
from tests.mutants.registry import Mutant


@dataclasses.dataclass(frozen=True)
class Trial:
    """One mutant under one seed. ``caught``: its check says fail, with witnesses, and the twin's says pass."""

    mutant: Mutant
    seed: int
    wrong: CheckResult | None
    right: CheckResult | None
    twin_result: str
    seconds: float

    @property
    def caught(self) -> bool:
        return (
            self.wrong is not None
            and self.wrong.result == "fail"
            and bool(self.wrong.witness)
            and self.right is not None
            and self.right.result == "pass"
            and self.twin_result == "pass"
        )

    def explain(self) -> str:
        """For a person whose mutant got away."""
        return (
            f"{self.mutant.name}, seed {self.seed}: {self.mutant.check} says "
            f"{self.wrong.result if self.wrong else 'nothing'} of the mutant (must fail with witnesses; observed "
            f"{self.wrong.observed if self.wrong else '-'}) and {self.right.result if self.right else 'nothing'} of "
            f"the twin (must pass), whose run as a whole is {self.twin_result} (must pass)"
        )


def try_mutant(mutant: Mutant, seed: int) -> Trial:
    """Run it and its twin under one seed."""
    began = time.process_time()
    wrong, right = judged(mutant, seed, twin=False), judged(mutant, seed, twin=True)
    return Trial(mutant, seed, _row(mutant, wrong), _row(mutant, right), right.result, time.process_time() - began)


def judged(mutant: Mutant, seed: int, *, twin: bool) -> Verdict:
    """The verdict on one run of the mutant's scenario. Declared immutable messages are copied too."""
    scenario = parse(mutant.scenario_text(twin=twin), f"{mutant.scenario}.yaml", pathlib.Path())
    judge = Judge(preregistered(scenario))
    with _patched(mutant.patch(twin=twin)), SimStage(scenario, seed, sinks=[judge.feed], copy_always=True) as stage:
        stage.run()
    return judge.verdict()


@contextlib.contextmanager
def _patched(pairs: tuple[tuple[str, Any], ...]) -> Iterator[None]:
    """Put classes in place in the simulated world for one run."""
    with contextlib.ExitStack() as stack:
        for place, cls in pairs:
            module_name, _, attribute = place.partition(":")
            module = importlib.import_module(module_name)
            stack.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, cls)
        yield


def _row(mutant: Mutant, verdict: Verdict) -> CheckResult | None:
    rows = [row for row in verdict.checks if mutant.is_its_check(row.name)]
    # A check may stand there twice, as an invariant and as a criterion; the mutant is caught if either says fail.
    failing = [row for row in rows if row.result == "fail"]
    return failing[0] if failing else rows[0] if rows else None
