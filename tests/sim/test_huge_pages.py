"""Huge pages: the heap is gathered where Linux can, and a run says the same with it and without."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from sim import huge_pages

GATHER = """
import pathlib, re
from sim import huge_pages

def huge_kib():
    return int(re.search(r"AnonHugePages: +(\\d+) kB", pathlib.Path("/proc/self/smaps_rollup").read_text())[1])

heap = [[number] for number in range(1_000_000)]
before = huge_kib()
huge_pages.collapse()
print(before, huge_kib(), sum(one for one, in heap))
"""


def can_collapse() -> bool:
    """Linux since 6.1, not forbidden, and with free memory in one piece: asked for two pieces of our own."""
    if not sys.platform.startswith("linux"):
        return False
    with mmap.mmap(-1, 8 << 20) as memory:
        memory.write(bytes(8 << 20))
        try:
            memory.madvise(huge_pages._MADV_COLLAPSE, 2 << 20, 4 << 20)
        except OSError:
            return False
    return True


@pytest.mark.skipif(not can_collapse(), reason="this system cannot gather pages now")
def test_the_heap_is_gathered_and_whole() -> None:
    done = subprocess.run([sys.executable, "-c", GATHER], capture_output=True, text=True, check=True, timeout=120)
    before, after, total = map(int, done.stdout.split())
    assert after > before and total == sum(range(1_000_000))


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(huge_pages, "ctypes", None)
    huge_pages.collapse()


def test_it_is_done_less_and_less_often() -> None:
    assert [number for number in range(1, 70) if huge_pages.is_due(number)] == [1, 2, 4, 8, 16, 32, 64]
