"""From a workload of a scenario file to its stream of arrivals."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator

from scenarios.schema import TokensModel, TraceModel, WorkloadModel
from scenarios.workloads import synthetic
from scenarios.workloads.arrival import MAX_TOKENS, Arrival, Counts, Stream
from scenarios.workloads.azure import read_azure
from scenarios.workloads.burstgpt import read_burstgpt
from scenarios.workloads.mooncake import read_mooncake

TRACES = pathlib.Path(__file__).resolve().parent.parent / "traces"
"""Those that are shipped with the package."""
READERS: dict[str, Callable[..., Iterator[Arrival]]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
    "burstgpt": read_burstgpt,
}


def read_trace(trace: TraceModel, path: pathlib.Path, counts: Counts | None = None) -> Iterator[Arrival]:
    """The arrivals of a trace. Raises BadInput at the row that is bad."""
    return READERS[trace.format](path, speed_up=trace.speed_up, limit=trace.limit, counts=counts)


def tokens(model: TokensModel, stream: Stream) -> synthetic.Tokens:
    """The draws of a number of tokens."""
    if model.fixed is not None:
        return synthetic.fixed(model.fixed)
    if model.uniform is not None:
        return synthetic.uniform(stream, model.uniform.low, model.uniform.high)
    assert model.lognormal is not None
    drawn = model.lognormal
    return synthetic.lognormal(stream, drawn.median, drawn.p99, drawn.at_most or MAX_TOKENS)


def sizes(workload: WorkloadModel, stream: Callable[[str], Stream]) -> tuple[synthetic.Tokens, synthetic.Tokens]:
    """The draws of a workload that has both lengths: tokens of a prompt, and the most tokens of its answer.

    Args:
        stream: gives the random stream of a name; those of the two are ``prompt`` and ``output``.
    """
    assert workload.prompt_tokens is not None and workload.output_tokens is not None
    return tokens(workload.prompt_tokens, stream("prompt")), tokens(workload.output_tokens, stream("output"))


def open_loop(
    workload: WorkloadModel, trace: pathlib.Path | None, stream: Callable[[str], Stream], share: int = 0
) -> Iterator[Arrival]:
    """The arrivals of client ``share`` of ``workload.clients``. Together the clients have the whole workload.

    Args:
        workload: of a scenario; no closed loop.
        trace: the trace's file, where the workload is one.
        stream: a random stream by name.
        share: which client, from 0.
    """
    if workload.trace is not None:
        assert trace is not None
        return itertools.islice(read_trace(workload.trace, trace), share, None, workload.clients)
    assert workload.arrivals is not None
    prompt, output = sizes(workload, lambda name: stream(f"{name}.{share}"))
    for_ns = None if workload.for_s is None else round(workload.for_s * synthetic.NS)
    limit = workload.requests
    if limit is not None:
        limit = limit // workload.clients + (share < limit % workload.clients)
    if workload.arrivals.poisson is not None:
        # Independent Poisson streams add up to one of the summed rate.
        rate = workload.arrivals.poisson.rate_per_s / workload.clients
        return synthetic.poisson(stream(f"arrivals.{share}"), rate, prompt, output, for_ns=for_ns, limit=limit)
    assert workload.arrivals.constant is not None
    return synthetic.constant(
        workload.arrivals.constant.rate_per_s, prompt, output,
        share=share, shares=workload.clients, for_ns=for_ns, limit=limit,
    )  # fmt: skip


def closed_loop(
    workload: WorkloadModel, stream: Callable[[str], Stream], session: int, block_tokens: int = 0
) -> list[tuple[float, Iterator[Arrival]]]:
    """The turns of one session of a closed loop: (seconds from which they count, turns), in the order of time.

    Args:
        block_tokens: tokens of a prefix block of the engines; needed where prompts share a prefix.
    """
    assert workload.arrivals is not None and workload.arrivals.closed_loop is not None
    limit = workload.arrivals.closed_loop.turns
    name = f"session-{session:06d}"
    prompt, output = sizes(workload, lambda name: stream(f"{name}.{session}"))
    found = [(0.0, synthetic.turns(prompt, output, name, limit))]
    for number, phase in enumerate(workload.phases):
        prompt = tokens(phase.prompt_tokens, stream(f"prompt.{session}.{number}"))
        output = tokens(phase.output_tokens, stream(f"output.{session}.{number}"))
        shared = tuple(range(phase.shared_prefix_tokens // block_tokens)) if phase.shared_prefix_tokens else ()
        found.append((float(phase.from_s), synthetic.turns(prompt, output, name, limit, shared, block_tokens)))
    return found
