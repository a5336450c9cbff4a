"""The engine's pages: names are SGLang's, the text parses, the figures are right, and nothing is rendered unasked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sim import engine_metrics
from tests.conftest import shared_folder
from tests.sim.engine_world import MS, S, World, tiny

# engines.md, "metrics": what a collector of a real deployment reads.
NAMED = (
    "num_running_reqs num_queue_reqs token_usage full_token_usage gen_throughput num_used_tokens max_total_num_tokens "
    "num_retracted_reqs num_paused_reqs cache_hit_rate utilization prompt_tokens_total generation_tokens_total "
    "cached_tokens_total num_requests_total http_requests_active time_to_first_token_seconds "
    "inter_token_latency_seconds e2e_request_latency_seconds queue_time_seconds"
).split()


def families(world: World) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(engine_metrics.metrics_page(world.engine))}


def value(world: World, name: str, suffix: str = "") -> float:
    for family in families(world).values():
        for sample in family.samples:
            if sample.name == f"sglang:{name}{suffix}":
                return float(sample.value)
    raise AssertionError(f"no sample {name}{suffix}")


def busy() -> World:
    world = World()
    for index in range(20):
        world.submit(f"r-{index:02}", 40, 100)
    world.run_for(200 * MS)
    return world


def test_every_name_that_a_collector_reads_is_there_with_sglangs_labels() -> None:
    found = families(busy())
    for name in NAMED:
        family = found[f"sglang:{name.removesuffix('_total')}"]
        labels = family.samples[0].labels
        assert {"engine_type", "model_name", "tp_rank", "pp_rank", "moe_ep_rank"} <= set(labels)


@pytest.mark.shared
def test_names_and_types_agree_with_a_page_of_a_real_server() -> None:
    folder = shared_folder()
    assert folder is not None
    page = (folder / "data/dumps/sglang_metrics_llama31_8b.prom").read_text(encoding="utf-8")
    real = {family.name: family.type for family in text_string_to_metric_families(page)}
    ours = {name: family.type for name, family in families(busy()).items()}
    # The dump is of an older server: these two have other names, or none, in 0.5.23.
    renamed = {"sglang:time_per_output_token_seconds", "sglang:func_latency_seconds"}
    assert set(real) - set(ours) == renamed
    assert {name: ours[name] for name in real.keys() - renamed} == {name: real[name] for name in real.keys() - renamed}


def test_gauges_show_the_state_of_the_last_boundary() -> None:
    world = busy()
    assert (value(world, "num_running_reqs"), value(world, "num_queue_reqs")) == (16.0, 4.0)
    used = value(world, "num_used_tokens")
    assert 16 * 40 < used < 16 * 140 and value(world, "token_usage") == used / 4096


def test_throughput_is_that_of_the_last_40_steps_and_the_first_window_counts_the_idle_time_before() -> None:
    world = World()
    for index in range(10):
        world.submit(f"r-{index}", 40, 200)
    world.run_for(200 * MS)
    assert value(world, "gen_throughput") < 300.0  # as in real logs: the first line after an idle time is far too low
    world.run_for(200 * MS)
    step_s = 2e-3 + 10 * 1e-4
    assert 10 / step_s * 0.9 < value(world, "gen_throughput") < 10 / step_s


def test_counters_and_histograms_count_every_request_once() -> None:
    world = busy()
    world.run()
    assert value(world, "num_requests_total") == 20.0
    assert value(world, "prompt_tokens_total") == 800.0 and value(world, "generation_tokens_total") == 2000.0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "queue_time_seconds"):
        assert value(world, name, "_count") == 20.0
    assert value(world, "inter_token_latency_seconds", "_count") == 20 * 99
    total = sum(result.e2e_ns for result in world.results.values()) / S
    assert value(world, "e2e_request_latency_seconds", "_sum") == pytest.approx(total)
    assert value(world, "num_running_reqs") == 0.0 and value(world, "gen_throughput") == 0.0


def test_histogram_buckets_are_cumulative_and_end_in_inf() -> None:
    world = busy()
    world.run()
    buckets = [s for s in families(world)["sglang:e2e_request_latency_seconds"].samples if s.name.endswith("_bucket")]
    counts = [sample.value for sample in buckets]
    assert counts == sorted(counts) and buckets[-1].labels["le"] == "+Inf" and counts[-1] == 20.0


def test_requests_held_by_a_pause_are_open_connections_and_nothing_else() -> None:
    world = World()
    world.engine.pause("in_place")
    world.submit("held")
    world.run_for(1 * S)
    assert value(world, "http_requests_active") == 1.0
    assert value(world, "num_running_reqs") == value(world, "num_queue_reqs") == 0.0


def test_server_info_has_over_500_keys_and_the_live_state() -> None:
    world = World()
    info = json.loads(engine_metrics.get(world.engine, "/server_info")[1])
    assert len(info) > 500
    assert info["max_req_input_len"] == 512 - 6 and info["max_total_num_tokens"] == 4096
    assert info["weight_version"] == "default" and info["port"] == 30000
    assert set(info["internal_states"][0]) == {
        "last_gen_throughput",
        "memory_usage",
        "effective_max_running_requests_per_dp",
    }


def test_model_pages_follow_the_served_name() -> None:
    world = World()
    world.engine.load_weights("v2", 1, "h", model_path="/exports/v2")
    world.run()
    info = json.loads(engine_metrics.get(world.engine, "/model_info")[1])
    assert (info["model_path"], info["served_model_name"], info["weight_version"]) == (
        "/exports/v2",
        "/exports/v2",
        "v2",
    )
    models = json.loads(engine_metrics.get(world.engine, "/v1/models")[1])
    assert models["data"][0]["id"] == "/exports/v2" and models["data"][0]["max_model_len"] == 512


def test_loads_have_sglangs_shape_and_get_load_is_gone() -> None:
    world = busy()
    status, text = engine_metrics.get(world.engine, "/v1/loads")
    row = json.loads(text)["loads"][0]
    assert status == 200 and (row["num_running_reqs"], row["num_waiting_reqs"]) == (16, 4)
    assert row["queues"].keys() == {"waiting", "grammar", "paused", "retracted", "prealloc_ready"}
    assert engine_metrics.get(world.engine, "/get_load")[0] == 404
    assert engine_metrics.get(world.engine, "/ready") == (200, "")


def test_retractions_show() -> None:
    world = World(
        tiny(
            context_length=500, kv_capacity_tokens=620, new_token_ratio_init_ppm=10_000, new_token_ratio_min_ppm=10_000
        )
    )
    world.submit("first", 100, 250, ignore_eos=False)
    world.run_for(100 * MS)
    world.submit("second", 100, 250, ignore_eos=False)
    world.run()
    assert value(world, "num_retracted_reqs") >= 1.0


def test_evidence_of_a_request_names_what_the_schema_declares() -> None:
    from protocol.evidence import KINDS

    world = World()
    kinds: dict[str, set[str]] = {}
    world.engine.emit = lambda kind, **fields: kinds.setdefault(kind, set()).update(fields)
    world.submit("r-0", 20, 5)
    world.submit("too-long", 600, 5)
    world.run()
    world.engine.pause("in_place")
    world.engine.load_weights("v2", 1, "h")
    world.engine.resume()
    world.run()
    assert kinds.keys() == {
        "engine.accepted",
        "engine.refused",
        "engine.finished",
        "engine.paused",
        "engine.weights",
        "engine.resumed",
    }
    for kind, fields in kinds.items():
        assert fields == set(KINDS[kind].fields), kind
