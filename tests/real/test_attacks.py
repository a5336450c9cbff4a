"""What nobody asked for befalls a real run: the verdict is right or inconclusive, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from analysis.rundir import RunDir
from analysis.verdict import Verdict, judge_run
from real.census import Census
from tests.real.run_command import ROOT, TINY, Command, command

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.slow]
EMULATED = ("--engine", "emulated", "--no-report")
QUIET = TINY.replace("  - {at_s: 2, do: sigkill, target: busiest_replica}\n", "  []\n").replace("for_s: 6", "for_s: 10")


@pytest.fixture
def temporary() -> Iterator[str]:
    """A short path: Ray's sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        yield folder


def _pid_of(run: Command, title: str) -> int:
    """A process of the run's Ray by its title, else one by the name that the run gave it."""
    if title.startswith("ray::"):
        return next(pid for pid, said in run.processes().items() if said.startswith(title))
    (folder,) = run.temporary.glob("seatrial-*")
    card = Census(str(folder)).find(title)
    assert card is not None
    return card.pid


def _ended(run: Command, folder: pathlib.Path) -> tuple[int, str, Verdict]:
    """How a run ends, and that nothing is left of it. The verdict is made anew from what it has kept."""
    code, out, err = run.wait(200)
    said = out + err
    assert run.left() == [], said
    verdict = judge_run(RunDir.open(folder / "run"))
    print(said)
    return code, said, verdict


def _result_of(verdict: Verdict, check: str) -> str:
    return next(row.result for row in verdict.checks if row.name == check)


def test_the_owner_of_an_engine_is_killed(tmp_path: pathlib.Path, temporary: str) -> None:
    """The engine dies with it, its calls go elsewhere, recovery brings it back: nothing was lost, nobody crashed."""
    with command(tmp_path, temporary, *EMULATED, text=QUIET) as run:
        run.wait_for_event("request.done")
        os.kill(_pid_of(run, "ray::EngineHost"), signal.SIGKILL)
        code, said, verdict = _ended(run, tmp_path)
    assert code == 0, said
    events = list(RunDir.open(run.out).read_events())
    died = [event for event in events if event.kind == "actor.died" and event.actor.startswith("chat-")]
    assert died[0].data == {"reason": "killed", "detail": "its host was killed"}, died
    assert any(event.kind == "recovery.step" and event.data["stage"] == "published" for event in events)
    assert _result_of(verdict, "nothing_lost") == "pass"


@pytest.mark.long
def test_a_component_is_killed(tmp_path: pathlib.Path, temporary: str) -> None:
    """Nobody knows of what it died: that counts as its own crash, never as nothing."""
    with command(tmp_path, temporary, *EMULATED, text=QUIET) as run:
        run.wait_for_event("request.done")
        os.kill(_pid_of(run, "gateway-chat-0"), signal.SIGKILL)
        code, said, verdict = _ended(run, tmp_path)
    assert code == 1, said
    assert _result_of(verdict, "no_crash") == "fail", said
    assert "gateway-chat-0/1 crashed" in said


def test_the_registry_is_killed(tmp_path: pathlib.Path, temporary: str) -> None:
    """It belongs to the world: without it the run cannot go on, and says nothing of who ran in it."""
    with command(tmp_path, temporary, *EMULATED, text=QUIET) as run:
        run.wait_for_event("request.done")
        os.kill(_pid_of(run, "ray::NameRegistry"), signal.SIGKILL)
        code, said, verdict = _ended(run, tmp_path)
    assert code == 3, said
    assert verdict.result == "inconclusive"


@pytest.mark.long
def test_the_terminal_is_closed(tmp_path: pathlib.Path, temporary: str) -> None:
    """As Ctrl-C."""
    with command(tmp_path, temporary, *EMULATED, text=QUIET) as run:
        run.wait_for_event("request.done")
        run.process.send_signal(signal.SIGHUP)
        code, said, verdict = _ended(run, tmp_path)
    assert code == 3 and "interrupted" in said, said
    assert verdict.result == "inconclusive"


IN_SMALL_MEMORY = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + sys.argv[1], "tmpfs", "/dev/shm"], check=True)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare")
def test_shared_memory_is_too_small(tmp_path: pathlib.Path, temporary: str) -> None:
    """Ray cannot have its object store: one message, exit code 2, or a run that does without."""
    (tmp_path / "tiny.yaml").write_text(QUIET)
    out = tmp_path / "run"
    line = ["-m", "scenarios", "run", str(tmp_path / "tiny.yaml"), "--backend", "real", "--out", str(out), *EMULATED]
    ended = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", IN_SMALL_MEMORY, "1m", *line],
        cwd=ROOT, env={**os.environ, "TMPDIR": temporary}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    print(ended.stdout + ended.stderr)
    assert ended.returncode in (0, 2, 3)
    assert os.listdir(temporary) == []
    if ended.returncode == 2:
        assert ended.stderr.startswith("error: ") and not out.exists()


@pytest.fixture
def small_disk(temporary: str) -> Iterator[str]:
    """A file system of its own for the run's temporary folder."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounts need root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", temporary], check=True)
    try:
        yield temporary
    finally:
        subprocess.run(["umount", "-l", temporary], check=True)


@pytest.mark.long
def test_the_disk_is_full_in_the_middle(tmp_path: pathlib.Path, small_disk: str) -> None:
    """Events are lost, so that nothing can be said: neither that it failed nor that it passed."""
    with command(tmp_path, small_disk, *EMULATED, text=QUIET) as run:
        run.wait_for_event("request.done")
        filler = pathlib.Path(small_disk, "filler")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        try:
            code, out, err = run.wait(100)
        finally:
            filler.unlink()
        assert run.left() == [], out + err
    print(out + err)
    assert code == 3, out + err
    assert "is full, and events could not be written" in out
    assert judge_run(RunDir.open(run.out)).result == "inconclusive"
