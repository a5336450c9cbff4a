"""How long the world takes to move, start and miss things. One place, so that a sweep can draw around it.

In an explored run these are what is drawn around: messages by ``sim.links.Link.delay``, everything else that is
noticed, started or placed by ``sim.world.World.around`` (docs/sweeps.md has the table).

The defaults are measurements on Ray 2.60 and SGLang 0.5.23 (shared/spec/engines.md, sections 3 and 5) or, where a
comment says so, the documented default of the system that is modelled.
"""

from __future__ import annotations

import dataclasses


def ns(seconds: float) -> int:
    """Seconds as the simulator's integer nanoseconds."""
    return round(seconds * 1_000_000_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds.

    Attributes:
        loopback_latency_s: one way between two processes of a node.
        link_latency_s: one way between two nodes.
        call_cost_s: what one actor call occupies its callee (a Ray async actor does some 2,500 calls/s).
        spawn_s: from asking for an actor to its constructor (Ray: 0.09 to 0.48 s).
        kill_notice_s: from a process's death until its callers know.
        health_timeout_s: silence of a node until it is declared dead (Ray: 5 missed health checks of 3 s).
        placement_s: from asking until a placement group that fits is CREATED.
        placement_retry_s: from the freeing of resources until a waiting group that now fits is CREATED.
        removal_s: from asking for the removal of a group until its row says REMOVED.
        os_connect_timeout_s: a connect without a time-out of its own gives up after this (Linux: 6 SYN retries).
    """

    loopback_latency_s: float = 0.00006
    link_latency_s: float = 0.00025
    call_cost_s: float = 0.0004
    spawn_s: float = 0.2
    kill_notice_s: float = 0.010
    health_timeout_s: float = 15.0
    placement_s: float = 0.006
    placement_retry_s: float = 0.074
    removal_s: float = 0.007
    os_connect_timeout_s: float = 127.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"Timings.{field.name} = {value!r}: a duration must not be negative")
