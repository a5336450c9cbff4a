"""One model per component: what can be set, its unit (in the name), its default (as in the specs).

Unknown keys are refused, and every field is read by its component (``tests/protocol/test_config.py`` looks). A
configuration crosses to an actor as a constructor argument, so it is frozen.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# What is beyond these is a slip of the pen, and would be found only when it is used: times that leave the range of
# nanoseconds, a wait that is none, counts that nobody could keep.
_LONGEST_S = 1e9
Seconds = Annotated[float, Field(ge=1e-6, le=_LONGEST_S, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, le=_LONGEST_S, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]


def _check_folder(value: str) -> str:
    """The storage finds a path again only as it lists it, and takes none that leads out of it."""
    parts = value.split("/")
    if value and (any(part.strip() in ("", ".", "..") for part in parts) or not value.isprintable()):
        raise PydanticCustomError(
            "folder", "{given} is no folder in storage; write names with '/' between, as in journals/chat",
            {"given": repr(value)},
        )  # fmt: skip
    return value


def _check_some_folder(value: str) -> str:
    if not value:
        raise PydanticCustomError("folder", "is empty; name a folder in storage, as in exports", {})
    return _check_folder(value)


Folder = Annotated[str, AfterValidator(_check_folder)]
"""In storage; empty: none."""
SomeFolder = Annotated[str, AfterValidator(_check_some_folder)]


class ComponentConfig(BaseModel):
    """Base of the models: frozen, no unknown key."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GatewayConfig(ComponentConfig):
    """``protocol.serving.gateway.Gateway`` (scaling.md 5.1)."""

    attempts: Count = 3
    """Sends to a replica per request, the first included."""
    backoff_s: SecondsOrNone = 0.3
    """The n-th retry waits n times this long."""
    connect_timeout_s: Seconds = 2.0
    read_timeout_s: Seconds = 120.0
    """Longest time for one generation on one replica; then its outcome is unknown."""
    routable_wait_s: SecondsOrNone = 5.0
    """How long a request waits, uncounted, while no replica at all is routable."""
    let_go_s: SecondsOrNone = 6.0
    """A replica that did not answer a request is not sent it again for so long: SGLang drops what nobody waits for at
    its next look, 4 s apart at most, and until then the id is refused as a duplicate."""
    server_errors_to_suspect: Count = 10
    """That many 5xx in a row make a replica suspect (as the breaker of sglang-router)."""
    journal: Folder = ""
    """Folder in storage where it keeps which replicas it has and which are closed, so that a restart does not forget
    them. Empty: in memory alone."""


class HttpConfig(ComponentConfig):
    """``protocol.serving.gateway_api.GatewayApi``."""

    max_body_bytes: Count = 16 * 1024 * 1024
    """Of a request; a longer one is refused with 413."""
    retry_after_s: Count = 1
    """What a client is told to wait before it repeats a call of which nothing was done."""


class HealthConfig(ComponentConfig):
    """``protocol.serving.health.HealthProber`` (engines.md 3; scaling.md 9)."""

    interval_s: Seconds = 1.0
    """Each replica is asked for /ready once in this time."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 8
    """The replicas are split over this many slots, spread evenly over the interval."""
    probe_timeout_s: Seconds = 1.0
    """Connect and read time-out of /ready (which answers in 1 ms) and of /metrics."""
    failures_to_unroutable: Count = 3
    """Failures in a row after which a replica is no longer routed to."""
    sync_interval_s: Seconds = 0.5
    """How often the gateway is asked for its roster, its suspects and its stalled replicas."""
    stall_window_s: Seconds = 5.0
    """A replica with calls in flight and no success for this long is looked at for a wedge."""
    stall_check_s: Seconds = 2.0
    """Time between the two readings of its counters; equal readings are a wedge."""
    generate_timeout_s: Annotated[float, Field(ge=20, le=_LONGEST_S, allow_inf_nan=False)] = 22.0
    """For /health_generate, which itself takes 1 s at least and gives up after 20 s."""
    replace_after_s: Seconds = 30.0
    """A replica whose process lives but is unhealthy this long is replaced. A dead or wedged one is at once."""
    report_interval_s: Seconds = 10.0
    """A replica that still needs recovery is reported again after this long."""
    look_for_leaving_s: SecondsOrNone = 0.0
    """How often /health is asked, which alone tells a SIGTERM; each time costs a generation. 0: never."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for the gateway or recovery to answer."""


