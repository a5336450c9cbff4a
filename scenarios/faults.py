"""The faults a scenario can name: parameters, target, healing, what they must meet, colour, and who can do them.

One class a fault, the same name and parameters in both worlds. What a fault *does* lies in each world
(``sim/fault_kinds.py``, ``real/faults/kinds.py``); the injector (``scenarios/injector.py``) says when, and records what
it met.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from protocol.bad_answers import Bad
from scenarios.fields import Count, Fraction01, NotNegative, Positive, SomeSeconds, SpecModel

TargetKind = Literal["process", "link", "node", "storage", "placement"]
Healing = Literal["reverted", "recovered", "spent"]
"""How a fault ends. reverted: after ``for_s`` the injector takes it back. recovered: what it broke is replaced by the
component whose job that is, nothing is taken back. spent: it ends with the ``count``-th message it met, at the latest
after ``for_s``."""


class FaultSpec(SpecModel):
    """A fault's parameters. Class attributes say the rest."""

    name: ClassVar[str]
    target: ClassVar[TargetKind]
    healing: ClassVar[Healing]
    colour: ClassVar[str]
    """Shading in plots."""
    worlds: ClassVar[tuple[str, ...]] = ("sim", "real")
    engines_only: ClassVar[bool] = False
    """Whether it befalls replicas alone, and no actor."""
    between_nodes: ClassVar[bool] = False
    """Whether its link is that of two nodes, so that each end must be one name."""
    must_hit: ClassVar[dict[str, dict[str, int]]] = {"hits": {"at_least": 1}}
    """What it must meet unless the step says otherwise."""

    def params(self) -> dict[str, Any]:
        """The parameters, as evidence shows them."""
        return self.model_dump(mode="json", by_alias=True)


class Sigkill(FaultSpec):
    """The process is killed: no ``finally`` runs. Its supervisor (recovery) brings it back."""

    name = "sigkill"
    target = "process"
    healing = "recovered"
    colour = "#d62728"
    must_hit = {"in_flight": {"at_least": 1}}
    part: Literal["main", "scheduler", "detokenizer"] = "main"
    """Of a replica: which of its processes. The whole replica dies of the loss of any, sooner or later."""


class Sigterm(FaultSpec):
    """SIGTERM to a replica, as an orchestrator asks one to end. It takes new requests until nothing is in flight, so
    that steady traffic keeps it; recovery brings it back."""

    name = "sigterm"
    target = "process"
    engines_only = True
    healing = "recovered"
    colour = "#c49c94"
    must_hit = {"in_flight": {"at_least": 1}}


class RestartEmpty(FaultSpec):
    """Killed and started again at once under the same name: alive, but everything that it held in memory is gone."""

    name = "restart_empty"
    target = "process"
    healing = "recovered"
    colour = "#e377c2"
    must_hit = {"in_flight": {"at_least": 1}}


class Sigstop(FaultSpec):
    """SIGSTOP; SIGCONT after ``for_s``. Nobody is told: only the callers' own time-outs notice."""

    name = "sigstop"
    target = "process"
    healing = "reverted"
    colour = "#ff7f0e"
    must_hit = {"in_flight": {"at_least": 1}}


class Slow(FaultSpec):
    """Everything the process does takes ``percent`` of its time."""

    name = "slow"
    target = "process"
    healing = "reverted"
    colour = "#bcbd22"
    must_hit = {"in_flight": {"at_least": 1}}
    percent: Count = 400


class Wedge(FaultSpec):
    """Alive, health answers, no progress: the engine's scheduler stands still."""

    name = "wedge"
    target = "process"
    engines_only = True
    healing = "reverted"
    colour = "#8c564b"
    must_hit = {"in_flight": {"at_least": 1}}


class Partition(FaultSpec):
    """The link carries nothing; messages wait for the repair, as TCP would have them."""

    name = "partition"
    target = "link"
    between_nodes = True
    healing = "reverted"
    colour = "#9467bd"
    one_way: bool = False


class Latency(FaultSpec):
    """The link takes ``extra_s`` longer."""

    name = "latency"
    target = "link"
    between_nodes = True
    healing = "reverted"
    colour = "#c5b0d5"
    extra_s: SomeSeconds


