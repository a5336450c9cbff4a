"""A sweep: many seeds with drawn orders and delays, in worker processes that run many seeds each.

Only failing, inconclusive and a sample of passing seeds get a run directory: those are run once more, which must give
the same digest, and judged offline, which must give the same verdict. A canary, known to be wrong, must fail first.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from rich.progress import Progress

from analysis.errors import BadInput
from analysis.rundir import RunDir
from analysis.verdict import judge_run
from scenarios import canary
from scenarios.console import Shell
from scenarios.load import Scenario, parse
from scenarios.runner import repeat_command, run_in_sim

_KEPT_A_GROUP = 3  # run directories of one group of failures
_LINE_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True)
class SeedResult:
    """What a seed came to. ``why``: (check, explanation) of the rows that decided, none when it passed."""

    seed: int
    result: str
    digest: str
    events: int
    why: tuple[tuple[str, str], ...]


@dataclasses.dataclass
class Group:
    """Failures of one kind: the same check, the same explanation but for its numbers."""

    result: str
    check: str
    witness: str
    seeds: list[int]
    repeat: str
    directories: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Swept:
    """The end of a sweep."""

    scenario: str
    seeds: int
    passed: int
    groups: list[Group]
    canary: str
    """Empty when the canary was caught by its check; else what is wrong with that."""
    wall_s: float
    events: int
    offline: list[str]
    """Where a run repeated into a directory, or its judgement offline, differs: must be empty."""
    sampled: list[str]

    @property
    def exit_code(self) -> int:
        if any(group.result == "fail" for group in self.groups) or self.offline:
            return 1
        return 3 if self.groups or self.canary else 0

    def lines(self) -> Iterator[str]:
        """For people."""
        for group in self.groups:
            yield f"{group.result:<12} {len(group.seeds)} seeds, {group.check}: {group.witness}"
            yield f"  first seeds: {', '.join(map(str, group.seeds[:8]))}"
            yield f"  repeat: {group.repeat}"
            if group.directories:
                yield f"  evidence: {', '.join(group.directories)}"
        for line in self.offline:
            yield f"differs      {line}"
        yield self.canary or f"canary: caught by {canary.CAUGHT_BY}"
        if self.sampled:
            yield f"sample: {', '.join(self.sampled)}"
        rate = self.seeds / self.wall_s if self.wall_s else 0.0
        word = {0: "PASS", 1: "FAIL", 3: "INCONCLUSIVE"}[self.exit_code]
        yield (
            f"{word}: {self.scenario}: {self.passed} of {self.seeds} seeds pass; {self.wall_s:.1f} s, "
            f"{rate * 3600:,.0f} seeds an hour"
        )

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "exit_code": self.exit_code}


def sweep_scenario(
    scenario: Scenario,
    name: str,
    first: int,
    count: int,
    *,
    jobs: int,
    out: pathlib.Path | None,
    sample: int,
    changes: Sequence[str],
    shell: Shell,
) -> Swept:
    """Run seeds ``first`` to ``first + count - 1``.

    Args:
        name: of the scenario, as it was given.
        jobs: worker processes.
        out: folder for the run directories; default ``runs/sweep-<scenario>``, numbered where that exists.
        sample: passing seeds that get a run directory as well.
        changes: of ``--set``, for the commands that repeat a run.
        shell: shows the progress.

    Raises:
        BadInput: the folder exists or cannot be made.
    """
    out = _folder(scenario, out)
    begun = time.perf_counter()
    wrong = check_canary(scenario, first)
    groups: dict[tuple[str, str, str], Group] = {}
    passed: list[int] = []
    digests: dict[int, str] = {}
    events = 0
    for done in _run_all(scenario, range(first, first + count), jobs, shell):
        events += done.events
        if done.result == "pass":
            passed.append(done.seed)
            if done.seed < first + sample:
                digests[done.seed] = done.digest
            continue
        digests[done.seed] = done.digest
        for check, text in done.why[:1]:
            key = (done.result, check, _shape(text))
            group = groups.get(key)
            if group is None:
                repeat = repeat_command(name, done.seed, changes, explore=True)
                group = groups[key] = Group(done.result, check, text, [], repeat)
            group.seeds.append(done.seed)
    wall_s = time.perf_counter() - begun
    ordered = sorted(groups.values(), key=lambda group: (group.result != "fail", -len(group.seeds), group.check))
    for group in ordered:
        group.seeds.sort()
        group.repeat = repeat_command(name, group.seeds[0], changes, explore=True)
    swept = Swept(scenario.name, count, len(passed), ordered, wrong, wall_s, events, [], [])
    _keep(scenario, swept, digests, sorted(passed)[:sample], out, name, changes)
    return swept


def check_canary(scenario: Scenario, seed: int) -> str:
    """Run a gateway that is known to be wrong. Returns what is the matter when its check does not fail."""
    services = {
        name: service.model_copy(
            update={"components": {**service.components, "gateway": "scenarios.canary:CanaryGateway"}}
        )
        for name, service in scenario.model.topology.services.items()
    }
    topology = scenario.model.topology.model_copy(update={"services": services})
    model = scenario.model.model_copy(update={"topology": topology})
    ran = run_in_sim(dataclasses.replace(scenario, model=model), seed, explore=True)
    rows = [row for row in ran.verdict.checks if row.name == canary.CAUGHT_BY]
    if rows and rows[0].result == "fail" and rows[0].witness:
        return ""
    found = rows[0].result if rows else "absent"
    return f"canary: {canary.CAUGHT_BY} is {found} for a gateway that is known to be wrong; this sweep proves nothing"


# --- running ---


def _run_all(scenario: Scenario, seeds: range, jobs: int, shell: Shell) -> Iterator[SeedResult]:
    request = (scenario.text, scenario.source, str(scenario.folder))
    size = max(1, min(64, len(seeds) // (4 * jobs)))
    batches = [list(batch) for batch in _batched(seeds, size)]
    if jobs == 1:
        results: Iterator[list[SeedResult]] = (run_seeds(*request, batch) for batch in batches)
        yield from _shown(itertools.chain.from_iterable(results), len(seeds), shell)
        return
    # Spawned, not forked: a worker starts with nothing of this process in it.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, initializer=_begin_worker) as pool:
        futures = [pool.submit(run_seeds, *request, batch) for batch in batches]
        try:
            done = itertools.chain.from_iterable(future.result() for future in as_completed(futures))
            yield from _shown(done, len(seeds), shell)
        except BaseException:
            for worker in multiprocessing.active_children():  # else the pool would wait for their batches
                worker.terminate()
            raise


def _begin_worker() -> None:
    """In a worker: Ctrl-C reaches every process of the terminal, and the parent's answer is the one that counts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pool's queues stay open in the workers: without this they outlive a parent that was killed, and wait for ever.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_seeds(text: str, source: str, folder: str, seeds: Sequence[int]) -> list[SeedResult]:
    """What a worker process does: run and judge seeds, one after another."""
    scenario = parse(text, source, pathlib.Path(folder))
    return [run_seed(scenario, seed) for seed in seeds]


