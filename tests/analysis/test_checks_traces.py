"""The checks and criteria of traces and references, on histories of a few events."""

from __future__ import annotations

from typing import Any

from protocol.evidence import Event
from tests.analysis.history import History

A, B = "agent-s-0/0", "trainworker-s-0/0"


class Training(History):
    """A service with all the parts of a training run; one agent, one worker."""

    def __init__(self) -> None:
        super().__init__()
        self(
            "rollouts.deployed", at="driver/0", service="s", store="traces-s", buffer="buffer-s",
            producer="producer-s", learner="learner-s", evaluator="evaluator-s", agents=["agent-s-0"],
            workers=["trainworker-s-0"],
        )  # fmt: skip
        self._calls = 0

    def recorded(self, session: str = "x", **fields: Any) -> Event:
        fields.setdefault("again", False)
        fields.setdefault("outcome", "done")
        return self("trace.recorded", at=A, session=session, chars=30, **fields)

    def looked(self, found: int = 30, session: str = "x", **fields: Any) -> Event:
        return self("trace.looked_up", at=A, session=session, expected=30, found=found, **fields)

    def exported(self, session: str = "x", **fields: Any) -> Event:
        given = {"tokens": 10, "expected_tokens": 10, "experts": 2, "segments": 2, **fields}
        return self("trace.exported", at=A, session=session, chars=30, steps=[[0, 10]], **given)

    def look(self, *sessions: str, rows: Any = (), after: Any = None, when: str = "course") -> Event:
        rows = [list(row) for row in rows]
        return self(
            "trace.snapshot", service="s", when=when, before=rows, sessions=list(sessions),
            after=rows if after is None else [list(row) for row in after],
        )  # fmt: skip

    def call(
        self, target: str, method: str, *, at: str, took_ms: int = 1, error: str = "", outcome: str = "done"
    ) -> None:
        self._calls += 1
        sent = self("call.sent", at=at, call=self._calls, target=target, method=method)
        ended = sent.t_ns // 10**6 + took_ms
        self("call.done", at=at, call=self._calls, outcome=outcome, error=error, ms=ended)

    def value(self, name: str = "o1", holder: str = "turn/r1") -> Event:
        return self("object.put", at=A, object=name, holder=holder, size=8)

    def stored(self, name: str = "o1", session: str = "x") -> None:
        """A value that the store has taken over from the agent."""
        self.value(name)
        self("object.borrowed", at="traces-s/0", object=name, holder=f"trace/{session}")
        self("object.given_back", at=A, object=name, holder="turn/r1")

    def died(self, name: str) -> Event:
        return self("actor.died", at=name, reason="killed")


ROW = ("x", "x", "COMPLETED", 1)


# --- trace_survives ---


def test_what_was_recorded_is_found() -> None:
    h = Training()
    h.recorded()
    h.looked()
    h.exported()
    h.look("x", rows=[ROW])
    row = h.end().judged("trace_survives")
    assert (row.result, row.judged) == ("pass", 3)


def test_a_look_up_that_finds_less_than_was_recorded() -> None:
    h = Training()
    recorded = h.recorded()
    looked = h.looked(found=12)
    row = h.end().judged("trace_survives")
    assert row.result == "fail" and row.witness == (recorded.seq, looked.seq) and "30 characters, and 12" in row.explain


def test_a_prompt_that_matches_no_key_any_more() -> None:
    h = Training()
    h.recorded()
    h.exported(error="TraceNotFound", tokens=0)
    row = h.end().judged("trace_survives")
    assert row.result == "fail" and "does not match any trace key" in row.explain


def test_a_buffered_group_without_its_session() -> None:
    h = Training()
    h.recorded()
    h.look(rows=[ROW])
    assert h.end().judged("trace_survives").result == "fail"


def test_a_group_that_was_taken_while_the_store_was_asked_says_nothing() -> None:
    h = Training()
    h.recorded()
    h.looked()
    h.look(rows=[ROW], after=[])
    h.look(rows=[ROW], after=[("x", "x", "COMPLETED", 2)])
    row = h.end().judged("trace_survives")
    assert (row.result, row.judged) == ("pass", 1)


def test_the_death_of_the_store_excuses_what_was_recorded_before() -> None:
    h = Training()
    h.recorded()
    h.recorded("y")
    h.died("traces-s/0")
    h.looked(found=0)
    h.recorded()
    h.looked(found=0)
    row = h.end().judged("trace_survives")
    assert row.result == "fail" and row.judged == 1


