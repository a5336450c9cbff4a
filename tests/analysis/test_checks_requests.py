"""Request checks on hand-written histories: passing, failing, inconclusive."""

from __future__ import annotations

import pytest

from analysis.rundir import Preregistered
from analysis.verdict import Judge
from tests.analysis.history import History


def history() -> History:
    h = History()
    h.ready()
    return h


# --- nothing_lost
def test_nothing_lost_passes() -> None:
    h = history()
    h.served("r1")
    row = h.end().judged("nothing_lost")
    assert (row.result, row.judged, row.observed) == ("pass", 1, "1 sent, 1 ended")


def test_a_request_that_never_ends_is_lost() -> None:
    h = history()
    sent = h.sent("r1")
    row = h.end().judged("nothing_lost")
    assert (row.result, row.witness) == ("fail", (sent.seq,))
    assert row.explain == "request r1 was sent and never ended"


def test_a_request_that_ends_twice_or_from_nowhere_fails() -> None:
    h = history()
    h.served("r1")
    again = h.done("r1")
    row = h.end().judged("nothing_lost")
    assert (row.result, row.witness) == ("fail", (again.seq,))


def test_ending_twice_is_seen_while_an_engine_still_runs_it() -> None:
    h = history()
    sent = h.sent("r1")
    h.accepted("r1")
    first = h.done("r1", outcome="unknown", status=0)
    second = h.done("r1")
    h.finished("r1")
    assert h.end().judged("nothing_lost").witness == (sent.seq, first.seq, second.seq)


def test_open_requests_of_a_cut_run_are_inconclusive() -> None:
    h = history()
    sent = h.sent("r1")
    row = h.judged("nothing_lost")
    assert (row.result, row.witness) == ("inconclusive", (sent.seq,))


def test_open_requests_of_a_deadlock_are_lost() -> None:
    h = history()
    h.sent("r1")
    assert h.end(reason="deadlock").judged("nothing_lost").result == "fail"


def test_no_requests_at_all_are_inconclusive() -> None:
    assert history().end().judged("nothing_lost").result == "inconclusive"


# --- nothing_twice
def test_an_idempotent_request_may_run_twice() -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1", at="e0/1")
    h.accepted("r1", at="e1/1")
    h.finished("r1", at="e0/1")
    h.finished("r1", at="e1/1")
    h.done("r1", at_engine="e1/1")
    assert h.end().judged("nothing_twice").result == "pass"


def test_a_non_idempotent_request_on_two_engines_fails() -> None:
    h = history()
    h.sent("r1", idempotent=False)
    h.accepted("r1", at="e0/1")
    h.accepted("r1", at="e1/1")
    first = h.finished("r1", at="e0/1")
    second = h.finished("r1", at="e1/1")
    h.done("r1", at_engine="e1/1")
    row = h.end().judged("nothing_twice")
    assert (row.result, row.witness) == ("fail", (first.seq, second.seq))
    assert "took effect on e0/1 and on e1/1" in row.explain


def test_a_late_copy_after_the_answer_still_counts() -> None:
    h = history()
    h.sent("r1", idempotent=False)
    h.accepted("r1", at="e0/1")
    h.finished("r1", at="e0/1")
    h.done("r1", at_engine="e0/1")
    h.accepted("r1", at="e1/1")
    h.finished("r1", at="e1/1")
    assert h.end().judged("nothing_twice").result == "fail"


def test_an_abort_without_tokens_is_no_effect() -> None:
    h = history()
    h.sent("r1", idempotent=False)
    h.accepted("r1", at="e0/1")
    h.finished("r1", at="e0/1", tokens=0, spans=[])
    h.accepted("r1", at="e1/1")
    h.finished("r1", at="e1/1")
    h.done("r1", at_engine="e1/1")
    assert h.end().judged("nothing_twice").result == "pass"


def test_nothing_finished_is_inconclusive_for_nothing_twice() -> None:
    h = history()
    h.sent("r1")
    assert h.judged("nothing_twice").result == "inconclusive"


