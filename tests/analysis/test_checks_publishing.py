"""The checks and criteria of publications and affinity, on histories of a few events."""

from __future__ import annotations

import itertools

import pytest

from tests.analysis.history import History

UPDATE, CONTINUE, PAUSE = "/update_weights_from_disk", "/continue_generation", "/pause_generation"


class Published(History):
    """Two entrypoints with gates before two replicas; deadlines of 10 s."""

    def __init__(self, world: str = "sim", clock_error_ms: int = 0) -> None:
        super().__init__(clock_error_ms, world=world)
        self("run.workload", at="driver/0")
        self(
            "publishing.deployed", at="driver/0", service="s", controller="controller-s", router="affinity-s",
            entrypoints=[[f"entrypoint-s-{n}", f"gate-s-{n}", f"s-{n}"] for n in range(2)], prepare_timeout_s=10.0,
            resume_timeout_s=10.0,
        )  # fmt: skip
        self("publication.asked", at="driver/0", service="s", model_step=0)
        self._calls = itertools.count(1)

    def call(
        self, target: str, method: str, *, outcome: str = "done", error: str = "", took_ms: int = 1,
        at: str = "controller-s/0", target_inc: int = 0,
    ) -> None:  # fmt: skip
        number = next(self._calls)
        sent = self("call.sent", at=at, call=number, target=target, target_inc=target_inc, method=method)
        self("call.done", at=at, call=number, outcome=outcome, error=error, ms=sent.t_ns // 10**6 + took_ms)

    def gates(self, method: str) -> None:
        for number in range(2):
            self.call(f"gate-s-{number}", method)

    def updates(self) -> None:
        for number in range(2):
            self.call(f"s-{number}", UPDATE, at="admin/0")

    def cycle(self, *stages: str) -> None:
        """A publication, in the order given."""
        for stage in stages:
            if stage == UPDATE:
                self.updates()
            elif stage == CONTINUE:
                self.call("s-0", CONTINUE, at="admin/0")
            else:
                self.gates(stage)

    def turn(
        self, request: str, step: int, *, ran: str | None = "s-0/0", version: str = "", finish_reason: str = "length"
    ) -> None:
        """A turn from its request to its answer, stamped with a step."""
        self("turn.sent", request=request, session="x", service="s")
        self.sent(request)
        if ran is not None:
            self.accepted(request, at=ran)
            self.finished(request, at=ran, version=version or str(step))
        self("turn.done", request=request, session="x", model_step=step, entrypoint="entrypoint-s-0",
             finish_reason=finish_reason)  # fmt: skip
        self("request.done", request=request, outcome="done", status=200)


def test_every_token_is_of_the_version_on_the_answer() -> None:
    for version, expected in (("1", "pass"), ("2", "fail")):
        h = Published()
        h.turn("r1", 1, version=version)
        assert h.end().judged("turn_of_one_version").result == expected


def test_a_turn_that_no_engine_is_seen_to_have_run_is_undecided() -> None:
    h = Published()
    h.turn("r1", 1)
    h.turn("r2", 1, ran=None)
    row = h.end().judged("turn_of_one_version")
    assert (row.result, row.required) == ("inconclusive", True)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (("seal", "drain", UPDATE, "install_version", CONTINUE, "reopen"), "pass"),
        (("seal", UPDATE, "drain", "install_version", CONTINUE, "reopen"), "fail"),
        (("seal", "drain", UPDATE, CONTINUE, "install_version", "reopen"), "fail"),
        (("seal", "drain", UPDATE, "reopen", "install_version", CONTINUE), "fail"),
        ((UPDATE,), "fail"),
    ],
)
def test_the_order_of_a_publication(stages: tuple[str, ...], expected: str) -> None:
    h = Published()
    h.cycle(*stages)
    assert h.end().judged("publication_order").result == expected


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        ("nothing", "fail"),
        ("fenced", "inconclusive"),  # what it serves is not known
        ("fenced, failed", "pass"),
        ("fenced, another's failed", "fail"),
        ("fenced, failed before", "fail"),
        ("fenced, asked in vain", "pass"),
        ("fenced, serves another", "pass"),
        ("fenced, serves the same", "fail"),
        ("died", "pass"),
        ("not updated", "pass"),
    ],
)
def test_an_entrypoint_left_out_of_a_resumption(why: str, expected: str) -> None:
    h = Published()
    h.cycle("seal", "drain")
    if why == "fenced, failed before":
        h.call("controller-s", "targets", at="publisher/0")
        h.call("s-1", UPDATE, at="admin/0", outcome="unknown", error="ReadTimeout")
        h.call("controller-s", "targets", at="publisher/0")  # and now all of them again
    for number in range(1 if why == "not updated" else 2):
        failed = {"fenced, failed": 1, "fenced, another's failed": 0}.get(why) == number
        h.call(f"s-{number}", UPDATE, at="admin/0", outcome="unknown" if failed else "done")
        if why not in ("fenced", "fenced, serves another"):
            h("engine.weights", at=f"s-{number}/0", version="1", weight_hash="h1")
    if why == "fenced, serves another":
        h("engine.weights", at="s-0/0", version="1", weight_hash="h1")
        h.ready("s-1/0", version="0")
    if why == "fenced, asked in vain":
        h.call("controller-s", "targets", at="publisher/0")
        h.call("s-1", "/model_info", at="publisher/0", outcome="unknown", error="ReadTimeout")
    if why.startswith("fenced"):
        h.call("controller-s", "fence", at="publisher/0")
    elif why == "died":
        h("actor.died", at="s-1/0", reason="killed")
    h.call("gate-s-0", "install_version")
    h.call("s-0", CONTINUE, at="admin/0")
    h.call("gate-s-0", "reopen")
    assert h.end().judged("publication_order").result == expected