def test_nothing_recorded_is_no_pass() -> None:
    h = Training()
    h.looked(found=0)
    row = h.end().judged("trace_survives")
    assert row.result == "inconclusive" and "nothing was judged" in row.explain
    assert not History().end().judged("trace_survives").applicable


# --- trace_is_the_transcript ---


def test_a_trace_that_is_the_transcript() -> None:
    h = Training()
    h.exported()
    h.exported(experts=0)
    row = h.end().judged("trace_is_the_transcript")
    assert (row.result, row.judged) == ("pass", 2)


def test_lost_tokens_replaced_ones_and_experts_in_part() -> None:
    for fields, said in (
        ({"tokens": 7}, "has 7 tokens; its agent saw 10"),
        ({"same": False}, "never saw there"),
        ({"experts": 1}, "for 1 of 2 segments"),
    ):
        h = Training()
        h.exported(**fields)
        row = h.end().judged("trace_is_the_transcript")
        assert row.result == "fail" and said in row.explain and row.witness


def test_an_export_that_was_refused_is_not_judged_here() -> None:
    h = Training()
    h.exported(error="TraceNotFound", tokens=0)
    assert h.end().judged("trace_is_the_transcript").result == "inconclusive"


# --- store_holds_the_buffer ---


def test_the_store_has_what_the_buffer_has() -> None:
    h = Training()
    h.look("x", rows=[ROW, ("u", "", "COMPLETED", 2)], when="final")
    assert h.end().judged("store_holds_the_buffer").result == "pass"


def test_sessions_that_nobody_needs() -> None:
    h = Training()
    h.look("x", "y", rows=[ROW])
    last = h.look("x", "y", rows=[ROW], when="final")
    row = h.end().judged("store_holds_the_buffer")
    assert row.result == "fail" and row.witness == (last.seq,) and "(y)" in row.explain


def test_who_died_may_leave_sessions_behind_and_the_store_may_not() -> None:
    for part, result in (("producer-s/0", "inconclusive"), ("traces-s/0", "fail"), ("gateway-s-0/0", "fail")):
        h = Training()
        h.died(part)
        h.look("y", when="final")
        assert h.end().judged("store_holds_the_buffer").result == result


# --- store_is_found_again ---


def test_a_store_that_came_again_is_found() -> None:
    h = Training()
    h.died("traces-s/0")
    h.looked(error="ActorDied", ms=20)
    h("actor.spawned", at="traces-s/1", cls="X", role="actor", ms=100)
    h.looked(error="ActorDied", ms=110)
    h.looked(ms=3000)
    row = h.end().judged("store_is_found_again")
    assert (row.result, row.judged) == ("pass", 2)


def test_a_handle_that_outlives_its_store() -> None:
    h = Training()
    h.died("traces-s/0")
    up = h("actor.spawned", at="traces-s/1", cls="X", role="actor", ms=100)
    told = h.recorded(error="ActorDied", outcome="not_done", ms=2200)
    row = h.end().judged("store_is_found_again")
    assert row.result == "fail" and row.witness == (up.seq, told.seq)


def test_no_answer_is_no_pass() -> None:
    assert Training().end().judged("store_is_found_again").result == "inconclusive"


# --- buffer_answers ---


def test_a_buffer_that_answers() -> None:
    h = Training()
    h.call("buffer-s", "count", at="client-s-0-0/0")
    h.call("buffer-s", "put", at="producer-s/0", took_ms=60_000)
    h.call("other", "count", at="client-s-0-0/0", took_ms=60_000)
    row = h.end().judged("buffer_answers")
    assert (row.result, row.judged) == ("pass", 1)


def test_a_buffer_that_waits_for_the_store() -> None:
    h = Training()
    h.call("buffer-s", "contents", at="client-s-0-0/0", took_ms=2500)
    row = h.end().judged("buffer_answers")
    assert row.result == "fail" and "2.500 s" in row.explain


def test_a_fault_of_the_buffer_itself_explains_any_time() -> None:
    h = Training()
    h("fault.injected", at="world/0", fault=1, name="sigstop", target="buffer-s")
    h.call("buffer-s", "count", at="client-s-0-0/0", took_ms=5000)
    h("fault.healed", at="world/0", fault=1)
    h.call("buffer-s", "count", at="client-s-0-0/0", took_ms=5000, error="ActorDied", outcome="unknown")
    assert h.end().judged("buffer_answers").result == "inconclusive"


# --- reference_freed_once ---


