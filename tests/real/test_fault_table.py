"""The table of faults under many processes: every hit is had once, by one of them, and none after the healing."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from protocol.evidence import decode
from real.census import Census, OwnCard
from real.evidence import ProcessLog
from real.faults import table
from real.faults.table import Armed, Standing, TableWriter
from tests.real.local_ray import environment
from tests.real.run_command import until

EMITTER = pathlib.Path(__file__).with_name("emitter.py")


def process(folder: pathlib.Path, name: str, what: str, n: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EMITTER), str(folder), name, what, str(n)], env={**os.environ, **environment()},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def counts(folder: pathlib.Path) -> list[int]:
    """The numbers of the hits that were recorded."""
    lines = [line for file in (folder / "events").iterdir() for line in file.read_bytes().splitlines()]
    events = [decode(line) for line in lines]
    return sorted(event.data["count"] for event in events if event.kind == "fault.hit")


def test_eight_processes_have_exactly_so_many_hits(tmp_path: pathlib.Path) -> None:
    writer = TableWriter(str(tmp_path))
    writer.put(Standing(1, "torn_export", {"count": 500}))
    for one in [process(tmp_path, f"p-{n}", "claim", 200) for n in range(8)]:
        assert one.wait(60) == 0
    assert writer.hits(1) == 500
    assert counts(tmp_path) == list(range(1, 501))


def test_nobody_has_a_hit_after_the_healing(tmp_path: pathlib.Path) -> None:
    writer = TableWriter(str(tmp_path))
    writer.put(Standing(1, "reply_lost", {"count": None}))
    running = [process(tmp_path, f"p-{n}", "claim_until_told", 0) for n in range(4)]
    try:
        until(lambda: writer.hits(1) >= 200 and len(list(tmp_path.glob("met-*"))) == 4, 60)  # all of them are at it
        writer.withdraw(1)
        hits = writer.hits(1)
        time.sleep(0.3)  # they go on asking
    finally:
        (tmp_path / "enough").touch()
        met = [int(one.communicate(timeout=60)[0]) for one in running]
    assert sum(met) == hits == writer.hits(1)


def test_a_healing_waits_for_who_is_just_taking_a_hit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TableWriter(str(tmp_path))
    writer.put(Standing(1, "reply_lost", {"count": None}))
    log = ProcessLog(str(tmp_path), "p", 1, 0)
    (fault,) = log.faults.active("reply_lost")
    healing = threading.Thread(target=writer.withdraw, args=(1,))
    create = table._create

    def create_while_it_is_healed(name: str, folder: int) -> bool:
        healing.start()
        until((tmp_path / "faults/hits/1.healed").exists, 10)
        healing.join(0.05)
        assert healing.is_alive()
        return create(name, folder)

    monkeypatch.setattr(table, "_create", create_while_it_is_healed)
    assert log.faults.claim(fault, "r")
    healing.join(10)
    assert not healing.is_alive() and writer.hits(1) == 1
    assert not log.faults.claim(fault, "r") and writer.hits(1) == 1


def test_nobody_has_a_hit_who_came_to_its_lock_after_the_healing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TableWriter(str(tmp_path))
    writer.put(Standing(1, "reply_lost", {"count": None}))
    log = ProcessLog(str(tmp_path), "p", 1, 0)
    (fault,) = log.faults.active("reply_lost")
    lock = fcntl.flock

    def heal_first(folder: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            writer.withdraw(1)
        lock(folder, how)

    monkeypatch.setattr(fcntl, "flock", heal_first)
    assert not log.faults.claim(fault, "r")
    assert writer.hits(1) == 0 and counts(tmp_path) == []


def test_a_stopped_process_does_not_stop_a_healing(tmp_path: pathlib.Path) -> None:
    writer = TableWriter(str(tmp_path))
    writer.put(Standing(1, "reply_lost", {"count": None}))
    with table._locked(str(tmp_path / "faults/hits/1")):
        writer.withdraw(1)
    assert not list(ProcessLog(str(tmp_path), "p", 1, 0).faults.active("reply_lost"))


def test_a_budget_is_spent_once_by_all(tmp_path: pathlib.Path) -> None:
    writer = TableWriter(str(tmp_path))
    writer.put(Standing(1, "disk_full", {"free_bytes": 1005}))
    running = [process(tmp_path, f"p-{n}", "spend", 40) for n in range(4)]
    got = [int(line) for one in running for line in one.communicate(timeout=60)[0].split()]
    assert sorted(got, reverse=True) == [10] * 100 + [5] + [0] * 59


def test_a_reader_sees_every_version_however_fast_they_come(tmp_path: pathlib.Path) -> None:
    writer = TableWriter(str(tmp_path))
    log = ProcessLog(str(tmp_path), "reader", 1, 0)
    for number in range(1, 300):
        writer.put(Standing(number, "reply_lost", {"count": 1}))
        assert [fault.number for fault in log.faults.active("reply_lost")] == [number]
        writer.withdraw(number)
        writer.withdraw(number)
        assert log.faults.none_of(frozenset({"reply_lost"}))


def test_a_fault_crosses_the_file_whole(tmp_path: pathlib.Path) -> None:
    writer = TableWriter(str(tmp_path), door="door")
    fault = Standing(3, "partition", {"one_way": True}, "n", "s*", "d?", "exports", (("a", "b"),), {"bandwidth": 2.5})
    writer.put(fault)
    armed = Armed({"running": 3, "actor": "x"}, 5, True)
    writer.arm("engine.accepted", armed)
    table = ProcessLog(str(tmp_path), "reader", 1, 0)._table.look()
    assert table.faults == (fault,) and table.armed == {"engine.accepted": (armed,)} and table.door == "door"


def test_what_meets_a_fault_again_is_no_further_hit(tmp_path: pathlib.Path) -> None:
    writer = TableWriter(str(tmp_path))
    fault = Standing(1, "removal_fails", {})
    writer.put(fault)
    faults = ProcessLog(str(tmp_path), "p", 1, 0).faults
    assert [faults.claim(fault, "g", once=group) for group in ("g/1", "g/1", "g/2")] == [True] * 3
    assert writer.hits(1) == 2
    writer.withdraw(1)
    assert not faults.claim(fault, "g", once="g/1")


def test_a_chance_befalls_about_so_many_and_differs_by_process(tmp_path: pathlib.Path) -> None:
    fault = Standing(1, "reply_lost", {"chance": 0.25})
    draws = []
    for name in ("one", "other"):
        faults = ProcessLog(str(tmp_path), name, 1, 0).faults
        draws.append([faults.chosen(fault) for _ in range(2000)])
        assert 400 < sum(draws[-1]) < 600
    assert draws[0] != draws[1]


def test_a_card_tells_the_dead_from_the_living(tmp_path: pathlib.Path) -> None:
    census = Census(str(tmp_path))
    assert census.find("p") is None and census.node_of("p") == "" and census.everybody() == []
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        card = OwnCard(str(tmp_path), name="p/1", incarnation=1, role="actor", node="node-0", pid=sleeper.pid)
        card.in_flight += 2
        found = census.find("p/1")
        assert found is not None and found.alive and (found.in_flight, found.node) == (2, "node-0")
        assert census.everybody() == [found]
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not found.alive
    assert not found._replace(pid=os.getpid()).alive  # the pid of another process now
    OwnCard(str(tmp_path), name="p/1", incarnation=2, role="actor", node="node-1", pid=os.getpid())
    card.in_flight = 9  # the dead incarnation's
    found = census.find("p/1")
    assert found is not None and (found.incarnation, found.in_flight, found.node) == (2, 0, "node-1")


def test_a_process_that_dies_slowly_is_dead_from_its_kill_on(tmp_path: pathlib.Path) -> None:
    # Its connections are closed, and its clients told, before it is a zombie: its tracer holds it between the two
    # (PTRACE_O_TRACEEXIT of ptrace(2)), as a busy machine may.
    dying = subprocess.Popen(["sleep", "60"])
    try:
        OwnCard(str(tmp_path), name="p", incarnation=1, role="actor", node="node-0", pid=dying.pid)
        card = Census(str(tmp_path)).find("p")
        seize, trace_exit = 0x4206, 0x40
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        assert ptrace(seize, dying.pid, None, ctypes.c_void_p(trace_exit)) == 0, os.strerror(ctypes.get_errno())
        assert card is not None and card.alive
        dying.kill()
        assert not card.alive
        os.waitpid(dying.pid, 0)  # until it is held
        assert pathlib.Path(f"/proc/{dying.pid}/stat").read_text().split()[2] == "t" and not card.alive
        detach = 17
        ptrace(detach, dying.pid, None, None)
    finally:
        dying.kill()
        dying.wait()


@pytest.mark.parametrize("what", ["emit", "look"])
def test_what_it_costs_while_nothing_is_in_force(tmp_path: pathlib.Path, what: str) -> None:
    """A figure for the report, with a bound far above it: an event costs its write, and looking one stat."""
    log = ProcessLog(str(tmp_path), "p", 1, 0)
    TableWriter(str(tmp_path)).arm("run.wait", Armed({}, 0, False))
    began = time.perf_counter()
    for _ in range(5000):
        if what == "emit":
            log.emit("storage.renamed", old="a", new="b")
        else:
            assert log.faults.none_of(frozenset({"reply_lost"}))
    each_us = (time.perf_counter() - began) / 5000 * 1e6
    print(f"{what}: {each_us:.1f} us")
    assert each_us < 200