class AdminConfig(ComponentConfig):
    """``protocol.serving.admin`` (serving.md 1.2)."""

    connect_attempts: Count = 5
    """Attempts in all; only a connect time-out leads to another one."""
    connect_backoff_s: SecondsOrNone = 0.1
    connect_timeout_s: Seconds = 2.0
    read_timeout_s: Seconds = 30.0
    """For any admin POST but the weight update."""
    update_timeout_s: Seconds = 300.0
    """Read time-out of POST /update_weights_from_disk, which waits for what is in flight."""
    fan_out: Count = 64
    """How many replicas are worked on at once."""
    reconcile_timeout_s: Seconds = 30.0
    """How long an operation of unknown outcome is reconciled with what the replica says of itself."""
    reconcile_interval_s: Seconds = 0.5
    round: Literal["none", "flush", "pause"] = "none"
    """What is done to all replicas every ``round_interval_s``: flush the prefix cache, or pause and continue."""
    round_interval_s: Seconds = 10.0
    pause_mode: Literal["abort", "retract", "in_place"] = "in_place"
    pause_hold_s: SecondsOrNone = 0.2
    """How long a pause round keeps the replicas paused."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for the gateway or the prober to answer."""


class RecoveryConfig(ComponentConfig):
    """``protocol.serving.recovery.Recovery`` (scaling.md 9; serving.md 9)."""

    export_prefix: SomeFolder = "exports"
    """Where the exports are in storage. Without any export a replica serves its profile's own weights."""
    attempts: Count = 3
    """Tries per recovery, each with a process of its own."""
    backoff_s: SecondsOrNone = 1.0
    """The n-th further try waits n times this long."""
    attempt_timeout_s: Seconds = 600.0
    """One deadline for a whole try: end the old process, launch, ready, load, validate, publish."""
    terminate_timeout_s: Seconds = 30.0
    """The old process must be seen gone within this time, or nothing is launched."""
    poll_interval_s: Seconds = 0.2
    """Between two looks at whether a process is gone, or /ready."""
    probe_timeout_s: Seconds = 2.0
    """Connect and read time-out of /ready and /model_info."""
    generate_timeout_s: Seconds = 30.0
    """Read time-out of the validating generation."""
    export_attempts: Count = 3
    """Readings of a broken export before it is written again, or else the one before it is used."""
    export_backoff_s: SecondsOrNone = 0.5
    validate_tokens: Count = 4
    """Output tokens of the validating generation."""
    repair_timeout_s: Seconds = 300.0
    """How long the exporter may take to write a broken export again."""
    max_concurrent: Count = 16
    """Recoveries at work at once; further ones queue."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for the gateway to answer."""


class ExportConfig(ComponentConfig):
    """``protocol.training.checkpoint.Exporter``."""

    prefix: SomeFolder = "exports"
    timeout_s: Seconds = 600.0
    """One deadline for a whole export."""
    keep: Annotated[int, Field(ge=2, le=10**9)] = 3
    """Published exports that stay; two at least, or a torn one has nothing before it to fall back on."""


class ScalingConfig(ComponentConfig):
    """``protocol.scaling.api``, its registry and its watcher (scaling.md 1 and 2)."""

    timeout_s: Seconds = 600.0
    """Budget of an operation, from its submission, where the request names none."""
    poll_interval_s: Seconds = 0.5
    """Between two looks at the manager's progress."""
    progress_timeout_s: Seconds = 15.0
    """Longest wait for one answer of the manager."""
    completion_wait_s: SecondsOrNone = 60.0
    """After the deadline and the abort: how long the manager's lifecycle may take to stop."""
    reconcile_timeout_s: Seconds = 120.0
    """Longest wait for the manager's cleanup: the end of a process, and the removal of its placement group."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for the gateway to answer."""
    idempotency_window_s: Seconds = 86_400.0
    """How long a key answers for its first request; from its creation, not extended by replays."""
    max_history: Count = 1024
    """Resolved operations that are kept. Unresolved ones always are."""
    max_idempotency_records: Count = 4096
    """Keys that are kept, beside those of unresolved operations."""
    journal: Folder = ""
    """Folder in storage where it keeps operations and keys, so that a restart does not forget them. Empty: in memory
    alone, and an id that was accepted before a restart is unknown after it (hazard H12)."""