# --- answer_is_the_engines
def test_an_answer_of_another_version_fails() -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1")
    made = h.finished("r1", version="1")
    told = h.done("r1", version="2")
    row = h.end().judged("answer_is_the_engines")
    assert (row.result, row.witness) == ("fail", (made.seq, told.seq))


def test_an_answer_with_tokens_missing_fails() -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1")
    h.finished("r1", tokens=8)
    h.done("r1", tokens=7)
    assert h.end().judged("answer_is_the_engines").result == "fail"


def test_an_answer_that_no_engine_made_fails() -> None:
    h = history()
    sent = h.sent("r1")
    told = h.done("r1", at_engine="e9/1")
    row = h.end().judged("answer_is_the_engines")
    assert (row.result, row.witness) == ("fail", (sent.seq, told.seq))


def test_an_answer_without_a_replica_name_is_judged_by_any_engine() -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1")
    h.finished("r1")
    h.done("r1", at_engine="/0")
    assert h.end().judged("answer_is_the_engines").result == "pass"


@pytest.mark.parametrize(
    ("form", "stream", "expected"),
    [("openai", False, "fail"), ("openai", True, "pass"), ("anthropic", False, "pass"), ("anthropic", True, "pass")],
)
def test_only_forms_of_answers_without_a_version_may_name_none(form: str, stream: bool, expected: str) -> None:
    h = history()
    h("http.sent", request="r1", session="x", format=form, stream=stream)
    h.sent("r1")
    h.accepted("r1")
    h.finished("r1")
    h.done("r1", at_engine="/0", version="")
    assert h.end().judged("answer_is_the_engines").result == expected


@pytest.mark.parametrize("accepted", [True, False])
def test_an_abort_before_any_engine_had_the_turn(accepted: bool) -> None:
    h = history()
    h.served("r0")
    h.sent("r1")
    if accepted:
        h.accepted("r1")
    h("turn.done", request="r1", session="x", finish_reason="abort", entrypoint="entrypoint-0")
    h.done("r1", at_engine="/0", tokens=0, version="")
    assert h.end().judged("answer_is_the_engines").result == ("fail" if accepted else "pass")


def test_an_answer_survives_the_death_of_its_engine() -> None:
    h = history()
    h.sent("r1")
    h.accepted("r1")
    h.finished("r1")
    h("actor.died", at="e0/1", reason="killed")
    h.done("r1")
    assert h.end().judged("answer_is_the_engines").result == "pass"


def test_only_failures_are_inconclusive_for_answers() -> None:
    h = history()
    h.sent("r1")
    h.done("r1", outcome="not_done", status=503)
    assert h.end().judged("answer_is_the_engines").result == "inconclusive"


# --- unexplained_failures
def test_a_failure_without_a_fault_is_unexplained() -> None:
    h = history()
    sent = h.sent("r1")
    failed = h.done("r1", outcome="unknown", status=0, error="ReadTimeout")
    row = h.end().judged("unexplained_failures")
    assert (row.result, row.witness) == ("fail", (sent.seq, failed.seq))
    assert "ended unknown with status 0 (ReadTimeout) while no fault was on that can touch it" in row.explain


def test_a_failure_during_a_fault_is_explained() -> None:
    h = history()
    h.sent("r1")
    h("fault.injected", fault=1, name="sigkill", target="e0")
    h.done("r1", outcome="unknown", status=0)
    row = h.end().judged("unexplained_failures")
    assert row.result == "pass"
    assert "1 sigkill on e0" in row.observed


@pytest.mark.parametrize(
    ("name", "target", "explains"),
    [
        ("sigkill", "e0", True),
        ("sigkill", "e1", True),  # the other replica: what it can no longer serve, this one must
        ("sigkill", "gw", True),
        ("sigkill", "admin", False),
        ("node_loss", "n0", True),
        ("node_loss", "n1", False),
        ("partition", "gw>e0", True),
        ("partition", "e0>gw", True),
        ("connect_timeout", "admin>trainer", False),
        ("latency", "*>*", True),
        ("torn_export", "exports", False),
        ("slow_export", "exports", False),
        ("sigkill", "who-knows", True),
    ],
)
def test_only_faults_on_the_path_of_requests_explain(name: str, target: str, explains: bool) -> None:
    h = History()
    for process, role, node in (("e0/1", "engine", "n0"), ("e1/1", "engine", "n0"), ("gw/1", "actor", "n0")):
        h("actor.spawned", at=process, role=role, node=node)
    for process in ("admin/1", "trainer/1"):
        h("actor.spawned", at=process, role="actor", node="n1")
    h.ready()
    h.sent("r0")
    h.accepted("r0", cause=h("call.sent", at="gw/1", call=1, target="e0"))
    h("fault.injected", fault=1, name=name, target=target)
    h.done("r0", outcome="unknown", status=0)
    assert h.judged("unexplained_failures").result == ("pass" if explains else "fail")


