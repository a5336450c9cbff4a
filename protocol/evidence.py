"""Evidence: every event kind with its fields, the Event itself, and the Recorder port. The only thing a verdict reads.

One event is one JSON line. `docs/evidence.md` is generated from the table below (``python -m analysis schema``).
``world`` kinds are seen by the world (handle boundary, engine proxy, storage, injector, client) and carry invariants;
``component`` kinds are claims of protocol code and only explain.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from protocol.event_lines import FIELD_TYPES, Encoder, compile_encoder, who

SCHEMA_VERSION = 1

Observer = Literal["world", "component"]


@dataclasses.dataclass(slots=True)
class Event:
    """One observed fact. Nobody changes one that is made; it is not frozen, for a run makes ten a request.

    ``cause`` is the id ``actor/incarnation/n`` of the event on another process that this one follows from (the send
    of the message being handled), or None. ``lc`` is a Lamport clock: if a happened before b then a.lc < b.lc.
    """

    seq: int
    t_ns: int
    kind: str
    actor: str
    inc: int
    n: int
    lc: int
    cause: str | None
    data: dict[str, Any]

    @property
    def id(self) -> str:
        """``actor/incarnation/n``: what the ``cause`` of another event names."""
        return f"{self.actor}/{self.inc}/{self.n}"

    @property
    def t_s(self) -> float:
        """Seconds since the start of the run."""
        return self.t_ns / 1e9


T = TypeVar("T")


class EventKind(NamedTuple):
    """A declared kind. ``fields`` maps name to (type, meaning); ``worlds`` are those that can produce it."""

    name: str
    observer: Observer
    doc: str
    fields: dict[str, tuple[str, str]]
    worlds: tuple[str, ...]
    encode: Encoder


class UndeclaredEvent(Exception):
    """An emit of a kind or field that the table does not have, or of a value of another type."""


def observer(cls: type[T]) -> type[T]:
    """Declare a class part of the world (a client at the edge): its instances may emit ``world`` kinds.

    Every other actor is a component: what it emits is a claim, and it may not pass a claim off as an observation.
    """
    cls.__seatrial_observer__ = True  # type: ignore[attr-defined]  # a mark, looked for by name
    return cls


def check_may_emit(cls: type | None, kind: str) -> None:
    """Raises UndeclaredEvent when an actor of this class (None: the driver) may not emit events of this kind."""
    declared = KINDS.get(kind)
    if declared is None:
        raise UndeclaredEvent(f"event kind {kind!r} is not declared in protocol/evidence.py")
    if declared.observer == "world" and cls is not None and not getattr(cls, "__seatrial_observer__", False):
        raise UndeclaredEvent(
            f"{cls.__qualname__} is a component and may only emit component kinds; {kind!r} is the world's to emit"
        )


class Recorder(Protocol):
    """Where events go. ``record`` must not raise for a declared event; it is called before the effect it reports."""

    def record(self, event: Event) -> None:
        """Keep one event. In the real world it is on disk when this returns."""
        ...


KINDS: dict[str, EventKind] = {}


def declare(
    name: str, observer: Observer, doc: str, worlds: tuple[str, ...] = ("sim", "real"), /, **fields: str
) -> EventKind:
    """Declare a kind of a user's package: ``field="type: meaning"``. Such a kind is always a *component* one.

    Raises:
        ValueError: the name is taken by another declaration, a type is unknown, or the observer is ``world``.
    """
    if observer == "world":
        raise ValueError(f"event kind {name!r}: only this package declares world kinds; declare it as a component kind")
    return _declare(name, observer, doc, worlds, **fields)


def _declare(
    name: str, observer: Observer, doc: str, worlds: tuple[str, ...] = ("sim", "real"), /, **fields: str
) -> EventKind:
    table: dict[str, tuple[str, str]] = {}
    for field, text in fields.items():
        type_, _, meaning = text.partition(":")
        if type_ not in FIELD_TYPES:
            raise ValueError(f"event kind {name!r}, field {field!r}: unknown type {type_!r}; use one of {FIELD_TYPES}")
        table[field] = (type_, meaning.strip())
    kind = EventKind(name, observer, doc, table, worlds, compile_encoder(name, table))
    old = KINDS.get(name)
    if old is not None and old[:5] != kind[:5]:
        raise ValueError(f"event kind {name!r} is declared twice, differently")
    KINDS[name] = kind
    return kind


def encode(event: Event) -> str:
    """The JSON line of an event, newline included.

    Raises:
        UndeclaredEvent: unknown kind, missing or unknown field, or a value of the wrong type.
    """
    kind = KINDS.get(event.kind)
    if kind is None:
        raise UndeclaredEvent(f"event kind {event.kind!r} is not declared in protocol/evidence.py")
    try:
        text = who(event.actor, event.inc)
        return kind.encode(event.seq, event.t_ns, text, event.n, event.lc, event.cause, event.data)
    except (KeyError, ValueError, TypeError) as error:
        raise UndeclaredEvent(
            f"event {event.kind!r} has fields {event.data!r}; declared are "
            f"{ {f: t for f, (t, _) in kind.fields.items()} } ({type(error).__name__}: {error})"
        ) from error


def decode(line: str | bytes) -> Event:
    """Parse one line. Raises ValueError with what is wrong (the caller knows file and line)."""
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    try:
        return Event(
            raw["seq"], raw["t_ns"], raw["kind"], raw["actor"], raw["inc"], raw["n"], raw["lc"], raw["cause"], raw["data"]
        )
    except KeyError as error:
        raise ValueError(f"event has no key {error.args[0]!r}") from error


def schema() -> Iterator[EventKind]:
    """The kinds of the table below, by name, without those that users' packages have declared."""
    for name in sorted(_TABLE):
        yield KINDS[name]


