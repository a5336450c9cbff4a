"""Our gateway and sglang-router 0.3.2 in front of the same engines, load and faults, as a table: docs/router_peer.md.

    python -m tests.bench.router_peer [--repeat 3] [--seed 1] [--out FILE]

Needs an environment for the router, outside this repository (``SEATRIAL_ROUTER_PYTHON``); the message says how. Every
run has fresh engines (emulated, three processes) and a fresh front. The fronts take turns, so that a busy machine slows
all alike. The text under the table, from the line ``## What it says``, is written by hand and kept. Exit codes: 0, 1
where a run failed, 2 without the router or for bad usage.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import click

from tests.bench.router_counts import Figures, spread
from tests.bench.router_fleet import ARMS, TUNED, Arm
from tests.bench.router_load import (
    CLOSED_AT_ONCE,
    CLOSED_NEW,
    CLOSED_S,
    ENGINES,
    NEW,
    PROMPT,
    RATE,
    Script,
    measure,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "router_peer.md"
VERSION = "0.3.2"
BY_HAND = "## What it says"
REMEDY = f"""\
sglang-router {VERSION} is not installed. Make an environment for it, outside this repository, and name its interpreter:
    python3 -m venv /tmp/router && /tmp/router/bin/pip install sglang-router=={VERSION}
    export SEATRIAL_ROUTER_PYTHON=/tmp/router/bin/python"""

ROWS: tuple[tuple[str, str, str], ...] = (
    ("without faults: requests/s", "requests/s", ""),
    ("without faults: latency p50", "closed p50", "ms"),
    ("without faults: latency p99", "closed p99", "ms"),
    ("processor time of the front, per request", "front CPU ms/request", "as ms"),
    ("requests of the faulted load", "requests", ""),
    ("open load, quiet phase: latency p50", "quiet p50", "ms"),
    ("open load, quiet phase: latency p99", "quiet p99", "ms"),
    ("**lost**, all phases", "lost", ""),
    ("lost while one was dead", "lost, kill", ""),
    ("lost while it was back", "lost, restart", ""),
    ("lost while one was stopped", "lost, stop", ""),
    ("lost from its going on, through the replacement", "lost, replace", ""),
    ("begun by two engines", "begun twice", ""),
    ("**done twice** (two engines answered 200)", "done twice", ""),
    ("**mis-routed**: to the removed engine", "to the removed", ""),
    ("mis-routed: to the stopped engine, while it was", "to the stopped", ""),
    ("sends that the front repeated", "sends repeated", ""),
    ("**kill**: until no request fails", "until none fails after a kill", "s"),
    ("kill: until no request is slowed", "until none is slow after a kill", "s"),
    ("kill: requests slowed", "slowed, kill", ""),
    ("kill: worst latency", "worst, kill", "s"),
    ("**stop**: until routed around", "until routed around a stop", "s"),
    ("stop: requests slowed", "slowed, stop", ""),
    ("**readmitted** after a restart at the same address", "readmit after restart", "s"),
    ("readmitted after it went on", "readmit after continue", "s"),
    ("a new address: told until its first request", "admit a new one", "s"),
)


def table(results: dict[str, list[Figures]]) -> list[str]:
    """The Markdown table: of every figure the median, and in brackets the lowest and the highest where they differ."""
    arms = list(results)
    lines = ["| | " + " | ".join(arms) + " |", "| --- |" + " --- |" * len(arms)]
    for label, key, unit in ROWS:
        cells = [_cell([one[key] for one in results[arm] if key in one], unit) for arm in arms]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _cell(values: list[float], unit: str) -> str:
    if not values:
        return ""
    shown = [_amount(value, unit) for value in spread(values)]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _amount(value: float, unit: str) -> str:
    if math.isinf(value):
        return "not seen"
    if unit == "ms":
        return f"{1000 * value:.0f} ms"
    if unit == "as ms":
        return f"{value:.2f} ms"
    if unit == "s":
        return f"{value:.2f} s"
    return f"{value:.0f}"


def page(
    results: dict[str, list[Figures]],
    loads: tuple[float, float],
    versions: str,
    command: str,
    by_hand: str,
    failures: Sequence[str] = (),
) -> str:
    """The whole page; ``by_hand`` is the text under the table, ``failures`` are runs that are not in it."""
    script = Script()
    repeats = max(len(runs) for runs in results.values())
    head = f"""\
