"""Seeds per core-hour of a sweep: ``python -m tests.bench.sweep_rate [SEEDS] [SCENARIO]``, default 200 of ``minimal``.

What a worker process of ``python -m scenarios sweep`` does, and nothing else: it parses the scenario once, then sets
up, runs and judges seed after seed, with drawn orders and delays, and keeps their digests. Processor time is measured,
for workers share nothing: the rate of a machine is that times its cores. Prints one line of JSON; exit code 1 where a
seed does not pass.
"""

from __future__ import annotations

import json
import sys
from time import process_time

from scenarios.load import load
from scenarios.seeds import run_seed

FIRST_SEED = 1
WARM_UP = 5


def main(arguments: list[str]) -> int:
    if len(arguments) > 2 or not all(number.isdigit() and int(number) for number in arguments[:1]):
        print("usage: python -m tests.bench.sweep_rate [SEEDS] [SCENARIO]", file=sys.stderr)
        return 2
    count = int(arguments[0]) if arguments else 200
    name = arguments[1] if len(arguments) > 1 else "minimal"
    scenario = load(name)
    for seed in range(FIRST_SEED, FIRST_SEED + WARM_UP):
        run_seed(scenario, seed)
    begun = process_time()
    results = [run_seed(scenario, seed) for seed in range(FIRST_SEED, FIRST_SEED + count)]
    cpu_s = process_time() - begun
    passed = sum(result.result == "pass" for result in results)
    report = {
        "scenario": name,
        "seeds": count,
        "passed": passed,
        "cpu_ms_per_seed": round(cpu_s / count * 1000, 2),
        "seeds_per_core_hour": round(3600 * count / cpu_s),
        "events_per_seed": round(sum(result.events for result in results) / count),
    }
    print(json.dumps(report))
    return 0 if passed == count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
