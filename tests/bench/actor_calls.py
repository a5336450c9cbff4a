"""Calls a second from actor to actor: ``python -m tests.bench.actor_calls [--cost-s 0] [--callers 1] [--calls 20000]``.

Every call is sent, served and answered with full evidence (encoded and hashed), by a null recorder. CPU time is
measured, the best of some runs, for this machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from protocol.evidence import Event
from protocol.ports import ActorHandle
from sim.backend import SimBackend, run_sim
from sim.timings import Timings


class Callee:
    async def echo(self, value: str) -> str:
        return value


class Caller:
    def __init__(self, callee: ActorHandle) -> None:
        self.callee = callee

    async def call(self, n: int) -> None:
        for _ in range(n):
            await self.callee.echo("x")


class NullRecorder:
    def record(self, event: Event) -> None: ...


def calls_per_second(*, calls: int, callers: int, cost_s: float, rounds: int = 5) -> float:
    """CPU-time rate of calls, set-up of the world included."""

    async def body(backend: SimBackend) -> None:
        callee = await backend.spawn(Callee, name="callee")
        made = [await backend.spawn(Caller, callee, name=f"caller-{i}") for i in range(callers)]
        await asyncio.gather(*(caller.call(calls // callers) for caller in made))

    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        run_sim(body, recorder=NullRecorder(), timings=Timings(call_cost_s=cost_s))
        best = min(best, time.process_time() - began)
    return calls // callers * callers / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cost-s", type=float, default=0.0)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--calls", type=int, default=20_000)
    arguments = parser.parse_args()
    rate = calls_per_second(calls=arguments.calls, callers=arguments.callers, cost_s=arguments.cost_s)
    work = f"{arguments.callers} callers, {arguments.cost_s} s a message"
    print(f"{work}: {rate:,.0f} calls/s, {1e6 / rate:.1f} us a call")


if __name__ == "__main__":
    main()
