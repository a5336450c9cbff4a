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
    Count,
    CountOrZero,
    Crowd,
    Fraction01,
    Name,
    NotNegative,
    Positive,
    Rate,
    Seconds,
    SomeSeconds,
    SpecModel,
    TokenCount,
    Tokens,
    check_known,
    did_you_mean,
    exactly_one,
)
from scenarios.steps import StepModel

# --- topology ---


COMPONENTS = ("gateway", "health", "recovery", "exporter", "admin", "trainer", "scale_manager", "scale_api",
              "autoscaler", "gate", "entrypoint", "controller", "affinity", "publisher", "judge",
              "weight_sync", "rank", "registrations", "session_server", "turn_hooks", "trace_store", "replay_buffer", "producer", "learner",
              "train_worker", "evaluator")  # fmt: skip
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
    """Refuse an unknown key of a component's configuration with a suggestion."""
    if isinstance(value, dict) and info.field_name is not None:
        known = _CONFIGS[info.field_name].model_fields
        for key in value:
            if key not in known:
                raise PydanticCustomError(
                    "unknown_key", "unknown key {key}{fix}", {"key": repr(key), "fix": did_you_mean(key, known)}
                )
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
    """Entrypoints are session servers, which speak HTTP and record turns in a trace store; ``entrypoint`` is not read."""

    _keys = field_validator("gate", "entrypoint", "controller", "affinity", "update", "session_server", mode="before")(
        _known_config_keys
    )


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
    buffer: config.ReplayBufferConfig = config.ReplayBufferConfig()
    producer: config.ProducerConfig = config.ProducerConfig()
    learner: config.LearnerConfig = config.LearnerConfig()
    evaluator: config.EvaluatorConfig | None = config.EvaluatorConfig()
    """None: nothing is evaluated."""

    _keys = field_validator("access", "buffer", "producer", "learner", "evaluator", mode="before")(_known_config_keys)


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


# --- workload ---


class TraceModel(SpecModel):
    """A public request trace, replayed."""

    format: Literal["azure", "mooncake", "burstgpt"]
    file: str
    """Beside the scenario file, an absolute path, or a trace shipped with the package."""
    speed_up: Positive = 1.0
    """2.0: twice as fast as recorded."""
    limit: Count | None = None
    """At most this many requests."""


class RateModel(SpecModel):
    rate_per_s: Rate


class ClosedLoopModel(SpecModel):
    """Sessions that each send their next request when the one before is answered."""

    sessions: Crowd
    think_s: Seconds = 0.0
    """From an answer to the session's next request."""
    turns: Count | None = None
    """Requests of a session; unlimited where only ``for_s`` ends it."""


class HttpAgentsModel(SpecModel):
    """Agents that speak HTTP to session servers, as clients of two formats do. Shares are of sessions or of turns."""

    anthropic: Fraction01 = 0.5
    """Of the sessions: those that speak Anthropic's format; the others speak OpenAI's."""
    stream: Fraction01 = 0.5
    """Of the turns."""
    leave: Fraction01 = 0.0
    """Of the turns: those whose client leaves before the end, before the head, between two events, inside one or just
    before the end marker; the conversation then goes on without that turn."""
    evaluation: Fraction01 = 0.0
    """Of the turns: sent with ``return_token_ids: false``, which nobody records; the conversation goes on without it."""
    integer_ids: Fraction01 = 0.0
    """Of the sessions: those whose id is a number in the body."""
    other_calls: Fraction01 = 0.0
    """Of the turns: before those something is called that is no generation."""


class AgentsModel(SpecModel):
    """Episodes of agents: turns of one session, each with the whole conversation before it as its prompt."""

    sessions: Crowd
    """Episodes in all."""
    at_once: Crowd | None = None
    """Episodes open at a time; all by default."""
    turns: Count
    think_s: Seconds = 0.0
    """From an answer to the next turn: the agent's tools. Drawn between half and one and a half times of it."""
    late: Fraction01 = 0.0
    """Of the episodes that are over, how many send one request more, which must be refused."""
    http: HttpAgentsModel | None = None
    """The agents speak HTTP to the service's session servers, one for a session's whole life; ``late`` does not go."""

    @model_validator(mode="after")
    def _nobody_late(self) -> AgentsModel:
        if self.http is not None and self.late:
            raise PydanticCustomError("http_late", "'late' does not go with 'http'; leave one of them out", {})
        return self