# --- the run ---
_declare("run.started", "world", "First event but for the birth of the driver. What judges need to know of the run.",
        scenario="str: name", seed="int: seed", world="str: sim, real, or imported (analysis/foreign)",
        clock_error_ns="int: bound on the difference of two processes' clocks; 0 in sim",
        schema="int: version of this table")
_declare("run.workload", "world", "Every replica is up and the workload begins: times of steps, and of what must be reached, count from here.")
_declare("run.finished", "world", "Last event of a run that ended by itself.",
        reason="str: completed, deadlock, livelock, endless_callback (a callback that did not come back in real time), "
        "time_limit or crash",
        detail="str: report, empty when completed", events="int: events recorded before this one")
_declare("run.step", "world", "A scenario step fired.",
        step="int: index in the file", do="str: verb", asked_ns="int?: asked time, None for event-triggered steps",
        trigger="str?: id of the triggering event", phase="str?: before or after its effect, as asked",
        held="bool: the process of the triggering event was held until the step was done",
        late_ns="int: how long after the asked instant; 0 in sim")
_declare("run.healed", "world", "The last fault is healed: from here everything must converge.", faults="int: faults injected")
_declare("run.tail", "world", "Evidence is missing: a death cut a last line short, a process wrote nothing of its death, or the world itself broke.", ("real",),
        process="str: name/incarnation; driver/0 where it is everybody's", what="str: torn, silent or broken", detail="str: text")
_declare("run.wait", "world", "One edge of the who-waits-for-whom report of a deadlock.",
        waiter="str: task", waits_for="str: what", should_wake="str: who holds it or should have answered")
_declare("run.unheard", "world", "A component that had to say whether the run has converged did not, until the bound was over: whether it has is not known.",
        who="str: actor", asked="str: method", why="str: how the last question ended")
_declare("run.anomaly", "world", "Something asyncio would only have logged: fails an invariant.",
        what="str: never_awaited, unretrieved, unfinished_generator, loop_exception, refused_call; real: "
        "breakpoint_unanswered (the driver did not see an event that a step waits for), fault_half_done",
        detail="str: text")

# --- processes ---
_declare("actor.spawned", "world", "A process started.", cls="str: class", node="str: node", role="str: actor, engine or driver")
_declare("actor.died", "world", "A process ended.", reason="str: killed, crashed, node_lost, exited", detail="str: error text")
_declare("actor.stopped", "world", "SIGSTOP reached a process.")
_declare("actor.continued", "world", "SIGCONT reached a process.")
_declare("actor.death_noticed", "world", "Callers learn of a death.", target="str: name", target_inc="int: incarnation")
_declare("call.sent", "world", "A call left its caller.",
        call="int: run-unique number", target="str: callee, as addressed", target_inc="int: its incarnation, as addressed",
        method="str: method or route")
_declare("call.done", "world", "A call ended at its caller.",
        call="int: number", outcome="str: done, not_done, unknown", error="str: class of the error, empty when done")
_declare("call.fate", "world", "The network did something to a message of a call.",
        call="int: number", fate="str: request_lost, reply_lost, delayed, duplicated, held, connect_timeout, read_timeout",
        source="str: from", target="str: to")

# --- requests, as the client at the edge sees them ---
_declare("request.sent", "world", "A client sent a generation request.",
        request="str: id", prompt_tokens="int: count", max_new_tokens="int: count", idempotent="bool: may be replayed")
