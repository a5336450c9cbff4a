"""A component's step that never comes back ends the run, whatever it catches; healthy runs are the same without."""

from __future__ import annotations

import pathlib
import signal
import threading

import pytest

from scenarios.load import Scenario, parse
from scenarios.runner import run_in_sim
from tests.scenarios.conftest import SMALL, Command, component_of


def _small(component: str = "") -> Scenario:
    changes = ["workload.for_s=1", *([component_of(component)] if component else [])]
    return parse(SMALL, "small.yaml", pathlib.Path(), changes)


def test_an_endless_step_ends_the_run_and_names_actor_task_and_method(capfd: pytest.CaptureFixture[str]) -> None:
    ran = run_in_sim(_small("SpinningGateway"), 5, hang_after_s=0.3)
    assert ran.result.reason == "endless_callback" and ran.verdict.result == "fail"
    for part in ("gateway-chat-0/1, task generate", "SpinningGateway.generate (components.py:", "0.3 s of real time"):
        assert part in ran.result.detail
    rows = {row.name: row.result for row in ran.verdict.checks}
    assert rows["run_finished"] == rows["nothing_lost"] == "fail" and rows["no_anomalies"] == "pass"
    assert "while self._seen == 10" in capfd.readouterr().err
    assert run_in_sim(_small(), 5).verdict.result == "pass"  # nothing of it is left


def test_evidence_is_the_same_under_a_busy_watchdog() -> None:
    assert run_in_sim(_small(), 5, hang_after_s=0.5).result.digest == run_in_sim(_small(), 5).result.digest


def test_a_step_that_catches_everything_ends_with_its_process(command: Command, small_file: pathlib.Path) -> None:
    words = ("run", small_file, "--backend", "sim", "--out", "run", "--hang-after", "0.3")
    done = command(*words, "--set", component_of("ClingingGateway"))
    assert done.returncode == 3 and done.stderr.endswith("the process ends here, without a verdict\n"), done.stderr
    assert sorted(path.name for path in (small_file.parent / "run").iterdir()) == ["events.jsonl", "run.json"]


def test_a_step_in_c_code_ends_with_its_process(command: Command, small_file: pathlib.Path) -> None:
    words = ("run", small_file, "--backend", "sim", "--out", "run", "--hang-after", "0.3")
    done = command(*words, "--set", component_of("DeafGateway"))
    assert done.returncode == -signal.SIGPROF and " in generate" in done.stderr, done.stderr


def test_beside_the_main_thread_it_is_nothing() -> None:
    found: list[str] = []

    def body() -> None:
        found.append(run_in_sim(_small(), 5).verdict.result)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert found == ["pass"]
