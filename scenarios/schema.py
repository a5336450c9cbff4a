"""The models of a scenario file. What each key means is said here; ``docs/scenarios.md`` shows them in use.

Units are in the names. ``scenarios/load.py`` reads a file into these models and says where it is wrong.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from protocol import config
from protocol.scaling.policy import AutoscalerConfig
from scenarios.fields import (
    Bandwidth,
    CountOrZero,
    Crowd,
    Fraction01,
    Name,
    NotNegative,
    Positive,
    Seconds,
    SomeSeconds,
    SpecModel,
    check_known,
    did_you_mean,
)
from scenarios.steps import StepModel
from scenarios.workload_schema import (
    AgentsModel,
    ArrivalsModel,
    ClosedLoopModel,
    EpisodesModel,
    HttpAgentsModel,
    JudgementsModel,
    LognormalModel,
    PhaseModel,
    RateModel,
    TokensModel,
    TraceModel,
    TrainingModel,
    UniformModel,
    WorkloadModel,
)

__all__ = [  # whatever is part of a scenario file is found here
    "AgentsModel",
    "ArrivalsModel",
    "COMPONENTS",
    "ClosedLoopModel",
    "EngineKindName",
    "EngineOptionsModel",
    "EpisodesModel",
    "HttpAgentsModel",
    "JudgementsModel",
    "LimitsModel",
    "LinkModel",
    "LognormalModel",
    "NetworkModel",
    "PhaseModel",
    "ProxyModel",
    "PublishingModel",
    "RateModel",
    "RealModel",
    "RolloutsModel",
    "ScalingModel",
    "ScenarioModel",
    "ServiceModel",
    "StorageModel",
    "TokensModel",
    "TopologyModel",
    "TraceModel",
    "TrainingModel",
    "UniformModel",
    "WeightsModel",
    "WorkloadModel",
]

# --- topology ---


COMPONENTS = ("gateway", "health", "recovery", "exporter", "admin", "trainer", "scale_manager", "scale_api",
              "autoscaler", "gate", "entrypoint", "controller", "affinity", "publisher", "judge",
              "weight_sync", "rank", "registrations", "session_server", "turn_hooks", "trace_store", "replay_buffer",
              "producer", "learner", "train_worker", "evaluator")  # fmt: skip
"""Names under ``components``: a class of the user's own in place of ours, ``module:Class``."""


