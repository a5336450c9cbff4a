"""Drawn workloads: Poisson and constant-rate arrivals, and the turns of a closed loop.

Every draw is from the stream that is passed in, by its own transforms, so a workload is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from scenarios.workloads.arrival import MAX_TOKENS, Arrival, Stream

NS = 1_000_000_000
_Z99 = 2.3263478740408408  # the 99th percentile of the standard normal distribution

Tokens = Callable[[], int]


def fixed(count: int) -> Tokens:
    """Always ``count`` tokens."""
    return lambda: count


def uniform(stream: Stream, low: int, high: int) -> Tokens:
    """From ``low`` to ``high`` tokens, both included."""
    span = high - low + 1
    return lambda: low + stream.below(span)


def lognormal(stream: Stream, median: float, p99: float, most: int = MAX_TOKENS) -> Tokens:
    """Log-normal with this median and 99th percentile, rounded to 1 at least and cut at ``most``."""
    from sim.random import log  # libm's differs from machine to machine

    sigma = log(p99 / median) / _Z99
    return lambda: min(max(round(stream.lognormal(median, sigma)), 1), most)


def poisson(
    stream: Stream, rate_per_s: float, prompt: Tokens, output: Tokens, *, for_ns: int | None, limit: int | None
) -> Iterator[Arrival]:
    """Arrivals with exponential gaps of mean ``1 / rate_per_s``, until ``for_ns`` or ``limit`` of them."""
    mean_ns = NS / rate_per_s
    exponential = stream.exponential
    t_ns = 0
    given = 0
    while limit is None or given < limit:
        t_ns += round(exponential(mean_ns))
        if for_ns is not None and t_ns >= for_ns:
            return
        yield Arrival(t_ns, prompt(), output())
        given += 1


def constant(
    rate_per_s: float, prompt: Tokens, output: Tokens, *, share: int, shares: int, for_ns: int | None, limit: int | None
) -> Iterator[Arrival]:
    """Arrival ``i`` at ``i / rate_per_s``; of ``shares`` clients this one takes every ``shares``-th, from ``share``."""
    gap_ns = Fraction(NS) / Fraction(str(rate_per_s))
    multiply, divide = gap_ns.numerator, gap_ns.denominator
    number = share
    given = 0
    while limit is None or given < limit:
        t_ns = number * multiply // divide
        if for_ns is not None and t_ns >= for_ns:
            return
        yield Arrival(t_ns, prompt(), output())
        number += shares
        given += 1


def turns(
    prompt: Tokens, output: Tokens, session: str, limit: int | None, shared: tuple[int, ...] = (), block_tokens: int = 1
) -> Iterator[Arrival]:
    """The turns of one session of a closed loop. Their times are the client's: each follows the answer before it.

    Args:
        shared: ids of the blocks of ``block_tokens`` tokens that all these prompts begin with, as far as they go.
    """
    given = 0
    while limit is None or given < limit:
        length = prompt()
        yield Arrival(0, length, output(), shared[: length // block_tokens], session)
        given += 1
