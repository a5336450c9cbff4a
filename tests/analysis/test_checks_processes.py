"""Process, run and claim checks on hand-written histories: passing, failing, inconclusive."""

from __future__ import annotations

from tests.analysis.history import History


def spawned(h: History, at: str, role: str = "actor", node: str = "n0") -> int:
    return h("actor.spawned", at=at, cls="Gate", node=node, role=role).seq


def died(h: History, at: str, reason: str = "killed", **fields: object) -> int:
    return h("actor.died", at=at, reason=reason, **fields).seq


# --- no_use_after_death
def test_acting_after_death_fails() -> None:
    h = History()
    death = died(h, "gw/1")
    act = h("gateway.picked", at="gw/1", request="r1").seq
    row = h.end().judged("no_use_after_death")
    assert (row.result, row.witness) == ("fail", (death, act))


def test_the_next_incarnation_may_act_and_the_world_may_speak_of_the_dead() -> None:
    h = History()
    died(h, "gw/1")
    h("storage.written", at="gw/1", path="p")
    h("gateway.picked", at="gw/2", request="r1")
    row = h.end().judged("no_use_after_death")
    assert (row.result, row.judged) == ("pass", 1)


def test_a_zombie_acts_by_design() -> None:
    h = History()
    spawned(h, "e0/1", role="engine", node="n1")
    h("node.lost", node="n1", zombie=True)
    died(h, "e0/1", reason="node_lost")
    h.finished("r1", at="e0/1")
    assert h.end().judged("no_use_after_death").result == "pass"


def test_an_answer_made_after_death_fails() -> None:
    h = History()
    death = h("actor.died", at="e0/1", reason="killed")
    reply = h("actor.continued", at="e0/1")
    h("call.sent", call=1, target="e0")
    answer = h("call.done", call=1, outcome="done", cause=reply)
    row = h.end().judged("no_use_after_death")
    assert (row.result, row.witness) == ("fail", (death.seq, answer.seq))


def test_an_answer_made_before_death_may_arrive_after_it() -> None:
    h = History()
    h("call.sent", call=1, target="e0")
    reply = h("actor.continued", at="e0/1")
    died(h, "e0/1")
    h("call.done", call=1, outcome="done", cause=reply)
    assert h.end().judged("no_use_after_death").result == "pass"


def test_an_act_within_the_clock_error_of_the_death_is_inconclusive() -> None:
    def run(gap_ms: int) -> str:
        h = History(clock_error_ms=10)
        died(h, "gw/1", ms=100)
        h("gateway.picked", at="gw/1", request="r1", ms=100 + gap_ms)
        return h.end().judged("no_use_after_death").result

    assert [run(gap) for gap in (-5, 5, 10, 11)] == ["pass", "inconclusive", "inconclusive", "fail"]


def test_nobody_died_is_inconclusive() -> None:
    assert History().end().judged("no_use_after_death").result == "inconclusive"


# --- no_crash
def test_crashes() -> None:
    h = History()
    spawned(h, "gw/1")
    crash = died(h, "gw/1", reason="crashed", detail="Traceback\nKeyError: 'r1'")
    row = h.end().judged("no_crash")
    assert (row.result, row.witness, row.explain) == ("fail", (crash,), "gw/1 crashed: KeyError: 'r1'")


def test_a_killed_actor_or_an_engine_that_exits_is_no_crash() -> None:
    h = History()
    spawned(h, "gw/1")
    spawned(h, "e0/1", role="engine")
    died(h, "gw/1", reason="killed")
    died(h, "e0/1", reason="crashed", detail="export is torn")
    assert h.end().judged("no_crash").result == "pass"
    assert History().end().judged("no_crash").result == "inconclusive"


# --- every_wait_ends
def test_waits_that_end() -> None:
    h = History()
    h("call.sent", call=1)
    h("call.done", call=1, outcome="unknown", error="ActorDied")
    row = h.end().judged("every_wait_ends")
    assert (row.result, row.judged) == ("pass", 1)


