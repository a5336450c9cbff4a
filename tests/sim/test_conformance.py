"""The conformance command: CPython's tests pass on our loop, the canary goes red, and neither can pass by accident."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.conformance import MODULES, _Counted, main, run_module, stale
from sim.conformance_deviations import DEVIATIONS, Deviation
from sim.conformance_report import table

ROOT = Path(__file__).parents[2]
pytest.importorskip("test.test_asyncio.utils", reason="this Python comes without its asyncio tests")


def command(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "sim.conformance", *options], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    code, text = command("--json")
    found: dict[str, Any] = json.loads(text)
    assert (code == 0) == found["ok"]
    return found


@pytest.mark.slow
def test_cpythons_tests_pass_on_our_loop(outcome: dict[str, Any]) -> None:
    assert outcome["ok"], [row for m in outcome["modules"] for row in m["unexplained"]] or outcome["stale"]
    assert [m["module"] for m in outcome["modules"]] == list(MODULES)
    for m in outcome["modules"]:
        accounted = m["skipped"] + m["not_on_loop"] + m["passed"] + len(m["deviated"]) + len(m["unexplained"])
        assert accounted == m["collected"], m["module"]
        assert 0 < m["passed"] <= m["on_loop"], m["module"]
    assert sum(m["on_loop"] for m in outcome["modules"]) > 1000
    assert sum(len(m["deviated"]) for m in outcome["modules"]) <= 15
    assert outcome["callbacks"] > 20_000


@pytest.mark.slow
def test_each_deviation_has_a_reason_and_is_needed(outcome: dict[str, Any]) -> None:
    assert outcome["stale"] == []
    assert all(len(d.reason) > 40 for d in DEVIATIONS)


@pytest.mark.slow
def test_the_document_says_the_same(outcome: dict[str, Any]) -> None:
    text = (ROOT / "docs/conformance.md").read_text()
    if f"## CPython {outcome['python']}\n" not in text:
        pytest.skip(f"docs/conformance.md has no table for {outcome['python']}")
    assert table(outcome) in text, "write it again: python -m sim.conformance --write docs/conformance.md --also ..."


def test_canary_goes_red() -> None:
    code, text = command("--canary", "--json", "test_locks", "test_queues")
    found = json.loads(text)
    assert code == 0 and found["ok"]
    assert sum(len(m["unexplained"]) for m in found["modules"]) >= 10


def test_a_canary_that_stays_green_fails() -> None:
    code, text = command("--canary", "test_runners")  # one task at a time: no order to turn around
    assert code == 1 and "TOO FEW" in text


def test_a_failure_without_a_reason_is_unexplained() -> None:
    report = run_module("test_runners", _Counted(canary=False), deviations=())
    assert [name for name, _ in report.unexplained] == [
        "test_runners.RunTests.test_asyncio_run_debug",
        "test_runners.RunnerTests.test_interrupt_call_soon",
    ]
    assert "Traceback" in report.unexplained[0][1]


def test_a_reason_that_no_test_needs_is_stale() -> None:
    wrong = Deviation("test_locks.LockTests.test_repr", "made up")
    other = Deviation("test_queues.Nobody.test", "of a module that did not run")
    past = Deviation("test_locks.*", "of another Python", until=(3, 10))
    report = run_module("test_locks", _Counted(canary=False), deviations=(wrong, other, past))
    assert report.deviated == [] and stale([report], (wrong, other, past)) == [wrong]


@pytest.mark.slow
def test_a_test_that_ran_no_callback_is_not_counted(outcome: dict[str, Any]) -> None:
    [futures] = [m for m in outcome["modules"] if m["module"] == "test_futures"]
    assert futures["not_on_loop"] > 50  # repr, state changes without a running loop


def test_nothing_stays_substituted() -> None:
    import asyncio

    before = (asyncio.SelectorEventLoop, asyncio.BaseEventLoop, asyncio.DefaultEventLoopPolicy)
    run_module("test_waitfor", _Counted(canary=False))
    assert (asyncio.SelectorEventLoop, asyncio.BaseEventLoop, asyncio.DefaultEventLoopPolicy) == before
    loop = asyncio.new_event_loop()
    assert type(loop).__module__.startswith("asyncio.")
    loop.close()


def test_an_unknown_module_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["test_streams"])
    assert exit_.value.code == 2 and "unknown module 'test_streams'" in capsys.readouterr().err


def test_an_interpreter_without_tests_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "test.test_asyncio.utils", None)
    assert main(["test_locks"]) == 2
    assert "`test` package" in capsys.readouterr().err
