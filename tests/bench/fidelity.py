"""How near the simulated world is to the real one: ``python -m tests.bench.fidelity --fit DIR... --test DIR...``.

Engine, network and gateway costs are fitted to one set of real runs (``analysis calibrate``), the scenario is simulated
with them, and held against the other set (``analysis compare``). Where the fitted pace of an engine wanders, each
figure of the simulated world is the median of runs that differ in the draws of that alone. Fault-free and faulted runs
are told apart by what was injected. docs/compare.md has the commands for the runs, with tests/bench/fidelity.yaml.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import click

from analysis.calibrate_output import profile_text
from analysis.calibrate_runs import Fit, fit_runs, fitted_profile, pace_said, set_arguments, world_settings
from analysis.compare.table import AIM_PERCENT, Comparison, amount, compare
from analysis.errors import BadInput
from analysis.outputs import require_distinct, require_unchanged
from analysis.rundir import RunDir
from analysis.verdict import judge_run

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "fidelity.md"
KINDS = ("fault-free", "faulted")
DRAWS = 9
"""Simulated runs of each kind, where the pace wanders."""

_HEAD = """\
# How near the simulated world is to the real one

Made by `python -m tests.bench.fidelity`; do not edit. Costs of engine, network and gateway are fitted to one set of
real runs, the scenario is simulated with them, and held against real runs of the same scenario, seed and machine. *Sim*
is the median of {draws}. *Real* is the median of the
runs that were tested; *spread* goes from the least of them to the largest, in % of the median. An order is equal where
it is in each of the simulated runs. Aim: within {aim:g}%, inside the spread for 80% of the metrics, the order of
protocol events equal.