@pytest.mark.parametrize(("target", "explains"), [("router", True), ("gate", True), ("controller", False)])
def test_the_router_and_the_gates_of_agents_are_on_the_path(target: str, explains: bool) -> None:
    h = History()
    for process in ("router/1", "controller/1", "entrypoint/1", "gate/1"):
        h("actor.spawned", at=process, role="actor", node="n0")
    h("publishing.deployed", at="driver/0", service="s", entrypoints=[["entrypoint", "gate", "e0"]],
      controller="controller", router="router", prepare_timeout_s=9.0, resume_timeout_s=9.0)  # fmt: skip
    h.sent("r0")
    h("fault.injected", fault=1, name="restart_empty", target=target)
    h.done("r0", outcome="unknown", status=0, error="ActorDied")
    assert h.judged("unexplained_failures").result == ("pass" if explains else "fail")


def test_the_sender_of_probes_is_not_on_the_path() -> None:
    h = History()
    h("actor.spawned", at="health/1", role="actor", node="n1")
    h.accepted("probe-1", cause=h("call.sent", at="health/1", call=1, target="e0"))
    h.sent("r0")
    h("fault.injected", fault=1, name="read_timeout", target="health>*")
    h.done("r0", outcome="unknown", status=0)
    assert h.judged("unexplained_failures").result == "fail"


def test_the_shadow_of_a_fault_ends() -> None:
    def run(ms: int) -> str:
        h = history()
        h("fault.injected", fault=1, name="sigkill", target="e0", ms=10)
        h("fault.healed", fault=1, name="sigkill", target="e0", hits=1, ms=20)
        h.sent("r1", ms=ms)
        h.done("r1", outcome="unknown", status=0)
        return h.end().judged("unexplained_failures", shadow_s=1).result

    assert run(1019) == "pass"
    assert run(1021) == "fail"


def test_a_failure_before_the_fault_is_not_explained_by_it() -> None:
    h = history()
    h.sent("r1")
    h.done("r1", outcome="not_done", status=503)
    h("fault.injected", fault=1, name="sigkill", target="e0")
    assert h.end().judged("unexplained_failures").result == "fail"


def test_a_refusal_by_the_engine_explains_itself() -> None:
    h = history()
    h.sent("r1")
    h("engine.refused", at="e0/1", request="r1", status=400, why="too long")
    h.done("r1", outcome="not_done", status=400)
    row = h.end().judged("unexplained_failures")
    assert row.result == "pass" and "refused with 400" in row.observed


@pytest.mark.parametrize("world", ["real", "sim"])
def test_a_real_engine_is_seen_to_accept_what_it_then_refuses(world: str) -> None:
    h = History(clock_error_ms=-1)
    h("run.started", world=world, schema=1)
    h.sent("r1")
    h.accepted("r1")
    if world == "real":
        h.accepted("r1")
    h("engine.refused", at="e0/1", request="r1", status=400, why="Duplicate request ID")  # the second one
    h.finished("r1")
    h.done("r1")
    judge = Judge(Preregistered())
    for event in h.end().events:
        judge.feed(event)
    assert not judge._ledger.requests  # nobody runs it any more
    assert {row.name: row.result for row in judge.verdict().checks}["answer_is_the_engines"] == "pass"