def test_an_update_of_a_process_that_replaces_another() -> None:
    for served, expected in ((False, "inconclusive"), (True, "fail")):
        h = Published()
        h("engine.started", at="s-1/1")
        if served:
            h.call("s-1", "/generate", at="entrypoint-s-1/0", target_inc=1)
        h.call("s-1", UPDATE, at="recovery/0", target_inc=1)
        assert h.end().judged("publication_order").result == expected


def test_a_stamp_without_a_version_behind_a_gate() -> None:
    h = Published()
    h.turn("r1", -1, version="1")
    assert h.end().judged("turn_of_one_version").result == "fail"


@pytest.mark.parametrize("told", [True, False])
def test_a_turn_answered_as_aborted_that_no_engine_ran(told: bool) -> None:
    h = Published()
    if told:
        h.call("controller-s", "pause_generation", at="publisher/0")
        h.call("entrypoint-s-0", "set_aborting")
    h.turn("r1", 1, ran=None, finish_reason="abort")
    assert h.end().judged("aborted_is_not_completed").result == ("pass" if told else "fail")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("goes on", "fail"),
        ("dies", "fail"),
        ("does not hear", "pass"),
        ("is told again", "pass"),
        ("is told again meanwhile", "pass"),
    ],
)
@pytest.mark.parametrize("clock_error_ms", [0, 50])
def test_an_entrypoint_aborts_from_its_telling_to_its_end(what: str, expected: str, clock_error_ms: int) -> None:
    h = Published(clock_error_ms=clock_error_ms)
    h.call("controller-s", "pause_generation", at="publisher/0")
    h.call("entrypoint-s-0", "set_aborting")
    if what == "dies":
        h("actor.died", at="entrypoint-s-0/0", reason="killed")
    elif what == "is told again meanwhile":
        h.call("controller-s", "continue_generation", at="publisher/0")
        slow = h("call.sent", at="controller-s/0", call=99, target="entrypoint-s-0", method="set_aborting")
        h.call("controller-s", "pause_generation", at="publisher/0")
        h.call("entrypoint-s-0", "set_aborting")
        h("call.done", at="controller-s/0", call=slow.data["call"], outcome="done")
    else:
        h.call("controller-s", "continue_generation", at="publisher/0")
        h.call("entrypoint-s-0", "set_aborting", outcome="unknown" if what == "does not hear" else "done")
    if what == "is told again":
        h.call("controller-s", "pause_generation", at="publisher/0")
        h.call("entrypoint-s-0", "set_aborting")
    h.turn("r1", 1, ran=None, finish_reason="abort")
    wanted = "inconclusive" if clock_error_ms and expected == "fail" else expected
    assert h.end().judged("aborted_is_not_completed").result == wanted


