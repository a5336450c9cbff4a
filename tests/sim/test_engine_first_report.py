"""What a profile may add: a cost of steps of several requests, and gauges that an idle engine shows only later."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sim.engine_metrics import metrics_page
from sim.profiles import load_profile
from tests.sim.engine_world import MS, S, World, tiny

GAUGES = ("sglang:token_usage", "sglang:num_queue_reqs", "sglang:gen_throughput")


def shown(world: World) -> set[str]:
    return {family.name for family in text_string_to_metric_families(metrics_page(world.engine))}


def test_an_idle_engine_shows_its_gauges_after_its_first_report() -> None:
    world = World(tiny(first_report_ns=25 * S))
    assert not shown(world) & set(GAUGES) and "sglang:engine_startup_time" in shown(world)
    world.run_for(24 * S)
    assert not shown(world) & set(GAUGES)
    world.run_for(2 * S)
    assert shown(world) >= set(GAUGES)


def test_a_request_makes_it_report_at_once_and_for_good() -> None:
    world = World(tiny(first_report_ns=25 * S))
    world.submit("r", 20, 50)
    world.run_for(20 * MS)
    assert shown(world) >= set(GAUGES)
    world.run_for(1 * S)
    assert world.results["r"].status == 200 and shown(world) >= set(GAUGES)


def test_a_profile_that_does_not_say_shows_them_at_once() -> None:
    assert tiny().first_report_ns == 0 and shown(World()) >= set(GAUGES)


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_step_of_several_requests_costs_the_extra_and_a_lone_one_does_not(fast_path: bool) -> None:
    def last(extra_ms: int, requests: int) -> int:
        world = World(dataclasses.replace(tiny(), decode_batched_ps=extra_ms * 10**9), fast_path=fast_path)
        for index in range(requests):
            world.submit(f"r-{index}", 20, 101)
        world.run_for(5 * S)
        assert len(world.results) == requests
        return max(time for time, what, _ in world.log if what == "done")

    assert last(3, 1) == last(0, 1)
    assert last(3, 2) - last(0, 2) == 100 * 3 * MS  # one prefill each, then 100 steps of both


def test_the_shipped_profile_of_the_4090_has_both() -> None:
    profile = load_profile("qwen3-0.6b-rtx4090")
    assert profile.decode_batched_ps > 0 and profile.first_report_ns == 25 * S
