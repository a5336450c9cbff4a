"""Faults that stop one process at once: it goes on when the last of them has healed."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from real.faults import duty
from real.faults.stops import Stops


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def is_stopped(process: subprocess.Popen[bytes], after_s: float = 0.0) -> bool:
    time.sleep(after_s)  # a signal takes a moment
    return pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def slow(process: subprocess.Popen[bytes], percent: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", duty.__file__, str(percent), str(process.pid)], stdin=subprocess.PIPE
    )


def shares(process: subprocess.Popen[bytes], for_s: float) -> float:
    """The fraction of looks at which it was stopped."""
    ends = time.monotonic() + for_s
    looks = []
    while time.monotonic() < ends:
        looks.append(is_stopped(process))
        time.sleep(0.004)
    return sum(looks) / len(looks)


def test_two_stops(busy: subprocess.Popen[bytes]) -> None:
    stops = Stops()
    stops.stop([busy.pid])
    stops.stop([busy.pid])
    stops.go_on([busy.pid])
    assert is_stopped(busy, 0.1)
    stops.go_on([busy.pid])
    assert not is_stopped(busy, 0.1)


def test_the_duty_cycle_lets_it_run_for_a_part_of_the_time(busy: subprocess.Popen[bytes]) -> None:
    helper = slow(busy, 400)
    time.sleep(0.3)
    assert 0.6 < shares(busy, 3) < 0.9
    assert helper.stdin is not None
    helper.stdin.close()
    assert helper.wait(5) == 0 and not is_stopped(busy, 0.1)


def test_a_stop_holds_what_is_slow_and_the_other_way_round(busy: subprocess.Popen[bytes]) -> None:
    stops = Stops()
    helper = slow(busy, 200)
    stops.duty_begins(helper.pid, [busy.pid])
    time.sleep(0.5)
    stops.stop([busy.pid])
    time.sleep(0.01)
    assert shares(busy, 1) == 1.0
    stops.go_on([busy.pid])
    assert 0.2 < shares(busy, 2) < 0.8
    stops.stop([busy.pid])
    stops.duty_ends(helper.pid)
    assert helper.stdin is not None
    helper.stdin.close()
    assert helper.wait(5) == 0
    stops.stop_again([busy.pid])
    assert is_stopped(busy, 0.1)
    stops.go_on([busy.pid])
    assert not is_stopped(busy, 0.1)


def test_what_is_slow_is_let_go_on_when_whoever_made_it_so_is_gone(busy: subprocess.Popen[bytes]) -> None:
    command = [sys.executable, "-I", "-S", duty.__file__, "10000", str(busy.pid)]
    code = f"import subprocess, time; subprocess.Popen({command!r}, stdin=subprocess.PIPE); time.sleep(60)"
    maker = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(2)
    assert shares(busy, 0.5) > 0.9
    maker.kill()
    maker.wait()
    time.sleep(1)
    assert shares(busy, 0.5) == 0.0
