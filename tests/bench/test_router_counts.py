"""The counts of the comparison with sglang-router, on records made by hand, and what it says without the router."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import pytest
from click.testing import CliRunner

from tests.bench import router_peer
from tests.bench.router_counts import Figures, Marks, Seen, Sent, counts, quantile, spread
from tests.bench.router_fleet import Arm

MARKS = Marks(
    began=100.0, killed=105.0, restarted="again", listening=107.0, stopped=112.0, stopped_engine="first",
    continued=118.0, told=122.0, new="new", removed="third", ended=126.0,
)  # fmt: skip


def sent(rid: str, at: float, took: float = 0.2, ok: bool = True) -> Sent:
    return Sent(rid, at, at + took, ok)


def figures(more: list[tuple[Sent, list[Seen]]]) -> Figures:
    """Of these and of two quiet requests that took 0.2 s."""
    quiet = [(sent(f"q{n}", 101.0 + n), [Seen("first", f"q{n}", 101.0 + n, 200)]) for n in range(2)]
    both = [*quiet, *more]
    return counts([one for one, _ in both], [one for _, some in both for one in some], MARKS)


def test_a_quiet_run_has_nothing_to_count() -> None:
    found = figures([])
    assert found["requests"] == 2
    assert found["quiet p50"] == pytest.approx(0.2)
    for name in ("lost", "begun twice", "done twice", "to the removed", "to the stopped", "slowed, kill"):
        assert found[name] == 0, name
    for name in ("readmit after restart", "readmit after continue", "admit a new one"):
        assert math.isinf(found[name]), name


def test_a_call_that_was_moved_from_a_dead_engine_is_begun_twice_and_done_once() -> None:
    moved = (sent("a", 104.9, 0.6), [Seen("second", "a", 104.9, None), Seen("first", "a", 105.2, 200)])
    found = figures([moved])
    assert (found["begun twice"], found["done twice"], found["lost"]) == (1, 0, 0)


def test_done_twice_needs_two_answers() -> None:
    twice = (sent("a", 113.0, 6.0), [Seen("first", "a", 118.0, 200), Seen("third", "a", 114.0, 200)])
    assert figures([twice])["done twice"] == 1
    left = (sent("a", 113.0, 6.0), [Seen("first", "a", 118.0, 499), Seen("third", "a", 114.0, 200)])
    assert (figures([left])["done twice"], figures([left])["begun twice"]) == (0, 1)


def test_lost_goes_by_the_phase_in_which_it_was_sent() -> None:
    found = figures(
        [(sent("a", 105.5, ok=False), []), (sent("b", 106.5, ok=False), []), (sent("c", 119.0, ok=False), [])]
    )
    assert found["lost"] == 3
    assert [found[f"lost, {name}"] for name in ("quiet", "kill", "restart", "stop", "replace")] == [0, 2, 0, 0, 1]
    assert found["until none fails after a kill"] == pytest.approx(1.5)


def test_a_failure_before_the_kill_or_after_the_restart_does_not_count_as_the_kills() -> None:
    found = figures([(sent("a", 104.9, ok=False), []), (sent("b", 107.5, ok=False), [])])
    assert found["until none fails after a kill"] == 0


def test_slowed_is_measured_against_the_runs_own_quiet_phase() -> None:
    quick = (sent("a", 105.5, 0.39), [Seen("first", "a", 105.5, 200)])
    slow = (sent("b", 106.0, 0.41), [Seen("first", "b", 106.0, 200)])
    found = figures([quick, slow])
    assert found["slowed, kill"] == 1
    assert found["until none is slow after a kill"] == pytest.approx(1.0)
    assert found["worst, kill"] == pytest.approx(0.41)


def test_the_removed_engine_may_get_calls_until_the_front_was_told() -> None:
    before = (sent("a", 121.9), [Seen("third", "a", 121.95, 200)])
    after = (sent("b", 122.1), [Seen("third", "b", 122.15, 200)])
    assert figures([before])["to the removed"] == 0
    assert figures([before, after])["to the removed"] == 1


def test_what_a_stopped_engine_reads_when_it_goes_on_was_sent_to_it_while_it_was_stopped() -> None:
    early = (sent("a", 111.9, 6.5), [Seen("first", "a", 111.95, 200)])
    at_it = (sent("b", 114.0, 4.5), [Seen("first", "b", 118.01, 200)])
    elsewhere = (sent("c", 115.0), [Seen("third", "c", 115.0, 200)])
    later = (sent("d", 119.0), [Seen("first", "d", 119.0, 200)])
    found = figures([early, at_it, elsewhere, later])
    assert found["to the stopped"] == 1
    assert found["until routed around a stop"] == pytest.approx(2.0)
    assert found["readmit after continue"] == pytest.approx(1.0)  # not b, which came while it was stopped
    assert found["slowed, stop"] == 1


def test_readmission_is_the_first_call_at_the_new_process() -> None:
    found = figures([
        (sent("a", 108.0), [Seen("again", "a", 108.0, 200)]),
        (sent("b", 109.0), [Seen("again", "b", 109.0, 200)]),
        (sent("c", 122.5), [Seen("new", "c", 122.5, 200)]),
    ])  # fmt: skip
    assert found["readmit after restart"] == pytest.approx(1.0)
    assert found["admit a new one"] == pytest.approx(0.5)


def test_records_that_do_not_fit_each_other_give_no_figures() -> None:
    quiet = sent("q", 101.0)
    at_engine = Seen("first", "q", 101.0, 200)
    assert counts([quiet], [at_engine], MARKS)["requests"] == 1
    with pytest.raises(ValueError, match="no engine did them, such as q"):
        counts([quiet], [], MARKS)
    with pytest.raises(ValueError, match="no engine did them, such as q"):
        counts([quiet], [dataclasses.replace(at_engine, status=None)], MARKS)
    with pytest.raises(ValueError, match="not the client's, such as x"):
        counts([quiet], [at_engine, Seen("first", "x", 101.0, 200)], MARKS)
    with pytest.raises(ValueError, match="have one id"):
        counts([quiet, quiet], [at_engine], MARKS)
    with pytest.raises(ValueError, match="no request of the quiet phase"):
        counts([sent("z", 106.0)], [Seen("first", "z", 106.0, 200)], MARKS)


def test_quantiles_and_spread() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.25, 0.5, 0.99, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert spread([2.0, math.inf, 1.0]) == (2.0, 1.0, math.inf)
    assert spread([1.0, math.inf])[0] == math.inf
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_the_table_says_median_and_range_and_what_was_not_seen() -> None:
    row = {key: 1.0 for _, key, _ in router_peer.ROWS}
    runs = [row, {**row, "lost": 3.0, "readmit after restart": math.inf}, {**row, "lost": 2.0}]
    lines = router_peer.table({"ours": runs, "direct": [{"requests/s": 7.0}]})
    assert "| **lost**, all phases | 2 (1 to 3) |  |" in lines
    assert "| **readmitted** after a restart at the same address | 1.00 s (1.00 s to not seen) |  |" in lines
    assert "| without faults: requests/s | 1 | 7 |" in lines


def test_what_was_written_by_hand_is_kept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "page.md"
    assert "Nothing is written yet" in router_peer.kept(path)
    path.write_text(router_peer.page({"ours": [{}]}, (1.0, 2.0), "v", "c", "## What it says\n\nOurs words.\n"))
    assert router_peer.kept(path) == "## What it says\n\nOurs words.\n"


def test_without_the_router_one_message_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("SEATRIAL_ROUTER_PYTHON", "/nowhere/python")
    out = tmp_path / "page.md"
    done = CliRunner().invoke(router_peer.main, ["--out", str(out)])
    assert done.exit_code == 2
    assert "pip install sglang-router==0.3.2" in done.output
    assert not out.exists()


def test_a_run_that_failed_is_told_in_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def measure(arm: Arm, *_: object) -> Figures:
        if arm.name == "router":
            raise RuntimeError("not true in time: all workers are healthy\nand many more words")
        return {"lost": 0.0}

    monkeypatch.setattr(router_peer, "router_python", lambda: "python")
    monkeypatch.setattr(router_peer, "measure", measure)
    out = tmp_path / "page.md"
    done = CliRunner().invoke(router_peer.main, ["--out", str(out), "--repeat", "1"])
    assert done.exit_code == 1
    text = out.read_text()
    assert "Not in the table, as it failed: router, 1 of 1: not true in time: all workers are healthy.\n" in text
    assert "| **lost**, all phases | 0 | 0 |  | 0 |" in text