def _check_components(value: dict[str, str]) -> dict[str, str]:
    for name, target in value.items():
        check_known(name, COMPONENTS, "component")
        module, colon, cls = target.partition(":")
        if not (colon and cls.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise PydanticCustomError(
                "component", "{value} names no class; write it as 'package.module:Class'", {"value": repr(target)}
            )
    return value


class WeightsModel(SpecModel):
    """The weights that the trainer exports."""

    shards: Crowd = 2
    shard_gb: Positive = 0.6
    """Nominal size of a shard: what it costs to write and read."""
    version: str | None = None
    """Exported before the service starts, and loaded by its first replicas; none: they serve the profile's own."""


def _known_config_keys(value: Any, info: ValidationInfo) -> Any:
    """Refuse an unknown key of a component's configuration with a suggestion, and ``yes`` or ``on`` for a number."""
    if isinstance(value, dict) and info.field_name is not None:
        known = _CONFIGS[info.field_name].model_fields
        for key in value:
            if key not in known:
                raise PydanticCustomError(
                    "unknown_key", "unknown key {key}{fix}", {"key": repr(key), "fix": did_you_mean(key, known)}
                )
            if isinstance(value[key], bool) and "bool" not in str(known[key].annotation):
                raise PydanticCustomError("no_switch", "{key} is no switch", {"key": repr(key)})
    return value


class ScalingModel(SpecModel):
    """Elastic replicas: a control API, and a manager that owns what it creates."""

    kind: Literal["judge", "rollout"] = "judge"
    """A judge's weights are frozen; rollout replicas are given the present ones, and have an API of their own."""
    api: config.ScalingConfig = config.ScalingConfig()
    rollout: config.RolloutScalingConfig = config.RolloutScalingConfig()
    """Of kind ``rollout``, in place of ``api``."""
    lifecycle: config.LifecycleConfig = config.LifecycleConfig()
    autoscaler: AutoscalerConfig | None = None
    """Decides on scale-outs and scale-ins from the metrics of the replicas, from the start of the workload on."""

    _keys = field_validator("api", "rollout", "lifecycle", "autoscaler", mode="before")(_known_config_keys)

    @model_validator(mode="after")
    def _of_its_kind(self) -> ScalingModel:
        unread = "api" if self.kind == "rollout" else "rollout"
        if unread in self.model_fields_set:
            raise PydanticCustomError(
                "other_kind",
                "'{key}' is not read where 'kind' is {kind}: leave it out",
                {"key": unread, "kind": self.kind},
            )
        if self.kind == "rollout" and self.lifecycle.journal:
            raise PydanticCustomError(
                "no_journal", "'lifecycle.journal' is of kind judge; that of rollout replicas keeps none: leave it out"
            )
        return self


class ProxyModel(SpecModel):
    """A routed proxy of somebody else's before the entrypoints: agents reach it; it is told which backends exist."""

    registrations: config.ProxyConfig = config.ProxyConfig()
    registers: Literal["router", "entrypoints"] = "router"
    """The affinity router alone, or every entrypoint by itself."""
    busy_answers: CountOrZero = 0
    """So many admin POSTs, the first ones after the start, are answered with 503 and do nothing."""

    _keys = field_validator("registrations", mode="before")(_known_config_keys)


class PublishingModel(SpecModel):
    """Weights are published under live agents: an entrypoint before each replica, a controller, an affinity router."""

    gates: bool = True
    """Turns need a lease of their entrypoint's gate; false: they are forwarded without, and nothing is published."""
    gate: config.GateConfig = config.GateConfig()
    entrypoint: config.EntrypointConfig = config.EntrypointConfig()
    controller: config.ControllerConfig = config.ControllerConfig()
    affinity: config.AffinityConfig = config.AffinityConfig()
    update: config.WeightSyncConfig = config.WeightSyncConfig()
    """How the weights of a version get into the engines."""
    proxy: ProxyModel | None = None
    session_server: config.SessionServerConfig | None = None
    """Entrypoints are session servers: they speak HTTP, record turns in a trace store. ``entrypoint`` is not read."""
    trace_store: config.TraceStoreConfig = config.TraceStoreConfig()
    """Of session servers."""

    _keys = field_validator(
        "gate", "entrypoint", "controller", "affinity", "update", "session_server", "trace_store", mode="before"
    )(_known_config_keys)


class EngineOptionsModel(SpecModel):
    """How a service's engines are set up to compute, where that is not left to their profile (scaling.md 8)."""

    deterministic: bool = False
    """Answers do not depend on what else is in the batch, and seeds of requests have an effect."""
    gpu: Literal["turing", "ampere", "ada", "hopper", "blackwell"] | None = None
    """Generation of the GPUs, as a probe of the machine would have it; none: the probe failed."""
    attention_backend: str = ""
    """What the user set for all engines; empty: nothing, and one is chosen that goes with deterministic mode."""
    instance_attention_backend: str = ""
    """What this service's own engine configuration says; it has the last word."""
    random_seed: CountOrZero | None = 42
    """Server seed of every replica; none: each has its rank's."""
    startup_s: SomeSeconds | None = None
    """Time in which an engine starts, instead of its profile's."""


class RolloutsModel(SpecModel):
    """Groups of rollouts are produced, kept in a replay buffer, trained on and evaluated; their turns are traced."""

    ranks: Crowd = 2
    """Training workers, each of which reads every batch."""
    access: config.TraceAccessConfig = config.TraceAccessConfig()
    trace_store: config.TraceStoreConfig = config.TraceStoreConfig()
    buffer: config.ReplayBufferConfig = config.ReplayBufferConfig()
    producer: config.ProducerConfig = config.ProducerConfig()
    learner: config.LearnerConfig = config.LearnerConfig()
    evaluator: config.EvaluatorConfig | None = config.EvaluatorConfig()
    """None: nothing is evaluated."""

    _keys = field_validator("access", "trace_store", "buffer", "producer", "learner", "evaluator", mode="before")(
        _known_config_keys
    )


class ServiceModel(SpecModel):
    """A group of replicas of one model behind gateways, with health probing and recovery."""

    initial_replicas: Crowd
    engine: str
    """Engine profile (sim) or emulated engine."""
    gateways: Crowd = 1
    """Gateway actors; each owns the replicas whose number leaves its own when divided by this."""
    gpus_per_replica: NotNegative = 1.0
    weights: WeightsModel = WeightsModel()
    components: Annotated[dict[str, str], AfterValidator(_check_components)] = {}
    gateway: config.GatewayConfig = config.GatewayConfig()
    health: config.HealthConfig = config.HealthConfig()
    recovery: config.RecoveryConfig = config.RecoveryConfig()
    admin: config.AdminConfig = config.AdminConfig()
    export: config.ExportConfig = config.ExportConfig()
    scaling: ScalingModel | None = None
    """How the service is scaled; without it the verbs scale_out, scale_in and reconcile do not go."""
    publishing: PublishingModel | None = None
    """Entrypoints for agents; without it the verb publish and arrivals of agents do not go."""
    rollouts: RolloutsModel | None = None
    """Who produces and consumes rollouts; needed by arrivals of rollouts."""
    engine_options: EngineOptionsModel | None = None
    """Deterministic mode, attention backend and the like; without it engines are as their profile has them."""
    judge: config.JudgeConfig | None = None
    """An ingress for judgements; without it arrivals of judgements do not go."""
    gateway_cost_s: Seconds | None = None
    """What serving one message occupies a gateway for; default: a calibrated Ray actor."""

    _keys = field_validator("gateway", "health", "recovery", "admin", "export", "judge", mode="before")(
        _known_config_keys
    )

    @model_validator(mode="after")
    def _one_gateway(self) -> ServiceModel:
        for what, given in (("scaled", self.scaling), ("publishing", self.publishing), ("judging", self.judge)):
            if given is not None and self.gateways != 1:
                raise PydanticCustomError(
                    "one_gateway", "a {what} service has one gateway, not {gateways}",
                    {"what": what, "gateways": self.gateways},
                )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _floor(self) -> ServiceModel:
        scaler = None if self.scaling is None else self.scaling.autoscaler
        if scaler is not None and scaler.min_engines < self.initial_replicas:
            raise PydanticCustomError(
                "floor", "autoscaler.min_engines {low} is below initial_replicas {initial}, which nobody may remove",
                {"low": scaler.min_engines, "initial": self.initial_replicas},
            )  # fmt: skip
        return self


_CONFIGS: dict[str, type[config.ComponentConfig]] = {
    "gateway": config.GatewayConfig,
    "health": config.HealthConfig,
    "recovery": config.RecoveryConfig,
    "admin": config.AdminConfig,
    "export": config.ExportConfig,
    "api": config.ScalingConfig,
    "lifecycle": config.LifecycleConfig,
    "autoscaler": AutoscalerConfig,
    "gate": config.GateConfig,
    "entrypoint": config.EntrypointConfig,
    "controller": config.ControllerConfig,
    "affinity": config.AffinityConfig,
    "session_server": config.SessionServerConfig,
    "access": config.TraceAccessConfig,
    "trace_store": config.TraceStoreConfig,
    "buffer": config.ReplayBufferConfig,
    "producer": config.ProducerConfig,
    "learner": config.LearnerConfig,
    "evaluator": config.EvaluatorConfig,
    "update": config.WeightSyncConfig,
    "registrations": config.ProxyConfig,
    "judge": config.JudgeConfig,
    "rollout": config.RolloutScalingConfig,
}


class TopologyModel(SpecModel):
    """Nodes, named ``node-0`` and so on, and the services on them."""

    nodes: Crowd = 1
    gpus_per_node: CountOrZero = 8
    services: dict[Name, ServiceModel] = Field(min_length=1)

    @model_validator(mode="after")
    def _room(self) -> TopologyModel:
        wanted = sum(service.initial_replicas * service.gpus_per_replica for service in self.services.values())
        if wanted > self.nodes * self.gpus_per_node:
            raise PydanticCustomError(
                "room", "the replicas need {wanted} GPUs; {nodes} nodes with {gpus} each have {have}",
                {"wanted": f"{wanted:g}", "nodes": self.nodes, "gpus": self.gpus_per_node,
                 "have": self.nodes * self.gpus_per_node},
            )  # fmt: skip
        return self


class LinkModel(SpecModel):
    """One direction between two nodes."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")
    latency_s: Seconds
    jitter_s: Seconds = 0.0
    loss: Fraction01 = 0.0
    reorder: Fraction01 = 0.0
    bandwidth_bytes_per_s: NotNegative = 0.0
    """0: no limit."""


class NetworkModel(SpecModel):
    """Latencies. What is not given has the measured default of the world."""

    link_latency_s: Seconds | None = None
    loopback_latency_s: Seconds | None = None
    links: list[LinkModel] = []


class StorageModel(SpecModel):
    """The shared storage."""

    bandwidth_bytes_per_s: Bandwidth = 2_000_000_000.0


# --- the whole ---


EngineKindName = Literal["sglang", "sglang-cpu", "emulated"]

_FOLLOWS_COUNTS = re.compile(
    r"steps\.[^.]+\.(with\.num_replicas|when\.(nth|from_s|where\.(actor|replica|target|running)))"
)
"""Keys of steps that ``real.set`` may change, for they follow from fewer replicas and requests: how many replicas are
asked for, what the last of them is called, which of so many events fires, from when on one counts, and how busy a
replica must be (in real time requests end while a fault is on its way). How far: ``scenarios/shrinking.py``."""


class RealModel(SpecModel):
    """What the real world needs beside the rest. It may shrink counts, rates and durations, never the steps.

    Where there are fewer replicas a step asks for fewer too, and the one that it waits for has another number.
    """

    engine: EngineKindName | None = None
    """Kind of engine where the command names none; without it: ``sglang`` where a GPU is visible."""
    model: str = ""
    """Model name or path for SGLang."""
    time_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The times of the steps (at_s, after_s, from_s, for_s) are multiplied by this."""
    startup_s: SomeSeconds | None = None
    """Time in which an emulated engine starts, instead of its profile's: for runs that wait for it in real time."""
    set: dict[EngineKindName, dict[str, Any]] = {}
    """Kind of engine to keys that have another value there, written as for ``--set``: ``workload.for_s: 10``."""

    @field_validator("set")
    @classmethod
    def _never_the_steps(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for changes in value.values():
            for key in changes:
                if _FOLLOWS_COUNTS.fullmatch(key) or key == "real.time_scale":
                    continue
                if key.split(".")[0] in ("steps", "real", "name", "seed"):
                    raise PydanticCustomError(
                        "real_set", "{key} cannot be changed under 'set'; it may shrink the workload, the topology and "
                        "the num_replicas that a step asks for, and say which replica a step waits for, for which "
                        "of its events, from when on, how busy",
                        {"key": repr(key)},
                    )  # fmt: skip
        return value


class LimitsModel(SpecModel):
    """Bounds of a run."""

    time_limit_s: SomeSeconds = 3600.0
    """Simulated (or real) time after which the run is stopped."""
    converge_within_s: SomeSeconds = 60.0
    """After the last healing, everything that is open must end within this."""
    shadow_s: Seconds = 60.0
    """How long after its healing a fault still explains a failed request."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _or_one(schema: dict[str, Any]) -> None:
    several = {key: schema.pop(key) for key in ("items", "minItems", "type")}
    schema["anyOf"] = [several["items"], several]


class ScenarioModel(SpecModel):
    """A scenario file."""

    name: Name
    summary: str
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    topology: TopologyModel
    network: NetworkModel = NetworkModel()
    storage: StorageModel = StorageModel()
    workload: Annotated[list[WorkloadModel], BeforeValidator(_as_list), Field(min_length=1, json_schema_extra=_or_one)]
    """One workload, or a list of them."""
    steps: list[StepModel] = []
    acceptance: list[dict[str, Any]] = []
    """One ``{criterion: parameters}`` an entry; ``name`` beside it is what ``--set`` and ``real.set`` call it."""
    limits: LimitsModel = LimitsModel()
    real: RealModel | None = None

    @property
    def fault_steps(self) -> list[StepModel]:
        return [step for step in self.steps if step.fault is not None]
