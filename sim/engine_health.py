"""Health checks of a simulated engine, which generate: at least a second each, 20 s until they fail.

Source: ../shared/spec/engines.md, section 3: a check sends one token to an idle scheduler (a busy one is proof enough)
and looks every second whether the scheduler has put out anything since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.engine_types import Request

if TYPE_CHECKING:
    from sim.engine import SimEngine


class HealthCheck:
    """One GET /health_generate under way; ``done`` gets its status."""

    def __init__(self, engine: SimEngine, done: Callable[[int], None]) -> None:
        self.engine = engine
        self.done = done
        self.began_ns: int = engine.env.now
        self.deadline_ns = self.began_ns + engine.profile.health_timeout_ns

    def start(self) -> None:
        self.engine.hold_or_send(self._send)
        self.engine.after(self.engine.profile.health_poll_ns, self._poll)

    def _send(self) -> None:
        if self.engine.env.now < self.deadline_ns:  # a pause may have kept it past its end
            self.engine.scheduler.push(self._generate, None)

    def _generate(self, _: None) -> None:
        scheduler = self.engine.scheduler
        if not scheduler.running and not scheduler.waiting and scheduler.chunked is None:
            scheduler.waiting.append(Request("HEALTH_CHECK", 1, 1, 1, True, (), None, None, self.engine.env.now))

    def _poll(self) -> None:
        engine = self.engine
        engine.scheduler.sync()
        if engine.scheduler.last_output_ns > self.began_ns:  # any output of the scheduler will do
            engine.unhealthy = False
            self.done(200)
        elif engine.env.now >= self.deadline_ns:
            engine.unhealthy = True
            self.done(503)
        else:
            engine.after(engine.profile.health_poll_ns, self._poll)
