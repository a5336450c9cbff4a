"""What a simulated engine tells of itself: the Prometheus page, /server_info, /model_info, /v1/models and /v1/loads.

Names and buckets are SGLang's (``../shared/spec/engines.md``; the bucket bounds are those of its collector). Counters are
kept as integers and pages are written only when asked for, so that an engine that nobody scrapes pays nothing.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from sim.engine_cost import NS_PER_S
from sim.engine_types import EngineResult
from sim.server_args import SERVER_ARGS

if TYPE_CHECKING:
    from sim.engine import SimEngine

SGLANG_VERSION = "0.5.23"

_TTFT_S = ("0.1", "0.2", "0.4", "0.6", "0.8", "1.0", "2.0", "4.0", "6.0", "8.0", "10.0", "20.0", "40.0", "60.0", "80.0",
           "100.0", "200.0", "400.0")
_ITL_S = ("0.002", "0.004", "0.006", "0.008", "0.01", "0.015", "0.02", "0.025", "0.03", "0.035", "0.04", "0.06", "0.08",
          "0.1", "0.2", "0.4", "0.6", "0.8", "1.0", "2.0", "4.0", "6.0", "8.0")
_E2E_S = ("0.1", "0.2", "0.4", "0.6", "0.8", "1.0", "2.0", "4.0", "6.0", "8.0", "10.0", "20.0", "40.0", "60.0", "80.0",
          "100.0", "200.0", "400.0", "600.0", "1200.0", "1800.0", "2400.0")
_QUEUE_S = ("0.0", "0.001", "0.005", "0.01", "0.05", "0.1", "0.2", "0.5", "1.0", "2.0", "3.0", "4.0", "5.0", "10.0", "15.0",
            "20.0", "30.0", "40.0", "50.0", "60.0", "70.0", "80.0", "90.0", "100.0", "200.0", "300.0", "400.0", "500.0",
            "600.0", "700.0", "800.0", "900.0", "1000.0", "1200.0", "1400.0", "1600.0", "1800.0", "2000.0", "2500.0",
            "3000.0")


def _nanoseconds(bounds: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(round(float(bound) * NS_PER_S) for bound in bounds)


_TTFT_NS, _ITL_NS, _E2E_NS, _QUEUE_NS = (_nanoseconds(b) for b in (_TTFT_S, _ITL_S, _E2E_S, _QUEUE_S))


class EngineMetrics:
    """Counters and histograms of one engine process; they start at zero with every process."""

    __slots__ = ("aborted", "cached_tokens", "e2e", "e2e_sum", "itl", "itl_sum", "prompt_tokens", "queue", "queue_sum",
                 "requests", "ttft", "ttft_sum")

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


def _histogram(lines: list[str], name: str, text: str, labels: str, bounds: tuple[str, ...], counts: list[int],
               total_ns: int) -> None:
    lines.append(f"# HELP sglang:{name} {text}\n# TYPE sglang:{name} histogram")
    lines.append(f"sglang:{name}_sum{{{labels}}} {_float(total_ns, NS_PER_S)}")
    seen = 0
    for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
        seen += count
        lines.append(f'sglang:{name}_bucket{{{labels},le="{bound}"}} {_float(seen)}')
    lines.append(f"sglang:{name}_count{{{labels}}} {_float(seen)}")


def metrics_page(engine: SimEngine) -> str:
    """GET /metrics: the Prometheus text of ``engine`` at this instant. Gauges are those of /v1/loads: old while paused."""
    scheduler, metrics, profile = engine.scheduler, engine.metrics, engine.profile
    loads = engine.load_figures()
    labels = (f'engine_type="unified",model_name="{engine.model_path}",moe_ep_rank="0",pp_rank="0",tp_rank="0"')
    capacity = profile.kv_capacity_tokens
    gauges: list[tuple[str, str, str]] = [
        ("num_running_reqs", "The number of running requests.", _float(loads["num_running_reqs"])),
        ("num_queue_reqs", "The number of requests in the waiting queue.", _float(loads["num_waiting_reqs"])),
        ("num_used_tokens", "The number of used tokens.", _float(loads["num_used_tokens"])),
        ("token_usage", "The token usage.", _float(loads["num_used_tokens"], capacity)),
        ("full_token_usage", "The token usage for full attention layers.", _float(loads["num_used_tokens"], capacity)),
        ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", _float(capacity)),
        ("gen_throughput", "The generation throughput (token/s).", repr(throughput(engine))),
        ("cache_hit_rate", "The prefix cache hit rate.", repr(cache_hit_rate(engine))),
        ("utilization", "The utilization.", _float(loads["num_running_reqs"], profile.max_running_requests)),
        ("num_retracted_reqs", "The number of retracted requests.", _float(scheduler.retracted)),
        ("num_paused_reqs", "The number of paused requests by async weight sync.",
         _float(len(scheduler.live()) if scheduler.paused else 0)),
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
    for name, text, value in gauges:
        lines.append(f"# HELP sglang:{name} {text}\n# TYPE sglang:{name} gauge\nsglang:{name}{{{labels}}} {value}")
    for name, text, count in counters:
        lines.append(f"# HELP sglang:{name} {text}\n# TYPE sglang:{name} counter\nsglang:{name}{{{labels}}} {_float(count)}")
    _histogram(lines, "time_to_first_token_seconds", "Histogram of time to first token in seconds.", labels, _TTFT_S,
               metrics.ttft, metrics.ttft_sum)
    _histogram(lines, "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", labels, _ITL_S,
               metrics.itl, metrics.itl_sum)
    _histogram(lines, "e2e_request_latency_seconds", "Histogram of End-to-end request latency in seconds.", labels, _E2E_S,
               metrics.e2e, metrics.e2e_sum)
    _histogram(lines, "queue_time_seconds", "Histogram of queueing time in seconds.", labels, _QUEUE_S, metrics.queue,
               metrics.queue_sum)
    return "\n".join(lines) + "\n"


def throughput(engine: SimEngine) -> float:
    """Tokens per second over the last full window of 40 decode steps; 0 when nothing runs."""
    scheduler = engine.scheduler
    if not scheduler.throughput_ps or not (scheduler.running or scheduler.chunked):
        return 0.0
    return scheduler.throughput_tokens * 1_000 * NS_PER_S / scheduler.throughput_ps


def cache_hit_rate(engine: SimEngine) -> float:
    """Cached over all prompt tokens of the requests that ended."""
    metrics = engine.metrics
    return metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0


def server_info(engine: SimEngine) -> dict[str, Any]:
    """GET /server_info: all server arguments (null where this engine does not model them) and the live state."""
    profile = engine.profile
    info: dict[str, Any] = dict.fromkeys(SERVER_ARGS)
    info.update(
        model_path=engine.model_path, served_model_name=engine.model_path, tokenizer_path=profile.model_path,
        host="127.0.0.1", port=engine.port, context_length=profile.context_length, tp_size=1, dp_size=1, pp_size=1,
        max_running_requests=profile.max_running_requests, chunked_prefill_size=profile.chunked_prefill_size,
        max_prefill_tokens=profile.max_prefill_tokens, schedule_policy="fcfs", page_size=1, enable_metrics=True,
        disable_radix_cache=False, weight_version=engine.version, random_seed=0,
        status="ready" if engine.ready() == 200 else "starting" if not engine.listening else "unhealthy",
        version=SGLANG_VERSION, max_total_num_tokens=profile.kv_capacity_tokens,
        max_req_input_len=profile.context_length - 6, startup_time=engine.startup_ns / NS_PER_S,
        internal_states=[{
            "last_gen_throughput": throughput(engine),
            "memory_usage": {"weight": profile.weight_bytes / 2**30, "token_capacity": profile.kv_capacity_tokens},
            "effective_max_running_requests_per_dp": profile.max_running_requests,
        }],
    )
    return info


def model_info(engine: SimEngine) -> dict[str, Any]:
    """GET /model_info. Path and served name follow the last weight load, as seen."""
    return {
        "model_path": engine.model_path, "served_model_name": engine.model_path,
        "tokenizer_path": engine.profile.model_path, "is_generation": True, "weight_version": engine.version,
        "model_type": "sim", "architectures": [engine.profile.name],
    }


def models(engine: SimEngine) -> dict[str, Any]:
    """GET /v1/models."""
    return {"object": "list", "data": [{
        "id": engine.model_path, "object": "model", "created": 0, "owned_by": "sglang", "root": engine.model_path,
        "parent": None, "max_model_len": engine.profile.context_length,
    }]}


def loads(engine: SimEngine) -> dict[str, Any]:
    """GET /v1/loads: the scheduler's last snapshot. While paused it is the one from before the pause took effect."""
    profile = engine.profile
    figures = engine.load_figures()
    capacity = profile.kv_capacity_tokens
    return {
        "timestamp": engine.env.now / NS_PER_S, "version": SGLANG_VERSION, "num_accelerators": 1,
        "loads": [{
            "dp_rank": 0, "num_running_reqs": figures["num_running_reqs"], "num_waiting_reqs": figures["num_waiting_reqs"],
            "num_used_tokens": figures["num_used_tokens"], "max_total_num_tokens": capacity,
            "max_running_requests": profile.max_running_requests, "token_usage": figures["num_used_tokens"] / capacity,
            "gen_throughput": throughput(engine), "cache_hit_rate": cache_hit_rate(engine),
            "utilization": figures["num_running_reqs"] / profile.max_running_requests, "memory": {}, "disaggregation": {},
            "queues": {"waiting": figures["num_waiting_reqs"], "grammar": 0, "paused": 0, "retracted": 0,
                       "prealloc_ready": 0},
        }],
    }


def get(engine: SimEngine, route: str) -> tuple[int, str]:
    """The body of a GET that needs no generation: status and text. /get_load is gone (404), as in SGLang 0.5.23."""
    if route == "/ready":
        return engine.ready(), ""
    if route == "/metrics":
        return 200, metrics_page(engine)
    pages = {"/server_info": server_info, "/get_server_info": server_info, "/model_info": model_info,
             "/get_model_info": model_info, "/v1/models": models, "/v1/loads": loads}
    page = pages.get(route)
    if page is None:
        return 404, '{"detail":"Not Found"}'
    return 200, json.dumps(page(engine))
