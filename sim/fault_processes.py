"""Faults of one process in the simulated world: signals, wedges, slowness, and what its page of metrics shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import NameTaken, NoSuchActor, PlacementError, message_of
from protocol.faulting import FaultRefused
from sim.actors import ActorProcess
from sim.engine_process import EngineProcess
from sim.fault_base import Fault
from sim.world import Process

if TYPE_CHECKING:
    from sim.engine import SimEngine


class ProcessFault(Fault):
    """Something about one living process."""

    process: Process

    def look(self) -> dict[str, int]:
        name = self.target.name
        found: Process | None = self.site.engines.processes.get(name) or self.site.world.processes.get(name)
        if found is None:
            raise FaultRefused(f"target {name!r}: there is no such process")
        if not found.alive:
            raise FaultRefused(f"target {name!r}: it is dead already (incarnation {found.incarnation})")
        self.process = found
        if isinstance(found, EngineProcess):
            return {"in_flight": found.in_flight}
        key = (found.name, found.incarnation)
        calls = self.site.system.open_calls.values()
        return {"in_flight": sum((call.ref_name, call.ref_incarnation) == key for call in calls)}


class Sigkill(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        self._part = self.params.get("part", "main")
        if self._part != "main" and not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"sigkill of the {self._part}: {self.process.name} is no engine and has no such part")
        return observed

    def inject(self) -> None:
        if isinstance(self.process, EngineProcess) and self._part != "main":
            self.process.engine.lose_child(self._part)
        else:
            self.process.die("killed")


class Sigterm(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        if not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"sigterm: {self.process.name} is no engine; use sigkill for an actor")
        return observed

    def inject(self) -> None:
        assert isinstance(self.process, EngineProcess)
        self.process.engine.sigterm()


class RestartEmpty(ProcessFault):
    def look(self) -> dict[str, int]:
        observed = super().look()
        try:
            if isinstance(self.process, EngineProcess):
                self.site.engines.where_again(self.process.name)
            else:
                self.site.system.where_again(self.process.name)
        except (NameTaken, NoSuchActor, PlacementError) as error:
            raise FaultRefused(f"restart_empty: {self.process.name} could not start again: {error}") from error
        return observed

    def inject(self) -> None:
        self.process.die("killed")
        name = self.process.name
        try:
            if isinstance(self.process, EngineProcess):
                spec, node, placement = self.site.engines.specs[name]
                self.site.engines.start(spec, name, node, placement)
            else:
                self.site.system.restart_from_outside(name)
        except (NameTaken, NoSuchActor, PlacementError) as error:
            # Something else was done at the emission of fault.injected. Too late to refuse: it is dead already.
            detail = f"restart of {name}: {type(error).__name__}: {message_of(error)}"
            self.site.world.observe("run.anomaly", what="fault_half_done", detail=detail)


class Sigstop(ProcessFault):
    def inject(self) -> None:
        self.site.stops[self.process.id] += 1
        self.process.stop()

    def heal(self) -> None:
        stops, held = self.site.stops, self.process.id
        stops[held] -= 1
        if not stops[held]:
            del stops[held]
            self.process.cont()


class Slow(ProcessFault):
    def inject(self) -> None:
        self.site.slowed.setdefault(self.process.id, []).append(self.params["percent"])
        self._set()

    def heal(self) -> None:
        self.site.slowed[self.process.id].remove(self.params["percent"])
        if self.process.alive:
            self._set()

    def _set(self) -> None:
        """What it takes now: all that slows it down, one on top of the other, as slow exports are."""
        ppm = 1_000_000
        for percent in self.site.slowed[self.process.id]:
            ppm = ppm * percent // 100
        if isinstance(self.process, EngineProcess):
            self.process.engine.slow(max(1, ppm))
        elif isinstance(self.process, ActorProcess):
            self.process.loop.slow_percent = max(1, ppm // 10_000)


class Wedge(ProcessFault):
    engine: SimEngine

    def look(self) -> dict[str, int]:
        observed = super().look()
        if not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"wedge: {self.process.name} is no engine; use sigstop for an actor")
        self.engine = self.process.engine
        return observed

    def inject(self) -> None:
        self.engine.wedge()

    def heal(self) -> None:
        if self.process.alive:
            self.engine.unwedge()


class MetricsFault(ProcessFault):
    """Something about one engine's /metrics page."""

    def look(self) -> dict[str, int]:
        observed = super().look()
        if not isinstance(self.process, EngineProcess):
            raise FaultRefused(f"{self.process.name} is no engine: it has no metrics page")
        return observed

    def inject(self) -> None:
        self._stale: str | None = None
        process = self.process

        def page(asked: EngineProcess, route: str, status: int, text: str) -> tuple[int, str]:
            if asked is not process or route != "/metrics":
                return status, text
            self.hit(f"{route} of {asked.name}")
            return self.change(status, text)

        self._page = page
        self.site.engines.page_faults.append(page)

    def change(self, status: int, text: str) -> tuple[int, str]:
        raise NotImplementedError(type(self).__name__)  # abstract

    def heal(self) -> None:
        self.site.engines.page_faults.remove(self._page)


class MetricsMissing(MetricsFault):
    def change(self, status: int, text: str) -> tuple[int, str]:
        return 404, '{"detail":"Not Found"}'


class MetricsStale(MetricsFault):
    def change(self, status: int, text: str) -> tuple[int, str]:
        if self._stale is None:
            self._stale = text
        return status, self._stale


class MetricsNan(MetricsFault):
    def change(self, status: int, text: str) -> tuple[int, str]:
        return status, "\n".join(
            line if line.startswith("#") or not line else line.rsplit(" ", 1)[0] + " NaN" for line in text.split("\n")
        )
