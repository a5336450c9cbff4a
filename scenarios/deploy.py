"""Puts a scenario's services up, waits for them, and takes them down. Runs in the driver, in either world."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Iterable
from typing import Any

from protocol.errors import NetworkError
from protocol.messages import EngineAddress, replica_name
from protocol.ports import ActorHandle, EngineOptions, EngineSpec, backend
from protocol.rollout.elastic import RolloutScaling
from protocol.scaling.api import DEFAULT_MODEL, ScaleApi, ScaledModel
from protocol.scaling.lifecycle import ScaleManager
from protocol.serving import determinism
from protocol.serving.admin import AdminClient
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from protocol.serving.judge import Judge
from protocol.serving.recovery import Recovery
from protocol.training.checkpoint import Exporter
from scenarios.agents import AgentClient
from scenarios.autoscaling import Autoscaling, deploy_autoscaling
from scenarios.client import LoadClient
from scenarios.cross_checks import load_class
from scenarios.http_agents import HttpAgentClient
from scenarios.judging import JudgementClient
from scenarios.load import Scenario
from scenarios.publishing import Publishing, deploy_publishing
from scenarios.rollout_run import Rollouts, deploy_rollouts
from scenarios.routing import ask, ask_of
from scenarios.scaling import ScaleOperator
from scenarios.schema import ServiceModel, TopologyModel, WorkloadModel
from scenarios.trainer import SyntheticTrainer
from scenarios.training import TrainingClient

_PROBE_S = 2.0
_LONGEST_POLL_S = 16.0


class DeployFailed(Exception):
    """A service did not come up; the text says what was waited for."""


class EngineDiedAtStart(DeployFailed):
    """An engine ended before it was ready. In the real world that is the fault of whoever set it up."""


@dataclasses.dataclass(slots=True)
class Cell:
    """A gateway with the replicas that it owns, their prober, their recovery and their admin client."""

    gateway: ActorHandle
    prober: ActorHandle
    recovery: ActorHandle
    admin: ActorHandle
    manager: ActorHandle | None = None
    scale_api: ActorHandle | None = None


_PARTS = ("scale_api", "prober", "admin", "recovery", "manager", "gateway")
"""Those of a cell, in the order in which they are stopped."""


@dataclasses.dataclass(slots=True)
class Service:
    """A service that is up."""

    name: str
    cells: list[Cell]
    exporter: ActorHandle
    trainer: ActorHandle
    replicas: list[str]
    operator: ScaleOperator | None = None
    publishing: Publishing | None = None
    rollouts: Rollouts | None = None
    autoscaling: Autoscaling | None = None
    judge: ActorHandle | None = None


def homes(topology: TopologyModel) -> dict[str, str]:
    """Replica to node: nodes are filled in order, services in the order of the file."""
    free = [float(topology.gpus_per_node)] * topology.nodes
    placed: dict[str, str] = {}
    for service, spec in topology.services.items():
        node = 0
        for number in range(spec.initial_replicas):
            if spec.gpus_per_replica:
                while node < topology.nodes - 1 and free[node] < spec.gpus_per_replica - 1e-9:
                    node += 1
                free[node] -= spec.gpus_per_replica
            else:
                node = number % topology.nodes
            placed[replica_name(service, number)] = f"node-{node}"
    return placed


async def deploy(scenario: Scenario, ready_within_s: float) -> dict[str, Service]:
    """Start every service and wait until all its replicas are routed to.

    Raises:
        DeployFailed: a replica was not ready in time.
        SeatrialError: an actor could not be spawned.
    """
    placed = homes(scenario.model.topology)
    services: dict[str, Service] = {}
    for name, spec in scenario.model.topology.services.items():
        services[name] = await _deploy_service(name, spec, placed, ready_within_s)
    return services


async def _deploy_service(name: str, spec: ServiceModel, placed: dict[str, str], ready_within_s: float) -> Service:
    port = backend()
    classes = {part: load_class(target, part) for part, target in spec.components.items()}
    trainer = await port.spawn(classes.get("trainer", SyntheticTrainer), spec.weights, name=f"trainer-{name}")
    exporter = await port.spawn(classes.get("exporter", Exporter), spec.export, trainer, name=f"exporter-{name}")
    path = await exporter.export(spec.weights.version) if spec.weights.version is not None else ""
    engine = EngineSpec(spec.engine, path, spec.gpus_per_replica, engine_options(spec))
    replicas = [replica_name(name, rank) for rank in range(spec.initial_replicas)]
    addresses = [await port.engines.launch(engine, name=replica, node=placed[replica]) for replica in replicas]
    nodes = await port.nodes()
    cells = await asyncio.gather(
        *(
            _deploy_cell(
                f"{name}-{number}", spec, classes, exporter, engine, placed, addresses[number :: spec.gateways],
                nodes[number % len(nodes)], ready_within_s,
            )
            for number in range(spec.gateways)
        )
    )  # fmt: skip
    operator = None
    cell = cells[0]
    if spec.scaling is not None and cell.scale_api is not None and cell.manager is not None:
        timeout_s = spec.scaling.api.timeout_s
        operator = ScaleOperator(name, cell.scale_api, cell.manager, tuple(replicas), timeout_s)
        operator.deployed_with(spec.scaling.rollout if spec.scaling.kind == "rollout" else spec.scaling.api)
        if spec.scaling.kind == "rollout":
            port.emit("rollout.scaled", service=name, api=cell.scale_api.name)
        await operator.snapshot("deployed")
    publishing = None
    if spec.publishing is not None:
        publishing = await deploy_publishing(
            name, spec, classes, addresses, placed, cell.gateway, cell.prober, exporter, trainer
        )  # fmt: skip
    autoscaling = None
    if spec.scaling is not None and spec.scaling.autoscaler is not None and cell.scale_api is not None:
        autoscaling = await deploy_autoscaling(
            name, spec.scaling.autoscaler, classes.get("autoscaler"), cell.scale_api
        )  # fmt: skip
    judge = None
    if spec.judge is not None:
        judge = await port.spawn(classes.get("judge", Judge), spec.judge, cell.gateway, name=f"judge-{name}")
    return Service(
        name, cells, exporter, trainer, replicas, operator=operator, publishing=publishing, autoscaling=autoscaling,
        judge=judge,
    )  # fmt: skip


def engine_options(spec: ServiceModel) -> EngineOptions | None:
    """How a service's engines are set up; None where that is left to their profile."""
    model = spec.engine_options
    if model is None:
        return None
    named = determinism.attention_backend(
        model.deterministic, model.gpu, model.attention_backend, model.instance_attention_backend
    )
    return EngineOptions(model.deterministic, named, model.gpu or "", model.random_seed, model.startup_s)


