"""One body, three arms: what a serving engine does that a protocol can notice.

An arm that deviates from a fact is named in ``engine_table.DEVIATIONS``, with what it does instead; a deviation that
has disappeared fails, so the table stays true. docs/engines.md shows it.
"""

from __future__ import annotations

import asyncio
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from protocol.ports import Backend
from tests.contract.engine_arms import EngineArm, on_ray, simulated
from tests.contract.engine_facts import ENDING, SHARED
from tests.contract.engine_stage import Stage
from tests.contract.engine_table import DEVIATIONS, Fact, name_of
from tests.contract.starvation import LATE_S, Starvation

FACT_WITHIN_S = 60.0
ASKED_AT_MOST = 5

ARMS = [
    "sim",
    pytest.param("emulated", marks=pytest.mark.ray),
    pytest.param("sglang-cpu", marks=[pytest.mark.ray, pytest.mark.sglang_cpu]),
]


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineArm]:
    folder = tmp_path_factory.mktemp("engines")
    if request.param == "sim":
        yield simulated(folder)
        return
    request.getfixturevalue("ray_session")
    yield on_ray(request.param, folder)


AT_ONCE = {"emulated": 4}
"""How many engines of an arm are asked side by side, else one: most facts wait, and emulated engines cost little."""


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[Fact]:
    """The facts that this session asks for."""
    of_session = {item.callspec.params.get("fact") for item in request.session.items if hasattr(item, "callspec")}
    return [fact for fact in (*SHARED, *ENDING) if fact in of_session]


@pytest.fixture(scope="module")
def seen(arm: EngineArm, asked: list[Fact]) -> dict[str, str]:
    """Facts that leave their engine alive, one after another at each: name -> how it failed, "" where it holds."""

    async def body(backend: Backend) -> dict[str, str]:
        left = [fact for fact in asked if fact in SHARED]
        found = {}

        async def at_an_engine(number: int) -> None:
            stage = await Stage.open(backend, arm.hands, arm.spec, f"engine-{number}")

            async def tidied(attempt: int) -> Stage:
                await stage.tidy()
                if attempt:  # the machine may have been slow when the pace was taken
                    await stage.pace()
                return stage

            while left:
                fact = left.pop(0)
                found[name_of(fact)] = await failure(arm, fact, tidied, FACT_WITHIN_S)

        await asyncio.gather(*(at_an_engine(number) for number in range(AT_ONCE.get(arm.name, 1))))
        return found

    found: dict[str, str] = arm.run(body)
    return found


@pytest.fixture(scope="module")
def ended(arm: EngineArm, asked: list[Fact]) -> dict[str, str]:
    """Facts that end their engine, so that each has one of its own; as ``seen``."""

    async def body(backend: Backend) -> dict[str, str]:
        turn = asyncio.Semaphore(AT_ONCE.get(arm.name, 1))

        async def at_an_engine(fact: Fact) -> str:
            async def new(attempt: int) -> Stage:
                return await Stage.open(backend, arm.hands, arm.spec, f"engine-{ENDING.index(fact)}-{attempt}")

            async with turn:
                return await failure(arm, fact, new, 2 * FACT_WITHIN_S)

        facts = [fact for fact in asked if fact in ENDING]
        texts = await asyncio.gather(*(at_an_engine(fact) for fact in facts))
        return {name_of(fact): text for fact, text in zip(facts, texts, strict=True)}

    found: dict[str, str] = arm.run(body)
    return found


async def failure(arm: EngineArm, fact: Fact, stage_of: Callable[[int], Awaitable[Stage]], within_s: float) -> str:
    """How a fact fails at an engine, "" where it holds.

    It is asked again where it failed while the machine held up the engine or its client, and the log says so: what was
    timed then is the machine.
    """
    for attempt in range(ASKED_AT_MOST):
        stage = await stage_of(attempt)
        main_pid = await arm.hands.main_pid(stage.backend, stage.address.name)
        async with Starvation(main_pid) as starved:
            text = await once(fact, stage, within_s)
        if not text:
            return ""
        text += f"\nthe most in a second meanwhile: {starved or 'nothing'}"
        if (arm.name, name_of(fact)) in DEVIATIONS or starved.seconds < LATE_S:
            return text
        warnings.warn(f"{arm.name}, {name_of(fact)}, attempt {attempt + 1}: {text}", stacklevel=1)
    return f"{text}\nand something of the kind in each of {ASKED_AT_MOST} attempts"


async def once(fact: Fact, stage: Stage, within_s: float) -> str:
    try:
        async with asyncio.timeout(within_s):
            await fact(stage)
    except (Exception, pytest.fail.Exception):  # what pytest.raises raises is no Exception
        return traceback.format_exc()
    return ""


def judge(arm: EngineArm, fact: Fact, text: str) -> None:
    deviation = DEVIATIONS.get((arm.name, name_of(fact)))
    if deviation is None:
        assert not text, text
    else:
        assert text, f"{arm.name} no longer deviates ({deviation}): take it out of DEVIATIONS and docs/engines.md"


@pytest.mark.parametrize("fact", SHARED, ids=name_of)
def test_fact(arm: EngineArm, seen: dict[str, str], fact: Fact) -> None:
    judge(arm, fact, seen[name_of(fact)])


def _marked(fact: Fact) -> Any:
    """A minute of silence in real time is for the slow tests."""
    return pytest.param(fact, marks=pytest.mark.slow) if name_of(fact) == "sigkill_of_the_detokenizer" else fact


@pytest.mark.parametrize("fact", [_marked(fact) for fact in ENDING], ids=name_of)
def test_fact_that_ends_the_engine(arm: EngineArm, ended: dict[str, str], fact: Fact) -> None:
    judge(arm, fact, ended[name_of(fact)])


def test_every_deviation_names_a_fact_and_an_arm() -> None:
    names = {name_of(fact) for fact in (*SHARED, *ENDING)}
    for arm, name in DEVIATIONS:
        assert arm in ("sim", "emulated", "sglang-cpu") and name in names
