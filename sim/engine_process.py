"""One serving engine of the simulated world as a process with an address: SGLang's HTTP routes over one SimEngine.

`sim.engines` launches and ends them; callers reach them through `sim.engine_client`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protocol.errors import HttpError
from protocol.messages import (
    AdminReply,
    GenerateRequest,
    GenerateResult,
    VersionSpan,
    WeightUpdate,
    replica_of,
)
from protocol.ports import EngineOptions
from sim.engine import EngineNotListening, SimEngine
from sim.engine_conversations import Conversations
from sim.engine_forward import ROUTES, serve_json
from sim.engine_metrics import get as render_page
from sim.engine_pace import pace_stream
from sim.engine_sampling import PPM, SamplingAsked
from sim.engine_text import ROUTES as TEXT_ROUTES
from sim.engine_text import answer_text
from sim.engine_transfers import ROUTES as TRANSFERS
from sim.engine_transfers import EngineTransfers
from sim.engine_types import MAIN_DEATH_NS, AdminResult, EngineResult
from sim.http import CONTROL, Exchange, Streamed
from sim.world import Process

if TYPE_CHECKING:
    from sim.engine_cost import EngineProfile
    from sim.engines import SharedEngines, Weights

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
            around=shared.world.around,
            pace=shared.world.stream(pace_stream(profile, name)) if profile.pace_spread_ppm else None,
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
        if self.engine.postponed(lambda: self.client_gone(exchange)):
            return  # and so may be the reading of its request
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
        streamed = None if exchange.on_item is None else Streamed(exchange)

        def done(result: EngineResult) -> None:
            if self.by_rid.get(rid) is exchange:
                del self.by_rid[rid]
            self.open.pop(exchange.number, None)
            answer = exchange.answer if streamed is None else streamed.answer
            if result.status != 200:
                answer(HttpError(status=result.status, body=result.error))
            else:
                answer(self._result(result), 64 * result.completion_tokens)

        self.engine.submit(
            rid,
            request.prompt_tokens,
            request.max_new_tokens,
            request.prefix_blocks,
            done=done,
            ignore_eos=request.ignore_eos,
            on_token=None if streamed is None else lambda _, count: streamed.add(count),
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
        if engine.postponed(lambda: self._post(exchange)):
            return  # stopped: the kernel keeps it, and it has not come to the engine
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
            aborts = bool(body.get("abort_all_requests", True))
            if aborts:
                self.world.emit(self, "engine.abort_asked", exchange.sent_id, request="", everything=True)
            engine.update_weight_version(str(body["new_version"]), abort_all_requests=aborts, done=done)
        elif route == "/update_weights_from_disk":
            if body.abort_all_requests:
                self.world.emit(self, "engine.abort_asked", exchange.sent_id, request="", everything=True)
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
        if not self.shared.cluster.node(self.node).up:
            self.shared.freed(self)
            return  # nobody is left to close the connections: silence
        system, network = self.world.os_of(self.node), self.shared.network
        delay = 0 if reason == "exited" else self.world.around("engine_death", MAIN_DEATH_NS)
        after = self.world.clock.call_after
        for exchange in exchanges:
            after(delay, network.send, system, exchange.caller, CONTROL, exchange, 0, exchange.broken)
        self.shared.freed(self)

    def on_stop(self) -> None:
        self.engine.freeze()

    def on_cont(self) -> None:
        self.engine.thaw()


def _rank(name: str) -> int:
    """A replica's rank, as a launcher that numbers its engines has it."""
    found = replica_of(name)
    return 0 if found is None else found[1]


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
