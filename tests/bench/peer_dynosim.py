"""Runs one work in DynoSim, the Rust simulator inside the wheel ai-dynamo-runtime, in the environment of the peer.

Usage: peer_dynosim.py REQUESTS REPLICAS ROUTER, ROUTER being round_robin or kv_router. Prints one line of JSON.
"""

import json
import os
import sys
import time

os.environ["DYN_LOG"] = "error"

from dynamo._core import run_mocker_trace_replay  # reads DYN_LOG when imported


def main(path: str, replicas: str, router: str) -> None:
    begun = time.perf_counter()
    result = run_mocker_trace_replay(
        [path],
        num_workers=int(replicas),
        router_mode=router,
        trace_block_size=512,
        capture_planner_details=False,
    )
    whole_s = time.perf_counter() - begun
    summary = result.summary
    report = {
        # Its own clock around the simulation alone: reading the trace is left out, in its favour.
        "seconds": summary["wall_time_ms"] / 1000,
        "whole_s": whole_s,
        "requests": summary["num_requests"],
        "completed": summary["completed_requests"],
        "output_tokens": summary["total_output_tokens"],
        "simulated_s": summary["duration_ms"] / 1000,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
