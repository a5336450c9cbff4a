"""What the monitor shows, and how: rows of figures, conditions of both directions, the latest operations.

Source: scaling.md 6.7. Texts come from elsewhere, over HTTP even: they are shown as text, never read as markup or
terminal codes.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

UNKNOWN: Final = "unknown"
SHOWN: Final = 10
"""Rows of the history."""
WIDTH: Final = 118
_GOOD = ("ACTIVE", "COMPLETED", "PARTIAL", "SUCCESS")
_BAD = ("FAILED", "CANCELLED", "REJECTED", "CONFLICT", "ERROR")
_NEUTRAL = ("NOOP",)
_MARKS = {"good": ("✔", "green"), "bad": ("✘", "red"), "neutral": ("–", "dim"), "open": ("…", "yellow")}


@dataclasses.dataclass(frozen=True, slots=True)
class ConditionRow:
    """One condition. ``met``: None when nobody knows."""

    name: str
    value: float | None = None
    threshold: float | None = None
    met: bool | None = None
    held_s: float | None = None
    """Without a break, so far; None: it does not hold, or nobody knows."""
    required_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryRow:
    """One operation or request. ``at_s``: when it was asked for, of the clock that the source has; for the order."""

    name: str
    action: str
    status: str
    at_s: float | None
    when: str = ""
    from_engines: int | None = None
    to_engines: int | None = None
    cleanup: str = UNKNOWN
    """Whether something is left of it: true, false or unknown."""
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Board:
    """One look at one service. ``figures``: name to text, or None where it is not known."""

    source: str
    service: str
    when: str
    figures: Mapping[str, str | None]
    scale_out: tuple[ConditionRow, ...]
    scale_in: tuple[ConditionRow, ...]
    history: tuple[HistoryRow, ...]
    note: str = ""
    over: bool = False
    """Nothing will change any more."""


FIGURES: Final = (
    "engines", "ready", "min / max", "in flight", "queue", "running", "token usage", "throughput",
    "throughput variance", "queue time p95", "ttft p95", "itl p95", "coverage", "unknown engines",
    "evaluation interval", "cooldown out / in", "thresholds out", "thresholds in",
    "last decision", "last action", "operations in all",
)  # fmt: skip
"""In the order in which they are shown."""

OUT_NAMES: Final = ("token_usage_high", "queue_backlog", "queue_latency_high", "ttft_high")
IN_NAMES: Final = ("token_usage_low", "no_queue", "throughput_stable")


def nothing_known(source: str, service: str, when: str, note: str, history: tuple[HistoryRow, ...] = ()) -> Board:
    """A board of a service of which nothing is known."""
    return Board(
        source, service, when, {},
        tuple(map(ConditionRow, OUT_NAMES)), tuple(map(ConditionRow, IN_NAMES)), history, note,
    )  # fmt: skip


def kind_of(status: str) -> str:
    """``good``, ``bad``, ``neutral`` or ``open``."""
    for kind, names in (("good", _GOOD), ("bad", _BAD), ("neutral", _NEUTRAL)):
        if status.upper() in names:
            return kind
    return "open"


def latest(rows: Iterable[HistoryRow]) -> tuple[HistoryRow, ...]:
    """The newest rows, one for each operation: of two with the same name, the first given stays."""
    once = {row.name: row for row in reversed(tuple(rows))}
    return tuple(sorted(once.values(), key=lambda row: -(row.at_s if row.at_s is not None else -1e18)))[:SHOWN]


# --- texts ---


def number(value: Any, unit: str = "", digits: int = 2) -> str | None:
    """A number as text, whole where it is; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        return None  # no number, or none that anything here could be
    shown = f"{value:,.0f}" if value == int(value) else f"{value:,.{digits}f}"
    return f"{shown}{unit}"


def share(value: Any) -> str | None:
    """A part of a whole in percent."""
    text = None if number(value) is None else number(value * 100, "", 1)
    return None if text is None else f"{text}%"


