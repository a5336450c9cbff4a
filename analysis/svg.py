"""Small charts as SVG text: lines with fault shading, heat rows. No dependency, so a report opens anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 8, 22
COLOURS = ("#2f6fb7", "#c2571a", "#3c8f4f", "#8b5fb0", "#a8323e", "#6b6b6b")


class Band(NamedTuple):
    """A shaded span of time."""

    start_s: float
    end_s: float
    label: str


class Series(NamedTuple):
    """One line. ``values`` has one entry a time; None leaves a gap."""

    label: str
    values: Sequence[float | None]
    colour: str | None = None
    """None: the next of ``COLOURS``."""


def number(value: float) -> str:
    """A figure short enough for an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ticks(end: float, most: int) -> list[float]:
    """Round figures from 0 up to ``end``: multiples of 1, 2 or 5 times a power of ten, in ``most`` steps or fewer."""
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power, 20 * power) if end / step <= most)
    return [number * step for number in range(math.floor(end / step * (1 + 1e-9)) + 1)]


class Plot:
    """The frame of one chart: scales, axes, fault shading."""

    def __init__(self, height: int, end_s: float) -> None:
        self.height = height
        self.end_s = max(end_s, 1e-9)
        self.parts: list[str] = []

    def x(self, t_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(t_s / self.end_s, 0.0), 1.0)

    def y(self, fraction: float) -> float:
        return TOP + (self.height - TOP - BOTTOM) * (1 - fraction)

    def shade(self, bands: Sequence[Band]) -> None:
        for band in bands:
            left = self.x(band.start_s)
            width = max(1.5, self.x(band.end_s) - left)  # a fault of one instant must still be seen
            self.parts.append(
                f'<rect class="fault" x="{left:.1f}" y="{TOP}" width="{width:.1f}" '
                f'height="{self.height - TOP - BOTTOM}"><title>{escape(band.label)}</title></rect>'
            )

    def time_axis(self) -> None:
        base = self.height - BOTTOM
        self.parts.append(f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>')
        for t_s in ticks(self.end_s, 10):
            anchor = "start" if t_s == 0 else "end" if self.x(t_s) > WIDTH - RIGHT - 20 else "middle"
            self.parts.append(
                f'<text x="{self.x(t_s):.1f}" y="{self.height - 6}" text-anchor="{anchor}">{number(t_s)} s</text>'
            )

    def render(self, label: str) -> str:
        body = "".join(self.parts)
        return (
            f'<svg role="img" aria-label="{escape(label, quote=True)}" viewBox="0 0 {WIDTH} {self.height}" '
            f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
        )


def lines(label: str, times_s: Sequence[float], series: Sequence[Series], bands: Sequence[Band], end_s: float) -> str:
    """Lines over time with a legend and shaded bands."""
    plot = Plot(190, end_s)
    plot.shade(bands)
    top = max((value for one in series for value in one.values if value is not None), default=0.0) or 1.0
    for value in ticks(top, 5):
        y = plot.y(value / top)
        plot.parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        plot.parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for index, one in enumerate(series):
        colour = one.colour or COLOURS[index % len(COLOURS)]
        for path in _paths(plot, times_s, one.values, top):
            plot.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        x = LEFT + 10 + 150 * index
        plot.parts.append(f'<rect x="{x}" y="{TOP + 2}" width="10" height="10" fill="{colour}"/>')
        plot.parts.append(f'<text x="{x + 14}" y="{TOP + 11}">{escape(one.label)}</text>')
    plot.time_axis()
    return plot.render(label)


def _paths(plot: Plot, times_s: Sequence[float], values: Sequence[float | None], top: float) -> list[str]:
    paths: list[str] = []
    points: list[str] = []
    for t_s, value in zip(times_s, values, strict=True):
        if value is None:
            if points:
                paths.append("M" + "L".join(points))
            points = []
        else:
            points.append(f"{plot.x(t_s):.1f} {plot.y(value / top):.1f}")
    if points:
        # A single point is drawn as a short dash, or it would not be seen.
        paths.append("M" + ("L".join(points) if len(points) > 1 else f"{points[0]}h2"))
    return paths


def lanes(label: str, bands: Sequence[Band], end_s: float) -> str:
    """One row a band, with its name beside it: what was on when."""
    height = 16
    plot = Plot(TOP + BOTTOM + height * max(1, len(bands)), end_s)
    for index, band in enumerate(bands):
        y = TOP + index * height
        left = plot.x(band.start_s)
        width = max(2.0, plot.x(band.end_s) - left)
        plot.parts.append(f'<rect class="lane" x="{left:.1f}" y="{y + 3}" width="{width:.1f}" height="{height - 6}"/>')
        # The name goes where there is room for it.
        before = left > LEFT + (WIDTH - LEFT) * 0.6
        x = left - 4 if before else left + width + 4
        anchor = "end" if before else "start"
        plot.parts.append(f'<text x="{x:.1f}" y="{y + 12}" text-anchor="{anchor}">{escape(band.label)}</text>')
    plot.time_axis()
    return plot.render(label)


_LEVELS = 8


def heat(
    label: str, rows: Sequence[tuple[str, Sequence[int]]], bands: Sequence[Band], width_s: float, end_s: float
) -> str:
    """One row a name, in eight shades, darker where the value is higher."""
    height = 14
    plot = Plot(TOP + BOTTOM + height * max(1, len(rows)), end_s)
    plot.shade(bands)
    top = max((value for _, values in rows for value in values), default=0) or 1
    for index, (name, values) in enumerate(rows):
        y = TOP + index * height
        plot.parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(name[-10:])}</text>')
        # One path a shade and row: a rectangle of its own for each bin would make the page ten times as large.
        for level, path in sorted(_shades(plot, values, top, width_s, y + 1, height - 2).items()):
            plot.parts.append(
                f'<path class="heat" d="{path}" fill-opacity="{level / _LEVELS:.2f}">'
                f"<title>{escape(name)}: highest {max(values)}</title></path>"
            )
    plot.time_axis()
    return plot.render(label)


def _shades(plot: Plot, values: Sequence[int], top: int, width_s: float, y: int, height: int) -> dict[int, str]:
    levels = [-(-value * _LEVELS // top) for value in values]
    paths: dict[int, list[str]] = {}
    start = 0
    for position in range(1, len(levels) + 1):
        if position < len(levels) and levels[position] == levels[start]:
            continue
        if levels[start]:
            left, right = plot.x(start * width_s), plot.x(position * width_s)
            paths.setdefault(levels[start], []).append(f"M{left:.1f} {y}H{right:.1f}v{height}H{left:.1f}z")
        start = position
    return {level: "".join(path) for level, path in paths.items()}
