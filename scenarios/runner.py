"""Runs one scenario once: preregister, run, judge live, write the run directory.

``run.json`` is written before the world exists. Events go to the file and to the judge as they happen; nothing here
grows with the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import pathlib
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from analysis.errors import BadInput
from analysis.rundir import (
    EngineProfileInfo,
    Preregistered,
    RunDir,
    to_json,
    write_atomic,
    write_manifest,
    write_run_json,
)
from analysis.verdict import Judge, Verdict
from analysis.writer import JsonlWriter
from scenarios.impossible import check_possible, check_sizes
from scenarios.load import Scenario
from scenarios.named import criterion_of
from scenarios.workloads.arrival import Counts
from scenarios.workloads.mooncake import BLOCK_TOKENS
from scenarios.workloads.source import read_trace

if TYPE_CHECKING:
    from scenarios.sim_world import SimResult, SimStage

Backend = Literal["sim", "real"]
Watch = Callable[["SimStage"], None]

_PACKAGES = ("seatrial", "simpy", "numpy", "pydantic")


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    verdict: Verdict
    result: SimResult
    directory: RunDir | None
    wall_s: float


@dataclasses.dataclass(frozen=True)
class TraceFacts:
    """What a look through a workload's trace has found, before the run."""

    file: str
    requests: int
    last_s: float
    zero_output: int
    """Rows passed over because they have no output tokens."""


def preregistered(scenario: Scenario) -> Preregistered:
    """What the judge will hold the run to, fixed before it starts."""
    model = scenario.model
    return Preregistered(
        acceptance=tuple(criterion_of(entry) for entry in model.acceptance),
        faults=len(model.fault_steps),
        converge_within_s=model.limits.converge_within_s,
        shadow_s=model.limits.shadow_s,
    )


def preflight(scenario: Scenario, backend: Backend) -> list[TraceFacts]:
    """Everything that can be found wrong with a scenario before anything is started or written.

    What the real world needs beside that, ``scenarios.real_preflight`` looks for.

    Raises:
        BadInput: the backend cannot do it, an engine profile is unknown, or a trace has a bad row.
    """
    from sim.profiles import ProfileError, load_profile

    model = scenario.model
    check_possible(scenario, backend)
    for number, step in enumerate(model.steps):
        if step.fault is not None and backend not in step.fault.worlds:
            place = scenario.place(("steps", number, "do"))
            raise BadInput(f"{place}: the {backend} world cannot do the fault {step.do!r}")
    for name, service in model.topology.services.items():
        at = ("topology", "services", name)
        try:
            profile = load_profile(service.engine)
        except ProfileError as error:
            raise BadInput(f"{scenario.place((*at, 'engine'))}: {error}") from error
        if backend == "sim":  # a genuine engine has its model's
            check_sizes(scenario, name, service.engine, profile.context_length)
        traces = [load.trace for load in model.workload if load.service == name and load.trace is not None]
        if profile.prefix_block_tokens != BLOCK_TOKENS and any(trace.format == "mooncake" for trace in traces):
            raise BadInput(
                f"{scenario.place((*at, 'engine'))}: {service.engine} caches blocks of {profile.prefix_block_tokens} "
                f"tokens, Mooncake traces name blocks of {BLOCK_TOKENS}; take an engine profile with that prefix_block"
            )
        if service.recovery.export_prefix != service.export.prefix:
            raise BadInput(
                f"{scenario.place(at)}: recovery.export_prefix ({service.recovery.export_prefix!r}) and export.prefix "
                f"({service.export.prefix!r}) differ, so that recovery would never find an export; make them equal"
            )
    exports: dict[str, str] = {}  # prefix -> the service that exports there
    for name, service in model.topology.services.items():
        other = exports.setdefault(service.export.prefix, name)
        if other != name:
            own = f"{name}-exports"
            raise BadInput(
                f"{scenario.place(('topology', 'services', name))}: {other} and {name} both export weights under "
                f"{service.export.prefix!r}; give {name} a prefix of its own: "
                f"export: {{prefix: {own}}} and recovery: {{export_prefix: {own}}}"
            )
    return look_through_traces(scenario)


def look_through_traces(scenario: Scenario) -> list[TraceFacts]:
    """Read every trace of a scenario to its end, so that a bad row is found before the run.

    Raises:
        BadInput: a bad row; or the run would be stopped by its time limit with requests open, whoever serves them.
    """
    facts = []
    for workload in scenario.model.workload:
        if workload.trace is None:
            loop = None if workload.arrivals is None else workload.arrivals.closed_loop
            if workload.for_s is not None and workload.requests is None and (loop is None or loop.turns is None):
                _within_limit(
                    scenario, f"the workload of service {workload.service!r}", workload.from_s + workload.for_s
                )
            continue
        counts = Counts()
        requests = 0
        last_ns = 0
        for arrival in read_trace(workload.trace, scenario.trace_path(workload.trace.file), counts):
            requests += 1
            last_ns = arrival.t_ns
        facts.append(TraceFacts(workload.trace.file, requests, last_ns / 1e9, counts.zero_output))
        _within_limit(scenario, f"the trace {workload.trace.file}", workload.from_s + last_ns / 1e9)
    for number, step in enumerate(scenario.model.steps):
        if step.at_s is not None:
            _within_limit(scenario, f"steps[{number}]", step.at_s)
    return facts


