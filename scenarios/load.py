"""Reads a scenario: by catalog name or file, with ``--set`` changes, and says in one line what is wrong with it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from analysis.acceptance import parse_criterion
from analysis.errors import BadInput
from protocol.serving.settlement import RejectionPattern
from scenarios.faults import CancelParams, LookParams, PublishParams, ReconcileParams, ScaleParams, SyncWeightsParams
from scenarios.fields import did_you_mean
from scenarios.schema import ScenarioModel, WorkloadModel
from scenarios.steps import SELECTORS, StepModel
from scenarios.yaml_tree import YamlTree

HERE = pathlib.Path(__file__).resolve().parent
CATALOG = HERE / "catalog"
TRACES = HERE / "traces"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A checked scenario. ``text`` is the file after ``--set``; ``folder`` is where its relative paths start."""

    model: ScenarioModel
    text: str
    source: str
    folder: pathlib.Path
    place: Callable[[Sequence[str | int]], str] = dataclasses.field(compare=False, repr=False)
    """``file:line: key`` of a path of keys: how an error begins."""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def trace_path(self, file: str) -> pathlib.Path:
        """Where a trace lies: an absolute path, beside the scenario file, or shipped with the package."""
        for folder in (self.folder, TRACES):
            if os.path.isfile(folder / file):  # pathlib's raises where a name is too long
                return folder / file
        return self.folder / file


def catalog() -> Iterator[pathlib.Path]:
    """The files of the catalog, by name."""
    yield from sorted(CATALOG.glob("*.yaml"))


def find(name_or_file: str) -> pathlib.Path:
    """The file of a scenario.

    Raises:
        BadInput: no scenario of the catalog has the name, and no file either.
    """
    shipped = {path.stem: path for path in catalog()}
    if name_or_file in shipped:
        return shipped[name_or_file]
    path = pathlib.Path(name_or_file)
    if path.suffix in (".yaml", ".yml") or "/" in name_or_file:
        return path
    names = list(shipped)
    raise BadInput(f"unknown scenario {name_or_file!r}{did_you_mean(name_or_file, names)}; or name a .yaml file")


def load(name_or_file: str, changes: Sequence[str] = ()) -> Scenario:
    """Read and check a scenario.

    Args:
        name_or_file: a name of the catalog, or a path.
        changes: ``key.inner=value`` as given to ``--set``; values are YAML, list items are numbers from 0.

    Raises:
        BadInput: with file, line, key and fix.
    """
    path = find(name_or_file)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file; 'python -m scenarios list' names the scenarios") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is no UTF-8 text (byte {error.start + 1})") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    return parse(text, _shown(path), path.resolve().parent, changes, pathlib.Path.cwd())


def parse(
    text: str, source: str, folder: pathlib.Path, changes: Sequence[str] = (), here: pathlib.Path | None = None
) -> Scenario:
    """Check the text of a scenario, whose relative paths start at ``folder``, those of the changes at ``here``.

    Raises:
        BadInput: as :func:`load`.
    """
    tree = YamlTree(text, source)
    changed: list[tuple[tuple[str | int, ...], str]] = []
    for change in changes:
        changed.append((_set(tree.data, change), change))
        if here is not None and here.resolve() != folder.resolve():
            _traces_from(here, tree.data, changed[-1][0])
            _given_engines_from(here, folder, tree.data, changed[-1][0])
    if changes:
        text = yaml.safe_dump(tree.data, sort_keys=False, allow_unicode=True, width=120)
    places = _Places(tree, changed)
    try:
        model = ScenarioModel.model_validate(tree.data)
    except ValidationError as error:
        raise BadInput(_explain(error, places)) from error
    scenario = Scenario(_engines_from(folder, model), text, source, folder, places.name)
    _check(scenario, places)
    return scenario


class _Places:
    """Where a key stands: a line of the file, or the ``--set`` that gave it."""

    def __init__(self, tree: YamlTree, changed: list[tuple[tuple[str | int, ...], str]]) -> None:
        self.tree = tree
        self.changed = changed

    def of(self, path: Sequence[str | int]) -> str:
        for where, change in self.changed:
            if tuple(path[: len(where)]) == where:
                return f"--set {change}"
        return self.tree.place(path)

    def name(self, path: Sequence[str | int]) -> str:
        """Place and key: how an error begins."""
        return f"{self.of(path)}: {dotted(path)}"


