"""An interrupt at any time of a real run leaves a run that is judged, or nothing; and who watches a run ends none."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("ray")

from analysis.errors import BadInput
from analysis.rundir import RunDir, verify_manifest
from analysis.verdict import judge_run
from real.backend import RealBackend
from real.cluster import LocalCluster
from real.evidence import ProcessLog
from real.spawner import awaited
from real.warden import Warden
from scenarios import __main__ as command_line
from scenarios import real_run, real_world
from scenarios.load import load
from scenarios.real_preflight import RealOptions, plan
from scenarios.real_world import RealEnd, RealStage
from tests.real.bare_stage import bare_stage

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Left(BaseException):
    """In place of the end of this process."""


class Run:
    """``run_in_real`` without a Ray: what stands in its place is patched in."""

    def __init__(self, folder: pathlib.Path, temporary: str) -> None:
        self.out = folder / "run"
        self.temporary = pathlib.Path(temporary)

    def go(self) -> real_run.RealRan:
        before = [signal.getsignal(number) for number in ALL]
        try:
            return real_run.run_in_real(plan(load("smoke"), RealOptions("emulated")), 1, out=self.out)
        finally:
            assert [signal.getsignal(number) for number in ALL] == before
            assert list(self.temporary.iterdir()) == []

    def is_judged(self) -> str:
        """The verdict, as its files have it."""
        directory = RunDir.open(self.out)
        assert verify_manifest(directory) == []
        return judge_run(directory).result


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(LocalCluster, "start", lambda _: None)
    monkeypatch.setattr("real.cluster.disconnect", lambda: None)  # other tests may be connected

    def left(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", left)
    with tempfile.TemporaryDirectory(prefix="st") as temporary:  # short, for the preflight refuses others
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield Run(tmp_path, temporary)


def interrupt(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.01)


def begins(folder: str) -> None:
    """What the driver of a run writes first."""
    log = ProcessLog(folder, "driver", 0, time.monotonic_ns())
    log.emit("actor.spawned", cls="", node="node-0", role="driver")
    log.emit("run.started", scenario="smoke", seed=1, world="real", clock_error_ns=0, schema=1)
    log.close()


def rays_own(*_: object) -> NoReturn:
    """What Ray does at SIGTERM from the beginning of ray.init on."""
    sys.exit(signal.SIGTERM)


@pytest.mark.parametrize("number", [*ALL, None])
def test_an_interrupt_while_ray_starts_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals | None
) -> None:
    def start(_: LocalCluster) -> None:
        if number is None:
            signal.signal(signal.SIGTERM, rays_own)
        interrupt(number or signal.SIGTERM)
        raise AssertionError("the start went on")

    monkeypatch.setattr(LocalCluster, "start", start)
    with pytest.raises(Left, match="3"):
        run.go()
    assert not run.out.exists()  # or the same --out would be refused


def test_what_ray_has_set_up_at_sigterm_does_not_end_the_clean_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """While ray.init connects, SIGTERM has a handler of Ray's too, which has the process aborted 3 s later."""

    def start(_: LocalCluster) -> None:
        signal.alarm(60)
        interrupt(signal.SIGTERM)

    monkeypatch.setattr(LocalCluster, "start", start)
    with pytest.raises(Left):
        run.go()
    assert signal.alarm(0) == 0


