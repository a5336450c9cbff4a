"""What a scenario asks for that can never work, whatever the seed: refused before anything is started.

Only what is certain is refused. Whether a fault meets what it must in a run is that run's to say.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from analysis.errors import BadInput
from protocol.messages import service_of
from scenarios.load import Scenario
from scenarios.schema import ScenarioModel
from scenarios.steps import SELECTORS, StepModel
from scenarios.workload_schema import TokensModel, WorkloadModel

_MEETS: Final[dict[str, tuple[str, ...]]] = {
    "process": ("in_flight", "processes"),
    "link": ("hits",),
    "storage": ("hits",),
    "placement": ("hits",),
    "node": ("processes", "hits"),
}
"""Kind of target to what its faults can meet; those of metrics pages meet hits too."""
_ENDS: Final = ("sigkill", "restart_empty")


def check_possible(scenario: Scenario, backend: Literal["sim", "real"]) -> None:
    """Refuse steps that can never do what they are for, and versions that are no name. Raises BadInput."""
    model = scenario.model
    for number, step in enumerate(model.steps):
        _check_version(scenario, step.with_.get("version"), ("steps", number, "with", "version"))
        if step.fault is not None:
            _check_target(scenario, step, number, backend)
            _check_must_hit(scenario, step, number)
    for name, service in model.topology.services.items():
        at = ("topology", "services", name)
        _check_version(scenario, service.weights.version, (*at, "weights", "version"))
        scaling = service.scaling
        if scaling is not None and scaling.kind == "rollout" and scaling.rollout.export_prefix != service.export.prefix:
            raise BadInput(
                f"{scenario.place((*at, 'scaling'))}: scaling.rollout.export_prefix "
                f"({scaling.rollout.export_prefix!r}) and export.prefix ({service.export.prefix!r}) differ, so that a "
                "new replica would never be given an export; make them equal"
            )
    _check_restarts(scenario)


def check_sizes(scenario: Scenario, service: str, engine: str, context_tokens: int) -> None:
    """Refuse a load none of whose requests fits into its engines' context. Raises BadInput.

    Beside a load that fits, one that does not may be meant: an engine refuses it.

    Args:
        service: whose load.
        engine: its profile's name.
        context_tokens: the longest prompt and output together.
    """
    loads = scenario.model.workload
    kinds = [
        ((*path, *key), _least(prompt) + _least(output))
        for path, load in zip(scenario.workload_paths, loads, strict=True)
        for key, prompt, output in _sizes(load, service)
    ]
    if any(load.trace is not None and load.service == service for load in loads):
        return
    if kinds and all(least > context_tokens for _, least in kinds):
        path, least = kinds[0]
        raise BadInput(
            f"{scenario.place(path)}: prompt and output have {least} tokens at least, and {engine} has a context of "
            f"{context_tokens}, so that every request would be refused; ask for fewer tokens, or take an engine "
            "profile with a longer context"
        )


# --- steps ---


def _check_version(scenario: Scenario, version: Any, path: tuple[str | int, ...]) -> None:
    if isinstance(version, str) and ("/" in version or not version.isprintable()):
        raise BadInput(
            f"{scenario.place(path)}: {version!r} cannot be a part of a file's name, as a version is; write it without "
            "'/' and without control characters, as in v2"
        )


def _must_hit(step: StepModel) -> dict[str, int]:
    assert step.fault is not None
    if step.must_hit is not None:
        return {what: bound.at_least for what, bound in step.must_hit.items()}
    return {what: bound.get("at_least", 1) for what, bound in step.fault.must_hit.items()}


def _check_target(scenario: Scenario, step: StepModel, number: int, backend: str) -> None:
    target = step.target
    if target is None:
        return
    place = scenario.place(("steps", number, "target"))
    if step.do in _ENDS and target.process in _clients(scenario.model) and "in_flight" in _must_hit(step):
        raise BadInput(
            f"{place}: {target.process} is the load itself: without it the run cannot go on, and would end undecided; "
            "have the fault befall a component or a replica"
        )
    lost = step.do == "node_loss" and target.node == "node-0"
    if lost and backend == "sim" and _routes_itself(scenario.model):  # the real world refuses it by itself
        raise BadInput(
            f"{place}: on node-0 are the driver, the load and the first gateway, which nobody brings back: the run "
            "would end undecided; lose another node, and give 'topology' one more where there is none"
        )


def _clients(model: ScenarioModel) -> set[str]:
    """The load clients that the run waits for."""
    return {
        f"client-{load.service}-{number}-{share}"
        for number, load in enumerate(model.workload)
        if load.arrivals is None or load.arrivals.rollouts is None
        for share in range(load.clients)
    }


def _routes_itself(model: ScenarioModel) -> bool:
    """Whether a gateway of ours is on the first node: it must answer in the end."""
    return any("gateway" not in service.components for service in model.topology.services.values())


def _check_must_hit(scenario: Scenario, step: StepModel, number: int) -> None:
    fault = step.fault
    assert fault is not None
    can = _MEETS[fault.target] + (("hits",) if fault.name.startswith("metrics_") else ())
    for what, least in _must_hit(step).items():
        place = scenario.place(("steps", number, "must_hit", what))
        if what not in can:
            raise BadInput(
                f"{place}: {step.do!r} never meets {what!r}, so that the run could not pass; ask for {' or '.join(can)}"
            )
        most, why = _most(scenario.model, step, what)
        if most is not None and least > most:
            raise BadInput(f"{place}: at_least {least} can never be met: {why}; ask for {most} at most, or change that")


def _most(model: ScenarioModel, step: StepModel, what: str) -> tuple[int | None, str]:
    """The most that a fault can meet, and why; None where that is not known."""
    assert step.fault is not None
    if what == "processes" and step.fault.target == "process":
        return 1, "the target is one process"
    if what == "hits" and step.fault.target == "node":
        return 1, f"{step.do!r} has one hit, as it begins"
    if what == "hits" and step.fault.healing == "spent":
        count = getattr(step.parameters(), "count", None)
        return count, f"the fault ends with its hit number {count} ('count')"
    if what == "in_flight":
        return _most_in_flight(model, step)
    return None, ""


def _most_in_flight(model: ScenarioModel, step: StepModel) -> tuple[int | None, str]:
    """Of a replica: an engine runs a request once at a time, and a session has one, unless it has given up on others.

    Known of a service without anything beside its load: what other steps do may have requests given up earlier.
    """
    target = step.target
    assert target is not None and target.process is not None
    service = _service_of(model, target.process, target.service)
    others = [one for one in model.steps if one is not step and one.do != "note"]
    if service is None or others or any(link.loss or link.reorder for link in model.network.links):
        return None, ""
    spec = model.topology.services[service]
    if spec.components or spec.publishing is not None or spec.judge is not None or spec.scaling is not None:
        return None, ""
    most = 0
    for load in model.workload:
        loop = None if load.arrivals is None else load.arrivals.closed_loop
        if load.arrivals is None or load.arrivals.training is not None:
            return None, ""
        if load.service != service:
            continue
        if loop is not None:
            given_up = min(load.patience_s, spec.gateway.read_timeout_s)
            most += loop.sessions * (1 + int(model.limits.time_limit_s // given_up))
        elif load.requests is not None:
            most += load.requests
        else:
            return None, ""
    return most, f"the load of {service!r} never has more requests open at a time"


def _service_of(model: ScenarioModel, process: str, service: str | None) -> str | None:
    """Of which service a target is a replica; None where it is none."""
    if process in SELECTORS:
        return service if service is not None else next(iter(model.topology.services))
    name = service_of(process)
    return name if name in model.topology.services else None


def _check_restarts(scenario: Scenario) -> None:
    seen: dict[tuple[Any, ...], int] = {}
    for number, step in enumerate(scenario.model.steps):
        process = None if step.target is None else step.target.process
        if step.do != "restart_empty" or process is None or process in SELECTORS:
            continue
        when = None if step.when is None else step.when.model_dump_json()
        moment = (process, step.at_s, when, step.after_s)
        if moment in seen and "in_flight" in _must_hit(step):
            raise BadInput(
                f"{scenario.place(('steps', number))}: steps[{seen[moment]}] restarts {process} at the same instant, "
                "so that nothing is in flight there any more; give this step a later time, or leave it out"
            )
        seen.setdefault(moment, number)


# --- workloads ---


def _sizes(
    load: WorkloadModel, service: str
) -> list[tuple[tuple[str | int, ...], TokensModel | None, TokensModel | None]]:
    """Key of the output, prompt and output of each kind of request that a workload sends to a service."""
    training = None if load.arrivals is None else load.arrivals.training
    found: list[tuple[tuple[str | int, ...], TokensModel | None, TokensModel | None]] = []
    if training is not None and load.service == service:
        key = ("arrivals", "training", "judge_output_tokens")
        found.append((key, training.judge_prompt_tokens, training.judge_output_tokens))
    if (load.service if training is None else training.rollout_service) == service and load.output_tokens is not None:
        cut = load.arrivals is not None and load.arrivals.rollouts is not None  # to its window
        found.append((("output_tokens",), None if cut else load.prompt_tokens, load.output_tokens))
        phases = enumerate(load.phases)
        found += [(("phases", n, "output_tokens"), one.prompt_tokens, one.output_tokens) for n, one in phases]
    return found


def _least(tokens: TokensModel | None) -> int:
    if tokens is None or tokens.lognormal is not None:
        return 1
    return tokens.fixed or (tokens.uniform.low if tokens.uniform is not None else 1)
