"""Faults of one process: real signals to it, or to a part of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from typing import Any

from protocol.errors import NameTaken
from protocol.faulting import FaultRefused
from real.census import ProcessCard
from real.engines.tree import Part, pid_of, tree_of
from real.faults.kinds import Fault, Slowed

_DUTY = pathlib.Path(__file__).with_name("duty.py")
_FREED_WITHIN_S = 30.0
_LOOK_S = 0.05


class ProcessFault(Fault):
    """Something about one living process."""

    card: ProcessCard

    def look(self) -> dict[str, int]:
        name = self.target.name
        card = self.site.census.find(name)
        if card is None:
            raise FaultRefused(f"target {name!r}: there is no such process")
        if card.role == "driver":
            raise FaultRefused(f"target {name!r}: the driver is what injects the faults")
        if not card.is_here:
            raise FaultRefused(
                f"target {name!r}: it runs on {card.host}, and signals reach {socket.gethostname()} alone"
            )
        if not card.alive:
            raise FaultRefused(f"target {name!r}: it is dead already (incarnation {card.incarnation})")
        self.card = card
        return {"in_flight": card.in_flight}

    @property
    def is_engine(self) -> bool:
        return self.card.role == "engine"

    def pids(self) -> list[int]:
        """All that the process consists of."""
        return list(tree_of(self.card.pid)) if self.is_engine else [self.card.pid]

    def still_there(self) -> bool:
        """Whether it is the same incarnation, and alive."""
        now = self.site.census.find(self.card.name)
        return now is not None and now.incarnation == self.card.incarnation and now.alive

    def send(self, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it died a moment ago by itself
                os.kill(pid, number)

    def record(self, kind: str, **fields: Any) -> None:
        """An event that the process cannot write itself."""
        backend = self.site.backend
        backend.log.emit_for(self.card.name, self.card.incarnation, backend.caller.next_number(), kind, **fields)

    def kill(self) -> None:
        """SIGKILL; its death is recorded by whoever owns it: an engine's host, which survives it, or else here."""
        if not self.is_engine:
            self.send(signal.SIGSTOP, [self.card.pid])  # it does nothing any more once its death is recorded
            self.record("actor.died", reason="killed", detail="")
        self.send(signal.SIGKILL, [self.card.pid])
        if not self.is_engine:
            self.site.backend.bury(self.card.name, self.card.incarnation)


class Sigkill(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        self._part: Part = self.params.get("part", "main")
        self._pid = self.card.pid
        if self._part != "main":
            if not self.is_engine:
                raise FaultRefused(f"sigkill of the {self._part}: {self.card.name} is no engine and has no such part")
            self._pid = _part_of(self.card, self._part)
        return observed

    def inject(self) -> None:
        if self._part == "main":
            self.kill()
            return
        self.send(signal.SIGKILL, [self._pid])
        self.site.later(self.site.backend.engines.lost(self.card.name, self._part), f"loss of the {self._part}")


class Sigterm(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        if not self.is_engine:
            raise FaultRefused(f"sigterm: {self.card.name} is no engine; use sigkill for an actor")
        self._pid = _part_of(self.card, "main")
        return observed

    def inject(self) -> None:
        self.record("engine.leaving")
        self.send(signal.SIGTERM, [self._pid])


class RestartEmpty(ProcessFault):
    def inject(self) -> None:
        self.kill()
        again = self._engine_again() if self.is_engine else self._actor_again()
        self.site.later(again, f"restart of {self.card.name}")

    async def _engine_again(self) -> None:
        engines = self.site.backend.engines
        launched = await engines.launched(self.card.name)
        await self._again(
            lambda: engines.launch(launched.spec, name=self.card.name, node=launched.node, placement=launched.placement)
        )

    async def _actor_again(self) -> None:
        await self._again(lambda: self.site.backend.start_again(self.card.name, self.card.incarnation))

    async def _again(self, start: Any) -> None:
        """Start it as soon as its name is free; that somebody else has started it meanwhile is as good."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + _FREED_WITHIN_S
        while True:
            try:
                await start()
                return
            except NameTaken:
                now = self.site.census.find(self.card.name)
                if now is not None and now.incarnation > self.card.incarnation:
                    return
                if loop.time() > ends:
                    raise
            await asyncio.sleep(_LOOK_S)


class Sigstop(ProcessFault):
    def inject(self) -> None:
        self._pids = self.pids()
        if not self.site.stops.held(self.card.pid):
            self.record("actor.stopped")
        self.site.stops.stop(self._pids)

    def heal(self) -> None:
        if self.site.stops.held(self.card.pid) == 1 and self.still_there():
            self.record("actor.continued")
        self.site.stops.go_on(self._pids)


class Slow(ProcessFault):
    """Several at once multiply. One duty process works for all of them: two would let the process go on in turn."""

    def inject(self) -> None:
        slowed = self.site.slowed.setdefault(self.card.pid, Slowed([]))
        slowed.percents.append(self.params["percent"])
        self._set(slowed, self.pids())  # it may have gained children since the fault before

    def heal(self) -> None:
        slowed = self.site.slowed[self.card.pid]
        slowed.percents.remove(self.params["percent"])
        self._set(slowed, slowed.pids)
        if not slowed.percents:
            del self.site.slowed[self.card.pid]

    def _set(self, slowed: Slowed, pids: list[int]) -> None:
        stops = self.site.stops
        if slowed.duty is not None:
            stops.duty_ends(slowed.duty.pid)
            assert slowed.duty.stdin is not None
            slowed.duty.stdin.close()
            slowed.duty.wait()
            stops.stop_again(slowed.pids)
            slowed.duty = None
        slowed.pids = pids
        if slowed.percents:
            percent = 100
            for other in slowed.percents:
                percent = percent * other // 100
            slowed.duty = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_DUTY), str(percent), *map(str, slowed.pids)], stdin=subprocess.PIPE
            )
            stops.duty_begins(slowed.duty.pid, slowed.pids)


class Wedge(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        if not self.is_engine:
            raise FaultRefused(f"wedge: {self.card.name} is no engine; use sigstop for an actor")
        self._pid = _part_of(self.card, "scheduler")
        return observed

    def inject(self) -> None:
        self.site.stops.stop([self._pid])

    def heal(self) -> None:
        self.site.stops.go_on([self._pid])


def _part_of(card: ProcessCard, part: Part) -> int:
    try:
        return pid_of(part, card.pid)
    except LookupError as error:
        raise FaultRefused(f"target {card.name!r}: {error}") from error
