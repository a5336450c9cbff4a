"""How far the clocks of a run's machines are apart: measured by exchanges, half of a round trip is the error."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from real.nodes import Named

SAME_MACHINE_NS: Final = 1_000
"""``CLOCK_MONOTONIC`` is one clock for all processes of a machine; this much is granted to reading it."""
_EXCHANGES: Final = 15


class Clocks(NamedTuple):
    """Node name to how far its machine's clock is ahead of the driver's; ``error_ns`` bounds what is left."""

    offsets_ns: tuple[tuple[str, int], ...]
    error_ns: int


class _Clock:
    def read(self) -> int:
        return time.monotonic_ns()


def measure_clocks(nodes: Named) -> Clocks:
    """Measure the clocks of all nodes that are not on the driver's machine."""
    here = ray.util.get_node_ip_address()
    addresses = {row["NodeID"]: row["NodeManagerAddress"] for row in ray.nodes()}
    offsets = []
    error_ns = SAME_MACHINE_NS
    for name, ray_id in nodes:
        if addresses.get(ray_id) == here:
            continue
        where = NodeAffinitySchedulingStrategy(ray_id, soft=False)
        clock = ray.remote(num_cpus=0)(_Clock).options(scheduling_strategy=where).remote()
        exchanges = []
        for _ in range(_EXCHANGES):
            before = time.monotonic_ns()
            there = ray.get(clock.read.remote(), timeout=30)
            exchanges.append((before, there, time.monotonic_ns()))
        ray.kill(clock)
        offset_ns, half_ns = estimate(exchanges)
        offsets.append((name, offset_ns))
        error_ns = max(error_ns, 2 * half_ns)  # both ends of a pair may be off by as much
    return Clocks(tuple(offsets), error_ns)


def estimate(exchanges: list[tuple[int, int, int]]) -> tuple[int, int]:
    """(offset, error) of a clock from (own time before, its time, own time after) of some exchanges.

    The quickest one says most: the other clock was read somewhere between its ends, so the middle is off by half of it
    at most.
    """
    round_trip_ns, offset_ns = min(
        (after - before, there - (before + after) // 2) for before, there, after in exchanges
    )
    return offset_ns, -(-round_trip_ns // 2)
