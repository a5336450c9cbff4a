"""Runs one work in Vidur. Started by peers.py in its environment, in a temporary folder, with a checkout on the path.

Usage: peer_vidur.py REQUESTS REPLICAS CHECKOUT. Prints one line of JSON. Only Simulator.run is timed: training of the
cost model, reading the trace, and output at exit are left out, in Vidur's favour, and its metrics are off.

Vidur's attention profile is a large file that copies of its repository may lack. Then one is made here from a formula:
its cost model becomes a table by batch and context, so the speed of the simulation hardly depends on the numbers in it.
"""

import csv
import itertools
import json
import os
import pathlib
import sys
import time

MODEL = "meta-llama/Llama-2-7b-hf"
MAX_TOKENS = 16_384


def attention_profile(path: pathlib.Path) -> None:
    """A made-up attention.csv: milliseconds by batch size, context and chunk for the Llama-2-7b shape."""
    shape = {"n_embd": 4096, "n_q_head": 32, "n_kv_head": 32, "block_size": 16, "num_tensor_parallel_workers": 1}
    contexts = [0, 64, 256, 1024, 4096, 8192, 16_384]
    prefills = [(1, chunk, context) for chunk, context in itertools.product([32, 64, 128, 256, 512], contexts)]
    decodes = [(batch, 0, context) for batch, context in itertools.product([1, 2, 8, 16, 32, 64, 128], contexts)]
    rows = []
    for batch, chunk, context in prefills + decodes:
        cost = {
            "time_stats.attn_prefill.median": 0.01 + 1e-7 * chunk * (chunk + context),
            "time_stats.attn_decode.median": 0.01 + 1e-6 * batch * (64 + context),
            "time_stats.attn_kv_cache_save.median": 0.005 + 1e-5 * max(chunk, batch),
        }
        rows.append({**shape, "batch_size": batch, "prefill_chunk_size": chunk, "kv_cache_size": context, **cost})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main(path: str, replicas: str, checkout: str) -> None:
    from vidur.config import (
        ClusterConfig,
        LinearRegressionExecutionTimePredictorConfig,
        MetricsConfig,
        SarathiSchedulerConfig,
        SimulationConfig,
        TraceRequestGeneratorConfig,
    )
    from vidur.simulator import Simulator

    requests = [json.loads(line) for line in open(path, encoding="utf-8")]
    with open("trace.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["arrived_at", "num_prefill_tokens", "num_decode_tokens"])
        for r in requests:
            writer.writerow([r["timestamp"] / 1000, r["input_length"], r["output_length"]])

    profiles = pathlib.Path(checkout) / "data" / "profiling" / "compute" / "a100" / MODEL
    attention = profiles / "attention.csv"
    made = not attention.is_file()
    if made:
        attention = pathlib.Path("attention.csv")
        attention_profile(attention)
    config = SimulationConfig(
        log_level="error",
        cluster_config=ClusterConfig(
            num_replicas=int(replicas), replica_scheduler_config=SarathiSchedulerConfig(chunk_size=512)
        ),
        request_generator_config=TraceRequestGeneratorConfig(trace_file="trace.csv", max_tokens=MAX_TOKENS),
        execution_time_predictor_config=LinearRegressionExecutionTimePredictorConfig(
            compute_input_file=str(profiles / "mlp.csv"),
            attention_input_file=str(attention),
            polynomial_degree=[2],
            polynomial_include_bias=[True],
            polynomial_interaction_only=[False],
            fit_intercept=[True],
            k_fold_cv_splits=2,
            num_training_job_threads=1,
            prediction_max_prefill_chunk_size=512,
            prediction_max_tokens_per_request=MAX_TOKENS,
        ),
        metrics_config=MetricsConfig(write_metrics=False, enable_chrome_trace=False, store_plots=False),
    )
    simulator = Simulator(config)
    begun = time.perf_counter()
    simulator.run()
    seconds = time.perf_counter() - begun
    report = {
        "seconds": seconds,
        "requests": len(requests),
        "completed": len(requests),  # the run asserts that its scheduler is empty at the end
        "output_tokens": sum(r["output_length"] for r in requests),
        "simulated_s": float(simulator._time),
        "note": "attention profile made up" if made else "",
    }
    print(json.dumps(report), flush=True)
    os._exit(0)  # its exit handler writes plots


if __name__ == "__main__":
    main(*sys.argv[1:])