class LifecycleConfig(ComponentConfig):
    """``protocol.scaling.lifecycle.ScaleManager`` (scaling.md 3 to 5)."""

    group_cpus: Annotated[int, Field(ge=0, le=10**6)] = 2
    """CPUs in the placement group of a replica, beside its GPUs."""
    placement_timeout_s: Seconds = 120.0
    """Until a placement group is CREATED."""
    probe_timeout_s: Seconds = 60.0
    """Until a process runs in the group and answers."""
    init_timeout_s: Seconds = 900.0
    """From the launch of a replica until /ready says 200."""
    health_timeout_s: Seconds = 120.0
    """From then until it has generated a token, and the gateway has taken it."""
    shutdown_timeout_s: Seconds = 30.0
    """Until a replica's process is seen gone after its SIGKILL."""
    removal_timeout_s: Seconds = 60.0
    """Until the table says REMOVED of a group whose removal was submitted."""
    removal_poll_s: Seconds = 0.25
    poll_interval_s: Seconds = 0.2
    """Between two looks at /ready, or at whether a process is gone."""
    request_timeout_s: Seconds = 2.0
    """Connect and read time-out of /ready."""
    generate_timeout_s: Annotated[float, Field(ge=20, le=_LONGEST_S, allow_inf_nan=False)] = 22.0
    """For /health_generate, which itself gives up after 20 s."""
    drain_timeout_s: Seconds = 600.0
    """How long a victim is waited for; then it is parked: not routable, its process and its group kept."""
    abort_ends_drain: bool = True
    """An abort ends the wait for a drain at once. False: the wait goes on to ``drain_timeout_s`` and nobody may clean
    up before, as in the published runs (hazard H3)."""
    max_history: Count = 1024
    """Finished operations that are remembered."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for the gateway to answer."""
    journal: Folder = ""
    """Folder in storage where it keeps its ranks and what it is at work on, so that a restart goes on with that. Empty:
    in memory alone, and a restart forgets what it owns. Of a ``ScaleManager`` only."""


class GateConfig(ComponentConfig):
    """``protocol.serving.gate.RequestGate`` (serving.md 2.1)."""

    initially_closed: bool = True
    """Born closed, and opened by the first publication: what it is restored with need not be what a backend serves."""
    initial_model_step: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """The version that a gate born open stamps: the one that its backend serves."""

    @model_validator(mode="after")
    def _open_with_a_version(self) -> GateConfig:
        if not self.initially_closed and self.initial_model_step is None:
            raise ValueError("a gate that is born open needs initial_model_step: the version that its backend serves")
        return self


class EntrypointConfig(ComponentConfig):
    """``protocol.serving.entrypoint.Entrypoint`` (serving.md 2.3 to 2.5)."""

    admission_timeout_s: Seconds = 600.0
    """How long a request waits, uncounted, for its gate to open."""
    connect_timeout_s: Seconds = 30.0
    forward_timeout_s: Seconds = 1200.0
    """Longest time for one generation; then its outcome is unknown, which poisons the gate."""
    engine: str = "sglang 0.5.23"
    """Engine kind and version, of which the rejection of a too long context is known."""
    rejections: dict[str, str] = {}
    """Engine kind and version to the regular expression of that rejection, beside those shipped."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for the gate or the gateway to answer a call that does not wait."""


class SessionServerConfig(EntrypointConfig):
    """``protocol.serving.session_server.SessionServer`` (serving.md 2.5, 5.1, 5.2)."""

    hook_timeout_s: Seconds = 60.0
    """Longest time for one call of a hook; then it counts as failed."""
    max_body_bytes: Count = 64 * 1024 * 1024
    """Of a request; a longer one is refused with 413."""
    longest_event_bytes: Count = 64 * 1024 * 1024
    """Of one event of a stream; a longer one ends it with an error."""
    gated_streams: bool = False
    """Whether a streamed turn may have a lease. serving.md 2.5 refuses it; here it is settled once the backend's stream
    has been read to its end, whether or not the client has."""


