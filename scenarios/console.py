"""What the command line shows: tables and a progress bar on a terminal, plain lines elsewhere, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic  # bound here: inside a run the module's own is the simulated clock
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from analysis.checks.base import CheckResult
from analysis.verdict import Verdict
from scenarios.load import Scenario
from scenarios.runner import Ran, TraceFacts

if TYPE_CHECKING:
    from scenarios.sim_world import SimStage

_COLOURS = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}
_LINE_EVERY_S = 10.0


class Shell:
    """Where a command writes. Results go to stdout, progress to stderr.

    Args:
        as_json: one JSON document instead of text.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    @property
    def fancy(self) -> bool:
        return self.out.is_terminal and not self.as_json

    def say(self, text: str) -> None:
        """A line for people."""
        if not self.as_json:
            click.echo(text)

    def note(self, text: str) -> None:
        """A line about the progress."""
        if not self.as_json:
            click.echo(text, err=True)

    def document(self, value: Any) -> None:
        """The JSON document of a command."""
        if self.as_json:
            click.echo(json.dumps(value, indent=2, sort_keys=True))

    @contextmanager
    def running(self, name: str, expected_s: float | None) -> Iterator[Any]:
        """Shows the progress of a run: gives what ``run_in_sim`` takes as ``watch``."""
        if not (self.fancy and self.err.is_terminal):
            yield self._plain(name)
            return
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} s simulated"),
            TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(name, total=expected_s)

            def watch(stage: SimStage) -> None:
                bar.update(task, completed=stage.world.now_ns / 1e9, description=f"{name}: {stage.progress.phase}")

            yield watch

    def _plain(self, name: str) -> Any:
        last = monotonic()

        def watch(stage: SimStage) -> None:
            nonlocal last
            now = monotonic()
            if now - last >= _LINE_EVERY_S:
                last = now
                simulated = stage.world.now_ns / 1e9
                self.note(f"{name}: {stage.progress.phase}, {simulated:.0f} s simulated, {stage.world.seq} events")

        return watch

    # --- results ---

    def verdict(self, verdict: Verdict) -> None:
        """The rows of a verdict, the applicable ones."""
        rows = [row for row in verdict.checks if row.applicable]
        if self.as_json:
            return
        if not self.fancy:
            for row in rows:
                click.echo(f"{row.result:<12} {row.title}: {row.observed}{_because(row)}")
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in ("result", "check", "observed"):
            table.add_column(head, overflow="fold")
        for row in rows:
            colour = _COLOURS[row.result]
            table.add_row(f"[{colour}]{row.result}[/]", row.title, f"{row.observed}{_because(row)}")
        self.out.print(table)

    def ran(self, scenario: Scenario, seed: int, ran: Ran, traces: list[TraceFacts], repeat: str) -> None:
        """The end of ``run``."""
        self.verdict(ran.verdict)
        for line in ran.result.refused:
            self.say(f"not done: {line}")
        for trace in traces:
            if trace.zero_output:
                self.say(f"{trace.file}: {trace.zero_output} rows without output tokens were passed over")
        if ran.result.reason != "completed":
            self.say(f"the run ended early ({ran.result.reason}): {ran.result.detail}")
        where = "" if ran.directory is None else f", evidence in {ran.directory.path}"
        self.say(
            f"{ran.verdict.result.upper()}: {scenario.name}, seed {seed}: {ran.result.simulated_s:.1f} s simulated in "
            f"{ran.wall_s:.1f} s, {ran.result.events} events{where}"
        )
        if ran.directory is not None and ran.verdict.result != "pass":
            self.say(f"why: python -m analysis explain {ran.directory.path}")
        self.document(
            {
                "scenario": scenario.name,
                "backend": "sim",
                "seed": seed,
                "result": ran.verdict.result,
                "exit_code": ran.verdict.exit_code,
                "run_directory": None if ran.directory is None else str(ran.directory.path),
                "reason": ran.result.reason,
                "detail": ran.result.detail,
                "events": ran.result.events,
                "simulated_s": ran.result.simulated_s,
                "wall_s": round(ran.wall_s, 3),
                "digest": ran.result.digest,
                "not_done": ran.result.refused,
                "traces": [vars(trace) for trace in traces],
                "checks": [row.as_json() for row in ran.verdict.checks],
                "repeat": repeat,
            }
        )


def _because(row: CheckResult) -> str:
    if row.result == "pass" or not row.explain:
        return ""
    witness = f" (events {', '.join(map(str, row.witness[:6]))})" if row.witness else ""
    return f": {row.explain}{witness}"