async def _deploy_cell(
    suffix: str,
    spec: ServiceModel,
    classes: dict[str, type],
    exporter: ActorHandle,
    engine: EngineSpec,
    placed: dict[str, str],
    addresses: list[EngineAddress],
    node: str,
    ready_within_s: float,
) -> Cell:
    port = backend()
    gateway = await port.spawn(classes.get("gateway", Gateway), spec.gateway, name=f"gateway-{suffix}", node=node)
    own = tuple((address.name, placed[address.name]) for address in addresses)
    scaled: dict[str, ActorHandle] = {}
    owner: dict[str, Any] = {}  # a recovery of the user's own need not know the argument where nothing is scaled
    if spec.scaling is not None and spec.scaling.kind == "rollout":
        scaled["manager"] = scaled["scale_api"] = owner["owner"] = await port.spawn(
            classes.get("scale_api", RolloutScaling), spec.scaling.rollout, spec.scaling.lifecycle, spec.admin, gateway,
            engine, suffix.rpartition("-")[0], tuple(addresses), name=f"scale-{suffix}", node=node,
        )  # fmt: skip
    elif spec.scaling is not None:
        manager = await port.spawn(
            classes.get("scale_manager", ScaleManager), spec.scaling.lifecycle, gateway, engine,
            suffix.rpartition("-")[0], tuple(addresses), name=f"manager-{suffix}", node=node,
        )  # fmt: skip
        judges: dict[str, Any] = {} if spec.judge is None else {"judges": {DEFAULT_MODEL: spec.judge}}
        about = ScaledModel(DEFAULT_MODEL, spec.engine, len(addresses), spec.gpus_per_replica)
        scaled["manager"] = owner["owner"] = manager
        scaled["scale_api"] = await port.spawn(
            classes.get("scale_api", ScaleApi), spec.scaling.api, ((about, gateway, manager),),
            name=f"scale-{suffix}", node=node, **judges,
        )  # fmt: skip
    recovery = await port.spawn(
        classes.get("recovery", Recovery), spec.recovery, spec.admin, gateway, engine, own, exporter,
        name=f"recovery-{suffix}", node=node, **owner,
    )  # fmt: skip
    await asyncio.gather(*(_admit(gateway, address, ready_within_s) for address in addresses))
    prober = await port.spawn(
        classes.get("health", HealthProber), spec.health, gateway, recovery, name=f"health-{suffix}", node=node
    )
    admin = await port.spawn(
        classes.get("admin", AdminClient), spec.admin, gateway, prober, name=f"admin-{suffix}", node=node
    )
    return Cell(gateway, prober, recovery, admin, **scaled)


async def _admit(gateway: ActorHandle, address: EngineAddress, within_s: float) -> None:
    """Wait for /ready of a replica, then have it routed to."""
    client = backend().engines.client(address)
    pause_s = 0.25
    why = ""
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    status, _ = await client.get("/ready", connect_timeout_s=_PROBE_S, read_timeout_s=_PROBE_S)
                    if status == 200:
                        break
                    why = f"/ready answered {status}"
                except NetworkError as error:
                    why = str(error)
                    if not await backend().engines.alive(address.name):
                        raise EngineDiedAtStart(f"{address.name} died while it started") from error
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_POLL_S)  # ten thousand replicas are polled here
    except TimeoutError:
        raise DeployFailed(f"{address.name} was not ready within {within_s:g} s: {why}") from None
    await gateway.add_replica(address)