class ControllerConfig(ComponentConfig):
    """``protocol.serving.controller.RolloutController`` (serving.md 3)."""

    prepare_timeout_s: Seconds = 600.0
    """One deadline for the whole of prepare_pause, where the caller names none."""
    resume_timeout_s: Seconds = 300.0
    """One deadline for the whole of resume_requests, where the caller names none."""
    pause_mode: Literal["none", "abort", "retract", "in_place"] = "retract"
    """How drained backends are paused until the new version is installed everywhere."""
    fence: bool = False
    """What becomes of an entrypoint that is not routed to, or that an update does not get into, while others do: it is
    taken out by name, its gate stays closed, and the publication goes on (true), or the publication fails (false)."""
    rejoin_interval_s: Seconds = 1.0
    """How often it is looked whether such an entrypoint serves the published version by now, and may be opened."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for one answer; what is idempotent is asked for again until the deadline."""


class WeightSyncConfig(ComponentConfig):
    """``protocol.training.weight_sync``, its ranks and their transports (serving.md 9)."""

    transport: Literal["disk", "ipc", "nccl", "checkpoint_engine"] = "disk"
    """disk: every engine reads the export. The others bring the weights from training ranks."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 2
    """Training ranks; each has a slice of every piece of the model."""
    bucket_gb: Annotated[float, Field(gt=0, le=1e6)] = 0.5
    """Nominal size of a bucket."""
    barrier_every: Count = 1
    """ipc: the ranks meet after so many buckets."""
    link_gb_per_s: Annotated[float, Field(gt=0, le=1e6)] = 50.0
    """How fast the bytes of a bucket get over."""
    flush: bool = True
    """Whether the prefix cache is emptied with every update. False: what the old weights computed stays, as it did
    in the originals once; only colocated transports, which give the memory away, are safe without."""
    post_timeout_s: Seconds = 60.0
    """Read time-out of the POST of one bucket; the originals have none, and hang."""
    timeout_s: Seconds = 300.0
    """One deadline for a whole update; every rank has left by then."""
    master_port: Annotated[int, Field(ge=1, le=65535)] = 30000
    """nccl: where the group meets."""
    call_timeout_s: Seconds = 60.0
    """Longest wait for a rank to take a version, to be bound or to offload."""


class AffinityConfig(ComponentConfig):
    """``protocol.serving.affinity.SessionAffinityRouter`` (serving.md 4)."""

    max_sessions: Count = 100_000
    """Bound sessions; one more is refused with 503. Tombstones do not count."""
    tombstone_ttl_s: Seconds = 3600.0
    """How long a retired session is remembered; longer than any request of it can be under way."""
    max_tombstones: Count = 1_000_000
    """Retired sessions that are remembered; above that the oldest are forgotten early."""
    forward_timeout_s: Seconds = 1900.0
    """Longest wait for a backend; above its admission_timeout_s and forward_timeout_s together."""
    sync_interval_s: Seconds = 0.5
    """How often the gateway is asked which backends are routable."""
    suspect_s: SecondsOrNone = 5.0
    """No new session for so long after a transport error: a backend that fails at once has the fewest in flight."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for the gateway to answer."""
    retire_timeout_s: Seconds = 4.0
    """Longest wait until no turn of retired sessions can be sent; below ``call_timeout_s`` of the controller, whose
    caller is told then whose turn it is."""


class ProxyConfig(ComponentConfig):
    """``protocol.serving.registration.ProxyRegistrations`` (serving.md 1)."""

    model_name: Annotated[str, Field(min_length=1)] = "policy"
    connect_attempts: Count = 5
    """Attempts in all; only a connect time-out leads to another one."""
    connect_backoff_s: SecondsOrNone = 0.1
    register_timeout_s: Seconds = 180.0
    """Bounds the connect phase and the read phase separately, as the others."""
    delete_timeout_s: Seconds = 30.0
    probe_timeout_s: Seconds = 120.0
    probe_attempts: Count = 5
    probe_interval_s: SecondsOrNone = 3.0
    retry_interval_s: Seconds = 30.0
    """How often what failed to be registered or deleted is tried again."""
    follow_interval_s: Seconds = 1.0
    """How often the gateway is asked which replicas are routed to."""


