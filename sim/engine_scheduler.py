"""The scheduler process of one engine: continuous batching as SGLang does it, with exact skip-ahead.

One *iteration* is a prefill batch, a decode step or a weight load; its end is a *boundary*. Requests and control
messages wait in an inbox and are seen at the first boundary not before they arrive, as SGLang's loop reads its socket
once per iteration. Between two boundaries nothing can change, so k identical decode steps are one event: their cost,
memory and token counts have closed forms in integers of picoseconds. A message that arrives in the middle shortens the
run to the boundary at which it would have been seen step by step. ``fast_path=False`` steps; the results are equal.

Policies [read in SGLang's source]: prefill goes before decode; first come, first served; one chunked prompt at a time;
admission reserves ``new_token_ratio`` of the running requests' remaining tokens; a full batch is not retried until
something leaves; when memory runs out, requests with the fewest output tokens, then the longest prompt, are retracted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import isqrt
from typing import Any

import simpy
from simpy.events import Event

from sim.engine_cost import PS_PER_NS, EngineProfile, StepCosts
from sim.engine_types import FINISHED, PREFILL, RUNNING, WAITING, Request
from sim.radix import RadixCache

IDLE, PREFILLING, DECODING, LOADING = range(4)

_CLIP_NEW_TOKENS = 4096  # SGLang reserves at most this much per request at admission
_RETRACT_STEPS = 20  # and, after a retraction, this many further steps per request
_LOG_STEPS = 40  # gen_throughput is measured over this many decode steps (decode_log_interval)

Handler = Callable[[Any], None]


class Scheduler:
    """Admission, prefill, decode, retraction and memory of one engine.

    Args:
        env: simulated clock in integer nanoseconds.
        profile: costs and limits.
        on_finish: called at a boundary with (request, output tokens, finish reason) for each request that ends.
        priority: SimPy priority of the engine's events. Distinct per engine and above NORMAL, so that the order of
            events at one instant depends neither on the fast path nor on when an event was scheduled.
        fast_path: skip runs of equal decode steps in one event.
    """

    def __init__(self, env: simpy.Environment, profile: EngineProfile,
                 on_finish: Callable[[Request, int, str], None], *, priority: int, fast_path: bool) -> None:
        self.env = env
        self.profile = profile
        self.costs = StepCosts(profile)
        self.on_finish = on_finish
        self.cache = RadixCache(profile.prefix_block_tokens)
        self.epoch = 0  # rises with every weight change; the version tag of cache blocks
        self.inbox: deque[tuple[int, Handler | None, Any]] = deque()
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.chunked: Request | None = None
        self.paused = False
        self.held = False  # frozen or wedged: boundaries are not processed
        self.dead = False
        self.decode_steps = 0
        self.context_tokens = 0  # of the running batch, the token being computed included
        self.private_tokens = 0  # KV tokens held by requests outside the prefix tree
        self.generated_tokens = 0
        self.computed_prompt_tokens = 0
        self.retracted = 0
        self.last_output_ns = -1
        self.throughput_tokens = 0  # of the last full window of _LOG_STEPS decode steps ...
        self.throughput_ps = 0  # ... and how long it took
        self._priority = priority
        self._fast = fast_path
        self._intake = profile.request_intake_ns
        self._capacity = profile.kv_capacity_tokens
        self._kind = IDLE
        self._start_ps = 0
        self._step_ps = 0  # cost of the first step of the run
        self._slope_ps = 0  # how much dearer each further step is
        self._steps = 0
        self._end_ps = 0
        self._end_ns = 0
        self._now_ps = 0
        self._generation = 0  # of the one event that counts; older ones are ignored when they fire
        self._kicked = False
        self._stuck = False
        self._in_boundary = False
        self._batch: list[tuple[Request, int]] = []
        self._load_ns = -1
        self._after_load: Callable[[], None] | None = None
        self._heap: list[tuple[int, int, Request]] = []
        self._joins = 0
        self._rest = 0  # sum over running requests of max_new minus output tokens, at ``decode_steps`` ...
        self._rest_fixed = 0  # ... and over those with ignore_eos, ``_fixed`` in number
        self._fixed = 0
        self._long = 0  # running requests whose reservation may be clipped
        self._streams = 0
        self._full = False
        self._ratio = profile.new_token_ratio_init_ppm
        self._ratio_decay = (
            profile.new_token_ratio_init_ppm - profile.new_token_ratio_min_ppm
        ) // profile.new_token_ratio_decay_steps
        self._no_decay = 0
        self._log_ps = 0
        self._log_tokens = 0

    # --- messages -----------------------------------------------------------------------------------------------------

    def push(self, handler: Handler | None, payload: Any) -> None:
        """Send one message to the scheduler; with no handler the payload is a Request. Seen at a boundary, in order."""
        due = self.env.now + self._intake
        self.inbox.append((due, handler, payload))
        if self._kind == DECODING:
            if self._steps > 1 and due < self._end_ns:
                self._shorten(due)
        elif self._kind == IDLE and not self._kicked and not self._in_boundary:
            self._kick(due)

    def hold(self) -> None:
        """Stop at the next boundary without processing it (SIGSTOP, wedge)."""
        self.held = True
        if self._kind == DECODING and self._steps > 1 and self.env.now < self._end_ns:
            self._shorten(self.env.now)  # a boundary of this very instant has not been processed yet

    def unhold(self) -> None:
        """Go on; a boundary that passed meanwhile is processed now."""
        self.held = False
        if self._stuck:
            self._stuck = False
            self._schedule(self.env.now + 1)

    def kill(self) -> None:
        """Nothing of this scheduler happens any more."""
        self.dead = True
        self._generation += 1

    # --- what readers may see -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Account the decode steps that have passed, so that counters read now are those of stepping."""
        if self._kind != DECODING or self._steps < 2:
            return
        elapsed = self.env.now * PS_PER_NS - PS_PER_NS - self._start_ps  # a step that ends now has not been processed
        if elapsed < self._step_ps:
            return
        done = min(self._steps_within(elapsed), self._steps - 1)
        if done:
            self._apply_decode(done)

    @property
    def is_idle(self) -> bool:
        """Nothing running, waiting or on its way in."""
        return not (self.running or self.waiting or self.chunked or self._batch or self.inbox)

    @property
    def used_tokens(self) -> int:
        """KV tokens in use: what eviction could not free."""
        return self.private_tokens + self.cache.total_tokens - self.cache.evictable_tokens

    def output_tokens(self, request: Request) -> int:
        """Output tokens that ``request`` has at this boundary."""
        if request.state == RUNNING:
            return request.tokens + self.decode_steps - request.joined_at
        return request.tokens

    # --- time ---------------------------------------------------------------------------------------------------------

    def _schedule(self, at_ns: int) -> None:
        self._generation += 1
        event = Event(self.env)
        event._ok = True
        event._value = self._generation
        event.callbacks.append(self._on_event)
        self.env.schedule(event, self._priority, at_ns - self.env.now)  # type: ignore[arg-type]

    def _kick(self, at_ns: int) -> None:
        self._kicked = True
        self._schedule(at_ns)

    def _run(self, kind: int, step_ps: int, slope_ps: int, steps: int) -> None:
        self._kind = kind
        self._start_ps = start = self._now_ps
        self._step_ps = step_ps
        self._slope_ps = slope_ps
        self._steps = steps
        self._end_ps = end = start + steps * step_ps + slope_ps * (steps * (steps - 1) >> 1)
        self._end_ns = -(-end // PS_PER_NS)
        if steps > 1 and self.inbox and self.inbox[0][0] < self._end_ns:
            self._steps = self._steps_until(self.inbox[0][0])
            self._end_ps = end = self._after(self._steps)
            self._end_ns = -(-end // PS_PER_NS)
        self._schedule(self._end_ns)

    def _after(self, steps: int) -> int:
        return self._start_ps + steps * self._step_ps + self._slope_ps * (steps * (steps - 1) >> 1)

    def _steps_within(self, elapsed_ps: int) -> int:
        """How many whole steps of this run fit in ``elapsed_ps``."""
        step, slope = self._step_ps, self._slope_ps
        if not slope:
            return elapsed_ps // step
        linear = 2 * step - slope  # slope * k * k + linear * k <= 2 * elapsed
        k = max(0, (isqrt(linear * linear + 8 * slope * elapsed_ps) - linear) // (2 * slope))
        while k * step + slope * (k * (k - 1) >> 1) > elapsed_ps:
            k -= 1
        while (k + 1) * step + slope * (k * (k + 1) >> 1) <= elapsed_ps:
            k += 1
        return k

    def _steps_until(self, due_ns: int) -> int:
        """The first step of this run whose end, rounded up to nanoseconds, is not before ``due_ns``."""
        return self._steps_within(max(0, (due_ns - 1) * PS_PER_NS - self._start_ps)) + 1

    def _shorten(self, due_ns: int) -> None:
        steps = self._steps_until(due_ns)
        if steps < self._steps:
            self._steps = steps
            self._end_ps = self._after(steps)
            self._end_ns = -(-self._end_ps // PS_PER_NS)
            self._schedule(self._end_ns)

    # --- one boundary -------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if event._value != self._generation:
            return
        if self.held:
            self._stuck = True
            return
        self._kicked = False
        now = self.env.now
        kind = self._kind
        self._in_boundary = True
        if kind == IDLE or now > self._end_ns:  # a late boundary: the process was held
            self._now_ps = max(self._end_ps, now * PS_PER_NS)
        else:
            self._now_ps = self._end_ps
        self._kind = IDLE
        if kind == DECODING:
            self._apply_decode(self._steps)
            self._finish_due()
        elif kind == PREFILLING:
            self._end_prefill()
        elif kind == LOADING:
            after, self._after_load = self._after_load, None
            if after is not None:
                after()
        inbox = self.inbox
        while inbox and inbox[0][0] <= now and self._load_ns < 0 and not self.dead:
            _, handler, payload = inbox.popleft()
            if handler is None:
                self.waiting.append(payload)
            else:
                handler(payload)
        self._in_boundary = False
        if not self.dead:
            self._next()

    def _next(self) -> None:
        """Choose the next iteration."""
        if self._load_ns >= 0:
            load, self._load_ns = self._load_ns, -1
            self._run(LOADING, max(1, load) * PS_PER_NS, 0, 1)
            return
        if not self.paused:
            if (self.chunked is not None or (self.waiting and not self._full)) and self._start_prefill():
                return
            if self.running:
                self._start_decode()
                return
            self._ratio = self.profile.new_token_ratio_init_ppm  # as SGLang does when it finds itself idle
            self._no_decay = 0
        if self.inbox:
            self._kick(max(self.inbox[0][0], self.env.now + 1))

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _start_prefill(self) -> bool:
        profile = self.profile
        cache = self.cache
        rem_input = profile.max_prefill_tokens
        rem_chunk = profile.chunked_prefill_size
        batch: list[tuple[Request, int]] = []
        new_tokens = 0
        pairs = 0
        chunked = self.chunked
        if chunked is not None:
            target = chunked.prompt_tokens + chunked.tokens
            size = min(rem_chunk, target - chunked.computed)
            batch.append((chunked, size))
            new_tokens = size
            pairs = size * (2 * chunked.computed + size)
            rem_input -= size
            rem_chunk -= size
            self._take(size)
            if chunked.computed + size == target:
                self.chunked = None
        waiting = self.waiting
        if waiting and not self._full and rem_chunk > 0 and rem_input > 0:
            slots = profile.max_running_requests - len(self.running) - len(batch)
            free = self._capacity - self.used_tokens
            reserved = self._reservation()
            if chunked is not None and self.chunked is None:
                reserved += min(chunked.max_new - chunked.tokens, _CLIP_NEW_TOKENS) + 1
            while waiting:
                if slots <= 0:
                    self._full = True
                    break
                request = waiting[0]
                target = request.prompt_tokens + request.tokens
                hits = stale = 0
                node = cache.root
                if request.blocks:
                    block = cache.block_tokens
                    limit = min(len(request.blocks), (request.prompt_tokens - (request.tokens == 0)) // block)
                    node, hits, stale = cache.match(request.blocks, limit, self.epoch)
                    if hits:
                        before = cache.evictable_tokens
                        cache.lock(node)
                        free -= before - cache.evictable_tokens
                    cached = hits * block
                else:
                    cached = 0
                extend = target - cached
                new = request.max_new - request.tokens
                if new > _CLIP_NEW_TOKENS:
                    new = _CLIP_NEW_TOKENS
                refused = extend + new + 1 >= free - reserved  # SGLang reserves one page more
                if refused or (extend >= rem_input and batch):
                    if hits:
                        cache.unlock(node)
                    self._full = refused
                    break
                size = extend if extend <= rem_chunk else rem_chunk
                waiting.popleft()
                self._admit(request, node, hits, stale, cached)
                batch.append((request, size))
                new_tokens += size
                pairs += size * (2 * cached + size)
                self._take(size)
                free -= size
                slots -= 1
                if size < extend:
                    self.chunked = request
                    break
                reserved += new + 1
                rem_input -= size
                rem_chunk -= size
                if rem_input <= 0 or rem_chunk <= 0:
                    break
        if not batch:
            return False
        self._batch = batch
        costs = self.costs
        self._run(PREFILLING, costs.prefill_base + costs.prefill_per_request * len(batch)
                  + costs.prefill_per_token * new_tokens + costs.prefill_per_token_pair * (pairs >> 1), 0, 1)
        self.computed_prompt_tokens += new_tokens
        return True

    def _admit(self, request: Request, node: Any, hits: int, stale: int, cached: int) -> None:
        request.state = PREFILL
        request.computed = cached
        request.private = 0
        request.node = node
        request.node_depth = hits
        if not request.cached_seen:  # a retracted request finds its own prompt again; SGLang counts the first look only
            request.cached_seen = True
            request.cached = cached
            request.queue_ns = self._now_ns() - request.submitted_ns
        request.stale += stale * self.cache.block_tokens

    def _reservation(self) -> int:
        """Tokens that running requests are expected to need yet."""
        fixed, hopeful = self._rest_fixed, self._rest - self._rest_fixed
        if self._long:
            fixed = hopeful = 0
            steps = self.decode_steps
            for request in self.running.values():
                rest = min(request.max_new - request.tokens - steps + request.joined_at, _CLIP_NEW_TOKENS)
                if request.fixed:
                    fixed += rest
                else:
                    hopeful += rest
        return fixed + hopeful * self._ratio // 1_000_000

    def _take(self, tokens: int) -> None:
        """Allocate KV memory, evicting cached blocks when there is no free memory."""
        self.private_tokens += tokens
        short = self.private_tokens + self.cache.total_tokens - self._capacity
        if short > 0:
            self.cache.evict(short)

    def _end_prefill(self) -> None:
        batch, self._batch = self._batch, []
        now = self._now_ns()
        cache = self.cache
        block = cache.block_tokens
        for request, size in batch:
            request.computed += size
            request.private += size
            blocks = request.blocks
            if blocks:
                stop = min(len(blocks), min(request.computed, request.prompt_tokens) // block)
                if stop > request.node_depth:
                    assert request.node is not None
                    request.node, _ = cache.extend(request.node, blocks, request.node_depth, stop, self.epoch)
                    moved = (stop - request.node_depth) * block
                    request.node_depth = stop
                    request.private -= moved  # now the tree's; a copy that the tree had already is freed
                    self.private_tokens -= moved
            if request is self.chunked:
                continue
            request.tokens += 1
            self.generated_tokens += 1
            self.last_output_ns = now
            if request.first_token_ns < 0:
                request.first_token_ns = now
            if request.on_token is not None:
                request.on_token(request.rid, request.tokens)
                if self.dead:
                    return
            if request.tokens >= request.output_tokens:
                self._release(request)
                self._end(request, request.tokens, "length" if request.tokens >= request.max_new else "stop")
                if self.dead:
                    return
            else:
                self._join(request)

    def _join(self, request: Request) -> None:
        self._joins += 1
        request.seq = self._joins
        request.state = RUNNING
        request.joined_at = steps = self.decode_steps
        request.finish_at = steps + request.output_tokens - request.tokens
        self.running[request.seq] = request
        heappush(self._heap, (request.finish_at, request.seq, request))
        self.context_tokens += request.prompt_tokens + request.tokens
        rest = request.max_new - request.tokens
        self._rest += rest
        if request.fixed:
            self._rest_fixed += rest
            self._fixed += 1
        if request.max_new > _CLIP_NEW_TOKENS:
            self._long += 1
        if request.on_token is not None:
            self._streams += 1

    # --- decode -------------------------------------------------------------------------------------------------------

    def _start_decode(self) -> None:
        batch = len(self.running)
        free = self._capacity - self.used_tokens
        if free < batch:
            self._retract_for_memory(free)
            batch = len(self.running)
            free = self._capacity - self.used_tokens
        heap = self._heap
        while heap[0][2].state != RUNNING or heap[0][2].seq != heap[0][1]:
            heappop(heap)
        # Right after a retraction the batch is not full: the next iteration looks at the queue again.
        if self._fast and not self._streams and (self._full or not self.waiting):
            steps = min(heap[0][0] - self.decode_steps, free // batch)
        else:
            steps = 1
        costs = self.costs
        slope = costs.decode_per_context_token
        self._run(DECODING, costs.decode_base + costs.decode_per_request * batch + slope * self.context_tokens,
                  slope * batch, steps)

    def _apply_decode(self, steps: int) -> None:
        """Account the first ``steps`` steps of the current run and leave the rest as the run."""
        batch = len(self.running)
        tokens = steps * batch
        before = self.decode_steps
        after = before + steps
        if after // _LOG_STEPS != before // _LOG_STEPS:
            self._log_throughput(before, after, batch)
        self.decode_steps = after
        self.context_tokens += tokens
        self.generated_tokens += tokens
        self._rest -= tokens
        self._rest_fixed -= steps * self._fixed
        self.private_tokens += tokens
        short = self.private_tokens + self.cache.total_tokens - self._capacity
        if short > 0:
            self.cache.evict(short)
        self._ratio = max(self.profile.new_token_ratio_min_ppm,
                          self._ratio - self._ratio_decay * (steps - self._no_decay))
        self._no_decay = 0
        end = self._after(steps)
        self._start_ps = end
        self._step_ps += self._slope_ps * steps
        self._steps -= steps
        self.last_output_ns = -(-end // PS_PER_NS)

    def _log_throughput(self, before: int, after: int, batch: int) -> None:
        mark = after // _LOG_STEPS * _LOG_STEPS
        at_ps, tokens = self._after(mark - before), self.generated_tokens + (mark - before) * batch
        last = mark - _LOG_STEPS
        if last > before:
            self._log_ps, self._log_tokens = self._after(last - before), self.generated_tokens + (last - before) * batch
        self.throughput_tokens, self.throughput_ps = tokens - self._log_tokens, at_ps - self._log_ps
        self._log_ps, self._log_tokens = at_ps, tokens

    def _finish_due(self) -> None:
        if self._streams:
            self._stream_tokens()
        heap = self._heap
        steps = self.decode_steps
        while heap and heap[0][0] <= steps and not self.dead:
            _, seq, request = heappop(heap)
            if request.state == RUNNING and request.seq == seq:
                self._leave(request)
                self._end(request, request.tokens, "length" if request.tokens >= request.max_new else "stop")

    def _stream_tokens(self) -> None:
        for request in tuple(self.running.values()):
            if request.on_token is not None and not self.dead and request.state == RUNNING:
                request.on_token(request.rid, self.output_tokens(request))

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        """Take ``request`` out of the running batch and give its memory back."""
        made = self.decode_steps - request.joined_at
        request.tokens += made
        request.private += made
        del self.running[request.seq]
        self.context_tokens -= request.prompt_tokens + request.tokens
        rest = request.max_new - request.tokens
        self._rest -= rest
        if request.fixed:
            self._rest_fixed -= rest
            self._fixed -= 1
        if request.max_new > _CLIP_NEW_TOKENS:
            self._long -= 1
        if request.on_token is not None:
            self._streams -= 1
        self._release(request)

    def _release(self, request: Request) -> None:
        self.private_tokens -= request.private
        request.private = 0
        if request.node_depth:
            assert request.node is not None
            self.cache.unlock(request.node)
        request.node = None
        request.node_depth = 0
        request.computed = 0
        self._full = False

    def _end(self, request: Request, tokens: int, reason: str) -> None:
        request.state = FINISHED
        self.on_finish(request, tokens, reason)

    def abort(self, request: Request) -> None:
        """End ``request`` now, wherever it is. Only at a boundary."""
        if request.state == RUNNING:
            self._leave(request)
        elif request.state == PREFILL:
            self._release(request)
            if self.chunked is request:
                self.chunked = None
        elif request.state == WAITING:
            self.waiting.remove(request)
        else:
            return
        self._end(request, request.tokens, "abort")

    def live(self) -> list[Request]:
        """Every request that the scheduler holds, waiting ones first, as its abort looks through them."""
        held = list(self.waiting)
        if self.chunked is not None:
            held.append(self.chunked)
        held.extend(self.running.values())
        return held

    def retract_all(self) -> None:
        """Take every running request's memory and send it back to the queue (pause mode ``retract``)."""
        requests = list(self.running.values())
        if self.chunked is not None:
            requests.append(self.chunked)
            self.chunked = None
        for request in requests:
            self._retract(request)

    def _retract(self, request: Request) -> None:
        if request.state == RUNNING:
            self._leave(request)
        else:
            self._release(request)
        request.state = WAITING
        request.retractions += 1
        self.retracted += 1
        self.waiting.append(request)

    def _retract_for_memory(self, free: int) -> None:
        """SGLang's ``retract_decode``: at least one goes, then as many as it takes for one more step of the rest."""
        steps = self.decode_steps
        while len(self.running) > 1:
            victim = min(self.running.values(),
                         key=lambda r: (r.tokens + steps - r.joined_at, -r.prompt_tokens, -r.seq))
            self._retract(victim)
            if self._capacity - self.used_tokens >= len(self.running):
                break
        made = sum(r.tokens + steps - r.joined_at for r in self.running.values())
        limit = sum(r.max_new for r in self.running.values())
        self._ratio = min(1_000_000, (made + _RETRACT_STEPS * len(self.running)) * 1_000_000 // (limit + 1))
        self._no_decay = 1

    # --- weights ------------------------------------------------------------------------------------------------------

    def block_for(self, duration_ns: int, after: Callable[[], None]) -> None:
        """Stand still for ``duration_ns`` from this boundary on, then call ``after``. Later messages wait."""
        self._load_ns = duration_ns
        self._after_load = after

    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing changed, while requests hold memory or wait to be scheduled.

        A retract-paused engine has nothing but waiting requests and may flush; an in-place paused one may not.
        """
        if self.running or self.chunked is not None or (self.waiting and not self.paused):
            return False
        self.cache.clear()
        return True

    def _now_ns(self) -> int:
        return -(-self._now_ps // PS_PER_NS)