@pytest.mark.parametrize(
    ("by", "mode", "when", "expected"),
    [
        ("controller-s/0", "abort", "meanwhile", "fail"),
        ("controller-s/0", "abort", "before", "pass"),
        ("controller-s/0", "abort", "after the continue", "pass"),
        ("controller-s/0", "abort", "to its successor", "pass"),
        ("controller-s/0", "in_place", "meanwhile", "inconclusive"),
        ("prober-s/0", "abort", "meanwhile", "inconclusive"),
    ],
)
def test_a_turn_is_sent_into_an_abort(by: str, mode: str, when: str, expected: str) -> None:
    h = Published()
    if when == "before":
        h.call("s-0", "/generate", at="entrypoint-s-0/0")
    post = h("call.sent", at=by, call=99, target="s-0", target_inc=0, method="/pause_generation")
    h("engine.post", at="s-0/0", route="/pause_generation", cause=post)
    h("engine.paused", at="s-0/0", mode=mode)
    h.call("s-1", "/generate", at="entrypoint-s-1/0")
    if when == "after the continue":
        h("engine.resumed", at="s-0/0")
    if when != "before":
        h.call("s-0", "/generate", at="entrypoint-s-0/0", target_inc=int(when == "to its successor"))
    assert h.end().judged("no_turn_into_an_abort").result == expected


@pytest.mark.parametrize(("where", "expected"), [("before", "pass"), ("into the engine after", "fail")])
def test_a_turn_that_was_there_while_its_entrypoint_was_to_abort(where: str, expected: str) -> None:
    h = Published()
    h.call("controller-s", "pause_generation", at="publisher/0")
    h.call("entrypoint-s-0", "set_aborting")
    h("turn.sent", request="r1", session="x", service="s")
    h.sent("r1")
    h.call("controller-s", "continue_generation", at="publisher/0")
    h.call("entrypoint-s-0", "set_aborting")
    if where != "before":
        h.accepted("r1", at="s-0/0")
    h("turn.done", request="r1", model_step=1, entrypoint="entrypoint-s-0", finish_reason="abort")
    assert h.end().judged("aborted_is_not_completed").result == expected


def test_an_update_under_a_lease() -> None:
    for settled, expected in ((True, "pass"), (False, "fail")):
        h = Published()
        h.call("gate-s-0", "request", at="entrypoint-s-0/0")
        if settled:
            h.call("gate-s-0", "settle", at="entrypoint-s-0/0")
        h.updates()
        assert h.end().judged("no_update_under_lease").result == expected


def test_an_update_while_a_turn_runs() -> None:
    h = Published()
    h("turn.sent", request="r1", session="x", service="s")
    h.accepted("r1", at="s-0/0")
    h.updates()
    assert h.end().judged("no_update_under_lease").result == "fail"


@pytest.mark.parametrize(("world", "times", "expected"), [("real", 1, "pass"), ("real", 2, "fail"), ("sim", 1, "fail")])
def test_an_update_after_the_refusal_of_a_turn(world: str, times: int, expected: str) -> None:
    # A real engine is seen to accept what it then refuses; of two with one id it refuses the second.
    h = Published(world=world)
    h("turn.sent", request="r1", session="x", service="s")
    h.sent("r1")
    for _ in range(times):
        h.accepted("r1", at="s-0/0")
    h("engine.refused", at="s-0/0", request="r1", status=400, why="too long")
    h.updates()
    assert h.end().judged("no_update_under_lease").result == expected


def test_what_passes_a_gate_after_an_unknown_outcome() -> None:
    for outcome, error, expected in (("done", "", "pass"), ("unknown", "ReadTimeout", "fail")):
        h = Published()
        h.call("s-0", "/generate", at="entrypoint-s-0/0", outcome=outcome, error=error)
        h.gates("drain")
        assert h.end().judged("poisoned_gate_admits_nothing").result == expected


