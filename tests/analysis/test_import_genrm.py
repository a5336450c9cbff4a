"""Published runs as our evidence: the sound ones pass, wrong ones do not, and no file of any kind makes it crash."""

from __future__ import annotations

import copy
import json
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest

from analysis.errors import BadInput
from analysis.foreign.documents import KEEP_IT, WITHOUT_CACHE, limits
from analysis.foreign.genrm import import_genrm
from analysis.rundir import RunDir
from analysis.verdict import judge_run
from protocol.serving.determinism import GENERATIONS, KEEPS_PREFIXES, attention_backend
from tests.conftest import shared_folder
from tests.mutants.evidence import EVIDENCE_MUTANTS, EvidenceMutant
from tests.mutants.foreign_runs import SOUND, altered, find, state, write

PUBLISHED = (
    "autoscaler_prereg_v2_20260925_r5",
    "autoscaler_prereg_v2_20260926_final_r3",
    "e2e_run_20260924",
    "failure_injection_20260925_r2",
    "reward_consistency_20260927_final_r6",
    "train_continuity_20260925_r5",
)


def published(name: str) -> pathlib.Path:
    folder = shared_folder()
    assert folder is not None
    return folder / "data/genrm_gpu_runs" / name


@pytest.mark.shared
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_gets_the_verdict_that_it_was_published_with(name: str, tmp_path: pathlib.Path) -> None:
    got = import_genrm(published(name), tmp_path / "run")
    assert got.verdict.result == "pass", [(row.name, row.explain) for row in got.verdict.failed()]
    stated = next(row for row in got.verdict.checks if row.name == "stated_verdict")
    assert stated.judged >= 10


@pytest.mark.shared
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_without_its_pass_key_or_its_events_does_not_pass(name: str, tmp_path: pathlib.Path) -> None:
    run = {path.name: json.loads(path.read_text()) for path in published(name).iterdir()}
    del run["verdicts.json"]["E2E_PASS"]
    assert import_genrm(write(run, tmp_path / "a"), tmp_path / "ra").verdict.result == "fail"
    run["verdicts.json"]["E2E_PASS"] = True
    del run["events.json"]
    got = import_genrm(write(run, tmp_path / "b"), tmp_path / "rb")
    assert got.verdict.result != "pass"
    assert any(line.startswith("events.json: missing") for line in got.missing)


@pytest.mark.shared
@pytest.mark.parametrize("name", PUBLISHED)
def test_no_assertion_of_a_published_run_can_be_false(name: str, tmp_path: pathlib.Path) -> None:
    run = {path.name: json.loads(path.read_text()) for path in published(name).iterdir()}
    gates = [key for key, value in run["verdicts.json"].items() if value is True and not key.endswith("_informational")]
    for number, key in enumerate(gates):
        wrong = copy.deepcopy(run)
        wrong["verdicts.json"][key] = False
        got = import_genrm(write(wrong, tmp_path / f"a{number}"), tmp_path / f"r{number}")
        assert got.verdict.result == "fail", key


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_run_passes_and_is_judged_again_as_any_other(kind: str, tmp_path: pathlib.Path) -> None:
    got = import_genrm(write(SOUND[kind](), tmp_path / "in"), tmp_path / "run")
    assert got.verdict.result == "pass", [(row.name, row.explain) for row in got.verdict.failed()]
    again = judge_run(RunDir.open(tmp_path / "run"))
    assert again.as_json() == got.verdict.as_json()
    for name in ("run.json", "events.jsonl", "verdict.json", "report.html", "trace.json", "manifest.json"):
        assert (tmp_path / "run" / name).is_file()


@pytest.mark.parametrize("error", ["ConnectionError: the driver was ended", None])
def test_an_operation_that_was_under_way_where_a_run_broke_off_is_undecided(
    error: str | None, tmp_path: pathlib.Path
) -> None:
    run = SOUND["manual"]()
    run["events.json"] = [one for one in run["events.json"] if one["t"] < 100]
    run["verdicts.json"] = {"functional_error": error, "functional_pass": False} if error else {}
    got = import_genrm(write(run, tmp_path / "in"), tmp_path / "run")
    (row,) = (row for row in got.verdict.checks if row.name == "operations_end")
    assert (row.result, row.judged) == ("inconclusive", 1)
    assert row.explain.startswith("op-out was admitted and is CREATING where the evidence ends")


