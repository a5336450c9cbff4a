"""The scheduler of one engine: continuous batching as SGLang 0.5.23 does it.

Policies [read in SGLang's source]: prefill goes before decode; first come, first served; one chunked prompt at a time;
admission reserves what running requests may still need (all of it under ignore_eos, ``new_token_ratio`` of it else); a
full batch is not retried until something leaves; when memory runs out, the requests with the fewest output tokens, and
of those the longest prompts, are retracted.

No step touches every request: a running request's output count is a difference of step counters, its end a heap entry.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import simpy

from sim.engine_cost import PS_PER_NS, EngineProfile, StepCosts
from sim.engine_iterations import DECODING, PREFILLING, Iterations
from sim.engine_pace import Pace
from sim.engine_types import FINISHED, PREFILL, RUNNING, WAITING, Request
from sim.radix import Block, RadixCache

_CLIP_NEW_TOKENS = 4096  # SGLang reserves at most this much per request at admission
_RETRACT_STEPS = 20  # and, after a retraction, this many further steps per request
_STALLING_PROMPT = 1024  # tokens; assumed: the published prompts had some 1,800, those that went well 35
_LOG_STEPS = 40  # gen_throughput is measured over this many decode steps (decode_log_interval)


class Scheduler(Iterations):
    """Admission, prefill, decode, retraction and memory of one engine.

    Args:
        env: simulated clock in integer nanoseconds.
        profile: costs and limits.
        on_finish: called at a boundary with (request, output tokens, finish reason) for each request that ends.
        priority: SimPy priority of the engine's events. Distinct per engine and above NORMAL, so that the order of
            events at one instant depends neither on the fast path nor on when an event was scheduled.
        fast_path: skip runs of equal decode steps in one event.
        pace: how its pace wanders, where it does.
    """

    def __init__(
        self,
        env: simpy.Environment,
        profile: EngineProfile,
        on_finish: Callable[[Request, int, str], None],
        *,
        priority: int,
        fast_path: bool,
        pace: Pace | None = None,
    ) -> None:
        super().__init__(env, profile.request_intake_ns, priority)
        self.profile = profile
        self.costs = StepCosts(profile)
        self._pace = pace
        self._slow_ppm = 1_000_000
        self.on_finish = on_finish
        self.cache = RadixCache(profile.prefix_block_tokens)
        self.epoch = 0  # rises with every weight change; the version tag of cache blocks
        self.running: dict[int, Request] = {}
        self.chunked: Request | None = None
        self.paused = False
        self.decode_steps = 0
        self.context_tokens = 0  # of the running batch, the token being computed included
        self.private_tokens = 0  # KV tokens held by requests outside the prefix tree
        self.generated_tokens = 0
        self.computed_prompt_tokens = 0
        self.retracted = 0
        self.last_output_ns = -1
        self.stalls = False  # deterministic mode without a prefix cache, before Blackwell (scaling.md 8)
        self.stalled_ns = -1  # since when nothing is admitted any more
        self.stalled_running = 0
        self.throughput_tokens = 0  # of the last full window of _LOG_STEPS decode steps ...
        self.throughput_ps = 0  # ... and how long it took
        self._fast = fast_path
        self._capacity = profile.kv_capacity_tokens
        self._batch: list[tuple[Request, int]] = []
        self._heap: list[tuple[int, int, Request]] = []
        self._joins = 0
        self._rest = 0  # sum over running requests of max_new minus output tokens, at ``decode_steps`` ...
        self._rest_fixed = 0  # ... and over those with ignore_eos, ``_fixed`` in number
        self._fixed = 0
        self._long = 0  # running requests whose reservation may be clipped
        self._streams = 0
        self._full = False
        self._ratio = profile.new_token_ratio_init_ppm
        self._ratio_min = profile.new_token_ratio_min_ppm
        self._ratio_decay = (
            profile.new_token_ratio_init_ppm - profile.new_token_ratio_min_ppm
        ) // profile.new_token_ratio_decay_steps
        self._no_decay = 0
        self._doomed: list[Request] = []  # aborted during a pause, to end with it
        self._log_ps = 0
        self._log_tokens = 0

    # --- what readers may see -----------------------------------------------------------------------------------------

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

    def slow(self, factor_ppm: int) -> None:
        """Multiply the costs of every further iteration, on top of the pace. Only at a boundary."""
        self._slow_ppm = factor_ppm
        pace_ppm = 1_000_000 if self._pace is None else self._pace.ppm
        self.costs = StepCosts(self.profile, factor_ppm * pace_ppm // 1_000_000)

    def _start_iteration(self) -> bool:
        if self.paused:
            return False
        pace = self._pace
        if pace is not None and (self.running or self.waiting or self.chunked) and self._now_ns() >= pace.until_ns:
            pace.draw(self._now_ns())
            self._not_past_ns = pace.until_ns
            self.slow(self._slow_ppm)
        if self.stalls and self._stalled():
            pass
        elif (self.chunked is not None or (self.waiting and not self._full)) and self._start_prefill():
            return True
        if self.running:
            self._start_decode()
            return True
        self._ratio = self.profile.new_token_ratio_init_ppm  # as SGLang does when it finds itself idle
        self._no_decay = 0
        return False

    def _stalled(self) -> bool:
        """Whether this scheduler has stopped for good: it does at the first long prompt that comes beside others.

        Published are the setting, the load (48 prompts of some 1,800 tokens with one prefix) and what was seen (all of
        them queued, none running, the GPU idle); where exactly the scheduler stops is not. What runs then ends.
        """
        if self.stalled_ns < 0 and self.chunked is None and len(self.waiting) + len(self.running) > 1:
            if any(request.prompt_tokens + request.tokens >= _STALLING_PROMPT for request in self.waiting):
                self.stalled_ns = self._now_ns()
                self.stalled_running = len(self.running)
        return self.stalled_ns >= 0

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
        self._run(
            PREFILLING,
            costs.prefill_base
            + costs.prefill_per_request * len(batch)
            + costs.prefill_per_token * new_tokens
            + costs.prefill_per_token_pair * (pairs >> 1),
            0,
            1,
        )
        self.computed_prompt_tokens += new_tokens
        return True

    def _admit(self, request: Request, node: Block, hits: int, stale: int, cached: int) -> None:
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
        free = self._capacity - self.private_tokens - self.cache.total_tokens + self.cache.evictable_tokens
        if free < batch:
            self._retract_for_memory()
            batch = len(self.running)
            free = self._capacity - self.used_tokens
        heap = self._heap
        while heap[0][2].state != RUNNING or heap[0][2].seq != heap[0][1]:
            heappop(heap)
        # Right after a retraction the batch is not full: the next iteration looks at the queue again.
        if self._fast and not self._streams and (self._full or not self.waiting):
            steps = heap[0][0] - self.decode_steps
            if steps * batch > free:
                steps = free // batch
        else:
            steps = 1
        costs = self.costs
        slope = costs.decode_per_context_token
        self._run(
            DECODING,
            costs.decode_base
            + costs.decode_per_request * batch
            + (costs.decode_batched if batch > 1 else 0)
            + slope * self.context_tokens,
            slope * batch,
            steps,
        )

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
        ratio = self._ratio - self._ratio_decay * (steps - self._no_decay)
        self._ratio = ratio if ratio > self._ratio_min else self._ratio_min
        self._no_decay = 0
        end = self._end_ps if steps == self._steps else self._after(steps)
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
        """End ``request``, wherever it is. Only at a boundary.

        A request that has been computing ends in SGLang after its next iteration [read]: while paused there is none,
        so it stays silent until the pause ends.
        """
        if self.paused and request.state in (RUNNING, PREFILL):
            if request not in self._doomed:
                self._doomed.append(request)
            return
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

    def unpause(self) -> None:
        """Go on, and end what was aborted during the pause."""
        self.paused = False
        doomed, self._doomed = self._doomed, []
        for request in doomed:
            if not self.dead:
                self.abort(request)

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

    def _retract_for_memory(self) -> None:
        """SGLang's ``retract_decode``: at least one goes, then as many as it takes for one more step of the rest."""
        steps = self.decode_steps
        while len(self.running) > 1:
            victim = min(
                self.running.values(), key=lambda r: (r.tokens + steps - r.joined_at, -r.prompt_tokens, -r.seq)
            )
            self._retract(victim)
            if self._capacity - self.used_tokens >= len(self.running):
                break
        made = sum(r.tokens + steps - r.joined_at for r in self.running.values())
        limit = sum(r.max_new for r in self.running.values())
        self._ratio = min(1_000_000, (made + _RETRACT_STEPS * len(self.running)) * 1_000_000 // (limit + 1))
        self._no_decay = 1

    # --- weights ------------------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing changed, while requests hold memory or wait to be scheduled.

        A retract-paused engine has nothing but waiting requests and may flush; an in-place paused one may not.
        """
        if self.running or self.chunked is not None or (self.waiting and not self.paused):
            return False
        self.cache.clear()
        return True
