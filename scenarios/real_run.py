"""Runs one scenario once in the real world: preregister, start the world, run, sweep, merge, judge.

The clean-up is one path, whatever has happened: the warden (`real.warden`) ends every process of the run and removes
its temporary folder. It is asked to at the end, and does so by itself when this process dies.

An interrupt at any time leaves either a run that is judged or nothing: see ``Interrupts``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from analysis.errors import BadInput
from analysis.rundir import Preregistered, RunDir, write_run_json
from analysis.verdict import Judge, Verdict
from analysis.writer import JsonlWriter
from protocol.evidence import Event
from scenarios.load import Scenario
from scenarios.monitor.run_source import LIVE
from scenarios.real_preflight import RealPlan
from scenarios.real_world import INTERRUPTED, RealEnd, RealStage
from scenarios.runner import conclude, engines, preregistered, versions
from scenarios.starting import leave_interrupted

if TYPE_CHECKING:
    from real.merge import Merged
    from real.warden import Warden

_LOG_BYTES = 4_000_000  # of one log that is kept: its end
_LETS_GO_S = 15.0  # for Ray to take this process off its cluster; half a second does, or 11 s where its head has ended
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
        KeyboardInterrupt: it came before there was anything to judge; nothing is left then. (While Ray starts in this
            process, an interrupt ends it.)
    """
    from real.cluster import ClusterFailed

    begun = time.perf_counter()
    scenario = plan.scenario
    thresholds = preregistered(scenario)
    with Interrupts() as interrupts:
        directory = RunDir.create(out)
        try:
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
            end, merged, problems = _lived(plan, seed, directory, watch, interrupts)
            verdict, events = _judged(directory, thresholds, merged, end, report)
        except (BadInput, ClusterFailed, KeyboardInterrupt) as error:
            # Made here, and of no use without a run, or without its end.
            shutil.rmtree(directory.path, ignore_errors=True)
            if isinstance(error, ClusterFailed):
                raise BadInput(str(error)) from error
            raise
    return RealRan(verdict, end, events, directory, time.perf_counter() - begun, problems)


def _lived(
    plan: RealPlan, seed: int, directory: RunDir, watch: Callable[[RealStage], None] | None, interrupts: Interrupts
) -> tuple[RealEnd, Merged, list[str]]:  # fmt: skip
    """From the start of Ray to the end of all that was started; what it has written, merged."""
    from real.evidence import begin_evidence, evidence_is_lost
    from real.merge import Tail
    from real.warden import Warden

    run = f"run-{time.time_ns():x}-{os.getpid()}"
    try:
        folder = tempfile.mkdtemp(prefix="seatrial-")
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}; set TMPDIR to a folder that can be written") from error
    live = directory.path / LIVE
    warden: Warden | None = None
    problems: list[str] = []
    try:
        live.write_text(json.dumps({"folder": folder}) + "\n", encoding="utf-8")
        warden = Warden(run, folder)
        begin_evidence(folder)
        with (
            _environment(run, folder, own_cluster=not plan.ray),
            _ray_talking_to(pathlib.Path(folder, "logs", "ray.log")),
        ):
            leave = functools.partial(_leave, warden, directory)
            end, problems = _live(plan, seed, run, folder, warden.sweep, _with_warden(warden, watch), interrupts, leave)
        if end.unfit:
            raise BadInput(f"{plan.scenario.name}: {end.unfit}")
        merged = _merged(pathlib.Path(folder), end)
        if end.detail == INTERRUPTED and not any(event.kind == "run.started" for event in merged.events):
            raise KeyboardInterrupt
        if not end.broken and evidence_is_lost(folder):
            end.broken = f"the disk of {folder} was full, and events could not be written"
        if end.broken:
            merged.tails.append(Tail(("driver", 0), "broken", end.broken))
        _keep_logs(pathlib.Path(folder), directory.path / "logs")
    except OSError as error:  # the run's own end is never one: a disk is full, or a folder was taken away
        where = error.filename or f"{directory.path} or {folder}"
        raise BadInput(f"{where}: {error.strerror or error}; the run was not kept") from error
    finally:
        if warden is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            problems += warden.close()
        with contextlib.suppress(OSError):  # somebody has taken the folder away, or put something in its place
            live.unlink(missing_ok=True)
    return end, merged, problems


