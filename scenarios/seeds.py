"""One seed of a sweep, and what it came to."""

from __future__ import annotations

import dataclasses

from scenarios.load import Scenario
from scenarios.runner import run_in_sim


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