class JudgementsModel(SpecModel):
    """Inputs that are judged again and again, in one arm after the other: do all replicas say the same?"""

    cases: Crowd = 50
    """Inputs: half of them named ``pos-..``, half ``neg-..``; which is which only the judge can say."""
    repeats: Crowd = 8
    """Replies to each case in each arm, one after the other, so that replicas take turns."""
    arms: Annotated[list[Literal["greedy", "sampled"]], Field(min_length=1)] = ["greedy", "sampled"]
    temperature: Positive = 0.1
    """Of the arm ``sampled``."""
    replicas: Crowd = 1
    """The first arm begins when so many replicas are routed to."""
    at_once: Crowd = 1
    """Cases that are under way at a time."""
    seed: CountOrZero | None = None
    """A seed that the caller names; none: it leaves that to the ingress."""


class UniformModel(SpecModel):
    low: TokenCount
    high: TokenCount

    @model_validator(mode="after")
    def _ordered(self) -> UniformModel:
        if self.high < self.low:
            raise PydanticCustomError(
                "order", "high ({high}) is below low ({low})", {"high": self.high, "low": self.low}
            )
        return self


class LognormalModel(SpecModel):
    median: Tokens
    p99: Tokens
    at_most: TokenCount | None = None
    """Draws above are cut to this."""

    @model_validator(mode="after")
    def _ordered(self) -> LognormalModel:
        if self.p99 < self.median:
            raise PydanticCustomError(
                "order", "p99 ({p99}) is below the median ({median})", {"p99": self.p99, "median": self.median}
            )
        return self


class TokensModel(SpecModel):
    """How many tokens: exactly one of these."""

    fixed: TokenCount | None = None
    uniform: UniformModel | None = None
    lognormal: LognormalModel | None = None

    @model_validator(mode="after")
    def _one(self) -> TokensModel:
        exactly_one(self, ("fixed", "uniform", "lognormal"), "a number of tokens")
        return self


class TrainingModel(SpecModel):
    """A training loop: rollouts whose samples are generated by one service and judged by the workload's own."""

    rollout_service: Name
    """Generates the samples, and loads the weights of each step."""
    steps: Count
    samples: Crowd = 8
    """Of each rollout; their sizes are ``prompt_tokens`` and ``output_tokens``."""
    judged: Annotated[list[CountOrZero], Field(min_length=1)] = [8]
    """How many samples of each rollout have an answer to judge, by rollout; the last one counts for all after it."""
    judge_prompt_tokens: TokensModel
    judge_output_tokens: TokensModel
    first_train_s: Seconds
    """From the first rollout to its step's new weights: compilers and caches begin cold."""
    train_s: Seconds
    after_s: Seconds
    """From the new weights to the end of the step: checkpoints, logs, evaluation."""


class EpisodesModel(SpecModel):
    """Groups of episodes, produced for a learner. ``prompt_tokens`` is what a turn adds to the conversation."""

    groups: Crowd
    """New ones in all; some are rolled out more than once."""
    members: Annotated[int, Field(ge=1, le=1024)] = 2
    """Rollouts of a group."""
    turns: Count
    think_s: Seconds = 0.0
    """From an answer to the next turn: the agent's tools. Drawn between half and one and a half times of it."""
    traced: Fraction01 = 1.0
    """Of the groups, how many have sessions in the trace store; the others own their references themselves."""
    request_aware: Fraction01 = 1.0
    """Of the groups, how many record with each segment which request it is of and which version it was generated by."""
    expert_bytes: CountOrZero = 65536
    """Nominal size of the expert choices of a segment; 0: a dense model, which has none."""
    aborted: Fraction01 = 0.0
    """Of the attempts, how many are broken off before a turn, to be continued later."""
    failed: Fraction01 = 0.0
    """Of the attempts that came to their end, how many are judged to have failed."""
    repeated: Fraction01 = 0.0
    """Of the turns, how many are answered and recorded a second time: the same words, and not the same record."""
    window_tokens: Count = 400
    """Of a longer conversation only so many tokens are sent to an engine; the trace has all of it."""


class ArrivalsModel(SpecModel):
    """When requests arrive: exactly one of these."""

    poisson: RateModel | None = None
    constant: RateModel | None = None
    closed_loop: ClosedLoopModel | None = None
    agents: AgentsModel | None = None
    """Needs a service with ``publishing``; ``prompt_tokens`` is then what a turn adds to the conversation."""
    rollouts: EpisodesModel | None = None
    """Needs a service with ``rollouts`` and gates; ``prompt_tokens`` as for agents."""
    judgements: JudgementsModel | None = None
    """Needs a service with ``judge``; ``output_tokens`` is the most that a reply may have."""
    training: TrainingModel | None = None
    """A training loop whose judge is the workload's service."""

    @model_validator(mode="after")
    def _one(self) -> ArrivalsModel:
        exactly_one(self, tuple(type(self).model_fields), "arrivals")
        return self


