"""``scale_10k`` at several sizes: how time and memory grow with the number of requests.

    python -m tests.bench.scale [REQUESTS ...]        default: 10000 100000 1000000

Each size is a process of its own. Full evidence goes to a file (deleted afterwards), and the judge folds it live. The
cost of a request is the processor time of the workload's phase, from the first request to the last answer, over the
requests; putting 10,000 replicas up and taking them down is stated beside it, for it does not depend on them. Prints
one line of JSON a size, and last the growth from the first size to the last. Exit code 1: a run did not pass.
"""

from __future__ import annotations

import json
import pathlib
import resource
import subprocess
import sys
import tempfile
from time import perf_counter, process_time  # bound now: inside a run the module `time` shows simulated time
from typing import Any

from analysis.verdict import Judge
from scenarios.load import load
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage
from tests.bench.ours import Stopwatch

SIZES = (10_000, 100_000, 1_000_000)


def measure(requests: int) -> dict[str, Any]:
    """Run ``scale_10k`` with that many requests, in this process."""
    begun = perf_counter()
    scenario = load("scale_10k", [f"workload.requests={requests}"])
    judge = Judge(preregistered(scenario))
    with tempfile.TemporaryDirectory() as folder:
        with open(pathlib.Path(folder) / "events.jsonl", "xb", buffering=0) as evidence:
            stage = SimStage(scenario, scenario.model.seed, sinks=[judge.feed], write=evidence.write)
            stopwatch = stage.progress = Stopwatch(stage)
            with stage:
                result = stage.run()
            written = evidence.tell()
    verdict = judge.verdict()
    marks = stopwatch.marks
    began, ended = marks["workload"], marks["steps"]
    return {
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


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"] and len(arguments) == 2 and arguments[1].isdigit():
        print(json.dumps(measure(int(arguments[1]))))
        return 0
    if not all(size.isdigit() and int(size) for size in arguments):
        print("usage: python -m tests.bench.scale [REQUESTS ...]", file=sys.stderr)
        return 2
    rows = []
    for size in [int(size) for size in arguments] or SIZES:
        command = [sys.executable, "-m", "tests.bench.scale", "--one", str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
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