def _leave(warden: Warden, directory: RunDir) -> NoReturn:
    """End this process while Ray starts in it. Nothing is left.

    An error that is raised there destroys what Ray has of its own, half made: then the process hangs, or ends by
    SIGABRT or SIGSEGV.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the impatient press twice
    signal.alarm(0)  # at SIGTERM Ray would, for a part of its start, end this process by SIGABRT too, 3 s later
    warden.close()
    shutil.rmtree(directory.path, ignore_errors=True)
    leave_interrupted()


def _judged(
    directory: RunDir, thresholds: Preregistered, merged: Merged, end: RealEnd, report: bool
) -> tuple[Verdict, int]:  # fmt: skip
    """Write and judge the evidence; the verdict, and how many events there are."""
    judge = Judge(thresholds)
    events = _finished(merged, end)
    try:
        with JsonlWriter(directory.events) as evidence:
            for event in events:
                evidence.record(event)
                judge.feed(event)
        verdict = judge.verdict()
        conclude(directory, verdict, evidence.sha256, report)
    except OSError as error:
        raise BadInput(f"{directory.path}: cannot be written ({error.strerror}); the run was not kept") from error
    return verdict, len(events)


def _with_warden(warden: Warden, watch: Callable[[RealStage], None] | None) -> Callable[[RealStage], None]:
    """What the stage calls twice a second. That a display fails, such as for want of its terminal, ends no run."""
    shown = watch

    def look(stage: RealStage) -> None:
        nonlocal shown
        warden.renew()
        if shown is not None:
            try:
                shown(stage)
            except Exception:
                shown = None
                traceback.print_exc(file=sys.stdout)  # that is a log of the run, which is kept with it

    return look


def _live(
    plan: RealPlan, seed: int, run: str, folder: str, sweep: Callable[[], list[str]],
    watch: Callable[[RealStage], None] | None, interrupts: Interrupts, leave: Callable[[], NoReturn],
) -> tuple[RealEnd, list[str]]:  # fmt: skip
    """From the start of Ray to the death of everything. Raises ClusterFailed, and KeyboardInterrupt before the run.

    An interrupt while Ray starts calls ``leave``.
    """
    from real.cluster import LocalCluster, disconnect

    cluster = None if plan.ray else LocalCluster(run, list(plan.gpus))
    posted: Any = None
    problems: list[str] = []
    try:
        with interrupts.ending(leave):
            try:
                if cluster is None:
                    posted = _connected(plan, run, folder)
                else:
                    cluster.start()
            except SystemExit:  # SIGTERM, which Ray takes to itself while it starts
                leave()
        stage = RealStage(
            plan.scenario, seed,
            run=run, folder=folder, engines=plan.engines, machines=cluster, http_port=plan.http_port, watch=watch,
            begins=interrupts.cancel,
        )  # fmt: skip
        try:
            with interrupts.admitted():
                end = stage.run()
        except KeyboardInterrupt:  # before its first event, or another one while the first was being dealt with
            end = stage.interrupted()
    finally:
        if posted is not None:
            from real.guard import relieve

            problems += relieve(posted)
        with _ended_by(sweep, _LETS_GO_S):
            disconnect()
        problems += sweep()
        if cluster is not None:
            cluster.reap()
    return end, problems


@contextlib.contextmanager
def _ended_by(sweep: Callable[[], object], after_s: float) -> Iterator[None]:
    """Where the block has not ended after so long, the processes of the run are ended, which it may be waiting for.

    Ray asks its head without any bound, and one that is stopped answers nobody.
    """
    overdue = threading.Timer(after_s, sweep)
    overdue.start()
    try:
        yield
    finally:
        overdue.cancel()
        overdue.join()  # the warden takes one word at a time


def _connected(plan: RealPlan, run: str, folder: str) -> Any:
    """Connect to the cluster of ``--ray`` and post a guard there. Raises ClusterFailed: it does not suffice."""
    from real.cluster import ClusterFailed, connect, connected_problem, errors_of_ray
    from real.guard import post_guard

    connect(plan.ray, run, packages_of(plan.scenario))
    topology = plan.scenario.model.topology
    with errors_of_ray(plan.ray):
        if problem := connected_problem(topology.nodes, topology.gpus_per_node, folder):
            raise ClusterFailed(f"--ray {plan.ray}: {problem}")
        return post_guard(run, folder)


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
        return dataclasses.replace(event, data={**event.data, "clock_error_ns": inversion_ns})
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


class Interrupts:
    """Ctrl-C, SIGTERM and the end of the terminal, of this process and as long as a run goes on: all three are one.

    Inside of ``admitted`` an interrupt is raised; where a task was named (``cancel``) and is not done, that is
    cancelled instead. It ends in order, for which it needs the loop and its other tasks: an error raised in the
    midst of those, as asyncio does at a second Ctrl-C, would have it wait for ever. Elsewhere an interrupt is only
    noted, and raised in the next ``admitted``: what is being cleaned up, merged or judged is finished, which takes
    some seconds. One that has not been raised by the end goes to whoever had the signal before, unless the run ends
    by an error. Where Ctrl-C or the end of the terminal was to be ignored (a shell's background, nohup) it still
    is.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._came = False
        self._untold: signal.Signals | None = None  # that came and was not raised
        self._end: Callable[[], NoReturn] | None = None  # what an interrupt does where it may not be raised

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN and number is not signal.SIGTERM:
                continue
            try:
                signal.signal(number, self._note)
            except ValueError:  # not the main thread, which alone gets the signal
                break
            self._before[number] = signal.SIG_DFL if before is None else before
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None and self._untold is not None:
            signal.raise_signal(self._untold)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Inside of it an interrupt has its effect."""
        try:
            for number in self._before:
                signal.signal(number, self._interrupt)
            if self._came:
                self._untold = None
                raise KeyboardInterrupt
            yield
        finally:
            self._hold()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], NoReturn]) -> Iterator[None]:
        """Inside of it an interrupt calls ``end``, which does not return: for code that no error may be raised in."""
        with self.admitted():
            self._end = end
            try:
                yield
            finally:
                self._end = None

    def _hold(self) -> None:
        while True:
            try:
                for number in self._before:
                    signal.signal(number, self._note)
                return
            except KeyboardInterrupt:
                self._note(signal.SIGINT, None)

    def _note(self, number: int, _: object) -> None:
        self._came = True
        self._untold = self._untold or signal.Signals(number)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """The task that an interrupt cancels from now on."""
        self._task = task

    def _interrupt(self, *_: object) -> None:
        if self._end is not None:
            self._end()
        if self._task is None or self._task.done():
            raise KeyboardInterrupt
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)