class PhaseModel(SpecModel):
    """What the sessions of a closed loop ask for from some time on: each goes over to it with its next request."""

    from_s: SomeSeconds
    """After the beginning of the workload."""
    prompt_tokens: TokensModel
    output_tokens: TokensModel
    shared_prefix_tokens: CountOrZero = 0
    """So many tokens at the beginning of all these prompts are the same text."""


class WorkloadModel(SpecModel):
    """The requests that a service gets: a trace, or drawn arrivals with drawn sizes."""

    service: Name
    trace: TraceModel | None = None
    arrivals: ArrivalsModel | None = None
    prompt_tokens: TokensModel | None = None
    output_tokens: TokensModel | None = None
    phases: list[PhaseModel] = []
    """Of a closed loop, by time; before the first one ``prompt_tokens`` and ``output_tokens`` count."""
    from_s: Seconds = 0.0
    """The workload begins so long after the start of the run's workload."""
    for_s: SomeSeconds | None = None
    """Drawn arrivals end so long after they began."""
    requests: Count | None = None
    """Drawn arrivals end after this many."""
    clients: Crowd = 1
    """Client actors that share the arrivals and the gateways: client ``k`` talks to gateway ``k``, and in turn to every
    ``clients``-th after it; where there are fewer gateways than clients, to gateway ``k`` modulo their number."""
    ignore_eos: bool = True
    idempotent: bool = True
    """Whether a request may be sent again when its outcome is unknown."""
    patience_s: SomeSeconds = 600.0
    """A client gives up on an answer after this time; the outcome is then unknown."""

    @model_validator(mode="after")
    def _complete(self) -> WorkloadModel:
        exactly_one(self, ("trace", "arrivals"), "workload")
        drawn = ("prompt_tokens", "output_tokens", "for_s", "requests")
        if self.trace is not None:
            for name in drawn:
                if getattr(self, name) is not None:
                    raise PydanticCustomError(
                        "trace_has", "'{name}' does not go with a trace; use its limit and speed_up", {"name": name}
                    )
            return self
        for name in drawn[:2]:
            if getattr(self, name) is None:
                raise PydanticCustomError("needs", "'{name}' is missing; drawn arrivals need it", {"name": name})
        assert self.arrivals is not None
        if self.arrivals.rollouts is not None:
            if self.for_s is not None or self.requests is not None:
                raise PydanticCustomError(
                    "rollouts_end", "'for_s' and 'requests' do not go with rollouts; give them 'groups' and 'turns'", {}
                )
            return self
        if self.arrivals.agents is not None:
            if self.for_s is not None or self.requests is not None:
                raise PydanticCustomError(
                    "agents_end", "'for_s' and 'requests' do not go with agents; give them 'sessions' and 'turns'", {}
                )
            return self
        if self.arrivals.judgements is not None or self.arrivals.training is not None:
            if self.for_s is not None or self.requests is not None or self.clients != 1:
                raise PydanticCustomError(
                    "own_end",
                    "'for_s', 'requests' and 'clients' do not go with judgements and training, which have their own", {},
                )  # fmt: skip
            return self
        loop = self.arrivals.closed_loop
        times = [phase.from_s for phase in self.phases]
        if times and (loop is None or times != sorted(set(times))):
            raise PydanticCustomError("phases", "'phases' go with a closed loop, and their from_s must rise", {})
        if self.for_s is None and self.requests is None and (loop is None or loop.turns is None):
            raise PydanticCustomError("endless", "the workload never ends; give 'for_s' or 'requests'", {})
        if loop is not None and self.requests is not None:
            raise PydanticCustomError(
                "closed_requests", "'requests' does not go with a closed loop; give it 'turns'", {}
            )
        return self


# --- the whole ---


EngineKindName = Literal["sglang", "sglang-cpu", "emulated"]

_FOLLOWS_COUNTS = re.compile(r"steps\.\d+\.(with\.num_replicas|when\.where\.(actor|replica|target))")
"""Keys of steps that ``real.set`` may change: how many replicas there are, and what the last of them is called."""


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
                        "the num_replicas that a step asks for, and name the replica that a step waits for",
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
    limits: LimitsModel = LimitsModel()
    real: RealModel | None = None

    @property
    def fault_steps(self) -> list[StepModel]:
        return [step for step in self.steps if step.fault is not None]
