"""A fact in real time is asked again where the machine held it up, and only there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
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

    async def watched() -> dict[str, float]:
        async with Starvation(both[0].pid) as starved:
            await asyncio.sleep(1.0)
        return starved.causes

    try:
        for one in both:
            assert one.stdout is not None and one.stdout.readline()
        assert asyncio.run(watched())["a thread waited for a processor"] > LATE_S
    finally:
        for one in both:
            one.kill()
            one.communicate()


def _counted(monkeypatch: pytest.MonkeyPatch, more: Callable[[dict[tuple[str, object], float]], None]) -> Starvation:
    """A second and a half of nothing, in which the machine's counters are changed at each look."""
    counters = Starvation._counters

    def changed(main_pid: int) -> dict[tuple[str, object], float]:
        found = counters(main_pid)
        more(found)
        return found

    monkeypatch.setattr(Starvation, "_counters", staticmethod(changed))

    async def watched() -> Starvation:
        async with Starvation(os.getpid()) as starved:
            await asyncio.sleep(1.5)
        return starved

    return asyncio.run(watched())


@pytest.mark.parametrize(
    "cause", ["the host took a processor", "something waited for io", "something waited for memory"]
)
def test_what_the_kernel_tells_of_the_machine_counts(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    began = time.monotonic()

    def lose_a_quarter(found: dict[tuple[str, object], float]) -> None:
        key = next((key for key in found if key[0] == cause), None)
        if key is None:
            pytest.skip(f"this kernel does not tell: {cause}")
        found[key] += 0.25 * (time.monotonic() - began)

    starved = _counted(monkeypatch, lose_a_quarter)
    assert starved.causes[cause] >= 0.2, str(starved)


def test_a_processor_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = min(os.sched_getaffinity(0))
    sleep, late = time.sleep, [0.3]

    def slept(seconds: float) -> None:
        if os.sched_getaffinity(0) == {processor} and late:
            seconds += late.pop()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", slept)
    starved = _counted(monkeypatch, lambda found: None)
    assert 0.25 <= starved.causes[f"a thread on processor {processor} woke up late"]


class _Stage:
    backend = None
    address = type("Address", (), {"name": "engine-0"})


def _asked(monkeypatch: pytest.MonkeyPatch, waited_s: float, right_at: int) -> tuple[str, int]:
    """(how a fact fails that holds from an attempt on, attempts) where a thread waits so long in each."""

    class Waited(Starvation):
        async def __aexit__(self, *exc: object) -> None:
            self.causes = {"a thread waited for a processor": waited_s}

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
    with pytest.warns(UserWarning, match=r"(?s)attempt 1: .*too late.*waited for a processor 0.50 s"):
        assert _asked(monkeypatch, 0.5, right_at=3) == ("", 3)


def test_a_fact_that_never_gets_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning):
        text, attempts = _asked(monkeypatch, 0.5, right_at=99)
    assert "too late" in text and "0.50 s" in text and attempts == test_engines.ASKED_AT_MOST