def test_a_wait_without_end_fails() -> None:
    h = History()
    sent = h("call.sent", call=1, target="gate-0", method="seal", at="ctl/1")
    h("actor.stopped", at="x/1", ms=61_000)
    row = h.end().judged("every_wait_ends", converge_within_s=60)
    assert (row.result, row.witness) == ("fail", (sent.seq,))
    assert "call 1 of ctl to gate-0.seal was open 61.0" in row.explain


def test_a_wait_whose_caller_died_is_over() -> None:
    h = History()
    h("call.sent", call=1, at="ctl/1")
    h("call.sent", call=2, at="gw/1")
    h("call.done", call=2, outcome="done", at="gw/1")
    died(h, "ctl/1")
    h("actor.stopped", at="x/1", ms=100_000)
    assert h.end().judged("every_wait_ends").result == "pass"


def test_a_wait_in_a_deadlock_fails_at_once() -> None:
    h = History()
    h("call.sent", call=1)
    assert h.end(reason="deadlock").judged("every_wait_ends").result == "fail"


def test_a_call_that_ends_twice_fails() -> None:
    h = History()
    h("call.sent", call=1)
    h("call.done", call=1, outcome="done")
    h("call.done", call=1, outcome="done")
    assert h.end().judged("every_wait_ends").result == "fail"


def test_an_open_wait_in_cut_evidence_is_inconclusive() -> None:
    h = History()
    h("call.sent", call=1)
    assert h.judged("every_wait_ends").result == "inconclusive"


# --- run_finished
def test_a_deadlock_fails_with_who_waits_for_whom() -> None:
    h = History()
    wait = h("run.wait", waiter="gate-0.seal", waits_for="lease 4", should_wake="worker-3")
    h.end(reason="deadlock", detail="2 tasks wait")
    row = h.judged("run_finished")
    assert (row.result, row.witness) == ("fail", (2, wait.seq))
    assert row.explain == "deadlock: 2 tasks wait; gate-0.seal waits for lease 4 (from worker-3)"


def test_a_missing_end_or_a_missing_event_is_inconclusive() -> None:
    h = History()
    assert h.judged("run_finished").result == "inconclusive"
    h.sent("r1")
    h.end()
    del h.events[1]
    row = h.judged("run_finished")
    assert row.result == "inconclusive" and "2 events were recorded before the end, 1 are in" in row.explain


def test_a_crash_of_the_runner_is_inconclusive_and_livelock_fails() -> None:
    assert History().end(reason="crash", detail="boom").judged("run_finished").result == "inconclusive"
    assert History().end(reason="livelock").judged("run_finished").result == "fail"
    assert History().end().judged("run_finished").result == "pass"


def test_a_silent_component_leaves_open_whether_the_run_has_converged() -> None:
    h = History()
    silent = h("run.unheard", who="gateway-chat-0", asked="engines", why="TimeoutError: no answer within 5 s")
    row = h.end().judged("run_finished")
    assert (row.result, row.witness, row.required) == ("inconclusive", (silent.seq,), True)
    assert row.explain.startswith("gateway-chat-0 did not answer engines") and "no answer within 5 s" in row.explain


# --- no_anomalies, no_leaks
def test_anomalies_and_leaks() -> None:
    for check, kind in (("no_anomalies", "run.anomaly"), ("no_leaks", "leak.found")):
        assert History().end().judged(check).result == "pass"
        assert History().judged(check).result == "inconclusive"
        h = History()
        found = h(kind, what="placement", detail="pg-3")
        row = h.end().judged(check)
        assert (row.result, row.witness, row.explain) == ("fail", (found.seq,), "placement: pg-3")


# --- faults_hit
def test_a_fault_that_hit_passes() -> None:
    h = History()
    h("fault.injected", fault=1, name="sigkill", target="e0")
    h("fault.healed", fault=1, name="sigkill", target="e0", hits=3, satisfied=True)
    row = h.end().judged("faults_hit", faults=1)
    assert (row.result, row.observed) == ("pass", "1 injected, 0 without effect or end, 3 hits")


