"""Checks of scaling on hand-written histories: passing, failing, inconclusive."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.evidence import Event
from tests.analysis.history import History


class Scaled(History):
    """A history with an operator, placement groups, and the replicas in them."""

    def __init__(self) -> None:
        super().__init__()
        self._asks = 0
        self.snapshot("deployed")

    def snapshot(self, when: str, routable: tuple[str, ...] = ("m-0",), **fields: Any) -> Event:
        return self(
            "scale.snapshot", service="m", when=when, initial=["m-0"], routable=list(routable), at="driver/0", **fields
        )

    def asked(self, route: str, **fields: Any) -> Event:
        self._asks += 1
        fields.setdefault("direction", route if route.startswith("scale") else "scale_out")
        return self("scale.asked", ask=f"ask-{self._asks}", service="m", route=route, at="driver/0", **fields)

    def answered(self, asked: Event, status: int = 200, **fields: Any) -> Event:
        fields.setdefault("cleanup", "unknown")
        return self("scale.answered", ask=asked.data["ask"], status=status, at="driver/0", **fields)

    def submitted(self, operation: str, route: str = "scale_out", target: int = 2, **fields: Any) -> Event:
        asked = self.asked(route, target=target, **fields)
        return self.answered(asked, operation=operation, state="PENDING" if operation else "NOOP", current=1, ready=1)

    def status(self, operation: str, state: str, cleanup: str = "false", **fields: Any) -> Event:
        asked = self.asked("status", operation=operation)
        return self.answered(asked, operation=operation, state=state, cleanup=cleanup, **fields)

    def group(self, group: str, state: str = "CREATED", owner: str = "manager") -> Event:
        return self("placement.state", group=group, state=state, owner=owner, at="world/0")

    def born(self, replica: str, group: str = "", inc: int = 0) -> None:
        if group:
            self("placement.entered", group=group, process=replica, process_inc=inc, at="world/0")
        self("actor.spawned", at=f"{replica}/{inc}", cls="Engine", node="node-0", role="engine")

    def removal(self, group: str, by: str = "manager") -> Event:
        return self("placement.removal_asked", group=group, by=by, at="world/0")

    def killed(self, replica: str, inc: int = 0) -> Event:
        return self("actor.died", at=f"{replica}/{inc}", reason="killed")

    def elastic(self, replica: str = "m-1", group: str = "g1") -> None:
        self.group(group, "PENDING")
        self.group(group)
        self.born(replica, group)


def _fault(h: History, name: str, target: str) -> None:
    h("fault.injected", fault=1, name=name, target=target, params={}, must_hit={}, observed={}, at="world/0")


# --- removed_while_idle


@pytest.mark.parametrize("running", [False, True])
def test_a_replica_may_be_removed_when_it_runs_nothing(running: bool) -> None:
    h = Scaled()
    h.elastic()
    h.sent("r1")
    run = h.accepted("r1", at="m-1/0")
    if not running:
        h.finished("r1", at="m-1/0")
    end = h.killed("m-1")
    h.removal("g1")
    row = h.end().judged("removed_while_idle")
    assert (row.result, row.judged) == (("fail" if running else "pass"), 1)
    assert row.witness == ((run.seq, end.seq) if running else ())


def test_what_a_fault_kills_or_makes_ill_is_nobodys_removal() -> None:
    for fault in ("sigkill", "sigstop"):
        h = Scaled()
        h.elastic()
        h.sent("r1")
        h.accepted("r1", at="m-1/0")
        _fault(h, fault, "m-1")
        h.killed("m-1")
        h.removal("g1")
        assert h.end().judged("removed_while_idle").result != "fail"


def test_a_fault_on_another_link_excuses_nothing() -> None:
    h = Scaled()
    h.elastic()
    h.sent("r1")
    h.accepted("r1", at="m-1/0")
    _fault(h, "duplicate", "scale>manager")
    h.killed("m-1")
    h.removal("g1")
    assert h.end().judged("removed_while_idle").result == "fail"


def test_a_request_that_went_elsewhere_is_not_cut_off() -> None:
    h = Scaled()
    h.elastic()
    h.sent("r1")
    h.accepted("r1", at="m-1/0")
    h.accepted("r1", at="m-0/0")
    h.killed("m-1")
    h.removal("g1")
    assert h.end().judged("removed_while_idle").result == "pass"


# --- groups_released_once


def test_a_group_is_removed_once_and_the_newest_first() -> None:
    h = Scaled()
    h.elastic("m-1", "g1")
    h.elastic("m-2", "g2")
    first = h.removal("g1")
    row = h.end().judged("groups_released_once")
    assert row.result == "fail" and row.witness[-1] == first.seq
    h = Scaled()
    h.elastic("m-1", "g1")
    h.elastic("m-2", "g2")
    h.removal("g2")
    h.removal("g1")
    again = h.removal("g1")
    row = h.end().judged("groups_released_once")
    assert row.result == "fail" and row.witness[-1] == again.seq and row.judged == 3


def test_the_take_down_may_remove_in_any_order() -> None:
    h = Scaled()
    h.elastic("m-1", "g1")
    h.elastic("m-2", "g2")
    h.snapshot("final", ("m-0", "m-1", "m-2"))
    h.removal("g1", by="driver")
    h.removal("g2", by="driver")
    assert h.end().judged("groups_released_once").result == "pass"


@pytest.mark.parametrize("left", ["empty", "dead", "unrouted", "well", "killed_by_fault"])
def test_what_is_left_at_the_end_must_serve(left: str) -> None:
    h = Scaled()
    h.group("g1", "PENDING")
    h.group("g1")
    if left != "empty":
        h.born("m-1", "g1")
    if left == "killed_by_fault":
        _fault(h, "sigkill", "m-1")
    if left in ("dead", "killed_by_fault"):
        h.killed("m-1")
    h.snapshot("final", ("m-0", "m-1") if left == "well" else ("m-0",))
    h.removal("g1", by="driver")
    expected = "pass" if left in ("well", "killed_by_fault") else "fail"
    assert h.end().judged("groups_released_once").result == expected


# --- ranks_are_not_reused


def test_recovery_starts_a_replica_again_in_its_own_group_only() -> None:
    for group, expected in (("g1", "pass"), ("", "fail"), ("g2", "fail")):
        h = Scaled()
        h.elastic()
        h.group("g2")
        h.killed("m-1")
        h.born("m-1", group, inc=1)
        assert h.end().judged("ranks_are_not_reused").result == expected
    h = Scaled()
    h.elastic()
    h.killed("m-1")
    h.group("g1", "REMOVED")
    h.born("m-1", "g1", inc=1)
    assert h.end().judged("ranks_are_not_reused").result == "fail"


def test_replicas_without_a_group_are_not_judged() -> None:
    h = Scaled()
    h.born("m-0")
    assert not h.end().judged("ranks_are_not_reused").applicable


# --- protected_alive


def test_initial_replicas_stay() -> None:
    h = Scaled()
    h.snapshot("final", ())
    assert h.end().judged("protected_alive").result == "fail"
    h = Scaled()
    h.killed("m-0")
    h.born("m-0", inc=1)
    h.snapshot("final")
    assert h.end().judged("protected_alive").result == "fail"  # nobody had to end it
    h = Scaled()
    _fault(h, "wedge", "m-0")
    h.killed("m-0")
    h.born("m-0", inc=1)
    h.snapshot("final")
    assert h.end().judged("protected_alive").result == "pass"  # recovery replaced it
    assert Scaled().end().judged("protected_alive").result == "inconclusive"  # nobody looked


# --- clean_means_clean


def test_clean_and_an_empty_group_is_a_lie() -> None:
    h = Scaled()
    h.submitted("op")
    h.group("g1", "PENDING")
    h.status("op", "FAILED", current=1)
    assert h.end().judged("clean_means_clean").result == "fail"


def test_dirty_is_not_judged_and_neither_is_what_is_beside_another_operation() -> None:
    h = Scaled()
    h.submitted("op")
    h.group("g1", "PENDING")
    h.status("op", "FAILED", "true", current=1)
    h.submitted("op2")
    h.status("op", "FAILED", "false", current=1)
    assert h.end().judged("clean_means_clean").result == "pass"


def test_nothing_goes_on_after_the_end() -> None:
    for again, expected in ((False, "fail"), (True, "pass")):
        h = Scaled()
        h.submitted("op")
        h.elastic()
        h.status("op", "ACTIVE", current=2)
        if again:
            h.asked("scale_out", target=3)
        h.group("g2", "PENDING")
        assert h.end().judged("clean_means_clean").result == expected


@pytest.mark.parametrize(("said", "expected"), [(2, "pass"), (1, "fail"), (0, "fail"), (None, "pass")])
def test_capacity_is_the_number_of_replicas(said: int | None, expected: str) -> None:
    h = Scaled()
    h.submitted("op")
    h.elastic()
    h.status("op", "ACTIVE", current=said)
    assert h.end().judged("clean_means_clean").result == expected


def test_where_nobody_said_what_there_is_clean_cannot_be_told_from_left() -> None:
    for looked, expected in ((True, "pass"), (False, "inconclusive")):
        h = Scaled()
        if not looked:
            h.events.pop()
        h.submitted("op")
        h.status("op", "ACTIVE", current=2 if not looked else 1)
        assert h.end().judged("clean_means_clean").result == expected


# --- never_above_target


def test_never_more_than_anybody_asked_for() -> None:
    for target, expected in ((3, "pass"), (2, "fail")):
        h = Scaled()
        h.submitted("op", target=target)
        h.elastic("m-1", "g1")
        h.elastic("m-2", "g2")
        assert h.end().judged("never_above_target").result == expected


def test_a_group_that_two_processes_tell_of_is_one() -> None:
    h = Scaled()
    h.submitted("op", target=2)
    h.elastic("m-1", "g1")
    h.group("g1", "CREATED", owner="driver")
    row = h.end().judged("never_above_target")
    assert (row.result, row.judged) == ("pass", 1)


def test_groups_are_not_counted_where_nobody_said_how_many_replicas_there_were() -> None:
    h = Scaled()
    h.events = [event for event in h.events if event.kind != "scale.snapshot"]  # the beginning was lost
    h.submitted("op", target=3)
    h.elastic("m-1", "g1")
    assert h.end().judged("never_above_target").result == "inconclusive"


# --- one_operation_at_a_time


def test_an_operation_beside_an_unresolved_one() -> None:
    for state, cleanup, expected in (
        ("CREATING", "false", "fail"),
        ("FAILED", "true", "fail"),
        ("FAILED", "false", "pass"),
    ):
        h = Scaled()
        h.submitted("a")
        h.submitted("b")
        h.status("a", state, cleanup)
        assert h.end().judged("one_operation_at_a_time").result == expected


def test_what_was_asked_before_the_admission_proves_nothing() -> None:
    h = Scaled()
    h.submitted("a")
    early = h.asked("status", operation="a")
    h.submitted("b")
    h.answered(early, operation="a", state="CREATING", cleanup="false")
    h.status("a", "ACTIVE")
    assert h.end().judged("one_operation_at_a_time").result == "pass"


# --- same_key_same_operation


def test_a_key_stands_for_one_operation() -> None:
    for second, expected in (("a", "pass"), ("b", "fail"), ("", "fail")):
        h = Scaled()
        h.submitted("a", key="k")
        h.submitted(second, key="k")
        assert h.end().judged("same_key_same_operation").result == expected


def test_a_key_stands_for_one_request_in_one_direction() -> None:
    h = Scaled()
    h.submitted("a", key="k")
    h.submitted("a", key="k", target=3)
    assert h.end().judged("same_key_same_operation").result == "fail"
    h = Scaled()
    h.submitted("a", key="k")
    h.submitted("b", "scale_in", key="k")
    assert h.end().judged("same_key_same_operation").result == "pass"
    h.submitted("a", "scale_in", key="other")
    assert h.judged("same_key_same_operation").result == "fail"


def test_a_retry_is_no_conflict_with_itself() -> None:
    for code, expected in (("CONFLICT", "fail"), ("IDEMPOTENCY_CONFLICT", "pass")):
        h = Scaled()
        h.submitted("a", key="k")
        h.answered(h.asked("scale_out", key="k", target=2), 409, code=code)
        assert h.end().judged("same_key_same_operation").result == expected


def test_the_window_of_a_key_is_a_day() -> None:
    day_ms = 24 * 3600 * 1000
    for ms, second, expected in (
        (day_ms - 1000, "a", "pass"),
        (day_ms - 1000, "b", "fail"),
        (day_ms + 1000, "b", "pass"),
        (day_ms + 1000, "a", "fail"),
    ):
        h = Scaled()
        h.submitted("a", key="k")
        h("run.step", ms=ms, at="world/0")
        h.submitted(second, key="k")
        assert h.end().judged("same_key_same_operation").result == expected


@pytest.mark.parametrize(
    ("ms", "second", "expected"),
    [(50_000, "b", "fail"), (99_990, "b", "pass"), (101_000, "b", "pass"), (101_000, "a", "fail")],
    ids=["within", "over when it is answered", "over", "over, and the same"],
)
def test_another_window_of_a_key_is_on_record(ms: int, second: str, expected: str) -> None:
    h = Scaled()
    h("scale.window", service="m", window_s=100.0, at="driver/0")
    h("scale.window", service="another", window_s=1.0, at="driver/0")
    h.submitted("a", key="k")
    asked = h.asked("scale_out", target=2, key="k", ms=ms)
    h("run.step", ms=ms + 50, at="world/0")
    h.answered(asked, operation=second, state="PENDING")
    row = h.end().judged("same_key_same_operation")
    assert row.result == expected and ("still answers after 0.0277778 h" in row.explain) is (second == "a"), row


def test_a_conflict_after_another_window_is_none() -> None:
    for ms, expected in ((50_000, "fail"), (101_000, "pass")):
        h = Scaled()
        h("scale.window", service="m", window_s=100.0, at="driver/0")
        h.submitted("a", key="k")
        h.answered(h.asked("scale_out", key="k", target=2, ms=ms), 409, code="CONFLICT")
        assert h.end().judged("same_key_same_operation").result == expected


# --- operations_end


def test_every_operation_ends_once() -> None:
    for states, expected in (
        ((("ACTIVE", "false"),), "pass"),
        ((("CREATING", "false"),), "fail"),
        ((("FAILED", "true"), ("FAILED", "false")), "pass"),
        ((("FAILED", "false"), ("FAILED", "true")), "fail"),
        ((("FAILED", "true"), ("ACTIVE", "false")), "fail"),
    ):
        h = Scaled()
        h.submitted("a")
        for state, cleanup in states:
            h.status("a", state, cleanup)
        assert h.end().judged("operations_end").result == expected, states


def test_an_operation_that_is_not_known_any_more() -> None:
    h = Scaled()
    h.submitted("a")
    h.answered(h.asked("status", operation="a"), 404, code="UNKNOWN_OPERATION")
    assert h.end().judged("operations_end").result == "fail"


@pytest.mark.parametrize(
    ("died", "ended", "asked_again", "expected"),
    [
        (True, True, "", "inconclusive"),  # its own word is no evidence of its end
        (True, False, "", "fail"),
        (True, True, "CONNECTING", "fail"),
        (True, True, "ACTIVE", "pass"),  # the operator has taken it over
        (False, True, "", "fail"),  # whoever asked for it has forgotten it
    ],
)
def test_nobody_hears_of_an_end_whose_asker_was_killed(
    died: bool, ended: bool, asked_again: str, expected: str
) -> None:
    h = Scaled()
    h.submitted("a")
    h.status("a", "CONNECTING")
    if died:
        h("actor.died", at="driver/0", reason="killed")
    if ended:
        h("scale.terminal", operation="a", state="ACTIVE", at="manager/0")
    if asked_again:
        h.status("a", asked_again)
    h.snapshot("final")
    h("actor.died", at="driver/0", reason="killed")  # the take-down
    assert h.end().judged("operations_end").result == expected


def test_evidence_without_an_end_leaves_an_operation_open() -> None:
    h = Scaled()
    h.submitted("a")
    assert h.judged("operations_end").result == "inconclusive"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("completed", "fail"),
        ("deadlock", "fail"),
        ("livelock", "fail"),
        ("endless_callback", "fail"),
        ("time_limit", "inconclusive"),
        ("crash", "inconclusive"),  # also: interrupted, and an imported run whose own driver failed
    ],
)
def test_an_operation_that_is_under_way_where_a_run_breaks_off_is_undecided(reason: str, expected: str) -> None:
    h = Scaled()
    admitted = h.submitted("a")
    last = h.status("a", "HEALTH_CHECKING")
    row = h.end(reason).judged("operations_end")
    assert (row.result, row.witness) == (expected, (admitted.seq, last.seq))
    assert "a was admitted and is HEALTH_CHECKING where the evidence ends" in row.explain


def _asked_late(after_s: int, **fields: Any) -> Scaled:
    """An operation that is still under way so long after its admission."""
    h = Scaled()
    h.submitted("a", **fields)
    h("run.step", ms=_ms(h) + 1000 * after_s, at="world/0")
    h.status("a", "CREATING")
    return h


@pytest.mark.parametrize(
    ("after_s", "budget_s", "expected"),
    [
        (100, None, "inconclusive"),
        (719, None, "inconclusive"),
        (721, None, "fail"),  # 600 s, 60 s for the manager to stop, 60 s for their answers
        (130, 5.0, "fail"),
        (130, 60.0, "inconclusive"),
    ],
)
@pytest.mark.parametrize("reason", ["time_limit", "crash", ""])
def test_one_that_is_under_way_long_after_its_budget_fails(
    after_s: int, budget_s: float | None, expected: str, reason: str
) -> None:
    h = _asked_late(after_s, timeout_s=budget_s)
    h = h.end(reason) if reason else h
    assert h.judged("operations_end").result == expected


def test_that_nobody_asked_for_long_is_no_sign_that_it_goes_on() -> None:
    h = Scaled()
    h.submitted("a", timeout_s=5.0)
    h("run.step", ms=10**6, at="world/0")
    assert h.end("time_limit").judged("operations_end").result == "inconclusive"


def test_a_fault_may_hold_an_operation_up() -> None:
    for heals_s, expected in ((None, "inconclusive"), (200, "inconclusive"), (20, "fail")):
        h = Scaled()
        h.submitted("a", timeout_s=5.0)
        _fault(h, "sigstop", "scale-m-0")
        if heals_s is not None:
            h("fault.healed", fault=1, name="sigstop", target="scale-m-0", ms=heals_s * 1000, at="world/0")
        h("run.step", ms=250_000, at="world/0")
        h.status("a", "CREATING")
        assert h.end("time_limit").judged("operations_end").result == expected, heals_s


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("scale.budget", {"budget_s": 10.0, "wait_s": 60.0}, "fail"),
        ("scale.budget", {"budget_s": 10.0, "wait_s": 600.0}, "inconclusive"),
        ("rollout.scaled", {"api": "scale-m-0"}, "inconclusive"),
        ("scale.bounds", {}, "inconclusive"),
    ],
)
def test_how_long_an_operation_may_take_is_on_record(kind: str, fields: dict[str, Any], expected: str) -> None:
    h = Scaled()
    h(kind, service="m", at="driver/0", **fields)
    h.submitted("a")
    h("run.step", ms=200_000, at="world/0")
    h.status("a", "CREATING")
    assert h.end("time_limit").judged("operations_end").result == expected


def test_of_a_run_of_others_no_usual_budget_is_known() -> None:
    for budget_s, expected in ((None, "inconclusive"), (600.0, "fail")):
        h = _asked_late(10_000, timeout_s=budget_s)
        h.events[0].data["world"] = "imported"
        assert h.end("crash").judged("operations_end").result == expected


# --- victim_stays_out


def _ms(h: History) -> int:
    return h.events[-1].t_ns // 10**6


def _victim(h: Scaled, after_ms: int, replica: str = "m-1", group: str = "g1") -> None:
    """The operator is told that a replica drains; a request gets to it so much later; then it goes."""
    h.status("op-1", "DRAINING", "unknown")
    h.sent("r1", ms=_ms(h) + after_ms)
    h.accepted("r1", at=f"{replica}/0")
    h.finished("r1", at=f"{replica}/0")
    h.removal(group)
    h.killed(replica)
    h.group(group, "REMOVED")


@pytest.mark.parametrize(("after_ms", "expected"), [(1_000, "pass"), (9_000, "fail")])
def test_a_victim_gets_nothing_a_while_after_its_drain_began(after_ms: int, expected: str) -> None:
    h = Scaled()
    h.elastic()
    h.submitted("op-1", "scale_in", target=1)
    _victim(h, after_ms)
    row = h.end().judged("victim_stays_out")
    assert (row.result, row.judged) == (expected, 1)


def test_it_needs_no_word_of_the_manager_and_without_a_victim_it_says_nothing() -> None:
    h = Scaled()
    h.elastic()
    h.submitted("op-1", "scale_in", target=1)
    h.status("op-1", "DRAINING", "unknown")
    h.sent("r1", ms=_ms(h) + 9_000)
    h.accepted("r1", at="m-1/0")  # not the one that goes, as far as anybody can know
    assert h.end().judged("victim_stays_out").result == "inconclusive"


def test_a_victim_of_whose_drain_nobody_was_told_is_not_judged() -> None:
    h = Scaled()
    h.elastic()
    h.submitted("op-1", "scale_in", target=1)
    h.removal("g1")
    h.killed("m-1")
    h.group("g1", "REMOVED")
    row = h.end().judged("victim_stays_out")
    assert (row.result, row.judged) == ("inconclusive", 0)


def test_the_second_victim_drains_only_when_the_first_is_gone() -> None:
    h = Scaled()
    h.elastic()
    h.elastic("m-2", "g2")
    h.submitted("op-1", "scale_in", target=1)
    h.status("op-1", "DRAINING", "unknown")
    h.sent("r0", ms=_ms(h) + 9_000)
    h.accepted("r0", at="m-1/0")
    h.finished("r0", at="m-1/0")
    h.removal("g2")
    h.killed("m-2")
    h.group("g2", "REMOVED")
    h.sent("r1", ms=_ms(h) + 1_000)
    h.accepted("r1", at="m-1/0")
    h.finished("r1", at="m-1/0")
    h.removal("g1")
    h.killed("m-1")
    h.group("g1", "REMOVED")
    row = h.end().judged("victim_stays_out")
    assert (row.result, row.judged) == ("pass", 2)


def test_a_parked_victim_that_is_readmitted_fails_at_its_end() -> None:
    h = Scaled()
    h.elastic()
    h.submitted("op-1", "scale_in", target=1)
    h.status("op-1", "DRAINING", "unknown")
    h.status("op-1", "FAILED", "true")
    h.sent("r1", ms=_ms(h) + 20_000)
    h.accepted("r1", at="m-1/0")
    h.finished("r1", at="m-1/0")
    h.removal("g1")
    h.killed("m-1")
    h.group("g1", "REMOVED")
    assert h.end().judged("victim_stays_out").result == "fail"


def test_a_fault_on_a_link_of_control_explains_it_and_a_candidate_is_no_victim() -> None:
    h = Scaled()
    h.elastic()
    h.submitted("op-1", "scale_in", target=1)
    _fault(h, "reply_lost", "scale-m-0>gateway-m-0")
    _victim(h, 9_000)
    assert h.end().judged("victim_stays_out").result == "pass"
    h = Scaled()
    h.elastic()
    h.submitted("op-1", "scale_out", target=2)
    _victim(h, 9_000)
    assert h.end().judged("victim_stays_out").result == "inconclusive"


@pytest.mark.parametrize(
    ("target", "expected"), [("scale-m-0", "pass"), ("manager-m-0", "pass"), ("exporter-m-0", "fail")]
)
def test_a_victim_is_not_closed_while_who_closes_it_is_stopped(target: str, expected: str) -> None:
    h = Scaled()
    h.elastic()
    for name in ("scale-m-0", "manager-m-0", "exporter-m-0"):
        h("actor.spawned", at=f"{name}/1", cls="X", node="node-0", role="actor")
    h.submitted("op-1", "scale_in", target=1)
    h("call.sent", at="scale-m-0/1", call=901, target="manager-m-0", target_inc=1, method="progress")
    _fault(h, "sigstop", target)
    _victim(h, 9_000)
    assert h.end().judged("victim_stays_out").result == expected
