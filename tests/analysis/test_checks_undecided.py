"""Absent or ambiguous evidence is no pass: for checks and criteria, a history that leaves them undecided.

Each history has the subject of its check, and lacks just that by which it would be judged. Most are here; where a check
has several ways to be in doubt, its own test file has more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.analysis.history import History
from tests.analysis.test_checks_autoscaler import DRIVER, Autoscaled
from tests.analysis.test_checks_publishing import UPDATE, Published
from tests.analysis.test_checks_scaling import Scaled
from tests.analysis.test_checks_traces import Training
from tests.analysis.test_checks_weights import Proxy, Weights

NOTHING = "nothing was judged"
NO_SUBJECT = "not applicable"
CLOCKS = "the clocks cannot tell"


# --- scaling ---


def only_the_driver_removes_a_group() -> History:
    h = Scaled()
    h.removal("g1", by="driver")
    return h


def an_answer_without_a_figure() -> History:
    h = Scaled()
    h.answered(h.asked("status", operation="op-1"), operation="op-1", state="PENDING", current=None)
    return h


def no_submission() -> History:
    h = Scaled()
    h.status("op-1", "ACTIVE")
    return h


def only_refusals() -> History:
    h = Scaled()
    for _ in range(2):
        h.answered(h.asked("scale_out", target=2), status=409, code="CONFLICT")
    return h


def submissions_without_a_key() -> History:
    h = Scaled()
    h.submitted("op-1")
    h.submitted("op-2", "scale_in", target=1)
    return h


# --- publications ---


def an_update_as_near_to_a_turn_as_the_clocks_are_wrong() -> History:
    h = Published(clock_error_ms=50)
    h("turn.sent", request="r1", session="x", service="s")
    h.sent("r1")
    h.accepted("r1", at="s-0/0")
    h.call("s-1", UPDATE, at="admin/0")
    return h


def a_turn_without_an_end() -> History:
    h = Published()
    h("call.sent", at="entrypoint-s-0/0", call=900, target="s-0", target_inc=0, method="/generate")
    return h


def a_preparation_whose_answer_the_network_kept() -> History:
    h = Published()
    h("call.sent", at="publisher/0", call=900, target="controller-s", target_inc=0, method="prepare_pause")
    h("call.fate", at="world/0", call=900, fate="reply_lost", source="node-0", target="node-0")
    h("call.done", at="publisher/0", call=900, outcome="unknown", error="ReadTimeout", ms=60_000)
    return h


def a_turn_that_was_given_up_comes_late() -> History:
    h = Published()
    h("turn.sent", request="r1", session="x", service="s")
    h.sent("r1")
    h("request.done", request="r1", outcome="unknown", error="Cancelled")
    h("session.ended", session="x", service="s", outcome="failed", retired=True)
    h.accepted("r1", at="s-0/0")
    return h


def health_acts_as_near_to_a_seal_as_the_clocks_are_wrong() -> History:
    h = Published(clock_error_ms=50)
    h.call("gateway-s", "roster")
    h.call("gateway-s", "health_view", at="health-s/0")
    h.gates("seal")
    h.call("gateway-s", "set_routable", at="health-s/0")
    return h


def gates_that_grant_nothing() -> History:
    h = Published()
    h.gates("seal")
    h.gates("reopen")
    return h


def gates_that_only_install() -> History:
    h = Published()
    h.gates("drain")
    h.gates("install_version")
    return h


# --- weights and proxies ---


def an_export_that_was_torn() -> History:
    h = Weights()
    for kind, size in (("storage.written", {"sha256": "00", "size": 2}), ("storage.torn", {"size": 1})):
        h(kind, at="exporter/0", path="exports/.tmp-1/a.bin", **size)
    h("storage.renamed", at="exporter/0", old="exports/.tmp-1", new="exports/00000001-7")
    h.weights("7", "whatever")
    return h


def an_engine_that_does_not_tell_its_hash() -> History:
    h = Weights()
    h("engine.ready", at="s-0/0", version="1", weight_hash="")
    h.weights("2", "")
    return h


def nobody_generates() -> History:
    h = Weights()
    h("engine.bucket", at="s-0/0", bucket=0, of=2, weight_hash="half")
    return h


def the_rank_died_in_its_update() -> History:
    h = Weights()
    h.call("rank-0", "update", at="publisher/0", took_ms=None)
    h("actor.died", at="rank-0/0", reason="killed")
    return h


def an_update_of_somebody_elses_engine() -> History:
    h = Weights()
    h.call("other-0", UPDATE, at="rank-0/0")
    return h


def memory_that_is_never_taken_back() -> History:
    h = Weights()
    h.memory("released", "kv_cache", resident=("weights",))
    return h


def posts(*effects: tuple[str, str]) -> Callable[[], History]:
    def history() -> History:
        h = Proxy()
        for route, effect in effects:
            h.post(route, effect, session="probe-1")
        return h

    return history


# --- the autoscaler ---


def it_only_asks_how_it_is_going() -> History:
    h = Autoscaled()
    h.over(20, "op-1")
    return h


def the_operator_asks_in_its_place() -> History:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", "op-1", at=DRIVER)
    return h


def the_same_key_of_somebody_else() -> History:
    h = Autoscaled()
    for at_s in (20, 21):
        h.submit(at_s, "scale_out", 3, "b", "op-1", at="operator/0")
    return h


def only_a_scale_out_while_blind() -> History:
    h = Autoscaled()
    h("fault.injected", at="world/0", ms=1_000, fault=1, name="metrics_missing", target="genrm-0")
    h.submit(60, "scale_out", 2, "a", "op-1")
    return h


def frames_without_a_decision() -> History:
    h = Autoscaled()
    for at_s in (5, 10, 15):
        h.evaluated(at_s)
    return h


def nobody_looks_at_the_status() -> History:
    h = Autoscaled()
    h.submit(20, "scale_out", 2, "a", "op-1")
    h.over(30, "op-1")
    return h


def nobody_looked_at_the_end() -> History:
    h = Scaled()
    h.elastic()
    return h


def only_an_operator_turns_round() -> History:
    h = Scaled()
    h.submitted("op-1", key="a")
    h.submitted("op-2", "scale_in", target=1, key="b")
    return h


# --- engines, judges, session servers, traces ---


def a_request_that_is_no_judgement() -> History:
    h = History()
    h("engine.sampling", at="e0/1", request="r1", temperature=0.7, seed=3)
    return h


def weights_that_never_change() -> History:
    h = History()
    h.ready()
    h.served()
    return h


def a_session_server_that_nobody_calls() -> History:
    h = History()
    h("session_servers.deployed", at="driver/0")
    return h


def a_batch_that_is_never_cleaned_up() -> History:
    h = Training()
    h.call("buffer-s", "take_batch", at="learner-s/0")
    h.recorded(request="r1")
    return h


UNDECIDED: dict[str, tuple[Callable[[], History], str]] = {
    "groups_released_once": (only_the_driver_removes_a_group, NOTHING),
    "clean_means_clean": (an_answer_without_a_figure, NOTHING),
    "only_integers_admitted": (no_submission, NOTHING),
    "one_operation_at_a_time": (only_refusals, NOTHING),
    "same_key_same_operation": (submissions_without_a_key, NOTHING),
    "no_update_under_lease": (an_update_as_near_to_a_turn_as_the_clocks_are_wrong, CLOCKS),
    "poisoned_gate_admits_nothing": (a_turn_without_an_end, NOTHING),
    "one_deadline": (a_preparation_whose_answer_the_network_kept, NOTHING),
    "one_backend_a_session": (a_turn_that_was_given_up_comes_late, "who sent it, and when, is not seen"),
    "health_holds_in_a_barrier": (health_acts_as_near_to_a_seal_as_the_clocks_are_wrong, CLOCKS),
    "leases_add_up": (gates_that_grant_nothing, NO_SUBJECT),
    "versions_never_go_back": (gates_that_only_install, NO_SUBJECT),
    "old_epochs_do_nothing": (gates_that_grant_nothing, NO_SUBJECT),
    "serves_the_trainers_weights": (an_export_that_was_torn, NOTHING),
    "label_follows_weights": (an_engine_that_does_not_tell_its_hash, NOTHING),
    "nothing_runs_on_part_weights": (nobody_generates, NOTHING),
    "every_rank_leaves": (the_rank_died_in_its_update, NOTHING),
    "updates_meet_the_living": (an_update_of_somebody_elses_engine, NOTHING),
    "memory_order": (memory_that_is_never_taken_back, NOTHING),
    "proxy_registered_once": (posts(("new", "busy")), NOTHING),
    "proxy_post_delivered_once": (posts(("chat", "answered")), NOTHING),
    "proxy_follows_the_fleet": (posts(("new", "registered")), NOTHING),
    "proxy_probe": (posts(("new", "registered"), ("delete", "deleted")), NOTHING),
    "autoscaler_keeps_bounds": (it_only_asks_how_it_is_going, NOTHING),
    "autoscaler_cooldown": (the_operator_asks_in_its_place, NOTHING),
    "autoscaler_one_request": (the_same_key_of_somebody_else, NOTHING),
    "no_blind_scale_in": (only_a_scale_out_while_blind, NOTHING),
    "autoscaler_sustained": (frames_without_a_decision, NOTHING),
    "autoscaler_shows_its_own": (nobody_looks_at_the_status, NO_SUBJECT),
    "seed_from_content": (a_request_that_is_no_judgement, NOTHING),
    "nothing_served_from_an_old_cache": (weights_that_never_change, NO_SUBJECT),
    "only_generations_are_touched": (a_session_server_that_nobody_calls, NOTHING),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_an_invariant_that_cannot_be_decided(name: str) -> None:
    history, why = UNDECIDED[name]
    row = history().end().judged(name)
    assert row.result == "inconclusive" and why in row.explain, row
    assert row.applicable == (why is not NO_SUBJECT)
    if why not in (NOTHING, NO_SUBJECT):
        assert row.required and row.witness, "a doubt may not be passed over"


UNDECIDED_CRITERIA: dict[str, tuple[Callable[[], History], dict[str, Any], str]] = {
    "capacity_returned": (nobody_looked_at_the_end, {}, "nobody looked at m at its end"),
    "reversals": (only_an_operator_turns_round, {"at_most": 0}, NOTHING),
    "recorded_between_take_and_cleanup": (a_batch_that_is_never_cleaned_up, {}, NOTHING),
}


@pytest.mark.parametrize("name", UNDECIDED_CRITERIA)
def test_a_criterion_that_cannot_be_decided(name: str) -> None:
    history, parameters, why = UNDECIDED_CRITERIA[name]
    row = history().end().judged(name, acceptance=({name: parameters},))
    assert (row.result, row.required) == ("inconclusive", True) and why in row.explain, row


# --- what had no history at all ---


@pytest.mark.parametrize(
    ("target", "status", "operation", "expected"),
    [(2, 200, "op-1", "pass"), (None, 422, "", "pass"), (None, 200, "op-1", "fail"), (None, 200, "", "fail")],
    ids=["an integer", "refused", "admitted all the same", "taken for a no-op"],
)
def test_a_target_that_is_no_integer_is_refused(target: int | None, status: int, operation: str, expected: str) -> None:
    h = Scaled()
    asked = h.asked("scale_out", target=target)
    answered = h.answered(asked, status, operation=operation, state="PENDING" if operation else "NOOP")
    row = h.end().judged("only_integers_admitted")
    assert row.result == expected
    assert row.witness == ((asked.seq, answered.seq) if expected == "fail" else ())


def test_a_submission_that_names_engines_has_no_target() -> None:
    h = Scaled()
    asked = h.asked("scale_out", target=None)
    h("scale.connects", ask=asked.data["ask"], engines=2, at="driver/0")
    h.answered(asked, 200, operation="op-1", state="PENDING")
    assert h.end().judged("only_integers_admitted").result == "pass"


@pytest.mark.parametrize(
    ("cached", "ended", "expected"),
    [
        ((0, 64, 32), True, "pass"),
        ((0, 64, 0), True, "fail"),
        ((0, 64, 0), False, "inconclusive"),
        ((), True, "inconclusive"),
    ],
    ids=["two hits", "one too few", "more may come", "no generation"],
)
def test_generations_that_use_a_cached_prefix(cached: tuple[int, ...], ended: bool, expected: str) -> None:
    h = History()
    for number, tokens in enumerate(cached):
        h.finished(f"r{number}", cached_tokens=tokens)
    if ended:
        h.end()
    row = h.judged("prefix_hits", acceptance=({"prefix_hits": {"at_least": 2}},))
    assert row.result == expected
    assert row.observed == f"{sum(tokens > 0 for tokens in cached)} of {len(cached)} generations"