def test_a_fault_that_missed_never_fails_but_is_inconclusive() -> None:
    h = History()
    begun = h("fault.injected", fault=1, name="sigkill", target="e0", must_hit={"in_flight": {"at_least": 3}})
    ended = h("fault.healed", fault=1, name="sigkill", target="e0", satisfied=False)
    row = h.end().judged("faults_hit")
    assert (row.result, row.witness) == ("inconclusive", (begun.seq, ended.seq))


def test_a_fault_that_was_to_meet_nothing_and_hit_nothing_is_inconclusive() -> None:
    h = History()
    begun = h("fault.injected", fault=1, name="sigkill", target="e0", must_hit={}, observed={"in_flight": 0})
    ended = h("fault.healed", fault=1, name="sigkill", target="e0", hits=0, satisfied=True)
    row = h.end().judged("faults_hit")
    assert (row.result, row.witness) == ("inconclusive", (begun.seq, ended.seq))


def test_a_fault_without_end_or_a_step_that_never_fired_is_inconclusive() -> None:
    h = History()
    h("fault.injected", fault=1, name="sigkill", target="e0")
    assert h.end().judged("faults_hit").result == "inconclusive"
    verdict = History().end().verdict(faults=2, required=())
    row = next(row for row in verdict.checks if row.name == "faults_hit")
    assert (row.result, row.required) == ("inconclusive", True)
    assert verdict.result == "inconclusive"


# --- gateway_counts (a claim)
def pick(h: History, request: str, replica: str, count: int) -> None:
    h("gateway.picked", at="gw/1", request=request, replica=replica, replica_inc=1, in_flight=count)


def release(h: History, request: str, replica: str, count: int) -> None:
    h("gateway.released", at="gw/1", request=request, replica=replica, replica_inc=1, in_flight=count)


def test_counts_that_move_pass() -> None:
    h = History()
    pick(h, "r1", "e0", 1)
    h("gateway.moved", at="gw/1", request="r1", old="e0", old_inc=1, replica="e1", replica_inc=1)
    release(h, "r1", "e1", 0)
    assert h.end().judged("gateway_counts").result == "pass"


def test_counts_left_on_the_old_replica_fail() -> None:
    h = History()
    pick(h, "r1", "e0", 1)
    h("gateway.moved", at="gw/1", request="r1", old="e0", old_inc=1, replica="e1", replica_inc=1)
    release(h, "r1", "e0", 0)
    assert h.end().judged("gateway_counts").result == "fail"


def test_counts_die_with_their_gateway() -> None:
    h = History()
    pick(h, "r1", "e0", 1)
    died(h, "gw/1")
    h("gateway.picked", at="gw/2", request="r1", replica="e0", replica_inc=1, in_flight=1)
    h("gateway.released", at="gw/2", request="r1", replica="e0", replica_inc=1, in_flight=0)
    assert h.end().judged("gateway_counts").result == "pass"
    assert History().end().judged("gateway_counts").result == "inconclusive"


def test_a_pick_never_given_back_fails() -> None:
    h = History()
    pick(h, "r1", "e0", 1)
    assert h.end().judged("gateway_counts").result == "fail"


def test_when_the_world_breaks_nothing_is_held_against_components() -> None:
    h = History()
    h("actor.spawned", at="gateway/0", role="actor")
    h("actor.died", at="gateway/0", reason="crashed", detail="OSError: an event could not be written")
    h.sent("r1")
    assert h.judged("no_crash").result == "fail"
    h("run.tail", at="driver/0", process="driver/0", what="broken", detail="the disk of /tmp/x was full")
    h.end("crash", detail="the disk is full")
    for name in ("no_crash", "nothing_lost", "run_finished"):
        row = h.judged(name)
        assert row.result == "inconclusive" and row.required, name
    assert "; but the disk of /tmp/x was full" in h.judged("no_crash").explain
    assert h.verdict().result == "inconclusive"


def test_a_torn_tail_excuses_nothing() -> None:
    h = History()
    h("actor.spawned", at="gateway/0", role="actor")
    h("actor.died", at="gateway/0", reason="crashed")
    h("run.tail", at="driver/0", process="gateway/0", what="silent", detail="it is gone")
    assert h.end().judged("no_crash").result == "fail"