def test_one_that_is_under_way_at_the_end_that_the_driver_noted_fails(tmp_path: pathlib.Path) -> None:
    run = SOUND["manual"]()
    run["events.json"] = [one for one in run["events.json"] if "ACTIVE" not in one.values()]
    got = import_genrm(write(run, tmp_path / "in"), tmp_path / "run")
    assert next(row for row in got.verdict.checks if row.name == "operations_end").result == "fail"


def test_a_port_that_is_used_again_is_another_engine(tmp_path: pathlib.Path) -> None:
    """The three elastic engines of the failure injection had one address; a call is noted after its engine is gone."""
    got = import_genrm(write(SOUND["failures"](), tmp_path / "in"), tmp_path / "run")
    answers = {e.data["request"]: e.data["replica"] for e in got.directory.read_events() if e.kind == "request.done"}
    assert [answers[call] for call in ("s1-0", "s1-1", "s2-0", "s2-1")] == ["genrm-0", "genrm-1", "genrm-2", "genrm-0"]
    assert {answers["s3-0"], answers["s3-1"]} == {"genrm-0"}
    killed = [e.data["target"] for e in got.directory.read_events() if e.kind == "fault.injected"]
    assert killed == ["genrm-3"]


def test_the_same_run_is_imported_to_the_same_bytes(tmp_path: pathlib.Path) -> None:
    folder = write(SOUND["autoscaler"](), tmp_path / "in")
    for name in ("a", "b"):
        import_genrm(folder, tmp_path / name)
    assert (tmp_path / "a/events.jsonl").read_bytes() == (tmp_path / "b/events.jsonl").read_bytes()


@pytest.mark.parametrize(
    "mutant", EVIDENCE_MUTANTS, ids=lambda mutant: f"{mutant.source}-{mutant.name}".replace(" ", "-")
)
def test_a_wrong_run_is_caught_by_its_check(mutant: EvidenceMutant, tmp_path: pathlib.Path) -> None:
    verdict = mutant.judged(tmp_path)
    rows = {row.name.partition("(")[0]: (row.result, row.explain) for row in verdict.checks}
    assert mutant.is_caught(verdict), (verdict.result, rows[mutant.check], verdict.failed())


def test_every_item_has_a_run_and_says_what_is_wrong() -> None:
    sources = {source for mutant in EVIDENCE_MUTANTS for source in mutant.source.split(", ")}
    # M47 is a rule of the linter: see the next test.
    assert {f"M{number}" for number in range(40, 55)} - {"M47"} <= sources
    assert len({mutant.name for mutant in EVIDENCE_MUTANTS}) == len(EVIDENCE_MUTANTS)
    assert [mutant.name for mutant in EVIDENCE_MUTANTS if not mutant.defect.endswith(".")] == []


@pytest.mark.dev_tools
def test_an_import_below_code_is_refused_by_the_linter(tmp_path: pathlib.Path) -> None:
    """M47: imports after guarded ones, found by the last CI job only."""
    wrong = "try:\n    import yaml\nexcept ImportError:\n    yaml = None\nX = 1\nimport os\n\nprint(os, yaml, X)\n"
    root = pathlib.Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(root / "pyproject.toml"),
        "--stdin-filename",
        "x.py",
        "-",
    ]
    ran = subprocess.run(command, input=wrong, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 1 and "E402" in ran.stdout, ran.stdout + ran.stderr


def test_a_label_that_two_phases_share_does_not_mislead(tmp_path: pathlib.Path) -> None:
    """M52, the other way about: by label, LOW of the sound run ends after the scale-out, and A1 would be false."""
    run = SOUND["autoscaler"]()
    lows = [row["t"] for row in run["load_requests.json"] if row["phase"] == "LOW"]
    out = next(row for row in run["scale_history.json"] if row["action"] == "scale_out")
    assert min(lows) < out["triggered_at"] - 1_700_000_000 < max(lows)
    assert import_genrm(write(run, tmp_path / "in"), tmp_path / "run").verdict.result == "pass"


@pytest.mark.parametrize("kind", SOUND)
def test_whatever_is_missing_is_said(kind: str, tmp_path: pathlib.Path) -> None:
    for number, name in enumerate(SOUND[kind]()):
        got = import_genrm(
            write(altered(kind, lambda run, name=name: run.pop(name)), tmp_path / f"a{number}"), tmp_path / f"r{number}"
        )
        if name in (
            "events.json",
            "verdicts.json",
            "train_events.json",
            "phase_boundaries.json",
            "scale_history_round_b.json",
        ):
            assert got.verdict.result != "pass", name
            assert any(line.startswith(f"{name}: missing") for line in got.missing), got.missing


def test_a_folder_that_is_none_and_a_target_that_exists_are_bad_input(tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        import_genrm(tmp_path / "nowhere", tmp_path / "run")
    folder = write(SOUND["manual"](), tmp_path / "in")
    with pytest.raises(BadInput, match="exists already"):
        import_genrm(folder, tmp_path)
    got = import_genrm(write({}, tmp_path / "empty"), tmp_path / "run")
    assert got.verdict.result == "inconclusive"


ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1e300,
    10**40,
    "x",
    "\ud800",
    "",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    "1/0",
    "nan/inf",
)


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("seed", range(12))
def test_no_odd_value_makes_it_crash_and_none_makes_a_pass_of_a_lie(
    kind: str, seed: int, tmp_path: pathlib.Path
) -> None:
    rng = random.Random(f"{kind}-{seed}")
    run: Any = SOUND[kind]()
    for _ in range(rng.randrange(1, 6)):
        _spoil(run, rng)
    for name in list(run):
        if rng.random() < 0.1:
            run[name] = rng.choice(["", "[", "{}", "[]", "null", "NaN", '[{"t": NaN}]', "[" * 5000, "\x00"])
    if isinstance(run.get("verdicts.json"), dict):
        run["verdicts.json"]["E2E_PASS"] = False
    got = import_genrm(write(run, tmp_path / "in"), tmp_path / "run")
    assert got.verdict.result != "pass"
    assert judge_run(RunDir.open(tmp_path / "run")).as_json() == got.verdict.as_json()


def _spoil(value: Any, rng: random.Random) -> None:
    """Puts something odd somewhere into a nested value."""
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], (dict, list)) or not value[key] or rng.random() < 0.2:
            value[key] = copy.deepcopy(rng.choice(ODD))
            return
        value = value[key]


