"""A run beside others: figures by name, the order of events by cause, and the published runs within a tenth."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from analysis.compare.course import Course, by_name
from analysis.compare.order import Named, ProtocolEvents, difference
from analysis.compare.table import Row, as_svg, compare, summary
from analysis.errors import BadInput
from analysis.foreign.genrm import import_genrm
from analysis.rundir import RunDir
from tests.bench.published import ONE_SIDED
from tests.conftest import shared_folder
from tests.mutants.foreign_runs import Run, altered, find, write

ROOT = pathlib.Path(__file__).parents[2]


def imported(tmp_path: pathlib.Path, name: str, kind: str = "failures", alter: Any = lambda run: None) -> RunDir:
    return import_genrm(write(altered(kind, alter), tmp_path / f"{name}-in"), tmp_path / name).directory


def row(sim: float | None, *real: float, unit: str = "s", group: str = "phase") -> Row:
    return Row("x", group, unit, sim, real)


def test_a_figure_is_held_against_the_median_of_the_real_runs() -> None:
    assert row(11.0, 9.0, 10.0, 12.0).error_percent == pytest.approx(10.0)
    assert row(11.0, 9.0, 10.0, 12.0).spread_percent == pytest.approx(30.0)
    assert row(11.0, 9.0, 10.0, 12.0).inside is True
    assert row(12.5, 9.0, 10.0, 12.0).inside is False
    assert row(12.5, 10.0).inside is None and row(12.5, 10.0).spread_percent is None
    assert row(11.2, 10.0).within_aim is False
    assert row(0.15, 0.06).within_aim is True  # a poll cannot tell them apart
    assert row(0.15, 0.06, group="metric").within_aim is False
    assert row(5.0, unit="1", group="metric").within_aim is None and row(None, 5.0).error_percent is None
    assert row(0.0, 0.0, unit="1").within_aim is True and row(3.0, 0.0, unit="1").within_aim is False


def test_what_only_one_side_has_is_not_within_the_aim_unless_somebody_says_why() -> None:
    for group in ("phase", "total"):
        assert row(5.0, group=group).within_aim is False and row(None, 5.0, group=group).within_aim is False
        assert Row("x", group, "s", 5.0, (), "nobody looked").within_aim is None
    for group in ("pause", "metric"):  # what a recorder did not measure, or whoever drove the run did otherwise
        assert row(5.0, group=group).within_aim is None
    assert (row(5.0).one_sided, row(None, 5.0).one_sided, row(5.0, 5.0).one_sided) == ("sim", "real", "")


def test_a_run_without_its_last_scale_in_is_not_as_good_as_one_with_it(tmp_path: pathlib.Path) -> None:
    def without(run: Run) -> None:
        asked = find(run, "s3_scale_in_submitted")["t"]
        run["events.json"][:] = [
            one for one in run["events.json"] if one["t"] < asked or not one["event"].startswith("s3")
        ]

    whole, cut = imported(tmp_path, "a"), imported(tmp_path, "b", alter=without)
    for sim, real, side in ((whole, cut, "sim"), (cut, whole, "real")):
        found = compare(sim, [real])
        good, judged = found.counted("phase")
        lost = [one.name for one in found.rows if one.one_sided == side and one.group == "phase"]
        assert judged - good == len(lost) > 0 and any("in 3" in name for name in lost)
        assert sum(f"only in the {side} run" in line for line in summary(found)) >= len(lost)
        command = [sys.executable, "-m", "analysis", "compare", str(sim.path), str(real.path)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert ran.returncode == 1 and "only in the" in ran.stdout
    names = [one.name for one in found.rows if one.one_sided and one.group in ("phase", "total")]
    excused = compare(cut, [whole], {**dict.fromkeys(names, "it was cut off")})
    assert excused.counted("phase")[0] == excused.counted("phase")[1]
    with pytest.raises(BadInput, match="no phase or total that only one side has is called so"):
        compare(cut, [whole], {"in 1 *": "both sides have it"})
    bare = subprocess.run([*command, "--one-side", "in 3 *="], capture_output=True, text=True, cwd=ROOT, check=False)
    assert bare.returncode == 2 and "write NAME=REASON" in bare.stderr


def test_the_figures_of_a_run_are_what_a_watch_would_show(tmp_path: pathlib.Path) -> None:
    figures = by_name(Course.of(imported(tmp_path, "run")).figures())
    assert figures["out 1 asked -> ACTIVE"].value == pytest.approx(43.9)
    assert figures["in 1 asked -> COMPLETED"].value == pytest.approx(9.1)
    assert figures["in 2 asked -> FAILED, not clean"].value == pytest.approx(65.8)
    assert figures["in 2 asked -> clean"].value == pytest.approx(607.2)
    assert figures["in 2 reconciles refused"].value == 54
    assert figures["in 3 asked -> sigkill 1"].value == pytest.approx(0.2)
    assert figures["sigkill 1 -> in 3 over, calls answered"].value == pytest.approx(26.1)
    assert figures["requests"].value == 6 and figures["faults"].value == 1
    assert figures["in 1 over -> out 2 asked"].group == "pause"


def named(**processes: tuple[str, int, dict[str, int]]) -> ProtocolEvents:
    """``a=(process, n, {process: n that it knows of})``; time is the place."""
    found = ProtocolEvents()
    for place, (name, (process, n, known)) in enumerate(processes.items()):
        found[name] = Named(name, (process, 0), n, place, {(other, 0): m for other, m in known.items()})
    return found


def test_only_causes_order_events_and_a_reversed_pair_is_a_difference() -> None:
    first = named(a=("p", 1, {}), b=("q", 1, {"p": 1}), c=("r", 1, {}))
    same = named(c=("r", 1, {}), a=("p", 1, {}), b=("q", 1, {"p": 1}))
    assert difference(first, same).equal and not difference(first, same).same_sequence
    turned = named(b=("q", 1, {}), a=("p", 1, {"q": 1}), c=("r", 1, {}))
    found = difference(first, turned)
    assert not found.equal and found.reversed == [("a", "b")] and found.pairs == 1
    unordered = named(b=("q", 1, {}), a=("p", 1, {}), c=("r", 1, {}))
    found = difference(first, unordered)
    assert found.equal and found.only_first == 1 and found.pairs == 0
    shorter = named(a=("p", 1, {}), b=("q", 1, {"p": 1}))
    assert difference(first, shorter).missing_in_second == ["c"] and not difference(first, shorter).equal
    shorter.partial = True
    assert difference(first, shorter).equal
    assert difference(shorter, first).missing_in_first == ["c"] and not difference(shorter, first).equal
    assert not difference(first, named()).equal


def test_a_run_beside_itself_and_beside_a_slower_one(tmp_path: pathlib.Path) -> None:
    run = imported(tmp_path, "a")
    found = compare(run, [run, imported(tmp_path, "b")])
    assert all(one.error_percent == 0 and one.inside for one in found.rows if one.sim)
    assert all(order.equal and order.same_sequence for _, order in found.orders)

    def slower(run: Run) -> None:
        late = find(run, "s3_done")["t"]
        for one in run["events.json"]:
            one["t"] += 10 if one["t"] >= late else 0

    found = compare(run, [imported(tmp_path, "c", alter=slower)])
    wrong = {one.name for one in found.rows if one.within_aim is False}
    assert wrong == {"in 3 asked -> COMPLETED, calls answered", "sigkill 1 -> in 3 over, calls answered"} | (
        {"in 3 asked -> COMPLETED"} & {one.name for one in found.rows if one.sim is not None}
    )
    assert any("phases within 10%" in line for line in summary(found))
    picture = as_svg(found)
    assert picture.startswith("<svg") and "sigkill 1 -&gt; in 3 over" in picture


def test_another_order_of_protocol_events_is_told(tmp_path: pathlib.Path) -> None:
    def earlier(run: Run) -> None:
        """The next scale-out is asked for before the end of the scale-in was seen."""
        done, out = (
            find(run, "s1_done"),
            [one for one in run["events.json"] if one["event"] == "scale_out_submitted"][1],
        )
        out["t"] = done["t"] - 0.5
        run["events.json"].sort(key=lambda one: one["t"])

    found = compare(imported(tmp_path, "a"), [imported(tmp_path, "b", alter=earlier)])
    ((_, order),) = found.orders
    assert ("in 1 COMPLETED", "out 2 admitted") in order.reversed and not order.equal


def test_runs_of_two_scenarios_are_not_compared(tmp_path: pathlib.Path) -> None:
    with pytest.raises(BadInput, match="compare runs of one scenario"):
        compare(imported(tmp_path, "a"), [imported(tmp_path, "b", "manual")])


def test_the_command_prints_json_and_draws(tmp_path: pathlib.Path) -> None:
    run, other, svg = imported(tmp_path, "a"), imported(tmp_path, "b"), tmp_path / "a.svg"
    command = [sys.executable, "-m", "analysis", "compare", str(run.path), str(other.path)]
    ran = subprocess.run([*command, "--json", "--svg", str(svg)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["order"][0]["equal"] is True and len(document["rows"]) > 15
    assert svg.read_text().endswith("</svg>\n")
    missing = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, cwd=ROOT, check=False)
    assert missing.returncode == 2 and "no run directory" in missing.stderr
    nowhere = [*command, "--json", "--svg", str(tmp_path / "none" / "a.svg")]
    ran = subprocess.run(nowhere, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 2 and not ran.stdout and "cannot be written" in ran.stderr


def compared(sim: RunDir, *real: RunDir) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    command = [sys.executable, "-m", "analysis", "compare", str(sim.path), *(str(one.path) for one in real)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return ran.returncode, ran.stdout, ran.stderr


def test_a_run_counts_once_and_not_beside_itself(tmp_path: pathlib.Path) -> None:
    run, other = imported(tmp_path, "a"), imported(tmp_path, "b")
    code, said, why = compared(run, run)
    assert code == 2 and not said and "beside itself" in why
    code, said, why = compared(run, other, other)
    assert code == 2 and not said and "the same run" in why


def test_evidence_that_cannot_be_verified_is_at_best_inconclusive(tmp_path: pathlib.Path) -> None:
    run, other = imported(tmp_path, "a"), imported(tmp_path, "b")
    assert compared(run, other)[0] == 0
    other.manifest.unlink()
    code, _, why = compared(run, other)
    assert code == 3 and "cannot be verified" in why


def test_a_run_of_another_world_than_meant_is_told(tmp_path: pathlib.Path) -> None:
    run = imported(tmp_path, "a")
    _, _, why = compared(run, imported(tmp_path, "b"))
    assert f"{run.path}: a run of the world 'real' in place of one of 'sim'" in why


def test_what_some_of_the_real_runs_lack_is_told(tmp_path: pathlib.Path) -> None:
    def without(run: Run) -> None:
        asked = find(run, "s3_scale_in_submitted")["t"]
        run["events.json"][:] = [
            one for one in run["events.json"] if one["t"] < asked or not one["event"].startswith("s3")
        ]

    found = compare(imported(tmp_path, "a"), [imported(tmp_path, "b"), imported(tmp_path, "c", alter=without)])
    lacking = {one.name for one in found.rows if one.without}
    assert "in 3 asked -> sigkill 1" in lacking
    assert "  in 3 asked -> sigkill 1: in 1 of 2 real runs; the median is of those" in summary(found)
    assert any(one["real_runs_without"] == 1 for one in found.as_json()["rows"])


def test_an_excuse_within_another_is_for_something(tmp_path: pathlib.Path) -> None:
    whole = imported(tmp_path, "a")
    found = compare(imported(tmp_path, "b", alter=no_faults), [whole], {"*": "all", "faults": "none"})
    assert next(one.excuse for one in found.rows if one.name == "faults") == "all"


def no_faults(run: Run) -> None:
    run["events.json"][:] = [one for one in run["events.json"] if "kill" not in one["event"]]


BESIDE = (
    ("failure_injection_genrm", "failure_injection_20260925_r2", 10),
    ("manual_1_2_1", "e2e_run_20260924", 3),
    ("autoscaler_cycle", "autoscaler_prereg_v2_20260925_r5", 7),
    ("train_continuity", "train_continuity_20260925_r5", 2),
)


@pytest.mark.shared
@pytest.mark.parametrize(("scenario", "published", "phases"), BESIDE, ids=[one[0] for one in BESIDE])
def test_the_catalog_beside_the_published_run(
    scenario: str, published: str, phases: int, tmp_path: pathlib.Path
) -> None:
    folder = shared_folder()
    assert folder is not None
    command = [
        sys.executable,
        "-m",
        "scenarios",
        "run",
        scenario,
        "--backend",
        "sim",
        "--no-report",
        "--out",
        str(tmp_path / "sim"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stdout
    real = import_genrm(folder / "data/genrm_gpu_runs" / published, tmp_path / "real").directory
    found = compare(RunDir.open(tmp_path / "sim"), [real], ONE_SIDED.get(scenario, {}))
    wrong = {one.name for one in found.rows if one.group in ("phase", "total") and one.within_aim is False}
    assert not wrong
    assert found.counted("phase") == (phases, phases)
    ((_, order),) = found.orders
    assert order.equal and order.same_sequence, order
