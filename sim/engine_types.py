"""What goes into and comes out of a simulated engine, and the measured delays that its wrapper needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from sim.radix import Block

SCHEDULER_DEATH_NS = 5_900_000_000
"""SIGKILL of the scheduler process: callers hang this long, then everything disconnects (engines.md, signals)."""
DETOKENIZER_DEATH_NS = 66_000_000_000
"""SIGKILL of the detokenizer: 5 s of polling, 60 s of waiting for a core dump, then the exit (engines.md, signals)."""
MAIN_DEATH_NS = 50_000_000
"""SIGKILL of the main process: open connections break within this time (engines.md, signals)."""
STREAM_DISCONNECT_NS = 300_000_000
"""A streaming client that went away is noticed this much later (engines.md, pause / continue / abort)."""
DISCONNECT_CHECK_NS = 4_000_000_000
"""A waiting client that went away is looked for only this often after its request came (same place)."""

VersionSpan = tuple[str, int, int]
"""(version or hash, first output token, one past the last)."""
WeightSpan = tuple[str, int, int, str]
"""(version label, first output token, one past the last, hash of the weights that computed them)."""


class EngineResult(NamedTuple):
    """The end of one request. Times in nanoseconds since it was submitted, unless said otherwise.

    ``status`` 200 covers aborts too (finish_reason ``abort``); 400 is a refusal before any effect, told by ``error``.
    ``spans`` says of each output token which label the engine would report and which weights truly computed it.
    ``stale_cached_tokens`` are prefix-cache hits on blocks that other weights had computed. ``ttft_ns`` and
    ``queue_ns`` are -1 when there was no first token or no admission.
    """

    rid: str
    status: int
    finish_reason: str
    error: str
    prompt_tokens: int
    cached_tokens: int
    stale_cached_tokens: int
    completion_tokens: int
    weight_version: str
    spans: tuple[WeightSpan, ...]
    num_retractions: int
    queue_ns: int
    ttft_ns: int
    e2e_ns: int
    finished_at_ns: int

    @property
    def weight_versions(self) -> tuple[VersionSpan, ...]:
        """What ``meta_info.weight_versions`` says: labels by output token."""
        return _merged((label, start, end) for label, start, end, _ in self.spans)

    @property
    def weight_hashes(self) -> tuple[VersionSpan, ...]:
        """The truth beside the label: hashes of the weights by output token."""
        return _merged((truth, start, end) for _, start, end, truth in self.spans)


def _merged(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    merged: list[VersionSpan] = []
    for name, start, end in spans:
        if merged and merged[-1][0] == name:
            merged[-1] = (name, merged[-1][1], end)
        else:
            merged.append((name, start, end))
    return tuple(merged)


class AdminResult(NamedTuple):
    """Answer to an admin call: HTTP status, whether it says ``success``, its text, and requests held by a pause."""

    status: int
    success: bool
    message: str
    num_paused_requests: int = 0


Done = Callable[[EngineResult], None]
AdminDone = Callable[[AdminResult], None]
OnToken = Callable[[str, int], None]
"""Called with (rid, cumulative count of output tokens), as SGLang's stream is cumulative."""

WAITING, PREFILL, RUNNING, FINISHED = range(4)


class Request:
    """A request inside the engine. Only the scheduler changes it.

    While it runs, its output count is not kept here: it is ``tokens + (decode_steps - joined_at)``, so that a decode
    step touches no request.
    """

    __slots__ = (
        "blocks",
        "cached",
        "cached_seen",
        "computed",
        "done",
        "finish_at",
        "first_token_ns",
        "fixed",
        "joined_at",
        "max_new",
        "node",
        "node_depth",
        "on_token",
        "output_tokens",
        "private",
        "prompt_tokens",
        "queue_ns",
        "retractions",
        "rid",
        "seq",
        "span_start",
        "spans",
        "stale",
        "state",
        "submitted_ns",
        "tokens",
    )

    def __init__(
        self,
        rid: str,
        prompt_tokens: int,
        output_tokens: int,
        max_new: int,
        fixed: bool,
        blocks: tuple[int, ...],
        done: Done | None,
        on_token: OnToken | None,
        submitted_ns: int,
    ) -> None:
        self.rid = rid
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_new = max_new
        self.fixed = fixed  # ignore_eos: no early end can be hoped for at admission
        self.blocks = blocks
        self.done = done
        self.on_token = on_token
        self.submitted_ns = submitted_ns
        self.seq = 0
        self.state = WAITING
        self.tokens = 0  # output tokens when it last joined the running batch
        self.joined_at = 0
        self.finish_at = 0
        self.computed = 0  # tokens whose KV exists, while prefilling
        self.private = 0  # KV tokens outside the prefix tree, when it last joined the running batch
        self.node: Block | None = None
        self.node_depth = 0
        self.cached = 0
        self.cached_seen = False
        self.stale = 0
        self.queue_ns = -1
        self.first_token_ns = -1
        self.retractions = 0
        self.spans: list[WeightSpan] | None = None  # closed spans; None while one set of weights has done it all
        self.span_start = 0
