"""The story of scaling and training in a run: what is read from which events, and the pictures of it."""

from __future__ import annotations

import pytest

from analysis.story import Story, story_of
from tests.analysis.history import History


def scaled() -> History:
    """A scale-out and a scale-in of ``genrm`` while something is trained. Times in seconds: 10 ms of history."""
    h = History()
    h("actor.spawned", at="genrm-0/1", ms=0, role="engine", node="node-0")
    h("engine.ready", at="genrm-0/1", ms=500)
    h("run.workload", at="driver/0", ms=1000)
    h("train.step", at="driver/0", ms=3000, step=0, what="started")
    h("autoscaler.evaluated", at="scaler/1", ms=3500, service="genrm", action="scale_out", current=1, delta=1,
      triggered=["token_usage_high"], streaks={"token_usage_high": 1.5, "no_queue": 9.0},
      frame={"total_queue_reqs": 4.0, "total_running_reqs": 8.0})  # fmt: skip
    h("scale.decision", at="scale/1", ms=4000, direction="scale_out", result="ADMITTED", operation="op-1")
    h("actor.spawned", at="genrm-1/1", ms=4500, role="engine", node="node-0")
    h("engine.ready", at="genrm-1/1", ms=6000)
    h("scale.terminal", at="scale/1", ms=6500, operation="op-1", direction="scale_out", state="ACTIVE",
      cleanup_required=False)  # fmt: skip
    h("train.rollout", at="driver/0", ms=9000, rollout=0, samples=8, judged=1)
    h("scale.decision", at="scale/1", ms=9500, direction="scale_in", result="ADMITTED", operation="op-2")
    h("scale.decision", at="scale/1", ms=9600, direction="scale_in", result="NOOP", operation="")
    h("scale.drain", at="manager/1", ms=9700, operation="op-2", replica="genrm-1", replica_inc=1, rank=1, generation=1,
      what="chosen")  # fmt: skip
    h("scale.drain", at="manager/1", ms=9900, operation="op-2", replica="genrm-1", replica_inc=1, rank=1, generation=1,
      what="confirmed")  # fmt: skip
    h("actor.died", at="genrm-1/1", ms=10_000, reason="killed", detail="")
    h("scale.terminal", at="scale/1", ms=10_200, operation="op-2", direction="scale_in", state="FAILED",
      cleanup_required=True)  # fmt: skip
    h("scale.reconciled", at="scale/1", ms=10_500, operation="op-2", direction="scale_in", state="FAILED",
      cleanup_required=False)  # fmt: skip
    h("train.step", at="driver/0", ms=11_000, step=0, what="ended")
    h("request.done", at="client/0", ms=15_000, request="r1", outcome="done")
    h("scale.snapshot", at="driver/0", ms=15_500, service="genrm", when="final")
    h("actor.died", at="genrm-0/1", ms=16_000, reason="killed", detail="")
    return h.end()


def test_replicas_and_operations() -> None:
    story = story_of(scaled().events)
    assert (story.begin_s, story.end_s) == (1.0, 15.0)  # taking the run down is no part of it
    assert story.replicas == {"genrm": [(0.0, 1, 0), (0.5, 1, 1), (4.5, 2, 1), (6.0, 2, 2), (10.0, 1, 1)]}
    out, in_ = story.operations.values()
    assert (out.direction, out.asked_s, out.ended_s, out.state, out.clean) == ("scale_out", 4.0, 6.5, "ACTIVE", True)
    assert (in_.state, in_.clean) == ("FAILED", True)  # cleaned up later
    assert story.queue == [(3.5, 4.0, 8.0)]
    (drain,) = story.drain_rows()
    assert (drain["replica"], drain["idle_after_s"], drain["gone_after_s"]) == (
        "genrm-1", pytest.approx(0.2), pytest.approx(0.3),
    )  # fmt: skip
    (decision,) = story.decision_rows()
    assert (decision["at_s"], decision["after_onset_s"], decision["triggered"]) == (3.5, 1.5, "token_usage_high")


def test_gaps_have_both_edges_of_the_run() -> None:
    gaps = story_of(scaled().events).gaps()
    assert [(gap.after, gap.before, gap.seconds) for gap in gaps] == [
        ("start of the load", "step 0 started", 2.0),
        ("step 0 started", "rollout 0", 6.0),
        ("rollout 0", "step 0 ended", 2.0),
        ("step 0 ended", "end of the run", 4.0),
    ]
    assert [gap.during for gap in gaps] == [(), ("scale_out op-1",), ("scale_in op-2",), ()]


def test_an_operation_that_is_open_overlaps_all_that_follows() -> None:
    events = [event for event in scaled().events if event.kind != "scale.terminal"]
    gaps = story_of(events).gaps()
    assert [len(gap.during) for gap in gaps] == [0, 1, 2, 2]


def test_of_nothing_there_is_no_picture() -> None:
    pytest.importorskip("matplotlib")
    from analysis.story_plots import scale_story, training

    empty = story_of(History().end().events)
    assert empty.gaps() == [] and scale_story(empty) is None and training(empty) is None
    assert scale_story(Story()) is None and training(Story()) is None


def test_the_pictures_have_what_they_say() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from analysis.story_plots import scale_story, training

    story = story_of(scaled().events)
    for draw in (scale_story, training):
        figure = draw(story)
        assert figure is not None
        assert all(axis.patches for axis in figure.axes)  # the windows of both operations
        texts = " ".join(text.get_text() for axis in figure.axes for text in axis.texts)
        assert "out: ACTIVE, 2.5 s" in texts and "in: FAILED, 0.7 s" in texts
        plt.close(figure)
    assert figure.axes[0].get_xlim() == (1.0, 15.0)
