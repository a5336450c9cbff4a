"""The JSON pages of a simulated engine: /server_info, /model_info, /v1/models and /v1/loads.

Source: ../shared/spec/engines.md, section 3. Written only when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.engine_cost import NS_PER_S
from sim.server_args import SERVER_ARGS

if TYPE_CHECKING:
    from sim.engine import SimEngine

SGLANG_VERSION = "0.5.23"


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
    """GET /server_info: all server arguments (null where this engine does not model them) and the live state.

    The version is an argument: that of the start, whatever was loaded since, as seen."""
    profile = engine.profile
    info: dict[str, Any] = dict.fromkeys(SERVER_ARGS)
    info.update(
        model_path=engine.model_path,
        served_model_name=engine.model_path,
        tokenizer_path=profile.model_path,
        host="127.0.0.1",
        port=engine.port,
        context_length=profile.context_length,
        tp_size=1,
        dp_size=1,
        pp_size=1,
        max_running_requests=profile.max_running_requests,
        chunked_prefill_size=profile.chunked_prefill_size,
        max_prefill_tokens=profile.max_prefill_tokens,
        schedule_policy="fcfs",
        page_size=1,
        enable_metrics=True,
        disable_radix_cache=False,
        weight_version=engine.started_version,
        random_seed=0,
        status="ready" if engine.ready() == 200 else "starting" if not engine.listening else "unhealthy",
        version=SGLANG_VERSION,
        max_total_num_tokens=profile.kv_capacity_tokens,
        max_req_input_len=profile.context_length - 6,
        startup_time=engine.startup_ns / NS_PER_S,
        internal_states=[
            {
                "last_gen_throughput": throughput(engine),
                "memory_usage": {"weight": profile.weight_bytes / 2**30, "token_capacity": profile.kv_capacity_tokens},
                "effective_max_running_requests_per_dp": profile.max_running_requests,
            }
        ],
    )
    return info


def model_info(engine: SimEngine) -> dict[str, Any]:
    """GET /model_info. Path, served name and version follow the last weight load, unless its flush failed, as seen."""
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.model_path,
        "tokenizer_path": engine.profile.model_path,
        "is_generation": True,
        "weight_version": engine.reported_version,
        "model_type": "sim",
        "architectures": [engine.profile.name],
    }


def models(engine: SimEngine) -> dict[str, Any]:
    """GET /v1/models."""
    return {
        "object": "list",
        "data": [
            {
                "id": engine.model_path,
                "object": "model",
                "created": 0,
                "owned_by": "sglang",
                "root": engine.model_path,
                "parent": None,
                "max_model_len": engine.profile.context_length,
            }
        ],
    }


def loads(engine: SimEngine) -> dict[str, Any]:
    """GET /v1/loads: the scheduler's last snapshot. While paused it is the one from before the pause took effect."""
    profile = engine.profile
    figures = engine.load_figures()
    capacity = profile.kv_capacity_tokens
    return {
        "timestamp": engine.env.now / NS_PER_S,
        "version": SGLANG_VERSION,
        "num_accelerators": 1,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": figures["num_running_reqs"],
                "num_waiting_reqs": figures["num_waiting_reqs"],
                "num_used_tokens": figures["num_used_tokens"],
                "max_total_num_tokens": capacity,
                "max_running_requests": profile.max_running_requests,
                "token_usage": figures["num_used_tokens"] / capacity,
                "gen_throughput": throughput(engine),
                "cache_hit_rate": cache_hit_rate(engine),
                "utilization": figures["num_running_reqs"] / profile.max_running_requests,
                "memory": {},
                "disaggregation": {},
                "queues": {
                    "waiting": figures["num_waiting_reqs"],
                    "grammar": 0,
                    "paused": 0,
                    "retracted": 0,
                    "prealloc_ready": 0,
                },
            }
        ],
    }
