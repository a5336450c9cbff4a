"""Draws an explanation: a message sequence chart and the waits, for a terminal or as SVG."""

from __future__ import annotations

from html import escape

from analysis.explain import Explanation, Step, Wait

_COLUMN, _WIDEST_COLUMN = 14, 20
_ROW = 22
_HEAD = 46


def as_text(explanation: Explanation) -> str:
    """Plain text: a column a participant, an arrow where a message came from another, ``*`` at the witnesses."""
    check = explanation.check
    lines = [f"{check.title}: {check.result}", f"  observed: {check.observed}", f"  expected: {check.expected}"]
    if check.explain:
        lines.append(f"  why: {check.explain}")
    if explanation.steps:
        lines += ["", "  What happened (* marks the witnesses)", ""]
        lines += _chart(explanation)
    if explanation.left_out:
        lines.append(f"  ... and {explanation.left_out} more events of the same requests, calls and faults")
    lines += [
        "",
        "  Who waits for whom" + (" where the evidence ends" if explanation.at_the_end else " at the last witness"),
    ]
    lines += [_wait_line(wait) for wait in explanation.waits] or ["    nobody"]
    if explanation.cycle:
        lines.append(f"    a ring: {' -> '.join((*explanation.cycle, explanation.cycle[0]))}")
    return "\n".join(lines) + "\n"


def _wait_line(wait: Wait) -> str:
    since = f" since {wait.since_s:.6f} s" if wait.since_s is not None else ""
    return f"    {wait.waiter} waits for {wait.waits_for}, from {wait.should_wake}{since}"


def _chart(explanation: Explanation) -> list[str]:
    names = explanation.participants
    width = min(max([_COLUMN, *(len(name) + 2 for name in names)]), _WIDEST_COLUMN)
    column = {name: index * width for index, name in enumerate(names)}
    head = "".join(name[: width - 2].ljust(width) for name in names)
    lines = [f"  {'seq':>9} {'time, s':>13}   {head}"]
    for step in explanation.steps:
        mark = "*" if step.witness else " "
        event = step.event
        lines.append(f"  {event.seq:>9} {event.t_s:>13.6f} {mark} {_lane(step, column, width)} {step.label}")
    return lines


def _lane(step: Step, column: dict[str, int], width: int) -> str:
    cells = [" "] * (width * len(column))
    for position in column.values():
        cells[position] = "│"
    if step.source is not None and step.target is not None:
        source, target = column[step.source], column[step.target]
        low, high = min(source, target), max(source, target)
        for position in range(low + 1, high):
            cells[position] = "─"
        cells[source] = "├" if source < target else "┤"
        cells[target + (-1 if source < target else 1)] = "▶" if source < target else "◀"
    cells[column[step.event.actor]] = "●"
    return "".join(cells)


def as_svg(explanations: list[Explanation]) -> str:
    """All explanations below one another in one self-contained SVG."""
    width = max([640, *(_width(one) for one in explanations)])
    parts: list[str] = []
    y = 10
    for one in explanations:
        y = _draw(one, parts, y) + 30
    style = (
        "text{font:12px system-ui,sans-serif;fill:#1b1f24}.soft{fill:#5b6570}.name{font-weight:600}"
        ".life{stroke:#b5bdc6;stroke-dasharray:3 3}.arrow{stroke:#2f6fb7;stroke-width:1.3}.dot{fill:#2f6fb7}"
        ".witness{fill:#b3261e}.title{font-size:15px;font-weight:600}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}">'
        f"<style>{style}</style><defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='#2f6fb7'/></marker></defs>"
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _width(one: Explanation) -> int:
    longest = max((len(step.label) for step in one.steps), default=0)
    return 150 + 120 * len(one.participants) + 7 * longest + 40


def _text(x: float, y: float, content: str, css: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{css}">{escape(content)}</text>'


def _draw(one: Explanation, parts: list[str], top: int) -> int:
    check = one.check
    parts.append(_text(12, top + 16, f"{check.title}: {check.result}", "title"))
    parts.append(_text(12, top + 34, check.explain or check.observed, "soft"))
    y = top + _HEAD + 20
    lane = {name: 170 + 120 * index for index, name in enumerate(one.participants)}
    bottom = y + _ROW * len(one.steps)
    if one.steps:
        for name, x in lane.items():
            parts.append(_text(x - 30, y - 8, name[:18], "name"))
            parts.append(f'<line class="life" x1="{x}" y1="{y}" x2="{x}" y2="{bottom}"/>')
    labels = 170 + 120 * len(lane) - 60
    for index, step in enumerate(one.steps):
        row = y + _ROW * index + 14
        at = lane[step.event.actor]
        css = "witness" if step.witness else "soft"
        parts.append(_text(12, row + 4, f"{step.event.seq}  {step.event.t_s:.6f} s", css))
        if step.source is not None and step.target is not None:
            begin, end = lane[step.source], lane[step.target]
            end += -5 if begin < end else 5
            parts.append(f'<line class="arrow" x1="{begin}" y1="{row}" x2="{end}" y2="{row}" marker-end="url(#head)"/>')
        parts.append(f'<circle class="{"witness" if step.witness else "dot"}" cx="{at}" cy="{row}" r="4"/>')
        parts.append(_text(labels, row + 4, step.label, css if step.witness else ""))
    y = bottom + 24
    when = "where the evidence ends" if one.at_the_end else "at the last witness"
    parts.append(_text(12, y, f"Who waits for whom {when}", "name"))
    for line in [_wait_line(wait).strip() for wait in one.waits] or ["nobody"]:
        y += 18
        parts.append(_text(24, y, line))
    if one.cycle:
        y += 18
        parts.append(_text(24, y, f"a ring: {' -> '.join((*one.cycle, one.cycle[0]))}", "witness"))
    return y
