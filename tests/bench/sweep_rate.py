"""Seeds per core-hour of a sweep: ``python -m tests.bench.sweep_rate [SEEDS] [SCENARIO]``, default 200 of ``minimal``.

What a worker process of ``python -m scenarios sweep`` does, and nothing else: it parses the scenario once, then sets
up, runs and judges seed after seed, with drawn orders and delays, and keeps their digests. Processor time is measured,
for workers share nothing: the rate of a machine is that times its cores. Prints one line of JSON; exit code 1 where a
seed does not pass.

How fast a core is changes with what the neighbours of a virtual machine do. So the line also says what a bare SimPy
time-out cost in the same process, before and after, and how many of them a seed is worth: that figure is the code's.
"""

from __future__ import annotations

import itertools
import json
import sys
from time import process_time

from scenarios.load import Scenario, load
from scenarios.seeds import run_seeds
from tests.bench.loop_bench import events_on_simpy

WARM_UP = 5
_TIMEOUTS = 2000  # of each of 100 SimPy processes


def simpy_timeout_us() -> float:
    """Processor time of one bare SimPy time-out, in microseconds."""
    return events_on_simpy(_TIMEOUTS) / (100 * _TIMEOUTS) * 1e6


def report(scenario: Scenario, title: str, count: int) -> int:
    """Measure ``count`` seeds and print the line; the exit code."""
    seeds = run_seeds(scenario, itertools.chain(range(1, 1 + WARM_UP), range(1, 1 + count)))
    for _ in range(WARM_UP):
        next(seeds)
    before_us = simpy_timeout_us()
    begun = process_time()
    results = list(seeds)
    cpu_s = process_time() - begun
    timeout_us = (before_us + simpy_timeout_us()) / 2
    passed = sum(result.result == "pass" for result in results)
    line = {
        "scenario": title,
        "seeds": count,
        "passed": passed,
        "cpu_ms_per_seed": round(cpu_s / count * 1000, 2),
        "seeds_per_core_hour": round(3600 * count / cpu_s),
        "events_per_seed": round(sum(result.events for result in results) / count),
        "simpy_timeout_us": round(timeout_us, 3),
        "simpy_timeouts_per_seed": round(cpu_s / count * 1e6 / timeout_us),
    }
    print(json.dumps(line))
    return 0 if passed == count else 1


def main(arguments: list[str]) -> int:
    if len(arguments) > 2 or not all(number.isdigit() and int(number) for number in arguments[:1]):
        print("usage: python -m tests.bench.sweep_rate [SEEDS] [SCENARIO]", file=sys.stderr)
        return 2
    count = int(arguments[0]) if arguments else 200
    name = arguments[1] if len(arguments) > 1 else "minimal"
    return report(load(name), name, count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
