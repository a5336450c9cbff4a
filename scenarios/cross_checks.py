"""What is checked of a scenario once each key is right by itself: keys that need each other, files, classes, names."""

from __future__ import annotations

import ast
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, Final

from pydantic import ValidationError

from analysis.acceptance import parse_criterion
from analysis.errors import BadInput
from protocol.messages import replica_name, service_of
from protocol.serving.settlement import RejectionPattern
from scenarios.faults import CancelParams, LookParams, PublishParams, ReconcileParams, ScaleParams, SyncWeightsParams
from scenarios.fields import did_you_mean, shortened
from scenarios.named import check_names, criterion_of
from scenarios.parts import lacking
from scenarios.schema import ScenarioModel, ServiceModel, WorkloadModel
from scenarios.steps import SELECTORS, StepModel
from scenarios.workloads.source import TRACES
from scenarios.yaml_tree import Path, Places, dotted


def check(model: ScenarioModel, trace_path: Callable[[str], pathlib.Path], places: Places) -> None:
    """Check what needs more than one key, or the world outside of the file.

    Args:
        model: the scenario.
        trace_path: where the trace that a workload names lies.
        places: of its keys, for messages.

    Raises:
        BadInput: with place, key and fix.
    """
    single = not isinstance(places.tree.data["workload"], list)
    for number, workload in enumerate(model.workload):
        _check_workload(model, trace_path, workload, ("workload",) if single else ("workload", number), places)
    nodes = _nodes(model)
    for number, link in enumerate(model.network.links):
        for key, node in (("from", link.source), ("to", link.target)):
            if node not in nodes:
                place = places.name(("network", "links", number, key))
                raise BadInput(f"{place}: unknown node {node!r}{did_you_mean(node, nodes)}")
    for number, step in enumerate(model.steps):
        _check_step(model, step, ("steps", number), places)
    check_names("steps", [step.name for step in model.steps], places)
    check_names("acceptance", [entry.get("name") for entry in model.acceptance], places)
    for number, entry in enumerate(model.acceptance):
        asked = criterion_of(entry)
        try:
            parse_criterion(asked)
        except BadInput as error:
            raise BadInput(f"{places.of(('acceptance', number, *asked))}: acceptance[{number}]: {error}") from error
    for name, service in model.topology.services.items():
        _check_topology(service, ("topology", "services", name), places)


def load_class(target: str, place: str) -> type:
    """The class behind ``module:Class``. Raises BadInput that begins with ``place``."""
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # it is the user's: its import may do anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise BadInput(
                f"{place}: cannot import {module_name!r} ({error}); run 'python -m scenarios' in its folder, install "
                "it or set PYTHONPATH"
            ) from error
        what = f"{type(error).__name__}: {error}"
        raise BadInput(f"{place}: importing {module_name!r} failed ({what}); correct the module") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise BadInput(f"{place}: {module_name} has no class {name!r}")
    return found


def _nodes(model: ScenarioModel) -> list[str]:
    return [f"node-{number}" for number in range(model.topology.nodes)]


# --- services and their workloads ---


def _check_topology(service: ServiceModel, path: Path, places: Places) -> None:
    for component, target in service.components.items():
        place = places.name((*path, "components", component))
        missing = lacking(component, load_class(target, place))
        if missing:
            raise BadInput(
                f"{place}: {target} has no 'async def' of {', '.join(missing)}, which every run asks a {component} "
                "for; docs/bring_your_own.md says what each part must have"
            )
    for key in ("entrypoint", "session_server") if service.publishing is not None else ():
        if (front := getattr(service.publishing, key)) is not None:
            try:
                RejectionPattern(front)
            except ValueError as error:
                said = str(error).removeprefix("entrypoint.")
                raise BadInput(f"{places.name((*path, 'publishing', key))}: {said}") from error
    if service.initial_replicas < service.gateways:
        raise BadInput(
            f"{places.name((*path, 'gateways'))}: {service.gateways} gateways for {service.initial_replicas} "
            "replicas; each needs one at least"
        )


def _check_service(model: ScenarioModel, name: str, path: Path, places: Places) -> None:
    services = model.topology.services
    if name not in services:
        raise BadInput(f"{places.name(path)}: unknown service {name!r}{did_you_mean(name, services)}")