def test_the_command_says_what_it_found(tmp_path: pathlib.Path) -> None:
    run = SOUND["manual"]()
    state(run, load_total_requests=5)
    find(run, "load_stopped")["failed"] = "none"
    folder = write(run, tmp_path / "in")
    command = [sys.executable, "-m", "analysis", "import", "genrm", str(folder), "--out", str(tmp_path / "run")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2], check=False)
    assert ran.returncode in (1, 3), ran.stderr
    assert "load_stopped has no total or no number of failures" in ran.stderr
    assert "manual 1-2-1" in ran.stdout
    again = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2], check=False)
    assert again.returncode == 2 and "exists already" in again.stderr


def test_a_folder_of_runs_is_none_and_names_them(tmp_path: pathlib.Path) -> None:
    write(SOUND["manual"](), tmp_path / "all/one")
    words = ["import", "genrm", str(tmp_path / "all"), "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "analysis", *words]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2], check=False)
    assert ran.returncode == 3
    assert "this folder holds runs, and is none; import one of them: 'one'" in ran.stderr


@pytest.mark.parametrize(
    ("page", "claims"),
    [
        ("Deterministic mode on Blackwell takes flashinfer; there the prefix cache survives.", 1),
        ("| Blackwell | flashinfer keeps the radix cache |", 1),
        ("# fa3 before Blackwell.\n# flashinfer on Blackwell: the prefix\n# cache stays.", 1),
        ("On Blackwell flashinfer is taken, with the prefix cache off.", 0),
        ("On Blackwell it is flashinfer, which does not keep the prefix cache.", 0),
        ("On Blackwell triton keeps the prefix cache.", 0),
        ("On Hopper the prefix cache survives.", 0),
        ("The prefix cache survives. Blackwell is another matter.", 0),
    ],
)
def test_a_page_states_the_limit_of_deterministic_mode(page: str, claims: int) -> None:
    """M39c: with the backend that is chosen on Blackwell there is no prefix cache, and nobody may say otherwise."""
    assert len(limits(page)) == claims, limits(page)


def test_our_own_pages_state_it() -> None:
    chosen = {gpu: attention_backend(True, gpu, "", "") for gpu in GENERATIONS}
    assert {gpu: one for gpu, one in chosen.items() if one not in KEEPS_PREFIXES} == WITHOUT_CACHE
    assert KEEP_IT == KEEPS_PREFIXES
    root = pathlib.Path(__file__).parents[2]
    pages = [*root.glob("docs/*.md"), root / "README.md", root / "protocol/serving/determinism.py"]
    assert {page.name: limits(page.read_text()) for page in pages if limits(page.read_text())} == {}
    assert "Blackwell" in (root / "docs/gpu.md").read_text()
