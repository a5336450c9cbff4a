"""Ours, on one work of the side-by-side benchmark: the whole of a run, with everything that a run has.

Usage: python -m tests.bench.ours REQUESTS REPLICAS. Prints one line of JSON.

Every request is a call of a client actor to a Gateway actor and from there an HTTP exchange with an engine over the
simulated network, as in ``fault_injection``; health is probed, the whole evidence is encoded and written to a file, and
the judge folds it live. The run must pass, answer every request, and leave the stated number of events a request.

``seconds`` is the wall time from the first request to the last answer, evidence and judging included: the peers have no
start-up of replicas to be timed. ``whole_s`` is that of everything, reading the scenario and the verdict included;
``cpu_s`` the processor time behind ``seconds``.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from time import perf_counter, process_time  # bound now: inside a run the module `time` shows simulated time
from typing import Any

import yaml

from analysis.verdict import Judge
from scenarios.load import Scenario, parse
from scenarios.orchestrate import Progress
from scenarios.runner import preregistered
from scenarios.sim_world import SimStage
from sim import profiles

PROFILE = "qwen3-0.6b-rtx4090"
REPLICAS_PER_GATEWAY = 313  # as in scale_10k: 32 gateways for 10,000
EVENTS_PER_REQUEST = (10.0, 12.0)  # ten for the request; the rest are health probes
LONG_CONTEXT_TOKENS = 262_144
LONG_KV_TOKENS = 1_048_576


class Stopwatch(Progress):
    """Notes wall time, processor time and number of events at every change of phase."""

    __slots__ = ("_phase", "marks", "stage")

    def __init__(self, stage: SimStage) -> None:
        self.stage = stage
        self.marks: dict[str, tuple[float, float, int]] = {}
        super().__init__()

    @property
    def phase(self) -> str:  # type: ignore[override]  # a plain attribute in the base
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name
        self.marks[name] = (perf_counter(), process_time(), self.stage.world.seq)


def scenario(requests: pathlib.Path, replicas: int, engine: str) -> Scenario:
    """A scenario that replays the file: ten seconds between two health checks of a replica, as in scale_10k."""
    gpus = 8
    text = yaml.safe_dump(
        {
            "name": "bench",
            "summary": "The requests of a benchmark, replayed.",
            "seed": 1,
            "topology": {
                "nodes": -(-replicas // gpus),
                "gpus_per_node": gpus,
                "services": {
                    "bench": {
                        "initial_replicas": replicas,
                        "engine": engine,
                        "gateways": -(-replicas // REPLICAS_PER_GATEWAY),
                        "gateway": {"read_timeout_s": 3600},
                        "health": {
                            "interval_s": 10,
                            "probe_timeout_s": 2,
                            "sync_interval_s": 5,
                            "stall_window_s": 600,
                        },
                    }
                },
            },
            "workload": {
                "service": "bench",
                "trace": {"format": "mooncake", "file": str(requests.resolve())},
                "patience_s": 3600,
            },
            "acceptance": [{"nothing_lost": {}}, {"answered_fraction": {"at_least": 1.0}}],
            "limits": {"time_limit_s": 36_000, "converge_within_s": 20, "shadow_s": 10},
        },
        sort_keys=False,
    )
    return parse(text, "bench", requests.parent)


def profile_for(requests: pathlib.Path, folder: pathlib.Path) -> str:
    """The shipped profile, or the same with a longer context and more memory where a request needs it."""
    longest = 0
    with requests.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            longest = max(longest, row["input_length"] + row["output_length"])
    if longest <= profiles.load_profile(PROFILE).context_length:
        return PROFILE
    shipped = pathlib.Path(profiles.__file__).with_name(f"{PROFILE}.yaml")
    raw = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    raw["parameters"]["context_length"]["value"] = LONG_CONTEXT_TOKENS
    raw["parameters"]["kv_capacity"]["value"] = LONG_KV_TOKENS
    path = folder / "long-context.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return str(path)


def measure(requests: pathlib.Path, replicas: int) -> dict[str, Any]:
    """Run the work once. AssertionError: the run did not do all of it, or left too few or too many events."""
    begun = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        chosen = scenario(requests, replicas, profile_for(requests, pathlib.Path(folder)))
        judge = Judge(preregistered(chosen))
        with open(pathlib.Path(folder) / "events.jsonl", "xb", buffering=0) as evidence:
            stage = SimStage(chosen, 1, batches=[judge.feed_all], write=evidence.write)
            stopwatch = stage.progress = Stopwatch(stage)
            with stage:
                result = stage.run()
            written = evidence.tell()
        verdict = judge.verdict()
    whole_s = perf_counter() - begun
    assert verdict.result == "pass", [f"{row.name}: {row.explain}" for row in verdict.failed()]
    sent = next(check.judged for check in verdict.checks if check.name == "nothing_lost")
    (began_s, began_cpu_s, began_seq), (ended_s, ended_cpu_s, ended_seq) = (
        stopwatch.marks["workload"],
        stopwatch.marks["steps"],
    )
    events_per_request = (ended_seq - began_seq) / sent
    least, most = EVENTS_PER_REQUEST
    assert least <= events_per_request <= most, f"{events_per_request:.2f} events a request"
    return {
        "seconds": ended_s - began_s,
        "cpu_s": ended_cpu_s - began_cpu_s,
        "whole_s": whole_s,
        "requests": sent,
        "completed": sent,  # answered_fraction asks for every one, and the run passed
        "events_per_request": round(events_per_request, 3),
        "events": result.events,
        "evidence_bytes": written,
        "simulated_s": result.simulated_s,
        "gateways": -(-replicas // REPLICAS_PER_GATEWAY),
    }


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not arguments[1].isdigit() or not int(arguments[1]):
        print("usage: python -m tests.bench.ours REQUESTS REPLICAS", file=sys.stderr)
        return 2
    requests = pathlib.Path(arguments[0])
    if not requests.is_file():
        print(f"{requests}: no such file", file=sys.stderr)
        return 2
    print(json.dumps(measure(requests, int(arguments[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
