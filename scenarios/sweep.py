"""A sweep: many seeds with drawn orders and delays, in worker processes that run many seeds each, here or on Ray.

Only failing, inconclusive and a sample of passing seeds get a run directory: those are run once more, which must give
the same digest, and judged offline, which must give the same verdict. A canary, known to be wrong, must fail first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from rich.progress import Progress

from analysis.errors import BadInput
from analysis.rundir import RunDir
from analysis.verdict import judge_run
from scenarios import canary
from scenarios.console import Shell
from scenarios.load import Scenario
from scenarios.runner import repeat_command, run_in_sim
from scenarios.seeds import SeedResult, run_seeds
from scenarios.workers import Lost, run_in_workers

_KEPT_A_GROUP = 3  # run directories of one group of failures
_LINE_EVERY_S = 10.0
_LOST = "lost"


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
    jobs: int | None,
    out: pathlib.Path | None,
    sample: int,
    changes: Sequence[str],
    shell: Shell,
    hang_after_s: float | None = None,
    ray: str = "",
) -> Swept:
    """Run seeds ``first`` to ``first + count - 1``.

    Args:
        name: of the scenario, as it was given.
        jobs: worker processes; None: one, and on Ray one a CPU of the cluster.
        out: folder for the run directories; default ``runs/sweep-<scenario>``, numbered where that exists.
        sample: passing seeds that get a run directory as well.
        changes: of ``--set``, for the commands that repeat a run.
        shell: shows the progress.
        hang_after_s: real seconds in which a callback of an actor must come back; None: sim.watchdog's.
        ray: address of a Ray cluster that the seeds are spread over; empty: worker processes of this machine.

    Raises:
        BadInput: there is no such cluster, the folder exists or cannot be made, or workers cannot be started.
    """
    if ray:
        from scenarios.ray_workers import check_address

        check_address(ray)
    out = _folder(scenario, out)
    results = _run_all(scenario, range(first, first + count), jobs, hang_after_s, ray)
    return _sweep(scenario, name, range(first, first + count), results, out, sample, changes, shell, hang_after_s)


def _sweep(
    scenario: Scenario,
    name: str,
    seeds: range,
    running: Generator[SeedResult, None, None],
    out: pathlib.Path,
    sample: int,
    changes: Sequence[str],
    shell: Shell,
    hang_after_s: float | None,
) -> Swept:
    begun = time.perf_counter()
    wrong = check_canary(scenario, seeds.start, hang_after_s)
    groups: dict[tuple[str, str, str], Group] = {}
    passed: list[int] = []
    kept: dict[int, SeedResult] = {}
    events = 0
    with contextlib.closing(running) as results:
        for done in _shown(results, len(seeds), shell):
            events += done.events
            if done.result == "pass":
                passed.append(done.seed)
                if done.seed < seeds.start + sample:
                    kept[done.seed] = done
                continue
            kept[done.seed] = done
            check, text = done.why[0]
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
    swept = Swept(scenario.name, len(seeds), len(passed), ordered, wrong, wall_s, events, [], [])
    keep = _Keep(scenario, name, out, changes, hang_after_s, swept.offline, shell)
    for group in swept.groups:
        for seed in group.seeds[: _KEPT_A_GROUP if kept[group.seeds[0]].ended == "completed" else 1]:
            group.directories += keep.run(kept[seed])
    for seed in sorted(passed)[:sample]:
        if seed in kept:
            swept.sampled += keep.run(kept[seed])
    return swept


def check_canary(scenario: Scenario, seed: int, hang_after_s: float | None = None) -> str:
    """Run a gateway that is known to be wrong. Returns what is the matter when its check does not fail."""
    services = {
        name: service.model_copy(update={"components": {**service.components, **canary.COMPONENTS}})
        for name, service in scenario.model.topology.services.items()
    }
    topology = scenario.model.topology.model_copy(update={"services": services})
    model = scenario.model.model_copy(update={"topology": topology})
    ran = run_in_sim(dataclasses.replace(scenario, model=model), seed, explore=True, hang_after_s=hang_after_s)
    rows = [row for row in ran.verdict.checks if row.name == canary.CAUGHT_BY]
    if rows and rows[0].result == "fail" and rows[0].witness:
        return ""
    found = rows[0].result if rows else "absent"
    return f"canary: {canary.CAUGHT_BY} is {found} for a gateway that is known to be wrong; this sweep proves nothing"


# --- running ---


def _run_all(
    scenario: Scenario, seeds: range, jobs: int | None, hang_after_s: float | None, ray: str
) -> Generator[SeedResult, None, None]:
    if not ray and jobs in (1, None):
        yield from run_seeds(scenario, seeds, hang_after_s)
        return
    request = {
        "text": scenario.text,
        "source": scenario.source,
        "folder": str(scenario.folder),
        "hang_after_s": hang_after_s,
    }
    with contextlib.closing(_workers(scenario, request, seeds, jobs, ray)) as results:
        for result in results:
            if isinstance(result, Lost):
                why = f"its process ended without a result ({result.how})"
                yield SeedResult(result.seed, "inconclusive", _LOST, "", 0, [("the worker", why)])
            else:
                yield SeedResult(**{**result, "why": [(check, text) for check, text in result["why"]]})


def _workers(
    scenario: Scenario, request: dict[str, Any], seeds: range, jobs: int | None, ray: str
) -> Generator[dict[str, Any] | Lost, None, None]:
    if ray:
        from scenarios.ray_workers import run_on_ray

        return run_on_ray(scenario, request, seeds, ray, jobs)
    jobs = jobs or 1
    return run_in_workers(request, seeds, jobs, max(1, min(64, len(seeds) // (4 * jobs))))


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


# --- what is kept ---


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Runs a seed once more into a directory, and says in ``offline`` what is not as it was the first time."""

    scenario: Scenario
    name: str
    out: pathlib.Path
    changes: Sequence[str]
    hang_after_s: float | None
    offline: list[str]
    shell: Shell

    def run(self, first: SeedResult) -> list[str]:
        """The directory, or none: of a seed that took its process with it, or where it cannot be written."""
        if first.ended == _LOST:
            return []
        seed = first.seed
        path = self.out / str(seed)
        part = self.out / f"{seed}.part"  # by which one that was broken off is known
        repeat = repeat_command(self.name, seed, self.changes, explore=True)
        try:
            ran = run_in_sim(self.scenario, seed, out=part, repeat=repeat, explore=True, hang_after_s=self.hang_after_s)
            part.rename(path)
        except (BadInput, OSError) as error:  # what was found is worth more than its evidence: repeat makes that again
            self.shell.note(f"not kept: {error}")
            self._leave_nothing(part)
            return []
        except BaseException:
            self._leave_nothing(part)
            raise
        # Where an endless callback was found depends on the real clock, so that its digest says nothing.
        if ran.result.digest != first.digest and first.ended != "endless_callback":
            again = f"python -m scenarios prove {self.name} --seed {seed}"
            self.offline.append(f"seed {seed}: run again it has another digest; {again}")
        if judge_run(RunDir(path)) != ran.verdict:
            self.offline.append(
                f"seed {seed}: judged offline it has another verdict; python -m analysis verdict {path}"
            )
        return [str(path)]

    def _leave_nothing(self, part: pathlib.Path) -> None:
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.out.rmdir()  # nothing else was kept


def _folder(scenario: Scenario, out: pathlib.Path | None) -> pathlib.Path:
    """Tries the folder now: not to be writable is no news for the end of a long sweep. It is made for what is kept."""
    number = 1
    while out is None:
        path = pathlib.Path("runs") / f"sweep-{scenario.name}{f'-{number}' if number > 1 else ''}"
        if not path.exists():
            out = path
        number += 1
    there = next(above for above in out.absolute().parents if above.exists())
    RunDir.create(out).path.rmdir()
    for above in out.absolute().parents:
        if above == there:
            break
        with contextlib.suppress(OSError):  # somebody else has put something there by now
            above.rmdir()
    return out


def _shape(text: str) -> str:
    """An explanation without its numbers, so that the same failure of two seeds is one group."""
    return re.sub(r"\d+(\.\d+)?", "#", text)