def test_one_deadline() -> None:
    for took_ms, expected in ((10_900, "pass"), (11_100, "fail")):
        h = Published()
        h.call("controller-s", "prepare_pause", at="publisher/0", took_ms=took_ms)
        assert h.end().judged("one_deadline").result == expected


def test_a_session_stays_on_its_backend() -> None:
    for second, expected in (("s-0/0", "pass"), ("s-1/0", "fail")):
        h = Published()
        h.turn("r1", 0)
        h.turn("r2", 0, ran=second)
        assert h.end().judged("one_backend_a_session").result == expected


def test_a_late_request_of_a_retired_session() -> None:
    for status, expected in ((410, "pass"), (200, "fail")):
        h = Published()
        h("session.ended", session="x", service="s", turns=1, outcome="completed", retired=True)
        h("session.late", session="x", request="late", status=status)
        assert h.end().judged("one_backend_a_session").result == expected


def test_the_router_at_the_end() -> None:
    for bindings, expected in ((0, "pass"), (1, "fail")):
        h = Published()
        h("affinity.snapshot", service="s", bindings=bindings, at="driver/0")
        assert h.end().judged("router_empty_at_the_end").result == expected


def test_a_router_that_nobody_could_look_at() -> None:
    row = Published().end().judged("router_empty_at_the_end")
    assert (row.result, row.applicable, row.explain) == ("inconclusive", True, "nothing was judged")


# --- criteria ---


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("turns_at_versions", {"model_steps": [0, 1], "at_least": 1}),
        ("sessions_across_updates", {"at_least": 1}),
        ("distinct_weights", {"at_least": 2}),
    ],
)
def test_what_has_not_come_is_undecided_where_the_evidence_has_no_end(name: str, parameters: dict[str, object]) -> None:
    def history(*steps: int) -> History:
        h = Published()
        for step in steps:
            h("engine.weights", at="s-0/0", version=str(step), weight_hash=f"hash-{step}", ok=True)
            h.turn(f"r{step}", step)
        h("session.ended", session="x", service="s", turns=len(steps), outcome="completed", retired=True)
        return h

    asked = {"acceptance": ({name: parameters},)}
    assert history(0).judged(name, **asked).result == "inconclusive"
    assert history(0).end().judged(name, **asked).result == "fail"
    assert history(0, 1).end().judged(name, **asked).result == "pass"


def test_turns_at_a_version_that_was_not_asked_for() -> None:
    h = Published()
    h.turn("r1", 0)
    h.turn("r2", 7)
    assert h.judged("turns_at_versions", acceptance=({"turns_at_versions": {"model_steps": [0]}},)).result == "fail"


def barrier(h: Published, *, until: str = "") -> None:
    """A barrier of controller-s, whose health is held and who asks the gateway who is there, up to a stage."""
    for target, method in (
        ("gateway-s", "roster"), ("health-s", "hold"), ("gate-s-0", "seal"), ("gate-s-1", "seal"),
        ("gate-s-0", "reopen"), ("gate-s-1", "reopen"), ("health-s", "resume"),
    ):  # fmt: skip
        if method == until:
            return
        h.call(target, method)


def test_health_acts_only_outside_of_barriers() -> None:
    for until, method, expected in (
        ("resume", "recover", "fail"), ("resume", "set_routable", "fail"), ("", "recover", "pass"),
        ("reopen", "recover", "fail"), ("resume", "/ready", "pass"),
    ):  # fmt: skip
        h = Published()
        barrier(h, until=until)
        h.call("recovery-s", method, at="health-s/0")
        assert h.end().judged("health_holds_in_a_barrier").result == expected


def test_health_that_is_let_go_before_the_reopening_is_in_the_barrier_yet() -> None:
    for outcome, sealed_again, expected in (
        ("", False, "fail"), ("unknown", False, "fail"), ("done", False, "pass"), ("done", True, "fail"),
    ):  # fmt: skip
        h = Published()
        barrier(h, until="reopen")
        if outcome:
            h.call("gate-s-0", "reopen", outcome=outcome)
        if sealed_again:  # the resumption had failed, and the topology had changed
            h.gates("seal")
        h.call("health-s", "resume")
        h.call("recovery-s", "recover", at="health-s/0")
        assert h.end().judged("health_holds_in_a_barrier").result == expected


