"""Weight loads of a simulated engine: who waits for whom, what a refused flush leaves behind, and version spans.

Source: ../shared/spec/engines.md, section 3, "weights", and docs/engines.md. SGLang guards a load with a reader-writer
lock: every request reads, an unpaused load writes, and what comes after a waiting writer waits too. A paused engine
loads without the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sim.engine_types import AdminDone, AdminResult

if TYPE_CHECKING:
    from sim.engine import SimEngine

_DONE = "Succeeded to update model weights."
_HALF_DONE = "Weights were updated, but the cache was not flushed because requests are running."


class WeightLoad(NamedTuple):
    """One /update_weights_from_disk under way. ``exclusive``: it came unpaused and waits for what is in flight."""

    version: str | None
    size_bytes: int
    weight_hash: str
    flush_cache: bool
    model_path: str | None
    failure: str
    done: AdminDone | None
    exclusive: bool
    bucket: tuple[str, int, int] | None = None
    """(route, which, of how many) of a load that comes in buckets from training ranks."""


class WeightLoader:
    """The loads of one engine, in the order they came, and the requests that wait behind them."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.blocked: list[Callable[[], None]] = []
        self._waiting: deque[WeightLoad] = deque()
        self._loading = False

    @property
    def pending(self) -> bool:
        """Whether an unpaused load waits or runs, so that new requests must wait behind it."""
        return bool(self._waiting)

    def submit(self, load: WeightLoad) -> None:
        if load.exclusive:
            self._waiting.append(load)
            self.next()
        else:
            self.engine.scheduler.push(self._begin, load)

    def next(self) -> None:
        """Start the first waiting load if nothing is in flight any more."""
        if self._waiting and not self._loading and not self.engine.live:
            self._loading = True
            self.engine.scheduler.push(self._begin, self._waiting[0])

    def _begin(self, load: WeightLoad) -> None:
        profile, scheduler = self.engine.profile, self.engine.scheduler
        if load.failure:
            scheduler.block_for(profile.missing_weights_ns, lambda: self._fail(load))
        else:
            scheduler.block_for(profile.weight_load_ns(load.size_bytes), lambda: self._install(load))

    def _fail(self, load: WeightLoad) -> None:
        self._end(load, AdminResult(400, False, load.failure))

    def _install(self, load: WeightLoad) -> None:
        self.cut_spans()
        engine, scheduler = self.engine, self.engine.scheduler
        paused = len(scheduler.live()) if scheduler.paused else 0
        scheduler.epoch += 1
        changed = engine.weight_hash != load.weight_hash
        engine.weight_hash = load.weight_hash
        if load.version is not None:
            engine.version = load.version
        flushed = engine.flush() if load.flush_cache else True
        engine.cache_outlived |= changed and not flushed
        if flushed:  # else the tokenizer's process, which answers for name and version, takes the load for a failure
            engine.reported_version = engine.version
            if load.model_path is not None:
                engine.model_path = load.model_path
        self._end(load, AdminResult(200 if flushed else 400, flushed, _DONE if flushed else _HALF_DONE, paused))

    def _end(self, load: WeightLoad, result: AdminResult) -> None:
        engine = self.engine
        if load.bucket is not None:
            route, bucket, of = load.bucket
            engine.record("engine.bucket", route=route, bucket=bucket, of=of, weight_hash=engine.weight_hash)
        if load.bucket is None or load.version is not None:
            engine.record(
                "engine.weights",
                version=engine.version,
                weight_hash=engine.weight_hash,
                ok=result.success,
                detail=result.message,
                in_flight=len(engine.live),
            )
        if load.exclusive:
            self._waiting.popleft()
            self._loading = False
            if self._waiting:
                self.next()
            else:
                blocked, self.blocked = self.blocked, []
                engine.let_in(blocked)
        if load.done is not None:
            load.done(result)

    def label(self, change: tuple[str, AdminDone | None]) -> None:
        """Scheduler message: another label on the same weights."""
        self.cut_spans()
        self.engine.version = self.engine.reported_version = change[0]
        self.engine.reply(change[1], AdminResult(200, True, f"Weight version updated to {change[0]}"))

    def lose(self, why: str) -> None:
        """The weights are no longer those of any version; the label stays."""
        self.cut_spans()
        self.engine.scheduler.epoch += 1
        self.engine.weight_hash = why

    def cut_spans(self) -> None:
        """Close the span of every request that has output: its next tokens are another version's."""
        engine = self.engine
        for request in engine.scheduler.live():
            tokens = engine.scheduler.output_tokens(request)
            if tokens > request.span_start:
                if request.spans is None:
                    request.spans = []
                request.spans.append((engine.version, request.span_start, tokens, engine.weight_hash))
                request.span_start = tokens
