"""Side by side with the peers, on the same requests, in one run: requests per wall second of each.

    python -m tests.bench.peers [--work azure --work fixed] [--peer dynosim --peer ours] [--repeat 3] [--json FILE]

Peers live in environments of their own, outside this repository, and none of their code is part of it:

* DynoSim, the Rust simulator inside the wheel ``ai-dynamo-runtime``. ``SEATRIAL_DYNOSIM_PYTHON`` names the interpreter.
* Vidur. ``SEATRIAL_VIDUR_PYTHON`` names the interpreter, ``SEATRIAL_VIDUR`` a checkout of microsoft/vidur.
* ours: ``python -m tests.bench.ours REQUESTS REPLICAS``, which must print one line of JSON with at least ``seconds``,
  ``requests`` and ``completed``.

Every row is a fresh process. The rows of one work take turns, so that a busy machine slows all of them alike, and the
median of the repeats is shown with its range. Peers are timed in their favour: only their simulation, without start-up,
reading the requests, training or output. Neither has faults, a network, a gateway, evidence or checks. Exit codes: 0,
1 where a row failed, 2 where a peer is not installed or the usage is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tests.bench import works

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT_S = 1800

DYNOSIM_REMEDY = """\
DynoSim is not installed. Make an environment for it, outside this repository, and name its interpreter:
    python3 -m venv /tmp/dynosim && /tmp/dynosim/bin/pip install ai-dynamo-runtime==1.6.1
    export SEATRIAL_DYNOSIM_PYTHON=/tmp/dynosim/bin/python"""
VIDUR_REMEDY = """\
Vidur is not installed. Make an environment for it, outside this repository, put a checkout of microsoft/vidur beside it
(the folders vidur and data), and name both:
    python3 -m venv /tmp/vidur && /tmp/vidur/bin/pip install numpy 'pandas<3' scikit-learn wandb ddsketch \\
        plotly_express matplotlib seaborn fasteners
    export SEATRIAL_VIDUR_PYTHON=/tmp/vidur/bin/python SEATRIAL_VIDUR=/path/of/the/checkout"""
OURS_REMEDY = "ours is not here: tests/bench/ours.py is missing"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: ``command`` gets REQUESTS and REPLICAS, then ``arguments``."""

    peer: str
    label: str
    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    works: tuple[str, ...] = tuple(work.name for work in works.WORKS)


def dynosim() -> list[Row]:
    python = os.environ.get("SEATRIAL_DYNOSIM_PYTHON", "")
    if not _imports(python, "dynamo._core"):
        raise click.UsageError(DYNOSIM_REMEDY)
    command = (python, str(HERE / "peer_dynosim.py"))
    return [
        Row("dynosim", "DynoSim, round robin", command, ("round_robin",)),
        Row("dynosim", "DynoSim, kv router", command, ("kv_router",)),
    ]


def vidur() -> list[Row]:
    python, checkout = os.environ.get("SEATRIAL_VIDUR_PYTHON", ""), os.environ.get("SEATRIAL_VIDUR", "")
    if not checkout or not _imports(python, "vidur.simulator", checkout):
        raise click.UsageError(VIDUR_REMEDY)
    environment = (("PYTHONPATH", checkout), ("WANDB_MODE", "disabled"))
    command = (python, str(HERE / "peer_vidur.py"))
    # Its cost table ends far below Mooncake's contexts, and the wide work did not end within 500 s on two cores.
    return [Row("vidur", "Vidur", command, (str(pathlib.Path(checkout).resolve()),), environment, ("azure", "fixed"))]


def ours() -> list[Row]:
    if not (HERE / "ours.py").is_file():
        raise click.UsageError(OURS_REMEDY)
    return [
        Row("ours", "Seatrial", (sys.executable, "-m", "tests.bench.ours"), environment=(("PYTHONPATH", str(ROOT)),))
    ]


PEERS = {"vidur": vidur, "dynosim": dynosim, "ours": ours}


