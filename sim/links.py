"""One direction of the link between two nodes: what it does to every message that passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from sim.random import Stream
from sim.timings import ns

DEN: Final = 1 << 32
"""Denominator of probabilities: they are drawn as integers."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSpec:
    """One direction of a link.

    Attributes:
        latency_s: one way.
        jitter_s: a uniform draw from 0 to this is added.
        loss: probability that a message vanishes.
        reorder: probability that a message is held back by up to ``reorder_s``, so that later ones overtake it.
        bandwidth_bytes_per_s: 0 for no limit; messages queue for it.
    """

    latency_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.005
    bandwidth_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s", "reorder_s", "bandwidth_bytes_per_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"LinkSpec.{name} = {getattr(self, name)!r}: must not be negative")
        for name in ("loss", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"LinkSpec.{name} = {getattr(self, name)!r}: a probability is from 0 to 1")


class Link:
    """One direction between two nodes. ``plain`` is the fast path: a fixed latency and nothing else.

    ``drawn`` is that of exploring: its latency is drawn, and nothing else can befall a message.
    """

    __slots__ = (
        "source",
        "target",
        "spec",
        "plain",
        "drawn",
        "latency_ns",
        "slowings",
        "blocks",
        "waiting",
        "free_at",
        "stream",
        "explore",
    )

    def __init__(self, source: str, target: str, spec: LinkSpec, stream: Stream, explore: bool) -> None:
        self.source = source
        self.target = target
        self.stream = stream
        self.explore = explore
        self.blocks = 0  # partitions and holds in force
        self.waiting: list[tuple[int, Any, int, Callable[..., object], tuple[Any, ...]]] = []
        self.free_at = 0
        self.slowings: list[tuple[int, Callable[[int, str], None] | None]] = []  # extra nanoseconds, who is told
        self.set(spec)

    def set(self, spec: LinkSpec) -> None:
        self.spec = spec
        self.latency_ns = ns(spec.latency_s) + sum(extra_ns for extra_ns, _ in self.slowings)
        told = any(on_hit is not None for _, on_hit in self.slowings)
        bare = not (self.blocks or told or spec.jitter_s or spec.loss or spec.reorder or spec.bandwidth_bytes_per_s)
        self.plain = bare and not self.explore
        self.drawn = bare and self.explore

    def delay(self, now: int, size: int) -> int:
        """Nanoseconds until a message that leaves now arrives."""
        spec = self.spec
        delay = self.latency_ns
        if self.explore:
            # From a quarter to 32 times: wide enough that any two messages of neighbouring steps can swap.
            delay = self.stream.spread_ns(delay)
        if spec.jitter_s:
            delay += self.stream.uniform_ns(0, ns(spec.jitter_s))
        if spec.reorder and self.stream.chance(int(spec.reorder * DEN), DEN):
            delay += self.stream.uniform_ns(0, ns(spec.reorder_s))
        if spec.bandwidth_bytes_per_s:
            start = self.free_at if self.free_at > now else now
            self.free_at = start + round(size * 1_000_000_000 / spec.bandwidth_bytes_per_s)
            delay += self.free_at - now
        return delay
