"""The autoscaler: one collector, one worker and one state for each service, added and removed while it runs.

Source: scaling.md 6.4. What a service has open outlives every change of configuration; a service that has something
open cannot be removed. What an autoscaler knows is in memory: after a restart it begins anew, and the service's own
mutual exclusion keeps it from a second operation beside one that it has forgotten.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from protocol.errors import Outcome, SeatrialError
from protocol.scaling.collector import Collector
from protocol.scaling.policy import AutoscalerConfig
from protocol.scaling.requests import ServiceState
from protocol.scaling.targets import ServiceTarget
from protocol.scaling.worker import Worker


class TargetBusy(SeatrialError):
    """A service cannot be removed while a request of it is open; nothing was changed."""

    default_outcome = Outcome.NOT_DONE


@dataclasses.dataclass(slots=True)
class Runtime:
    """One service at work."""

    target: ServiceTarget
    collector: Collector
    worker: Worker
    state: ServiceState


@dataclasses.dataclass(slots=True)
class _Begun:
    """What a service will go on with. ``connected``: the target is a new one too."""

    target: ServiceTarget
    collector: Collector
    connected: bool


@dataclasses.dataclass(slots=True)
class _Replaced:
    """What no service goes on with."""

    collectors: list[Collector]
    targets: list[ServiceTarget]


class Autoscaler:
    """All services of one autoscaler. A part of the AutoscalerApi, which is the actor.

    Args:
        config: at the beginning.
        connect: makes the target of a URL.
    """

    def __init__(self, config: AutoscalerConfig, connect: Callable[[str], ServiceTarget]) -> None:
        self.config = config
        self.runtimes: dict[str, Runtime] = {}
        self.activated = False
        self._deciding = True
        self._connect = connect
        self._changing = asyncio.Lock()

    async def activate(self) -> None:
        """Begin to collect and to evaluate. Again: nothing."""
        async with self._changing:
            if not self.activated:
                begun = await self._begin(self.config)
                self.activated = True
                self._install(self.config, begun)

    async def apply(self, change: Callable[[AutoscalerConfig], AutoscalerConfig]) -> None:
        """Go over to another configuration, wholly or not at all: what is new begins before anything changes.

        Args:
            change: makes it of the one that is in force; may raise, and nothing has changed then.

        Raises:
            TargetBusy: it removes a service that has something open. Nothing has changed.
            Exception: a new service or its first round of metrics broke. Nothing has changed then either.
        """
        async with self._changing:
            config = change(self.config)
            removed = [service for service in self.runtimes if service not in config.service_targets]
            self._check_idle(removed)
            if not self.activated:
                self.config = config
                return
            begun = await self._begin(config)
            try:
                self._check_idle(removed)  # once more: meanwhile one of them may have asked for something
            except TargetBusy:
                await self._end(begun)
                raise
            self.config = config
            gone = [self.runtimes.pop(service) for service in removed]
            for runtime in gone:
                runtime.worker.retire()
            replaced = self._install(config, begun)
            # Everything is in place; what is left over ends now. What was sent to an old URL is still followed there.
            for collector in (*replaced.collectors, *(runtime.collector for runtime in gone)):
                await collector.stop()
            for target in (*replaced.targets, *(runtime.target for runtime in gone)):
                await target.close()

    def _check_idle(self, services: list[str]) -> None:
        for service in services:
            request = self.runtimes[service].state.open_request()
            if request is not None:
                what = f"{request.action} {request.name} is {request.status}, cleanup {request.cleanup}"
                raise TargetBusy(f"service {service!r} cannot be removed: {what}; try again when it is over")

    async def _begin(self, config: AutoscalerConfig) -> dict[str, _Begun]:
        """The targets and collectors that a configuration needs and that are not at work yet, the collectors started.

        They come first, so that nobody sees a service that knows nothing (M30).
        """
        begun: dict[str, _Begun] = {}
        try:
            for service, url in config.service_targets.items():
                old = self.runtimes.get(service)
                moved = old is None or url != self.config.service_targets[service]
                if old is None or moved or _collects(config) != _collects(self.config):
                    target = self._connect(url) if old is None or moved else old.target
                    begun[service] = _Begun(target, Collector(service, target, config), moved)
            starts = (one.collector.start() for one in begun.values())
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self._end(begun)
            raise
        return begun

    async def _end(self, begun: dict[str, _Begun]) -> None:
        """Undo :meth:`_begin`."""
        for one in begun.values():
            await one.collector.stop()
        for one in begun.values():
            if one.connected:
                await one.target.close()

    def _install(self, config: AutoscalerConfig, begun: dict[str, _Begun]) -> _Replaced:
        """A worker for every service, over its state or a fresh one. Nothing is awaited; says what is left over."""
        replaced = _Replaced([], [])
        for service in config.service_targets:
            old, new = self.runtimes.get(service), begun.get(service)
            if old is None:
                assert new is not None
                target, collector, state = new.target, new.collector, ServiceState()
            else:
                target, collector, state = old.target, old.collector, old.state
                old.worker.retire()
                if new is not None:
                    replaced.collectors.append(old.collector)
                    if new.connected:
                        replaced.targets.append(old.target)
                    target, collector = new.target, new.collector
            worker = Worker(service, config, target, collector, state)
            worker.deciding = self._deciding
            self.runtimes[service] = Runtime(target, collector, worker, state)
            worker.start()
        return replaced

    async def _close(self, runtime: Runtime) -> None:
        runtime.worker.retire()
        await runtime.collector.stop()
        await runtime.target.close()

    def wind_down(self) -> None:
        """Ask for nothing new, of a service that is added from here on neither; what is open is followed to its end."""
        self._deciding = False
        for runtime in self.runtimes.values():
            runtime.worker.deciding = False

    def open_requests(self) -> tuple[str, ...]:
        """What is not over, as ``SERVICE:NAME``."""
        found = ((service, runtime.state.open_request()) for service, runtime in self.runtimes.items())
        return tuple(f"{service}:{request.name}" for service, request in found if request is not None)

    async def stop(self) -> None:
        for runtime in self.runtimes.values():
            await self._close(runtime)


def _collects(config: AutoscalerConfig) -> tuple[float, float, float]:
    """What a collector is made by."""
    return config.metrics_interval_secs, config.condition_window_secs, config.evaluation_interval_secs