@pytest.mark.parametrize("world", ["real", "sim"])
@pytest.mark.parametrize(
    ("earlier", "expected"), [("runs", "fail"), ("ended", "pass"), ("elsewhere", "pass"), ("none", "pass")]
)
def test_an_id_that_its_own_sender_has_live_there_is_no_refusal(world: str, earlier: str, expected: str) -> None:
    h = History(world=world)
    h.sent("r1")
    if earlier != "none":
        h.accepted("r1", at="e1/1" if earlier == "elsewhere" else "e0/1")
    if earlier == "ended":
        h.finished("r1")
    if world == "real":
        h.accepted("r1")  # what stands in front of it sees it go in
    h("engine.refused", at="e0/1", request="r1", status=400, why="Duplicate request ID detected: r1")
    h.done("r1", outcome="unknown", status=400, error="HttpError")
    assert h.end().judged("unexplained_failures").result == expected


def test_a_refusal_does_not_explain_another_status() -> None:
    h = history()
    h.sent("r1")
    h("engine.refused", at="e0/1", request="r1", status=400, why="too long")
    h.done("r1", outcome="not_done", status=503)
    assert h.end().judged("unexplained_failures").result == "fail"


class Aborted(History):
    """A turn that a server sends to an engine, and of which its client is told that it was aborted."""

    def __init__(self, client_server: str = "server/0") -> None:
        super().__init__()
        self.ready()
        self.sent("r1")
        self.accepted("r1", cause=self("call.sent", at=client_server, call=1, target="e0", method="/v1/messages"))

    def post(self, route: str, by: str | None) -> None:
        cause = None if by is None else self("call.sent", at=by, call=2, target="e0", method=route)
        self("engine.post", at="e0/1", route=route, cause=cause)
        if route == "/abort_request":
            self("engine.abort_asked", at="e0/1", request="r1", everything=False, cause=cause)
        elif route == "/update_weight_version":
            self("engine.abort_asked", at="e0/1", request="", everything=True, cause=cause)
        elif route == "/pause_generation":
            self("engine.paused", at="e0/1", mode="abort")

    def told(self) -> History:
        self("engine.finished", at="e0/1", request="r1", reason="abort", completion_tokens=3, spans=[])
        self.done("r1", outcome="unknown", status=503, error="HttpError", at_engine="/-1", tokens=0, version="")
        return self.end()


@pytest.mark.parametrize("route", ["/abort_request", "/pause_generation", "/update_weight_version"])
@pytest.mark.parametrize(
    ("by", "expected"), [("operator/0", "pass"), ("server/0", "fail"), ("server/1", "fail"), (None, "inconclusive")]
)
def test_who_had_an_engine_abort_it(route: str, by: str | None, expected: str) -> None:
    h = Aborted()
    h.post(route, by)
    row = h.told().judged("unexplained_failures")
    assert row.result == expected
    if expected == "pass":
        assert "1 aborted by its engine, as operator had asked" in row.observed
    elif expected == "fail":
        assert "its engine aborted it, and nobody but its sender wanted that" in row.explain


def test_an_engine_that_aborts_without_being_asked_had_lost_its_caller() -> None:
    assert Aborted().told().judged("unexplained_failures").result == "fail"
    h = Aborted()
    h("engine.abort_asked", at="e0/1", request="r1", everything=False)  # it ends others of which the id begins so
    assert h.told().judged("unexplained_failures").result == "fail"


def test_an_abort_of_another_turn_or_at_another_engine_or_before_explains_nothing() -> None:
    h = Aborted()
    cause = h("call.sent", at="operator/0", call=2, target="e0", method="/abort_request")
    h("engine.abort_asked", at="e0/1", request="r2", everything=False, cause=cause)
    h("engine.abort_asked", at="e1/1", request="r1", everything=False, cause=cause)
    h("engine.paused", at="e1/1", mode="abort")
    h("engine.paused", at="e0/1", mode="in_place")
    assert h.told().judged("unexplained_failures").result == "fail"
    early = Aborted()
    early.post("/pause_generation", "operator/0")
    early("engine.resumed", at="e0/1")
    assert early.told().judged("unexplained_failures").result == "fail"


def test_a_server_that_is_killed_explains_what_its_engine_aborts() -> None:
    h = Aborted()
    h("fault.injected", fault=1, name="sigkill", target="server")
    assert h.told().judged("unexplained_failures").result == "pass"


