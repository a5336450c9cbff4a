"""report.html: one self-contained page with the verdict, timelines, fault marks and the requests that failed."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from analysis.rundir import RunDir, RunInfo, write_atomic
from analysis.svg import COLOURS, Band, Series, heat, lanes, lines
from analysis.timeline import Timeline
from analysis.verdict import Verdict

_STYLE = """
:root{--ink:#1b1f24;--soft:#5b6570;--line:#d8dde3;--paper:#fff;--pass:#2c7a43;--fail:#b3261e;--open:#9a6700}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa5b1;--line:#343b43;--paper:#14181c;--pass:#6bc28a;
--fail:#ff8a80;--open:#e3b341}}
body{font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1000px;margin:24px auto;
padding:0 16px}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:28px 0 8px}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:4px 8px;border-bottom:1px solid var(--line);
vertical-align:top}th{color:var(--soft);font-weight:600}td.n,th.n{text-align:right}
.pass{color:var(--pass)}.fail{color:var(--fail);font-weight:600}.inconclusive{color:var(--open)}.soft{color:var(--soft)}
td .soft{white-space:pre-line}.verdict{font-size:18px}
svg{width:100%;height:auto;font:11px system-ui,sans-serif}svg text{fill:var(--soft)}
.grid{stroke:var(--line);stroke-width:.6}.axis{stroke:var(--soft)}.fault{fill:#c2571a;fill-opacity:.16}.heat{fill:#2f6fb7}.lane{fill:#c2571a}
code{font-size:13px}pre{white-space:pre-wrap;border:1px solid var(--line);padding:8px}details>summary{cursor:pointer}
"""


def build_timeline(directory: RunDir) -> Timeline:
    """One pass over the events of a run. Raises BadInput as the reader does."""
    timeline = Timeline()
    for event in directory.read_events():
        timeline.feed(event)
    return timeline


def fault_bands(timeline: Timeline) -> list[Band]:
    """The faults of a run as spans of its time axis."""
    end_s = timeline.end_ns / 1e9
    return [
        Band(mark.start_s, end_s if mark.end_s is None else mark.end_s, f"{mark.name} on {mark.target}")
        for mark in timeline.faults.values()
    ]


def write_report(directory: RunDir, verdict: Verdict, timeline: Timeline) -> None:
    """Write ``report.html`` whole. Raises BadInput when the folder cannot be written."""
    write_atomic(directory.report, render(directory.info(), verdict, timeline))


def render(info: RunInfo, verdict: Verdict, timeline: Timeline) -> str:
    """The page as text. Its size does not depend on the length of the run."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<title>{escape(info.scenario)}: {verdict.result}</title><style>{_STYLE}</style></head><body>",
        *_head(info, verdict, timeline),
        *_checks(verdict),
        *_charts(timeline),
        *_faults(timeline),
        *_failures(timeline),
        *_moments(timeline),
        f"<h2>Scenario</h2><details><summary>SHA-256 <code>{info.scenario_sha256}</code></summary>",
        f"<pre>{escape(info.scenario_text)}</pre></details></body></html>\n",
    ]
    return "".join(parts)


def _head(info: RunInfo, verdict: Verdict, timeline: Timeline) -> Iterable[str]:
    yield f"<h1>{escape(info.scenario)}</h1>"
    yield f"<p class='verdict'>Verdict: <span class='{verdict.result}'>{verdict.result}</span></p>"
    if verdict.note:
        yield f"<p class='inconclusive'>{escape(verdict.note)}</p>"
    answered = sum(one.answered for one in timeline.bins)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(info.versions.items()))
    yield (
        f"<p>{timeline.requests:,} requests sent, {answered:,} answered, {timeline.failed:,} failed in "
        f"{timeline.end_ns / 1e9:,.3f} s; {timeline.events:,} events. "
        f"<span class='soft'>Backend {info.backend}, seed {info.seed}, {escape(versions)}.</span></p>"
    )
    if info.repeat:
        yield f"<p class='soft'>Repeat: <code>{escape(info.repeat)}</code></p>"


def _columns(*names: str) -> str:
    """The head of a table; ``#`` before a name: the column holds numbers."""
    cells = (f"<th class='n'>{name[1:]}" if name.startswith("#") else f"<th>{name}" for name in names)
    return f"<tr>{''.join(cells)}</tr>"