def test_health_that_was_never_told_to_hold_is_who_asks_the_gateway() -> None:
    h = Published()
    h.call("gateway-s", "roster")
    h.call("gateway-s", "health_view", at="health-s/0")
    h.gates("seal")
    h.call("recovery-s", "recover", at="health-s/0")
    assert h.end().judged("health_holds_in_a_barrier").result == "fail"


def test_health_that_could_not_be_told_is_excused_until_it_answers() -> None:
    for outcome, expected in (("unknown", "pass"), ("done", "fail")):
        h = Published()
        barrier(h, until="resume")
        h.call("health-s", "hold", outcome="unknown", error="CancelledError")
        h.call("health-s", "hold", outcome=outcome)
        h.call("recovery-s", "recover", at="health-s/0")
        assert h.end().judged("health_holds_in_a_barrier").result == expected


def test_one_barrier_at_a_time() -> None:
    for between, outcome, expected in (
        ("barrier", "done", "fail"), ("resume_requests", "done", "pass"), ("resume_requests", "unknown", "pass"),
        ("targets", "done", "fail"), ("targets", "not_done", "pass"),
    ):  # fmt: skip
        h = Published()
        h.call("controller-s", "prepare_pause", at="publisher/0")
        h.call("controller-s", between, at="publisher/0", outcome=outcome)
        h.call("controller-s", "prepare_pause", at="publisher/0")
        assert h.end().judged("one_barrier").result == expected


def test_who_dies_with_a_resumption_under_way_leaves_no_barrier_that_nobody_has_resumed() -> None:
    for dies, expected in (("publisher", "pass"), ("bystander", "fail")):
        h = Published()
        h.call("controller-s", "prepare_pause", at="publisher/0")
        h("call.sent", at="publisher/0", call=900, target="controller-s", target_inc=0, method="resume_requests")
        h("actor.died", at=f"{dies}/0", reason="killed", detail="")
        h.call("controller-s", "prepare_pause", at="publisher/1")
        assert h.end().judged("one_barrier").result == expected


def test_no_native_pause_beside_a_barrier() -> None:
    for method, when, expected in (
        ("pause_generation", "before", "fail"), ("pause_generation", "after", "fail"),
        ("continue_generation", "after", "pass"),
        ("pause_generation", "apart", "pass"),
    ):  # fmt: skip
        h = Published()
        h.call("controller-s", "prepare_pause", at="publisher/0")  # so that something is judged
        if when == "after":
            h.gates("seal")
        asked = h("call.sent", at="publisher/0", call=900, target="controller-s", target_inc=0, method=method)
        h("call.sent", at="controller-s/0", call=901, target="entrypoint-s-0", target_inc=0, method="set_aborting",
          cause=asked)  # fmt: skip
        if when == "before":
            h.gates("seal")
        h("call.done", at="controller-s/0", call=901, outcome="done", error="")
        if when == "apart":
            h.gates("seal")
        assert h.end().judged("one_barrier").result == expected


def told_to_abort(h: Published, cause: object) -> None:
    h("call.sent", at="controller-s/0", call=901, target="entrypoint-s-0", target_inc=0, method="set_aborting",
      cause=cause)  # fmt: skip
    h("call.done", at="controller-s/0", call=901, outcome="done", error="")


def test_a_native_pause_after_a_resumption_whose_answer_was_lost() -> None:
    for reopened, error, expected in (
        (2, "ReadTimeout", "pass"), (1, "ReadTimeout", "inconclusive"), (0, "ReadTimeout", "inconclusive"),
        (0, "BarrierError", "fail"), (1, "BarrierError", "fail"),
    ):  # fmt: skip
        h = Published()
        h.call("controller-s", "prepare_pause", at="publisher/0")
        h.gates("seal")
        for number in range(reopened):
            h.call(f"gate-s-{number}", "reopen")
        h.call("controller-s", "resume_requests", at="publisher/0", outcome="unknown", error=error)
        asked = h("call.sent", at="p/0", call=900, target="controller-s", target_inc=0, method="pause_generation")
        told_to_abort(h, asked)
        assert h.end().judged("one_barrier").result == expected


