"""The checks of the autoscaler on histories of a few events."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.checks import CheckResult
from tests.analysis.history import History

FRONT, DRIVER = "front-genrm/0", "driver/0"


class Autoscaled(History):
    """A service with an autoscaler: 1 to 3 replicas, cooldowns of 20 and 60 s, conditions of 15 and 45 s."""

    def __init__(self) -> None:
        super().__init__()
        self("run.workload", at=DRIVER)
        self(
            "autoscaler.deployed", at=DRIVER, ms=0, service="genrm", scaler="autoscaler-genrm", api="front-genrm",
            min_engines=1, max_engines=3, out_cooldown_s=20.0, in_cooldown_s=60.0, metrics_interval_s=3.0,
            evaluation_interval_s=5.0, out_duration_s=15.0, in_duration_s=45.0,
        )  # fmt: skip
        self._asks = 0

    def ask(
        self, at_s: float, route: str, *, operation: str = "", target: int | None = None, key: str | None = None,
        status: int = 200, state: str = "PENDING", cleanup: str = "unknown", answer: str = "", at: str = FRONT,
    ) -> None:  # fmt: skip
        """A call of the control API at so many seconds, and its answer."""
        self._asks += 1
        ask, direction = f"ask-{self._asks}", route if route.startswith("scale") else "scale_out"
        ms = round(at_s * 1000)
        self("scale.asked", at=at, ms=ms, ask=ask, service="genrm", route=route, direction=direction,
             operation=operation, target=target, key=key)  # fmt: skip
        self("scale.answered", at=at, ms=ms, ask=ask, status=status, operation=answer or operation, state=state,
             cleanup=cleanup)  # fmt: skip

    def submit(self, at_s: float, route: str, target: int, key: str, answer: str = "", **more: Any) -> None:
        self.ask(at_s, route, target=target, key=key, answer=answer, **more)

    def over(self, at_s: float, operation: str, state: str = "ACTIVE", cleanup: str = "false") -> None:
        self.ask(at_s, "status", operation=operation, state=state, cleanup=cleanup)

    def evaluated(
        self, at_s: float, action: str = "none", *, empty: bool = False, unknown: tuple[str, ...] = (),
        coverage: float = 1.0, streaks: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        frame = {"is_empty": empty, "unknown_engines": list(unknown), "coverage": coverage}
        self("autoscaler.evaluated", at="autoscaler-genrm/0", ms=round(at_s * 1000), service="genrm", action=action,
             triggered=["token_usage_high"], streaks=streaks or {}, frame=frame)  # fmt: skip


def row(history: History, name: str) -> CheckResult:
    return history.judged(name)


def good() -> Autoscaled:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", "op-1")
    h.over(60, "op-1")
    h.submit(100, "scale_in", 1, "b", "op-2")
    h.over(105, "op-2", "COMPLETED")
    return h


@pytest.mark.parametrize(
    "name", ["autoscaler_keeps_bounds", "autoscaler_cooldown", "autoscaler_one_request", "no_blind_scale_in"]
)
def test_a_sound_course_passes(name: str) -> None:
    assert row(good(), name).result == "pass"


def test_targets_out_of_bounds() -> None:
    for target in (0, 4):
        h = Autoscaled()
        h.submit(20, "scale_out", target, "a", "op-1")
        assert row(h, "autoscaler_keeps_bounds").result == "fail"


def test_what_others_ask_for_is_not_judged() -> None:
    h = good()
    h.submit(106, "scale_out", 9, "hand", "op-3", at=DRIVER)
    assert row(h, "autoscaler_keeps_bounds").result == "pass"
    assert row(h, "autoscaler_cooldown").result == "pass"


def test_a_request_within_the_cooldown() -> None:
    h = good()
    h.submit(159, "scale_out", 2, "c", "op-3")
    assert row(h, "autoscaler_cooldown").result == "fail"
    h = good()
    h.submit(160, "scale_out", 2, "c", "op-3")
    assert row(h, "autoscaler_cooldown").result == "pass"


def test_a_retry_under_the_same_key_is_no_new_request() -> None:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", "op-1", status=0)
    h.submit(21, "scale_out", 2, "a", "op-1")
    h.submit(22, "scale_out", 2, "a", "op-1")
    assert row(h, "autoscaler_cooldown").result == row(h, "autoscaler_one_request").result == "pass"


@pytest.mark.parametrize(("state", "cleanup"), [("CREATING", "false"), ("FAILED", "true"), ("ACTIVE", "unknown")])
def test_a_request_beside_an_open_one(state: str, cleanup: str) -> None:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", "op-1")
    h.over(60, "op-1", state, cleanup)
    h.submit(100, "scale_out", 3, "b", status=409)
    assert row(h, "autoscaler_one_request").result == "fail"


def test_an_operation_that_is_lost_is_not_waited_for() -> None:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", "op-1")
    h.ask(60, "status", operation="op-1", status=404)
    h.submit(100, "scale_out", 3, "b", "op-2")
    assert row(h, "autoscaler_one_request").result == "pass"


def test_an_autoscaler_that_died_knows_nothing() -> None:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", "op-1")
    h("actor.died", at="autoscaler-genrm/0", reason="killed")
    h.submit(25, "scale_out", 2, "b", status=409)
    assert row(h, "autoscaler_one_request").result == row(h, "autoscaler_cooldown").result == "pass"


def test_an_answer_to_an_autoscaler_that_died_meanwhile() -> None:
    h = Autoscaled()
    h("scale.asked", at=FRONT, ms=20_000, ask="late", service="genrm", route="scale_out", direction="scale_out",
      target=2, key="a")  # fmt: skip
    h("actor.died", at="autoscaler-genrm/0", reason="killed")
    h("scale.answered", at=FRONT, ask="late", status=200, operation="op-1", state="PENDING", cleanup="unknown")
    h.submit(60, "scale_out", 3, "b", "op-2")
    for name in ("autoscaler_keeps_bounds", "autoscaler_one_request", "autoscaler_cooldown"):
        assert row(h, name).result == "pass", row(h, name).explain


def blind(at_s: float, *, healed_s: float | None = None, dies: bool = False, target: str = "genrm-1") -> Autoscaled:
    h = Autoscaled()
    h("fault.injected", at="injector/0", ms=50_000, fault=1, name="metrics_nan", target=target)
    if healed_s is not None:
        h("fault.healed", at="injector/0", ms=round(healed_s * 1000), fault=1, name="metrics_nan", target=target)
    if dies:
        h("actor.died", at="genrm-1/0", ms=52_000, reason="killed")
    h.submit(at_s, "scale_in", 1, "a", "op-1")
    return h


def test_a_scale_in_while_a_replica_shows_no_metrics() -> None:
    assert row(blind(70), "no_blind_scale_in").result == "fail"
    assert row(blind(60), "no_blind_scale_in").result == "pass"  # it cannot have noticed yet
    assert row(blind(120, healed_s=65), "no_blind_scale_in").result == "pass"
    assert row(blind(70, dies=True), "no_blind_scale_in").result == "pass"
    assert row(blind(70, target="genrm-b-1"), "no_blind_scale_in").result == "pass"  # of the service genrm-b


def sustained(*breaks: tuple[float, dict[str, Any]], action: str = "scale_in") -> str:
    h = Autoscaled()
    told = dict(breaks)
    for second in range(5, 100, 5):
        if told.get(second, {}) is not None:
            h.evaluated(second, **told.get(second, {}))
    h.evaluated(100, action)
    return row(h, "autoscaler_sustained").result


def test_a_decision_soon_after_a_frame_that_says_nothing() -> None:
    assert sustained() == "pass"
    assert sustained((60, {"unknown": ("genrm-1",)})) == "fail"
    assert sustained((60, {"empty": True})) == "fail"
    assert sustained((55, {"unknown": ("genrm-1",)})) == "pass"
    assert sustained((60, {"unknown": ("genrm-1",)}), action="scale_out") == "pass"
    assert sustained((90, {"empty": True}), action="scale_out") == "fail"


def test_a_decision_soon_after_the_first_frame() -> None:
    for at_s, expected in ((15, "fail"), (20, "pass")):
        h = Autoscaled()
        for second in range(5, at_s, 5):
            h.evaluated(second)
        h.evaluated(at_s, "scale_out")
        assert row(h, "autoscaler_sustained").result == expected


def test_a_decision_soon_after_a_gap() -> None:
    absent: dict[str, Any] = {}
    h = Autoscaled()
    for second in (5, 10, 70, 75, 80, 85, 90, 95):
        h.evaluated(second, **absent)
    h.evaluated(100, "scale_in")
    assert row(h, "autoscaler_sustained").result == "fail"


@pytest.mark.parametrize(
    ("coverage", "enough", "action", "expected"),
    [
        (0.4, None, "scale_out", "fail"),
        (0.5, None, "scale_out", "pass"),
        (0.9, None, "scale_in", "fail"),
        (0.4, (0.3, 1.0), "scale_out", "pass"),
        (0.6, (0.7, 1.0), "scale_out", "fail"),
        (0.9, (0.5, 0.8), "scale_in", "pass"),
    ],
)
def test_a_decision_soon_after_a_frame_in_which_too_few_have_reported(
    coverage: float, enough: tuple[float, float] | None, action: str, expected: str
) -> None:
    h = Autoscaled()
    if enough is not None:
        h("autoscaler.coverage", at=DRIVER, ms=0, service="genrm", out_least=enough[0], in_least=enough[1])
    for second in range(5, 100, 5):
        h.evaluated(second, coverage=coverage if second == 90 else 1.0)
    h.evaluated(100, action)
    assert row(h, "autoscaler_sustained").result == expected


@pytest.mark.parametrize(
    ("before", "after", "gap_s", "expected"),
    [
        ({}, {"ttft_high": 0.0}, 5, "pass"),
        ({}, {"ttft_high": 5.0}, 5, "fail"),
        ({"ttft_high": 0.0}, {"ttft_high": 5.0}, 5, "pass"),
        ({"no_queue": 0.0}, {"no_queue": 5.0, "ttft_high": 5.0}, 5, "fail"),
        ({}, {"ttft_high": 5.0}, 10, "pass"),  # an evaluation in between may have broken, and nobody knows what it saw
    ],
)
def test_a_condition_that_held_before_it_was_seen_to(
    before: dict[str, float], after: dict[str, float], gap_s: int, expected: str
) -> None:
    h = Autoscaled()
    for second in range(5, 70, 5):
        h.evaluated(second)
    h.evaluated(70, streaks=before)
    h.evaluated(70 + gap_s, streaks=after)
    h.evaluated(75 + gap_s, "scale_in")
    found = row(h, "autoscaler_sustained")
    assert found.result == expected and bool(found.witness) == (expected == "fail")


def test_an_autoscaler_of_which_no_settings_are_known_is_not_judged() -> None:
    h = History()
    h("run.workload", at=DRIVER)
    h("autoscaler.evaluated", at="autoscaler-x/0", service="x", action="scale_out", streaks={}, triggered=[],
      frame={"is_empty": False, "unknown_engines": [], "coverage": 1.0})  # fmt: skip
    assert row(h, "autoscaler_sustained").result == "inconclusive"


# --- criteria ---


def criterion(history: History, name: str, **parameters: Any) -> str:
    return history.judged(name, acceptance=({name: parameters},)).result


def test_when_it_was_decided() -> None:
    h = good()
    h.end()
    assert criterion(h, "decided", action="scale_out", from_s=15, to_s=25) == "pass"
    assert criterion(h, "decided", action="scale_out", from_s=21, to_s=25) == "fail"
    assert criterion(h, "decided", action="scale_out", nth=2, to_s=500) == "fail"
    assert criterion(h, "decided", action="scale_in", to_s=500, conditions=["token_usage_low"]) == "fail"


def test_on_what_it_was_decided() -> None:
    h = Autoscaled()
    h.evaluated(20, "scale_out")
    h("request.sent", ms=20_000, request="r1")
    h.submit(20, "scale_out", 2, "a", "op-1")
    h("request.done", ms=21_000, request="r1", outcome="done", status=200)
    h.end()
    asked = {"action": "scale_out", "to_s": 30}
    assert criterion(h, "decided", **asked, conditions=["token_usage_high"]) == "pass"
    assert criterion(h, "decided", **asked, requests_open_at_most=0) == "fail"
    assert criterion(h, "decided", **asked, requests_open_at_most=1) == "pass"


def test_what_was_not_accepted_is_not_decided() -> None:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", status=409)
    assert criterion(h, "decided", action="scale_out", to_s=30) == "inconclusive"
    h.end()
    assert criterion(h, "decided", action="scale_out", to_s=30) == "fail"


def test_capacity_at_the_end() -> None:
    def looked(**final: int) -> str:
        h = Autoscaled()
        alike = {"current": 1, "ready": 1, "occupied": 1, "pending_cleanup": 0, "groups": 1}
        for when, more in (("deployed", {}), ("final", final)):
            h("scale.snapshot", at=DRIVER, service="genrm", when=when, initial=["genrm-0"], routable=["genrm-0"],
              **{**alike, **more})  # fmt: skip
        h.end()
        return criterion(h, "capacity_returned")

    assert looked() == "pass"
    assert looked(groups=2) == looked(current=2, ready=2, occupied=2) == looked(pending_cleanup=1) == "fail"


def test_how_often_it_turned_round() -> None:
    def turned(*more: tuple[Any, ...]) -> Autoscaled:
        h = good()
        for one in more:
            h.submit(*one)
        return h

    again = (200, "scale_in", 1, "c", "op-3")
    assert criterion(turned(), "reversals", at_most=0) == "fail"
    assert criterion(turned(), "reversals", at_most=1) == "inconclusive"  # more may have come
    assert criterion(turned().end(), "reversals", at_most=1) == "pass"
    assert criterion(turned(again).end(), "reversals", at_most=1) == "pass"
    assert criterion(turned(again, (300, "scale_out", 2, "d", "op-4")).end(), "reversals", at_most=1) == "fail"
