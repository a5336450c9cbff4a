"""Runs one scenario once in the real world: preregister, start the world, run, sweep, merge, judge.

The clean-up is one path, whatever has happened: the warden (`real.warden`) ends every process of the run and removes
its temporary folder. It is asked to at the end, and does so by itself when this process dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from analysis.errors import BadInput
from analysis.rundir import RunDir, write_run_json
from analysis.verdict import Judge, Verdict
from analysis.writer import JsonlWriter
from protocol.evidence import Event
from scenarios.load import Scenario
from scenarios.monitor.run_source import LIVE
from scenarios.real_preflight import RealPlan
from scenarios.real_world import RealEnd, RealStage
from scenarios.runner import conclude, engines, preregistered, versions

if TYPE_CHECKING:
    from real.merge import Merged
    from real.warden import Warden

_LOG_BYTES = 4_000_000  # of one log that is kept: its end
_PACKAGES = ("protocol", "sim", "real", "scenarios", "analysis")


@dataclasses.dataclass(frozen=True)
class RealRan:
    """A real run that has ended. ``left``: what the clean-up could not do, for people."""

    verdict: Verdict
    end: RealEnd
    events: int
    directory: RunDir
    wall_s: float
    left: list[str]


def run_in_real(
    plan: RealPlan,
    seed: int,
    *,
    out: pathlib.Path,
    repeat: str = "",
    report: bool = True,
    watch: Callable[[RealStage], None] | None = None,
) -> RealRan:
    """Run a planned scenario and judge what its processes have written.

    Args:
        plan: of ``scenarios.real_preflight.plan``.
        seed: of the workload's draws and the injector's.
        out: the run directory to make.
        repeat: the command that repeats this run (not its timing: the world is real).
        report: write report.html and trace.json too.
        watch: called twice a second.

    Raises:
        BadInput: the folder exists or cannot be written, or Ray or an engine does not start; nothing is left then.
    """
    from real.cluster import ClusterFailed
    from real.evidence import begin_evidence, evidence_is_lost
    from real.merge import Tail
    from real.warden import Warden

    begun = time.perf_counter()
    scenario = plan.scenario
    thresholds = preregistered(scenario)
    directory = RunDir.create(out)
    write_run_json(
        directory,
        scenario=scenario.name,
        scenario_text=scenario.text,
        seed=seed,
        backend="real",
        versions={**versions("ray", "aiohttp"), "engine": plan.engines.kind},
        preregistered=thresholds,
        repeat=repeat,
        # A genuine engine is modelled on nothing.
        engines=engines(scenario) if plan.engines.kind == "emulated" else None,
    )
    run = f"run-{time.time_ns():x}-{os.getpid()}"
    folder = tempfile.mkdtemp(prefix="seatrial-")
    live = directory.path / LIVE
    live.write_text(json.dumps({"folder": folder}) + "\n", encoding="utf-8")
    warden = Warden(run, folder)
    problems: list[str] = []
    try:
        begin_evidence(folder)
        with (
            _environment(run, folder, own_cluster=not plan.ray),
            _ray_talking_to(pathlib.Path(folder, "logs", "ray.log")),
        ):
            end, problems = _live(plan, seed, run, folder, warden.sweep, _with_warden(warden, watch))
        if end.unfit:
            raise BadInput(f"{scenario.name}: {end.unfit}")
        merged = _merged(pathlib.Path(folder), end)
        if not end.broken and evidence_is_lost(folder):
            end.broken = f"the disk of {folder} was full, and events could not be written"
        if end.broken:
            merged.tails.append(Tail(("driver", 0), "broken", end.broken))
        _keep_logs(pathlib.Path(folder), directory.path / "logs")
    except (BadInput, ClusterFailed) as error:
        shutil.rmtree(directory.path)  # made here, and of no use without a run
        raise BadInput(str(error)) from error
    except OSError as error:  # the run's own end is never one: a disk is full, or a folder was taken away
        shutil.rmtree(directory.path, ignore_errors=True)
        where = error.filename or f"{directory.path} or {folder}"
        raise BadInput(f"{where}: {error.strerror or error}; the run was not kept") from error
    finally:
        with _uninterrupted():
            problems += warden.close()
            live.unlink(missing_ok=True)
    judge = Judge(thresholds)
    events = _finished(merged, end)
    try:
        with JsonlWriter(directory.events) as evidence:
            for event in events:
                evidence.record(event)
                judge.feed(event)
        verdict = judge.verdict()
        conclude(directory, verdict, evidence.sha256, report)
    except (BadInput, OSError) as error:
        shutil.rmtree(directory.path)  # made here, and of no use without its end
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{directory.path}: cannot be written ({error.strerror}); the run was not kept") from error
    return RealRan(verdict, end, len(events), directory, time.perf_counter() - begun, problems)


def _with_warden(warden: Warden, watch: Callable[[RealStage], None] | None) -> Callable[[RealStage], None]:
    def look(stage: RealStage) -> None:
        warden.renew()
        if watch is not None:
            watch(stage)

    return look


def _live(
    plan: RealPlan, seed: int, run: str, folder: str, sweep: Callable[[], list[str]],
    watch: Callable[[RealStage], None] | None,
) -> tuple[RealEnd, list[str]]:  # fmt: skip
    """From the start of Ray to the death of everything. Raises ClusterFailed."""
    from real.cluster import LocalCluster, disconnect

    cluster = None if plan.ray else LocalCluster(run, list(plan.gpus))
    posted: Any = None
    try:
        if cluster is None:
            posted = _connected(plan, run, folder)
        else:
            cluster.start()
        stage = RealStage(
            plan.scenario, seed,
            run=run, folder=folder, engines=plan.engines, machines=cluster, http_port=plan.http_port, watch=watch,
        )  # fmt: skip
        with _a_polite_kill_is_an_interrupt():
            end = stage.run()
    finally:
        with _uninterrupted():
            if posted is not None:
                from real.guard import relieve

                relieve(posted)
            disconnect()
            problems = sweep()
            if cluster is not None:
                cluster.reap()
    return end, problems


def _connected(plan: RealPlan, run: str, folder: str) -> Any:
    """Connect to the cluster of ``--ray`` and post a guard there. Raises ClusterFailed: it does not suffice."""
    from real.cluster import ClusterFailed, connect, connected_problem
    from real.guard import post_guard

    connect(plan.ray, run, packages_of(plan.scenario))
    topology = plan.scenario.model.topology
    if problem := connected_problem(topology.nodes, topology.gpus_per_node, folder):
        raise ClusterFailed(f"--ray {plan.ray}: {problem}")
    return post_guard(run)


def packages_of(scenario: Scenario) -> list[str]:
    """What the workers of another's cluster must have: our packages, and those of the scenario's own components."""
    root = pathlib.Path(__file__).resolve().parent.parent
    found = {package: str(root / package) for package in _PACKAGES}
    for service in scenario.model.topology.services.values():
        for target in service.components.values():
            top = target.partition(":")[0].partition(".")[0]
            module = importlib.import_module(top)  # the preflight has imported it
            found.setdefault(top, str(next(iter(getattr(module, "__path__", [module.__file__])))))
    return list(found.values())


# --- what the run has written ---


def _merged(folder: pathlib.Path, end: RealEnd) -> Merged:
    from real.merge import MergeFailed, merge, read_logs

    try:
        return merge(read_logs(folder / "events"), end.alive, round(end.took_s * 1e9))
    except MergeFailed as error:
        raise BadInput(f"the evidence of the run cannot be merged: {error}") from error


def _finished(merged: Merged, end: RealEnd) -> list[Event]:
    """The events with the declared tails and the end of the run behind them, as the driver's."""
    events = [_restated(event, merged.inversion_ns) for event in merged.events]
    driver = [event for event in events if event.actor == "driver" and event.inc == 0 and event.n < 2**52]
    n = driver[-1].n if driver else 0
    lc = max((event.lc for event in events), default=0)
    t_ns = max([round(end.took_s * 1e9), *(event.t_ns for event in events)])
    for tail in merged.tails:
        n, lc = n + 1, lc + 1
        data: dict[str, Any] = {
            "process": f"{tail.process[0]}/{tail.process[1]}",
            "what": tail.what,
            "detail": tail.detail,
        }
        events.append(Event(len(events) + 1, t_ns, "run.tail", "driver", 0, n, lc, None, data))
    data = {"reason": end.reason, "detail": end.detail, "events": len(events)}
    events.append(Event(len(events) + 1, t_ns, "run.finished", "driver", 0, n + 1, lc + 1, None, data))
    return events


