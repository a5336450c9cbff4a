"""Every check and criterion passes, fails and is undecided on some hand-written history, and no two are copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.acceptance import CRITERIA
from analysis.checks import INVARIANTS

HERE = Path(__file__).parent
NEVER_FAILS = {"faults_hit": "a run whose faults met nothing says nothing: it is inconclusive, never failed"}
NOT_HERE = {
    "files_read", "stated_verdict", "resources_returned", "load_answered", "victims_busy", "training_continued",
    "documents_agree",
}  # fmt: skip
"""Criteria on imported runs: their histories are small runs in the published format (tests/mutants/foreign_runs.py)."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the tests of checks, run once more, had each check say (tests/analysis/said.py)."""
    found = tmp_path_factory.mktemp("said") / "said.json"
    files = [*sorted(HERE.glob("test_checks_*.py")), HERE / "test_acceptance.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.analysis.said", "-p", "no:cacheprovider", *map(str, files)],
        cwd=HERE.parents[1],
        # In one process, whatever this run has several of: what they said is in its memory.
        env={**os.environ, "SEATRIAL_SAID": str(found), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return json.loads(found.read_text())


def test_each_of_them_says_all_three(said: dict[str, dict]) -> None:
    names = {check.name for check in INVARIANTS} | CRITERIA.keys() - NOT_HERE
    missing = [
        f"{name}: never {result}"
        for name in sorted(names)
        for result in ("pass", "fail", "inconclusive")
        if not said["said"].get(name, {}).get(result) and not (result == "fail" and name in NEVER_FAILS)
    ]
    assert not missing, "\n".join(missing)
    assert not [name for name in NEVER_FAILS if said["said"][name].get("fail")]


def test_no_history_is_a_copy_of_another(said: dict[str, dict]) -> None:
    assert not said["copies"], "\n".join(
        f"{one} and {other} judge one history by {name}" for one, other, name in said["copies"]
    )
