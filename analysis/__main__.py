"""``python -m analysis``: verdicts, explanations, reports, traces and tables of run directories.

Exit codes: 0 pass, 1 fail, 2 bad usage or input, 3 inconclusive.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.errors import BadInput, nearest, print_anything, require_current_folder, tell_defect
from analysis.explain import explain_check
from analysis.outputs import require_distinct, require_unchanged, rewrite
from analysis.reader import read_json
from analysis.rundir import RunDir, atomic_file, write_atomic
from analysis.schema import schema_page
from analysis.sequence import as_svg, as_text
from analysis.tables import TABLES, rows
from analysis.verdict import BAD_INPUT, EXIT_CODES, Verdict, differences, judge_run

_COLOURS = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}
NO_VERDICT = EXIT_CODES["inconclusive"]
RUN = click.argument("run", type=click.Path(path_type=pathlib.Path))


class _Group(click.Group):
    """Turns bad input into one clear message and exit code 2. What has no verdict never ends with the code of one."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BadInput as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(BAD_INPUT)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the impatient press twice
            click.echo("interrupted; there is no verdict", err=True)
            ctx.exit(NO_VERDICT)
        except Exception:
            tell_defect()
            ctx.exit(NO_VERDICT)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Reads what runs leave behind. RUN is a run directory."""
    print_anything()
    require_current_folder()


@main.command()
@RUN
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json as computed now.")
def verdict(run: pathlib.Path, as_json: bool) -> None:
    """Judge a run from its evidence alone, and compare with the verdict stored at its end."""
    directory = RunDir.open(run)
    unverified = require_unchanged(directory)
    reached = judge_run(directory)
    compared = differences(reached, read_json(directory.verdict)) if directory.verdict.exists() else None
    if unverified and reached.result == "pass":  # of bytes that anybody may have changed
        reached = reached._replace(result="inconclusive", note=unverified)
    if as_json:
        click.echo(json.dumps(reached.as_json(), indent=2, sort_keys=True))
    else:
        print_verdict(reached, directory.info().scenario)
    if unverified:
        click.echo(unverified, err=True)
    for line in compared or []:
        click.echo(f"differs from {directory.verdict}: {line}", err=True)
    if compared is None:
        click.echo(f"{directory.verdict} is missing; nothing to compare with", err=True)
    sys.exit(reached.exit_code)


@main.command()
@RUN
@click.option("--svg", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Draw it into this file as well.")
@click.option("--check", "only", help="Explain this check, whatever its result.")
def explain(run: pathlib.Path, svg: pathlib.Path | None, only: str | None) -> None:
    """For each failed check: what happened around its witnesses, and who waited for whom."""
    directory = RunDir.open(run)
    require_unchanged(directory)
    reached = judge_run(directory)
    chosen = reached.failed()
    if only is not None:
        chosen = [row for row in reached.checks if row.name.partition("(")[0] == only or row.name == only]
        if not chosen:
            names = list(dict.fromkeys(row.name for row in reached.checks))
            raise BadInput(f"--check {only!r}: no such check; {nearest(only, names)}known are {', '.join(names)}")
    explanations = [explain_check(directory, row) for row in chosen]
    if reached.note:
        click.echo(reached.note, err=True)
    if not explanations:
        drawn = "" if svg is None else f"; {svg} is not written"
        click.echo(f"no check failed: nothing to explain (--check NAME shows any){drawn}")
    if svg is not None and explanations:  # first: where it cannot be written, nothing else is said
        write_atomic(svg, as_svg(explanations))
    click.echo("\n".join(as_text(one) for one in explanations), nl=False)
    if svg is not None and explanations:
        click.echo(f"drawn: {svg}")
    sys.exit(reached.exit_code)


@main.command()
@RUN
def report(run: pathlib.Path) -> None:
    """Write report.html anew from the evidence."""
    directory = RunDir.open(run)
    rewrite(directory, report=True)
    click.echo(directory.report)


@main.command()
@RUN
def trace(run: pathlib.Path) -> None:
    """Write trace.json anew; open it at ui.perfetto.dev."""
    directory = RunDir.open(run)
    rewrite(directory, trace=True)
    click.echo(directory.trace)


@main.command()
@RUN
@click.option("--of", "name", type=click.Choice(TABLES), default="requests", show_default=True, help="Which table.")
@click.option("--kind", help="With --of events: only this event kind.")
@click.option(
    "--rows", "limit", type=click.IntRange(min=1), default=40, show_default=True, help="Rows on the terminal."
)
@click.option("--csv", "csv_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Write all rows here.")
def table(run: pathlib.Path, name: str, kind: str | None, limit: int, csv_path: pathlib.Path | None) -> None:
    """Evidence as a table, on the terminal or as CSV."""
    directory = RunDir.open(run)
    require_unchanged(directory)
    stream = rows(directory, name, kind)
    if csv_path is not None:
        click.echo(f"{_write_csv(csv_path, lambda: rows(directory, name, kind))} rows: {csv_path}")
        return
    shown = list(itertools.islice(stream, limit + 1))
    if not shown:
        click.echo(f"no {name}{'' if kind is None else f' of kind {kind}'} in this run")
        return
    columns = list(dict.fromkeys(key for row in shown for key in row))
    out = Table(box=None, header_style="bold")
    for column in columns:
        out.add_column(column, overflow="fold")
    for row in shown[:limit]:
        out.add_row(*(Text(_cell(row.get(column))) for column in columns))
    _console().print(out)
    if len(shown) > limit:
        click.echo(f"the first {limit} rows; --rows N shows more, --csv FILE writes all")


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=pathlib.Path, dir_okay=False),
    default=pathlib.Path("docs/evidence.md"),
    show_default=True,
)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if the page is not current.")
def schema(out: pathlib.Path, check: bool) -> None:
    """Write the page that documents every event kind."""
    page = schema_page()
    if check:
        current = out.is_file() and out.read_bytes() == page.encode()
        click.echo(f"{out}: {'current' if current else 'not current; run python -m analysis schema'}")
        sys.exit(0 if current else 1)
    write_atomic(out, page)
    click.echo(out)


@main.command()
@click.argument("runs", type=click.Path(path_type=pathlib.Path), nargs=-1)
@click.option("--data", type=click.Path(path_type=pathlib.Path), help="Folder of recorded GPU runs, instead of RUNS.")
@click.option(
    "--base",
    type=click.Path(path_type=pathlib.Path, dir_okay=False),
    help="With RUNS: profile that gives what they cannot tell; default: the shipped one that they ran with.",
)
@click.option(
    "--out", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Profile to write; default: print it."
)
def calibrate(
    runs: tuple[pathlib.Path, ...], data: pathlib.Path | None, base: pathlib.Path | None, out: pathlib.Path | None
) -> None:
    """Fit an engine profile to run directories of ours, or to recorded GPU runs, and state its error."""
    if runs:
        from analysis.calibrate_runs import run_calibrate_runs

        if data is not None:
            raise BadInput("calibrate: give RUNS or --data, not both")
        _require_one_kind(_opened(runs))
        click.echo(run_calibrate_runs(runs, base, out), nl=False)
        return
    from analysis.calibrate import run_calibrate

    if base is not None:
        raise BadInput("calibrate: --base goes with RUNS; what --data gives has no other profile beneath it")
    sys.exit(run_calibrate(data, out))


@main.command()
@click.argument("sim", type=click.Path(path_type=pathlib.Path))
@click.argument("real", type=click.Path(path_type=pathlib.Path), nargs=-1, required=True)
@click.option("--svg", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="Draw it into this file as well.")
@click.option(
    "--one-side",
    "excuses",
    multiple=True,
    metavar="NAME=REASON",
    help="Why only one side has a phase or total; * and ? match. Without a reason it is not within the aim.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def compare(
    sim: pathlib.Path,
    real: tuple[pathlib.Path, ...],
    svg: pathlib.Path | None,
    excuses: tuple[str, ...],
    as_json: bool,
) -> None:
    """A simulated run beside real ones: phase by phase, metric by metric, and the order of protocol events.

    REAL may be runs of ours or imported ones. Exit code 1 where a phase or total is off by more than 10% or
    only one side has it, or an order differs; 3 where there was nothing to compare.
    """
    from analysis.compare import table as compared

    directories = [RunDir.open(path) for path in (sim, *real)]
    if any(sim.resolve() == path.resolve() for path in real):
        raise BadInput(f"{sim}: a run beside itself shows nothing; name another one as REAL")
    require_distinct(directories[1:])
    unverified = [said for directory in directories if (said := require_unchanged(directory))]
    for line in (*unverified, *_not_as_meant(directories)):
        click.echo(line, err=True)
    declared = {name.strip(): reason.strip() for name, _, reason in (one.partition("=") for one in excuses)}
    if bare := next((one for one in excuses if not all(part.strip() for part in one.partition("="))), None):
        raise BadInput(f"--one-side {bare!r}: write NAME=REASON, and both")
    found = compared.compare(directories[0], directories[1:], declared)
    if svg is not None:  # first: where it cannot be written, nothing else is said
        write_atomic(svg, compared.as_svg(found))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2, sort_keys=True))
    else:
        _console().print(compared.as_table(found))
        click.echo("\n".join(compared.summary(found)))
    if svg is not None:
        click.echo(f"drawn: {svg}", err=True)
    judged = [found.counted(group) for group in compared.COUNTED]
    if all(row.one_sided for row in found.rows if row.group in compared.COUNTED):
        sys.exit(3)
    good = all(hits == count for hits, count in judged) and all(order.equal for _, order in found.orders)
    sys.exit((NO_VERDICT if unverified else 0) if good else 1)  # unverified: of bytes that anybody may have changed


def _opened(runs: Sequence[pathlib.Path]) -> list[RunDir]:
    """Runs whose evidence is as it was written, each of them once. Raises BadInput."""
    directories = [RunDir.open(path) for path in runs]
    for directory in directories:
        if unverified := require_unchanged(directory):
            click.echo(unverified, err=True)
    require_distinct(directories)
    return directories


def _require_one_kind(directories: Sequence[RunDir]) -> None:
    """Costs of two kinds of engines, such as simulated and real ones, are not costs of either. Raises BadInput."""
    kinds: dict[str, RunDir] = {}
    for directory in directories:
        info = directory.info()
        kinds.setdefault(info.versions.get("engine", info.backend), directory)
    if len(kinds) > 1:
        found = ", ".join(f"{directory.path}: {kind}" for kind, directory in kinds.items())
        raise BadInput(f"calibrate: the runs have several kinds of engines ({found}); give runs of one")


def _not_as_meant(directories: Sequence[RunDir]) -> list[str]:
    """What is to be said where the first is no simulated run, another no real one, or the seeds differ."""
    infos = [directory.info() for directory in directories]
    said = []
    for number, (directory, info) in enumerate(zip(directories, infos, strict=True)):
        meant = "real" if number else "sim"
        if info.backend != meant:
            said.append(f"{directory.path}: a run of the world {info.backend!r} in place of one of {meant!r}")
        if info.seed != infos[0].seed and not {"imported"} & {*info.versions, *infos[0].versions}:
            said.append(f"{directory.path}: its seed is {info.seed}, and that of {directories[0].path} {infos[0].seed}")
    return said


@main.group(name="import", cls=_Group)
def import_() -> None:
    """Turn runs of others into run directories of ours, and judge them."""


@import_.command(name="genrm")
@click.argument("folder", type=click.Path(path_type=pathlib.Path))
@click.option("--out", type=click.Path(path_type=pathlib.Path), help="The run directory to make; it must not exist.")
def import_genrm(folder: pathlib.Path, out: pathlib.Path | None) -> None:
    """A published run of the elastic judge (FOLDER holds events.json, verdicts.json and more)."""
    from analysis.foreign.genrm import import_genrm as run_import

    target = pathlib.Path("runs") / f"imported-{folder.resolve().name}" if out is None else out
    imported = run_import(folder, target)
    print_verdict(imported.verdict, f"{folder.name} ({imported.protocol.name})")
    for line in imported.missing:
        click.echo(line, err=True)
    below = sorted(file.parent.name for file in folder.glob("*/verdicts.json"))
    if below and not (folder / "verdicts.json").exists():
        click.echo(f"this folder holds runs, and is none; import one of them: {', '.join(map(repr, below))}", err=True)
    click.echo(f"evidence in {target}")
    sys.exit(imported.verdict.exit_code)


def print_verdict(reached: Verdict, scenario: str) -> None:
    """The verdict as a table: what counts first, what does not apply in one line."""
    out = Table(box=None, header_style="bold")
    for column in ("check", "result", "observed", "judged", "witness"):
        out.add_column(column, overflow="fold")
    for row in reached.checks:
        if not row.applicable:
            continue
        observed = row.observed + (f"\n{row.explain}" if row.explain else "")
        witness = ", ".join(str(seq) for seq in row.witness[:6]) + (", ..." if len(row.witness) > 6 else "")
        out.add_row(
            Text(row.title), Text(row.standing, style=_COLOURS.get(row.standing, "dim")), Text(observed),
            f"{row.judged:,}", witness,
        )  # fmt: skip
    console = _console()
    console.print(out)
    absent = [row.name for row in reached.checks if not row.applicable]
    if absent:
        console.print(Text(f"not applicable: {', '.join(absent)}", style="dim"))
    if reached.note:
        console.print(Text(reached.note, style="yellow"))
    console.print(Text.assemble(f"{scenario}: ", (reached.result, _COLOURS[reached.result])))


def _console() -> Console:
    # Off a terminal there is no width to wrap at; rich would assume 80 columns and break figures apart.
    return Console() if sys.stdout.isatty() else Console(width=200)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _write_csv(path: pathlib.Path, stream: Callable[[], Any]) -> int:
    # Two passes, so that neither memory nor the header depends on the first rows alone.
    columns = list(dict.fromkeys(key for row in stream() for key in row))
    count = 0
    with atomic_file(path) as binary:
        file = io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", newline="")
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in stream():
            writer.writerow(row)
            count += 1
        file.flush()
        file.detach()
    return count


if __name__ == "__main__":
    main(prog_name="python -m analysis")
