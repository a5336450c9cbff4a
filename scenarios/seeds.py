"""One seed of a sweep, and what it came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from scenarios.load import Scenario
from scenarios.runner import run_in_sim
from sim import huge_pages


@dataclasses.dataclass(frozen=True)
class SeedResult:
    """What a seed came to. ``ended``: the reason of run.finished, or ``lost``, where nothing came back.

    ``why``: (check, explanation) of the rows that decided, none when it passed.
    """

    seed: int
    result: str
    ended: str
    digest: str
    events: int
    why: list[tuple[str, str]]


def run_seed(scenario: Scenario, seed: int, hang_after_s: float | None = None) -> SeedResult:
    """One seed with drawn orders and delays, judged live, nothing written."""
    ran = run_in_sim(scenario, seed, explore=True, hang_after_s=hang_after_s)
    why = [(row.name, row.explain) for row in ran.verdict.failed()]
    return SeedResult(seed, ran.verdict.result, ran.result.reason, ran.result.digest, ran.result.events, why)


def run_seeds(scenario: Scenario, seeds: Iterable[int], hang_after_s: float | None = None) -> Iterator[SeedResult]:
    """Many seeds, one after another, in a process that does nothing else."""
    for number, seed in enumerate(seeds, 1):
        yield run_seed(scenario, seed, hang_after_s)
        if huge_pages.is_due(number):
            huge_pages.collapse()