def _explain(error: ValidationError, places: _Places) -> str:
    """The first error as one line: place, key, what is wrong and what to write instead."""
    first = error.errors(include_url=False)[0]
    kind, given = first["type"], first.get("input")
    path = places.tree.known_path(first["loc"])
    message = str(first["msg"])
    if kind == "unknown_key":
        key = str(first["ctx"]["key"]).strip("'")
        return f"{places.of((*path, key))}: {dotted((*path, key))}: unknown key{first['ctx']['fix']}"
    if kind == "no_switch":
        at = (*path, str(first["ctx"]["key"]).strip("'"))
        return f"{places.of(at)}: {dotted(at)}: is no switch; write a number or a text, not true or false"
    if kind == "missing":
        missing = (*path, str(first["loc"][-1]))
        return f"{places.of(path)}: {dotted(missing)}: the key is missing; add it"
    if kind in ("greater_than_equal", "greater_than") and isinstance(given, int | float) and given < 0:
        message = "must not be negative"
    elif kind in ("model_type", "dict_type"):
        message = "must be a mapping of keys"
    else:
        message = message.replace("Input should be", "must be")
    shown = "" if isinstance(given, dict | list) or kind in _SAID else f" (given: {_short(given)})"
    return f"{places.of(path)}: {dotted(path) or 'scenario'}: {message}{shown}"


