"""A clock, an engine and a log of everything it says: what the engine tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import Event

from sim.engine import SimEngine
from sim.engine_types import AdminResult, EngineResult
from sim.profiles import EngineProfile, load_profile

MS = 1_000_000
S = 1_000_000_000


class World:
    """One engine on its own clock. ``log`` has (time, what, payload) of every callback and evidence event."""

    def __init__(
        self,
        profile: EngineProfile | None = None,
        *,
        fast_path: bool = True,
        started: bool = True,
        evidence: bool = True,
    ) -> None:
        self.env = simpy.Environment(0)  # type: ignore[arg-type]
        self.log: list[tuple[int, str, Any]] = []
        self.results: dict[str, EngineResult] = {}
        self.replies: list[tuple[int, AdminResult]] = []
        self.exits: list[tuple[int, str]] = []
        self.engine = SimEngine(
            self.env,
            profile or tiny(),
            emit=self._emit if evidence else None,
            on_exit=lambda why: self.exits.append((self.env.now, why)),
            fast_path=fast_path,
        )
        if started:
            self.engine.start()
            self.run(until=self.engine.startup_ns + 1)

    def run(self, until: int | None = None) -> None:
        self.env.run(until=until)

    def run_for(self, duration: int) -> None:
        self.env.run(until=self.env.now + duration)

    def at(self, time: int, action: Callable[[], None]) -> None:
        event = Event(self.env)
        event._ok = True
        event._value = None
        event.callbacks.append(lambda _: action())
        self.env.schedule(event, delay=time - self.env.now)  # type: ignore[arg-type]

    def submit(
        self, rid: str, prompt: int = 20, new: int = 10, blocks: tuple[int, ...] | None = None, **more: Any
    ) -> None:
        self.engine.submit(rid, prompt, new, blocks, done=self.done, **more)

    def done(self, result: EngineResult) -> None:
        self.log.append((self.env.now, "done", tuple(result)))
        assert result.rid not in self.results or result.status == 400, "answered twice"
        self.results[result.rid] = result

    def reply(self, result: AdminResult) -> None:
        self.log.append((self.env.now, "reply", tuple(result)))
        self.replies.append((self.env.now, result))

    def _emit(self, kind: str, **fields: Any) -> None:
        self.log.append((self.env.now, kind, repr(fields)))


def tiny(**changes: Any) -> EngineProfile:
    return load_profile("tiny-cpu").replace(**changes)
