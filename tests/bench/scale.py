"""``scale_10k`` at several sizes: how time and memory grow with the number of requests.

    python -m tests.bench.scale [--replicas N] [REQUESTS ...]        default: 10000 100000 1000000

Four requests a second for each of 10,000 replicas, or of N. A fleet must fill first: 10,000 requests to 10,000 replicas
are over in a quarter of a second, before any replica has a second one to batch with it, and cost less for that. Each
size is a process of its own. Full evidence goes to a file (deleted afterwards), and the judge folds it live. The cost
of a request is the processor time of the workload's phase, from the first request to the last answer, over the
requests; putting the replicas up and taking them down is stated beside it, for it does not depend on them. Prints one
line of JSON a size, and last the growth from the first size to the last. Exit codes: 0, 1 where a run did not pass or
did not end, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
from time import perf_counter, process_time  # bound now: inside a run the module `time` shows simulated time
from typing import Any

from analysis.verdict import Judge
from scenarios.load import Scenario, load
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage
from tests.bench.ours import Stopwatch

SIZES = (10_000, 100_000, 1_000_000)
REPLICAS = 10_000


def scenario_of(requests: int, replicas: int) -> Scenario:
    """``scale_10k`` with everything in proportion to its replicas."""
    parts = max(1, 32 * replicas // REPLICAS)
    changes = [
        f"topology.nodes={-(-replicas // 8)}", f"topology.services.fleet.initial_replicas={replicas}",
        f"topology.services.fleet.gateways={parts}", f"workload.clients={parts}",
        f"workload.arrivals.poisson.rate_per_s={4 * replicas}", f"workload.requests={requests}",
        "limits.time_limit_s=100000",
    ]  # fmt: skip
    return load("scale_10k", changes)


def measure(requests: int, replicas: int) -> dict[str, Any]:
    """Run it with that many requests, in this process."""
    begun = perf_counter()
    scenario = scenario_of(requests, replicas)
    judge = Judge(preregistered(scenario))
    with tempfile.TemporaryDirectory() as folder:
        with open(pathlib.Path(folder) / "events.jsonl", "xb", buffering=0) as evidence:
            stage = SimStage(scenario, scenario.model.seed, batches=[judge.feed_all], write=evidence.write)
            stopwatch = stage.progress = Stopwatch(stage)
            with stage:
                result = stage.run()
            written = evidence.tell()
    verdict = judge.verdict()
    marks = stopwatch.marks
    began, ended = marks["workload"], marks["steps"]
    return {
        "replicas": replicas,
        "requests": requests,
        "result": verdict.result,
        "failed": [f"{row.name}: {row.explain}" for row in verdict.failed()] if verdict.result != "pass" else [],
        "cpu_us_per_request": round((ended[1] - began[1]) / requests * 1e6, 1),
        "events_per_request": round((ended[2] - began[2]) / requests, 3),
        "deploy_cpu_s": round(began[1] - stopwatch.marks["deploy"][1], 2),
        "workload_cpu_s": round(ended[1] - began[1], 2),
        "workload_wall_s": round(ended[0] - began[0], 2),
        "cpu_s": round(process_time(), 2),
        "wall_s": round(perf_counter() - begun, 2),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "events": result.events,
        "evidence_mib": written >> 20,
        "simulated_s": result.simulated_s,
    }


def _counted(text: str) -> int:
    """A whole number above 0. Raises ArgumentTypeError, which says what was written."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "requests", type=_counted, nargs="*", metavar="REQUESTS", default=list(SIZES),
        help=f"sizes of the workload (default: {' '.join(map(str, SIZES))})",
    )  # fmt: skip
    parser.add_argument("--replicas", type=_counted, default=REPLICAS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # the first size, in this process
    return parser


def main(arguments: list[str]) -> int:
    """The command; returns its exit code. Bad usage raises SystemExit(2)."""
    given = _parser().parse_args(arguments)
    if given.one:
        print(json.dumps(measure(given.requests[0], given.replicas)))
        return 0
    rows = []
    for size in given.requests:
        command = [sys.executable, "-m", "tests.bench.scale", "--one", "--replicas", str(given.replicas), str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{size} requests: the run ended with exit code {done.returncode}", file=sys.stderr)
            return 1
        line = done.stdout.splitlines()[-1]
        print(line, flush=True)
        rows.append(json.loads(line))
    first, last = rows[0], rows[-1]
    growth = last["cpu_us_per_request"] / first["cpu_us_per_request"] - 1
    print(f"cost of a request from {first['requests']:,} to {last['requests']:,}: {growth:+.1%}")
    return 0 if all(row["result"] == "pass" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
