"""Costs fitted to run directories: what a simulated run was made with comes out again."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

from analysis.calibrate_input import CalibrationError, least_squares
from analysis.calibrate_runs import TERMS, fit_runs, fitted_profile, run_calibrate_runs, set_arguments, world_settings
from analysis.compare.order import Difference
from analysis.compare.table import Comparison, Row
from analysis.errors import BadInput
from analysis.foreign.genrm import import_genrm
from analysis.rundir import RunDir
from sim.profiles import load_profile
from tests.bench import fidelity
from tests.mutants.foreign_runs import failures, write

ROOT = pathlib.Path(__file__).parents[2]


def simulated(folder: pathlib.Path, *options: str) -> RunDir:
    command = [
        sys.executable,
        "-m",
        "scenarios",
        "run",
        "smoke",
        "--backend",
        "sim",
        "--no-report",
        "--out",
        str(folder),
    ]
    ran = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return RunDir.open(folder)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run without faults whose network and gateway are not the default ones."""
    folder = tmp_path_factory.mktemp("quiet") / "run"
    return simulated(
        folder, "--set", "steps=[]", "--set", "network.loopback_latency_s=0.0015",
        "--set", "topology.services.chat.gateway_cost_s=0.002",
    )  # fmt: skip


def test_what_a_run_was_made_with_comes_out_again(quiet: RunDir) -> None:
    fit = fit_runs([quiet])
    truth = load_profile("tiny-cpu")
    assert fit.profile == "tiny-cpu" and fit.service == "chat"
    assert fit.error_percent < 2
    assert fit.terms["step"] == pytest.approx(truth.decode_base_ps / 1e12, rel=0.05)
    assert fit.terms["per prompt token"] == pytest.approx(truth.prefill_per_token_ps / 1e12, rel=0.2)
    assert fit.terms["step per request"] == pytest.approx(truth.decode_per_request_ps / 1e12, rel=0.4)
    assert fit.startup_s == pytest.approx(2.0, rel=0.01)
    assert fit.pace.spread == 0 and fit.pace.costs == 1
    settings = world_settings(fit)
    assert settings["network.loopback_latency_s"] == pytest.approx(0.0015, rel=0.1)
    assert settings["topology.services.chat.gateway_cost_s"] == pytest.approx(0.002, rel=0.2)


