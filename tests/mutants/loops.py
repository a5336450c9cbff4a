"""Wrong event loops, put in place of the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.kernel import Kernel
from sim.loop import ActorLoop
from tests.mutants.registry import Mutant


class TimersBeforeArrivals(Kernel):
    """Runs the timers that expired before the arrivals that wait: after a SIGCONT every time-out wins."""

    def _iterate(self, loop: ActorLoop) -> None:
        if loop._due and not loop._todo and not loop._blocked:
            loop._ready.extend(loop._due)
            loop._due.clear()
        super()._iterate(loop)


class LosesArrivalsWhileStopped(ActorLoop):
    """Drops what arrives for a stopped process instead of keeping it until the process continues."""

    def deliver(self, fn: Callable[..., object], *args: Any, cost_ns: int = 0) -> None:
        if not self.frozen:
            super().deliver(fn, *args, cost_ns=cost_ns)


class DeliversTwice(ActorLoop):
    """Delivers some messages twice."""

    _delivered = 0

    def deliver(self, fn: Callable[..., object], *args: Any, cost_ns: int = 0) -> None:
        super().deliver(fn, *args, cost_ns=cost_ns)
        self._delivered += 1
        if cost_ns and self._delivered % 50 == 0:
            super().deliver(fn, *args, cost_ns=cost_ns)


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
        "client_stopped",
        "answered_fraction",
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
        "impatient",
        "unexplained_failures",
    ),
)
