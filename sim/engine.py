"""One serving engine process: SGLang's HTTP and tokenizer layer over the scheduler model.

What a protocol can notice of a real engine is here, surprises included (../shared/spec/engines.md, section 3): health
checks that generate and take a second at least, abort by prefix of the request id, a refused flush that has changed the
weights all the same, new requests accepted after SIGTERM, requests of a pause that are counted nowhere.

The class knows no network: calls are plain methods, answers come by callback at the simulated instant at which the
engine would send them. ``sim/engine_process.py`` puts it behind addresses, latencies and faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import simpy

from protocol.ports import EngineOptions
from protocol.serving.determinism import keeps_prefixes
from sim.engine_cost import EngineProfile
from sim.engine_health import HealthCheck
from sim.engine_lifecycle import Around, Emit, EngineLifecycle, EngineNotListening, as_usual
from sim.engine_metrics import EngineMetrics
from sim.engine_pace import pace_of
from sim.engine_sampling import Sampler
from sim.engine_scheduler import Scheduler
from sim.engine_types import (
    DISCONNECT_CHECK_NS,
    STREAM_DISCONNECT_NS,
    AdminDone,
    AdminResult,
    Done,
    EngineResult,
    OnToken,
    Request,
    WeightSpan,
)
from sim.engine_weights import WeightLoad, WeightLoader

if TYPE_CHECKING:
    from sim.random import Stream

__all__ = ["EngineNotListening", "PauseMode", "SimEngine"]

PauseMode = Literal["abort", "retract", "in_place"]

_STALL_ON = ("turing", "ampere", "ada", "hopper")  # no such report of a Blackwell
_IDLE_REPORT_NS = 30_000_000_000  # [read] an idle SGLang scheduler publishes its gauges every 30 s

_OK = AdminResult(200, True, "")
_PAUSED = AdminResult(200, True, "Generation paused successfully.")
_CONTINUED = AdminResult(200, True, "Generation continued successfully.")
_FLUSHED = AdminResult(200, True, "Cache flushed.\nPlease check backend logs for more details.")
_NOT_FLUSHED = AdminResult(400, False, "Flush cache failed.")


class SimEngine(EngineLifecycle):
    """One engine process, from its start to its death. A restart is a new object.

    Args:
        env: SimPy environment whose ``now`` is an int count of nanoseconds.
        profile: costs, limits and delays.
        name, port: identity, for evidence and info pages.
        emit: ``emit(kind, **fields)`` for the ``engine.*`` kinds of ``protocol.evidence``; None records nothing.
        on_exit: called with the exit reason when the process ends by itself (SIGTERM, death of a child).
        priority: SimPy priority of this engine's iteration events. Give every engine its own (10, 11, ...), so that
            two engines whose iterations end at one instant do so in a fixed order.
        fast_path: skip runs of equal decode steps in one event. Results and their order are equal without.
        options: deterministic mode and attention backend; None: neither.
        rank: number of this engine among its like, of which its server seed is where the options name none.
        around: how long the death of a child takes to show; as usual where nothing is drawn.
        pace: what a pace that wanders is drawn from; None: a stream that profile and name fix.
    """

    def __init__(
        self,
        env: simpy.Environment,
        profile: EngineProfile,
        *,
        name: str = "engine-0",
        port: int = 30000,
        emit: Emit | None = None,
        on_exit: Callable[[str], None] | None = None,
        priority: int = 10,
        fast_path: bool = True,
        options: EngineOptions | None = None,
        rank: int = 0,
        around: Around = as_usual,
        pace: Stream | None = None,
    ) -> None:
        scheduler = Scheduler(
            env, profile, self._on_finish, priority=priority, fast_path=fast_path, pace=pace_of(profile, pace, name)
        )
        super().__init__(env, profile, name, port, emit, on_exit, scheduler, around)
        self.options = options
        seed = None if options is None else options.random_seed
        self.sampler = Sampler(options is not None and options.deterministic, rank if seed is None else seed)
        self.keeps_prefixes = keeps_prefixes(options)
        scheduler.stalls = not self.keeps_prefixes and options is not None and options.gpu in _STALL_ON
        self._reported: tuple[dict[str, int], int] | None = None  # figures of a stall, and when they are old
        self.paused = False
        self.metrics = EngineMetrics()
        self.weights = WeightLoader(self)
        self._held: list[Callable[[], None]] = []  # kept back by a pause, counted nowhere
        self._pausing = False  # a pause waits for its aborts, and holds the lock of every pause, continue and load
        self._locked_out: list[Callable[[], None]] = []
        self._last_loads: dict[str, int] | None = None

    def kill(self) -> None:
        """SIGKILL: from now on nothing of this process happens, and no callback of it fires."""
        super().kill()
        self._held.clear()
        self._locked_out.clear()
        self.weights.blocked.clear()

    # --- generation ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        rid: str,
        prompt_tokens: int,
        output_tokens: int,
        prefix_blocks: tuple[int, ...] | None = None,
        *,
        done: Done | None,
        ignore_eos: bool = True,
        eos_after: int | None = None,
        on_token: OnToken | None = None,
    ) -> None:
        """POST /generate.

        Args:
            rid: request id; one that is live already is refused, and abort matches it as a prefix.
            prompt_tokens: length of the prompt, at least 1.
            output_tokens: ``max_new_tokens``, at least 1.
            prefix_blocks: ids of the prompt's leading blocks of ``profile.prefix_block_tokens`` tokens.
            done: called once with the EngineResult (a refusal too), never after ``kill``.
            ignore_eos: run to ``output_tokens`` (finish ``length``).
            eos_after: without ignore_eos, the output length at which the model would stop (finish ``stop``).
            on_token: called for every output token with (rid, count so far).

        Raises:
            EngineNotListening: nothing was done.
            ValueError: a count below 1; nothing was done.
        """
        if self.frozen:
            self._thaw_backlog.append(
                lambda: self.submit(
                    rid,
                    prompt_tokens,
                    output_tokens,
                    prefix_blocks,
                    done=done,
                    ignore_eos=ignore_eos,
                    eos_after=eos_after,
                    on_token=on_token,
                )
            )
            return
        if not self.listening:
            raise EngineNotListening(f"engine {self.name} does not listen")
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(
                f"request {rid}: {prompt_tokens} prompt and {output_tokens} output tokens; at least 1 each"
            )
        context = self.profile.context_length
        if prompt_tokens + output_tokens > context:
            self._refuse(rid, prompt_tokens, output_tokens, done)
            return
        length = output_tokens
        if not ignore_eos and eos_after is not None and eos_after < output_tokens:
            length = max(1, eos_after)
        blocks = (prefix_blocks or ()) if self.keeps_prefixes else ()
        request = Request(rid, prompt_tokens, length, output_tokens, ignore_eos, blocks, done, on_token, self.env._now)
        if self.paused:
            self._held.append(lambda: self._send(request))
        elif self.weights.pending:
            self.weights.blocked.append(lambda: self._send(request))
        else:
            self._send(request)

    def _send(self, request: Request) -> None:
        live = self.live
        rid = request.rid
        if rid in live:
            self._answer_refusal(rid, request.prompt_tokens, request.done, f"Duplicate request ID detected: {rid}")
            return
        live[rid] = request
        scheduler = self.scheduler
        if self.emit is not None:
            self.emit(
                "engine.accepted",
                request=rid,
                running=len(scheduler.running),
                queued=len(live) - 1 - len(scheduler.running),
            )
        scheduler.push(None, request)

    def _refuse(self, rid: str, prompt: int, new: int, done: Done | None) -> None:
        context = self.profile.context_length
        if prompt >= context:
            text = f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        else:
            text = (
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
                "the limit."
            )
        self._answer_refusal(rid, prompt, done, text)

    def _answer_refusal(self, rid: str, prompt: int, done: Done | None, text: str) -> None:
        self.record("engine.refused", request=rid, status=400, why=text)
        delay = self.profile.refusal_ns
        ended = self.env._now + delay
        result = EngineResult(rid, 400, "", text, prompt, 0, 0, 0, self.version, (), 0, -1, -1, delay, ended)
        if done is not None:
            self.after(delay, lambda: done(result))

    def _on_finish(self, request: Request, tokens: int, reason: str) -> None:
        live = self.live
        if live.get(request.rid) is not request:
            return  # a health check's own generation
        done = request.done
        now = self.env._now
        start = request.span_start
        if request.spans is None:
            spans: tuple[WeightSpan, ...] = ((self.version, 0, tokens, self.weight_hash),) if tokens else ()
        else:
            if tokens > start:
                request.spans.append((self.version, start, tokens, self.weight_hash))
            spans = tuple(request.spans)
        submitted = request.submitted_ns
        first = request.first_token_ns
        result = EngineResult(
            request.rid,
            200,
            reason,
            "Abort in scheduler" if reason == "abort" else "",
            request.prompt_tokens,
            request.cached,
            request.stale,
            tokens,
            self.version,
            spans,
            request.retractions,
            request.queue_ns,
            first - submitted if first >= 0 else -1,
            now - submitted,
            now,
        )
        del live[request.rid]
        self.metrics.finished(result)
        if self.emit is not None:
            self.emit(
                "engine.finished",
                request=request.rid,
                reason=reason,
                completion_tokens=tokens,
                cached_tokens=request.cached,
                stale_cached_tokens=request.stale,
                spans=[list(span) for span in spans],
            )
        if not live and self.weights.pending:
            self.weights.next()
        if done is not None:
            done(result)

    def client_gone(self, rid: str, *, streaming: bool) -> None:
        """The client closed its connection. The engine notices late: a stream after 0.3 s, else at a 4 s check."""
        if self.postponed(lambda: self.client_gone(rid, streaming=streaming)):
            return  # and so may be the request
        request = self.live.get(rid)
        if request is None:
            return
        if streaming:
            delay = STREAM_DISCONNECT_NS
        else:
            elapsed = self.env._now - request.submitted_ns
            # The first check comes a whole interval after the request, though its client was gone before it came.
            delay = -elapsed % DISCONNECT_CHECK_NS if elapsed else DISCONNECT_CHECK_NS
        self.after(delay, lambda: self._abort_gone(request))

    def _abort_gone(self, request: Request) -> None:
        rid = request.rid
        if self.live.get(rid) is request:
            if any(other != rid and other.startswith(rid) for other in self.live):
                self.record("engine.abort_asked", request=rid, everything=False)  # it ends those, too
            self.abort(rid)

    def abort(self, rid: str = "", *, abort_all: bool = False, done: AdminDone | None = None) -> None:
        """POST /abort_request: always 200. A live ``rid`` aborts every request whose id starts with it; an unknown or
        empty one aborts nothing. Requests held by a pause are not reached."""
        if self.postponed(lambda: self.abort(rid, abort_all=abort_all, done=done)):
            return
        self.check_listening()
        if abort_all or rid in self.live:
            self.scheduler.push(self._do_abort, "" if abort_all else rid)
        self.reply(done, _OK)

    def _do_abort(self, prefix: str) -> None:
        scheduler = self.scheduler
        for request in scheduler.live():
            if request.rid.startswith(prefix) and not scheduler.dead:
                scheduler.abort(request)

    # --- pause --------------------------------------------------------------------------------------------------------

    def pause(self, mode: str = "abort", *, done: AdminDone | None = None) -> None:
        """POST /pause_generation. New requests wait until ``resume`` in every mode; idempotent.

        ``abort`` ends what is in flight (finish_reason abort, partial output) and answers at a 1 s poll if there was
        any; ``in_place`` keeps running requests and their KV; ``retract`` frees their KV, to be recomputed.

        ``abort`` holds a lock until nothing is in flight [read]: later pauses, continues and weight loads wait for it.
        So after ``in_place`` with requests running it never answers, nor does the ``continue`` that would help.
        """
        if self.postponed(lambda: self.pause(mode, done=done)) or self._locked(lambda: self.pause(mode, done=done)):
            return
        self.check_listening()
        if mode not in ("abort", "retract", "in_place"):
            self.reply(done, AdminResult(400, False, f"Invalid mode {mode!r}: use abort, retract or in_place"))
            return
        self.paused = True
        if mode == "abort":
            self.record("engine.paused", mode=mode)
            self._pausing = True
            self._abort_until_empty(done)
        else:
            self.scheduler.push(self._do_pause, mode)
            self.reply(done, _PAUSED)

    def _abort_until_empty(self, done: AdminDone | None) -> None:
        if self.live:
            self.scheduler.push(self._do_abort, "")
            self.after(self.profile.abort_poll_ns, lambda: self._abort_until_empty(done))
        else:
            self._pausing = False
            self.reply(done, _PAUSED)
            locked_out, self._locked_out = self._locked_out, []
            for call in locked_out:
                call()

    def _locked(self, call: Callable[[], None]) -> bool:
        """Whether a pause holds the lock; then ``call`` runs after it."""
        if self._pausing:
            self._locked_out.append(call)
        return self._pausing

    def _do_pause(self, mode: str) -> None:
        scheduler = self.scheduler
        if not scheduler.paused:
            self._last_loads = self._load_figures()  # /v1/loads shows this until it goes on
        scheduler.paused = True
        if mode == "retract":
            scheduler.retract_all()
        self.record("engine.paused", mode=mode)

    def resume(self, *, done: AdminDone | None = None) -> None:
        """POST /continue_generation. Held requests go on in the order they came. Idempotent."""
        if self.postponed(lambda: self.resume(done=done)) or self._locked(lambda: self.resume(done=done)):
            return
        self.check_listening()
        if self.paused:
            self.paused = False
            self.scheduler.push(self._do_resume, None)
            held, self._held = self._held, []
            self.let_in(held)
        self.reply(done, _CONTINUED)

    def let_in(self, kept: list[Callable[[], None]]) -> None:
        """Send what a pause or a weight load kept back, unless the other of the two now keeps it."""
        if self.paused:
            self._held = kept + self._held
        elif self.weights.pending:
            self.weights.blocked.extend(kept)
        else:
            for send in kept:
                send()

    def hold_or_send(self, send: Callable[[], None]) -> None:
        """Send now, or after the pause."""
        if self.paused:
            self._held.append(send)
        else:
            send()

    def _do_resume(self, _: None) -> None:
        self._last_loads = None
        self.scheduler.unpause()
        self.record("engine.resumed")

    def flush_cache(self, *, done: AdminDone | None = None) -> None:
        """POST /flush_cache: 400 while requests run (an in-place pause included) or wait, unless paused by retract."""
        if self.postponed(lambda: self.flush_cache(done=done)):
            return
        self.check_listening()
        self.scheduler.push(self._do_flush, done)

    def _do_flush(self, done: AdminDone | None) -> None:
        self.reply(done, _FLUSHED if self.flush() else _NOT_FLUSHED)

    # --- weights ------------------------------------------------------------------------------------------------------

    def load_weights(
        self,
        version: str | None,
        size_bytes: int,
        weight_hash: str,
        *,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        model_path: str | None = None,
        failure: str = "",
        bucket: tuple[str, int, int] | None = None,
        done: AdminDone | None = None,
    ) -> None:
        """POST /update_weights_from_disk, and what else brings weights.

        Without a pause it waits for what is in flight, and later requests wait behind it. Paused, it loads at once; a
        flush that is then refused answers 400 although **weights and version have changed**.

        Args:
            version: the new label; None leaves the old label on new weights.
            size_bytes: nominal size, for the time it takes.
            weight_hash: what the weights truly are.
            model_path: if given, becomes model path *and served name*.
            failure: why the weights cannot be read (missing path, torn export): 400 after 1.3 s, old weights stay.
            bucket: (route, which, of how many) where they come in parts; only the last has a ``version``.
        """

        def again() -> None:
            self.load_weights(
                version,
                size_bytes,
                weight_hash,
                flush_cache=flush_cache,
                model_path=model_path,
                abort_all_requests=abort_all_requests,
                failure=failure,
                bucket=bucket,
                done=done,
            )

        if self.postponed(again) or self._locked(again):
            return
        self.check_listening()
        if abort_all_requests:
            self.scheduler.push(self._do_abort, "")
        self.weights.submit(
            WeightLoad(
                version, size_bytes, weight_hash, flush_cache, model_path, failure, done, not self.paused, bucket
            )
        )

    def update_weight_version(
        self, version: str, *, abort_all_requests: bool = True, done: AdminDone | None = None
    ) -> None:
        """POST /update_weight_version: changes the label only, and by default aborts everything in flight [read]."""

        def again() -> None:
            self.update_weight_version(version, abort_all_requests=abort_all_requests, done=done)

        if self.postponed(again):
            return
        self.check_listening()
        if abort_all_requests:
            self.scheduler.push(self._do_abort, "")
        self.scheduler.push(self.weights.label, (version, done))

    # --- probes -------------------------------------------------------------------------------------------------------

    def ready(self) -> int:
        """GET /ready: 200, or 503 while starting, paused or unhealthy."""
        return 200 if self.listening and not self.paused and not self.unhealthy else 503

    def health(self, done: Callable[[int], None]) -> None:
        """GET /health: as /health_generate, or an instant 200 where the profile says that it does not generate."""
        if self.postponed(lambda: self.health(done)):
            return
        if self.profile.health_generates:
            self.health_generate(done)
        else:
            self.check_listening()
            self.after(self.profile.admin_reply_ns, lambda: done(200))

    def health_generate(self, done: Callable[[int], None]) -> None:
        """GET /health_generate: one token, then polls at 1 s steps: 1 s at least; 503 after 20 s, then unhealthy."""
        if self.postponed(lambda: self.health_generate(done)):
            return
        self.check_listening()
        if self.terminating:
            self.after(self.profile.admin_reply_ns, lambda: done(503))
            return
        HealthCheck(self, done).start()

    def _load_figures(self) -> dict[str, int]:
        scheduler = self.scheduler
        scheduler.sync()
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting) + (scheduler.chunked is not None),
            "num_used_tokens": scheduler.used_tokens,
        }

    def load_figures(self) -> dict[str, int]:
        """Running, waiting and used tokens as the scheduler last published them: old ones while paused."""
        if self.scheduler.stalled_ns >= 0:
            return self._figures_of_a_stall()
        return self._load_figures() if self._last_loads is None else dict(self._last_loads)

    def _figures_of_a_stall(self) -> dict[str, int]:
        """A scheduler that starts no batch reports none: its figures stay, until the report of an idle one is due."""
        now = self.env._now
        if self._reported is None:
            stalled = self.scheduler.stalled_ns
            figures = {"num_running_reqs": self.scheduler.stalled_running, "num_waiting_reqs": 0, "num_used_tokens": 0}
            self._reported = figures, stalled + _IDLE_REPORT_NS
        while now >= self._reported[1]:
            self._reported = self._load_figures(), self._reported[1] + _IDLE_REPORT_NS
        return dict(self._reported[0])

    @property
    def in_flight(self) -> int:
        """Requests between acceptance and answer, held ones not included."""
        return len(self.live)

    @property
    def http_active(self) -> int:
        """Open generation requests, those included that a pause or a weight load keeps back."""
        return len(self.live) + len(self._held) + len(self.weights.blocked)