def test_a_fitted_profile_can_be_run_and_says_where_it_is_from(quiet: RunDir, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "fitted.yaml"
    said = run_calibrate_runs([quiet.path], None, out)
    assert "median error" in said and "to use it: --set topology.services.chat.engine=" in said
    profile = load_profile(str(out))
    assert profile.name == "tiny-cpu-fitted" and profile.startup_ns == pytest.approx(2e9, rel=0.01)
    document = yaml.safe_load(out.read_text())
    assert document["sources"][0]["file"] == "run/events.jsonl" and len(document["sources"][0]["sha256"]) == 64
    assert {entry["origin"] for entry in document["parameters"].values()} >= {"fitted", "assumed", "read"}
    options = [part for one in set_arguments(fit_runs([quiet]), str(out)) for part in ("--set", one)]
    again = fit_runs([simulated(tmp_path / "again", "--set", "steps=[]", *options)])
    for name in TERMS[2:4]:
        assert again.terms[name] == pytest.approx(fit_runs([quiet]).terms[name], rel=0.15, abs=2e-5)


def test_a_pace_that_wanders_is_fitted_and_the_costs_stay(quiet: RunDir, tmp_path: pathlib.Path) -> None:
    noisy = tmp_path / "noisy.yaml"
    more = (
        '  pace_spread: {value: 0.25, unit: "1", origin: assumed}\n'
        "  pace_period: {value: 0.5, unit: s, origin: assumed}\n"
    )
    noisy.write_text((ROOT / "sim" / "profiles" / "tiny-cpu.yaml").read_text() + more)
    runs = [
        simulated(
            tmp_path / seed, "--seed", seed, "--set", "steps=[]", "--set", f"topology.services.chat.engine={noisy}"
        )
        for seed in ("1", "2", "3")
    ]
    steady, fit = fit_runs([quiet]), fit_runs(runs)
    assert fit.pace.spread == pytest.approx(0.25, rel=0.2)
    assert 0.33 < fit.pace.period_s < 0.75
    usual = (1.0, 60, 50, 100, 30, 1)  # a request as they are here, in the units of the terms
    whole = [sum(cost * n for cost, n in zip(one.terms.values(), usual, strict=True)) for one in (steady, fit)]
    assert whole[1] == pytest.approx(whole[0], rel=0.06)
    parameters = fitted_profile(fit, noisy, runs)["parameters"]
    assert parameters["pace_spread"]["value"] == pytest.approx(fit.pace.spread, rel=0.01)
    assert parameters["pace_period"]["unit"] == "s"
    assert "pace_spread" not in fitted_profile(steady, noisy, [quiet])["parameters"], "none was found"


def test_figures_of_several_simulated_runs_are_their_medians() -> None:
    def one(sim: float, equal: bool) -> Comparison:
        row = Row("latency", "metric", "s", sim, (1.0, 2.0, 3.0))
        order = Difference(1, 0, [] if equal else [("a", "b")], 0, 0, [], [], True, [])
        return Comparison("s", ("r",), (row,), (("r", order),))

    found = fidelity.median_of([one(3.0, True), one(1.0, True), one(1.5, True)])
    assert found.rows[0].sim == 1.5 and found.rows[0].typical == 2.0 and found.orders[0][1].equal
    assert not fidelity.median_of([one(3.0, True), one(1.0, False)]).orders[0][1].equal


def test_the_page_tells_fault_free_from_faulted_runs(quiet: RunDir, tmp_path: pathlib.Path) -> None:
    made = fidelity.page([quiet], [quiet, simulated(tmp_path / "killed")], tmp_path, "A note.")
    assert made.count("order of protocol events equal: 1 of 1 runs") == 2
    free, _, faulted = made.partition("## Faulted")
    assert "| latency p50 |" in free and "| death 1 -> routed to again |" in faulted
    assert "A note." in made and "2 pass" in made.replace("3 pass", "2 pass")
    row = next(line for line in free.splitlines() if line.startswith("| latency p50"))
    assert abs(float(row.split("|")[4].strip().rstrip("%"))) < 5


def test_what_cannot_be_fitted_is_bad_input(tmp_path: pathlib.Path, quiet: RunDir) -> None:
    few = import_genrm(write(failures(), tmp_path / "in"), tmp_path / "few").directory
    with pytest.raises(BadInput, match="0 requests that an engine finished, fewer than 40"):
        run_calibrate_runs([few.path], None, None)
    with pytest.raises(BadInput, match="no run directory"):
        run_calibrate_runs([tmp_path / "none"], None, None)
    with pytest.raises(BadInput, match="--base"):
        fitted_profile(fit_runs([quiet]), tmp_path / "none.yaml", [quiet])
    (tmp_path / "odd.yaml").write_text("parameters: [1]")
    with pytest.raises(BadInput, match="is no engine profile"):
        fitted_profile(fit_runs([quiet]), tmp_path / "odd.yaml", [quiet])
    command = [sys.executable, "-m", "analysis", "calibrate", str(quiet.path), "--data", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "not both" in ran.stderr


def refused(*words: str) -> str:
    """What ``calibrate`` says as it refuses; nothing is written."""
    command = [sys.executable, "-m", "analysis", "calibrate", *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and not ran.stdout, ran.stdout + ran.stderr
    return ran.stderr


def test_runs_that_cannot_stand_beside_each_other_are_bad_input(tmp_path: pathlib.Path, quiet: RunDir) -> None:
    out, copy = ("--out", str(tmp_path / "out.yaml")), RunDir(tmp_path / "copy")
    shutil.copytree(quiet.path, copy.path)
    assert "the same run" in refused(str(quiet.path), str(copy.path), *out)
    copy.events.write_bytes(b"".join(copy.events.read_bytes().splitlines(keepends=True)[:-1]))
    assert "events.jsonl: changed" in refused(str(copy.path), *out)
    real = json.loads(copy.run.read_text())
    real["versions"]["engine"] = "sglang-cpu"
    copy.run.write_text(json.dumps(real))
    copy.manifest.unlink()
    assert "several kinds of engines" in refused(str(quiet.path), str(copy.path), *out)
    copy.run.write_text("{}")
    assert "run.json: key 'scenario'" in refused(str(copy.path), *out)
    assert "--base goes with RUNS" in refused("--data", str(tmp_path), "--base", "x.yaml", *out)
    assert not (tmp_path / "out.yaml").exists()


def test_least_squares_finds_the_line_and_refuses_what_has_none() -> None:
    rows = [[1.0, float(x)] for x in range(10)]
    found = least_squares(rows, [3.0 + 2.0 * x for x in range(10)])
    assert found == pytest.approx([3.0, 2.0])
    with pytest.raises(CalibrationError, match="do not tell the costs apart"):
        least_squares([[1.0, 2.0], [2.0, 4.0]], [1.0, 2.0])
    with pytest.raises(CalibrationError, match="never occurs"):
        least_squares([[1.0, 0.0]], [1.0])
    with pytest.raises(CalibrationError, match="never occurs"):
        least_squares([], [])
