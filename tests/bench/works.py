"""The work of the side-by-side benchmark: the same requests for every simulator, written to one file.

The file is JSON lines in the fields of the public Mooncake trace: ``timestamp`` (ms from the start, with fractions),
``input_length``, ``output_length`` (tokens), ``hash_ids`` (one id per 512-token block of the prompt; equal ids are
equal blocks).
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import pathlib
import random
from collections.abc import Iterator
from typing import NamedTuple

BLOCK_TOKENS = 512


class Request(NamedTuple):
    """One request of a work. ``blocks``: ids of the prompt's 512-token blocks."""

    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """``trace``: file below the shared inputs, or None for Poisson arrivals of ``count`` requests of one size."""

    name: str
    title: str
    replicas: int
    trace: str | None = None
    count: int = 0
    rate_per_s: float = 0.0


WORKS = (
    Work("azure", "Azure code trace, 16 replicas", 16, trace="data/traces/AzureLLMInferenceTrace_code.csv"),
    Work("mooncake", "Mooncake synthetic trace, 16 replicas", 16, trace="data/traces/mooncake_synthetic_trace.jsonl"),
    Work("fixed", "512 in, 128 out, 64/s, 16 replicas", 16, count=10_000, rate_per_s=64),
    Work("wide", "512 in, 128 out, 40,000/s, 10,000 replicas", 10_000, count=100_000, rate_per_s=40_000),
)


def requests(work: Work, shared: pathlib.Path | None) -> Iterator[Request]:
    """The requests of ``work`` in order of arrival. ``shared``: the folder of public inputs; traces need it."""
    if work.trace is None:
        return _poisson(work.count, work.rate_per_s)
    if shared is None:
        raise FileNotFoundError(f"{work.name} needs {work.trace}: name the shared folder in SEATRIAL_SHARED")
    read = _azure if work.trace.endswith(".csv") else _mooncake
    return read(shared / work.trace)


def write(work: Work, shared: pathlib.Path | None, path: pathlib.Path) -> int:
    """Write the requests of ``work`` to ``path`` and return how many there are."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for request in requests(work, shared):
            line = {
                "timestamp": request.arrival_us / 1000,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


def _poisson(count: int, rate_per_s: float) -> Iterator[Request]:
    source = random.Random(7)
    arrival_us = 0.0
    for number in range(count):
        arrival_us += source.expovariate(rate_per_s) * 1e6
        yield Request(round(arrival_us), 512, 128, (number,))


def _azure(path: pathlib.Path) -> Iterator[Request]:
    first: datetime.datetime | None = None
    fresh = itertools.count()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            # Seven fractional digits, one more than fromisoformat keeps: it drops the rest.
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"])
            first = first or at
            prompt = int(row["ContextTokens"])
            # The trace tells nothing of shared prefixes, so no block is like another.
            blocks = tuple(itertools.islice(fresh, -(-prompt // BLOCK_TOKENS)))
            yield Request(
                (at - first) // datetime.timedelta(microseconds=1), prompt, int(row["GeneratedTokens"]), blocks
            )


def _mooncake(path: pathlib.Path) -> Iterator[Request]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield Request(row["timestamp"] * 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