def _check_workload(
    model: ScenarioModel,
    trace_path: Callable[[str], pathlib.Path],
    workload: WorkloadModel,
    path: Path,
    places: Places,
) -> None:
    _check_service(model, workload.service, (*path, "service"), places)
    if workload.trace is not None:
        _check_trace(trace_path(workload.trace.file), (*path, "trace", "file"), places)
    if workload.arrivals is None:
        return
    arrivals, service = workload.arrivals, model.topology.services[workload.service]
    path = (*path, "arrivals")
    if arrivals.training is not None:
        _check_service(model, arrivals.training.rollout_service, (*path, "training", "rollout_service"), places)
    if arrivals.judgements is not None and service.judge is None:
        raise BadInput(
            f"{places.name((*path, 'judgements'))}: service {workload.service!r} has no ingress for judgements; give "
            "it 'judge: {}' in the topology"
        )
    if arrivals.rollouts is not None:
        _check_rollouts(model, workload, (*path, "rollouts"), places)
    if arrivals.agents is not None:
        if service.publishing is None:
            raise BadInput(
                f"{places.name((*path, 'agents'))}: service {workload.service!r} has no entrypoints; give it "
                "'publishing: {}' in the topology"
            )
        if arrivals.agents.http is not None and service.publishing.session_server is None:
            raise BadInput(
                f"{places.name((*path, 'agents', 'http'))}: service {workload.service!r} has no session servers; give "
                "it 'publishing: {session_server: {}}' in the topology"
            )


def _check_rollouts(model: ScenarioModel, workload: WorkloadModel, path: Path, places: Places) -> None:
    service = model.topology.services[workload.service]
    if service.rollouts is None or service.publishing is None or not service.publishing.gates:
        missing = "rollouts: {}" if service.rollouts is None else "publishing: {}"
        raise BadInput(
            f"{places.name(path)}: service {workload.service!r} needs gates, and somebody who consumes rollouts; give "
            f"it {missing!r} in the topology"
        )
    others = [one for one in model.workload if one.service == workload.service and one.arrivals is not None]
    if sum(one.arrivals is not None and one.arrivals.rollouts is not None for one in others) > 1:
        place = places.name(path)
        raise BadInput(f"{place}: service {workload.service!r} has two workloads of rollouts; it has one learner")


def _check_trace(found: pathlib.Path, path: Path, places: Places) -> None:
    if not os.path.isfile(found):
        shipped = ", ".join(path.name for path in sorted(TRACES.iterdir()))
        raise BadInput(
            f"{places.name(path)}: no trace at {found}; give a path from the scenario's folder (after --set from the "
            f"current one), or one of those shipped: {shipped}"
        )


# --- steps ---


_NEEDS: Final[tuple[tuple[tuple[type, ...], Callable[[ServiceModel], bool], str], ...]] = (
    (
        (ScaleParams, ReconcileParams),
        lambda service: service.scaling is not None,
        "is not scaled; give it 'scaling: {}' in the topology",
    ),
    (
        (SyncWeightsParams, CancelParams),
        lambda service: service.scaling is not None and service.scaling.kind == "rollout",
        "has no scaling of kind rollout; give it one in the topology",
    ),
    (
        (LookParams,),
        lambda service: service.scaling is not None and service.scaling.autoscaler is not None,
        "has no autoscaler; give it one under 'scaling' in the topology",
    ),
    (
        (PublishParams,),
        lambda service: service.publishing is not None and service.publishing.gates,
        "has no gates; give it 'publishing: {}' in the topology",
    ),
)
"""Parameters of verbs, what their service must have, and what is said of one that has it not."""


def _check_step(model: ScenarioModel, step: StepModel, path: Path, places: Places) -> None:
    parameters = _parameters(step, path, places)
    services = list(model.topology.services)
    if step.fault is None and hasattr(parameters, "service"):
        named: str | None = parameters.service
        if named is not None:
            _check_service(model, named, (*path, "with", "service"), places)
        elif len(services) > 1:
            place = f"{places.of(path)}: {dotted(path)}.with.service"
            raise BadInput(f"{place}: the key is missing; the services are {', '.join(services)}")
        service = named if named is not None else services[0]
        for verbs, has, without in _NEEDS:
            if isinstance(parameters, verbs) and not has(model.topology.services[service]):
                raise BadInput(f"{places.name((*path, 'do'))}: service {service!r} {without}")
    if step.target is not None:
        _check_target(model, step, (*path, "target"), places)


def _parameters(step: StepModel, path: Path, places: Places) -> Any:
    """What stands under ``with``, as the model of its verb or fault."""
    try:
        return step.parameters()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inner = (*path, "with", *first["loc"])
        if first["type"] == "unknown_key":
            key = ast.literal_eval(first["ctx"]["key"])
            inner = (*inner, key)
            raise BadInput(f"{places.name(inner)}: unknown key{first['ctx']['fix']}") from error
        if first["type"] == "missing":
            raise BadInput(f"{places.of(path)}: {dotted(inner)}: the key is missing; '{step.do}' needs it") from error
        message = str(first["msg"]).replace("Input should be", "must be")
        raise BadInput(f"{places.name(inner)}: {message} (given: {shortened(first.get('input'))})") from error


