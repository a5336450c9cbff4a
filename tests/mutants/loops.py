"""Wrong event loops, put in place of the simulated one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.errors import ReadTimeout
from protocol.messages import EngineAddress, GenerateRequest, GenerateResult
from protocol.ports import EngineClient
from protocol.serving.gateway import Gateway
from sim.kernel import Kernel
from sim.loop import ActorLoop
from tests.mutants.registry import Mutant


class _WaitingClient:
    """An engine client whose generations end after ``longest_s``, by ``asyncio.wait``."""

    def __init__(self, client: EngineClient, longest_s: float) -> None:
        self._client = client
        self._longest_s = longest_s

    async def generate(self, request: GenerateRequest, **timeouts: Any) -> GenerateResult:
        task = asyncio.ensure_future(self._client.generate(request, **timeouts))
        done, _ = await asyncio.wait({task}, timeout=self._longest_s)
        if not done:
            task.cancel()
            raise ReadTimeout(f"{request.request_id} took over {self._longest_s} s")
        return await task


class WaitsByItself(Gateway):
    """A right gateway with time-outs of its own. Its answers and its timers meet in its loop."""

    longest_s = 3.0

    async def add_replica(self, address: EngineAddress) -> bool:
        added = await super().add_replica(address)
        replica: Any = self._find(address)
        if replica is not None and not isinstance(replica.client, _WaitingClient):
            replica.client = _WaitingClient(replica.client, self.longest_s)
        return added


class WaitsBriefly(WaitsByItself):
    """The same, with a time-out that is a little longer than any answer takes."""

    longest_s = 0.25


class TimersBeforeArrivals(Kernel):
    """Runs the timers that expired before the arrivals that wait: after a SIGCONT every time-out wins."""

    def _iterate(self, loop: ActorLoop) -> None:
        if loop._due and not loop._todo and not loop._blocked:
            loop._ready.extend(loop._due)
            loop._due.clear()
        super()._iterate(loop)


class LosesArrivalsWhileStopped(ActorLoop):
    """Drops what arrives for a stopped process instead of keeping it until the process continues."""

    def deliver(self, fn: Callable[..., object], *args: Any, cost_ns: int = 0, plain: bool = False) -> None:
        if not self.frozen:
            super().deliver(fn, *args, cost_ns=cost_ns, plain=plain)


class DeliversTwice(ActorLoop):
    """Delivers some messages twice."""

    _delivered = 0

    def deliver(self, fn: Callable[..., object], *args: Any, cost_ns: int = 0, plain: bool = False) -> None:
        super().deliver(fn, *args, cost_ns=cost_ns, plain=plain)
        self._delivered += 1
        if cost_ns and self._delivered % 50 == 0:
            super().deliver(fn, *args, cost_ns=cost_ns, plain=plain)


class TimersFireEarly(ActorLoop):
    """Fires every timer at half of its time."""

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_later(delay / 2, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_later(max(0.0, when - self.time()) / 2, callback, *args, context=context)


MUTANTS = (
    Mutant(
        "timers before arrivals",
        "DESIGN loop",
        "sim.world:Kernel",
        Kernel,
        TimersBeforeArrivals,
        "waiting_gateway_stopped",
        "occurs",
    ),
    Mutant(
        "arrivals lost while stopped",
        "DESIGN loop",
        "sim.kernel:ActorLoop",
        ActorLoop,
        LosesArrivalsWhileStopped,
        "gateway_stopped",
        "nothing_lost",
    ),
    Mutant(
        "messages delivered twice",
        "DESIGN actors",
        "sim.kernel:ActorLoop",
        ActorLoop,
        DeliversTwice,
        "once_only",
        "nothing_twice",
    ),
    Mutant(
        "timers fire early",
        "DESIGN loop",
        "sim.kernel:ActorLoop",
        ActorLoop,
        TimersFireEarly,
        "brief_waits",
        "occurs",
    ),
)