def _imports(python: str, module: str, path: str = "") -> bool:
    if not python:
        return False
    environment = {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "disabled"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [python, "-c", f"import {module}"], cwd=folder, env=environment, capture_output=True, timeout=120
            )
        except OSError:
            return False
    return done.returncode == 0


def measure(row: Row, work: works.Work, requests: pathlib.Path) -> dict[str, Any]:
    """Run one row once in a fresh process and an empty folder. RuntimeError, with its last words, if it fails."""
    command = [*row.command, str(requests), str(work.replicas), *row.arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **dict(row.environment)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{row.label}, {work.name}: exit code {done.returncode}: {words}")
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def compare(rows: list[Row], chosen: list[works.Work], repeat: int, console: Console) -> list[dict[str, Any]]:
    """Measure every row on every chosen work, in turns. A row that fails has ``error`` in place of figures."""
    results = []
    shared = pathlib.Path(os.environ.get("SEATRIAL_SHARED") or ROOT.parent / "shared")
    with tempfile.TemporaryDirectory() as folder:
        for work in chosen:
            requests = pathlib.Path(folder) / f"{work.name}.jsonl"
            count = works.write(work, shared if shared.is_dir() else None, requests)
            running = [row for row in rows if work.name in row.works]
            reports: dict[str, list[dict[str, Any]]] = {row.label: [] for row in running}
            errors: dict[str, str] = {}
            for turn in range(repeat):
                for row in running:
                    if row.label in errors:
                        continue
                    console.print(f"{work.name}: {row.label}, {turn + 1} of {repeat}", highlight=False)
                    try:
                        report = measure(row, work, requests)
                        if report["requests"] != count or report["completed"] != count:
                            raise RuntimeError(f"{row.label}, {work.name}: {report['completed']} of {count} completed")
                    except (RuntimeError, ValueError, KeyError, subprocess.TimeoutExpired) as failure:
                        errors[row.label] = str(failure)
                    else:
                        reports[row.label].append(report)
            for row in running:
                result: dict[str, Any] = {"work": work.name, "row": row.label, "requests": count}
                if row.label in errors:
                    result["error"] = errors[row.label]
                else:
                    speeds = [count / report["seconds"] for report in reports[row.label]]
                    result["requests_per_s"] = statistics.median(speeds)
                    result["lowest"], result["highest"] = min(speeds), max(speeds)
                    result["runs"] = reports[row.label]
                results.append(result)
    return results


def table(results: list[dict[str, Any]], chosen: list[works.Work]) -> Table:
    """Requests per wall second: a row a simulator, a column a work."""
    found = {(result["row"], result["work"]): result for result in results}
    out = Table(title="requests per wall second, median (lowest to highest)")
    out.add_column("")
    for work in chosen:
        out.add_column(work.title, justify="right")
    for label in dict.fromkeys(result["row"] for result in results):
        cells = []
        for work in chosen:
            result = found.get((label, work.name))
            if result is None:
                cells.append("-")
            elif "error" in result:
                cells.append("failed")
            else:
                cells.append(f"{result['requests_per_s']:,.0f} ({result['lowest']:,.0f} to {result['highest']:,.0f})")
        out.add_row(label, *cells)
    return out


@click.command()
@click.option(
    "--work", "names", multiple=True, type=click.Choice([work.name for work in works.WORKS]), help="Default: all."
)
@click.option("--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), help="Default: all of them.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each row.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="Also write figures here."
)
def main(names: tuple[str, ...], peers: tuple[str, ...], repeat: int, json_path: pathlib.Path | None) -> None:
    """Requests per wall second of Seatrial and its peers, on the same requests, in one run."""
    chosen = [work for work in works.WORKS if not names or work.name in names]
    rows = [row for peer, find in PEERS.items() if not peers or peer in peers for row in find()]
    try:
        results = compare(rows, chosen, repeat, Console(stderr=True))
    except FileNotFoundError as absent:
        raise click.UsageError(str(absent)) from None
    Console(width=None if sys.stdout.isatty() else 200).print(table(results, chosen))
    failed = [result["error"] for result in results if "error" in result]
    for error in failed:
        click.echo(error, err=True)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
