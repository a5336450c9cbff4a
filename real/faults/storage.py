"""What reading and writing files of the shared storage meets: ``slow_export``, ``torn_export``, ``disk_full``."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import BinaryIO

from real.faults.table import FaultTable

_PIECES = 20
"""A slow write is visible, and can be killed, at so many points of its way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast bytes go. ``percent`` of the time that they take, or would take at ``bandwidth`` (bytes per second)."""

    percent: int = 100
    bandwidth: float = 0.0

    def wanted_s(self, size: float, took_s: float) -> float:
        """How long it is to take in all. ``size``: nominal bytes."""
        return self.percent / 100 * max(took_s, size / self.bandwidth if self.bandwidth else 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class WriteFate:
    """What a write meets. ``kept``: the fraction of the bytes that arrives; ``full``: its writer is told so."""

    pace: Pace = Pace()
    kept: float = 1.0
    full: bool = False


def pace_of(faults: FaultTable, path: str, what: str) -> Pace:
    """Claims the hits of a transfer: ``what`` is ``read`` or ``write``."""
    percent, bandwidth = 100, 0.0
    for fault in faults.active("slow_export"):
        if path.startswith(fault.prefix) and faults.claim(fault, f"{what} {path}"):
            percent = percent * int(fault.params["percent"]) // 100
            bandwidth = float(fault.extra["bandwidth"])
    return Pace(percent, bandwidth)


def write_fate(faults: FaultTable, path: str, size: int) -> WriteFate:
    """Claims the hits of a write. ``size``: nominal bytes."""
    pace = pace_of(faults, path, "write")
    kept = 1.0
    for fault in faults.active("torn_export"):
        if path.startswith(fault.prefix) and faults.claim(fault, f"tear {path}"):
            kept = float(fault.params["fraction"])
    for fault in faults.active("disk_full"):
        if path.startswith(fault.prefix):
            fits = faults.spend(fault, size, int(fault.params["free_bytes"]))
            if fits < size and faults.claim(fault, f"full {path}"):
                return WriteFate(pace, min(kept, fits / size), full=True)
    return WriteFate(pace, kept)


async def write_paced(file: BinaryIO, data: memoryview, size: int, pace: Pace) -> None:
    """Write all of ``data`` to an unbuffered file, piece by piece. ``size``: nominal bytes that it stands for."""
    began = time.monotonic()
    took_s = 0.0
    for number in range(_PIECES):
        begin, end = len(data) * number // _PIECES, len(data) * (number + 1) // _PIECES
        at = time.monotonic()
        write_all(file, data[begin:end])
        took_s += time.monotonic() - at
        wanted_s = pace.wanted_s(size * (number + 1) / _PIECES, took_s)
        await asyncio.sleep(max(0.0, wanted_s - (time.monotonic() - began)))


async def rest_of_read(size: int, took_s: float, pace: Pace) -> None:
    """Wait as long as a read of so many bytes, which took so long, is slowed down."""
    await asyncio.sleep(max(0.0, pace.wanted_s(size, took_s) - took_s))


def write_all(file: BinaryIO, view: memoryview) -> None:
    """Write it all to an unbuffered file, which may take less than it is given."""
    while view:
        view = view[file.write(view) :]
