"""Serving engines in the simulated world: processes with an address, reached over simulated HTTP.

EngineProcess puts one SimEngine behind its routes; SharedEngines launches and ends them; callers reach them through
`sim.engine_client`. Weights are really read from storage: the hash that an engine serves is that of the bytes that
were there. A torn file loads without a complaint, as one whose tail was never written does; only its hash tells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protocol.errors import HttpError, NameTaken
from protocol.messages import (
    AdminReply,
    GenerateRequest,
    GenerateResult,
    VersionSpan,
    WeightUpdate,
)
from protocol.ports import EngineOptions, EngineSpec, Placement
from protocol.training.checkpoint import MANIFEST, hash_weights
from sim.answer_faults import AnswerFault
from sim.engine import EngineNotListening, SimEngine
from sim.engine_conversations import Conversations
from sim.engine_forward import ROUTES, serve_json
from sim.engine_metrics import get as render_page
from sim.engine_sampling import PPM, SamplingAsked
from sim.engine_text import ROUTES as TEXT_ROUTES
from sim.engine_text import answer_text
from sim.engine_transfers import ROUTES as TRANSFERS
from sim.engine_transfers import EngineTransfers, Group
from sim.engine_types import MAIN_DEATH_NS, AdminResult, EngineResult
from sim.http import CONTROL, Exchange
from sim.network import Network
from sim.profiles import load_profile
from sim.resources import units
from sim.world import Process, World

if TYPE_CHECKING:
    from sim.cluster import Cluster
    from sim.engine_cost import EngineProfile
    from sim.placement import PlacementGroupTable
    from sim.storage import SharedStorage

PageFault = Callable[["EngineProcess", str, int, str], tuple[int, str]]
"""Takes (process, route, status, body) of a page and gives what the client is to see."""

_FIRST_PORT = 30000
_FIRST_PRIORITY = 10  # SimPy priority of the first engine's iterations; each engine has its own


class EngineProcess(Process):
    """One incarnation of an engine: its HTTP routes over a SimEngine. ``engine`` is the model itself."""

    __slots__ = ("shared", "engine", "host", "port", "open", "by_rid", "json_rids", "transfers", "conversations")

    role = "engine"

    def __init__(
        self, shared: SharedEngines, name: str, incarnation: int, node: str, port: int, profile: EngineProfile,
        options: EngineOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shared.world, name, incarnation, node)
        self.shared = shared
        self.host = node
        self.port = port
        self.open: dict[int, Exchange] = {}
        self.by_rid: dict[str, Exchange] = {}
        self.json_rids: dict[int, tuple[str, ...]] = {}  # by exchange: requests of the JSON call under way
        self.conversations = Conversations()
        self.engine = SimEngine(
            shared.world.clock,
            profile,
            name=name,
            port=port,
            emit=self._emit,
            on_exit=lambda reason: self.die("exited", reason),
            priority=_FIRST_PRIORITY + shared.next_index(),
            fast_path=shared.fast_path,
            options=options,
            rank=_rank(name),
        )
        self.transfers: EngineTransfers | None = None

    @property
    def in_flight(self) -> int:
        """Generation requests between acceptance and answer."""
        return self.engine.in_flight

    def _emit(self, kind: str, **fields: Any) -> None:
        cause = None
        if kind == "engine.accepted":
            exchange = self.by_rid.get(fields["request"])
            cause = exchange.sent_id if exchange is not None else None
        self.world.record(self, kind, cause, fields)

    def report_options(self, options: EngineOptions) -> None:
        """Say how it computes."""
        engine = self.engine
        self._emit(
            "engine.options",
            deterministic=options.deterministic,
            attention_backend=options.attention_backend,
            gpu=options.gpu,
            server_seed=engine.sampler.server_seed,
            keeps_prefixes=engine.keeps_prefixes,
        )

    def report_sampling(self, rid: str, asked: SamplingAsked | None) -> None:
        """Say how a JSON call is sampled, where this engine was set up for that to matter."""
        if self.engine.options is not None:
            temperature, seed = (0, None) if asked is None else asked
            self._emit("engine.sampling", request=rid, temperature=temperature / PPM, seed=seed)

    # --- HTTP ---

    def receive(self, exchange: Exchange) -> None:
        """A request has arrived."""
        try:
            if type(exchange.body) is GenerateRequest:
                self._generate(exchange)
                return
            self.open[exchange.number] = exchange
            if exchange.method in ROUTES and exchange.body is not None:
                self._json(exchange)
            elif exchange.body is None:
                _GETS.get(exchange.method, _get_page)(self, exchange)
            elif exchange.method in TEXT_ROUTES:
                self._text(exchange)
            else:
                self._post(exchange)
        except EngineNotListening:
            self.open.pop(exchange.number, None)
            # Still starting: nobody accepts on the port, and the node's kernel says so.
            self.shared.network.send(
                self.world.os_of(self.node), exchange.caller, CONTROL, exchange, 0, exchange.refused
            )

    def client_gone(self, exchange: Exchange) -> None:
        """The client closed its connection before the answer."""
        self.open.pop(exchange.number, None)
        rids = self.json_rids.pop(exchange.number, ())
        if isinstance(exchange.body, GenerateRequest):
            rids = (exchange.body.request_id,)
        if self.alive:
            for rid in rids:
                self.engine.client_gone(rid, streaming=exchange.on_item is not None)

    def ended(self, exchange: Exchange) -> None:
        """Its answer is on the way: nothing of it is open any more."""
        self.open.pop(exchange.number, None)
        for rid in self.json_rids.pop(exchange.number, ()):
            if self.by_rid.get(rid) is exchange:
                del self.by_rid[rid]

    def _answer(self, exchange: Exchange, payload: Any, size: int = 0) -> None:
        self.open.pop(exchange.number, None)
        exchange.answer(payload, size)

    def _generate(self, exchange: Exchange) -> None:
        request: GenerateRequest = exchange.body
        rid = request.request_id
        self.open[exchange.number] = exchange
        self.by_rid[rid] = exchange

        def done(result: EngineResult) -> None:
            if self.by_rid.get(rid) is exchange:
                del self.by_rid[rid]
            if result.status != 200:
                self._answer(exchange, HttpError(status=result.status, body=result.error))
            else:
                self._answer(exchange, self._result(result), 64 * result.completion_tokens)

        self.engine.submit(
            rid,
            request.prompt_tokens,
            request.max_new_tokens,
            request.prefix_blocks,
            done=done,
            ignore_eos=request.ignore_eos,
            on_token=(lambda _, count: exchange.item(count)) if exchange.on_item is not None else None,
        )

    def _json(self, exchange: Exchange) -> None:
        def serve() -> None:
            rids = serve_json(self, exchange)
            if rids:
                self.json_rids[exchange.number] = rids

        if not self.engine.postponed(serve):
            serve()

    def _text(self, exchange: Exchange) -> None:
        if not self.engine.listening:
            raise EngineNotListening(f"engine {self.name} does not listen")
        route, body = exchange.method, exchange.body

        def answer() -> None:
            status, document = answer_text(route, body, self.engine)
            self.conversations.counted(self, route, body, int(document.get("input_tokens", 0)))
            self._answer(exchange, AdminReply(status, json.dumps(document), status == 200))

        self.engine.serve(answer)

    def _result(self, result: EngineResult) -> GenerateResult:
        return GenerateResult(
            result.rid,
            result.finish_reason,
            result.prompt_tokens,
            result.completion_tokens,
            result.cached_tokens,
            result.weight_version,
            tuple(VersionSpan(version, start, end, truth) for version, start, end, truth in result.spans),
            result.num_retractions,
            result.queue_ns / 1e9,
            result.ttft_ns / 1e9,
            result.e2e_ns / 1e9,
            self.name,
            self.incarnation,
        )

    def _post(self, exchange: Exchange) -> None:
        route, body, engine = exchange.method, exchange.body, self.engine
        if not engine.listening:
            raise EngineNotListening(f"engine {self.name} does not listen")
        self.world.emit(self, "engine.post", exchange.sent_id, route=route, status=0, delivery=exchange.sent_id)

        def done(result: AdminResult) -> None:
            # SGLang answers an unsuccessful admin call with 400 and a body; the client decides what that means.
            self._answer(exchange, AdminReply(result.status, result.message, result.success))

        if route == "/pause_generation":
            engine.pause(str(body.get("mode", "abort")), done=done)
        elif route == "/continue_generation":
            engine.resume(done=done)
        elif route == "/flush_cache":
            engine.flush_cache(done=done)
        elif route == "/abort_request":
            rid, everything = str(body.get("rid", "")), bool(body.get("abort_all", False))
            self.world.emit(self, "engine.abort_asked", exchange.sent_id, request=rid, everything=everything)
            engine.abort(rid, abort_all=everything, done=done)
        elif route == "/update_weight_version":
            engine.update_weight_version(
                str(body["new_version"]), abort_all_requests=bool(body.get("abort_all_requests", True)), done=done
            )
        elif route == "/update_weights_from_disk":
            self._update_weights(body, done)
        elif route in TRANSFERS:
            if self.transfers is None:
                self.transfers = EngineTransfers(self)
            self.transfers.post(route, body, done)
        else:
            engine.serve(lambda: self._answer(exchange, AdminReply(404, "Not Found", False)))

    def _update_weights(self, update: WeightUpdate, done: Callable[[AdminResult], None]) -> None:
        def have(found: Weights) -> None:
            self.engine.load_weights(
                update.version or None,
                found.size_bytes,
                found.weight_hash,
                flush_cache=update.flush_cache,
                abort_all_requests=update.abort_all_requests,
                model_path=update.path,
                failure=found.failure,
                done=done,
            )

        self.shared.read_weights(self, update.path, have)

    # --- life ---

    def on_die(self, reason: str) -> None:
        self.engine.kill()
        exchanges, self.open = list(self.open.values()), {}
        self.by_rid.clear()
        self.json_rids.clear()
        if reason == "node_lost":
            self.shared.freed(self)
            return  # nobody is left to close the connections: silence
        system, network = self.world.os_of(self.node), self.shared.network
        delay = 0 if reason == "exited" else MAIN_DEATH_NS
        after = self.world.clock.call_after
        for exchange in exchanges:
            after(delay, network.send, system, exchange.caller, CONTROL, exchange, 0, exchange.broken)
        self.shared.freed(self)

    def on_stop(self) -> None:
        self.engine.freeze()

    def on_cont(self) -> None:
        self.engine.thaw()


def _rank(name: str) -> int:
    """The number at the end of a replica's name, as a launcher that numbers its engines has it."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _get_ready(process: EngineProcess, exchange: Exchange) -> None:
    if not process.engine.listening:
        raise EngineNotListening("starting")
    process.engine.serve(lambda: process._answer(exchange, (process.engine.ready(), "")))


