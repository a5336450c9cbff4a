"""What the command line shows: tables and a progress bar on a terminal, plain lines elsewhere, JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic  # bound here: inside a run the module's own is the simulated clock
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from analysis.checks.base import CheckResult
from analysis.rundir import RunDir
from analysis.verdict import Verdict
from scenarios.load import Scenario
from scenarios.runner import Ran, TraceFacts

if TYPE_CHECKING:
    from scenarios.real_run import RealRan
    from scenarios.real_world import RealEnd, RealStage
    from scenarios.sim_world import SimResult, SimStage

_COLOURS = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}
_LINE_EVERY_S = 10.0


class Number(click.FloatRange):
    """A number in a range. click's own takes NaN, which is neither below nor above anything, for one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is no number", param, ctx)
        return found


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

    @contextmanager
    def running_for_real(self, name: str) -> Iterator[Callable[[RealStage], None]]:
        """Shows the progress of a real run, which starts with that of Ray: gives what ``run_in_real`` takes."""
        told = False

        def tell(stage: RealStage) -> None:
            nonlocal told
            if stage.url and not told:
                told = True
                self.err.print(f"{name}: control APIs on {stage.url}, described at {stage.url}/openapi.json")

        if self.fancy and self.err.is_terminal:
            with self.err.status(f"{name}: starting Ray") as status:

                def show(stage: RealStage) -> None:
                    tell(stage)
                    status.update(_progress(name, stage))

                yield show
            return
        last = monotonic()

        def watch(stage: RealStage) -> None:
            nonlocal last
            tell(stage)
            if monotonic() - last >= _LINE_EVERY_S:
                last = monotonic()
                self.note(_progress(name, stage))

        yield watch

    # --- results ---

    def verdict(self, verdict: Verdict) -> None:
        """The rows of a verdict, the applicable ones."""
        rows = [row for row in verdict.checks if row.applicable]
        if self.as_json:
            return
        if not self.fancy:
            for row in rows:
                click.echo(f"{row.standing:<12} {row.title}: {row.observed}{_because(row)}")
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in ("result", "check", "observed"):
            table.add_column(head, overflow="fold")
        for row in rows:
            colour = _COLOURS.get(row.standing, "dim")
            table.add_row(f"[{colour}]{row.standing}[/]", row.title, f"{row.observed}{_because(row)}")
        self.out.print(table)

    def ran(self, scenario: Scenario, seed: int, ran: Ran, traces: list[TraceFacts], repeat: str) -> None:
        """The end of ``run`` in the simulated world."""
        took = f"{ran.result.simulated_s:.1f} s simulated in {ran.wall_s:.1f} s"
        self._ended(scenario, seed, ran.verdict, ran.result, ran.result.events, ran.directory, took, traces)
        self.document(
            {
                **_document(scenario, "sim", seed, ran.verdict, ran.result, ran.result.events, ran.directory, repeat),
                "simulated_s": ran.result.simulated_s,
                "wall_s": round(ran.wall_s, 3),
                "digest": ran.result.digest,
                "traces": [vars(trace) for trace in traces],
            }
        )

    def ran_for_real(self, scenario: Scenario, seed: int, ran: RealRan, traces: list[TraceFacts], repeat: str) -> None:
        """The end of ``run`` in the real world."""
        took = f"{ran.end.took_s:.1f} s of {ran.wall_s:.1f} s in all"
        self._ended(scenario, seed, ran.verdict, ran.end, ran.events, ran.directory, took, traces)
        for line in ran.left:
            self.note(f"left behind: {line}")
        self.document(
            {
                **_document(scenario, "real", seed, ran.verdict, ran.end, ran.events, ran.directory, repeat),
                "run_s": round(ran.end.took_s, 3),
                "wall_s": round(ran.wall_s, 3),
                "left_behind": ran.left,
                "traces": [vars(trace) for trace in traces],
            }
        )

    def _ended(
        self, scenario: Scenario, seed: int, verdict: Verdict, end: SimResult | RealEnd, events: int,
        directory: RunDir | None, took: str, traces: list[TraceFacts],
    ) -> None:  # fmt: skip
        self.verdict(verdict)
        for line in end.refused:
            self.say(f"not done: {line}")
        for trace in traces:
            if trace.zero_output:
                self.say(f"{trace.file}: {trace.zero_output} rows without output tokens were passed over")
        if end.reason != "completed":
            self.say(f"the run ended early ({end.reason}): {end.detail}")
        where = "" if directory is None else f", evidence in {directory.path}"
        self.say(f"{verdict.result.upper()}: {scenario.name}, seed {seed}: {took}, {events} events{where}")
        if directory is not None and verdict.result != "pass":
            self.say(f"why: python -m analysis explain {directory.path}")


def _document(
    scenario: Scenario, backend: str, seed: int, verdict: Verdict, end: SimResult | RealEnd, events: int,
    directory: RunDir | None, repeat: str,
) -> dict[str, Any]:  # fmt: skip
    return {
        "scenario": scenario.name,
        "backend": backend,
        "seed": seed,
        "result": verdict.result,
        "exit_code": verdict.exit_code,
        "run_directory": None if directory is None else str(directory.path),
        "reason": end.reason,
        "detail": end.detail,
        "events": events,
        "not_done": end.refused,
        "checks": [row.as_json() for row in verdict.checks],
        "repeat": repeat,
    }


def _progress(name: str, stage: RealStage) -> str:
    seen = stage.tail
    return (
        f"{name}: {stage.progress.phase}, {stage.seconds:.0f} s, {seen.sent} requests sent, {seen.done} ended, "
        f"{seen.faults} faults, {seen.events} events"
    )


def _because(row: CheckResult) -> str:
    if row.result == "pass" or not row.explain:
        return ""
    witness = f" (events {', '.join(map(str, row.witness[:6]))})" if row.witness else ""
    return f": {row.explain}{witness}"
