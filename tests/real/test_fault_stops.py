"""Faults that stop one process at once: it goes on when the last of them has healed."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from protocol.faulting import Target
from real.census import ProcessCard
from real.engines.tree import tree_of
from real.faults import duty
from real.faults.kinds import Site
from real.faults.processes import Slow
from real.faults.stops import Stops


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def is_stopped(process: subprocess.Popen[bytes], after_s: float = 0.0) -> bool:
    time.sleep(after_s)  # a signal takes a moment
    return stands(process.pid)


def stands(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def slow(process: subprocess.Popen[bytes], percent: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", duty.__file__, str(percent), str(process.pid)], stdin=subprocess.PIPE
    )


def shares(process: subprocess.Popen[bytes], for_s: float) -> float:
    return share(process.pid, for_s)


def share(pid: int, for_s: float) -> float:
    """The fraction of looks at which it was stopped."""
    ends = time.monotonic() + for_s
    looks = []
    while time.monotonic() < ends:
        looks.append(stands(pid))
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
    assert is_stopped(busy, 0.1)  # on a machine with much to do it takes its turn before it sees the signal
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


def test_what_an_engine_has_started_since_it_was_slowed_is_slowed_with_it_by_the_next() -> None:
    """And let go on with it: a percent of 10000 is a stop, as far as one looks."""
    code = "import subprocess, sys; input(); subprocess.run([sys.executable, '-c', 'while True: pass'])"
    main = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    card = SimpleNamespace(pid=main.pid, role="engine")
    site = SimpleNamespace(stops=Stops(), slowed={})

    def slowed(percent: int) -> Slow:
        fault = Slow(cast(Site, site), 1, "slow", Target(name="engine-0"), {"percent": percent}, print)
        fault.card = cast(ProcessCard, card)
        fault.inject()
        return fault

    pids = [main.pid]
    try:
        first = slowed(101)
        assert main.stdin is not None
        main.stdin.write(b"\n")
        main.stdin.flush()
        ends = time.monotonic() + 10
        while len(pids) < 2 and time.monotonic() < ends:
            pids = list(tree_of(main.pid))
        second = slowed(10_000)
        time.sleep(0.3)
        under = [share(pid, 0.5) for pid in pids]
        second.heal()
        after = [share(pid, 0.5) for pid in pids]
        first.heal()
        assert len(pids) == 2 and min(under) > 0.9 and max(after) < 0.2
        assert site.slowed == {} and [share(pid, 0.2) for pid in pids] == [0.0, 0.0]
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
        main.wait()


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
