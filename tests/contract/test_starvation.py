"""A fact in real time is asked again where the machine had no processor for it, and only there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.contract import test_engines
from tests.contract.engine_arms import EngineArm
from tests.contract.engine_stage import Hands
from tests.contract.starvation import LATE_S, Starvation

_SPIN = "import os; os.sched_setaffinity(0, {int(os.sys.argv[1])}); print(flush=True)\nwhile True: pass"


def test_who_shares_a_processor_waits_for_it() -> None:
    processor = str(min(os.sched_getaffinity(0)))
    both = [
        subprocess.Popen([sys.executable, "-c", f"import sys; {_SPIN}", processor], stdout=subprocess.PIPE)
        for _ in range(2)
    ]

    async def watched() -> float:
        async with Starvation(both[0].pid) as starved:
            await asyncio.sleep(1.0)
        return starved.seconds

    try:
        for one in both:
            assert one.stdout is not None and one.stdout.readline()
        assert asyncio.run(watched()) > LATE_S
    finally:
        for one in both:
            one.kill()
            one.communicate()


class _Stage:
    backend = None
    address = type("Address", (), {"name": "engine-0"})


def _asked(monkeypatch: pytest.MonkeyPatch, waited_s: float, right_at: int) -> tuple[str, int]:
    """(how a fact fails that holds from an attempt on, attempts) where a thread waits so long in each."""

    class Waited(Starvation):
        async def __aexit__(self, *exc: object) -> None:
            self.seconds = waited_s

    monkeypatch.setattr(test_engines, "Starvation", Waited)
    attempts = []

    async def stage_of(attempt: int) -> Any:
        attempts.append(attempt)
        return _Stage()

    async def fact_of_the_second(stage: Any) -> None:
        """Too late."""
        assert len(attempts) >= right_at, "too late"

    async def nobody(*_: Any) -> None: ...

    arm = EngineArm("emulated", None, Hands(nobody, nobody, nobody), lambda body: None)  # type: ignore[arg-type]  # none is launched
    text = asyncio.run(test_engines.failure(arm, fact_of_the_second, stage_of, 5.0))
    return text, len(attempts)


def test_a_fact_that_fails_with_a_processor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    text, attempts = _asked(monkeypatch, LATE_S / 2, right_at=2)
    assert "too late" in text and attempts == 1


def test_a_fact_that_fails_without_one_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"waited 0.50 s of a second for a processor\n(?s:.*)too late"):
        assert _asked(monkeypatch, 0.5, right_at=3) == ("", 3)


def test_a_fact_that_never_gets_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning):
        text, attempts = _asked(monkeypatch, 0.5, right_at=99)
    assert "too late" in text and "0.50 s" in text and attempts == test_engines.ASKED_AT_MOST