def _get_health(process: EngineProcess, exchange: Exchange) -> None:
    process.engine.health(lambda status: process._answer(exchange, (status, "")))


def _get_health_generate(process: EngineProcess, exchange: Exchange) -> None:
    process.engine.health_generate(lambda status: process._answer(exchange, (status, "")))


def _get_page(process: EngineProcess, exchange: Exchange) -> None:
    if not process.engine.listening:
        raise EngineNotListening("starting")

    def answer() -> None:
        status, text = render_page(process.engine, exchange.method)
        process._answer(exchange, process.shared.distort(process, exchange.method, status, text), len(text))

    process.engine.serve(answer)


_GETS: dict[str, Callable[[EngineProcess, Exchange], None]] = {
    "/ready": _get_ready,
    "/health": _get_health,
    "/health_generate": _get_health_generate,
}


@dataclass(slots=True)
class Weights:
    """What a loader found at a path. ``failure`` says why it cannot be loaded, empty when it can."""

    size_bytes: int = 0
    weight_hash: str = ""
    version: str = ""
    failure: str = ""


@dataclass(slots=True)
class SharedEngines:
    """Every engine of a world.

    Args:
        cluster, groups: whose GPUs the engines take.
        fast_path: let engines skip ahead (results are equal without; the proof runs both).
    """

    world: World
    network: Network
    storage: SharedStorage
    cluster: Cluster
    groups: PlacementGroupTable
    fast_path: bool = True
    processes: dict[str, EngineProcess] = field(default_factory=dict)
    specs: dict[str, tuple[EngineSpec, str | None, Placement | None]] = field(default_factory=dict)
    page_faults: list[PageFault] = field(default_factory=list)
    answer_faults: list[AnswerFault] = field(default_factory=list)
    transfer_groups: dict[str, Group] = field(default_factory=dict)
    _profiles: dict[str, EngineProfile] = field(default_factory=dict)
    _ports: dict[str, set[int]] = field(default_factory=dict)
    _held: dict[str, Callable[[], None]] = field(default_factory=dict)  # by process id: how to give its GPUs back
    _count: int = 0

    def next_index(self) -> int:
        self._count += 1
        return self._count

    def start(self, spec: EngineSpec, name: str, node: str | None, placement: Placement | None) -> EngineProcess:
        """Start a process. Raises NameTaken or PlacementError (not done)."""
        old = self.processes.get(name)
        if old is not None and old.alive:
            raise NameTaken(f"an engine named {name} is alive (incarnation {old.incarnation})")
        profile = self._profiles.get(spec.profile)
        if profile is None:
            profile = self._profiles[spec.profile] = load_profile(spec.profile)
        options = spec.options
        if options is not None and options.startup_s is not None:
            profile = profile.replace(startup_ns=round(options.startup_s * 1e9))
        where, give_back = self._take_gpus(spec.num_gpus, node, placement)
        port = self._free_port(where)
        process = EngineProcess(self, name, self.world.next_incarnation(name), where, port, profile, options)
        self.cluster.enter(process)
        if placement is not None:
            self.world.observe(
                "placement.entered", group=placement.group_id, process=name, process_inc=process.incarnation
            )
            self.groups.enter(process, placement)
        self.processes[name] = process
        self._held[process.id] = give_back
        self.specs[name] = (spec, node, placement)
        self.world.register(process, cls=f"SimEngine({spec.profile})")
        if options is not None:
            process.report_options(options)
        if spec.weights_path:
            self.read_weights(process, spec.weights_path, lambda found: self._start_with(process, found))
        else:
            process.engine.start()
        return process

    def _start_with(self, process: EngineProcess, found: Weights) -> None:
        if found.failure:
            process.die("crashed", found.failure)
        else:
            process.engine.start(
                version=found.version, weight_hash=found.weight_hash, size_bytes=found.size_bytes
            )

    def _take_gpus(
        self, num_gpus: float, node: str | None, placement: Placement | None
    ) -> tuple[str, Callable[[], None]]:
        need = units([("GPU", num_gpus)])
        if placement is not None:
            where = self.groups.node_of(placement)
            self.groups.reserve(placement, need)
            return where, lambda: self.groups.release(placement, need)
        if node is None:
            # The emptiest living node, the first of equals.
            living = self.cluster.living()
            node = max(living, key=lambda name: self.cluster.nodes[name].free.get("GPU", 0), default=None)
        reservation = self.cluster.reserve(self.cluster.choose(node, self.cluster.head), need)
        return reservation.node, lambda: self.cluster.release(reservation)

    def _free_port(self, node: str) -> int:
        # The lowest free one, as the real allocator does: a new engine gets the port of one that died (hazard H5).
        taken = self._ports.setdefault(node, set())
        port = _FIRST_PORT
        while port in taken:
            port += 1
        taken.add(port)
        return port

    def listener(self, host: str, port: int) -> EngineProcess | None:
        """Who listens at an address now, living or (nobody has taken its port since) dead."""
        found = [p for p in self.processes.values() if p.host == host and p.port == port]
        return next((p for p in found if p.alive), found[-1] if found else None)

    def freed(self, process: EngineProcess) -> None:
        """A process ended: its port and its GPUs are free."""
        self._ports[process.node].discard(process.port)
        self._held.pop(process.id)()

    def distort(self, process: EngineProcess, route: str, status: int, text: str) -> tuple[int, str]:
        """A page as it leaves the engine: (status, body), after the metrics faults."""
        for fault in self.page_faults:
            status, text = fault(process, route, status, text)
        return status, text

    def read_weights(self, process: EngineProcess, path: str, have: Callable[[Weights], None]) -> None:
        """Read every shard under ``path`` through storage, one after another, then call ``have``; never if it dies."""
        storage, clock = self.storage, self.world.clock
        prefix = path.rstrip("/") + "/"
        names = [name for name in sorted(storage.files) if name.startswith(prefix)]
        shards = [name for name in names if not name.endswith("/" + MANIFEST)]
        if not shards:
            have(Weights(failure=f"no weights at {path}"))
            return
        hashes: list[str] = []
        total = 0

        def go_on() -> None:
            # Not engine.serve, which answers only once the engine has started: this may be what it starts with.
            if process.alive and not process.engine.postponed(next_shard):
                next_shard()

        def next_shard() -> None:
            nonlocal total
            if len(hashes) == len(shards):
                have(Weights(total, hash_weights(hashes), self._version(path)))
                return
            name = shards[len(hashes)]
            found = storage.read_now(name)
            if found is None:
                have(Weights(failure=f"{name} vanished while it was read"))
                return
            transfer = storage.begin(process, name, found.data, found.size, fsync=False, write=False)
            total += found.size
            hashes.append(hashlib.sha256(found.data).hexdigest())
            self.world.observe("storage.read", path=name, size=found.size, reader=process.name, sha256=hashes[-1])
            clock.call_at(transfer.end_ns, go_on)

        next_shard()

    def _version(self, path: str) -> str:
        found = self.storage.read_now(f"{path.rstrip('/')}/{MANIFEST}")
        if found is None:
            return ""
        try:
            return str(json.loads(found.data)["version"])
        except (ValueError, KeyError):
            return ""