def _checks(verdict: Verdict) -> Iterable[str]:
    yield "<h2>Checks</h2><table>"
    yield _columns("Check", "Result", "Observed", "Expected", "#Judged", "Witness (seq)")
    for row in verdict.checks:
        if not row.applicable:
            continue
        explain = f"<br><span class='soft'>{escape(row.explain)}</span>" if row.explain else ""
        witness = ", ".join(str(seq) for seq in row.witness)
        style = row.result if row.standing == row.result else "soft"
        group = "" if row.group == "invariant" else f" <span class='soft'>({row.group})</span>"
        yield (
            f"<tr><td>{escape(row.name)}{group}<td class='{style}'>{row.standing}<td>{escape(row.observed)}{explain}"
            f"<td>{escape(row.expected)}<td class='n'>{row.judged:,}<td>{witness}</tr>"
        )
    yield "</table>"
    absent = [row.name for row in verdict.checks if not row.applicable]
    if absent:
        yield f"<p class='soft'>Not applicable, for the run has no such events: {escape(', '.join(absent))}.</p>"


def _charts(timeline: Timeline) -> Iterable[str]:
    bands = fault_bands(timeline)
    times, end_s = timeline.times_s(), timeline.end_ns / 1e9
    if bands:
        yield "<h2>When which fault was on</h2>"
        yield lanes("faults", bands, end_s)
    if not timeline.requests:
        return
    yield "<h2>Requests per second <span class='soft'>(faults shaded)</span></h2>"
    # Answered green, failed red; the shading of faults is orange.
    colours = {"sent": COLOURS[0], "answered": COLOURS[2], "failed": COLOURS[4]}
    rates = [Series(name, timeline.rates(name), colour) for name, colour in colours.items()]
    yield lines("requests per second", times, rates, bands, end_s)
    yield "<h2>Latency of answers, s</h2>"
    latency = [Series(f"p{percent}", timeline.latency_s(percent)) for percent in (50, 99)]
    yield lines("latency", times, latency, bands, end_s)
    yield "<h2>In flight at all replicas</h2>"
    yield lines("in flight", times, [Series("in flight", timeline.in_flight())], bands, end_s)
    if timeline.replicas:
        yield "<h2>In flight per replica</h2>"
        rows = [(name, timeline.in_flight(name)) for name in sorted(timeline.replicas)]
        yield heat("in flight per replica", rows, bands, timeline.width_ns / 1e9, end_s)
        if timeline.hidden_replicas:
            yield f"<p class='soft'>The first {len(timeline.replicas)} replicas; {timeline.hidden_replicas:,} more.</p>"


def _faults(timeline: Timeline) -> Iterable[str]:
    if not timeline.faults:
        return
    yield "<h2>Faults</h2><table>"
    yield _columns("#Fault", "Name", "Target", "#From", "#To", "#Hits", "Met what it must")
    for mark in timeline.faults.values():
        until = "not healed" if mark.end_s is None else f"{mark.end_s:.3f} s"
        met = {True: "yes", False: "no", None: "not known"}[mark.satisfied]
        yield (
            f"<tr><td class='n'>{mark.fault}<td>{escape(mark.name)}<td>{escape(mark.target)}<td class='n'>"
            f"{mark.start_s:.3f} s<td class='n'>{until}<td class='n'>{mark.hits:,}<td>{met}</tr>"
        )
    yield "</table>"


def _failures(timeline: Timeline) -> Iterable[str]:
    if not timeline.failed:
        return
    yield "<h2>Requests that were not answered</h2><table>"
    yield _columns("#Seq", "Request", "#Sent", "#Ended", "Outcome", "#Status", "Error", "Replica", "#Attempts")
    for one in timeline.failures:
        yield (
            f"<tr><td class='n'>{one.seq}<td>{escape(one.request)}<td class='n'>{one.sent_s:.3f} s<td class='n'>"
            f"{one.done_s:.3f} s<td>{escape(one.outcome)}<td class='n'>{one.status}<td>{escape(one.error)}"
            f"<td>{escape(one.replica)}<td class='n'>{one.attempts}</tr>"
        )
    yield "</table>"
    if timeline.failed > len(timeline.failures):
        yield f"<p class='soft'>The first {len(timeline.failures)} of {timeline.failed:,}.</p>"


def _moments(timeline: Timeline) -> Iterable[str]:
    shown = [moment for moment in timeline.moments if moment.what != "ready"][:100]
    if not shown:
        return
    yield "<h2>Processes</h2><table>"
    yield _columns("#Seq", "#Time", "Process", "What")
    for moment in shown:
        yield (
            f"<tr><td class='n'>{moment.seq}<td class='n'>{moment.t_s:.3f} s<td>{escape(moment.process)}"
            f"<td>{escape(moment.what)}</tr>"
        )
    yield "</table>"