def _check_target(model: ScenarioModel, step: StepModel, path: Path, places: Places) -> None:
    target = step.target
    assert target is not None
    if target.service is not None:
        _check_service(model, target.service, (*path, "service"), places)
    nodes = _nodes(model)
    known = process_names(model)
    if target.process is not None:
        names = (*SELECTORS, *known)
        if target.process not in names:
            near = did_you_mean(target.process, names)
            raise BadInput(f"{places.name(path)}: unknown target {target.process!r}{near}")
        part = getattr(step.parameters(), "part", "main")
        engines_only = part != "main" or (step.fault is not None and step.fault.engines_only)
        if engines_only and target.process not in SELECTORS and not _is_replica(model, target.process):
            what = step.do if part == "main" else f"{step.do} of the {part}"
            raise BadInput(f"{places.name(path)}: {target.process!r} is no replica; {what} befalls replicas alone")
        if target.process in SELECTORS and target.service is None and len(model.topology.services) > 1:
            raise BadInput(f"{places.name(path)}: several services; add 'service' to the target")
        if target.process == "replica_of_trigger" and step.when is None:
            raise BadInput(f"{places.name(path)}: 'replica_of_trigger' goes with 'when'")
    elif target.node is not None and target.node not in nodes:
        raise BadInput(f"{places.name(path)}: unknown node {target.node!r}{did_you_mean(target.node, nodes)}")
    elif target.link is not None:
        ends = ("*", *SELECTORS, *nodes, *known)
        for key, end in (("from", target.link.source), ("to", target.link.target)):
            if end not in ends and "*" not in end:
                place = places.name((*path, "link", key))
                raise BadInput(f"{place}: unknown end of a link {end!r}{did_you_mean(end, ends)}")


def _is_replica(model: ScenarioModel, name: str) -> bool:
    return service_of(name) in model.topology.services


_MOST_NAMED = 1000  # elastic replicas that a target may name


def process_names(model: ScenarioModel) -> list[str]:
    """The actors and replicas of a scenario's services, as ``scenarios/deploy.py`` names them."""
    names: list[str] = []
    for service, spec in model.topology.services.items():
        names += [f"gateway-{service}-{number}" for number in range(spec.gateways)]
        names += [f"health-{service}-{number}" for number in range(spec.gateways)]
        names += [f"recovery-{service}-{number}" for number in range(spec.gateways)]
        names += [f"admin-{service}-{number}" for number in range(spec.gateways)]
        names += [f"{part}-{service}" for part in ("exporter", "trainer")]
        replicas = spec.initial_replicas
        if spec.publishing is not None:
            names += [f"{part}-{service}" for part in ("affinity", "controller", "publisher")]
            names += [f"entrypoint-{service}-{number}" for number in range(spec.initial_replicas)]
            if spec.publishing.gates:
                names += [f"gate-{service}-{number}" for number in range(spec.initial_replicas)]
            if spec.publishing.session_server is not None:
                names.append(f"traces-{service}")
            if spec.publishing.proxy is not None:
                names += [f"proxy-{service}", f"registrations-{service}"]
            if spec.publishing.update.transport != "disk":
                names += [f"rendezvous-{service}"]
                names += [f"rank-{service}-{number}" for number in range(spec.publishing.update.ranks)]
        if spec.judge is not None:
            names.append(f"judge-{service}")
        if spec.rollouts is not None:
            names += [f"{part}-{service}" for part in ("traces", "buffer", "producer", "learner", "evaluator")]
            names += [f"trainworker-{service}-{rank}" for rank in range(spec.rollouts.ranks)]
            clients = [one.clients for one in model.workload if one.service == service]
            names += [f"agent-{service}-{share}" for share in range(max(clients, default=0))]
        if spec.scaling is not None:
            names += [f"scale-{service}-0"]
            if spec.scaling.kind == "judge":  # the manager of rollout replicas is their API itself
                names += [f"manager-{service}-0"]
            # A rank is used once: every scale-out may bring new names.
            asked = [step.with_.get("num_replicas") for step in model.steps if step.do == "scale_out"]
            replicas += sum(min(number, _MOST_NAMED) for number in asked if type(number) is int)
            if spec.scaling.autoscaler is not None:
                names += [f"autoscaler-{service}", f"front-{service}"]
                replicas += min(spec.scaling.autoscaler.max_engines, _MOST_NAMED)
        names += [replica_name(service, rank) for rank in range(replicas)]
    for number, workload in enumerate(model.workload):
        names += [f"client-{workload.service}-{number}-{client}" for client in range(workload.clients)]
    return names