def _restated(event: Event, inversion_ns: int) -> Event:
    """The clocks are as wrong as the worst effect before its cause says, whatever was measured before the run."""
    if event.kind == "run.started" and inversion_ns > event.data["clock_error_ns"]:
        return event._replace(data={**event.data, "clock_error_ns": inversion_ns})
    return event


def _keep_logs(folder: pathlib.Path, kept: pathlib.Path) -> None:
    """What engines and actors have printed, for people."""
    for path in sorted((folder / "logs").glob("*.log")):
        _keep(_end_of(path), kept / path.name)
    for path in sorted(folder.glob("ray/session_2*/logs/worker-*.err")):
        lines = _end_of(path).splitlines(keepends=True)
        # Ray itself begins each of them with who it is.
        _keep(b"".join(line for line in lines if not line.startswith((b":job_id:", b":actor_name:"))), kept / path.name)


def _end_of(path: pathlib.Path) -> bytes:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return log.read()


def _keep(content: bytes, path: pathlib.Path) -> None:
    if content:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


# --- this process ---


@contextlib.contextmanager
def _environment(run: str, folder: str, *, own_cluster: bool) -> Iterator[None]:
    """The variables of Ray's daemons, in this process as long as it may start some."""
    from real.cluster import environment

    before = dict(os.environ)
    os.environ.update(environment(run, folder, own_cluster=own_cluster))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _ray_talking_to(log: pathlib.Path) -> Iterator[None]:
    """Ray prints a paragraph at the death of every actor, also of those that the run kills; stdout is for results."""
    log.parent.mkdir(exist_ok=True)
    file = log.open("a", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(file):
            yield
    finally:
        with contextlib.suppress(OSError):  # a full disk has no room for the rest, which is no reason to lose the run
            file.close()


@contextlib.contextmanager
def _a_polite_kill_is_an_interrupt() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, end the run as Ctrl-C does. Ray's own handler would print a stack.

    Where the end of the terminal was to be ignored (nohup) it still is.
    """
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    except ValueError:  # not the main thread, which alone gets the signal
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """The clean-up takes a second; who presses Ctrl-C again has it all the same."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone gets the signal
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
