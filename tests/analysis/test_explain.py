"""What happened around the witnesses of a check, and who waited for whom."""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

from analysis.explain import explain_check
from analysis.rundir import RunDir
from analysis.sequence import as_svg, as_text
from tests.analysis.history import History
from tests.analysis.runs import cli


def run_of(h: History) -> Any:
    class Fake:
        def read_events(self) -> Any:
            return iter(h.events)

    return Fake()


def test_explain_tells_what_happened_and_who_waits(failing: RunDir) -> None:
    result = cli("explain", failing.path)
    assert result.exit_code == 1
    assert "nothing_lost: fail" in result.stdout
    assert "request.sent request=r<3>" in result.stdout
    assert re.search(r"^ +\d+ +\d\.\d+ \* ", result.stdout, re.M)
    assert "client waits for gw.generate (call 3), from gw since" in result.stdout


def test_explain_draws_an_svg(failing: RunDir, tmp_path: pathlib.Path) -> None:
    result = cli("explain", failing.path, "--svg", tmp_path / "why.svg")
    assert result.exit_code == 1
    root = ElementTree.fromstring((tmp_path / "why.svg").read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "nothing_lost: fail" in texts and "Who waits for whom where the evidence ends" in texts
    assert any(text and "r<3>" in text for text in texts)


def test_arrows_follow_causes() -> None:
    h = History()
    call = h("call.sent", call=1, target="gw", method="generate")
    picked = h("gateway.picked", at="gw/1", request="r1", cause=call)
    check = h.end().judged("every_wait_ends")
    explanation = explain_check(run_of(h), check._replace(witness=(picked.seq,)))
    text = as_text(explanation)
    sent, received = (line for line in text.splitlines() if "─▶" in line)
    assert re.search(r"●─+▶│", sent) and "call.sent target=gw method=generate" in sent
    assert re.search(r"├─+▶●", received) and "gateway.picked" in received
    assert explanation.participants[:2] == ("client", "gw")
    svg = as_svg([explanation])
    assert svg.count('class="arrow"') == 2
    ElementTree.fromstring(svg)


def test_a_ring_of_waits_is_named() -> None:
    h = History()
    h("call.sent", call=1, at="a/1", target="b", method="x")
    h("call.sent", call=2, at="b/1", target="a", method="y")
    h.end("deadlock")
    explanation = explain_check(run_of(h), h.judged("every_wait_ends"))
    assert explanation.cycle == ("a", "b")
    assert "a ring: a -> b -> a" in as_text(explanation)
    assert "a ring: a -&gt; b -&gt; a" in as_svg([explanation])


def test_the_worlds_report_of_a_deadlock_is_shown_as_it_is() -> None:
    h = History()
    h("run.wait", waiter="gate.seal", waits_for="lease 4", should_wake="worker-3")
    h.end("deadlock")
    text = as_text(explain_check(run_of(h), h.judged("run_finished")))
    assert "gate.seal waits for lease 4, from worker-3" in text


def test_waits_are_those_of_the_moment_it_went_wrong_unless_they_never_end() -> None:
    h = History()
    h("call.sent", call=1, target="gw", method="generate")
    h.sent("r1")
    failed = h.done("r1", outcome="unknown", status=0)
    h("call.done", call=1, outcome="done")
    h.end()
    explanation = explain_check(run_of(h), h.judged("unexplained_failures"))
    assert failed.seq in explanation.check.witness and not explanation.at_the_end
    assert "client waits for gw.generate (call 1), from gw since" in as_text(explanation)
    assert explain_check(run_of(h), h.judged("nothing_lost")).waits == ()


def test_a_long_story_is_cut_but_keeps_its_witnesses() -> None:
    h = History()
    for _ in range(200):
        h("gateway.moved", at="gw/1", request="r1")
    last = h.sent("r1")
    explanation = explain_check(run_of(h.end()), h.judged("nothing_lost"))
    assert explanation.left_out > 100
    assert [step.event.seq for step in explanation.steps if step.witness] == [last.seq]


def test_nothing_failed_nothing_to_explain(passing: RunDir, tmp_path: pathlib.Path) -> None:
    result = cli("explain", passing.path)
    assert result.exit_code == 0 and "no check failed" in result.stdout
    picture = tmp_path / "why.svg"
    result = cli("explain", passing.path, "--svg", picture)
    assert f"{picture} is not written" in result.stdout and not picture.exists()
    assert "faults_hit: pass" in cli("explain", passing.path, "--check", "faults_hit").stdout
