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
        self._connect = connect
        self._changing = asyncio.Lock()

    async def activate(self) -> None:
        """Begin to collect and to evaluate. Again: nothing."""
        async with self._changing:
            if not self.activated:
                self.activated = True
                await self._add(tuple(self.config.service_targets), self.config)

    async def apply(self, change: Callable[[AutoscalerConfig], AutoscalerConfig]) -> None:
        """Go over to another configuration.

        Args:
            change: makes it of the one that is in force; may raise, and nothing has changed then.

        Raises:
            TargetBusy: it removes a service that has something open. Nothing has changed.
        """
        async with self._changing:
            config = change(self.config)
            removed = [service for service in self.runtimes if service not in config.service_targets]
            for service in removed:
                self._check_idle(service)
            for service in removed:
                self.runtimes[service].worker.retire()  # before the first await: it must not submit any more
            before, self.config = self.config, config
            if self.activated:
                added = [service for service in config.service_targets if service not in self.runtimes]
                await self._add(tuple(added), config)
                for service in config.service_targets:
                    if service not in added:
                        await self._change(service, before, config)
            for service in removed:
                await self._close(self.runtimes.pop(service))

    def _check_idle(self, service: str) -> None:
        state = self.runtimes[service].state
        request = state.open_request()
        if request is not None:
            what = f"{request.action} {request.name} is {request.status}, cleanup {request.cleanup}"
            raise TargetBusy(f"service {service!r} cannot be removed: {what}; try again when it is over")

    async def _add(self, services: tuple[str, ...], config: AutoscalerConfig) -> None:
        """Start services. Collectors first, so that nobody sees a service that knows nothing (M30)."""
        made = [(service, self._connect(config.service_targets[service])) for service in services]
        collectors = [Collector(service, target, config) for service, target in made]
        await asyncio.gather(*(collector.start() for collector in collectors))
        for (service, target), collector in zip(made, collectors, strict=True):
            state = ServiceState()
            worker = Worker(service, config, target, collector, state)
            self.runtimes[service] = Runtime(target, collector, worker, state)
            worker.start()

    async def _change(self, service: str, before: AutoscalerConfig, after: AutoscalerConfig) -> None:
        """A new worker over the same state. What was sent to an old URL is followed there."""
        old = self.runtimes[service]
        target, collector = old.target, old.collector
        moved = after.service_targets[service] != before.service_targets[service]
        if moved:
            target = self._connect(after.service_targets[service])
        if moved or _collects(after) != _collects(before):
            collector = Collector(service, target, after)
            await collector.start()
            await old.collector.stop()
        if moved:
            await old.target.close()  # what was sent there and is open is still followed there
        old.worker.retire()
        worker = Worker(service, after, target, collector, old.state)
        worker.deciding = old.worker.deciding
        self.runtimes[service] = Runtime(target, collector, worker, old.state)
        worker.start()

    async def _close(self, runtime: Runtime) -> None:
        runtime.worker.retire()
        await runtime.collector.stop()
        await runtime.target.close()

    def wind_down(self) -> None:
        """Ask for nothing new; what is open is followed to its end."""
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