class MessageFault(FaultSpec):
    """Base of the fates of single messages."""

    target = "link"
    healing = "spent"
    method: str = "*"
    """Only calls of this method or HTTP route; ``*`` and ``?`` match as in a shell."""
    count: Count | None = None
    """At most this many; unlimited where only ``for_s`` ends it."""
    chance: Fraction01 = 1.0


class RequestLost(MessageFault):
    """The request never arrives; the caller hears nothing."""

    name = "request_lost"
    colour = "#17becf"


class ReplyLost(MessageFault):
    """The effect happens, the reply never arrives."""

    name = "reply_lost"
    colour = "#1f77b4"


class DelayedDelivery(MessageFault):
    """The request arrives ``delay_s`` late; with ``error_now`` its caller has seen the connection break by then."""

    name = "delayed_delivery"
    colour = "#aec7e8"
    delay_s: SomeSeconds
    error_now: bool = False


class Duplicate(MessageFault):
    """The request arrives twice, the second time ``delay_s`` later."""

    name = "duplicate"
    colour = "#98df8a"
    delay_s: NotNegative = 0.05


class ConnectTimeoutFault(MessageFault):
    """No connection: nothing was sent (not done)."""

    name = "connect_timeout"
    colour = "#7f7f7f"


class ReadTimeoutFault(MessageFault):
    """The request arrives and is handled; the answer stalls until the caller's read time-out (unknown)."""

    name = "read_timeout"
    colour = "#636363"


class BadAnswer(MessageFault):
    """The engine does its work, and what comes back is not its answer. Of calls through a session server alone."""

    name = "bad_answer"
    colour = "#b5cf6b"
    what: Bad


class SlowExport(FaultSpec):
    """Reading and writing files of the export takes ``percent`` of its time."""

    name = "slow_export"
    target = "storage"
    healing = "reverted"
    colour = "#2ca02c"
    percent: Count = 1000


class TornExport(FaultSpec):
    """Of the next ``count`` writes only ``fraction`` of the bytes arrive, and the writer is told it went well."""

    name = "torn_export"
    target = "storage"
    healing = "spent"
    colour = "#006d2c"
    fraction: Fraction01 = 0.5
    count: Count = 1


class DiskFull(FaultSpec):
    """After ``free_bytes`` more, writes fail for want of space."""

    name = "disk_full"
    target = "storage"
    healing = "reverted"
    colour = "#393b79"
    free_bytes: int = Field(0, ge=0)


class ClockSkew(FaultSpec):
    """Steps the node's wall clock by ``step_s``; monotonic clocks do not move."""

    name = "clock_skew"
    target = "node"
    healing = "reverted"
    colour = "#e7ba52"
    step_s: float


class MetricsMissing(FaultSpec):
    """The metrics page answers 404."""

    name = "metrics_missing"
    target = "process"
    engines_only = True
    healing = "reverted"
    colour = "#f7b6d2"


class MetricsStale(FaultSpec):
    """The metrics page shows what it showed when the fault began."""

    name = "metrics_stale"
    target = "process"
    engines_only = True
    healing = "reverted"
    colour = "#fbb4ae"


class MetricsNan(FaultSpec):
    """Every value on the metrics page is NaN."""

    name = "metrics_nan"
    target = "process"
    engines_only = True
    healing = "reverted"
    colour = "#fccde5"


class PlacementStuck(FaultSpec):
    """Placement groups asked for from now on stay PENDING."""

    name = "placement_stuck"
    target = "placement"
    healing = "reverted"
    colour = "#525252"


class RemovalFails(FaultSpec):
    """Removals of placement groups have no effect; with ``late_s`` they have it that much later."""

    name = "removal_fails"
    target = "placement"
    healing = "reverted"
    colour = "#969696"
    late_s: Positive | None = None


class RemovalRefused(FaultSpec):
    """Removals of placement groups are refused with an error; nothing is done."""

    name = "removal_refused"
    target = "placement"
    healing = "reverted"
    colour = "#d9d9d9"


class NodeLoss(FaultSpec):
    """The node is gone with all that runs on it; with ``zombie`` it is declared dead and its processes still act."""

    name = "node_loss"
    target = "node"
    healing = "reverted"
    colour = "#843c39"
    must_hit = {"processes": {"at_least": 1}}
    zombie: bool = False