_declare("request.done", "world", "The client has its answer, or gave up.",
        request="str: id", outcome="str: done, not_done, unknown", status="int: HTTP-like status, 0 without an answer",
        error="str: class of the error", completion_tokens="int: count", version="str: version the engine answered with",
        replica="str: engine that answered", replica_inc="int: its incarnation", attempts="int: sends to a replica")

# --- engines, as their proxy sees them ---
_declare("engine.started", "world", "An engine process started.", port="int: port", profile="str: profile", version="str: version")
_declare("engine.ready", "world", "The engine answers /ready with 200.", version="str: weight version", weight_hash="str: hash")
_declare("engine.options", "world", "How an engine that was given options is set up to compute.",
        deterministic="bool: deterministic mode", attention_backend="str: as named, empty for its own choice",
        gpu="str: generation, empty where not known", server_seed="int: seed of the process", keeps_prefixes="bool: has a prefix cache")
_declare("engine.sampling", "world", "How a JSON call that has reached an engine with options is sampled.",
        request="str: id", temperature="float: 0 is greedy", seed="int?: seed in the request, None without one")
_declare("engine.accepted", "world", "A generation request reached the engine's scheduler.",
        request="str: id", running="int: requests running", queued="int: requests queued")
_declare("engine.prompt", "world", "A JSON call about a conversation has reached an engine.",
        request="str: id, empty for a call that generates nothing", route="str: route", tokens="int: of the prompt",
        continues="str: id of the longest earlier generation of this engine that the prompt begins with, empty without one",
        continued_tokens="int: its prompt and output",
        unasked="json: fields of the body that no client sends: for hooks alone, or put in by a hook")
_declare("engine.refused", "world", "The engine refused a request.", request="str: id", status="int: status", why="str: text")
_declare("engine.finished", "world", "The engine finished a request (whether or not anybody hears of it).",
        request="str: id", reason="str: length, stop, abort", completion_tokens="int: count", cached_tokens="int: count",
        stale_cached_tokens="int?: cached tokens of another weight version; None where the engine does not tell",
        spans="json: [[version, start, end, weight_hash], ...] by output token")
_declare("engine.weights", "world", "Weights changed, or were asked to.",
        version="str: version now served", weight_hash="str: truth", ok="bool: answer said success", detail="str: text",
        in_flight="int: requests in flight at the change")
_declare("engine.bucket", "world", "A part of new weights is in place; until the last one the label stays.", ("sim",),
        route="str: route", bucket="int: which, from 0", of="int: of how many", weight_hash="str: what the weights are now")
_declare("engine.memory", "world", "Device memory of an engine was given away or taken back.", ("sim",),
        action="str: released or resumed", tags="json: weights, kv_cache", resident="json: what is there afterwards")
_declare("engine.paused", "world", "pause_generation took effect.", mode="str: abort, retract, in_place")
_declare("engine.resumed", "world", "continue_generation took effect.")
_declare("engine.flushed", "world", "The prefix cache was emptied, which had outlived a change of weights because its flush was refused.")
_declare("engine.abort_asked", "world", "A POST that ends generations has reached the engine: /abort_request, or an update that aborts "
        "all. Or the engine saw a caller leave, and ends others by that; then it follows from nothing.",
        request="str: id in it, empty without one", everything="bool: abort_all, or abort_all_requests")
_declare("engine.leaving", "world", "SIGTERM reached the engine: it ends when nothing is in flight, and takes new requests until then.")
_declare("engine.post", "world", "An admin POST reached the engine (once per delivery).",
        route="str: route", status="int: answer, 0 when it comes later", delivery="str: id of the message")

# --- storage, nodes, placement groups ---
_declare("storage.written", "world", "A file is whole in storage.", path="str: path", size="int: nominal bytes",
        sha256="str: of the content", fsync="bool: survives node loss", writer="str: who")
_declare("storage.torn", "world", "A write was cut short.", path="str: path", size="int: bytes kept", writer="str: who")
_declare("storage.renamed", "world", "A file or prefix got its final name.", old="str: path", new="str: path")
_declare("storage.read", "world", "A file was read to its end.", path="str: path", size="int: nominal bytes", reader="str: who",
        sha256="str: of the content read")
_declare("storage.failed", "world", "A storage call failed.", path="str: path", op="str: write, read, ...", error="str: class")
_declare("node.lost", "world", "A node was lost or declared dead.", node="str: node", zombie="bool: its processes still act")
_declare("node.restored", "world", "A node is back, empty.", node="str: node")
_declare("placement.state", "world", "A placement group changed state.", group="str: id", state="str: PENDING, CREATED, REMOVED",
        owner="str: who asked")