def pair(one: Any, other: Any, unit: str = "") -> str | None:
    """Two numbers; None when neither is known."""
    texts = (number(one, unit), number(other, unit))
    return None if texts == (None, None) else " / ".join(text or UNKNOWN for text in texts)


def clean(text: Any, longest: int = 90) -> str:
    """Text of others without what a terminal would act on."""
    shown = "".join(one if one.isprintable() else " " for one in str(text))
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


# --- the picture ---


def render(board: Board) -> RenderableType:
    """The board for a terminal."""
    title = Text.assemble(
        (clean(board.service), "bold"), "  ", clean(board.source, 60), "  ", (clean(board.when, 40), "cyan")
    )  # fmt: skip
    parts: list[RenderableType] = [title]
    if board.note:
        parts.append(Text(clean(board.note, 200), style="yellow"))
    parts.append(Panel(_figures(board.figures), title="status", title_align="left"))
    both = Table.grid(expand=True, padding=(0, 1))
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(
        Panel(_conditions(board.scale_out), title="scale-out: any of", title_align="left"),
        Panel(_conditions(board.scale_in), title="scale-in: all of", title_align="left"),
    )
    parts += [both, Panel(_history(board.history), title=f"the latest {SHOWN}", title_align="left")]
    return Group(*parts)


def text_of(board: Board) -> str:
    """The board as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    console.print(render(board))
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO of the line above
    return "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"


def svg_of(board: Board) -> str:
    """The board as an SVG picture; the same board gives the same picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(board))
    return console.export_svg(title=clean(f"{board.service}, {board.source}", 100))


def _figures(figures: Mapping[str, str | None]) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
    half = -(-len(FIGURES) // 2)
    for left, right in zip(FIGURES[:half], (*FIGURES[half:], ""), strict=False):
        table.add_row(left, _known(figures.get(left)), right, _known(figures.get(right)) if right else "")
    return table


def _known(text: str | None) -> Text:
    return Text(UNKNOWN, style="dim italic") if text is None else Text(clean(text, 120))


def _conditions(rows: Iterable[ConditionRow]) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(4):
        table.add_column()
    for row in rows:
        mark = {True: Text("✔", style="green"), False: Text("✘", style="red"), None: Text("?", style="dim")}[row.met]
        held = "" if row.held_s is None else number(row.held_s, " s", 1) or ""
        needed = "" if row.required_s is None else f" of {number(row.required_s, ' s', 1)}"
        table.add_row(
            mark, Text(clean(row.name, 24)),
            Text(f"{number(row.value) or UNKNOWN} : {number(row.threshold) or UNKNOWN}"),
            Text(f"held {held}{needed}" if held else "", style="dim"),
        )  # fmt: skip
    return table


def _short(name: str, longest: int = 22) -> str:
    """A name with its end, by which ids differ."""
    whole = clean(name, 10_000)
    return whole if len(whole) <= longest else f"{whole[: longest - 9]}…{whole[-8:]}"


def _history(rows: Iterable[HistoryRow]) -> Table:
    table = Table(box=None, expand=True, pad_edge=False)
    for name in ("", "operation", "action", "engines", "status", "left over", "asked at", "why"):
        table.add_column(name, overflow="fold" if name == "why" else "ellipsis", no_wrap=name != "why")
    for row in rows:
        mark, style = _MARKS[kind_of(row.status)]
        sides = (row.from_engines, row.to_engines)
        engines = "" if sides == (None, None) else " → ".join("?" if side is None else str(side) for side in sides)
        table.add_row(
            Text(mark, style=style), Text(_short(row.name)), Text(clean(row.action, 12)), engines,
            Text(clean(row.status, 16)), Text(clean(row.cleanup, 8)), Text(clean(row.when, 12)),
            Text(clean(row.reason, 80), style="dim"),
        )  # fmt: skip
    return table