def test_a_native_pause_is_at_work_until_it_has_answered() -> None:
    for outcome, expected in (("unknown", "fail"), ("done", "pass"), ("not_done", "pass")):
        h = Published()
        h.call("controller-s", "prepare_pause", at="publisher/0")
        h.gates("seal")
        asked = h("call.sent", at="p/0", call=900, target="controller-s", target_inc=0, method="pause_generation")
        h("call.done", at="p/0", call=900, outcome=outcome, error="")
        told_to_abort(h, asked)
        assert h.end().judged("one_barrier").result == expected


def test_a_barrier_after_one_of_which_nobody_knows_whether_it_was_over() -> None:
    h = Published()
    h.call("controller-s", "prepare_pause", at="publisher/0")
    h.gates("seal")
    h.call("controller-s", "resume_requests", at="publisher/0", outcome="unknown", error="ReadTimeout")
    h.gates("seal")
    asked = h("call.sent", at="p/0", call=900, target="controller-s", target_inc=0, method="pause_generation")
    told_to_abort(h, asked)
    assert h.end().judged("one_barrier").result == "fail"


def grant(h: Published, lease: str, active: int, step: int = 0, at: str = "gate-s-0/0") -> None:
    h("gate.granted", at=at, lease=lease, session="x", epoch=1, model_step=step, active=active)


def settle(h: Published, lease: str, active: int) -> None:
    h("gate.settled", at="gate-s-0/0", lease=lease, backend_ended=True, terminal_recorded=True, label="completed",
      active=active)  # fmt: skip


def test_leases_add_up() -> None:
    for counted, settled, expected in ((2, "b", "pass"), (3, "b", "fail"), (2, "c", "fail"), (2, "", "fail")):
        h = Published()
        grant(h, "a", 1)
        grant(h, "b", counted)
        settle(h, "a", 1)
        if settled:
            settle(h, settled, 0)
        h("affinity.snapshot", service="s", at="driver/0")
        h("actor.died", at="gate-s-0/0", reason="killed")
        assert h.end().judged("leases_add_up").result == expected


def test_leases_of_a_poisoned_gate_or_a_dead_entrypoint_are_nobodys_fault() -> None:
    for kind, at in (("gate.poisoned", "gate-s-0/0"), ("actor.died", "entrypoint-s-0/0")):
        h = Published()
        grant(h, "a", 1)
        h(kind, at=at)
        h("affinity.snapshot", service="s", at="driver/0")
        h("actor.died", at="gate-s-0/0", reason="killed")
        assert h.end().judged("leases_add_up").result == "pass"


def test_versions_never_go_back() -> None:
    for step, installed, expected in ((1, True, "pass"), (1, False, "fail"), (0, False, "pass"), (-1, True, "fail")):
        h = Published()
        for method in ("drain", "install_version"):
            h.gates(method)
        grant(h, "a", 1)
        if installed:
            for method in ("seal", "drain", "install_version", "reopen"):
                h.gates(method)
        grant(h, "b", 2, step, at="gate-s-0/1")
        assert h.end().judged("versions_never_go_back").result == expected


CYCLE = ("seal", "drain", "install_version", "reopen")


def test_what_an_earlier_barrier_installed_says_nothing_of_a_later_version() -> None:
    for cycles, expected in (((CYCLE,), "fail"), ((CYCLE, CYCLE), "pass"), ((CYCLE, ("seal", "reopen")), "fail")):
        h = Published()
        for method in CYCLE:
            h.gates(method)
        grant(h, "a", 1)
        for number, methods in enumerate(cycles):
            if number:
                grant(h, "b", 2)  # of the version that was published again
            for method in methods:
                h.gates(method)
        if len(cycles) == 1:
            h.gates("seal")
        grant(h, "c", 3, 1)
        assert h.end().judged("versions_never_go_back").result == expected


