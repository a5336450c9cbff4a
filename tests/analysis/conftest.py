"""Two small runs, each a complete run directory."""

from __future__ import annotations

import pathlib

import pytest

from analysis.outputs import complete_run
from analysis.rundir import RunDir
from tests.analysis.runs import faulty
from tests.analysis.test_evidence_files import write_run


@pytest.fixture
def passing(tmp_path: pathlib.Path) -> RunDir:
    directory = write_run(tmp_path / "pass", faulty().events, faults=1)
    complete_run(directory)
    return directory


@pytest.fixture
def failing(tmp_path: pathlib.Path) -> RunDir:
    directory = write_run(tmp_path / "fail", faulty(healthy=False).events, faults=1)
    complete_run(directory)
    return directory
