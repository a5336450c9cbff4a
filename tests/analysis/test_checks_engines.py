"""Engine checks on hand-written histories: passing, failing, inconclusive."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.evidence import Event
from tests.analysis.history import History


def history() -> History:
    h = History()
    h.ready()
    return h


def weights(h: History, version: str, at: str = "e0/1", ok: bool = True, **fields: object) -> int:
    fields.setdefault("weight_hash", f"hash-{version}")
    return h("engine.weights", at=at, version=version, ok=ok, **fields).seq


# --- served_version
@pytest.mark.parametrize(("clock_error_ms", "result"), [(1, "inconclusive"), (0, "fail")])
def test_an_answer_that_tells_no_version_is_not_judged_in_the_real_world(clock_error_ms: int, result: str) -> None:
    h = History(clock_error_ms=clock_error_ms)
    h.ready()
    h.sent("r1")
    h.accepted("r1")
    h.finished("r1", tokens=4, spans=[])
    assert h.end().judged("served_version").result == result


def test_spans_across_an_update_pass() -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1")
    weights(h, "2")
    h.finished("r1", spans=[["1", 0, 3, "hash-1"], ["2", 3, 8, "hash-2"]])
    assert h.end().judged("served_version").result == "pass"


def test_a_version_that_the_engine_never_had_fails() -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1")
    made = h.finished("r1", version="7")
    row = h.end().judged("served_version")
    assert row.result == "fail" and made.seq in row.witness
    assert "tokens 0 to 8 are said to be of version '7'" in row.explain


def test_the_right_label_on_the_wrong_weights_fails() -> None:
    h = history()
    h.accepted("r1")
    h.finished("r1", spans=[["1", 0, 8, "hash-0"]])
    assert h.end().judged("served_version").result == "fail"


def test_weights_replaced_before_the_request_came_cannot_be_its_own() -> None:
    h = history()
    changed = weights(h, "2")
    h.sent("r1")
    h.accepted("r1")
    made = h.finished("r1", version="1")
    row = h.end().judged("served_version")
    assert (row.result, row.witness) == ("fail", (1, changed, made.seq))


@pytest.mark.parametrize(
    "spans",
    [
        [["1", 0, 3, "hash-1"], ["1", 4, 8, "hash-1"]],
        [["1", 0, 5, "hash-1"], ["1", 4, 8, "hash-1"]],
        [["1", 0, 7, "hash-1"]],
        [["2", 0, 3, "hash-2"], ["1", 3, 8, "hash-1"]],
        [],
    ],
    ids=["gap", "overlap", "short", "backwards", "none"],
)
def test_spans_that_do_not_add_up_fail(spans: list[list[object]]) -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1")
    weights(h, "2")
    h.finished("r1", spans=spans)
    assert h.end().judged("served_version").result == "fail"


def test_a_restarted_engine_does_not_inherit_weights() -> None:
    h = history()
    h("actor.died", at="e0/1", reason="killed")
    h.ready(at="e0/2", version="0")
    h.accepted("r1", at="e0/2")
    h.finished("r1", at="e0/2", version="1")
    assert h.end().judged("served_version").result == "fail"


def test_no_tokens_are_inconclusive() -> None:
    h = history()
    h.accepted("r1")
    h.finished("r1", tokens=0, spans=[])
    assert h.end().judged("served_version").result == "inconclusive"


# --- one_version_one_hash
def test_one_version_with_two_hashes_fails() -> None:
    h = history()
    other = weights(h, "1", at="e1/1", weight_hash="torn")
    row = h.end().judged("one_version_one_hash")
    assert (row.result, row.witness) == ("fail", (1, other))


def test_the_same_hash_on_two_engines_passes_and_none_is_inconclusive() -> None:
    h = history()
    h.ready(at="e1/1")
    assert h.end().judged("one_version_one_hash").result == "pass"
    assert History().end().judged("one_version_one_hash").result == "inconclusive"


def test_a_label_is_a_services_own() -> None:
    h = history()
    for at, weight_hash in (("chat-0/0", "a"), ("policy-0/0", "b"), ("chat-1/0", "a")):
        h("engine.ready", at=at, version="default", weight_hash=weight_hash)
    assert h.end().judged("one_version_one_hash").result == "pass"
    h("engine.ready", at="policy-1/0", version="default", weight_hash="a")
    assert h.judged("one_version_one_hash").result == "fail"


# --- no_stale_prefix
def test_stale_prefix() -> None:
    h = history()
    h.finished("r1", cached_tokens=64)
    assert h.end().judged("no_stale_prefix").result == "pass"
    h = history()
    stale = h.finished("r1", cached_tokens=64, stale_cached_tokens=16)
    row = h.end().judged("no_stale_prefix")
    assert (row.result, row.witness) == ("fail", (stale.seq,))
    assert history().end().judged("no_stale_prefix").result == "inconclusive"
    h = history()
    h.finished("r1", cached_tokens=64, stale_cached_tokens=None)
    assert h.end().judged("no_stale_prefix").result == "inconclusive"  # the engine did not tell


# --- no_route_before_health
def generation(h: History, call: int, to: str = "e0/1", at: str = "gateway/1", **fields: Any) -> Event:
    name, _, inc = to.rpartition("/")
    fields.setdefault("method", "/generate")
    return h("call.sent", at=at, call=call, target=name, target_inc=int(inc), **fields)


def test_route_before_health_fails() -> None:
    h = History()
    h("engine.started", at="e0/1")
    h("call.sent", at="gateway/1", call=1, target="e0", target_inc=1, method="/ready")
    early = generation(h, 2)
    ready = h.ready()
    generation(h, 3)
    row = h.end().judged("no_route_before_health")
    assert (row.result, row.witness, row.judged) == ("fail", (early.seq, ready.seq), 2)
    assert "gateway/1 sent a generation (call 2) to e0/1 before it was ready" in row.explain


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_every_route_that_generates_is_a_generation(route: str) -> None:
    h = History()
    h("engine.started", at="e0/1")
    early = generation(h, 1, method=route)
    ready = h.ready()
    row = h.end().judged("no_route_before_health")
    assert (row.result, row.witness) == ("fail", (early.seq, ready.seq))


def test_route_after_health_passes() -> None:
    h = History()
    h("engine.started", at="e0/1")
    h.ready()
    generation(h, 1)
    assert h.end().judged("no_route_before_health").result == "pass"


def test_a_process_that_never_becomes_ready_may_get_nothing() -> None:
    h = History()
    h("engine.started", at="e0/1")
    early = generation(h, 1)
    row = h.judged("no_route_before_health")
    assert (row.result, row.witness) == ("inconclusive", (early.seq,)), "the evidence has no end"
    assert h.end().judged("no_route_before_health").result == "fail"


def test_who_means_the_process_before_at_the_same_address_has_done_nothing_wrong() -> None:
    h = history()
    h("engine.started", at="e0/1")
    h("actor.died", at="e0/1", reason="killed")
    h("engine.started", at="e0/2")
    generation(h, 1, to="e0/1")
    assert h.end().judged("no_route_before_health").result == "pass"
    early = generation(h, 2, to="e0/2")
    ready = h.ready(at="e0/2")
    row = h.judged("no_route_before_health")
    assert (row.result, row.witness) == ("fail", (early.seq, ready.seq))


@pytest.mark.parametrize(("gap_ms", "result"), [(1, "inconclusive"), (9, "fail")])
def test_clocks_may_leave_it_open_whether_a_route_came_before_health(gap_ms: int, result: str) -> None:
    h = History(clock_error_ms=5)
    h("engine.started", at="e0/1")
    generation(h, 1, ms=10)
    h.ready(ms=10 + gap_ms)
    assert h.end().judged("no_route_before_health").result == result


def test_no_generation_is_inconclusive() -> None:
    assert history().end().judged("no_route_before_health").result == "inconclusive"


# --- loaded_export_is_whole
def written(h: History, path: str, sha256: str) -> None:
    h("storage.written", path=path, sha256=sha256, writer="trainer")


def read(h: History, path: str, sha256: str, reader: str = "e0") -> int:
    return h("storage.read", path=path, sha256=sha256, reader=reader, at="e0/1").seq


def test_a_whole_export_under_its_final_name_passes() -> None:
    h = history()
    written(h, "tmp-2/shard-0", "aa")
    h("storage.renamed", old="tmp-2", new="v2")
    read(h, "v2/shard-0", "aa")
    weights(h, "2")
    row = h.end().judged("loaded_export_is_whole")
    assert (row.result, row.judged) == ("pass", 1)


def test_serving_from_a_torn_file_fails() -> None:
    h = history()
    written(h, "v2/shard-0", "aa")
    h("storage.torn", path="v2/shard-0", size=3, writer="trainer")
    broken = read(h, "v2/shard-0", "a-piece")
    loaded = weights(h, "2")
    row = h.end().judged("loaded_export_is_whole")
    assert (row.result, row.witness) == ("fail", (broken, loaded))


def test_a_torn_file_that_was_read_and_refused_passes() -> None:
    h = history()
    h("storage.torn", path="v2/shard-0", size=3, writer="trainer")
    read(h, "v2/shard-0", "a-piece")
    weights(h, "1", ok=False)
    assert h.end().judged("loaded_export_is_whole").result == "pass"


def test_a_torn_file_read_by_another_process_is_not_the_engines() -> None:
    h = history()
    h("storage.torn", path="v2/shard-0", size=3, writer="trainer")
    read(h, "v2/shard-0", "a-piece", reader="checkpoint-0")
    weights(h, "2")
    assert h.end().judged("loaded_export_is_whole").result == "pass"


def test_nothing_read_is_inconclusive() -> None:
    assert history().end().judged("loaded_export_is_whole").result == "inconclusive"


# --- admin_once
def call(
    h: History,
    number: int,
    outcome: str = "done",
    route: str = "/pause_generation",
    to: str = "e0/1",
    at: str = "admin/1",
) -> tuple[int, int]:
    """A call that is delivered (posts) and then ends; the seqs of its end and of what was delivered, 0 for a GET."""
    name, _, inc = to.rpartition("/")
    sent = h("call.sent", at=at, call=number, target=name, target_inc=int(inc), method=route)
    post = 0
    if outcome != "not_done" and route != "/ready":
        post = h("engine.post", at=to, route=route, status=200, delivery=sent.id, cause=sent).seq
    error = "" if outcome == "done" else "ReadTimeout"
    return h("call.done", at=at, call=number, outcome=outcome, error=error).seq, post


def attempt(h: History, number: int, outcome: str, at: str = "admin/1") -> None:
    h(
        "admin.attempt",
        at=at,
        operation="op",
        route="/pause_generation",
        target="e0",
        attempt=number,
        outcome=outcome,
    )


@pytest.mark.parametrize("claims", [True, False], ids=["claims", "claims nothing"])
def test_posting_again_after_an_unknown_outcome_fails(claims: bool) -> None:
    h = history()
    ended, _ = call(h, 1, "unknown")
    if claims:
        attempt(h, 1, "unknown")
    _, post = call(h, 2)
    if claims:
        attempt(h, 2, "done")
    row = h.end().judged("admin_once")
    assert (row.result, row.witness) == ("fail", (ended, post - 1, post))
    assert "admin/1 posted /pause_generation to e0/1 again after call 1 of unknown outcome" in row.explain


def test_posting_again_after_not_done_passes() -> None:
    h = history()
    call(h, 1, "not_done")
    call(h, 2)
    assert h.end().judged("admin_once").result == "pass"


def test_posting_again_after_asking_passes() -> None:
    h = history()
    call(h, 1, "unknown")
    call(h, 2, "unknown", route="/ready")
    call(h, 3)
    assert h.end().judged("admin_once").result == "pass"


def test_an_operation_of_its_own_may_repeat_what_another_left_unknown() -> None:
    h = history()
    call(h, 1, "unknown")
    call(h, 2)
    attempt(h, 1, "done")
    assert h.end().judged("admin_once").result == "pass"


def test_somebody_else_may_post_it_too() -> None:
    h = history()
    call(h, 1, "unknown")
    call(h, 2, at="recovery/1")
    assert h.end().judged("admin_once").result == "pass"


def test_a_second_delivery_of_one_call_is_the_networks_doing() -> None:
    h = history()
    sent = h("call.sent", at="admin/1", call=1, target="e0", target_inc=1, method="/pause_generation")
    for _ in range(2):
        h("engine.post", at="e0/1", route="/pause_generation", delivery=sent.id, cause=sent)
    h("call.done", at="admin/1", call=1, outcome="unknown")
    assert h.end().judged("admin_once").result == "pass"


def test_a_new_process_of_the_target_may_be_asked_again() -> None:
    h = history()
    call(h, 1, "unknown")
    call(h, 2, to="e0/2")
    assert h.end().judged("admin_once").result == "pass"


def test_no_delivery_is_inconclusive() -> None:
    h = history()
    call(h, 1, "not_done")
    assert h.end().judged("admin_once").result == "inconclusive"