_SAID = ("unknown_word", "name", "component", "unit_in_value", "number_as_text", "not_finite", "exactly_one")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def dotted(path: Sequence[str | int]) -> str:
    """``steps[2].when.event``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


# --- what needs more than one key, or the world outside of the file ---


def _check(scenario: Scenario, places: _Places) -> None:
    model = scenario.model
    single = not isinstance(places.tree.data["workload"], list)
    for number, workload in enumerate(model.workload):
        where: tuple[str | int, ...] = ("workload",) if single else ("workload", number)
        _check_service(model, workload.service, (*where, "service"), places)
        _check_trace(scenario, workload, (*where, "trace", "file"), places)
        if workload.arrivals is not None and workload.arrivals.training is not None:
            at_training = (*where, "arrivals", "training", "rollout_service")
            _check_service(model, workload.arrivals.training.rollout_service, at_training, places)
        judged = workload.arrivals is not None and workload.arrivals.judgements is not None
        if judged and model.topology.services[workload.service].judge is None:
            at_arrivals = places.name((*where, "arrivals", "judgements"))
            raise BadInput(
                f"{at_arrivals}: service {workload.service!r} has no ingress for judgements; give it 'judge: {{}}' in "
                "the topology"
            )
        if workload.arrivals is not None and workload.arrivals.rollouts is not None:
            _check_rollouts(model, workload, (*where, "arrivals", "rollouts"), places)
        agents = workload.arrivals is not None and workload.arrivals.agents is not None
        publishing = model.topology.services[workload.service].publishing
        if agents and workload.arrivals is not None and workload.arrivals.agents is not None:
            speaks_http = workload.arrivals.agents.http is not None
            if speaks_http and publishing is not None and publishing.session_server is None:
                place = places.name((*where, "arrivals", "agents", "http"))
                raise BadInput(
                    f"{place}: service {workload.service!r} has no session servers; give it "
                    "'publishing: {session_server: {}}' in the topology"
                )
        if agents and model.topology.services[workload.service].publishing is None:
            at_arrivals = places.name((*where, "arrivals", "agents"))
            raise BadInput(
                f"{at_arrivals}: service {workload.service!r} has no entrypoints; give it 'publishing: {{}}' in the "
                "topology"
            )
    nodes = [f"node-{number}" for number in range(model.topology.nodes)]
    for number, link in enumerate(model.network.links):
        for key, node in (("from", link.source), ("to", link.target)):
            if node not in nodes:
                place = places.name(("network", "links", number, key))
                raise BadInput(f"{place}: unknown node {node!r}{did_you_mean(node, nodes)}")
    for number, step in enumerate(model.steps):
        _check_step(model, step, ("steps", number), places)
    for number, entry in enumerate(model.acceptance):
        try:
            parse_criterion(entry)
        except BadInput as error:
            raise BadInput(f"{places.of(('acceptance', number, *entry))}: acceptance[{number}]: {error}") from error
    for name, service in model.topology.services.items():
        at: tuple[str | int, ...] = ("topology", "services", name)
        for component, target in service.components.items():
            load_class(target, places.name((*at, "components", component)))
        publishing = service.publishing
        for key in ("entrypoint", "session_server") if publishing is not None else ():
            if (front := getattr(publishing, key)) is not None:
                try:
                    RejectionPattern(front)
                except ValueError as error:
                    said = str(error).removeprefix("entrypoint.")
                    raise BadInput(f"{places.name((*at, 'publishing', key))}: {said}") from error
        if service.initial_replicas < service.gateways:
            raise BadInput(
                f"{places.name((*at, 'gateways'))}: {service.gateways} gateways for {service.initial_replicas} "
                "replicas; each needs one at least"
            )


def load_class(target: str, place: str) -> type:
    """The class behind ``module:Class``. Raises BadInput that begins with ``place``."""
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(f"{place}: cannot import {module_name!r} ({error}); install it or set PYTHONPATH") from error
    except (Exception, SystemExit) as error:  # it is the user's: its import may do anything
        what = f"{type(error).__name__}: {error}"
        raise BadInput(f"{place}: importing {module_name!r} failed ({what}); correct the module") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise BadInput(f"{place}: {module_name} has no class {name!r}")
    return found


def _check_service(model: ScenarioModel, name: str, path: tuple[str | int, ...], places: _Places) -> None:
    services = model.topology.services
    if name not in services:
        raise BadInput(f"{places.name(path)}: unknown service {name!r}{did_you_mean(name, services)}")


def _check_rollouts(
    model: ScenarioModel, workload: WorkloadModel, path: tuple[str | int, ...], places: _Places
) -> None:
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


def _check_trace(scenario: Scenario, workload: WorkloadModel, path: tuple[str | int, ...], places: _Places) -> None:
    if workload.trace is None:
        return
    found = scenario.trace_path(workload.trace.file)
    if not os.path.isfile(found):
        shipped = ", ".join(path.name for path in sorted(TRACES.iterdir()))
        raise BadInput(
            f"{places.name(path)}: no trace at {found}; give a path from the scenario's folder (after --set from the "
            f"current one), or one of those shipped: {shipped}"
        )


def _check_step(model: ScenarioModel, step: StepModel, path: tuple[str | int, ...], places: _Places) -> None:
    try:
        parameters = step.parameters()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inner = (*path, "with", *first["loc"])
        if first["type"] == "unknown_key":
            key = str(first["ctx"]["key"]).strip("'")
            inner = (*inner, key)
            raise BadInput(f"{places.name(inner)}: unknown key{first['ctx']['fix']}") from error
        if first["type"] == "missing":
            raise BadInput(f"{places.of(path)}: {dotted(inner)}: the key is missing; '{step.do}' needs it") from error
        message = str(first["msg"]).replace("Input should be", "must be")
        raise BadInput(f"{places.name(inner)}: {message} (given: {_short(first.get('input'))})") from error
    services = list(model.topology.services)
    named = getattr(parameters, "service", None)
    if step.fault is None and hasattr(parameters, "service"):
        if named is not None:
            _check_service(model, named, (*path, "with", "service"), places)
        elif len(services) > 1:
            place = f"{places.of(path)}: {dotted(path)}.with.service"
            raise BadInput(f"{place}: the key is missing; the services are {', '.join(services)}")
    if isinstance(parameters, ScaleParams | ReconcileParams):
        service = named if named is not None else services[0]
        if model.topology.services[service].scaling is None:
            at = places.name((*path, "do"))
            raise BadInput(f"{at}: service {service!r} is not scaled; give it 'scaling: {{}}' in the topology")
    if isinstance(parameters, SyncWeightsParams | CancelParams):
        service = named if named is not None else services[0]
        scaling = model.topology.services[service].scaling
        if scaling is None or scaling.kind != "rollout":
            at = places.name((*path, "do"))
            raise BadInput(f"{at}: service {service!r} has no scaling of kind rollout; give it one in the topology")
    if isinstance(parameters, LookParams):
        service = named if named is not None else services[0]
        scaling = model.topology.services[service].scaling
        if scaling is None or scaling.autoscaler is None:
            at = places.name((*path, "do"))
            raise BadInput(f"{at}: service {service!r} has no autoscaler; give it one under 'scaling' in the topology")
    if isinstance(parameters, PublishParams):
        service = named if named is not None else services[0]
        publishing = model.topology.services[service].publishing
        if publishing is None or not publishing.gates:
            at = places.name((*path, "do"))
            raise BadInput(f"{at}: service {service!r} has no gates; give it 'publishing: {{}}' in the topology")
    if step.target is not None:
        _check_target(model, step, (*path, "target"), places)


def _check_target(model: ScenarioModel, step: StepModel, path: tuple[str | int, ...], places: _Places) -> None:
    target = step.target
    assert target is not None
    if target.service is not None:
        _check_service(model, target.service, (*path, "service"), places)
    nodes = [f"node-{number}" for number in range(model.topology.nodes)]
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
    service, _, rank = name.rpartition("-")
    return rank.isdigit() and service in model.topology.services


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
        names += [f"{service}-{number}" for number in range(replicas)]
    for number, workload in enumerate(model.workload):
        names += [f"client-{workload.service}-{number}-{client}" for client in range(workload.clients)]
    return names


# --- --set ---


def _set(data: dict[str, Any], change: str) -> tuple[str | int, ...]:
    key, equals, value_text = change.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise BadInput(f"--set {change}: write it as key.inner=value")
    value = YamlTree(value_text, f"--set {change}", mapping=False).data if value_text.strip() else ""
    path: list[str | int] = []
    node: Any = data
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(node, list):
            if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(node)):
                have = f"items 0 to {len(node) - 1}" if node else "no items"
                raise BadInput(f"--set {change}: {dotted(path)} has {have}; {part!r} is none")
            step: str | int = int(part)
        elif isinstance(node, dict):
            step = part
        else:
            raise BadInput(f"--set {change}: {dotted(path)} is a plain value; it has no key {part!r}")
        path.append(step)
        if last:
            node[step] = value
        else:
            if isinstance(node, dict) and step not in node:
                node[step] = {}
            node = node[step]
    return tuple(path)


def _traces_from(here: pathlib.Path, data: dict[str, Any], changed: Sequence[str | int]) -> None:
    """Make the traces in what was changed paths from ``here``, but for names of shipped ones that are not there."""
    workloads = data.get("workload")
    for number, workload in enumerate(workloads if isinstance(workloads, list) else [workloads]):
        where = ("workload", *([number] if isinstance(workloads, list) else []), "trace", "file")
        trace = workload.get("trace") if isinstance(workload, dict) else None
        file = trace.get("file") if isinstance(trace, dict) else None
        if isinstance(trace, dict) and isinstance(file, str) and tuple(changed) == where[: len(changed)]:
            if os.path.isfile(here / file) or not os.path.isfile(TRACES / file):
                trace["file"] = str(here / file)


def _is_path(engine: object) -> bool:
    """Whether it is a relative path of an engine profile, not the name of a shipped one."""
    found = isinstance(engine, str) and ("/" in engine or engine.endswith((".yaml", ".yml")))
    return found and not os.path.isabs(str(engine))


def _relative(path: pathlib.Path, start: pathlib.Path) -> str:
    found = os.path.relpath(path, start)
    return found if _is_path(found) else f"./{found}"


def _given_engines_from(
    here: pathlib.Path, folder: pathlib.Path, data: dict[str, Any], changed: Sequence[str | int]
) -> None:
    """As traces; made a path from ``folder``, for evidence names profiles and is the same wherever the package lies."""
    topology = data.get("topology")
    services = topology.get("services") if isinstance(topology, dict) else None
    for name, service in services.items() if isinstance(services, dict) else ():
        where = ("topology", "services", name, "engine")
        if isinstance(service, dict) and _is_path(service.get("engine")) and tuple(changed) == where[: len(changed)]:
            service["engine"] = _relative(here / service["engine"], folder)


def _engines_from(folder: pathlib.Path, model: ScenarioModel) -> ScenarioModel:
    """Engine profiles are named by paths from ``folder``; what reads them starts at the current one."""
    services = {
        name: service.model_copy(update={"engine": _relative(folder / service.engine, pathlib.Path.cwd())})
        if _is_path(service.engine)
        else service
        for name, service in model.topology.services.items()
    }
    return model.model_copy(update={"topology": model.topology.model_copy(update={"services": services})})


def _shown(path: pathlib.Path) -> str:
    """A path as short as it can be said."""
    try:
        return str(path.resolve().relative_to(pathlib.Path.cwd()))
    except ValueError:
        return str(path)