# --- faults ---
_declare("fault.injected", "world", "A fault began.", fault="int: number in this run", name="str: fault name",
        target="str: what", params="json: parameters", must_hit="json: what it must meet", observed="json: what it met at once")
_declare("fault.hit", "world", "A fault met something (a message lost, a write torn, ...).",
        fault="int: number", what="str: what it met", count="int: hits so far")
_declare("fault.healed", "world", "A fault ended.", fault="int: number", name="str: fault name", target="str: what",
        hits="int: hits in all", satisfied="bool: must_hit was met")

# --- leaks, found at the end ---
_declare("leak.found", "world", "Something is still held after the run's shutdown.", what="str: call, request, process, placement_group, resources, task", detail="str: which")

# --- claims of components: gateway, health, recovery, admin, checkpoint ---------------------------------------------------
_declare("gateway.picked", "component", "A replica was picked and counted.", request="str: id", replica="str: engine",
        replica_inc="int: incarnation", in_flight="int: its count after")
_declare("gateway.moved", "component", "A retry moved the count.", request="str: id", replica="str: new", replica_inc="int: new",
        old="str: old engine", old_inc="int: old incarnation", why="str: error class")
_declare("gateway.released", "component", "The count was given back.", request="str: id", replica="str: engine",
        replica_inc="int: incarnation", in_flight="int: its count after", ok="bool: the call succeeded")
_declare("gateway.routable", "component", "A replica entered the pick set.", replica="str: engine", replica_inc="int: incarnation")
_declare("gateway.unroutable", "component", "A replica left the pick set.", replica="str: engine", replica_inc="int: incarnation",
        why="str: reason")
_declare("health.changed", "component", "The prober changed its mind on a replica.", replica="str: engine",
        replica_inc="int: incarnation", healthy="bool: verdict", failures="int: consecutive failures", why="str: text")
_declare("recovery.began", "component", "Recovery of a replica began.", replica="str: engine", replica_inc="int: dead incarnation",
        why="str: reason")
_declare("recovery.step", "component", "Recovery reached a stage.", replica="str: engine", replica_inc="int: new incarnation",
        stage="str: launched, ready, loaded, validated, published, retry, gave_up", detail="str: text")
_declare("admin.attempt", "component", "One attempt of an admin POST.", operation="str: id", route="str: route", target="str: engine",
        attempt="int: 1-based", outcome="str: done, not_done, unknown", error="str: class, empty when done")
_declare("export.published", "component", "An export is complete and named.", version="str: version", path="str: path",
        weight_hash="str: hash")
_declare("export.rejected", "component", "A loader found an export broken.", path="str: path", why="str: text", reader="str: who")

# --- scaling: what the world and the operator see ---
_declare("placement.entered", "world", "A process was started in a placement group.", group="str: id", process="str: name",
        process_inc="int: its incarnation")
_declare("placement.removal_asked", "world", "Somebody asked for the removal of a placement group.", group="str: id", by="str: who")
_declare("scale.asked", "world", "An operator called the control API.",
        ask="str: run-unique id of the call", service="str: whose API", route="str: scale_out, scale_in, status, reconcile or cancel",
        direction="str: scale_out or scale_in", operation="str: id in the path, empty for a submission",
        target="int?: replicas in all, of a submission; None where it was sent as no integer", key="str?: idempotency key", timeout_s="float?: budget that was asked for")
_declare("scale.connects", "world", "A submission names the engines that are to be replicas, in place of a number of replicas.",
        ask="str: id of the call", engines="int: addresses")
_declare("scale.answered", "world", "The operator has its answer, or none.",
        ask="str: id of the call", status="int: HTTP-like status, 0 without an answer", code="str: error code, empty with 200",
        operation="str: id in the answer, empty without one", state="str: state or decision in the answer",
        cleanup="str: true, false or unknown, as scaling.md 2.6 reads it; unknown in every answer to a submission",
        current="int?: replicas", ready="int?: replicas")
_declare("rollout.scaled", "world", "A service whose weights change is scaled by an API of its own kind.", service="str: name", api="str: actor")
_declare("weights.synced", "world", "The operator of a rollout service had an export loaded everywhere, or was refused.", service="str: name",
        version="str: of the export", status="int: HTTP-like status, 0 without an answer", code="str: error code, empty with 200")
_declare("scale.bounds", "world", "What a control API keeps, where that is less (or more) than usual.", service="str: name",
        max_history="int: resolved operations", max_keys="int: idempotency keys")