def test_a_value_that_is_read_and_then_ends() -> None:
    h = Training()
    h.stored()
    h("object.read", at=B, object="o1")
    h("object.freed", at="traces-s/0", object="o1")
    row = h.end().judged("reference_freed_once")
    assert (row.result, row.judged) == ("pass", 2)


def test_a_second_free() -> None:
    h = Training()
    h.stored()
    first = h("object.freed", at="traces-s/0", object="o1")
    second = h("object.freed", at="learner-s/0", object="o1")
    row = h.end().judged("reference_freed_once")
    assert row.result == "fail" and row.witness == (first.seq, second.seq)


def test_a_free_of_what_its_last_holder_gave_back() -> None:
    h = Training()
    h.stored()
    h("object.given_back", at="traces-s/0", object="o1", holder="trace/x")
    h("object.freed", at="learner-s/0", object="o1")
    assert h.end().judged("reference_freed_once").result == "fail"


def test_a_read_after_the_end() -> None:
    h = Training()
    h.stored()
    freed = h("object.freed", at="buffer-s/0", object="o1")
    read = h("object.read", at=B, object="o1", ok=False, error="ObjectFreed")
    row = h.end().judged("reference_freed_once")
    assert row.result == "fail" and row.witness == (freed.seq, read.seq) and "by buffer-s" in row.explain


def test_the_death_of_who_put_or_held_it_is_no_owners_fault() -> None:
    h = Training()
    h.stored("o1")
    h.value("o2")
    h.died("traces-s/0")
    h("object.read", at=B, object="o1", ok=False, error="ObjectFreed")
    h.died(A)
    h("object.read", at=B, object="o2", ok=False, error="ObjectLost")
    assert h.end().judged("reference_freed_once").result == "inconclusive"


# --- no_reference_left ---


def test_what_is_left_is_of_the_buffer() -> None:
    h = Training()
    h.stored("o1")
    h.value("o2", "rollout/u")
    h.stored("o3", "y")
    h("object.freed", at="traces-s/0", object="o3")
    h.look("x", rows=[ROW, ("u", "", "COMPLETED", 2)], when="final")
    row = h.end().judged("no_reference_left")
    assert (row.result, row.observed) == ("pass", "2 needed by groups in the buffer, 0 left over")


def test_a_value_that_nobody_ever_ends() -> None:
    for holder in ("rollout/gone", "turn/r1"):
        h = Training()
        put = h.value("o1", holder)
        last = h.look("x", rows=[ROW], when="final")
        row = h.end().judged("no_reference_left")
        assert row.result == "fail" and row.witness == (put.seq, last.seq)


def test_a_hold_under_a_name_of_ones_own_is_doubtful_and_a_death_is_passed_over() -> None:
    h = Training()
    h.value("o1", "my own")
    h.look(when="final")
    assert h.end().judged("no_reference_left").result == "inconclusive"
    h = Training()
    h.value("o1")
    h.died("learner-s/0")
    h.look(when="final")
    row = h.end().judged("no_reference_left")
    assert (row.result, row.judged) == ("inconclusive", 0)


# --- criteria ---

KEPT = [{"cleanups_kept_others": {"at_least": 1}}]
BETWEEN = [{"recorded_between_take_and_cleanup": {"at_least": 1}}]


def test_a_cleanup_that_others_lived_through() -> None:
    h = Training()
    h.recorded()
    h.call("traces-s", "release_sessions", at="learner-s/0")
    h.looked()
    assert h.end().judged("cleanups_kept_others", acceptance=KEPT).result == "pass"


def test_a_cleanup_while_nobody_had_anything_in_the_store_shows_nothing() -> None:
    h = Training()
    h.call("traces-s", "release_sessions", at="learner-s/0")
    h.recorded()
    h.looked()
    h.call("traces-s", "release_sessions", at="evaluator-s/0")
    h.looked()
    row = h.end().judged("cleanups_kept_others", acceptance=KEPT)
    assert row.result == "fail" and "0 of 1 cleanups" in row.explain
    assert Training().end().judged("cleanups_kept_others", acceptance=KEPT).result == "inconclusive"


def test_a_turn_between_take_and_cleanup() -> None:
    for recorded, result in ((True, "pass"), (False, "fail")):
        h = Training()
        h.recorded()
        h.call("buffer-s", "take_batch", at="learner-s/0")
        if recorded:
            h.recorded()
        h.call("traces-s", "release_sessions", at="learner-s/0")
        row = h.end().judged("recorded_between_take_and_cleanup", acceptance=BETWEEN)
        assert (row.result, row.judged) == (result, 1)
