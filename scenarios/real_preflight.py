"""Everything that can be found missing or impossible before a real run starts anything: all of it at once."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from analysis.errors import BadInput
from protocol.messages import service_of
from scenarios.faults import ScaleOutParams
from scenarios.load import Scenario
from scenarios.real_scenario import for_real
from scenarios.runner import TraceFacts, preflight
from scenarios.schema import ServiceModel
from scenarios.steps import StepModel

if TYPE_CHECKING:
    from real.engines.settings import EngineSettings

EngineKind = Literal["emulated", "sglang-cpu", "sglang"]

# Measured on Python 3.11, in MB: what one engine takes beside its weights, its owner on Ray included; one actor; Ray.
_ENGINE_MB = {"emulated": 190, "sglang-cpu": 1600, "sglang": 4000}
_ACTOR_MB = 95
_NODE_MB = 320
_HEAD_MB = 250
_PROBE_S = 60


@dataclasses.dataclass(frozen=True)
class RealOptions:
    """What the command line says of the real world; empty: nothing."""

    engine: EngineKind | None = None
    engine_python: str = ""
    model: str = ""
    ray: str = ""
    """Address of a cluster that somebody else has started; empty: the run starts its own."""
    http_port: int | None = None
    """Where the control APIs of its scaled services listen; 0: any free port, None: nowhere."""
    engine_arguments: tuple[str, ...] = ()
    """Options for every SGLang, as a person writes them: NAME or NAME=VALUE."""


@dataclasses.dataclass(frozen=True)
class RealPlan:
    """A real run that can begin: everything it needs is there."""

    scenario: Scenario
    traces: list[TraceFacts]
    engines: EngineSettings
    ray: str
    gpus: tuple[tuple[float, str | None], ...]
    """Of each node: how many GPUs, and which devices where they are real ones."""
    http_port: int | None = None


def plan(scenario: Scenario, options: RealOptions) -> RealPlan:
    """Look at everything, start nothing.

    Raises:
        BadInput: one line for everything that is missing or impossible.
    """
    devices = visible_gpus()
    real = scenario.model.real
    chosen = options.engine or (real.engine if real is not None else None) or ("sglang" if devices else None)
    if chosen is None:
        raise BadInput(
            "--backend real: no GPU is visible here. Two kinds of engines work without one: --engine emulated (the "
            "cost model in real time) and --engine sglang-cpu (genuine SGLang with a tiny model)"
        )
    kind: EngineKind = chosen
    scenario = for_real(scenario, kind)
    problems = [*_ray_problems(options), *_impossible(scenario, options)]
    if not options.ray:  # the memory of a cluster's machines is not this one's
        problems += _short_of_memory(scenario, kind)
    model = options.model or (real.model if real is not None else "")
    settings = None
    try:
        settings = _engines(scenario, kind, options, model)
    except _Missing as missing:
        problems.append(str(missing))
    gpus: list[tuple[float, str | None]] = [
        (float(scenario.model.topology.gpus_per_node), None)
    ] * scenario.model.topology.nodes
    if kind == "sglang" and not options.ray:
        try:
            gpus = _shared_out(scenario, devices)
        except _Missing as missing:
            problems.append(str(missing))
    traces: list[TraceFacts] = []
    try:
        traces = preflight(scenario, "real")
    except BadInput as error:
        problems.append(str(error))
    if problems or settings is None:
        raise BadInput("\n       ".join([f"--backend real --engine {kind}: cannot run {scenario.name}", *problems]))
    return RealPlan(scenario, traces, settings, options.ray, tuple(gpus), options.http_port)


class _Missing(Exception):
    """Something that an engine needs; the text says what, and how to get it."""


def visible_gpus() -> list[str]:
    """The GPUs that an engine started here would see, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [device.strip() for device in given.split(",") if device.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.split() if listed.returncode == 0 else []


# --- Ray ---


def _ray_problems(options: RealOptions) -> Iterator[str]:
    from real.cluster import folder_problem, head_problem, version_problem

    missing = version_problem()
    if missing:
        yield missing
    if importlib.util.find_spec("aiohttp") is None:
        yield "aiohttp is not installed; pip install -e '.[real]'"
    if options.ray:
        if not missing and (problem := head_problem(options.ray)):
            yield f"--ray {options.ray}: {problem}"
    try:
        temporary = tempfile.gettempdir()
    except OSError as error:
        yield f"{error.strerror or error}; set TMPDIR to a folder that can be written"
        return
    if not options.ray and (problem := folder_problem(os.path.join(temporary, "seatrial-12345678"))):
        yield problem


# --- the scenario ---


def _awaited(step: StepModel) -> Iterator[tuple[tuple[str, ...], str]]:
    """The kinds of event that a step waits for, and where in its ``when`` they stand."""
    if step.when is not None:
        yield ("event",), step.when.event
        if step.when.after is not None:
            yield ("after", "event"), step.when.after.event


def _impossible(scenario: Scenario, options: RealOptions) -> Iterator[str]:
    from real.breakpoints import deaf_to

    model = scenario.model
    for number, step in enumerate(model.steps):
        if step.fault is not None and (why := _fault_problem(step, options, model.topology.nodes)):
            yield f"{scenario.place(('steps', number, 'do'))}: the fault {step.do!r}: {why}"
        for where, event in _awaited(step):
            if deaf_to([event]):
                place = scenario.place(("steps", number, "when", *where))
                yield f"{place}: no process of the real world emits {event!r}; the step would wait for ever"
    yield from _no_ranks(scenario)
    if options.http_port is not None:
        yield from _http_problems(scenario, options.http_port)
    for number in range(len(model.network.links)):
        yield f"{scenario.place(('network', 'links', number))}: the real network is what it is; use a 'latency' fault"
    for key in ("link_latency_s", "loopback_latency_s"):
        if getattr(model.network, key) is not None:
            yield f"{scenario.place(('network', key))}: the real network is what it is; use a 'latency' fault"


def _http_problems(scenario: Scenario, port: int) -> Iterator[str]:
    if not any(service.scaling is not None for service in scenario.model.topology.services.values()):
        yield "--http: no service of this scenario has a control API; give one topology.services.NAME.scaling"
    with socket.socket() as wanted:
        wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            wanted.bind(("127.0.0.1", port))
        except OSError as error:
            yield f"--http {port}: cannot listen there ({error.strerror or error}); 0 takes any free port"


def _no_ranks(scenario: Scenario) -> Iterator[str]:
    for name, service in scenario.model.topology.services.items():
        transport = "disk" if service.publishing is None else service.publishing.update.transport
        if transport != "disk":
            place = scenario.place(("topology", "services", name, "publishing", "update", "transport"))
            yield f"{place}: {transport!r} needs training ranks beside the engines, which no real run has; use 'disk'"


def _fault_problem(step: StepModel, options: RealOptions, nodes: int) -> str:
    """Why the real world cannot do a fault; empty when it can."""
    from real.faults.refusals import AskedFault, why_not

    assert step.fault is not None
    if "real" not in step.fault.worlds:
        return "the real world cannot do it"
    asked = AskedFault(step.do, step.parameters().model_dump(), None if step.target is None else step.target.node)
    return why_not(asked, nodes=nodes, own_cluster=not options.ray)


def _short_of_memory(scenario: Scenario, kind: EngineKind) -> Iterator[str]:
    model = scenario.model
    replicas = sum(_most_replicas(scenario, name) for name in model.topology.services)
    actors = sum(_actors(service) for service in model.topology.services.values())
    actors += sum(load.clients for load in model.workload)
    wanted = _HEAD_MB + model.topology.nodes * _NODE_MB + actors * _ACTOR_MB + replicas * _ENGINE_MB[kind]
    have = _available_mb()
    if wanted > have:
        yield (
            f"topology: {replicas} {kind} replicas at most, {actors} actors and {model.topology.nodes} Ray nodes take "
            f"about {wanted / 1000:.1f} GB of memory, {have / 1000:.1f} GB are free; run fewer, or use --backend sim"
        )


def _most_replicas(scenario: Scenario, name: str) -> int:
    """How many replicas of a service there may be at a time: at first, after a step, or by its autoscaler."""
    topology = scenario.model.topology
    service = topology.services[name]
    counts = [service.initial_replicas]
    for step in scenario.model.steps:
        asked = step.parameters() if step.do == "scale_out" else None
        if isinstance(asked, ScaleOutParams) and (asked.service or next(iter(topology.services))) == name:
            counts.append(asked.num_replicas)
    if service.scaling is not None and service.scaling.autoscaler is not None:
        counts.append(service.scaling.autoscaler.max_engines)
    return max(counts)


def _actors(service: ServiceModel) -> int:
    """How many ``scenarios.deploy`` starts for a service."""
    count = 2 + 4 * service.gateways
    if service.scaling is not None:
        count += 3 + 2 * (service.scaling.autoscaler is not None)
    if service.publishing is not None:
        count += 3 + service.initial_replicas * (1 + service.publishing.gates)
        count += 2 * (service.publishing.proxy is not None)
        if service.publishing.update.transport != "disk":
            count += 1 + service.publishing.update.ranks
    if service.rollouts is not None:  # its agents are clients
        count += 5 + service.rollouts.ranks + (service.rollouts.evaluator is not None)
    return count


def _available_mb() -> float:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("inf")


# --- engines ---


def _engines(scenario: Scenario, kind: EngineKind, options: RealOptions, model: str) -> EngineSettings:
    """Raises _Missing."""
    from real.engines.settings import EngineSettings
    from scenarios.workloads.mooncake import BLOCK_TOKENS

    if kind == "emulated":
        python = options.engine_python or sys.executable
        _ask(python, "simpy", "it is the environment of the project itself, so leave out --engine-python")
        if options.engine_arguments:
            raise _Missing("--engine-argument: an emulated engine has no options of SGLang; its profile says how it is")
        if model:
            raise _Missing(f"model {model!r}: an emulated engine has none; it has the profile of its service")
        real = scenario.model.real
        startup_s = None if real is None else real.startup_s
        arguments = () if startup_s is None else ("--startup-s", f"{startup_s:g}")
        return EngineSettings("emulated", python, arguments=arguments, block_tokens=BLOCK_TOKENS)
    python = _sglang_python(kind, options)
    exports = all(service.weights.version is not None for service in scenario.model.topology.services.values())
    if model and (model.startswith((".", "/")) or kind == "sglang-cpu") and not os.path.isdir(model):
        raise _Missing(f"model {model}: no such folder; give one in Hugging Face layout")
    if not model and not exports and kind == "sglang":
        raise _Missing("no model: give --real-model (a name or a folder), or export one (weights.version)")
    return EngineSettings(kind, python, os.path.abspath(model) if os.path.isdir(model) else model,
                          arguments=_arguments(kind, python, options), block_tokens=BLOCK_TOKENS)  # fmt: skip


def _arguments(kind: EngineKind, python: str, options: RealOptions) -> tuple[str, ...]:
    from real.engines.sglang_flags import BadArgument, check_arguments, named_argument

    try:
        arguments = tuple(named_argument(text) for text in options.engine_arguments)
        if arguments:
            check_arguments(python, arguments, cpu=kind == "sglang-cpu")
    except BadArgument as error:
        raise _Missing(f"--engine-argument: {error}") from error
    return arguments


def _sglang_python(kind: EngineKind, options: RealOptions) -> str:
    if kind == "sglang":
        python = options.engine_python or sys.executable
        _ask(python, "sglang", "pip install 'sglang==0.5.23' in an environment of its own and name its --engine-python")
        return python
    from real.sglang_cpu import environment

    try:
        found = str(environment.interpreter(options.engine_python))
    except environment.EnvironmentFailed as error:
        raise _Missing(str(error)) from error
    _ask(found, "sglang", "run 'python -m real.engines install sglang-cpu'")
    return found


def _ask(python: str, package: str, fix: str) -> None:
    """Whether an interpreter exists and has a package; imports nothing there. Raises _Missing."""
    code = f"import importlib.util; print('absent' if importlib.util.find_spec({package!r}) is None else 'there')"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Missing(f"--engine-python {python}: cannot be run ({error})") from error
    said = asked.stdout.split()[-1:]
    if asked.returncode or said not in ([b"there"], [b"absent"]):  # /bin/true says nothing, and is content
        words = asked.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise _Missing(f"--engine-python {python}: is no interpreter of Python ({words[0]}); name ENV/bin/python")
    if said == [b"absent"]:
        raise _Missing(f"{python} has no {package}; {fix}")


def _shared_out(scenario: Scenario, devices: list[str]) -> list[tuple[float, str | None]]:
    """Each node its own GPUs: what its replicas need, and up to ``gpus_per_node`` of the rest. Raises _Missing."""
    from scenarios.deploy import homes

    topology = scenario.model.topology
    wanted = [0.0] * topology.nodes
    for replica, node in homes(topology).items():
        wanted[int(node.removeprefix("node-"))] += topology.services[service_of(replica)].gpus_per_replica
    counts = [-int(-need // 1) for need in wanted]
    total = sum(counts)
    if total > len(devices):
        raise _Missing(
            f"the replicas need {total} GPUs, {len(devices)} are visible; set initial_replicas under real.set.sglang, "
            "or give --ray a cluster that has them"
        )
    shared: list[tuple[float, str | None]] = []
    left, spare = list(devices), len(devices) - total
    for count in counts:
        # What the first replicas leave over is for those that are scaled out later.
        more = min(spare, max(0, topology.gpus_per_node - count))
        spare -= more
        shared.append((float(count + more), ",".join(left[: count + more])))
        left = left[count + more :]
    return shared