_declare("scale.budget", "world", "How long an operation of a control API may take, where that is not as usual.", service="str: name",
        budget_s="float: of one that names no budget; 600 where nothing is said",
        wait_s="float: after it, until the manager's lifecycle has stopped; 60 where nothing is said")
_declare("scale.window", "world", "How long an idempotency key of a control API answers for its first request, where that is not as usual.",
        service="str: name", window_s="float: 86400 where nothing is said")
_declare("scale.snapshot", "world", "What an operator sees of a service at a moment when no operation is open.",
        service="str: name", when="str: deployed or final", initial="json: names of the replicas of the deployment",
        routable="json: names of the replicas that are routed to", current="int?: as the API says", ready="int?: as the API says",
        occupied="int?: as the API says", pending_cleanup="int?: as the API says",
        groups="int: placement groups that are not REMOVED")

# --- claims of components: scaling ---
_declare("scale.decision", "component", "The registry decided on a submission.", direction="str: scale_out or scale_in",
        model="str: model", target="int?: replicas in all; None where it was no integer", key="str?: idempotency key",
        result="str: ADMITTED, REPLAY, NOOP or the error code", operation="str: id, empty without one",
        current="int: authoritative", ready="int: authoritative")
_declare("scale.state", "component", "An operation entered a state that is not terminal.", operation="str: id",
        direction="str: scale_out or scale_in", state="str: state", model="str: model")
_declare("scale.terminal", "component", "An operation ended.", operation="str: id", direction="str: scale_out or scale_in",
        state="str: ACTIVE, PARTIAL, COMPLETED or FAILED", current="int: replicas", ready="int: replicas", created="int: of this operation",
        removed="int: of this operation", failed="int: of this operation", cleanup_required="bool: something may be left", error="str: text")
_declare("scale.reconciled", "component", "A reconcile was answered with 200.", operation="str: id", direction="str: scale_out or scale_in",
        state="str: state, which it never changes", cleanup_required="bool: something is still left", detail="str: text")
_declare("scale.slot", "component", "Something became of a rank.", operation="str: that created or drains it", rank="int: for ever",
        replica="str: engine", replica_inc="int?: incarnation, None before its launch", group="str: placement group owned, empty before",
        what="str: candidate, owns_group, probe_left, launched, published, unreleased, stopped, held or retired", detail="str: text")
_declare("scale.drain", "component", "Something became of a drain.", operation="str: id", replica="str: victim", replica_inc="int: incarnation",
        rank="int: rank", generation="int: number of the drain", what="str: chosen, confirmed, ignored, parked or restored")

# --- publishing under live agents: what the world, the operator and the agents see ---
_declare("publishing.deployed", "world", "The entrypoints of a service, once all are up.",
        service="str: name", entrypoints="json: [[entrypoint, gate, replica], ...]; gate is empty where there is none",
        controller="str: actor", router="str: actor", prepare_timeout_s="float: deadline of a prepare_pause",
        resume_timeout_s="float: deadline of a resume_requests")
_declare("weights.deployed", "world", "A service whose weights come from training ranks.", service="str: name",
        transport="str: ipc, nccl or checkpoint_engine", ranks="json: [actor, ...]", trainer="str: actor",
        timeout_s="float: deadline of an update, by which every rank has left")
_declare("proxy.deployed", "world", "A routed proxy stands before the entrypoints of a service.", service="str: name",
        proxy="str: actor", registrations="str: actor that tells it which backends there are",
        urls="json: [[replica or empty, URL], ...] that it is to have", connect_attempts="int: attempts of an admin POST")
_declare("proxy.post", "world", "A POST reached the proxy, and what it did there.", service="str: name",
        route="str: new, delete or chat", url="str: backend, empty for a whole model", session="str: of a chat completion",
        effect="str: registered, duplicate (it was there), deleted, deleted_all, absent, busy (503, nothing done), answered or failed",
        table="int: backends registered afterwards")
_declare("proxy.forwarded", "world", "The proxy picked a backend for a turn.", service="str: name", session="str: id",
        request="str: id", url="str: backend")
_declare("proxy.snapshot", "world", "What the proxy has when all episodes are over.", service="str: name",
        table="json: URLs registered", routable="json: URLs that it should have")
_declare("publication.asked", "world", "An operator asked for a publication.", service="str: name", model_step="int: version")
_declare("publication.ended", "world", "The operator was told what became of it, or that nobody knows.", service="str: name",
        model_step="int: version", outcome="str: done, not_done, unknown", error="str: class, empty when done")
_declare("turn.sent", "world", "An agent sent a turn; request.sent of the same request follows.", request="str: id",
        session="str: id", service="str: name", turn="int: from 0")