def _within_limit(scenario: Scenario, what: str, end_s: float) -> None:
    limit_s = scenario.model.limits.time_limit_s
    if end_s > limit_s:
        place = scenario.place(("limits", "time_limit_s"))
        raise BadInput(f"{place}: {what} goes on until {end_s:g} s, the run is stopped after {limit_s:g} s; raise it")


def repeat_command(
    name: str, seed: int, changes: Sequence[str], explore: bool, backend: Backend = "sim", options: Sequence[str] = ()
) -> str:
    """The command that repeats a run. ``options``: those of the real world."""
    words = ["python", "-m", "scenarios", "run", name, "--backend", backend, *options, "--seed", str(seed)]
    for change in changes:
        words += ["--set", change]
    if explore:
        words.append("--explore")
    return shlex.join(words)


def default_directory(scenario: Scenario, backend: Backend, seed: int) -> pathlib.Path:
    """``runs/<scenario>-<backend>-<seed>``, with ``-2`` and so on where that exists."""
    path = pathlib.Path("runs") / f"{scenario.name}-{backend}-{seed}"
    number = 2
    while path.exists():
        path = path.with_name(f"{scenario.name}-{backend}-{seed}-{number}")
        number += 1
    return path


def run_in_sim(
    scenario: Scenario,
    seed: int,
    *,
    out: pathlib.Path | None = None,
    repeat: str = "",
    explore: bool = False,
    report: bool = True,
    watch: Watch | None = None,
    hang_after_s: float | None = None,
) -> Ran:
    """Run a scenario in the simulated world and judge it live.

    Args:
        scenario: checked, and past :func:`preflight`.
        seed: of everything.
        out: the run directory to make; None: nothing is written.
        repeat: the command that repeats this run.
        explore: draw orders and delays from the seed, as sweeps do.
        report: write report.html and trace.json too.
        watch: called some hundred events apart.
        hang_after_s: real seconds in which a callback of an actor must come back; None: sim.watchdog's.

    Raises:
        BadInput: the folder exists or cannot be written.
    """
    from scenarios.sim_world import SimStage

    begun = time.perf_counter()
    thresholds = preregistered(scenario)
    judge = Judge(thresholds)
    directory = None
    evidence = None
    if out is not None:
        directory = RunDir.create(out)
        write_run_json(
            directory,
            scenario=scenario.name,
            scenario_text=scenario.text,
            seed=seed,
            backend="sim",
            versions=versions(),
            preregistered=thresholds,
            repeat=repeat,
            engines=engines(scenario),
        )
        evidence = JsonlWriter(directory.events)

    def write(data: bytes) -> None:
        if evidence is not None:
            evidence.write(data)
        if watch is not None:
            watch(stage)

    stage = SimStage(scenario, seed, batches=[judge.feed_all], write=write, explore=explore, hang_after_s=hang_after_s)
    try:
        with stage, contextlib.redirect_stdout(sys.stderr):  # stdout is for results; a component may print
            result = stage.run()
    finally:
        if evidence is not None:
            evidence.close()
    verdict = judge.verdict()
    if directory is not None and evidence is not None:
        try:
            conclude(directory, verdict, evidence.sha256, report)
        except (BadInput, OSError) as error:
            shutil.rmtree(directory.path)  # made here, and of no use without its end
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"{directory.path}: cannot be written ({error.strerror}); the run was not kept") from error
    return Ran(verdict, result, directory, time.perf_counter() - begun)


def conclude(directory: RunDir, verdict: Verdict, events_sha256: str, report: bool) -> None:
    """Write what follows from a run's events: verdict, report and trace if wanted, the manifest last."""
    write_atomic(directory.verdict, to_json(verdict.as_json()))
    if report:
        from analysis.report import build_timeline, write_report
        from analysis.trace import write_trace

        write_report(directory, verdict, build_timeline(directory))
        write_trace(directory)
    write_manifest(directory, {directory.events.name: events_sha256})


def engines(scenario: Scenario) -> dict[str, EngineProfileInfo]:
    """What each service's engines are modelled on."""
    from sim.profiles import load_profile

    profiles = {name: load_profile(service.engine) for name, service in scenario.model.topology.services.items()}
    return {name: EngineProfileInfo(profile=one.name, sha256=one.text_sha256) for name, one in profiles.items()}


def versions(*more: str) -> dict[str, str]:
    """What a bit-exact replay depends on. ``more``: packages beside our own."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "source tree"
    return found
