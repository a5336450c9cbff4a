"""Checks of judgements and of training beside a judge that is scaled, on hand-written histories."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.evidence import Event
from tests.analysis.history import History

_CONTENT = "80000005" + "0" * 56  # its seed is 5: the highest bit is masked away


class Judged(History):
    """A history with judgements."""

    def one(
        self,
        case: str,
        replica: str = "m-0",
        verdict: int | None = 1,
        *,
        arm: str = "sampled",
        seed: int | None = 5,
        asked_seed: int | None = None,
        finish: str = "stop",
    ) -> Event:
        request = f"r{len(self.events)}"
        temperature = 0.0 if arm == "greedy" else 0.1
        self(
            "judge.asked",
            request=request,
            case=case,
            arm=arm,
            temperature=temperature,
            seed=asked_seed,
            content=_CONTENT,
        )
        self.sent(request)
        self("engine.sampling", request=request, temperature=temperature, seed=seed, at=f"{replica}/0")
        replied = self(
            "judge.replied", request=request, case=case, arm=arm, verdict=verdict, finish_reason=finish, replica=replica
        )
        self.done(request, at_engine=f"{replica}/0")
        return replied


@pytest.mark.parametrize(
    ("given", "result"),
    [
        ({}, "pass"),
        ({"seed": None}, "fail"),
        ({"seed": 6}, "fail"),
        ({"arm": "greedy", "seed": None}, "pass"),
        ({"arm": "greedy", "seed": 5}, "fail"),
        ({"asked_seed": 7, "seed": 7}, "pass"),
        ({"asked_seed": 7, "seed": 5}, "fail"),
    ],
)
def test_a_seed_follows_from_the_caller_or_the_content(given: dict[str, Any], result: str) -> None:
    h = Judged()
    h.one("pos-00", **given)
    row = h.end().judged("seed_from_content")
    assert (row.result, row.judged) == (result, 1) and (result == "pass") != bool(row.witness)


def _agree(h: History, **parameters: Any) -> Any:
    wanted = {"arm": "sampled", "cases": 1, "replies": 2, **parameters}
    return h.judged("judgements_agree", acceptance=[{"judgements_agree": wanted}])


def test_replicas_that_agree_pass_and_say_of_how_many() -> None:
    h = Judged()
    h.one("pos-00", "m-0")
    h.one("pos-00", "m-1")
    row = _agree(h.end())
    assert row.result == "pass" and "0 of 1 cases differ in 2 replies" in row.observed


def test_a_case_on_which_they_differ_fails_with_both_replies() -> None:
    h = Judged()
    one, other = h.one("pos-00", "m-0"), h.one("pos-00", "m-1", 0)
    row = _agree(h.end())
    assert row.result == "fail" and set(row.witness) == {one.seq, other.seq} and "pos-00" in row.explain
    assert _agree(h, unstable_at_most=1).result == "pass"


@pytest.mark.parametrize(
    ("given", "said"),
    [({"verdict": None}, "no verdict"), ({"finish": "length"}, "cut off"), ({"replica": "m-0"}, "judged by m-0 alone")],
)
def test_what_proves_nothing_fails(given: dict[str, Any], said: str) -> None:
    h = Judged()
    h.one("pos-00", "m-0")
    h.one("pos-00", **{"replica": "m-1", **given})
    row = _agree(h.end())
    assert row.result == "fail" and said in row.explain


def test_too_few_replies_fail_and_evidence_without_an_end_is_inconclusive() -> None:
    h = Judged()
    h.one("pos-00", "m-0")
    assert _agree(h, replicas=1).result == "inconclusive"
    row = _agree(h.end(), replicas=1)
    assert row.result == "fail" and "1 replies to 1 cases" in row.explain
    assert _agree(Judged().end()).result == "fail"


# --- training_continues


class Training(History):
    """A training loop of three steps of 10 s, and a scale-out and a scale-in beside it."""

    def __init__(self, leave_out: str = "", stall_ms: int = 0, samples: int = 8, skip_step: bool = False) -> None:
        super().__init__()
        self("run.workload", at="driver/0", ms=0)
        now = 0
        for step in range(3):
            if skip_step and step == 2:
                continue
            now += 1_000 + (stall_ms if step == 1 else 0)
            self("train.step", step=step, what="started", ms=now)
            if step == 0:
                self._scale("scale_out", "ACTIVE", now + 10, now + (9_000 if leave_out == "between" else 20))
            now += 5_000
            self("train.rollout", rollout=step, samples=samples, judged=2, ms=now)
            self("train.rollout", rollout=step, samples=samples, judged=2, ms=now)  # each is told of twice
            if step == 1 and leave_out != "in":
                self._scale("scale_in", "COMPLETED", now + 10, now + 20)
            now += 4_000
            self("train.step", step=step, what="ended", ms=now)
        self("train.finished", steps=3, ms=now + 1)

    def _scale(self, direction: str, state: str, asked_ms: int, done_ms: int) -> None:
        common = {"service": "m", "direction": direction, "at": "driver/0"}
        self("scale.asked", ask=f"{direction}-1", route=direction, target=2, ms=asked_ms, **common)
        self(
            "scale.answered",
            ask=f"{direction}-1",
            status=200,
            operation=direction,
            state="PENDING",
            at="driver/0",
            ms=asked_ms,
        )
        self("scale.asked", ask=f"{direction}-2", route="status", operation=direction, ms=done_ms, **common)
        self(
            "scale.answered",
            ask=f"{direction}-2",
            status=200,
            operation=direction,
            state=state,
            at="driver/0",
            ms=done_ms,
        )


def _continues(h: History, stall_s: float = 30) -> Any:
    wanted = {"steps": 3, "samples": 8, "stall_at_most_s": stall_s}
    return h.judged("training_continues", acceptance=[{"training_continues": wanted}])


def test_training_that_goes_on_passes_though_each_rollout_is_told_of_twice() -> None:
    row = _continues(Training().end())
    assert row.result == "pass" and "3 rollouts" in row.observed


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (Training(stall_ms=40_000), "no progress for 41.0 s"),
        (Training(samples=7), "7 of 8 samples"),
        (Training(skip_step=True), "2 steps started, not 3"),
        (Training(leave_out="in"), "no scale-in that went well"),
    ],
)
def test_training_that_does_not_go_on_fails(history: Training, said: str) -> None:
    row = _continues(history.end())
    assert row.result == "fail" and said in row.explain and row.witness


def test_training_without_progress_between_the_operations_fails() -> None:
    h = History()
    h("run.workload", at="driver/0", ms=0)
    h("train.step", step=0, what="started", ms=1)
    for number, (direction, state) in enumerate((("scale_out", "ACTIVE"), ("scale_in", "COMPLETED"))):
        for route, end in ((direction, "PENDING"), ("status", state)):
            ask = f"{number}-{route}"
            operation = direction if route == "status" else ""
            h("scale.asked", ask=ask, service="m", route=route, direction=direction, operation=operation, at="driver/0")
            h("scale.answered", ask=ask, status=200, operation=direction, state=end, at="driver/0")
    for number in range(3):
        h("train.rollout", rollout=number, samples=8)
        h("train.step", step=number, what="started")
        h("train.step", step=number, what="ended")
    h("train.finished", steps=3)
    row = _continues(h.end())
    assert row.result == "fail" and "no progress between" in row.explain


def test_training_of_which_nothing_is_known_does_not_pass() -> None:
    assert _continues(History().end()).result == "fail"
    assert _continues(Training()).result == "inconclusive"
