"""The heap of this process on huge pages, where the system can: a run reaches all over it, and misses the TLB less.

It changes nothing that a run can see. CPython allocates its objects from mappings of 1 MiB that have no way to ask for
huge pages (3.11 to 3.14); Linux gathers them afterwards, when it is told to (MADV_COLLAPSE of madvise(2), Linux 6.1).
"""

from __future__ import annotations

import ctypes
import pathlib
import sys

_HUGE = 2 << 20
_MADV_COLLAPSE = 25


def is_due(round_: int) -> bool:
    """Whether to gather at this round (1, 2, ...): at powers of two, for a heap grows least where it is largest."""
    return round_ & (round_ - 1) == 0


def collapse() -> None:
    """Gather the heap's pages. Where that cannot be done (another system, an older Linux), nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    try:
        maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in maps:
        span, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in span.split("-"))
            first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
            if last > first:
                madvise(first, last - first, _MADV_COLLAPSE)  # an error means: it stays as it is
