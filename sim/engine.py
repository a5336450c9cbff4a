"""One serving engine process: SGLang's HTTP and tokenizer layer over the scheduler model.

What a protocol can notice of a real engine is here, surprises included (../shared/spec/engines.md, section 3): health
checks that generate and take a second at least, abort by prefix of the request id, a refused flush that has changed the
weights all the same, new requests accepted after SIGTERM, requests of a pause that are counted nowhere.

The class knows no network: calls are plain methods, answers come by callback at the simulated instant at which the
engine would send them. ``sim/engines.py`` puts it behind addresses, latencies and faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import simpy
from simpy.events import Event

from sim.engine_cost import EngineProfile, StepCosts
from sim.engine_metrics import EngineMetrics
from sim.engine_scheduler import Scheduler
from sim.engine_types import (
    DETOKENIZER_DEATH_NS,
    DISCONNECT_CHECK_NS,
    SCHEDULER_DEATH_NS,
    STREAM_DISCONNECT_NS,
    AdminDone,
    AdminResult,
    Done,
    EngineResult,
    OnToken,
    Request,
    WeightSpan,
)

PauseMode = Literal["abort", "retract", "in_place"]
Emit = Callable[..., None]

_OK = AdminResult(200, True, "")
_FLUSHED = AdminResult(200, True, "Cache flushed.\nPlease check backend logs for more details.")
_NOT_FLUSHED = AdminResult(400, False, "Flush cache failed.")
_HALF_UPDATED = "Weights were updated, but the cache was not flushed because requests are running."


class EngineNotListening(RuntimeError):
    """A call to a process that has exited or has not opened its port: nothing was done (connection refused)."""


class SimEngine:
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
    """

    def __init__(self, env: simpy.Environment, profile: EngineProfile, *, name: str = "engine-0", port: int = 30000,
                 emit: Emit | None = None, on_exit: Callable[[str], None] | None = None, priority: int = 10,
                 fast_path: bool = True) -> None:
        self.env = env
        self.profile = profile
        self.name = name
        self.port = port
        self.version = profile.weights_version
        self.weight_hash = f"{profile.name}:{profile.weights_version}"
        self.model_path = profile.model_path
        self.alive = False
        self.listening = False
        self.paused = False
        self.pause_mode = ""
        self.frozen = False
        self.unhealthy = False
        self.terminating = False
        self.startup_ns = 0
        self.scheduler = Scheduler(env, profile, self._on_finish, priority=priority, fast_path=fast_path)
        self.metrics = EngineMetrics()
        self._emit = emit
        self._on_exit = on_exit
        self._live: dict[str, Request] = {}
        self._held: list[Callable[[], None]] = []  # kept back by a pause, counted nowhere
        self._blocked: list[Callable[[], None]] = []  # kept back by a weight load that waits for the live ones
        self._writers: deque[_WeightLoad] = deque()
        self._writing = False
        self._thaw_backlog: list[Callable[[], None]] = []
        self._wedges = 0
        self._last_loads: dict[str, int] | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, version: str | None = None, weight_hash: str | None = None, size_bytes: int | None = None,
              on_ready: Callable[[], None] | None = None) -> None:
        """Start the process: it listens and is ready after its start-up time. Call once.

        Args:
            version, weight_hash: of the weights it starts with; the profile's own by default.
            size_bytes: of those weights, where they differ from the profile's (longer or shorter to load).
            on_ready: called when /ready first answers 200.
        """
        if self.alive or self.scheduler.dead:
            raise RuntimeError(f"engine {self.name}: start() is for a new object, once")
        self.alive = True
        self.version = self.version if version is None else version
        self.weight_hash = self.weight_hash if weight_hash is None else weight_hash
        duration = self.profile.startup_ns
        if size_bytes is not None:
            duration += self.profile.weight_load_ns(size_bytes) - self.profile.weight_load_ns(self.profile.weight_bytes)
        self.startup_ns = max(1, duration)
        self._record("engine.started", port=self.port, profile=self.profile.name, version=self.version)
        self._after(self.startup_ns, lambda: self._started(on_ready))

    def _started(self, on_ready: Callable[[], None] | None) -> None:
        self.listening = True
        self._record("engine.ready", version=self.version, weight_hash=self.weight_hash)
        if on_ready is not None:
            on_ready()

    def kill(self) -> None:
        """SIGKILL: from now on nothing of this process happens, and no callback of it fires."""
        self.alive = False
        self.listening = False
        self.scheduler.kill()
        self._live.clear()
        self._held.clear()
        self._blocked.clear()
        self._writers.clear()
        self._thaw_backlog.clear()

    release = kill
    """The same for an owner that gives the engine's resources back."""

    def sigterm(self) -> None:
        """SIGTERM: /health fails at once, requests go on and new ones are still accepted; it exits at a 5 s poll that
        finds none left. After a failed health check it exits at the first poll, but waits for a core dump first."""
        if self._postponed(self.sigterm) or self.terminating:
            return
        self.terminating = True
        self._after(self.profile.sigterm_poll_ns, self._sigterm_poll)

    def _sigterm_poll(self) -> None:
        if self.unhealthy:
            self._after(self.profile.coredump_wait_ns + self.profile.sigterm_exit_ns, lambda: self._exit("sigterm_forced"))
        elif self._live:
            self._after(self.profile.sigterm_poll_ns, self._sigterm_poll)
        else:
            self._after(self.profile.sigterm_exit_ns, lambda: self._exit("sigterm"))

    def lose_child(self, child: Literal["scheduler", "detokenizer"]) -> None:
        """SIGKILL of a child process: silence for 5.9 s or 66 s, then the whole tree exits."""
        self.wedge()
        delay = {"scheduler": SCHEDULER_DEATH_NS, "detokenizer": DETOKENIZER_DEATH_NS}[child]
        self._after(delay, lambda: self._exit(f"{child}_died"))

    def _exit(self, reason: str) -> None:
        self.kill()
        if self._on_exit is not None:
            self._on_exit(reason)

    # --- faults -------------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """SIGSTOP: no progress, no timer, no answer; what callers send is buffered by the kernel."""
        if not self.frozen and self.alive:
            self.frozen = True
            self._hold(+1)

    def thaw(self) -> None:
        """SIGCONT: the iteration under way ends, then expired timers and buffered calls run in the order they came."""
        if not self.frozen:
            return
        self.frozen = False
        self._hold(-1)
        self._at(2, lambda _: self._run_backlog())  # the scheduler's overdue boundary comes 1 ns after the thaw

    def _run_backlog(self) -> None:
        backlog, self._thaw_backlog = self._thaw_backlog, []
        for index, action in enumerate(backlog):
            if self.frozen:
                self._thaw_backlog = backlog[index:] + self._thaw_backlog
                return
            action()

    def wedge(self) -> None:
        """The scheduler stops, the process lives: HTTP answers from old state, generations never end."""
        self._hold(+1)

    def unwedge(self) -> None:
        """End of one wedge."""
        if self._wedges > (1 if self.frozen else 0):
            self._hold(-1)

    def _hold(self, change: int) -> None:
        before, self._wedges = self._wedges, self._wedges + change
        if before == 0 and self._wedges:
            self.scheduler.hold()
        elif before and self._wedges == 0:
            self.scheduler.unhold()

    def slow(self, factor_ppm: int) -> None:
        """Multiply the cost of every further iteration: 2_000_000 is twice as slow, 1_000_000 as the profile says."""
        if factor_ppm <= 0:
            raise ValueError(f"slow: factor {factor_ppm} ppm; must be positive")
        self.scheduler.push(self._do_slow, factor_ppm)

    def _do_slow(self, factor_ppm: int) -> None:
        self.scheduler.costs = StepCosts(self.profile, factor_ppm)

    def serve(self, action: Callable[[], None]) -> None:
        """Run ``action`` (the rendering of a GET) as soon as the process can: now, or after SIGCONT; never if dead."""
        if not self._postponed(action):
            action()

    # --- generation ---------------------------------------------------------------------------------------------------

    def submit(self, rid: str, prompt_tokens: int, output_tokens: int, prefix_blocks: tuple[int, ...] | None = None, *,
               done: Done | None, ignore_eos: bool = True, eos_after: int | None = None,
               on_token: OnToken | None = None) -> None:
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
            self._thaw_backlog.append(lambda: self.submit(
                rid, prompt_tokens, output_tokens, prefix_blocks, done=done, ignore_eos=ignore_eos, eos_after=eos_after,
                on_token=on_token))
            return
        if not self.listening:
            raise EngineNotListening(f"engine {self.name} does not listen")
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(f"request {rid}: {prompt_tokens} prompt and {output_tokens} output tokens; at least 1 each")
        context = self.profile.context_length
        if prompt_tokens + output_tokens > context:
            self._refuse(rid, prompt_tokens, output_tokens, done)
            return
        length = output_tokens
        if not ignore_eos and eos_after is not None and eos_after < output_tokens:
            length = max(1, eos_after)
        request = Request(rid, prompt_tokens, length, output_tokens, ignore_eos, prefix_blocks or (), done, on_token,
                          self.env.now)
        if self.paused:
            self._held.append(lambda: self._send(request))
        elif self._writers:
            self._blocked.append(lambda: self._send(request))
        else:
            self._send(request)

    def _send(self, request: Request) -> None:
        live = self._live
        rid = request.rid
        if rid in live:
            self._answer_refusal(rid, request.prompt_tokens, request.done, f"Duplicate request ID detected: {rid}")
            return
        live[rid] = request
        scheduler = self.scheduler
        if self._emit is not None:
            self._emit("engine.accepted", request=rid, running=len(scheduler.running),
                       queued=len(live) - 1 - len(scheduler.running))
        scheduler.push(None, request)

    def _refuse(self, rid: str, prompt: int, new: int, done: Done | None) -> None:
        context = self.profile.context_length
        if prompt >= context:
            text = f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        else:
            text = (
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
                f"total of {prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
                "the limit."
            )
        self._answer_refusal(rid, prompt, done, text)

    def _answer_refusal(self, rid: str, prompt: int, done: Done | None, text: str) -> None:
        self._record("engine.refused", request=rid, status=400, why=text)
        delay = self.profile.refusal_ns
        result = EngineResult(rid, 400, "", text, prompt, 0, 0, 0, self.version, (), 0, -1, -1, delay, self.env.now + delay)
        if done is not None:
            self._after(delay, lambda: done(result))

    def _on_finish(self, request: Request, tokens: int, reason: str) -> None:
        live = self._live
        if live.get(request.rid) is not request:
            return  # a health check's own generation
        done = request.done
        now = self.env.now
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
            request.rid, 200, reason, "Abort in scheduler" if reason == "abort" else "", request.prompt_tokens,
            request.cached, request.stale, tokens, self.version, spans, request.retractions, request.queue_ns,
            first - submitted if first >= 0 else -1, now - submitted, now,
        )
        del live[request.rid]
        self.metrics.finished(result)
        if self._emit is not None:
            self._emit("engine.finished", request=request.rid, reason=reason, completion_tokens=tokens,
                       cached_tokens=request.cached, stale_cached_tokens=request.stale,
                       spans=[list(span) for span in spans])
        if self._writers and not live:
            self._next_writer()
        if done is not None:
            done(result)

    def client_gone(self, rid: str, *, streaming: bool) -> None:
        """The client closed its connection. The engine notices late: a stream after 0.3 s, a waiting one at a 4 s check."""
        request = self._live.get(rid)
        if request is None or self._postponed(lambda: self.client_gone(rid, streaming=streaming)):
            return
        if streaming:
            delay = STREAM_DISCONNECT_NS
        else:
            delay = -(self.env.now - request.submitted_ns) % DISCONNECT_CHECK_NS
        self._after(delay, lambda: self._abort_gone(request))

    def _abort_gone(self, request: Request) -> None:
        if self._live.get(request.rid) is request:
            self.abort(request.rid)

    def abort(self, rid: str = "", *, abort_all: bool = False, done: AdminDone | None = None) -> None:
        """POST /abort_request: always 200. A live ``rid`` aborts every request whose id starts with it; an unknown or
        empty one aborts nothing. Requests held by a pause are not reached."""
        if self._postponed(lambda: self.abort(rid, abort_all=abort_all, done=done)):
            return
        self._check_listening()
        if abort_all or rid in self._live:
            self.scheduler.push(self._do_abort, "" if abort_all else rid)
        self._reply(done, _OK)

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
        """
        if self._postponed(lambda: self.pause(mode, done=done)):
            return
        self._check_listening()
        if mode not in ("abort", "retract", "in_place"):
            self._reply(done, AdminResult(400, False, f"Invalid mode {mode!r}: use abort, retract or in_place"))
            return
        self.paused = True
        self.pause_mode = mode
        if mode == "abort":
            self._record("engine.paused", mode=mode)
            self._abort_until_empty(done)
        else:
            self.scheduler.push(self._do_pause, mode)
            self._reply(done, AdminResult(200, True, "Generation paused successfully."))

    def _abort_until_empty(self, done: AdminDone | None) -> None:
        if self._live:
            self.scheduler.push(self._do_abort, "")
            self._after(self.profile.abort_poll_ns, lambda: self._abort_until_empty(done))
        else:
            self._reply(done, AdminResult(200, True, "Generation paused successfully."))

    def _do_pause(self, mode: str) -> None:
        scheduler = self.scheduler
        if not scheduler.paused:
            self._last_loads = self._load_figures()  # /v1/loads shows this until it goes on
        scheduler.paused = True
        if mode == "retract":
            scheduler.retract_all()
        self._record("engine.paused", mode=mode)

    def resume(self, *, done: AdminDone | None = None) -> None:
        """POST /continue_generation. Held requests go on in the order they came. Idempotent."""
        if self._postponed(lambda: self.resume(done=done)):
            return
        self._check_listening()
        if self.paused:
            self.paused = False
            self.pause_mode = ""
            self.scheduler.push(self._do_resume, None)
            held, self._held = self._held, []
            if self._writers:
                self._blocked.extend(held)
            else:
                for send in held:
                    send()
        self._reply(done, AdminResult(200, True, "Generation continued successfully."))

    def _do_resume(self, _: None) -> None:
        self.scheduler.paused = False
        self._last_loads = None
        self._record("engine.resumed")

    def flush_cache(self, *, done: AdminDone | None = None) -> None:
        """POST /flush_cache: 400 while requests run (an in-place pause included) or wait, unless paused by retract."""
        if self._postponed(lambda: self.flush_cache(done=done)):
            return
        self._check_listening()
        self.scheduler.push(self._do_flush, done)

    def _do_flush(self, done: AdminDone | None) -> None:
        self._reply(done, _FLUSHED if self.scheduler.flush() else _NOT_FLUSHED)

    # --- weights ------------------------------------------------------------------------------------------------------

    def load_weights(self, version: str | None, size_bytes: int, weight_hash: str, *, flush_cache: bool = True,
                     abort_all_requests: bool = False, model_path: str | None = None, failure: str = "",
                     done: AdminDone | None = None) -> None:
        """POST /update_weights_from_disk.

        Without a pause it waits for what is in flight, and later requests wait behind it. Paused, it loads at once; a
        flush that is then refused answers 400 although **weights and version have changed**.

        Args:
            version: the new label; None leaves the old label on new weights.
            size_bytes: nominal size, for the time it takes.
            weight_hash: what the weights truly are.
            model_path: if given, becomes model path *and served name*.
            failure: why the weights cannot be read (missing path, torn export): 400 after 1.3 s, old weights stay.
        """
        if self._postponed(lambda: self.load_weights(
                version, size_bytes, weight_hash, flush_cache=flush_cache, abort_all_requests=abort_all_requests,
                model_path=model_path, failure=failure, done=done)):
            return
        self._check_listening()
        load = _WeightLoad(version, size_bytes, weight_hash, flush_cache, model_path, failure, done, not self.paused)
        if abort_all_requests:
            self.scheduler.push(self._do_abort, "")
        if load.exclusive:
            self._writers.append(load)
            self._next_writer()
        else:
            self.scheduler.push(self._do_load, load)

    def _next_writer(self) -> None:
        if self._writers and not self._writing and not self._live:
            self._writing = True
            self.scheduler.push(self._do_load, self._writers[0])

    def _do_load(self, load: _WeightLoad) -> None:
        if load.failure:
            self.scheduler.block_for(self.profile.missing_weights_ns, lambda: self._load_failed(load))
        else:
            self.scheduler.block_for(self.profile.weight_load_ns(load.size_bytes), lambda: self._loaded(load))

    def _load_failed(self, load: _WeightLoad) -> None:
        self._end_load(load, AdminResult(400, False, load.failure))

    def _loaded(self, load: _WeightLoad) -> None:
        self._cut_spans()
        scheduler = self.scheduler
        paused = len(scheduler.live()) if scheduler.paused else 0
        scheduler.epoch += 1
        self.weight_hash = load.weight_hash
        if load.version is not None:
            self.version = load.version
        if load.model_path is not None:
            self.model_path = load.model_path
        flushed = scheduler.flush() if load.flush_cache else True
        text = "Succeeded to update model weights." if flushed else _HALF_UPDATED
        self._end_load(load, AdminResult(200 if flushed else 400, flushed, text, paused))

    def _end_load(self, load: _WeightLoad, result: AdminResult) -> None:
        self._record("engine.weights", version=self.version, weight_hash=self.weight_hash, ok=result.success,
                     detail=result.message, in_flight=len(self._live))
        if load.exclusive:
            self._writers.popleft()
            self._writing = False
            if self._writers:
                self._next_writer()
            else:
                blocked, self._blocked = self._blocked, []
                if self.paused:  # a pause came while they waited for the load
                    self._held = blocked + self._held
                else:
                    for send in blocked:
                        send()
        if load.done is not None:
            load.done(result)

    def update_weight_version(self, version: str, *, abort_all_requests: bool = True, done: AdminDone | None = None) -> None:
        """POST /update_weight_version: changes the label only, and by default aborts everything in flight [read]."""
        if self._postponed(lambda: self.update_weight_version(version, abort_all_requests=abort_all_requests, done=done)):
            return
        self._check_listening()
        if abort_all_requests:
            self.scheduler.push(self._do_abort, "")
        self.scheduler.push(self._do_label, (version, done))

    def _do_label(self, change: tuple[str, AdminDone | None]) -> None:
        self._cut_spans()
        self.version = change[0]
        self._reply(change[1], AdminResult(200, True, f"Weight version updated to {self.version}"))

    def _cut_spans(self) -> None:
        """Close the span of every request that has output: its next tokens are another version's."""
        for request in self.scheduler.live():
            tokens = self.scheduler.output_tokens(request)
            if tokens > request.span_start:
                if request.spans is None:
                    request.spans = []
                request.spans.append((self.version, request.span_start, tokens, self.weight_hash))
                request.span_start = tokens

    # --- probes -------------------------------------------------------------------------------------------------------

    def ready(self) -> int:
        """GET /ready: 200, or 503 while starting, paused or unhealthy."""
        return 200 if self.listening and not self.paused and not self.unhealthy else 503

    def health(self, done: Callable[[int], None]) -> None:
        """GET /health: as /health_generate, or an instant 200 where the profile says that it does not generate."""
        if self._postponed(lambda: self.health(done)):
            return
        if self.profile.health_generates:
            self.health_generate(done)
        else:
            self._check_listening()
            self._after(self.profile.admin_reply_ns, lambda: done(200))

    def health_generate(self, done: Callable[[int], None]) -> None:
        """GET /health_generate: one token, then polls at 1 s steps: at least 1 s; 503 after 20 s, and then unhealthy."""
        if self._postponed(lambda: self.health_generate(done)):
            return
        self._check_listening()
        if self.terminating:
            self._after(self.profile.admin_reply_ns, lambda: done(503))
            return
        began = self.env.now
        if self.paused:
            self._held.append(lambda: self._send_health(began))
        else:
            self._send_health(began)
        self._after(self.profile.health_poll_ns, lambda: self._health_poll(began, done))

    def _send_health(self, began: int) -> None:
        if self.env.now < began + self.profile.health_timeout_ns:
            self.scheduler.push(self._do_health, None)

    def _do_health(self, _: None) -> None:
        scheduler = self.scheduler
        if not scheduler.running and not scheduler.waiting and scheduler.chunked is None:
            scheduler.waiting.append(Request("HEALTH_CHECK", 1, 1, 1, True, (), None, None, self.env.now))

    def _health_poll(self, began: int, done: Callable[[int], None]) -> None:
        self.scheduler.sync()
        if self.scheduler.last_output_ns > began:  # any output of the scheduler will do
            self.unhealthy = False
            done(200)
        elif self.env.now >= began + self.profile.health_timeout_ns:
            self.unhealthy = True
            done(503)
        else:
            self._after(self.profile.health_poll_ns, lambda: self._health_poll(began, done))

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
        return self._load_figures() if self._last_loads is None else dict(self._last_loads)

    @property
    def in_flight(self) -> int:
        """Requests between acceptance and answer, held ones not included."""
        return len(self._live)

    @property
    def http_active(self) -> int:
        """Open generation requests, those included that a pause or a weight load keeps back."""
        return len(self._live) + len(self._held) + len(self._blocked)

    # --- machinery ----------------------------------------------------------------------------------------------------

    def _check_listening(self) -> None:
        if not self.listening:
            raise EngineNotListening(f"engine {self.name} does not listen")

    def _postponed(self, action: Callable[[], None]) -> bool:
        if self.frozen:
            self._thaw_backlog.append(action)
        return self.frozen

    def _reply(self, done: AdminDone | None, result: AdminResult) -> None:
        if done is not None:
            self._after(self.profile.admin_reply_ns, lambda: done(result))

    def _record(self, kind: str, **fields: Any) -> None:
        if self._emit is not None:
            self._emit(kind, **fields)

    def _after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """A timer of this process: dropped when it dies, late when it is stopped."""

        def fire(_: Event) -> None:
            if self.frozen:
                self._thaw_backlog.append(action)
            elif self.alive:
                action()

        self._at(delay_ns, fire)

    def _at(self, delay_ns: int, callback: Callable[[Event], None]) -> None:
        event = Event(self.env)
        event._ok = True
        event._value = None
        event.callbacks.append(callback)
        self.env.schedule(event, delay=delay_ns)


class _WeightLoad:
    """One /update_weights_from_disk under way. ``exclusive``: it came unpaused and waits for what is in flight."""

    __slots__ = ("done", "exclusive", "failure", "flush_cache", "model_path", "size_bytes", "version", "weight_hash")

    def __init__(self, version: str | None, size_bytes: int, weight_hash: str, flush_cache: bool,
                 model_path: str | None, failure: str, done: AdminDone | None, exclusive: bool) -> None:
        self.version = version
        self.size_bytes = size_bytes
        self.weight_hash = weight_hash
        self.flush_cache = flush_cache
        self.model_path = model_path
        self.failure = failure
        self.done = done
        self.exclusive = exclusive
