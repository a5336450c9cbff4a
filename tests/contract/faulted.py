"""Two arms for bodies that inject faults: ``async def body(backend, faults)``, in the simulated world and on Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from protocol.errors import NetworkError
from protocol.evidence import Event, decode
from protocol.messages import GenerateRequest
from protocol.ports import EngineClient, EngineSpec, PlacementState, backend

Body = Callable[[Any, "Faults"], Awaitable[None]]


class Faults:
    """The faults of the world that the body runs in.

    Args:
        inner: ``sim.faults.Faults`` or ``real.faults.injection.RealFaults``.
        target: the world's class of targets.
        refused: the world's error of a fault that cannot be done.
        in_flight: how many requests are in flight at a process.
    """

    def __init__(self, inner: Any, target: type, refused: type[Exception], in_flight: Callable[[str], int]) -> None:
        self.inner = inner
        self._in_flight = in_flight
        self.refused = refused
        self._target = target

    def inject(
        self,
        name: str,
        at: str = "",
        *,
        link: tuple[str, str] = ("*", "*"),
        path: str = "",
        must_hit: dict[str, int] | None = None,
        for_s: float | None = None,
        transient: bool = False,
        **params: Any,
    ) -> Any:
        """Inject it now; the result has ``hits``, ``healed``, ``satisfied()`` and ``heal()``."""
        bounds = {what: {"at_least": count} for what, count in (must_hit or {}).items()}
        return self.inner.inject(
            name, self._target(at, *link, path), params, must_hit=bounds, for_s=for_s, transient=transient
        )

    async def busy(self, name: str) -> None:
        """Wait until a request is in flight at a process."""
        await until(lambda: self._in_flight(name) > 0)

    # As turmoil names what it does to a network.

    def partition(self, one: str, other: str, *, one_way: bool = False) -> Any:
        return self.inject("partition", link=(one, other), one_way=one_way)

    def repair(self, partition: Any) -> None:
        partition.heal()


@dataclasses.dataclass(frozen=True)
class FaultedArm:
    """One world."""

    name: str
    folder: pathlib.Path

    def run(self, body: Body) -> list[Event]:
        """Run a body, heal what it leaves, and give the evidence, in the order of time."""
        return self._in_sim(body) if self.name == "sim" else self._on_ray(body)

    def _in_sim(self, body: Body) -> list[Event]:
        from protocol.faulting import FaultRefused, Target
        from sim.fault_kinds import Sigstop
        from sim.simulation import Simulation

        events: list[Event] = []
        with Simulation(sinks=[events.append]) as simulation:
            site = simulation.faults.site

            def in_flight(name: str) -> int:
                return Sigstop(site, Target(name=name), {}, lambda what: None).look()["in_flight"]

            faults = Faults(simulation.faults, Target, FaultRefused, in_flight)
            simulation.run(lambda port: body(port, faults), time_limit_s=3600)
            simulation.faults.heal_all()
            simulation.world.flush()
        return events

    def _on_ray(self, body: Body) -> list[Event]:
        from protocol.faulting import FaultRefused, Target
        from real.backend import run_real
        from real.engines.settings import EngineSettings
        from real.faults.injection import real_faults
        from tests.real.engine_world import first_port

        async def bounded(port: Any) -> None:
            faults = real_faults(port)

            def in_flight(name: str) -> int:
                card = faults.site.census.find(name)
                return 0 if card is None else card.in_flight

            try:
                async with asyncio.timeout(150):
                    await body(port, Faults(faults, Target, FaultRefused, in_flight))
            finally:
                faults.heal_all()

        engines = EngineSettings("emulated", sys.executable, first_port=first_port())
        run_real(bounded, folder=str(self.folder), engines=engines)
        lines = [line for file in (self.folder / "events").iterdir() for line in file.read_bytes().splitlines()]
        return sorted((decode(line) for line in lines), key=lambda event: event.t_ns)


def kinds(events: list[Event], *wanted: str) -> list[str]:
    """The kinds of those of the events that are of a wanted kind."""
    return [event.kind for event in events if event.kind in wanted]


def told(events: list[Event], kind: str, *fields: str) -> list[tuple[Any, ...]]:
    """These fields of every event of a kind."""
    return [tuple(event.data[field] for field in fields) for event in events if event.kind == kind]


class Counter:
    """Counts what it is told to."""

    def __init__(self) -> None:
        self._count = 0

    async def add(self) -> int:
        self._count += 1
        return self._count

    async def value(self) -> int:
        return self._count

    async def work(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    async def up_to(self, n: int) -> Any:
        for number in range(n):
            yield number

    async def ticks(self, n: int, every_s: float) -> Any:
        for number in range(n):
            yield number
            await asyncio.sleep(every_s)

    async def write(self, path: str, data: bytes, size_bytes: int | None = None) -> None:
        await backend().storage.write(path, data, size_bytes=size_bytes)

    async def read(self, path: str) -> bytes:
        return await backend().storage.read(path)

    async def groups(self) -> dict[str, PlacementState]:
        return await backend().placement_groups.table()

    async def wall_time(self) -> float:
        return backend().wall_time()


def request(number: int, tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(f"r-{number:07d}", 50, tokens)


async def ready_engine(port: Any, name: str = "engine-0") -> EngineClient:
    """A replica that is ready."""
    address = await port.engines.launch(EngineSpec("tiny-cpu"), name=name)
    return await until_ready(port.engines.client(address))


async def until_ready(client: EngineClient) -> EngineClient:
    while True:
        try:
            if (await client.get("/ready", connect_timeout_s=1, read_timeout_s=1))[0] == 200:
                return client
        except NetworkError:
            pass  # it does not listen yet
        await asyncio.sleep(0.1)


async def until(reached: Callable[[], Any], within_s: float = 10.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not reached():
            await asyncio.sleep(0.02)
