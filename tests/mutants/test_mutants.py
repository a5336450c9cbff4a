"""Each mutant is caught by the check that it declares, with witnesses, and its twin passes the same seeds."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from tests.mutants.registry import Mutant, all_mutants
from tests.mutants.trial import try_mutant

MUTANTS = tuple(all_mutants())
IN_CI = 3
"""Of one mutant in so many .ci/run tries the second seed too: of all it takes four minutes of processor time."""


def _second_in_ci(mutant: Mutant) -> bool:
    return zlib.crc32(mutant.name.encode()) % IN_CI == 0  # by its name, so that a new one moves no other


def _by_name(in_ci: Callable[[Mutant], bool] = lambda mutant: True) -> pytest.MarkDecorator:
    """A test of each mutant, named after it; long of those that .ci/run leaves out."""
    marks = {True: (), False: (pytest.mark.long,)}
    each = [pytest.param(one, id=one.name.replace(" ", "-"), marks=marks[in_ci(one)]) for one in MUTANTS]
    return pytest.mark.parametrize("mutant", each)


@_by_name()
def test_the_first_seed_catches_it(mutant: Mutant) -> None:
    trial = try_mutant(mutant, mutant.seeds[0])
    assert trial.caught, trial.explain()


@pytest.mark.slow
@_by_name(_second_in_ci)
def test_the_second_seed_catches_it(mutant: Mutant) -> None:
    _each_catches_it(mutant, mutant.seeds[1:2])


@pytest.mark.slow
@pytest.mark.long  # by hand: the museum stops at the first seed that catches
@_by_name()
def test_further_seeds_catch_it(mutant: Mutant) -> None:
    _each_catches_it(mutant, mutant.seeds[2:])


def _each_catches_it(mutant: Mutant, seeds: tuple[int, ...]) -> None:
    missed = [trial.explain() for seed in seeds if not (trial := try_mutant(mutant, seed)).caught]
    assert not missed, "\n".join(missed)


def test_there_are_enough_and_each_says_what_is_wrong() -> None:
    assert len(MUTANTS) >= 15
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert [mutant.name for mutant in MUTANTS if not mutant.defect.endswith(".")] == []


def test_a_twin_in_the_place_of_its_mutant_is_not_credited() -> None:
    import dataclasses

    innocent = dataclasses.replace(MUTANTS[0], cls=MUTANTS[0].twin)
    assert not try_mutant(innocent, 1).caught


def test_the_museum_shows_each_of_them() -> None:
    from tests.mutants.museum import PAGE

    page = PAGE.read_text()
    assert [mutant.name for mutant in MUTANTS if f"| {mutant.name} |" not in page] == []


def test_the_museum_says_what_each_source_is() -> None:
    import re

    from tests.mutants.museum import PAGE

    legend = PAGE.read_text().partition("| mutant |")[0]
    for mutant in MUTANTS:
        for source in mutant.source.split(", "):
            family = re.match(r"[A-Z]-?(?=\w?\d)|[A-Z]-I|\w+", source)
            assert family is not None
            known = f"`{family[0]}" in legend or family[0] in ("serving", "training", "rollout")  # as `scaling 5.1`
            assert known, f"{mutant.name}: {source}"