def run_seed(scenario: Scenario, seed: int) -> SeedResult:
    """One seed with drawn orders and delays, judged live, nothing written."""
    ran = run_in_sim(scenario, seed, explore=True)
    why = tuple((row.name, row.explain) for row in ran.verdict.failed())
    return SeedResult(seed, ran.verdict.result, ran.result.digest, ran.result.events, why)


def _shown(results: Iterator[SeedResult], total: int, shell: Shell) -> Iterator[SeedResult]:
    if shell.fancy and shell.err.is_terminal:
        with Progress(console=shell.err, transient=True) as bar:
            task = bar.add_task("seeds", total=total)
            for result in results:
                bar.advance(task)
                yield result
        return
    last = time.monotonic()
    for number, result in enumerate(results, 1):
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            shell.note(f"{number} of {total} seeds")
        yield result


def _batched(seeds: range, size: int) -> Iterator[range]:
    for start in range(0, len(seeds), size):
        yield seeds[start : start + size]


# --- what is kept ---


def _keep(
    scenario: Scenario,
    swept: Swept,
    digests: dict[int, str],
    sample: list[int],
    out: pathlib.Path,
    name: str,
    changes: Sequence[str],
) -> None:
    for group in swept.groups:
        for seed in group.seeds[:_KEPT_A_GROUP]:
            group.directories.append(str(out / str(seed)))
            swept.offline += _write(scenario, seed, digests[seed], out, name, changes)
    for seed in sample:
        if seed in digests:
            swept.sampled.append(str(out / str(seed)))
            swept.offline += _write(scenario, seed, digests[seed], out, name, changes)


def _write(
    scenario: Scenario, seed: int, digest: str, out: pathlib.Path, name: str, changes: Sequence[str]
) -> list[str]:
    """Run a seed once more into a directory. Returns what differs from the first time, or from an offline judge."""
    path = out / str(seed)
    repeat = repeat_command(name, seed, changes, explore=True)
    ran = run_in_sim(scenario, seed, out=path, repeat=repeat, explore=True)
    found = []
    if ran.result.digest != digest:
        found.append(f"seed {seed}: run again it has another digest; python -m scenarios prove {name} --seed {seed}")
    if judge_run(RunDir(path)) != ran.verdict:
        found.append(f"seed {seed}: judged offline it has another verdict; python -m analysis verdict {path}")
    return found


def _folder(scenario: Scenario, out: pathlib.Path | None) -> pathlib.Path:
    if out is not None:
        if out.exists():
            raise BadInput(f"{out}: exists already; name another output folder or remove it")
        return out
    path = pathlib.Path("runs") / f"sweep-{scenario.name}"
    number = 2
    while path.exists():
        path = path.with_name(f"sweep-{scenario.name}-{number}")
        number += 1
    return path


def _shape(text: str) -> str:
    """An explanation without its numbers, so that the same failure of two seeds is one group."""
    return re.sub(r"\d+(\.\d+)?", "#", text)
