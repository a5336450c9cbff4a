"""One simulated run beside real ones: the table of figures, as data, as text and as a picture."""

from __future__ import annotations

import dataclasses
import fnmatch
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from analysis.compare.course import Course, Figure, by_name
from analysis.compare.order import Difference, difference, protocol_events
from analysis.errors import BadInput
from analysis.rundir import RunDir

AIM_PERCENT = 10.0
GROUPS = ("phase", "pause", "total", "metric")
COUNTED = ("phase", "total")
"""Of these each row must be within the aim, and one that only one side has is not."""
_RESOLUTION_S = 0.1
"""Phases are seen by polling; a difference below this is none."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure in the simulated run and in the real ones that have it."""

    name: str
    group: str
    unit: str
    sim: float | None
    real: tuple[float, ...]
    excuse: str = ""
    """Why only one side has it, where somebody has declared that."""
    without: int = 0
    """Real runs that do not have it, where others do."""

    @property
    def one_sided(self) -> str:
        """``sim`` or ``real`` where only that side has it; else empty."""
        return "real" if self.sim is None else "" if self.real else "sim"

    @property
    def typical(self) -> float | None:
        """The median of the real runs."""
        return statistics.median(self.real) if self.real else None

    @property
    def error_percent(self) -> float | None:
        typical = self.typical
        if self.sim is None or typical is None:
            return None
        if not typical:
            return 0.0 if not self.sim else None
        return (self.sim / typical - 1.0) * 100.0

    @property
    def spread_percent(self) -> float | None:
        """From the least to the largest of the real runs, of their median; None for one run."""
        typical = self.typical
        return (max(self.real) - min(self.real)) / typical * 100.0 if typical and len(self.real) > 1 else None

    @property
    def inside(self) -> bool | None:
        """Whether the simulated figure lies between the least and the largest of the real ones; None for one run."""
        if self.sim is None or len(self.real) < 2:
            return None
        slack = 1e-9 * max(1.0, abs(self.sim))
        return min(self.real) - slack <= self.sim <= max(self.real) + slack

    @property
    def within_aim(self) -> bool | None:
        """Within 10% of the real median, or nearer to it than a poll can tell.

        A phase or total that one side lacks is not, unless that was declared with a reason: then, and for other rows
        that one side lacks, None.
        """
        typical, error = self.typical, self.error_percent
        if self.sim is None or typical is None:
            return False if self.group in COUNTED and not self.excuse else None
        near = self.unit == "s" and self.group in ("phase", "pause") and abs(self.sim - typical) <= _RESOLUTION_S
        return near or (error is not None and abs(error) <= AIM_PERCENT)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that ``compare`` prints."""

    sim: str
    real: tuple[str, ...]
    rows: tuple[Row, ...]
    orders: tuple[tuple[str, Difference], ...]

    def counted(self, group: str) -> tuple[int, int]:
        """Rows of a group within the aim, and those that were judged: all, but for what is excused."""
        judged = [row.within_aim for row in self.rows if row.group == group and row.within_aim is not None]
        return sum(judged), len(judged)

    def as_json(self) -> dict[str, Any]:
        return {
            "sim": self.sim,
            "real": list(self.real),
            "aim_percent": AIM_PERCENT,
            "rows": [
                {
                    "name": row.name, "group": row.group, "unit": row.unit, "sim": row.sim, "real": list(row.real),
                    "error_percent": row.error_percent, "spread_percent": row.spread_percent,
                    "inside_spread": row.inside, "within_aim": row.within_aim, "only_in": row.one_sided,
                    "real_runs_without": row.without,
                    "excuse": row.excuse,
                }
                for row in self.rows
            ],
            "order": [
                {"run": name, "equal": one.equal, **dataclasses.asdict(one)} for name, one in self.orders
            ],
        }  # fmt: skip


def compare(sim: RunDir, real: Sequence[RunDir], excuses: Mapping[str, str] | None = None) -> Comparison:
    """Compare one run with others, of any world.

    Args:
        sim: the run whose error is wanted.
        real: at least one.
        excuses: name of a phase or total (``*`` and ``?`` match as in a shell) to why only one side has it.

    Raises:
        BadInput: a run cannot be read, the two sides are of different scenarios, or an excuse is for nothing.
    """
    name = sim.info().scenario
    for one in real:
        if one.info().scenario != name:
            raise BadInput(
                f"{one.path}: a run of {one.info().scenario!r}, and {sim.path} is one of {name!r}; "
                "compare runs of one scenario"
            )
    ours = by_name(Course.of(sim).figures())
    theirs = [by_name(Course.of(one).figures()) for one in real]
    rows = _excused(_rows(ours, theirs), excuses or {})
    events = protocol_events(sim)
    orders = tuple((str(one.path), difference(events, protocol_events(one))) for one in real)
    return Comparison(str(sim.path), tuple(str(one.path) for one in real), rows, orders)


def _rows(ours: dict[str, Figure], theirs: Sequence[dict[str, Figure]]) -> tuple[Row, ...]:
    names = list(dict.fromkeys([*ours, *(name for one in theirs for name in one)]))
    rows = []
    for name in names:
        known = [one[name] for one in (ours, *theirs) if name in one]
        found = ours.get(name)
        real = tuple(one[name].value for one in theirs if name in one)
        without = len(theirs) - len(real) if real else 0
        value = None if found is None else found.value
        rows.append(Row(name, known[0].group, known[0].unit, value, real, without=without))
    return tuple(sorted(rows, key=lambda row: GROUPS.index(row.group)))


def _excused(rows: tuple[Row, ...], excuses: Mapping[str, str]) -> tuple[Row, ...]:
    found = []
    unused = dict(excuses)
    for row in rows:
        patterns = [one for one in excuses if fnmatch.fnmatchcase(row.name, one)]
        if patterns and row.one_sided and row.group in COUNTED:
            row = dataclasses.replace(row, excuse=excuses[patterns[0]])
            for pattern in patterns:
                unused.pop(pattern, None)
        found.append(row)
    if unused:
        names = ", ".join(row.name for row in rows if row.one_sided and row.group in COUNTED) or "none"
        raise BadInput(
            f"--one-side {next(iter(unused))!r}: no phase or total that only one side has is called so; "
            f"there are: {names}"
        )
    return tuple(found)


def as_table(found: Comparison) -> Table:
    """The rows for a terminal."""
    out = Table(box=None, header_style="bold")
    spread = len(found.real) > 1
    columns = ["", "sim", "real" + (" (median)" if spread else ""), "error", *(["spread", "inside"] if spread else [])]
    for column in columns:
        out.add_column(column, justify="left" if not column else "right")
    group = ""
    for row in found.rows:
        if row.group != group:
            group = row.group
            out.add_row(Text(f"{group}s", style="bold"))
        error = row.error_percent
        style = "" if row.within_aim in (True, None) or row.group == "pause" else "red"
        cells: list[str | Text] = [f"  {row.name}", amount(row.sim, row.unit), amount(row.typical, row.unit)]
        cells.append(Text(said_of(row) if error is None else f"{error:+.1f}%", style=style))
        if spread:
            cells.append("" if row.spread_percent is None else f"{row.spread_percent:.1f}%")
            cells.append("" if row.inside is None else "yes" if row.inside else "no")
        out.add_row(*cells)
    return out


def summary(found: Comparison) -> list[str]:
    """What is to be said beneath the table."""
    lines = []
    for group in ("phase", "total", "metric"):
        good, judged = found.counted(group)
        lines.append(f"{group}s within {AIM_PERCENT:g}%: {good} of {judged}")
    for row in found.rows:
        if row.one_sided and row.group in COUNTED:
            lines.append(f"  {row.name}: {said_of(row)}")
        elif row.without and row.group in COUNTED:
            count = len(found.real)
            lines.append(f"  {row.name}: in {count - row.without} of {count} real runs; the median is of those")
    insides = [row.inside for row in found.rows if row.inside is not None and row.group in ("phase", "metric")]
    if insides:
        lines.append(f"phases and metrics inside the spread of the real runs: {sum(insides)} of {len(insides)}")
    for name, one in found.orders:
        turned = ", ".join(f"{x} before {y}" for x, y in one.reversed[:3])
        said = f"order of protocol events, {name}: {'equal' if one.equal else 'differs'}; {one.names} events, "
        said += f"{one.pairs} pairs ordered in both, {len(one.reversed)} the other way round"
        said += f" ({turned})" if turned else ""
        said += f", {one.only_first} ordered in sim alone, {one.only_second} in real alone"
        said += f"; in time: {'the same sequence' if one.same_sequence else f'{len(one.swapped)} neighbours swapped'}"
        lines.append(said)
        for who, missing in (("sim", one.missing_in_first), ("real", one.missing_in_second)):
            if missing and not (who == "real" and one.partial):
                more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
                lines.append(f"  not in the {who} run: {', '.join(missing[:6])}{more}")
    return lines


def said_of(row: Row) -> str:
    """What is said of a row in place of an error; empty where both sides have it."""
    if not row.one_sided or row.group not in COUNTED:
        return ""
    return f"only in the {row.one_sided} run" + (f": {row.excuse}" if row.excuse else "")


def amount(value: float | None, unit: str) -> str:
    """A figure with its unit, as short as it may be."""
    if value is None:
        return "-"
    if unit == "1":
        return f"{value:,.0f}"
    text = f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
    return f"{text} {unit}"


def as_svg(found: Comparison) -> str:
    """Phases as pairs of bars, sim above real, each pair on its own scale; the whiskers span the real runs."""
    rows = [row for row in found.rows if row.group in ("phase", "metric") and row.sim is not None and row.real]
    left, width, step, top = 330, 560, 40, 46
    height = top + step * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 130}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{left + width + 130}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(found.sim)} beside {len(found.real)} real</text>',
        '<rect x="12" y="28" width="10" height="10" fill="#4c78a8"/><text x="27" y="37">sim</text>',
        '<rect x="70" y="28" width="10" height="10" fill="#f58518"/>',
        '<text x="85" y="37">real, median; whiskers: all</text>',
    ]
    for index, row in enumerate(rows):
        typical = row.typical or 0.0
        most = max(row.sim or 0.0, *row.real) or 1.0
        y = top + index * step
        error = row.error_percent
        colour = "#333" if row.within_aim else "#c00"
        parts.append(f'<text x="{left - 10}" y="{y + 18}" text-anchor="end">{escape(row.name)}</text>')
        for offset, value, fill in ((4, row.sim or 0.0, "#4c78a8"), (17, typical, "#f58518")):
            long = f"{value / most * width:.1f}"
            parts.append(f'<rect x="{left}" y="{y + offset}" width="{long}" height="11" fill="{fill}"/>')
            text = amount(value, row.unit)
            parts.append(f'<text x="{left + 4}" y="{y + offset + 10}" font-size="10">{escape(text)}</text>')
        if len(row.real) > 1:
            x1, x2 = (left + one / most * width for one in (min(row.real), max(row.real)))
            line = f"M{x1:.1f} {y + 22}H{x2:.1f}M{x1:.1f} {y + 18}v8M{x2:.1f} {y + 18}v8"
            parts.append(f'<path d="{line}" stroke="#333"/>')
        said = "" if error is None else f"{error:+.1f}%"
        parts.append(f'<text x="{left + width + 12}" y="{y + 20}" fill="{colour}">{said}</text>')
    return "\n".join([*parts, "</svg>", ""])