def test_a_version_whose_installation_was_not_done_is_not_installed() -> None:
    for outcome, expected in (("done", "pass"), ("not_done", "fail"), ("unknown", "fail")):
        h = Published()
        for method in CYCLE:
            h.gates(method)
        grant(h, "a", 1)
        h.gates("seal")
        h.gates("drain")
        h.call("gate-s-0", "install_version", outcome=outcome, error="" if outcome == "done" else "x")
        grant(h, "b", 2, 1)
        assert h.end().judged("versions_never_go_back").result == expected


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ("sealed 1, drained 1, installed 1, reopened 1, granted 1, sealed 2", "pass"),
        ("sealed 1, sealed 2, drained 2, installed 2, reopened 2, granted 2", "pass"),
        ("granted 0, sealed 1, drained 1", "pass"),  # born open
        ("sealed 1, granted 1", "fail"),
        ("granted 0, sealed 1, drained 1, granted 0", "fail"),
        ("sealed 1, drained 1, installed 1, reopened 1, sealed 2, reopened 1", "fail"),
        ("sealed 2, sealed 1", "fail"),
        ("sealed 1, drained 2", "fail"),
        ("sealed 1, installed 1, drained 1", "fail"),
        ("sealed 1, sealed 1", "fail"),
        ("reopened 1, granted 1", "fail"),
        ("sealed 1, drained 1, installed 1, reopened 1, granted 0", "fail"),
    ],
)
def test_old_epochs_do_nothing(story: str, expected: str) -> None:
    h = Published()
    for number, told in enumerate(story.split(", ")):
        what, epoch = told.split()
        both = {"at": "gate-s-0/0", "epoch": int(epoch), "model_step": 0}
        if what == "granted":
            h("gate.granted", lease=f"l{number}", session="x", active=1, **both)
        else:
            h("gate.changed", what=what, **both)
    assert h.end().judged("old_epochs_do_nothing").result == expected


def test_each_incarnation_of_a_gate_has_epochs_of_its_own() -> None:
    h = Published()
    h("gate.changed", at="gate-s-0/0", what="sealed", epoch=5, model_step=0)
    h("actor.died", at="gate-s-0/0", reason="killed")
    h("gate.changed", at="gate-s-0/1", what="sealed", epoch=1, model_step=0)
    assert h.end().judged("old_epochs_do_nothing").result == "pass"


def test_a_turn_that_was_given_up_and_its_session_retired() -> None:
    for sent_after, expected in ((True, "fail"), (False, "pass")):
        h = Published()
        h.turn("r0", 0)
        h("turn.sent", request="r1", session="x", service="s")
        h.sent("r1")
        call = {"call": 900, "target": "s-0", "target_inc": 0, "method": "/generate"}
        if not sent_after:
            sent = h("call.sent", at="entrypoint-s-0/0", **call)
        h("request.done", request="r1", outcome="unknown", status=0, error="GaveUp")
        h("session.ended", session="x", service="s", turns=1, outcome="failed", retired=True)
        if sent_after:
            sent = h("call.sent", at="entrypoint-s-0/0", **call)
        h.accepted("r1", at="s-0/0", cause=sent)
        assert h.end().judged("one_backend_a_session").result == expected


@pytest.mark.parametrize(
    ("pause", "effect", "expected"),
    [
        ("", False, "pass"),  # a controller that pauses nobody: gates are drained
        ("done", True, "pass"),
        ("not_done", False, "fail"),
        ("done", False, "fail"),
        ("unknown", False, "pass"),  # not judged: it may have had its effect, and its answer was lost
        ("unknown, again in vain", False, "fail"),
        ("not_done, sealed again", False, "pass"),
        ("not_done, died", False, "pass"),  # its successor is given its weights before it serves anybody
    ],
)
def test_what_did_not_pause_is_not_updated(pause: str, effect: bool, expected: str) -> None:
    h = Published()
    h.cycle("seal", "drain")
    if pause:
        h.call("s-1", PAUSE, outcome=pause.partition(",")[0])
    if effect:
        h("engine.paused", at="s-1/0", mode="abort")
    if pause.endswith("again in vain"):
        h.call("s-1", PAUSE, outcome="not_done")
    if pause.endswith("sealed again"):
        h.cycle("seal", "drain")
    if pause.endswith("died"):
        h("actor.died", at="s-1/0", reason="killed")
        h("engine.started", at="s-1/1")
    h.call("s-1", UPDATE, at="admin/0", target_inc=int(pause.endswith("died")))
    row = h.end().judged("publication_order")
    assert row.result == expected
    if expected == "fail":
        assert "was asked to pause and has not" in row.explain and len(row.witness) == 2


