"""Seeds per core-hour of a publication under agents: ``python -m tests.bench.publish_rate [SEEDS] [--profile]``.
With ``--storm [SESSIONS [TURNS]]`` the time that ``affinity_storm`` takes with so many sessions, 100,000 by default, of
so many turns, by default those of the scenario.

``publish_live_agents`` with its 64 sessions of six turns and six publications beside the deployment's, judged by every
check, each seed as a worker of a sweep runs it: set-up, run, verdict, drawn orders and delays. Processor time is
measured, for workers share nothing. Prints one line of JSON; exit code 1 where a seed does not pass.

With ``--profile`` it prints where the time goes instead.
"""

from __future__ import annotations

import cProfile
import json
import pathlib
import pstats
import resource
import sys
from time import perf_counter, process_time

import yaml

from analysis.verdict import Judge
from scenarios.load import Scenario, load, parse
from scenarios.runner import preregistered
from scenarios.seeds import run_seed
from scenarios.sim_world import SimStage
from tests.bench.sweep_rate import report, simpy_timeout_us

FIRST_SEED = 1
PUBLICATIONS = 6
_EVERY_S = 1.0


def publishing_scenario() -> Scenario:
    """``publish_live_agents`` with six publications, one a second."""
    shipped = load("publish_live_agents")
    data = yaml.safe_load(shipped.text)
    steps = range(1, PUBLICATIONS + 1)
    data["name"] = "publish_rate"
    data["steps"] = [{"at_s": _EVERY_S * step, "do": "publish", "with": {"model_step": step}} for step in steps]
    done = {"event": "publication.ended", "where": {"outcome": "done"}, "at_least": PUBLICATIONS + 1}
    data["acceptance"] = [{"answered_fraction": {"at_least": 1.0}}, {"occurs": done}]
    data.pop("real", None)
    return parse(yaml.safe_dump(data, sort_keys=False), "publish_rate.yaml", pathlib.Path())


def storm(sessions: int, turns: int | None) -> int:
    """One run of ``affinity_storm`` with every check, and no files. Exit code 1 where it does not pass."""
    changes = [f"workload.arrivals.agents.sessions={sessions}", "limits.time_limit_s=1000000"]
    if turns is not None:
        changes.append(f"workload.arrivals.agents.turns={turns}")
    scenario = load("affinity_storm", changes)
    before_us = simpy_timeout_us()
    begun, cpu = perf_counter(), process_time()
    judge = Judge(preregistered(scenario))
    with SimStage(scenario, FIRST_SEED, batches=[judge.feed_all]) as stage:
        stage.run()
    verdict = judge.verdict()
    cpu_s = process_time() - cpu
    report = {
        "scenario": "affinity_storm",
        "sessions": sessions,
        "turns": turns or "as shipped",
        "result": verdict.result,
        "events": verdict.events,
        "wall_s": round(perf_counter() - begun, 1),
        "cpu_s": round(cpu_s, 1),
        "cpu_us_per_event": round(cpu_s / verdict.events * 1e6, 1),
        "simpy_timeout_us": round((before_us + simpy_timeout_us()) / 2, 3),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(report))
    return 0 if verdict.result == "pass" else 1


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--storm"] and len(arguments) <= 3 and all(one.isdigit() for one in arguments[1:]):
        return storm(int(arguments[1]) if arguments[1:] else 100_000, int(arguments[2]) if arguments[2:] else None)
    profile = "--profile" in arguments
    numbers = [argument for argument in arguments if argument != "--profile"]
    if len(numbers) > 1 or not all(number.isdigit() and int(number) for number in numbers):
        print(
            "usage: python -m tests.bench.publish_rate [SEEDS] [--profile] | --storm [SESSIONS [TURNS]]",
            file=sys.stderr,
        )
        return 2
    count = int(numbers[0]) if numbers else 100
    scenario = publishing_scenario()
    if profile:
        profiler = cProfile.Profile(process_time)  # of a busy machine too
        profiler.enable()
        for seed in range(FIRST_SEED, FIRST_SEED + count):
            run_seed(scenario, seed)
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        return 0
    return report(scenario, "64 sessions, 6 publications", count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
