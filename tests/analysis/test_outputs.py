"""Report, trace, explanation, tables, plots and the command line, on small runs of every result."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections import Counter

import pytest

from analysis.outputs import complete_run, require_unchanged
from analysis.report import render
from analysis.rundir import RunDir, verify_manifest
from analysis.schema import schema_page
from analysis.tables import TABLES, frame
from analysis.timeline import BINS, Timeline
from analysis.trace import TraceWriter
from analysis.verdict import Judge, judge_run
from analysis.writer import JsonlWriter
from protocol.evidence import KINDS
from tests.analysis.history import History
from tests.analysis.runs import cli, faulty
from tests.analysis.test_evidence_files import write_run

ROOT = pathlib.Path(__file__).resolve().parents[2]


# --- everything together
def test_a_completed_run_is_whole_and_verified(passing: RunDir) -> None:
    assert sorted(path.name for path in passing.path.iterdir()) == [
        "events.jsonl",
        "manifest.json",
        "report.html",
        "run.json",
        "trace.json",
        "verdict.json",
    ]
    assert require_unchanged(passing) == ""
    assert judge_run(passing).result == "pass"


def test_the_verdict_is_bytewise_the_same_offline(passing: RunDir) -> None:
    stored = passing.verdict.read_bytes()
    complete_run(passing)
    assert passing.verdict.read_bytes() == stored


# --- verdict
@pytest.mark.parametrize(("healthy", "code", "word"), [(True, 0, "pass"), (False, 1, "fail")])
def test_verdict_command(tmp_path: pathlib.Path, healthy: bool, code: int, word: str) -> None:
    directory = write_run(tmp_path / "run", faulty(healthy).events)
    complete_run(directory)
    result = cli("verdict", directory.path)
    assert result.exit_code == code
    assert result.stdout.splitlines()[-1] == f"test: {word}"
    assert "differs" not in result.stderr


def test_verdict_command_inconclusive_and_json(tmp_path: pathlib.Path) -> None:
    directory = write_run(tmp_path / "run", faulty().events, required=("admin_once",))
    complete_run(directory)
    result = cli("verdict", directory.path, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == json.loads(directory.verdict.read_text())


def test_a_stored_verdict_that_differs_is_told(tmp_path: pathlib.Path) -> None:
    directory = write_run(tmp_path / "run", faulty(healthy=False).events)
    raw = json.loads(directory.verdict.read_text())
    raw["result"] = "pass"
    raw["checks"][1]["result"] = "pass"
    directory.verdict.write_text(json.dumps(raw))
    directory.manifest.unlink()
    result = cli("verdict", directory.path)
    assert result.exit_code == 1
    assert "result: stored 'pass', now 'fail'" in result.stderr
    assert "invariant nothing_lost: stored pass, now fail" in result.stderr
    assert "did not end by itself" in result.stderr


def test_a_run_without_its_manifest_does_not_pass(passing: RunDir) -> None:
    assert cli("verdict", passing.path).exit_code == 0
    passing.manifest.unlink()
    result = cli("verdict", passing.path)
    assert result.exit_code == 3 and "its bytes cannot be verified" in result.stderr
    stored = json.loads(cli("verdict", passing.path, "--json").stdout)
    assert stored["result"] == "inconclusive" and "its bytes cannot be verified" in stored["note"]


@pytest.mark.parametrize("stored", [b"\xff", b"{", b"[" * 100_000, b'{"events":' + b"9" * 5000 + b"}", None])
def test_a_stored_verdict_that_is_none_is_refused_before_anything_is_printed(
    passing: RunDir, stored: bytes | None
) -> None:
    passing.manifest.unlink()
    if stored is None:
        passing.verdict.unlink()
        passing.verdict.mkdir()
    else:
        passing.verdict.write_bytes(stored)
    result = cli("verdict", passing.path)
    assert (result.exit_code, result.stdout) == (2, "") and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(f"error: {passing.verdict}: ")


def test_evidence_that_is_no_text_is_shown_with_escapes(passing: RunDir) -> None:
    passing.manifest.unlink()
    passing.events.write_text(passing.events.read_text().replace('"e0', '"\\ud800'))
    for command in ("verdict", "report", "trace", "table"):
        assert isinstance(cli(command, passing.path).exception, SystemExit | type(None))
    assert cli("explain", passing.path, "--check", "nothing_lost").exit_code == 0
    assert cli("table", passing.path, "--csv", passing.path / "rows.csv").exit_code == 0
    assert "\\ud800" in passing.report.read_text()


def test_preregistered_criteria_that_are_none_name_their_file(passing: RunDir) -> None:
    passing.manifest.unlink()
    raw = json.loads(passing.run.read_text())
    raw["preregistered"]["acceptance"] = [{"answered": {}}]
    passing.run.write_text(json.dumps(raw))
    result = cli("verdict", passing.path)
    assert result.exit_code == 2
    assert f"error: {passing.run}: key 'preregistered': acceptance criterion 'answered' is unknown" in result.stderr


def test_cut_evidence_is_judged_and_told(passing: RunDir) -> None:
    passing.manifest.unlink()
    passing.verdict.unlink()
    passing.events.write_bytes(passing.events.read_bytes()[:-5])
    result = cli("verdict", passing.path)
    assert result.exit_code == 3
    assert "is cut short after" in result.stdout
    assert "nothing to compare with" in result.stderr


# --- bad input: one message, code 2, no traceback
def test_bad_input(passing: RunDir, tmp_path: pathlib.Path) -> None:
    for arguments, said in (
        (("verdict", tmp_path / "absent"), "no run directory (run.json is missing)"),
        (("table", passing.path, "--kind", "engine.ready"), "--kind goes with the table 'events'"),
        (
            ("table", passing.path, "--of", "events", "--kind", "x"),
            "event kind 'x' is unknown; docs/evidence.md lists them all",
        ),
        (("explain", passing.path, "--check", "x"), "--check 'x': no such check; known are run_finished"),
        (("explain", passing.path, "--check", "no_leak"), "no such check; did you mean 'no_leaks'? known are"),
        (
            ("explain", passing.path, "--check", "no_leaks", "--svg", tmp_path / "no" / "x.svg"),
            "cannot be written",
        ),
        (("table", passing.path, "--csv", tmp_path / "no" / "x.csv"), "cannot be written"),
        (("schema", "--out", tmp_path / "no" / "x.md"), "cannot be written"),
    ):
        result = cli(*arguments)
        assert (result.exit_code, type(result.exception)) == (2, SystemExit), result.output
        assert result.stderr.startswith("error: ") and said in result.stderr
    assert cli("verdict").exit_code == 2
    assert cli("table", passing.path, "--of", "x").exit_code == 2


def test_a_changed_byte_is_refused_by_every_command(passing: RunDir) -> None:
    data = passing.events.read_bytes()
    passing.events.write_bytes(data.replace(b'"running":0', b'"running":1', 1))
    for command in ("verdict", "explain", "report", "trace", "table"):
        result = cli(command, passing.path)
        assert result.exit_code == 2
        assert f"error: {passing.events}: changed" in result.stderr


def test_the_module_runs_without_pandas_or_matplotlib(passing: RunDir) -> None:
    script = (
        "import sys\n"
        "sys.modules['pandas'] = sys.modules['matplotlib'] = None\n"
        "from analysis.__main__ import main\n"
        f"main(['verdict', {str(passing.path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "test: pass"), done.stderr


# --- report
def test_the_report_stands_alone_and_tells_the_failures(failing: RunDir) -> None:
    page = failing.report.read_text()
    assert "Verdict: <span class='fail'>fail</span>" in page
    assert not re.search(r"(src|href)=|<script|@import|url\(", page)
    assert "r&lt;3&gt;" in page and "r<3>" not in page
    assert "sigkill on e0" in page and "class='fault'" in page.replace('"', "'")
    assert "<td>ConnectionLost" in page


def test_the_report_of_a_long_run_stays_small() -> None:
    timeline = Timeline()
    h = History(clock_error_ms=-1)
    template = {kind: h(kind) for kind in ("request.sent", "engine.accepted", "engine.finished", "request.done")}
    for i in range(20_000):
        for step, (kind, event) in enumerate(template.items()):
            data = {**event.data, "request": f"r{i}", "outcome": "done" if i % 10 else "unknown"}
            data = {key: data[key] for key in (*KINDS[kind].fields,)} if kind == "request.done" else data
            timeline.feed(dataclasses.replace(event, t_ns=i * 10**8 + step * 10**7, actor=f"e{i % 100}", data=data))
    assert len(timeline.bins) <= BINS
    assert sum(one.sent for one in timeline.bins) == 20_000
    assert sum(one.answered for one in timeline.bins) == 18_000
    assert (timeline.failed, len(timeline.failures)) == (2_000, 200)
    assert (len(timeline.replicas), timeline.hidden_replicas) == (32, 68)
    assert timeline.in_flight()[-1] == 1
    page = render_of(timeline)
    assert len(page) < 400_000


def render_of(timeline: Timeline) -> str:
    from analysis.rundir import RunInfo
    from analysis.verdict import judge

    info = RunInfo(
        scenario="s", scenario_text="", scenario_sha256="", seed=1, backend="sim", versions={}, machine={"python": "3"}
    )
    return render(info, judge([]), timeline)


def test_in_flight_carries_what_was_left_and_not_the_peak() -> None:
    h = History()
    for request in ("r1", "r2", "r3"):
        h.accepted(request)
    for request in ("r1", "r2"):
        h.finished(request)
    h("run.healed", ms=9)
    h.accepted("r4", ms=12)
    timeline = Timeline()
    for event in h.events:
        timeline.feed(event)
    assert timeline.width_ns == 10**6
    assert timeline.in_flight("e0") == [0, 1, 2, 3, 2, 1, 1, 1, 1, 1, 1, 1, 2]
    timeline.at(700 * 10**6)
    assert timeline.width_ns == 2 * 10**6
    assert timeline.in_flight("e0")[:7] == [1, 3, 2, 1, 1, 1, 2]


def test_a_death_empties_the_replica() -> None:
    timeline = Timeline()
    for event in faulty().events:
        timeline.feed(event)
    died = next(event for event in faulty().events if event.kind == "actor.died")
    assert timeline.in_flight("e0")[died.t_ns // 10**6 + 1] == 0


def test_the_kill_of_an_actor_is_shaded_until_a_later_incarnation_is_there() -> None:
    for replaced in (False, True):
        h = History()
        h("actor.spawned", at="judge/1", role="actor", node="n0")
        h("actor.spawned", at="e0/1", role="engine", node="n0")
        for fault, target in ((1, "judge"), (2, "e0")):
            h("fault.injected", fault=fault, name="sigkill", target=target)
            h("fault.healed", fault=fault, name="sigkill", target=target, hits=0)
        if replaced:
            h("actor.spawned", at="judge/2", role="actor", node="n0", ms=2000)
        timeline = Timeline()
        for event in h.events:
            timeline.feed(event)
        assert timeline.faults[1].end_s == (2.0 if replaced else None)
        assert timeline.faults[2].end_s == 0.006
        assert timeline.faults[1].satisfied is True


# --- trace
def test_the_trace_is_well_formed(failing: RunDir) -> None:
    trace = json.loads(failing.trace.read_text())
    records = trace["traceEvents"]
    assert {record["ph"] for record in records} == {"M", "X", "b", "e", "i", "C"}
    begun = Counter((r["cat"], r["id"], r["name"]) for r in records if r["ph"] == "b")
    ended = Counter((r["cat"], r["id"], r["name"]) for r in records if r["ph"] == "e")
    assert begun == ended
    assert {("request", "r1", "r1"), ("run", "r2", "e0/1"), ("fault", "1", "sigkill on e0")} <= set(begun)
    threads = {r["args"]["name"]: r["tid"] for r in records if r["ph"] == "M" and r["name"] == "thread_name"}
    assert len(set(threads.values())) == len(threads) and {"e0", "e1"} <= set(threads)
    lives = [(r["name"], r["ts"], r["dur"]) for r in records if r["ph"] == "X"]
    assert [name for name, _, _ in lives] == ["e0/1", "e1/1", "e0/2"]
    assert all(duration >= 0 for _, _, duration in lives)
    assert all(r["pid"] in (1, 2, 3) and "tid" in r for r in records)


def test_a_trace_draws_all_failures_and_no_more_requests_than_asked(tmp_path: pathlib.Path) -> None:
    with TraceWriter(RunDir(tmp_path), max_requests=1) as tracer:
        for event in faulty().events:
            tracer.feed(event)
    records = json.loads(RunDir(tmp_path).trace.read_text())["traceEvents"]
    assert [r["id"] for r in records if r["ph"] == "b" and r["cat"] == "request"] == ["r1", "r2"]


def test_live_outputs_equal_those_made_from_the_file(failing: RunDir, tmp_path: pathlib.Path) -> None:
    events = faulty(healthy=False).events
    live = write_run(tmp_path / "live", [], faults=1)
    live.events.unlink()
    timeline, judge = Timeline(), Judge(live.info().preregistered)
    with JsonlWriter(live.events) as writer, TraceWriter(live) as tracer:
        for event in events:
            for sink in (writer.record, judge.feed, timeline.feed, tracer.feed):
                sink(event)
    complete_run(live, judge.verdict(), {"events.jsonl": writer.sha256}, timeline)
    assert require_unchanged(live) == ""
    for name in ("events.jsonl", "verdict.json", "report.html", "trace.json"):
        assert (live.path / name).read_bytes() == (failing.path / name).read_bytes(), name


def test_a_trace_that_fails_halfway_leaves_nothing(passing: RunDir) -> None:
    before = passing.trace.read_bytes()
    with pytest.raises(KeyError), TraceWriter(passing) as tracer:
        tracer.feed(faulty().events[1])
        raise KeyError
    assert passing.trace.read_bytes() == before
    assert not list(passing.path.glob(".*"))


# --- report and trace commands keep the manifest true
def test_report_and_trace_commands_renew_the_manifest(passing: RunDir) -> None:
    before = passing.report.read_text(), passing.trace.read_text()
    assert cli("report", passing.path).exit_code == 0
    assert cli("trace", passing.path).exit_code == 0
    assert (passing.report.read_text(), passing.trace.read_text()) == before
    assert verify_manifest(passing) == []


# --- tables
def test_tables(passing: RunDir, tmp_path: pathlib.Path) -> None:
    frames = {name: frame(passing, name) for name in TABLES}
    assert list(frames["requests"]["request"]) == ["r1", "r2", "r4"]
    assert list(frames["requests"]["outcome"]) == ["done", "unknown", "done"]
    assert frames["requests"]["latency_s"].iloc[0] == pytest.approx(0.003)
    assert frames["faults"].to_dict("records")[0]["hits"] == 1
    assert frames["versions"]["tokens"].sum() == 16
    assert len(frames["events"]) == len(faulty().events)
    assert set(frame(passing, "events", "engine.ready")["actor"]) == {"e0", "e1"}
    result = cli("table", passing.path, "--rows", 2)
    assert result.exit_code == 0 and "the first 2 rows" in result.stdout
    assert cli("table", passing.path, "--csv", tmp_path / "t.csv").stdout == f"3 rows: {tmp_path / 't.csv'}\n"
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[0].startswith("request,prompt_tokens,")
    result = cli("table", passing.path, "--of", "events", "--kind", "train.step")
    assert (result.exit_code, result.stdout) == (0, "no events of kind train.step in this run\n")


# --- plots
def test_plots_shade_the_faults(passing: RunDir) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from analysis.plots import continuity, longest_gap_s, scale_timeline

    for draw, axes in ((scale_timeline, 3), (continuity, 2)):
        figure = draw(passing)
        assert len(figure.axes) == axes
        assert all(axis.patches for axis in figure.axes)
        plt.close(figure)
    assert longest_gap_s(passing) == pytest.approx(0.017)


def test_the_legend_of_continuity_hides_no_answer(passing: RunDir) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from analysis.plots import continuity

    figure = continuity(passing)
    figure.canvas.draw()
    answers = figure.axes[0]
    legend = answers.get_legend()
    assert legend is not None and not answers.get_window_extent().overlaps(legend.get_window_extent())
    low, high = answers.get_ylim()
    assert low < -1 and high > max(answers.get_yticks())  # nor is one cut by the frame
    plt.close(figure)


def test_axes_have_round_figures() -> None:
    from analysis.svg import ticks

    assert ticks(194.4, 10) == [20.0 * number for number in range(10)]
    assert ticks(23.253, 10) == [0, 5, 10, 15, 20]
    assert ticks(807, 5) == [0, 200, 400, 600, 800]
    assert ticks(1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    for end in (1e-9, 3e-4, 0.3, 1.0, 9.99999, 10.0, 1000.0, 607.2, 1e7, 1e23):
        for most in (5, 10):
            found = ticks(end, most)
            assert found[0] == 0 and 3 <= len(found) <= most + 1 and found[-1] <= end * (1 + 1e-9)


# --- schema
def test_the_schema_page_is_current_and_complete() -> None:
    page = schema_page()
    assert all(f"### `{name}`" in page for name in KINDS if not name.startswith("test."))
    assert (ROOT / "docs" / "evidence.md").read_text() == page, "run python -m analysis schema"


def test_schema_command(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "evidence.md"
    assert cli("schema", "--check", "--out", out).exit_code == 1
    assert cli("schema", "--out", out).exit_code == 0
    assert cli("schema", "--check", "--out", out).exit_code == 0
    out.write_bytes(b"\xff")
    assert cli("schema", "--check", "--out", out).exit_code == 1


def test_calibrate_command_says_where_the_data_is() -> None:
    result = cli("calibrate")
    assert result.exit_code == 2 and "neither run directories nor --data given" in result.stderr