"""


def kind_of(directory: RunDir) -> str:
    """Whether a fault was injected: one that was to come and did not is none."""
    return KINDS[any(event.kind == "fault.injected" for event in directory.read_events())]


def simulate(like: RunDir, fit: Fit, profile: pathlib.Path, out: pathlib.Path) -> RunDir:
    """The scenario of a real run in the simulated world, with fitted costs.

    Raises:
        RuntimeError: the run could not be made; the text is what it said.
    """
    info = like.info()
    scenario = out.parent / f"{out.name}.yaml"
    scenario.write_text(info.scenario_text, encoding="utf-8")
    command = [sys.executable, "-m", "scenarios", "run", str(scenario), "--backend", "sim", "--no-report"]
    command += ["--seed", str(info.seed), "--out", str(out)]
    for one in set_arguments(fit, str(profile)):
        command += ["--set", one]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not (out / "events.jsonl").is_file():
        raise RuntimeError(f"{' '.join(command)}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return RunDir.open(out)


def median_of(found: Sequence[Comparison]) -> Comparison:
    """Simulated runs, each compared with the same real ones, as one: the median of what those have that have a figure.

    The order of events of a real run is taken from a simulated run where it differs, if there is one.
    """
    rows = {row.name: row for one in reversed(found) for row in one.rows}
    sims: dict[str, list[float]] = {name: [] for name in rows}
    for one in found:
        for row in one.rows:
            if row.sim is not None:
                sims[row.name].append(row.sim)
    orders = [min(of_run, key=lambda one: one[1].equal) for of_run in zip(*(one.orders for one in found), strict=True)]
    return dataclasses.replace(
        found[0],
        rows=tuple(
            dataclasses.replace(row, sim=statistics.median(sims[name]) if sims[name] else None)
            for name, row in rows.items()
        ),
        orders=tuple(orders),
    )


def section(kind: str, found: Comparison, fitted: int) -> list[str]:
    """One kind of runs, as Markdown."""
    lines = [
        f"## {kind.capitalize()}",
        "",
        f"Fitted to {fitted} runs in all, tested on {len(found.real)} of this kind.",
        "",
    ]
    lines += ["| | sim | real | error | spread | inside |", "| --- | --- | --- | --- | --- | --- |"]
    for row in found.rows:
        error = "" if row.error_percent is None else f"{row.error_percent:+.1f}%"
        spread = "" if row.spread_percent is None else f"{row.spread_percent:.0f}%"
        inside = "" if row.inside is None else "yes" if row.inside else "no"
        cells = (row.name, amount(row.sim, row.unit), amount(row.typical, row.unit), error, spread, inside)
        lines.append("| " + " | ".join(cells) + " |")
    judged = [row for row in found.rows if row.group in ("phase", "metric")]
    near = [row.within_aim for row in judged if row.within_aim is not None]
    inside_ = [row.inside for row in judged if row.inside is not None]
    equal = sum(order.equal for _, order in found.orders)
    lines += ["", f"Phases and metrics within {AIM_PERCENT:g}%: {sum(near)} of {len(near)}; "
              f"inside the spread: {sum(inside_)} of {len(inside_)}; "
              f"order of protocol events equal: {equal} of {len(found.orders)} runs."]  # fmt: skip
    for name, order in found.orders:
        if not order.equal:
            turned = "; ".join(f"{x} before {y}" for x, y in order.reversed[:4])
            missing = ", ".join([*order.missing_in_first, *order.missing_in_second][:6])
            lines.append(
                f"- {pathlib.Path(name).name}: {turned or 'no pair reversed'}; only in one: {missing or 'nothing'}"
            )
    return [*lines, ""]


def page(fit_on: Sequence[RunDir], tested: Sequence[RunDir], folder: pathlib.Path, note: str) -> str:
    """The whole page.

    Raises:
        BadInput: a run cannot be read, or cannot be fitted to.
    """
    fit = fit_runs(fit_on)
    fitted = fitted_profile(fit, None, fit_on)
    profiles = []
    for draw in range(DRAWS if fit.pace.spread else 1):
        # The name decides what is drawn for the pace (sim/engine_pace.py); the seed stays that of the real runs.
        profiles.append(folder / f"fitted-{draw}.yaml")
        named = fitted | {"name": f"{fitted['name']}-{draw}"}
        profiles[-1].write_text(profile_text(named, "RUN..."), encoding="utf-8")
    info = tested[0].info()
    several = f"{DRAWS} runs that differ in how the engines' pace wanders and in nothing else"
    lines = [_HEAD.format(aim=AIM_PERCENT, draws=several if len(profiles) > 1 else "one run")]
    machine = ", ".join(f"{key} {value}" for key, value in sorted(info.machine.items()))
    versions = ", ".join(f"{key} {value}" for key, value in sorted(info.versions.items()))
    lines += [f"Scenario `{info.scenario}`, seed {info.seed}. Machine: {machine}. Versions: {versions}.", ""]
    lines += [note, ""] if note else []
    lines += ["| fitted | |", "| --- | --- |"]
    lines += [f"| {name} | {seconds * 1e3:.4f} ms |" for name, seconds in fit.terms.items()]
    lines += [f"| {key} | {value:g} s |" for key, value in world_settings(fit).items()]
    lines += [f"| pace of an engine | {pace_said(fit.pace)} |"]
    lines += [f"| engine start-up | {fit.startup_s or 0:.2f} s |"]
    lines += [f"| median error of {fit.requests} requests | {fit.error_percent:.1f}% |", ""]
    verdicts = [judge_run(one).result for one in (*fit_on, *tested)]
    said = ", ".join(f"{verdicts.count(one)} {one}" for one in ("pass", "fail", "inconclusive") if one in verdicts)
    lines += [f"Verdicts of the {len(verdicts)} real runs: {said}.", ""]
    for kind in KINDS:
        of_kind = [one for one in tested if kind_of(one) == kind]
        if of_kind:
            found = []
            for draw, profile in enumerate(profiles):
                sim = simulate(of_kind[0], fit, profile, folder / f"sim-{kind}-{draw}")
                found.append(compare(sim, of_kind))
            lines += section(kind, median_of(found), len(fit_on))
        else:
            lines += [f"## {kind.capitalize()}", "", "No run of this kind was given.", ""]
    return "\n".join(lines)


@click.command()
@click.option("--fit", "fit_on", multiple=True, required=True, type=click.Path(path_type=pathlib.Path, exists=True))
@click.option("--test", "tested", multiple=True, required=True, type=click.Path(path_type=pathlib.Path, exists=True))
@click.option("--note", default="", help="What a reader must know of how the runs were made.")
@click.option("--out", type=click.Path(path_type=pathlib.Path), default=PAGE, show_default=True)
def main(fit_on: tuple[pathlib.Path, ...], tested: tuple[pathlib.Path, ...], note: str, out: pathlib.Path) -> None:
    """Fit to some real runs, test on others, and write the page."""
    try:
        fitted, others = [RunDir.open(one) for one in fit_on], [RunDir.open(one) for one in tested]
        require_distinct([*fitted, *others])  # tested on what was fitted to, it would look better than it is
        for one in (*fitted, *others):
            if said := require_unchanged(one):
                raise BadInput(said)
    except BadInput as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        made = page(fitted, others, pathlib.Path(folder), note)
    out.write_text(made, encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