CATALOG: tuple[type[FaultSpec], ...] = (
    Sigkill, Sigterm, RestartEmpty, Sigstop, Slow, Wedge, Partition, Latency, RequestLost, ReplyLost, DelayedDelivery,
    Duplicate, ConnectTimeoutFault, ReadTimeoutFault, BadAnswer, SlowExport, TornExport, DiskFull, ClockSkew,
    MetricsMissing, MetricsStale, MetricsNan, PlacementStuck, RemovalFails, RemovalRefused, NodeLoss,
)  # fmt: skip
FAULTS: dict[str, type[FaultSpec]] = {fault.name: fault for fault in CATALOG}


class ExportParams(SpecModel):
    """``export``: have the exporter write and publish a new version."""

    service: str | None = None
    """Needed where there are several."""
    version: str
    """Label of the version; the weights are derived from it."""


class AdminParams(SpecModel):
    """``admin``: a round over every replica of a service, as its admin component does it."""

    service: str | None = None
    operation: Literal["flush", "pause"] = "flush"
    """flush: POST /flush_cache. pause: /pause_generation, and /continue_generation after ``admin.pause_hold_s``."""


class PublishParams(SpecModel):
    """``publish``: export the weights of a model step, and have every entrypoint serve them behind the barrier."""

    service: str | None = None
    """Needed where there are several."""
    model_step: int = Field(ge=0)
    """Version; the deployment publishes 0."""
    attempts: Count = 1
    """Tries in all; each goes on where the one before it failed. Poison ends it."""
    retry_s: SomeSeconds = 1.0
    """From a failed try to the next one."""


class NoteParams(SpecModel):
    """``note``: a mark in the evidence."""

    text: str


class ScaleParams(SpecModel):
    """Base of the verbs that submit a target."""

    service: str | None = None
    """Needed where there are several."""
    num_replicas: Count
    """Replicas in all, never a difference."""
    idempotency_key: str | None = None
    """With a key, an answer that was lost is asked for again."""
    timeout_s: SomeSeconds | None = None
    """Budget of the operation; by default the API's own."""
    poll_s: SomeSeconds = 1.0
    """Between two looks at the operation, until it is terminal."""
    attempts: Count = 5
    """Submissions in all, where there is a key."""
    sent_as: Literal["integer", "text", "float", "boolean"] = "integer"
    """How a careless client writes the number: 2, "2", 2.0 or true. Only the first may be admitted."""


class ScaleOutParams(ScaleParams):
    """``scale_out``: submit a larger total of replicas, and follow the operation to its end."""


class ScaleInParams(ScaleParams):
    """``scale_in``: submit a smaller total of replicas, and follow the operation to its end."""

    force: bool = False
    """Of rollout replicas: do not wait for what is in flight."""
    evict: bool = False
    """Of rollout replicas: remove a victim all the same that is not idle in time."""


class ReconcileParams(SpecModel):
    """``reconcile``: have the latest operation of a direction cleaned up, again and again until it is clean."""

    service: str | None = None
    """Needed where there are several."""
    direction: Literal["scale_out", "scale_in"] = "scale_in"
    every_s: SomeSeconds = 10.0
    """Between two tries."""
    within_s: SomeSeconds = 700.0
    """After this it is given up."""


class SyncWeightsParams(SpecModel):
    """``sync_weights``: export a version, and have the API of a rollout service load it everywhere."""

    service: str | None = None
    """Needed where there are several."""
    version: str
    """Label of the version; the weights are derived from it."""
    attempts: Count = 1
    """Tries in all: an update is refused while replicas drain."""
    retry_s: SomeSeconds = 1.0


class CancelParams(SpecModel):
    """``cancel``: cancel the latest scale-out of a rollout service."""

    service: str | None = None
    """Needed where there are several."""


class LookParams(SpecModel):
    """``look``: have the autoscaler's status read, as a monitor does."""

    service: str | None = None
    """Whose autoscaler; needed where there are several services."""


VERBS: dict[str, type[SpecModel]] = {
    "export": ExportParams,
    "admin": AdminParams,
    "note": NoteParams,
    "publish": PublishParams,
    "scale_out": ScaleOutParams,
    "scale_in": ScaleInParams,
    "reconcile": ReconcileParams,
    "look": LookParams,
    "sync_weights": SyncWeightsParams,
    "cancel": CancelParams,
}
"""What a step can do beside a fault."""
