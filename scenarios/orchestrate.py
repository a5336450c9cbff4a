"""The course of a run, as the driver sees it: deploy, send, heal, converge, take down. The same in both worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from protocol.errors import SeatrialError
from protocol.ports import ActorHandle
from scenarios.autoscaling import all_over
from scenarios.client import ClientReport
from scenarios.deploy import Service, deploy, spawn_clients, stop_components, take_down
from scenarios.faults import (
    AdminParams,
    CancelParams,
    ExportParams,
    LookParams,
    PublishParams,
    ReconcileParams,
    ScaleInParams,
    ScaleOutParams,
    SyncWeightsParams,
)
from scenarios.injector import Injector
from scenarios.load import Scenario
from scenarios.routing import Routing

_LOOK_S = 0.5


class Held(NamedTuple):
    """Something that somebody still holds. ``what``: its kind, as in ``leak.found``; ``detail``: which, for people."""

    what: str
    detail: str


class Stage(Protocol):
    """What the course of a run needs of its world beside the Backend port."""

    def held(self) -> list[Held]:
        """What is still open in the world, once everybody should be done."""
        ...

    def left(self) -> list[Held]:
        """What is still there of the scenario, once it has been taken down."""
        ...

    def observe(self, kind: str, **data: Any) -> None:
        """Record what the world sees."""
        ...

    def report_leaks(self, found: Sequence[Held]) -> None:
        """Record a ``leak.found`` for each."""
        ...

    async def opened(self, services: Mapping[str, Service]) -> list[ActorHandle]:
        """Called when the services are up: what the world puts in front of them, to be ended with them."""
        ...

    def told_driver(self, listen: Callable[[str, Any], None]) -> None:
        """From now on the injector's verbs go to ``listen(name, parameters)``, called in the driver."""
        ...


class Progress:
    """How far a run is, for the progress bar; written by the driver, read by whoever shows it."""

    __slots__ = ("phase", "sent")

    def __init__(self) -> None:
        self.phase = "deploy"
        self.sent = 0


async def conduct(
    scenario: Scenario, seed: int, stage: Stage, injector: Injector, quiet: asyncio.Event, progress: Progress
) -> tuple[ClientReport, ...]:
    """Run a scenario from beginning to end.

    Args:
        scenario: what runs.
        seed: of the workload's draws.
        stage: the world beside the Backend.
        injector: its steps begin with the workload.
        quiet: set, in the driver's loop, whenever the injector has become quiet.
        progress: kept current.

    Raises:
        DeployFailed: a service did not come up.
    """
    limits = scenario.model.limits
    services = await deploy(scenario, limits.time_limit_s)
    clients = await spawn_clients(scenario, services, seed)
    verbs: dict[asyncio.Task[None], None] = {}

    def listen(name: str, parameters: Any) -> None:
        task = asyncio.get_running_loop().create_task(_verb(name, parameters, services), name=f"verb-{name}")
        verbs[task] = None
        task.add_done_callback(lambda done: verbs.pop(done, None))

    stage.told_driver(listen)
    scalers = [service.autoscaling for service in services.values() if service.autoscaling is not None]
    for scaler in scalers:
        await scaler.begin()
    fronts = await stage.opened(services)
    progress.phase = "workload"
    injector.begin()
    reports = tuple(await asyncio.gather(*(client.run() for client in clients)))
    progress.phase = "steps"
    while not injector.quiet():
        quiet.clear()
        await quiet.wait()
    injector.end()
    progress.phase = "converge"
    await asyncio.gather(*verbs)
    if scalers:
        await _until(lambda: all_over(scalers), limits.converge_within_s)
    routing = Routing(services.values())
    if not await _until(routing.is_whole, limits.converge_within_s):
        for unheard in await routing.unheard():
            stage.observe("run.unheard", **unheard._asdict())
    for service in services.values():
        if service.operator is not None:
            if service.autoscaling is not None:
                service.operator.take_over(await service.autoscaling.left_open())
            await service.operator.snapshot("final")
        if service.publishing is not None:
            await service.publishing.operator.snapshot(limits.converge_within_s)
    progress.phase = "shutdown"
    for front in fronts:
        await front.stop()
    await stop_components(services.values())
    await _until(lambda: _nothing_held(stage), limits.converge_within_s)
    stage.report_leaks(stage.held())
    await take_down(services.values(), [*clients, *fronts])
    # A real process takes a moment to die, and Ray another to notice.
    await _until(lambda: _nothing_left(stage), limits.converge_within_s)
    stage.report_leaks(stage.left())
    return reports


async def _until(reached: Callable[[], Any], within_s: float) -> bool:
    """Wait for a condition, for so long at most. Whether it was reached; what that means is the judge's to say."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + within_s
    while not await reached():
        if loop.time() >= ends:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


async def _nothing_held(stage: Stage) -> bool:
    return not stage.held()


async def _nothing_left(stage: Stage) -> bool:
    return not stage.left()


async def _verb(name: str, parameters: Any, services: dict[str, Service]) -> None:
    try:
        if isinstance(parameters, ExportParams):
            await _service(parameters.service, services).exporter.export(parameters.version)
        elif isinstance(parameters, AdminParams):
            cells = _service(parameters.service, services).cells
            if parameters.operation == "flush":
                await asyncio.gather(*(cell.admin.flush_all() for cell in cells))
            else:
                await asyncio.gather(*(cell.admin.pause_round() for cell in cells))
        elif isinstance(parameters, PublishParams):
            publishing = _service(parameters.service, services).publishing
            assert publishing is not None  # the scenario was checked
            await publishing.operator.publish(parameters)
        elif isinstance(parameters, LookParams):
            scaler = _service(parameters.service, services).autoscaling
            assert scaler is not None  # the scenario was checked
            await scaler.look()
        elif isinstance(parameters, SyncWeightsParams | CancelParams):
            service = _service(parameters.service, services)
            assert service.operator is not None  # the scenario was checked
            if isinstance(parameters, CancelParams):
                await service.operator.cancel()
            else:
                path = str(await service.exporter.export(parameters.version))
                await service.operator.sync_weights(path, parameters)
        elif isinstance(parameters, ScaleOutParams | ScaleInParams | ReconcileParams):
            operator = _service(parameters.service, services).operator
            assert operator is not None  # the scenario was checked
            if isinstance(parameters, ReconcileParams):
                await operator.reconcile(parameters)
            else:
                out = isinstance(parameters, ScaleOutParams)
                await operator.scale("scale_out" if out else "scale_in", parameters)
        else:
            assert name == "note"  # it has been recorded with its step
    except SeatrialError:  # under faults a verb may fail; its call.done has recorded how
        return


def _service(name: str | None, services: dict[str, Service]) -> Service:
    return services[name] if name is not None else next(iter(services.values()))