_declare("turn.done", "world", "The agent has the answer of a turn; request.done of the same request follows.", request="str: id",
        session="str: id", model_step="int: version that the answer is stamped with, -1 without one",
        lease="str: id in the answer", entrypoint="str: who answered", finish_reason="str: length, stop, abort")
_declare("session.ended", "world", "An episode is over.", session="str: id", service="str: name", turns="int: answered",
        outcome="str: completed or failed", retired="bool: its retirement was acknowledged")
_declare("session.late", "world", "A request of an episode that is over was sent on purpose.", session="str: id",
        request="str: id", status="int: of the answer, 200 when it was served", error="str: class")
_declare("affinity.snapshot", "world", "What an operator sees of a router when all episodes are over.", service="str: name",
        bindings="int: sessions bound", tombstones="int: retired sessions remembered", in_flight="int: over all backends",
        assigned="int: over all backends")

# --- claims of components: publishing ---
_declare("gate.granted", "component", "A lease was granted.", lease="str: id", session="str: id", epoch="int: cycle",
        model_step="int: version on it", active="int: leases after")
_declare("gate.settled", "component", "A lease ended.", lease="str: id", backend_ended="bool: nothing runs for it any more",
        terminal_recorded="bool: its end is on record", label="str: how", active="int: leases after")
_declare("gate.poisoned", "component", "A lease ended in an unknown way.", why="str: text", failures="int: so far")
_declare("gate.changed", "component", "A gate reached a stage of a cycle.", what="str: sealed, drained, installed or reopened",
        epoch="int: cycle", model_step="int: installed version")
_declare("entrypoint.turn", "component", "The end of a turn is on record.", lease="str: id", session="str: id", label="str: how")
_declare("controller.stage", "component", "A stage over all entrypoints ended.", epoch="int: cycle, 0 without a barrier",
        stage="str: frozen, sealed, drained, paused, served, installed, continued, reopened or failed", detail="str: text")
_declare("controller.fenced", "component", "An entrypoint was taken out of a barrier by name, or may rejoin.",
        epoch="int: cycle", replica="str: engine", what="str: fenced or rejoined", why="str: text")
_declare("weights.stage", "component", "A stage of a weight update by training ranks ended.", transport="str: which",
        stage="str: taken, released, registered, flushed, bound, weights_back, updated, offloaded or kv_back",
        detail="str: engines that did not do it, or why it failed")
_declare("weights.given_up", "component", "A rank leaves an update that it cannot complete.", update="str: id",
        rank="int: number", why="str: text")
_declare("affinity.bound", "component", "A session was bound to a backend.", session="str: id", target="str: entrypoint",
        assigned="int: of that backend, after")
_declare("affinity.refused", "component", "A request was refused before it was forwarded.", session="str: id", request="str: id",
        status="int: 400, 403, 410 or 503", why="str: text")
_declare("affinity.retired", "component", "Sessions were retired.", sessions="int: in this call", bound="int: that had a binding",
        tombstones="int: after", expired="int: tombstones forgotten with this call")
_declare("proxy.changed", "component", "What the proxy is believed to have.", url="str: backend", what="str: registered, deleted, "
        "register_failed or delete_failed", error="str: class, empty without one")

_declare("autoscaler.shown", "world", "What an autoscaler's status says of one service, when somebody looked.", scaler="str: actor",
        service="str: name", last_action="str?: scale_out or scale_in, None before the first")

# --- judgements ---
_declare("judge.arm", "world", "A round over all cases began or ended.", service="str: name", arm="str: greedy or sampled",
        workload="int: number of the workload", what="str: began or ended")
_declare("judge.asked", "world", "A client asked for a judgement; request.sent of the same request follows.", request="str: id",
        service="str: name", case="str: name of the input", arm="str: greedy or sampled", workload="int: number of the workload",
        temperature="float: asked for", seed="int?: that the caller named",
        content="str: SHA-256 of the canonical JSON of model, input and effective sampling")
_declare("judge.replied", "world", "The client has a judgement; request.done of the same request follows.", request="str: id",
        case="str: name of the input", arm="str: greedy or sampled", workload="int: number of the workload",
        verdict="int?: 1 or 0, None where the reply has none", finish_reason="str: stop, length (cut off) or abort",
        reply_hash="str: of the reply's tokens", replica="str: engine that answered", replica_inc="int: its incarnation")

# --- training, as its loop at the edge sees it ---
_declare("train.step", "world", "A training step began, or ended.", step="int: from 0", what="str: started or ended")
_declare("train.rollout", "world", "A rollout landed: every sample that was to come has come, or failed.", rollout="int: from 0",
        samples="int: generated", judged="int: of these, by the judge")