async def spawn_clients(scenario: Scenario, services: dict[str, Service], seed: int) -> list[ActorHandle]:
    """The client actors of every workload, not yet running."""
    port = backend()
    spawns = []
    for number, workload in enumerate(scenario.model.workload):
        trace = None if workload.trace is None else str(scenario.trace_path(workload.trace.file))
        service = services[workload.service]
        cells = service.cells
        if workload.arrivals is not None and workload.arrivals.rollouts is not None:
            spawns.append(_deploy_rollouts(scenario, service, workload, number, seed))
            continue
        for share in range(workload.clients):
            name = f"client-{workload.service}-{number}-{share}"
            if workload.arrivals is not None and workload.arrivals.agents is not None:
                assert service.publishing is not None  # the scenario was checked
                if workload.arrivals.agents.http is not None:
                    servers = tuple(service.publishing.entrypoints)
                    spawns.append(
                        port.spawn(
                            HttpAgentClient, workload, number, share, seed, servers, service.publishing.store, name=name
                        )
                    )  # fmt: skip
                    continue
                spawns.append(
                    port.spawn(
                        AgentClient, workload, number, share, seed, service.publishing.entry,
                        service.publishing.controller, _block_tokens(scenario, workload.service), name=name,
                    )
                )  # fmt: skip
                continue
            if workload.arrivals is not None and workload.arrivals.training is not None:
                trained = services[workload.arrivals.training.rollout_service]
                admin = scenario.model.topology.services[trained.name].admin
                spawns.append(
                    port.spawn(
                        TrainingClient, workload, number, seed, cells[0].gateway, trained.cells[0].gateway,
                        trained.exporter, admin, name=name,
                    )
                )  # fmt: skip
                continue
            if workload.arrivals is not None and workload.arrivals.judgements is not None:
                config = scenario.model.topology.services[workload.service].judge
                assert service.judge is not None and config is not None  # the scenario was checked
                spawns.append(
                    port.spawn(
                        JudgementClient, workload, number, seed, service.judge, cells[0].gateway, config, name=name
                    )
                )
                continue
            own = cells[share % len(cells) :: workload.clients]
            gateways = tuple(cell.gateway for cell in own)
            blocks = _block_tokens(scenario, workload.service) if workload.phases else 0
            spawns.append(port.spawn(LoadClient, workload, number, share, seed, trace, gateways, blocks, name=name))
    return list(await asyncio.gather(*spawns))


async def _deploy_rollouts(
    scenario: Scenario, service: Service, workload: WorkloadModel, number: int, seed: int
) -> ActorHandle:
    """The operator of a service's training run, whose parts are up."""
    spec = scenario.model.topology.services[service.name]
    classes = {part: load_class(target, part) for part, target in spec.components.items()}
    assert service.publishing is not None  # the scenario was checked
    service.rollouts, operator = await deploy_rollouts(
        service.name, spec, service.publishing, workload, number, seed, classes, _block_tokens(scenario, service.name)
    )
    return operator


def _block_tokens(scenario: Scenario, service: str) -> int:
    from sim.profiles import load_profile  # prompts are cut as the simulated engine caches them, in both worlds

    return load_profile(scenario.model.topology.services[service].engine).prefix_block_tokens


async def stop_components(services: Iterable[Service]) -> None:
    """End the background work of every component."""
    stops: list[Awaitable[Any]] = []
    for service in services:
        if service.autoscaling is not None:
            stops.append(service.autoscaling.stop())
        for cell in service.cells:
            stops += [ask_of(cell, part, "stop", None) for part in _PARTS if getattr(cell, part) is not None]
        others = (*await _agents_side(service), service.exporter, service.trainer)
        stops += [ask(part, "stop", None) for part in others]
    await asyncio.gather(*stops)


async def _agents_side(service: Service) -> list[ActorHandle]:
    """Rollouts first: who trains asks those who serve."""
    rollouts = [] if service.rollouts is None else await service.rollouts.actors()
    return [*rollouts, *([] if service.publishing is None else await service.publishing.actors())]


async def take_down(services: Iterable[Service], clients: Iterable[ActorHandle]) -> None:
    """End every process of the scenario."""
    port = backend()
    handles = list(clients)
    for service in services:
        if service.autoscaling is not None:
            handles += await service.autoscaling.actors()
        if service.operator is not None:
            await service.operator.take_down()
        for cell in service.cells:
            parts: list[ActorHandle | None] = [getattr(cell, part) for part in _PARTS]
            handles += [part for part in parts if part is not None]
        handles += [*await _agents_side(service), service.exporter, service.trainer]
        handles += [] if service.judge is None else [service.judge]
        for replica in service.replicas:
            await port.engines.terminate(replica)
    for handle in handles:
        await port.kill(handle)