class JudgeConfig(ComponentConfig):
    """``protocol.serving.judge.Judge`` (scaling.md 8): the instance's own sampling, under that of each request."""

    model_path: str = "judge"
    """Part of what a seed is made of: another model, another seed."""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.2
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Count | None = None
    """None: all tokens, which is sent as -1."""
    max_new_tokens: Count = 1024


class TraceAccessConfig(ComponentConfig):
    """``protocol.rollout.trace_access.TraceAccess`` (serving.md 5.3)."""

    create_attempts: Count = 10
    create_backoff_s: SecondsOrNone = 0.2
    """The n-th further try to make the store waits n times this long."""
    call_timeout_s: Seconds = 5.0
    """Longest wait for one answer of the store; then it is asked again, which is harmless."""
    patience_s: Seconds = 60.0
    """How long it is asked in all."""


class TraceStoreConfig(ComponentConfig):
    """``protocol.rollout.trace_store.RolloutTraceStore`` (serving.md 5.3, 5.4)."""

    tombstone_ttl_s: Seconds = 3600.0
    """How long a released session is remembered; longer than any turn of it can be on its way to the store."""
    max_tombstones: Count = 1_000_000
    """Released sessions that are remembered; above that the oldest are forgotten early."""


class ReplayBufferConfig(ComponentConfig):
    """``protocol.rollout.replay_buffer.ReplayBuffer`` (rollout.md 6.2, 6.7)."""

    max_staleness: Annotated[int, Field(ge=0, le=10**9)] = 0
    sync_weights_interval: Count = 1
    """Training steps from one publication to the next. A sample is stale from (max_staleness + 1) times this on."""
    keep_expired: bool = False
    """Whether an expired group is rolled out again; otherwise it is dropped for good, and its sessions released."""


class ProducerConfig(ComponentConfig):
    """``protocol.rollout.producer.Producer`` (rollout.md 6.1, 6.4)."""

    groups_at_once: Count = 4
    filter_equal_rewards: bool = True
    """Whether a completed group all of whose rewards are the same is filtered: it teaches nothing."""
    poll_s: Seconds = 0.5
    """How long is waited where there is nothing to roll out, and something may yet come back."""
    failure_pause_s: SecondsOrNone = 0.5
    """How long is waited after a group that failed: what is broken is seldom well at once."""


class LearnerConfig(ComponentConfig):
    """``protocol.training.learner.Learner`` (training.md 7.2, 7.3)."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Whether groups are produced while it trains, or before each step by itself."""
    batch_groups: Count = 4
    sync_weights_interval: Count = 1
    """Training steps from one publication to the next."""
    fit_s: Seconds = 0.5
    """How long a worker works on a batch, beside reading it."""
    poll_s: Seconds = 0.2
    """How long is waited where there is no batch yet."""
    call_timeout_s: Seconds = 60.0
    """Longest wait for the buffer or a worker."""


class EvaluatorConfig(ComponentConfig):
    """``protocol.training.evaluator.Evaluator`` (training.md 7.2)."""

    groups: Count = 2
    """Of one evaluation."""
    interval_s: Seconds = 2.0
    """From the end of an evaluation to the next one."""


class RolloutScalingConfig(ComponentConfig):
    """``protocol.rollout.elastic.RolloutScaling`` (scaling.md 7), beside the time-outs of ``LifecycleConfig``."""

    drain_sleep_s: SecondsOrNone = 5.0
    """One wait for all victims of an operation together, after the gateway has let go of them."""
    export_prefix: SomeFolder = "exports"
    """Where the weights are that a new replica is given; without any export it serves its own."""
    message_chars: Annotated[int, Field(ge=16, le=100_000)] = 300
    """Longest text of a failure."""
    max_history: Count = 1024
    """Terminal operations that are kept."""
    idempotency_window_s: Seconds = 86_400.0
    """How long a key answers for its first request; from its creation, not extended by replays."""
    max_idempotency_records: Count = 4096
    """Keys that are kept, beside those of operations that go on."""