def test_a_pause_that_somebody_else_asks_for_is_no_stage_of_a_publication() -> None:
    h = Published()
    h.cycle("seal", "drain")
    h.call("s-1", PAUSE, outcome="not_done", at="admin/0")
    h.call("s-1", UPDATE, at="admin/0")
    assert h.end().judged("publication_order").result == "pass"


@pytest.mark.parametrize(
    ("versions", "outcome", "expected"),
    [
        (("1", "1"), "done", "pass"),
        (("0", "1"), "done", "pass"),  # one is fenced
        (("0", "0"), "done", "fail"),
        (("0", ""), "done", "inconclusive"),  # what the other one serves nobody has seen
        (("0", "0"), "not_done", "inconclusive"),  # nothing was published, and nothing is judged
    ],
)
def test_what_is_published_is_served(versions: tuple[str, ...], outcome: str, expected: str) -> None:
    h = Published()
    for number, version in enumerate(versions):
        if version:
            h.ready(f"s-{number}/0", version="0")
            h("engine.weights", at=f"s-{number}/0", version=version)
    h("publication.ended", at="driver/0", service="s", model_step=1, outcome=outcome)
    row = h.end().judged("published_is_served")
    assert row.result == expected and bool(row.witness) == (expected == "fail" or (versions[1] == ""))


@pytest.mark.parametrize(
    ("history", "expected", "explain"),
    [
        # served by one that is dead when the publication ends
        ("0=0 1=0 ask 0=1 0.died end", "inconclusive", "s-0, which served it, has died since, and nobody else serves"),
        ("0=0 1=0 ask 0=1 1=1 0.died end", "pass", ""),
        # ... and another process is in its place: with older weights, not ready yet, or with those of the version
        ("0=0 1=0 ask 0=1 0.died 0.started/1 0=0/1 end", "inconclusive", "s-0, which served it, has died since"),
        ("0=0 1=0 ask 0=1 0.died 0.started/1 end", "inconclusive", "what its replicas serve is not known"),
        ("0=0 1=0 ask 0=1 0.died 0.started/1 0=1/1 end", "pass", ""),
        # it had served that before this publication: that does not count
        ("0=1 1=0 0.died ask end", "fail", "ended done, and its replicas serve 0"),
        ("0=1 1=0 0.died 0.started/1 0=0/1 ask end", "fail", "ended done, and its replicas serve 0"),
        # the dead had something else
        ("0=0 1=0 ask 0.died end", "fail", "ended done, and its replicas serve 0"),
        ("0=0 1=0 ask 0.died 1.died end", "inconclusive", "none of its replicas is alive"),
        # what is heard late of a process that has died says nothing of the one in its place
        ("0=0 1=0 0=1/1 ask 0.died end", "pass", ""),
        ("0=0 1=0 0.died 0.started/1 0=0/1 ask 0=1/0 end", "fail", "ended done, and its replicas serve 0"),
    ],
)  # fmt: skip
def test_what_is_published_is_served_by_one_that_is_alive(history: str, expected: str, explain: str) -> None:
    h = Published()
    for step in history.split():
        what, _, inc = step.partition("/")
        at = f"s-{what[0]}/{inc or 0}"
        if what == "ask":
            h("publication.asked", at="driver/0", service="s", model_step=1)
        elif what == "end":
            h("publication.ended", at="driver/0", service="s", model_step=1, outcome="done")
        elif what.endswith("died"):
            h("actor.died", at=at, reason="killed")
        elif what.endswith("started"):
            h("engine.started", at=at)
        else:
            h("engine.weights", at=at, version=what[-1])
    row = h.end().judged("published_is_served")
    assert row.result == expected and explain in row.explain and bool(row.witness) == (expected != "pass")