# Beside sglang-router

Made by `{command}`; which says how to install the router; all above "What it says" is written
by it. {versions}, {os.cpu_count()} cores;
load of the machine {loads[0]:.1f} at the start and {loads[1]:.1f} at the end, other work included. Median of {repeats}
runs, lowest and highest in brackets. A time that had not come when the load ended is "not seen".

Every run: {ENGINES} emulated engines (`real.emulated`), each a process, started for this run, and one front. `direct`
has none: the client takes the engines in turn. `ours` is `python -m real.serve --roster FILE`, all else default.
`router` is sglang-router with its defaults but for `--policy round_robin` (the load shares no prefixes).
`router, tuned` has `{" ".join(TUNED)}`.

Without faults: {CLOSED_AT_ONCE} `/generate` at once for {CLOSED_S:g} s, {PROMPT} tokens in, {CLOSED_NEW} out. Then
{RATE:g} requests a second for {script.end:g} s, {NEW} tokens out, the same arrivals for all:

- {script.kill:g} s: SIGKILL of one engine, started again at {script.restart:g} s at the same address;
- {script.stop:g} s: SIGSTOP of another, SIGCONT at {script.cont:g} s;
- {script.replace:g} s: the third is replaced by an engine at a new address, which the front is told over its own
  interface, and is killed at {script.kill_old:g} s.

Counted at the client, and at the engines by request id: every engine writes what it was asked and what it answered
(`--request-log`), which outlives its death. Slowed: longer than twice the p99 of the run's own quiet phase.

"""
    told = "".join(f"Not in the table, as it failed: {failure}.\n\n" for failure in failures)
    return head + told + "\n".join(table(results)) + "\n\n" + by_hand


def router_python() -> str:
    """The interpreter of the router's environment.

    Raises:
        click.UsageError: there is none with the right version.
    """
    python = os.environ.get("SEATRIAL_ROUTER_PYTHON", "")
    code = "import sglang_router; from importlib.metadata import version; print(version('sglang-router'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        raise click.UsageError(REMEDY) from None
    if done.returncode or done.stdout.strip() != VERSION:
        raise click.UsageError(REMEDY)
    return python


def kept(path: pathlib.Path) -> str:
    """What stands under the table of an earlier page."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    _, found, below = text.partition(BY_HAND)
    return found + below if found else f"{BY_HAND}\n\nNothing is written yet.\n"


def run(arms: tuple[Arm, ...], repeat: int, seed: int, python: str) -> tuple[dict[str, list[Figures]], list[str]]:
    """Every arm ``repeat`` times, in turns: (figures of the runs, which runs failed and why)."""
    results: dict[str, list[Figures]] = {arm.name: [] for arm in arms}
    failures = []
    for turn in range(repeat):
        for arm in arms:
            name = f"{arm.name}, {turn + 1} of {repeat}"
            print(name, flush=True)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    found = measure(arm, pathlib.Path(folder), python, seed + turn)
            except (RuntimeError, ValueError, OSError) as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                failures.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            results[arm.name].append(found)
            print("    " + ", ".join(f"{key} {value:.3g}" for key, value in found.items()), flush=True)
    return results, failures


@click.command()
@click.option("--repeat", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="of the arrivals; each repeat has its own")
@click.option("--out", type=click.Path(path_type=pathlib.Path, dir_okay=False), default=PAGE, show_default=True)
@click.option(
    "--json", "json_path", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="the figures of every run"
)
@click.option("--arm", "names", multiple=True, type=click.Choice([arm.name for arm in ARMS]), help="these only")
def main(repeat: int, seed: int, out: pathlib.Path, json_path: pathlib.Path | None, names: tuple[str, ...]) -> None:
    """Measure and write the page."""
    python = router_python()
    began = os.getloadavg()[0]
    results, failures = run(tuple(arm for arm in ARMS if not names or arm.name in names), repeat, seed, python)
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1))
    versions = f"sglang-router {VERSION}, Python {platform.python_version()}"
    command = "python -m tests.bench.router_peer" + (f" --repeat {repeat}" if repeat != 3 else "")
    text = page(results, (began, os.getloadavg()[0]), versions, command, kept(out), failures)
    out.write_text(text, encoding="utf-8")
    print(out)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
