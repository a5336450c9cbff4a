"""Breakpoints: an emitter of another process is held before its effect until the driver has seen the event."""

from __future__ import annotations

import ast
import asyncio
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protocol.evidence import KINDS, Event, decode, schema
from real import breakpoints
from real.breakpoints import NEVER_EMITTED, Breakpoints
from real.evidence import ProcessLog
from real.faults.table import TableWriter
from tests.contract.faulted import until
from tests.real.test_fault_table import process

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
KIND = "storage.renamed"
EMITTERS = ("emit", "_emit", "emit_for", "answered", "observe", "record", "_write", "_record")

Body = Callable[[Breakpoints, ProcessLog], Awaitable[None]]


def drive(folder: pathlib.Path, body: Body) -> None:
    async def main() -> None:
        log = ProcessLog(str(folder), "driver", 0, 0)
        points = Breakpoints(TableWriter(str(folder)), log, f"test-{os.getpid()}-{time.monotonic_ns()}")
        await points.open()
        async with asyncio.timeout(40):
            await body(points, log)
        await points.close()

    asyncio.run(main())


def events_of(folder: pathlib.Path, name: str) -> list[Event]:
    return [decode(line) for line in (folder / "events" / f"{name}.jsonl").read_bytes().splitlines()]


async def ended(one: subprocess.Popen[str]) -> int:
    return await asyncio.to_thread(one.wait, 30)


def test_the_effect_waits_until_the_event_has_been_seen(tmp_path: pathlib.Path) -> None:
    seen: list[Event] = []

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        def see(event: Event) -> None:
            time.sleep(0.2)
            assert not (tmp_path / f"effect-p-{event.data['old']}").exists()
            seen.append(event)
            log.emit("storage.failed", path="", op="", error="acted")

        points.hook(KIND, see, wait=True)
        assert await ended(process(tmp_path, "p", "emit", 3)) == 0

    drive(tmp_path, body)
    assert [event.data["old"] for event in seen] == ["0", "1", "2"]
    own, acted = events_of(tmp_path, "p-1"), events_of(tmp_path, "driver-0")
    assert [event.cause for event in acted] == [event.id for event in own]  # what the driver did follows from them
    clocks = [lc for pair in zip(own, acted, strict=True) for lc in (pair[0].lc, pair[1].lc)]
    assert clocks == sorted(set(clocks))


def test_without_waiting_the_driver_is_only_told(tmp_path: pathlib.Path) -> None:
    seen: list[Event] = []

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        points.hook(KIND, seen.append)
        one = process(tmp_path, "p", "emit", 40)
        while one.poll() is None:
            time.sleep(0.01)  # the driver is busy all the time, and holds nobody
        await until(lambda: len(seen) == 40)

    drive(tmp_path, body)


def test_only_what_matches_is_told_and_held(tmp_path: pathlib.Path) -> None:
    seen: list[Event] = []

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        points.hook(KIND, seen.append, where={"old": "2", "actor": "p", "inc": 1}, wait=True)
        points.hook(KIND, seen.append, where={"actor": "q"}, wait=True)
        points.hook(KIND, seen.append, from_ns=2**62, wait=True)
        assert await ended(process(tmp_path, "p", "emit", 4)) == 0

    drive(tmp_path, body)
    assert [event.data["old"] for event in seen] == ["2"]


def test_a_hook_that_has_ended_holds_nobody(tmp_path: pathlib.Path) -> None:
    seen: list[Event] = []

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        def once(event: Event) -> None:
            seen.append(event)
            off()

        off = points.hook(KIND, once, wait=True)
        assert await ended(process(tmp_path, "p", "emit", 4)) == 0

    drive(tmp_path, body)
    assert len(seen) == 1


def test_an_emitter_that_is_killed_while_it_is_held_has_no_effect(tmp_path: pathlib.Path) -> None:
    seen: list[Event] = []

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        def kill(event: Event) -> None:
            seen.append(event)
            one.kill()
            one.wait()

        points.hook(KIND, kill, wait=True)
        one = process(tmp_path, "p", "emit", 3)
        await until(lambda: bool(seen))
        other = process(tmp_path, "q", "emit", 1)
        points.hook(KIND, seen.append, where={"actor": "q"}, wait=True)
        one = other
        await ended(other)

    drive(tmp_path, body)
    assert [event.actor for event in seen][:2] == ["p", "q"]
    assert len(events_of(tmp_path, "p-1")) == 1 and not list(tmp_path.glob("effect-*"))


