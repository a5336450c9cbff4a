"""The Prometheus page of a simulated engine, and the router of its pages.

Names and buckets are SGLang's (``../shared/spec/engines.md``; the bucket bounds are those of its collector). Counters
are kept as integers and pages are written only when asked for: an engine that nobody scrapes pays nothing.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import TYPE_CHECKING

from sim.engine_cost import NS_PER_S
from sim.engine_pages import cache_hit_rate, loads, model_info, models, server_info, throughput
from sim.engine_types import EngineResult

if TYPE_CHECKING:
    from sim.engine import SimEngine

_TTFT_S = (
    "0.1",
    "0.2",
    "0.4",
    "0.6",
    "0.8",
    "1.0",
    "2.0",
    "4.0",
    "6.0",
    "8.0",
    "10.0",
    "20.0",
    "40.0",
    "60.0",
    "80.0",
    "100.0",
    "200.0",
    "400.0",
)
_ITL_S = (
    "0.002",
    "0.004",
    "0.006",
    "0.008",
    "0.01",
    "0.015",
    "0.02",
    "0.025",
    "0.03",
    "0.035",
    "0.04",
    "0.06",
    "0.08",
    "0.1",
    "0.2",
    "0.4",
    "0.6",
    "0.8",
    "1.0",
    "2.0",
    "4.0",
    "6.0",
    "8.0",
)
_E2E_S = (
    "0.1",
    "0.2",
    "0.4",
    "0.6",
    "0.8",
    "1.0",
    "2.0",
    "4.0",
    "6.0",
    "8.0",
    "10.0",
    "20.0",
    "40.0",
    "60.0",
    "80.0",
    "100.0",
    "200.0",
    "400.0",
    "600.0",
    "1200.0",
    "1800.0",
    "2400.0",
)
_QUEUE_S = (
    "0.0",
    "0.001",
    "0.005",
    "0.01",
    "0.05",
    "0.1",
    "0.2",
    "0.5",
    "1.0",
    "2.0",
    "3.0",
    "4.0",
    "5.0",
    "10.0",
    "15.0",
    "20.0",
    "30.0",
    "40.0",
    "50.0",
    "60.0",
    "70.0",
    "80.0",
    "90.0",
    "100.0",
    "200.0",
    "300.0",
    "400.0",
    "500.0",
    "600.0",
    "700.0",
    "800.0",
    "900.0",
    "1000.0",
    "1200.0",
    "1400.0",
    "1600.0",
    "1800.0",
    "2000.0",
    "2500.0",
    "3000.0",
)


def _nanoseconds(bounds: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(round(float(bound) * NS_PER_S) for bound in bounds)


_TTFT_NS, _ITL_NS, _E2E_NS, _QUEUE_NS = (_nanoseconds(b) for b in (_TTFT_S, _ITL_S, _E2E_S, _QUEUE_S))


class EngineMetrics:
    """Counters and histograms of one engine process; they start at zero with every process."""

    __slots__ = (
        "aborted",
        "cached_tokens",
        "e2e",
        "e2e_sum",
        "itl",
        "itl_sum",
        "prompt_tokens",
        "queue",
        "queue_sum",
        "requests",
        "ttft",
        "ttft_sum",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.aborted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.ttft = [0] * (len(_TTFT_NS) + 1)
        self.itl = [0] * (len(_ITL_NS) + 1)
        self.e2e = [0] * (len(_E2E_NS) + 1)
        self.queue = [0] * (len(_QUEUE_NS) + 1)
        self.ttft_sum = self.itl_sum = self.e2e_sum = self.queue_sum = 0

    def finished(self, result: EngineResult) -> None:
        """Count one request at its end.

        The inter-token latency is that request's mean, counted once per token: the page then does not depend on
        whether steps were skipped, and the cost not on the number of tokens.
        """
        self.requests += 1
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        if result.finish_reason == "abort":
            self.aborted += 1
        e2e = result.e2e_ns
        self.e2e[bisect_left(_E2E_NS, e2e)] += 1
        self.e2e_sum += e2e
        if result.queue_ns >= 0:
            self.queue[bisect_left(_QUEUE_NS, result.queue_ns)] += 1
            self.queue_sum += result.queue_ns
        ttft = result.ttft_ns
        if ttft >= 0:
            self.ttft[bisect_left(_TTFT_NS, ttft)] += 1
            self.ttft_sum += ttft
            gaps = result.completion_tokens - 1
            if gaps > 0:
                self.itl[bisect_left(_ITL_NS, (e2e - ttft) // gaps)] += gaps
                self.itl_sum += e2e - ttft


def _float(value: int, divisor: int = 1) -> str:
    return repr(value / divisor)


def _histogram(
    lines: list[str], name: str, text: str, labels: str, bounds: tuple[str, ...], counts: list[int], total_ns: int
) -> None:
    lines.append(f"# HELP sglang:{name} {text}\n# TYPE sglang:{name} histogram")
    lines.append(f"sglang:{name}_sum{{{labels}}} {_float(total_ns, NS_PER_S)}")
    seen = 0
    for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
        seen += count
        lines.append(f'sglang:{name}_bucket{{{labels},le="{bound}"}} {_float(seen)}')
    lines.append(f"sglang:{name}_count{{{labels}}} {_float(seen)}")


def metrics_page(engine: SimEngine) -> str:
    """GET /metrics: the Prometheus text of ``engine`` now. Gauges are those of /v1/loads: old while paused."""
    scheduler, metrics, profile = engine.scheduler, engine.metrics, engine.profile
    figures = engine.load_figures()
    labels = f'engine_type="unified",model_name="{engine.model_path}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    capacity = profile.kv_capacity_tokens
    gauges: list[tuple[str, str, str]] = [
        ("num_running_reqs", "The number of running requests.", _float(figures["num_running_reqs"])),
        ("num_queue_reqs", "The number of requests in the waiting queue.", _float(figures["num_waiting_reqs"])),
        ("num_used_tokens", "The number of used tokens.", _float(figures["num_used_tokens"])),
        ("token_usage", "The token usage.", _float(figures["num_used_tokens"], capacity)),
        (
            "full_token_usage",
            "The token usage for full attention layers.",
            _float(figures["num_used_tokens"], capacity),
        ),
        ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", _float(capacity)),
        ("gen_throughput", "The generation throughput (token/s).", repr(throughput(engine))),
        ("cache_hit_rate", "The prefix cache hit rate.", repr(cache_hit_rate(engine))),
        ("utilization", "The utilization.", _float(figures["num_running_reqs"], profile.max_running_requests)),
        ("num_retracted_reqs", "The number of retracted requests.", _float(scheduler.retracted)),
        (
            "num_paused_reqs",
            "The number of paused requests by async weight sync.",
            _float(len(scheduler.live()) if scheduler.paused else 0),
        ),
        ("http_requests_active", "Number of currently active HTTP requests.", _float(engine.http_active)),
        ("num_prefill_prealloc_queue_reqs", "The number of requests in the prefill prealloc queue.", "0.0"),
        ("num_prefill_inflight_queue_reqs", "The number of requests in the prefill inflight queue.", "0.0"),
        ("num_decode_prealloc_queue_reqs", "The number of requests in the decode prealloc queue.", "0.0"),
        ("num_decode_transfer_queue_reqs", "The number of requests in the decode transfer queue.", "0.0"),
        ("engine_startup_time", "The time taken for the engine to start up.", _float(engine.startup_ns, NS_PER_S)),
    ]
    counters = [
        ("prompt_tokens_total", "Number of prefill tokens processed.", metrics.prompt_tokens),
        ("generation_tokens_total", "Number of generation tokens processed.", scheduler.generated_tokens),
        ("cached_tokens_total", "Number of cached prompt tokens.", metrics.cached_tokens),
        ("num_requests_total", "Number of requests processed.", metrics.requests),
        ("num_aborted_requests_total", "Number of requests aborted.", metrics.aborted),
    ]
    lines: list[str] = []
    # A gauge has a series from its first report on: of the first batch, or of a scheduler that has been idle for long.
    silent = not metrics.requests and not engine.live and engine.env.now < engine.ready_ns + profile.first_report_ns
    for name, text, value in gauges if not silent else gauges[-1:]:
        lines.append(f"# HELP sglang:{name} {text}\n# TYPE sglang:{name} gauge\nsglang:{name}{{{labels}}} {value}")
    for name, text, count in counters:
        lines.append(
            f"# HELP sglang:{name} {text}\n# TYPE sglang:{name} counter\nsglang:{name}{{{labels}}} {_float(count)}"
        )
    _histogram(
        lines,
        "time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        labels,
        _TTFT_S,
        metrics.ttft,
        metrics.ttft_sum,
    )
    _histogram(
        lines,
        "inter_token_latency_seconds",
        "Histogram of inter-token latency in seconds.",
        labels,
        _ITL_S,
        metrics.itl,
        metrics.itl_sum,
    )
    _histogram(
        lines,
        "e2e_request_latency_seconds",
        "Histogram of End-to-end request latency in seconds.",
        labels,
        _E2E_S,
        metrics.e2e,
        metrics.e2e_sum,
    )
    _histogram(
        lines,
        "queue_time_seconds",
        "Histogram of queueing time in seconds.",
        labels,
        _QUEUE_S,
        metrics.queue,
        metrics.queue_sum,
    )
    return "\n".join(lines) + "\n"


def get(engine: SimEngine, route: str) -> tuple[int, str]:
    """The body of a GET that needs no generation: status and text. /get_load is gone (404), as in SGLang 0.5.23."""
    if route == "/ready":
        return engine.ready(), ""
    if route == "/metrics":
        return 200, metrics_page(engine)
    pages = {
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/v1/models": models,
        "/v1/loads": loads,
    }
    page = pages.get(route)
    if page is None:
        return 404, '{"detail":"Not Found"}'
    return 200, json.dumps(page(engine))