def test_nothing_is_raised_in_a_ray_that_is_half_there(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would be taken down: the command died by SIGABRT or SIGSEGV, or waited for ever, in place of exit code 3."""

    def start(_: LocalCluster) -> None:
        try:
            interrupt(signal.SIGINT, signal.SIGINT)
        except Left:
            raise
        except BaseException as error:
            pytest.fail(f"{error!r} was raised while Ray started")

    monkeypatch.setattr(LocalCluster, "start", start)
    line = ["scenarios", "run", "smoke", "--backend", "real", "--engine", "emulated", "--out", str(run.out)]
    monkeypatch.setattr(sys, "argv", line)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(Left, match="3"):
            command_line.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err.strip() == "interrupted; what was written so far is no verdict"
    assert not run.out.exists() and list(run.temporary.iterdir()) == []


def test_a_start_that_was_given_up_says_nothing_more() -> None:
    """What is asked of an actor that dies before it answers is an error, which asyncio would print at its end."""
    printed: list[object] = []

    async def dies() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("The actor died unexpectedly before finishing this task.")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context))
        awaited(dies())
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main())
    assert printed == []


def test_an_interrupt_before_the_first_event_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RealStage, "run", lambda _: interrupt(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert not run.out.exists()


def test_one_that_comes_while_nothing_may_be_interrupted_ends_the_run_at_the_next_chance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    init = RealStage.__init__

    def made(stage: RealStage, *arguments: Any, **named: Any) -> None:
        interrupt(signal.SIGTERM)
        init(stage, *arguments, **named)

    monkeypatch.setattr(RealStage, "__init__", made)
    monkeypatch.setattr(RealStage, "run", lambda _: begun.append("run"))
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert begun == [] and not run.out.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_under_way_is_judged_however_often_it_is_interrupted(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def impatient(stage: RealStage) -> RealEnd:
        begins(stage._folder)
        stage._end.took_s = 1.0
        try:
            interrupt(number)
        finally:
            interrupt(number)
        raise AssertionError("it went on")

    monkeypatch.setattr(RealStage, "run", impatient)
    ran = run.go()
    assert (ran.end.reason, ran.end.detail) == ("crash", "interrupted")
    assert run.is_judged() == "inconclusive"
    last = list(RunDir.open(run.out).read_events())[-1]
    assert (last.kind, last.data["detail"]) == ("run.finished", "interrupted")


@pytest.mark.parametrize("ctrl_c_is_ignored", [False, True])
def test_a_run_under_way_ends_in_order_and_has_its_other_tasks_for_that(
    run: Run, monkeypatch: pytest.MonkeyPatch, ctrl_c_is_ignored: bool
) -> None:
    ended: list[str] = []

    async def answering(asked: asyncio.Queue[asyncio.Future[str]]) -> NoReturn:
        while True:
            (await asked.get()).set_result("in order")

    async def main(stage: RealStage) -> None:
        task = asyncio.current_task()
        assert task is not None
        stage._begins(task)
        asked: asyncio.Queue[asyncio.Future[str]] = asyncio.Queue()
        other = asyncio.create_task(answering(asked))
        try:
            interrupt(signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            answer = asyncio.get_running_loop().create_future()
            asked.put_nowait(answer)
            async with asyncio.timeout(10):
                ended.append(await answer)
            other.cancel()
            interrupt(signal.SIGTERM)  # and who does not want to wait for the rest does not
            await asyncio.sleep(30)
            ended.append("waited")

    def conducted(stage: RealStage) -> RealEnd:
        begins(stage._folder)
        stage._end.took_s = 1.0
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(main(stage))
        return stage.interrupted()

    monkeypatch.setattr(RealStage, "run", conducted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ctrl_c_is_ignored else signal.default_int_handler)
    try:
        ran = run.go()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["in order"]
    assert (ran.end.reason, ran.end.detail) == ("crash", "interrupted")


def test_who_interrupts_the_end_as_well_leaves_no_connection_open() -> None:
    """Python would say so on stderr, below the verdict."""
    closed: list[str] = []

    async def give_up() -> None:
        await asyncio.sleep(30)

    async def close() -> None:
        closed.append("engines")

    async def main() -> None:
        backend = object.__new__(RealBackend)
        backend.caller = SimpleNamespace(give_up=give_up)  # type: ignore[assignment]  # a stand-in
        backend._engines = SimpleNamespace(close=close)  # type: ignore[assignment]  # a stand-in
        ending = asyncio.create_task(backend.end_run())
        await asyncio.sleep(0)
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending

    asyncio.run(main())
    assert closed == ["engines"]


def lived(stage: RealStage) -> RealEnd:
    begins(stage._folder)
    return RealEnd("completed", "", 1.0, [("driver", 0)], [])


@pytest.mark.parametrize("where", ["_merged", "_finished", "conclude"])
def test_a_run_that_is_over_is_merged_and_judged_whatever_comes(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    did: Callable[..., Any] = getattr(real_run, where)

    def interrupted(*arguments: Any) -> Any:
        interrupt(*ALL)
        return did(*arguments)

    monkeypatch.setattr(RealStage, "run", lived)
    monkeypatch.setattr(real_run, where, interrupted)
    with pytest.raises(KeyboardInterrupt):  # or what follows, such as the next run of a sweep, would not hear of it
        run.go()
    events = list(RunDir.open(run.out).read_events())
    assert (len(events), events[-1].kind, events[-1].data["reason"]) == (3, "run.finished", "completed")
    assert run.is_judged() == json.loads((run.out / "verdict.json").read_text())["result"]


def test_a_run_whose_ray_answers_nobody_ends_all_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a SIGSTOP of Ray's head, which Ray asks without any bound when a process leaves its cluster."""
    ended = threading.Event()
    sweep = Warden.sweep

    def swept(warden: Warden) -> list[str]:
        ended.set()
        return sweep(warden)

    waited: list[bool] = []
    monkeypatch.setattr(Warden, "sweep", swept)
    monkeypatch.setattr("real.cluster.disconnect", lambda: waited.append(ended.wait(20)))
    monkeypatch.setattr(real_run, "_LETS_GO_S", 0.1)
    monkeypatch.setattr(RealStage, "run", lived)
    run.go()
    assert waited == [True]
    assert run.is_judged() == "inconclusive"


def test_a_temporary_folder_that_has_gone_since_the_plan_leaves_no_run_directory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(BadInput, match="^/nowhere/seatrial-.*: No such file or directory; set TMPDIR to a folder"):
        run.go()
    assert not run.out.exists()


def test_what_somebody_has_put_in_place_of_the_run_directory_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(stage: RealStage) -> RealEnd:
        shutil.rmtree(run.out)
        run.out.write_text("mine")
        return lived(stage)

    monkeypatch.setattr(RealStage, "run", replaced)
    with pytest.raises(BadInput, match=f"{run.out}.*cannot be written"):
        run.go()
    assert run.out.read_text() == "mine"


def test_an_interrupt_that_was_not_raised_goes_to_whoever_had_it_before_unless_there_is_an_error() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        for error, handed in ((None, 1), (ValueError, 1)):
            with contextlib.suppress(ValueError), real_run.Interrupts():
                interrupt(signal.SIGTERM)
                if error is not None:
                    raise error
            assert len(heard) == handed
        with real_run.Interrupts() as interrupts:
            interrupt(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt), interrupts.admitted():
                pass
        assert len(heard) == 1  # it was raised
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_ctrl_c_is_ignored_it_still_is_and_sigterm_ends_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell has it for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    did: list[str] = []

    def in_background(stage: RealStage) -> RealEnd:
        interrupt(signal.SIGINT)
        did.append("went on")
        interrupt(signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr(RealStage, "run", in_background)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.go()
    finally:
        signal.signal(signal.SIGINT, before)
    assert did == ["went on"]


# --- who watches ---


def broken_by(stage: Any, monkeypatch: pytest.MonkeyPatch, enough: Callable[[], bool] = lambda: False) -> str:
    """What a stage that is watched says of its end, when the watching has ended it; empty when it had not before it
    was watched enough, or for 5 s."""
    monkeypatch.setattr(real_world, "_LOOK_S", 0.005)

    async def body() -> None:
        watching = asyncio.create_task(stage._keep_watching(asyncio.current_task()))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    while not enough():
                        await asyncio.sleep(0.005)
        finally:
            watching.cancel()

    try:
        asyncio.run(body())
    except asyncio.CancelledError:
        assert stage._end.reason == "crash" and stage._end.detail == stage._end.broken
    broken: str = stage._end.broken
    return broken


def test_a_run_that_cannot_be_watched_any_more_is_broken_and_says_why(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork(_: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    stage = bare_stage(tmp_path, watch=no_fork)
    assert broken_by(stage, monkeypatch) == (
        "the run could not be watched any more: BlockingIOError: [Errno 11] Resource temporarily unavailable"
    )
    stage = bare_stage(tmp_path)
    monkeypatch.setattr(stage.tail, "look", lambda: 1 / 0)
    assert "ZeroDivisionError" in broken_by(stage, monkeypatch)


def test_a_display_that_fails_ends_no_run_and_is_left_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    renewed: list[int] = []
    shown: list[object] = []

    def show(stage: object) -> NoReturn:
        shown.append(stage)
        raise BrokenPipeError(32, "Broken pipe")

    warden: Any = SimpleNamespace(renew=lambda: renewed.append(1))
    stage = bare_stage(tmp_path, watch=real_run._with_warden(warden, show))
    assert broken_by(stage, monkeypatch, lambda: len(renewed) > 3) == ""
    assert len(renewed) > 3 and shown == [stage]
    assert "BrokenPipeError" in capsys.readouterr().out  # of a run: in its folder of logs
