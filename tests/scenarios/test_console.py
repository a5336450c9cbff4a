"""What a terminal shows and what a machine reads."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rich.console import Console

from analysis.checks.base import CheckResult
from analysis.verdict import Verdict
from scenarios.console import Shell
from scenarios.load import Scenario
from scenarios.orchestrate import Progress
from scenarios.runner import TraceFacts, run_in_sim

ROWS = (
    CheckResult("good", "invariant", "pass", "9 of 9", "all", 9, (), "", True, True),
    CheckResult("bad", "invariant", "fail", "1 of 9", "all", 9, (4, 7), "request r was lost", True, True),
    CheckResult("absent", "invariant", "inconclusive", "0", "all", 0, (), "not applicable", False, False),
    CheckResult("idle", "invariant", "inconclusive", "0 of 0", "all", 0, (), "nothing was judged", False, True),
    CheckResult("asked", "invariant", "inconclusive", "0 of 0", "all", 0, (), "nothing was judged", True, True),
)


def _terminal(shell: Shell) -> io.StringIO:
    text = io.StringIO()
    shell.out = Console(file=text, force_terminal=True, width=100)
    shell.err = Console(file=text, force_terminal=True, width=100)
    return text


def test_a_terminal_gets_a_coloured_table_of_what_applies() -> None:
    shell = Shell(False)
    text = _terminal(shell)
    shell.verdict(Verdict("fail", ROWS, 12))
    shown = text.getvalue()
    assert "\x1b[" in shown and "1 of 9: request r was lost (events 4, 7)" in shown
    assert "good" in shown and "absent" not in shown


def test_elsewhere_it_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Shell(False).verdict(Verdict("fail", ROWS, 12))
    assert (
        capsys.readouterr().out
        == "pass         good: 9 of 9\nfail         bad: 1 of 9: request r was lost (events 4, 7)\n"
        "not judged   idle: 0 of 0: nothing was judged\ninconclusive asked: 0 of 0: nothing was judged\n"
    )


def test_the_progress_bar_changes_nothing_of_the_run(small: Callable[..., Scenario]) -> None:
    shell = Shell(False)
    text = _terminal(shell)
    with shell.running("small", 10.0) as watch:
        watched = run_in_sim(small(), 5, watch=watch)
    assert watched.result.digest == run_in_sim(small(), 5).result.digest
    assert "small" in text.getvalue()


def test_the_summary_tells_what_was_not_done_and_passed_over(
    small: Callable[..., Scenario], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_in_sim(small(), 5)
    ran.result.refused.append("steps[0] sigkill: it is dead already")
    facts = [TraceFacts("t.csv", 10, 3.0, 4)]
    Shell(False).ran(small(), 5, ran, facts, "again")
    out = capsys.readouterr().out
    assert "not done: steps[0] sigkill: it is dead already\n" in out
    assert "t.csv: 4 rows without output tokens were passed over\n" in out
    Shell(True).ran(small(), 5, ran, facts, "again")
    told = json.loads(capsys.readouterr().out)
    assert (told["repeat"], told["traces"][0]["zero_output"], told["result"]) == ("again", 4, "pass")


class _Stage:
    """What the console reads of a real run under way."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.progress.phase = "workload"
        self.seconds = 12.3
        self.tail = SimpleNamespace(sent=40, done=38, faults=2, events=512)
        self.url = ""


def test_a_real_run_tells_once_where_its_control_apis_are(capsys: pytest.CaptureFixture[str]) -> None:
    stage = _Stage()
    with Shell(False).running_for_real("small") as watch:
        for stage.url in ("", "http://127.0.0.1:8090", "http://127.0.0.1:8090"):
            watch(stage)  # type: ignore[arg-type]  # a stand-in of a stage
    where = "http://127.0.0.1:8090"
    assert capsys.readouterr().err == f"small: control APIs on {where}, described at {where}/openapi.json\n"


def test_a_real_run_tells_what_it_has_sent_and_which_faults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "small: workload, 12 s, 40 requests sent, 38 ended, 2 faults, 512 events"
    clock = iter((0.0, 5.0, 11.0, 11.0, 12.0))
    monkeypatch.setattr("scenarios.console.monotonic", lambda: next(clock))
    with Shell(False).running_for_real("small") as watch:
        for _ in range(3):
            watch(_Stage())  # type: ignore[arg-type]
    assert capsys.readouterr().err == f"{line}\n"  # once in ten seconds
    shell = Shell(False)
    text = _terminal(shell)
    with shell.running_for_real("small") as watch:
        watch(_Stage())  # type: ignore[arg-type]
    assert "40 requests sent" in text.getvalue()