_declare("train.weights", "world", "The rollout engines were given the weights of a step.", version="str: of the export",
        loaded="int: engines that have them")
_declare("train.finished", "world", "All training steps are over.", steps="int: how many")

# --- the autoscaler ---
_declare("autoscaler.deployed", "world", "An autoscaler looks after a service from now on.", service="str: name",
        scaler="str: its actor", api="str: actor that stands for the service's control API; what is asked of it is the autoscaler's",
        min_engines="int: floor", max_engines="int: ceiling", out_cooldown_s="float: after a scale-out", in_cooldown_s="float: after a scale-in",
        metrics_interval_s="float: between two frames", evaluation_interval_s="float: between two evaluations",
        out_duration_s="float: a scale-out condition must hold", in_duration_s="float: the scale-in conditions must hold")
_declare("autoscaler.coverage", "world", "Which part of its replicas must have reported for an autoscaler to decide, where that is not as usual.",
        service="str: name", out_least="float: for a scale-out; 0.5 where nothing is said", in_least="float: for a scale-in; 1 where nothing is said")
_declare("autoscaler.evaluated", "component", "One evaluation of one service.", service="str: name", action="str: none, scale_out or scale_in",
        current="int: replicas", delta="int: replicas to add or remove", reason="str: text", triggered="json: conditions",
        streaks="json: condition to the seconds that it has held", frame="json: the metrics, as in the scale history")
_declare("autoscaler.request", "component", "Something became of a request of the autoscaler.", service="str: name",
        key="str: idempotency key", action="str: scale_out or scale_in", target="int: replicas in all", operation="str: id, empty before it has one",
        state="str: as known to it", cleanup="str: true, false or unknown",
        what="str: submitting, unknown, accepted, not_clean or closed")

# --- runs of others, imported (python -m analysis import): what their own recorders kept, where no kind above holds it ---
_declare("foreign.file", "world", "A file of the imported run.", ("imported",), name="str: file",
        state="str: read, missing, unreadable or not_read", sha256="str: of its bytes, empty without them",
        detail="str: what was wrong with it, and what of it was left out")
_declare("foreign.event", "world", "A record of the imported run that no other kind holds, as its file has it.", ("imported",),
        name="str: event", payload="json: its other keys")
_declare("foreign.verdict", "component", "One line of the verdict that the imported run gave itself.", ("imported",),
        file="str: where it stands", key="str: key", value="json: value")
_declare("foreign.resources", "world", "Resources as the imported run's driver saw them.", ("imported",),
        when="str: baseline, after or final", free_gpus="float?: GPUs that nobody holds", groups="int?: placement groups that are not REMOVED",
        memory_mib="json: used memory of each GPU, null where it was not noted", samples="int: how many times it looked")
_declare("foreign.load", "world", "Requests of which the imported run kept the sum only.", ("imported",), sent="int: requests", failed="int: of them")
_declare("foreign.engines", "world", "The engines of the service as its API listed them.", ("imported",), current="int?: replicas as the API says",
        served="json: replica to the requests it has served, null where it was not listed", in_flight="json: replica to its requests in flight, likewise",
        initial="bool: nothing was scaled yet", whole="bool: no engine that was listed is left out here")
_declare("foreign.decision", "world", "A decision in the history of an autoscaler.", ("imported",), action="str: scale_out or scale_in",
        operation="str: id", conditions="json: that it names", frame="json: the metrics that it stands on", round="str: a or b")
_declare("foreign.phase", "world", "A phase of the load began.", ("imported",), name="str: LOW, HIGH, STEADY, LOW_AGAIN or end")
_declare("foreign.document", "world", "Something that a page beside the imported run states, and what is so.", ("imported",), name="str: page",
        about="str: pin, commit, claim, route or field", subject="str: of what", stated="str: there", found="str: in fact, empty where nothing was")

# --- the object store ---
_declare("object.put", "world", "A value was put into the object store, by the process that it belongs to.", object="str: id",
        holder="str: under which name it is held", size="int: nominal bytes")
_declare("object.borrowed", "world", "A process holds a value from here on, or found that it is gone.", object="str: id",
        holder="str: under which name", ok="bool: it was there", error="str: class, empty when it was")
_declare("object.given_back", "world", "A hold of a process ended.", object="str: id", holder="str: under which name")
_declare("object.freed", "world", "A process freed a value, whoever holds it.", object="str: id")
_declare("object.read", "world", "A process asked for a value.", object="str: id", ok="bool: it was there",
        error="str: class, empty when it was")

