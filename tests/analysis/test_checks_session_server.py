"""The checks of session servers on short histories."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.checks import CheckResult
from analysis.checks.session_server import (
    FailuresAreTold,
    OnlyGenerationsAreTouched,
    PromptsContinueTheRecord,
    SessionsAreReleased,
    SessionTurnsAreTraced,
)
from tests.analysis.history import History

ENGINE = "policy-0/0"


def begun() -> History:
    h = History()
    h("session_servers.deployed", service="policy", servers=["entrypoint-policy-0"], store="traces-policy")
    return h


def turn(h: History, name: str = "r1", *, seen: str = "ok", reason: str = "length", **fields: Any) -> None:
    """A turn up to what its client has seen; ``reason`` empty: no engine ended it."""
    h(
        "http.sent", request=name, session=fields.pop("session", "s"), format="openai",
        traced=fields.pop("traced", True), after=fields.pop("after", ""), leaves="",
    )  # fmt: skip
    h.sent(name)
    h.accepted(name, at=ENGINE)
    if reason:
        h("engine.finished", at=ENGINE, request=name, reason=reason, completion_tokens=8, spans=[])
    h("http.seen", request=name, seen=seen, **fields)


def traced(h: History, name: str = "r1", found: bool = True, error: str = "") -> None:
    h("http.traced", request=name, session="s", when="at_once", found=found, error=error)


def row(h: History, check: Any) -> CheckResult:
    return h.end().judged(check.name)


@pytest.mark.parametrize(
    ("seen", "reason", "found", "result"),
    [
        ("ok", "length", True, "pass"),
        ("ok", "length", False, "fail"),  # the end was told before the record
        ("left", "length", True, "pass"),
        ("left", "length", False, "fail"),  # the turn is lost
        ("left", "abort", False, "fail"),  # the generation was given up
        ("ok", "abort", True, "fail"),  # an aborted turn is no turn
        ("left", "", False, "pass"),  # no engine has ended it
    ],
)
def test_turns_are_traced(seen: str, reason: str, found: bool, result: str) -> None:
    h = begun()
    turn(h, seen=seen, reason=reason)
    traced(h, found=found)
    found_row = row(h, SessionTurnsAreTraced)
    assert found_row.result == result
    assert bool(found_row.witness) == (result == "fail")


def test_a_turn_that_failed_need_not_be_traced_and_is_nothing_judged() -> None:
    h = begun()
    turn(h, seen="error")
    assert row(h, SessionTurnsAreTraced).result == "inconclusive"


@pytest.mark.parametrize(
    ("error", "client", "result"),
    [("ActorDied", "client/0", "pass"), ("ConnectionLost", "client/0", "fail"), ("ActorDied", "other/0", "fail")],
)
def test_a_killed_server_that_nobody_brings_back_breaks_connections_for_ever(
    error: str, client: str, result: str
) -> None:
    h = begun()
    h("actor.spawned", at="entrypoint-policy-0/1", role="actor", node="n0")
    h("fault.injected", fault=1, name="sigkill", target="entrypoint-policy-0")
    h("fault.healed", fault=1, name="sigkill", target="entrypoint-policy-0", hits=0)
    h("actor.death_noticed", at="client/0", target="entrypoint-policy-0", target_inc=1)
    h("http.sent", request="r1", session="s", format="openai", at=client, ms=10**6)
    h.sent("r1", at=client)
    h("http.seen", request="r1", seen="broken", at=client)
    h.done("r1", outcome="unknown", status=0, error=error, at=client)
    assert row(h, FailuresAreTold).result == result


def test_a_broken_connection_of_which_no_end_is_on_record_is_told_all_the_same() -> None:
    h = begun()
    h("http.sent", request="r1", session="s", format="openai")
    h("http.seen", request="r1", seen="broken")
    assert row(h, FailuresAreTold).result == "fail"


def test_a_store_that_does_not_answer_is_a_doubt() -> None:
    h = begun()
    turn(h)
    traced(h, found=False, error="ActorDied")
    assert row(h, SessionTurnsAreTraced).result == "inconclusive"


@pytest.mark.parametrize(
    ("seen", "result"),
    [
        ("ok", "pass"), ("error", "pass"), ("malformed", "fail"), ("incomplete", "fail"), ("foreign_error", "fail"),
        ("broken", "fail"), ("left", "inconclusive"),
    ],
)  # fmt: skip
def test_failures_are_told(seen: str, result: str) -> None:
    h = begun()
    turn(h, seen=seen)
    assert row(h, FailuresAreTold).result == result


@pytest.mark.parametrize(("continues", "result"), [("r1", "pass"), ("", "fail"), ("r0", "fail")])
def test_prompts_continue(continues: str, result: str) -> None:
    h = begun()
    for name, after, goes_on in (("r1", "", ""), ("r2", "r1", continues)):
        h("http.sent", request=name, session="s", format="openai", traced=True, after=after)
        h(
            "engine.prompt",
            at=ENGINE,
            request=name,
            route="/v1/chat/completions",
            tokens=9,
            continues=goes_on,
            unasked=[],
        )
        h("http.seen", request=name, seen="ok")
    assert row(h, PromptsContinueTheRecord).result == result


def test_another_process_need_not_know_the_turn_before() -> None:
    h = begun()
    for name, after, at in (("r1", "", ENGINE), ("r2", "r1", "policy-0/1")):
        h("http.sent", request=name, session="s", format="openai", traced=True, after=after)
        h("engine.prompt", at=at, request=name, route="/v1/chat/completions", tokens=9, unasked=[])
        h("http.seen", request=name, seen="ok")
    assert row(h, PromptsContinueTheRecord).result == "inconclusive"


@pytest.mark.parametrize(
    ("request_id", "unasked", "result"),
    [
        ("r1", ["input_ids", "return_token_ids"], "pass"),
        ("r1", ["session_id"], "fail"),
        ("r1", ["model_step"], "fail"),
        ("", [], "pass"),
        ("", ["input_ids"], "fail"),
    ],
)
def test_only_generations_are_touched(request_id: str, unasked: list[str], result: str) -> None:
    h = begun()
    h("engine.prompt", at=ENGINE, request=request_id, route="/v1/messages/count_tokens", unasked=unasked)
    assert row(h, OnlyGenerationsAreTouched).result == result


def test_another_call_that_comes_back_changed() -> None:
    h = begun()
    h("http.passed", route="GET /v1/models", status=500, as_expected=False)
    assert row(h, OnlyGenerationsAreTouched).result == "fail"


@pytest.mark.parametrize(
    ("turns", "released", "result"), [(2, True, "pass"), (2, False, "fail"), (0, False, "inconclusive")]
)
def test_sessions_are_released(turns: int, released: bool, result: str) -> None:
    h = begun()
    h("http.released", session="17", traced=turns, released=released)
    assert row(h, SessionsAreReleased).result == result
