"""The notebooks run from top to bottom: on the run that they make, the one shipped beside them, and another one."""

from __future__ import annotations

import os
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

from analysis.rundir import RunDir, verify_manifest
from analysis.verdict import differences, judge_run
from tests.analysis.runs import faulty
from tests.analysis.test_evidence_files import write_run

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
REMAKE = "python -m tests.docs makes the shipped run anew"
OWN = {"continuity": "train_continuity", "scale_timelines": "autoscaler_cycle"}
NOTHING = {"continuity": "nothing is trained in this run", "scale_timelines": "nothing is scaled in this run"}


def execute(name: str, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    monkeypatch.delenv("MPLBACKEND", raising=False)  # where it is set, a notebook shows no pictures
    root = str(NOTEBOOKS.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_the_shipped_run_is_unchanged_and_judges_as_stored() -> None:
    from analysis.reader import read_json

    run = RunDir.open(NOTEBOOKS / "tiny_run")
    assert verify_manifest(run) == []
    verdict = judge_run(run)
    assert verdict.result == "pass", REMAKE
    assert differences(verdict, read_json(run.verdict)) == [], REMAKE


def test_notebooks_are_kept_without_outputs() -> None:
    assert NAMES == ["continuity", "scale_timelines"]
    for name in NAMES:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        assert not printed(notebook) and not pictures(notebook)
        assert all(cell.get("execution_count") is None for cell in notebook.cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_on_the_run_that_they_make(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_RUN", raising=False)
    notebook = execute(name, monkeypatch)
    assert f"{OWN[name]}, backend sim, seed 1; changed files: none" in printed(notebook)
    assert "pass" in printed(notebook) and NOTHING[name] not in printed(notebook)
    assert pictures(notebook) == 2
    tables = "".join(output.get("data", {}).get("text/html", "") for cell in notebook.cells
                     for output in cell.get("outputs", []))  # fmt: skip
    for word in ("end of the run", "step 7 ended") if name == "continuity" else ("COMPLETED", "token_usage_high"):
        assert word in tables


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_on_the_shipped_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_RUN", str(NOTEBOOKS / "tiny_run"))
    notebook = execute(name, monkeypatch)
    assert "smoke, backend sim, seed 1; changed files: none" in printed(notebook)
    assert NOTHING[name] in printed(notebook)  # in words, not as an empty picture
    assert pictures(notebook) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_on_a_run_of_ones_own(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", faulty(healthy=False).events)
    monkeypatch.setenv("SEATRIAL_RUN", str(run.path))
    notebook = execute(name, monkeypatch)
    assert "fail" in printed(notebook)
    assert pictures(notebook) == 1