# --- a killed actor that nobody brings back
def killed(replaced: bool = False) -> History:
    """A judge before a gateway, killed at 10 ms; its client was told."""
    h = History()
    h("actor.spawned", at="judge/1", role="actor", node="n0")
    h("fault.injected", fault=1, name="sigkill", target="judge", ms=10)
    h("actor.died", at="judge/1", reason="killed")
    h("fault.healed", fault=1, name="sigkill", target="judge", hits=0)
    h("actor.death_noticed", at="client/0", target="judge", target_inc=1)
    if replaced:
        h("actor.spawned", at="judge/2", role="actor", node="n0", ms=1000)
    return h


@pytest.mark.parametrize(
    ("replaced", "ms", "error", "client", "expected"),
    [
        (False, 60_000, "ActorDied", "client/0", "pass"),
        (False, 60_000, "ReadTimeout", "client/0", "fail"),
        (False, 60_000, "ActorDied", "other/0", "fail"),  # who was told of no death
        (True, 1500, "ActorDied", "client/0", "pass"),
        (True, 60_000, "ActorDied", "client/0", "fail"),
    ],
)
def test_a_killed_actor_is_missed_until_a_later_incarnation_is_there(
    replaced: bool, ms: int, error: str, client: str, expected: str
) -> None:
    h = killed(replaced)
    h.sent("r1", ms=ms, at=client)
    h.done("r1", outcome="not_done", status=0, error=error, at=client)
    assert h.end().judged("unexplained_failures", shadow_s=1).result == expected


def test_a_killed_engine_is_somebodys_to_bring_back() -> None:
    h = History()
    h("actor.spawned", at="e0/1", role="engine", node="n0")
    h("fault.injected", fault=1, name="sigkill", target="e0", ms=10)
    h("fault.healed", fault=1, name="sigkill", target="e0", hits=0)
    h.sent("r1", ms=60_000)
    h.done("r1", outcome="unknown", status=0, error="ActorDied")
    assert h.end().judged("unexplained_failures", shadow_s=1).result == "fail"


def test_no_ended_request_is_inconclusive_for_failures() -> None:
    h = history()
    h.sent("r1")
    assert h.judged("unexplained_failures").result == "inconclusive"


# --- converges
def healed(h: History) -> None:
    h("fault.injected", fault=1, name="sigstop", target="e0")
    h("fault.healed", fault=1, name="sigstop", target="e0", hits=1)
    h("run.healed", faults=1, ms=100)


def test_converges_in_time() -> None:
    h = history()
    h.sent("r1")
    healed(h)
    h.done("r1", ms=1000)
    row = h.end().judged("converges", converge_within_s=1)
    assert (row.result, row.judged) == ("pass", 1)


def test_with_no_request_after_the_last_healing_nothing_is_known_of_it() -> None:
    h = history()
    h.sent("r1")
    h.done("r1")
    healed(h)
    assert h.end().judged("converges").result == "inconclusive"


def test_too_late_after_the_last_healing_fails() -> None:
    h = history()
    sent = h.sent("r1")
    healed(h)
    late = h.done("r1", ms=1101)
    row = h.end().judged("converges", converge_within_s=1)
    assert row.result == "fail"
    assert set(row.witness) >= {sent.seq, late.seq}


def test_still_open_long_after_the_healing_fails() -> None:
    h = history()
    h.sent("r1")
    healed(h)
    h("actor.spawned", at="x/1", cls="X", role="actor", ms=5000)
    assert h.judged("converges", converge_within_s=1).result == "fail"


def test_a_bound_missed_by_less_than_the_clock_error_is_inconclusive() -> None:
    h = History(clock_error_ms=50)
    h.sent("r1")
    healed(h)
    h.done("r1", ms=1130)
    assert h.end().judged("converges", converge_within_s=1).result == "inconclusive"


def test_faults_without_a_last_healing_are_inconclusive() -> None:
    h = history()
    h("fault.injected", fault=1, name="sigstop", target="e0")
    h.served("r1")
    assert h.end().judged("converges").result == "inconclusive"
