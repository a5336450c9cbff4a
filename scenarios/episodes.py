"""Episodes of agents: one client's share of them, so many at once, each worker with random streams of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from scenarios.client import wait_to_begin
from scenarios.schema import WorkloadModel
from scenarios.workloads.source import sizes

Episode = Callable[[int, Callable[[], int], Callable[[], int], Callable[[int], int]], Awaitable[None]]
"""Runs session ``number``. It draws the tokens that a turn adds, the most tokens of an answer, and integers below n."""


def chance(share: float, below: Callable[[int], int]) -> bool:
    """Whether something happens that does in this share of the cases. Of what never does, nothing is drawn."""
    return bool(share) and below(1_000_000) < share * 1_000_000


async def think(think_s: float, below: Callable[[int], int]) -> None:
    """The tools between two turns: half of ``think_s`` to one and a half times as long, as it is drawn."""
    await asyncio.sleep(think_s * (500 + below(1001)) / 1000)


async def run_share(workload: WorkloadModel, share: int, seed: int, streams: str, episode: Episode) -> None:
    """Run every episode of one client's share to its end.

    Args:
        workload: of agents; ``clients`` of them share its sessions and how many of these there are at once.
        share: which of the clients this is, from 0.
        seed: of the draws.
        streams: what the names of this share's random streams begin with.
        episode: runs one session.
    """
    from sim.random import Streams  # the draws are the same in both worlds

    assert workload.arrivals is not None and workload.arrivals.agents is not None
    agents = workload.arrivals.agents
    await wait_to_begin(workload)
    sessions = iter(range(share, agents.sessions, workload.clients))  # one iterator, which the workers share
    at_once = -(-(agents.at_once or agents.sessions) // workload.clients)

    async def work(worker: int) -> None:
        drawn, prefix = Streams(seed), f"{streams}{worker}."
        added, output = sizes(workload, lambda name: drawn.stream(prefix + name))
        below = drawn.stream(prefix + "agent").below
        for session in sessions:
            await episode(session, added, output, below)

    async with asyncio.TaskGroup() as group:
        for worker in range(min(at_once, agents.sessions)):
            group.create_task(work(worker), name=f"agent-{worker}")
