"""A sweep on a Ray cluster of several raylets: ``python -m tests.bench.ray_sweep [SEEDS] [SCENARIO] [--lose]``.

Starts a Ray of its own: a head without CPUs, and one raylet a core of this machine. Says how many seeds a second that
makes beside one process alone and beside as many workers (``--jobs``), before and after, on the same seeds. With
``--lose`` one raylet is killed in the middle, and seeds must be counted exactly once all the same. One JSON document on
stdout, one line for people on stderr.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from scenarios.load import Scenario, load
from scenarios.ray_workers import run_on_ray
from scenarios.seeds import run_seed, run_seeds
from scenarios.workers import Lost, run_in_workers
from tests.real.local_ray import environment

_WARM_UP = 4  # results a raylet until all workers run


@contextlib.contextmanager
def cluster(raylets: int) -> Iterator[Any]:
    """(cluster, its raylets), with one CPU each and none at the head."""
    from ray.cluster_utils import Cluster

    small = {"include_dashboard": False, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        yield made, [made.add_node(num_cpus=1, **small) for _ in range(raylets)]
    finally:
        made.shutdown()


def alone(name: str, seeds: range) -> float:
    """Seeds a second of one process."""
    scenario = load(name)
    began = time.perf_counter()
    collections.deque(run_seeds(scenario, seeds), maxlen=0)
    return len(seeds) / (time.perf_counter() - began)


def in_workers(name: str, seeds: range, jobs: int) -> float:
    """Seeds a second of ``--jobs``, once all of them run."""
    scenario = load(name)
    times = [time.perf_counter() for _ in run_in_workers(request_of(scenario), seeds, jobs, 16)]
    return rate_of(times, _WARM_UP * jobs)


def rate_of(times: list[float], warm_up: int) -> float:
    """Results a second, without the first ones."""
    return (len(times) - warm_up) / (times[-1] - times[warm_up - 1])


def request_of(scenario: Scenario) -> dict[str, Any]:
    """What a worker needs to know."""
    return {"text": scenario.text, "source": scenario.source, "folder": str(scenario.folder), "hang_after_s": None}


def measured(name: str, seeds: range, raylets: int, *, lose: bool) -> dict[str, Any]:
    """What a sweep on Ray made of the seeds."""
    scenario = load(name)
    request = request_of(scenario)
    digests: list[tuple[int, str]] = []
    times: list[float] = []
    lost: list[str] = []
    with cluster(raylets) as (made, nodes):
        began = time.perf_counter()
        for result in run_on_ray(scenario, request, seeds, made.address, None):
            times.append(time.perf_counter() - began)
            if isinstance(result, Lost):
                lost.append(f"{result.seed}: {result.how}")
                continue
            digests.append((result["seed"], result["digest"]))
            if lose and len(digests) == len(seeds) // 3:
                made.remove_node(nodes[-1], allow_graceful=False)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return {
        "seeds": len(seeds),
        "counted": len(digests),
        "distinct": len({seed for seed, _ in digests}),
        "lost": lost,
        "digests": dict(sorted(digests)),
        "first_result_s": round(times[0], 2),
        "longest_gap_s": round(max(gaps), 2),
        "wall_s": round(times[-1], 2),
        "seeds_per_s": round(rate_of(times, _WARM_UP * raylets), 2),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=200)
    parser.add_argument("scenario", nargs="?", default="minimal")
    parser.add_argument("--lose", action="store_true")
    parser.add_argument("--no-rates", action="store_true", help="count alone; no other way of running is measured")
    parser.add_argument("--raylets", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    os.environ.update(environment())
    seeds = range(1, asked.seeds + 1)
    some = seeds[: max(1, asked.seeds // 4)]
    rates = not asked.no_rates
    before = (alone(asked.scenario, some), in_workers(asked.scenario, seeds, asked.raylets)) if rates else None
    found = measured(asked.scenario, seeds, asked.raylets, lose=asked.lose)
    after = (in_workers(asked.scenario, seeds, asked.raylets), alone(asked.scenario, some)) if rates else None
    digests = found.pop("digests")
    found |= {
        "scenario": asked.scenario,
        "raylets": asked.raylets,
        "same_as_alone": all(run_seed(load(asked.scenario), seed).digest == digests[seed] for seed in some[:3]),
    }
    said = f"{found['counted']} of {found['seeds']} seeds counted, {found['distinct']} distinct"
    if before and after:
        found |= {
            "alone_per_s": [round(before[0], 2), round(after[1], 2)],
            "workers_per_s": [round(before[1], 2), round(after[0], 2)],
            "times_one_process": round(2 * found["seeds_per_s"] / (before[0] + after[1]), 2),
            "times_workers": round(2 * found["seeds_per_s"] / (before[1] + after[0]), 2),
        }
        said += (
            f", {found['times_one_process']} times one process on {asked.raylets} raylets, {found['times_workers']} "
            f"times --jobs {asked.raylets}"
        )
    print(json.dumps(found))
    print(said, file=sys.stderr)


if __name__ == "__main__":
    main()