# --- claims of components: traces ---
_declare("trace.appended", "component", "The trace store took segments of a conversation.", session="str: id",
        segments="int: new ones", kept="int: that were there already", model_step="int: of the last one, -1 without",
        request="str: of the last one, empty without")
_declare("trace.released", "component", "The trace store released a session.", session="str: id", segments="int: in it",
        freed="int: references freed by hand")
_declare("trace.refused", "component", "The trace store refused what was written late to a session that had been released.",
        session="str: id", segments="int: in the write", request="str: of the last one, empty without")
_declare("buffer.put", "component", "A group came to lie in the replay buffer.", group="str: id", status="str: COMPLETED, ABORTED or EXPIRED",
        sessions="json: of its traced members")
_declare("buffer.expired", "component", "A group in the replay buffer, or on its way in, grew stale.", group="str: id",
        kept="bool: it will be rolled out again; otherwise it is dropped", sessions="json: of its stale members that are traced")
_declare("producer.discarded", "component", "A producer discarded a group.", group="str: id", status="str: FAILED or FILTERED",
        sessions="json: of its traced members")
_declare("learner.step", "component", "A learner trained on a batch and cleaned up after it.", step="int: training step",
        groups="json: ids", released="str: own or all", ok="bool: every worker finished")

# --- session servers: what agents that speak HTTP see ---
_declare("session_servers.deployed", "world", "The entrypoints of a service are session servers.", service="str: name",
        servers="json: their actors", store="str: actor of the trace store")
_declare("http.sent", "world", "An agent sent a turn over HTTP; request.sent of the same request follows.", request="str: id", session="str: id",
        format="str: openai or anthropic", stream="bool: asked for as a stream", traced="bool: to be recorded",
        after="str: request of the latest turn in its conversation, empty for a first one",
        leaves="str: where its client means to leave; empty: it stays")
_declare("http.seen", "world", "What the agent has read of the answer; request.done of the same request follows.", request="str: id",
        status="int: HTTP status, 0 without a head", seen="str: ok, error (in its own format), foreign_error, malformed, incomplete (no end, and no "
        "error), broken (the connection was lost), left (on purpose), gave_up", detail="str: text")
_declare("http.traced", "world", "The agent asked the trace store for a turn.", request="str: id", session="str: id",
        when="str: at_once, or end of the episode", found="bool: the conversation with this turn is there", error="str: class, empty with an answer")
_declare("http.passed", "world", "An agent called something that is no generation.", route="str: method and path", status="int: HTTP status",
        as_expected="bool: status and kind of answer are those of the engine", detail="str: text")
_declare("http.released", "world", "An agent released its session in the trace store.", session="str: id", traced="int: turns that it saw there",
        released="bool: the store had the session", error="str: class, empty with an answer")

# --- rollouts: what the agents and the operator see ---
_declare("rollouts.deployed", "world", "Who produces, keeps and consumes rollouts of a service.", service="str: name",
        store="str: trace store", buffer="str: replay buffer", producer="str: actor", learner="str: actor", evaluator="str: actor",
        agents="json: actors that run episodes", workers="json: actors that train")
_declare("trace.looked_up", "world", "An agent asked the trace store for the longest known beginning of its conversation.",
        session="str: id", expected="int: characters that were recorded before", found="int: characters that are there",
        error="str: class, empty when there was an answer")
_declare("trace.recorded", "world", "An agent was told what became of the record of a turn.", session="str: id", request="str: id",
        chars="int: of the conversation up to and with it", tokens="int: of the turn", model_step="int: version, -1 without",
        outcome="str: done, not_done, unknown", error="str: class, empty when done", again="bool: a second answer of a turn that is recorded")
_declare("trace.exported", "world", "An agent took the training trace of its conversation.", session="str: id", chars="int: of the conversation",
        tokens="int: in the trace", expected_tokens="int: that the agent knows of", experts="int: references", segments="int: that the agent knows of",
        steps="json: [[version, tokens], ...]", same="bool: tokens, versions and requests of this episode's turns are those it had",
        error="str: class, empty when there was an answer")
_declare("trace.snapshot", "world", "What an operator sees of buffer and store: the buffer before and after the store was asked.",
        service="str: name", when="str: course, or final when nobody works any more", before="json: [[rollout, session, status, put], ...]",
        sessions="json: in the store", after="json: as before")
_declare("rollouts.ended", "world", "A part of a training run told its operator how it ended.", service="str: name",
        part="str: producer, learner or evaluator", outcome="str: done, not_done, unknown", error="str: class, empty when done",
        counts="json: its counters")

_TABLE = tuple(KINDS)
