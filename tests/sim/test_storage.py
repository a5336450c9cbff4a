"""Shared storage: time, fsync, torn, slow and full writes, and what crashes leave behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import DiskFull, StorageNotFound
from protocol.faulting import Target
from sim.simulation import Simulation

GB = 1_000_000_000


def run(body: Any, **options: Any) -> tuple[Any, Simulation, list[Any]]:
    events: list[Any] = []
    with Simulation(sinks=[events.append], **options) as simulation:
        result = simulation.run(lambda backend: body(backend, simulation))
    return result, simulation, events


class Writer:
    def __init__(self, path: str) -> None:
        self.path = path

    async def write(self, size: int, fsync: bool) -> None:
        from protocol.ports import backend

        await backend().storage.write(self.path, b"x" * 1000, size_bytes=size, fsync=fsync)


def test_a_write_takes_its_size_over_the_bandwidth_and_reads_back() -> None:
    async def body(backend: Any, simulation: Simulation) -> tuple[float, bytes]:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await backend.storage.write("a/b", b"hello", size_bytes=3 * GB)
        took = loop.time() - before
        return took, await backend.storage.read("a/b")

    (took, data), simulation, events = run(body)
    assert data == b"hello"
    # Latency, three seconds of transfer at 1 GB/s, fsync.
    assert took == pytest.approx(3.003, abs=1e-6)
    assert [e.kind for e in events if e.kind.startswith("storage.")] == ["storage.written", "storage.read"]


def test_two_writers_share_the_pipe() -> None:
    async def body(backend: Any, simulation: Simulation) -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.gather(*(backend.storage.write(f"f{i}", b"x", size_bytes=GB, fsync=False) for i in range(2)))
        return loop.time() - before

    took, _, _ = run(body)
    assert took == pytest.approx(2.001, abs=1e-6)


def test_a_reader_in_the_middle_of_a_write_sees_a_prefix() -> None:
    async def body(backend: Any, simulation: Simulation) -> int:
        write = asyncio.ensure_future(backend.storage.write("f", b"x" * 1000, size_bytes=2 * GB))
        await asyncio.sleep(1.001)
        found = simulation.storage.read_now("f")
        await write
        assert found is not None
        return len(found.data)

    assert run(body)[0] == 500


def test_sigkill_of_the_writer_leaves_what_was_written() -> None:
    async def body(backend: Any, simulation: Simulation) -> bytes:
        writer = await backend.spawn(Writer, "f", name="writer")
        call = writer.write(2 * GB, True)
        await asyncio.sleep(1.0)
        simulation.faults.inject("sigkill", Target(name="writer"), {}, must_hit={}, transient=True)
        with pytest.raises(Exception, match="died"):
            await call
        data: bytes = await backend.storage.read("f")
        return data

    data, _, events = run(body)
    assert 0 < len(data) < 1000
    assert "storage.torn" in [e.kind for e in events]


def test_without_fsync_a_file_is_lost_with_its_node_and_with_fsync_it_is_not() -> None:
    async def body(backend: Any, simulation: Simulation) -> tuple[str, ...]:
        for path, fsync in (("kept", True), ("lost", False)):
            writer = await backend.spawn(Writer, path, name=path, node="node-1")
            await writer.write(10, fsync)
        simulation.cluster.lose("node-1")
        listed: tuple[str, ...] = await backend.storage.list("")
        return listed

    assert run(body, nodes=2)[0] == ("kept",)


def test_rename_moves_a_whole_prefix_at_once() -> None:
    async def body(backend: Any, simulation: Simulation) -> tuple[str, ...]:
        await backend.storage.write("tmp/a", b"1")
        await backend.storage.write("tmp/b", b"2")
        await backend.storage.write("tmpfile", b"3")
        await backend.storage.rename("tmp", "final")
        with pytest.raises(StorageNotFound):
            await backend.storage.read("tmp/a")
        with pytest.raises(StorageNotFound):
            await backend.storage.rename("tmp", "again")
        listed: tuple[str, ...] = await backend.storage.list("")
        return listed

    assert run(body)[0] == ("final/a", "final/b", "tmpfile")


class TestFaults:
    def test_a_torn_write_says_success_and_is_short(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> tuple[int, int, int]:
            fault = simulation.faults.inject(
                "torn_export", Target(prefix="exports/"), {"fraction": 0.25, "count": 1},
                must_hit={"hits": {"at_least": 1}},
            )  # fmt: skip
            await backend.storage.write("elsewhere", b"x" * 100)
            await backend.storage.write("exports/a", b"x" * 100)
            await backend.storage.write("exports/b", b"x" * 100)
            assert fault.healed and fault.satisfied()
            return tuple([len(await backend.storage.read(p)) for p in ("elsewhere", "exports/a", "exports/b")])  # type: ignore[return-value]

        sizes, _, events = run(body)
        assert sizes == (100, 25, 100)
        healed = [e for e in events if e.kind == "fault.healed"]
        assert [e.data["satisfied"] for e in healed] == [True]

    def test_a_slow_disk_is_slow_until_it_is_healed(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> list[float]:
            loop = asyncio.get_running_loop()
            times = []
            fault = simulation.faults.inject(
                "slow_export", Target(prefix="x"), {"percent": 500}, must_hit={"hits": {"at_least": 1}}
            )
            for _ in range(2):
                before = loop.time()
                await backend.storage.write("x", b"1", size_bytes=GB, fsync=False)
                times.append(round(loop.time() - before, 3))
                fault.heal()
            assert fault.satisfied()
            return times

        assert run(body)[0] == [5.001, 1.001]

    def test_a_full_disk_keeps_what_fitted_and_says_so(self) -> None:
        async def body(backend: Any, simulation: Simulation) -> int:
            fault = simulation.faults.inject("disk_full", Target(prefix=""), {"free_bytes": 60}, must_hit={})
            with pytest.raises(DiskFull):
                await backend.storage.write("a", b"x" * 100)
            fault.heal()
            await backend.storage.write("b", b"x" * 100)
            return len(await backend.storage.read("a"))

        size, _, events = run(body)
        assert size == 60
        assert [e.data["error"] for e in events if e.kind == "storage.failed"] == ["DiskFull"]