def test_an_emitter_that_is_stopped_while_it_is_held_goes_on_when_it_is_continued(tmp_path: pathlib.Path) -> None:
    import signal

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        stopped = asyncio.Event()

        def stop(event: Event) -> None:
            one.send_signal(signal.SIGSTOP)
            stopped.set()

        points.hook(KIND, stop, wait=True)
        one = process(tmp_path, "p", "emit", 1)
        await stopped.wait()
        await asyncio.sleep(0.5)
        assert not list(tmp_path.glob("effect-*"))
        one.send_signal(signal.SIGCONT)
        assert await ended(one) == 0

    drive(tmp_path, body)
    assert list(tmp_path.glob("effect-*"))


def test_the_drivers_own_events_are_seen_without_a_way(tmp_path: pathlib.Path) -> None:
    seen: list[str] = []

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        def see(event: Event) -> None:
            seen.append(event.kind)
            if event.kind == KIND:
                log.emit("storage.failed", path="", op="", error="")

        points.hook(KIND, see, wait=True)
        points.hook("storage.failed", see, wait=True)
        log.emit(KIND, old="", new="")
        assert seen == [KIND, "storage.failed"]

    drive(tmp_path, body)


@pytest.mark.parametrize("how", ["gone", "mute"])
def test_a_driver_that_does_not_answer_is_an_anomaly_and_holds_nobody_for_ever(
    tmp_path: pathlib.Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(points: Breakpoints, log: ProcessLog) -> None:
        monkeypatch.setattr(breakpoints, "HELD_AT_MOST_S", 0.5)
        emitter = ProcessLog(str(tmp_path), "p", 1, 0)
        points.hook(KIND, lambda event: None, wait=True)
        if how == "gone":
            assert points._server is not None
            points._server.close()
            await asyncio.sleep(0.1)
        for _ in range(3):
            emitter.emit(KIND, old="", new="")  # here in the driver's own loop, which so cannot answer

    drive(tmp_path, body)
    kinds = [event.kind for event in events_of(tmp_path, "p-1")]
    assert kinds == [KIND, "run.anomaly", KIND, KIND]
    assert events_of(tmp_path, "p-1")[1].data["what"] == "breakpoint_unanswered"


def test_a_round_trip_is_short(tmp_path: pathlib.Path) -> None:
    """A figure for the report: how long a held emitter waits for a driver that has nothing else to do."""

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        points.hook(KIND, lambda event: None, wait=True)
        assert await ended(process(tmp_path, "p", "emit", 500)) == 0

    drive(tmp_path, body)
    own = events_of(tmp_path, "p-1")
    each_us = (own[-1].t_ns - own[0].t_ns) / (len(own) - 1) / 1000
    print(f"{each_us:.0f} us", file=sys.stderr)
    assert each_us < 20_000


def test_what_a_step_could_wait_for_in_vain_is_known() -> None:
    """Every event kind is emitted somewhere in the real world, or is in the list of those that are not."""
    found: set[str] = set()
    sources = [*(ROOT / "real").rglob("*.py"), *(ROOT / "protocol").rglob("*.py"), *(ROOT / "scenarios").rglob("*.py")]
    for path in sources:
        relative = path.relative_to(ROOT).as_posix()
        if relative in ("protocol/evidence.py", "scenarios/sim_world.py", "real/breakpoints.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in EMITTERS:
                found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and arg.value in KINDS}
    declared = {kind.name for kind in schema() if "real" in kind.worlds}  # not what other tests have declared
    assert declared - found == NEVER_EMITTED


def test_events_of_any_size_are_told(tmp_path: pathlib.Path) -> None:
    seen: list[Any] = []

    async def body(points: Breakpoints, log: ProcessLog) -> None:
        emitter = ProcessLog(str(tmp_path), "p", 1, 0)
        points.hook("storage.failed", seen.append, wait=True)
        await asyncio.to_thread(lambda: emitter.emit("storage.failed", path="x" * 300_000, op="", error=""))

    drive(tmp_path, body)
    assert len(seen[0].data["path"]) == 300_000
