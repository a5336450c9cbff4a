"""The life cycle of an autoscaler's requests, and what stops a decision (scaling.md 6.3, 6.5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.scaling.bodies import ApiReply
from tests.protocol.scaling.autoscaler_world import LOST, REFUSED, Stage, page, play

# --- the life cycle of a request ---


def test_a_decision_becomes_an_operation_and_then_history() -> None:
    async def body(at: Stage) -> None:
        await asyncio.sleep(5.5)
        assert [(d, b["num_replicas"]) for d, b in at.genrm.posts] == [("scale_out", 3)]
        pending = (await at.view())["pending_requests"]
        assert [(one["request_id"], one["status"], one["cleanup"]) for one in pending] == [
            ("op-0", "PENDING", "unknown")
        ]
        at.genrm.end("ACTIVE")
        await asyncio.sleep(5)
        (item,) = await at.history()
        assert (item["status"], item["from_engines"], item["to_engines"], item["delta"]) == ("ACTIVE", 1, 3, 2)
        assert (
            item["triggered_conditions"] == ["token_usage_high"] and item["metrics_snapshot"]["avg_token_usage"] == 0.95
        )
        assert item["completed_at"] > item["triggered_at"] and not (await at.view())["pending_requests"]

    play(body)


def test_a_lost_answer_is_asked_for_again_under_the_same_key() -> None:
    """M18: whichever attempt was accepted, there is one entry and one cooldown, from the acceptance."""

    async def body(at: Stage) -> None:
        at.genrm.submits = [LOST, LOST, LOST]
        await asyncio.sleep(5.5)
        assert len(at.genrm.posts) == 2 and (await at.view())["pending_requests"][0]["status"] == "SUBMITTING"
        await asyncio.sleep(5)
        assert len(at.genrm.posts) == 4 and len(at.genrm.keys) == 1
        view = await at.view()
        assert [one["status"] for one in view["pending_requests"]] == ["PENDING"]
        assert view["total_scale_operations"] == 1
        at.genrm.end("ACTIVE")
        await asyncio.sleep(19)  # accepted at 10 s, so nothing is decided before 30 s
        assert len(at.genrm.keys) == 1
        await asyncio.sleep(5)
        assert len(at.genrm.keys) == 2

    play(body)


@pytest.mark.parametrize(("before", "after"), [(300.0, 600.0), (300.0, None), (None, 600.0)])
def test_what_is_sent_again_is_what_was_sent(before: float | None, after: float | None) -> None:
    """A PATCH between a lost answer and the next attempt: another budget under the same key would be a conflict, and
    the operation that was accepted would be followed by nobody."""

    async def body(at: Stage) -> None:
        at.genrm.submits = [LOST, LOST]
        await asyncio.sleep(5.5)
        assert (await at.api.patch_config({"scale_out_request_timeout_secs": after})).status == 200
        await asyncio.sleep(5.5)
        first, *others = [sent for _, sent in at.genrm.posts]
        assert len(others) == 2 and all(sent == first for sent in others) and first.get("timeout_secs") == before
        view = await at.view()
        assert [one["request_id"] for one in view["pending_requests"]] == ["op-0"] and not await at.history()
        assert view["last_scale_action"] == "scale_out" and view["total_scale_operations"] == 1
        at.genrm.end("ACTIVE")
        await asyncio.sleep(6)
        at.genrm.posts.clear()
        await asyncio.sleep(22)  # the cooldown is over, and the next request is another one: it has the new budget
        assert [sent.get("timeout_secs") for _, sent in at.genrm.posts] == [after]

    play(body, scale_out_request_timeout_secs=before)


def test_a_replayed_terminal_state_proves_nothing() -> None:
    """M17: the replay says FAILED; only the status says whether it is clean."""

    async def body(at: Stage) -> None:
        at.genrm.submits = [LOST, LOST]
        await asyncio.sleep(5.5)
        at.genrm.end("FAILED", True)
        at.genrm.reconcile_cleans = False
        await asyncio.sleep(5)
        (pending,) = (await at.view())["pending_requests"]
        assert (pending["status"], pending["cleanup"]) == ("PENDING", "unknown")
        await asyncio.sleep(5)
        (pending,) = (await at.view())["pending_requests"]
        assert (pending["status"], pending["cleanup"]) == ("FAILED", "true") and at.genrm.reconciles

    play(body)


@pytest.mark.parametrize("flag", [True, None, "false", 0])
def test_an_operation_that_is_not_clean_stops_every_decision(flag: Any) -> None:
    """M16, M19: true, absent and malformed are all not clean; nothing is decided until a reconcile says false."""

    async def body(at: Stage) -> None:
        at.genrm.reconcile_cleans = False
        await asyncio.sleep(5.5)
        at.genrm.end("ACTIVE", flag)
        await asyncio.sleep(60)
        assert len(at.genrm.keys) == 1 and len(at.genrm.reconciles) > 5 and not await at.history()
        at.genrm.reconcile_cleans = True
        await asyncio.sleep(5)
        assert [item["status"] for item in await at.history()] == ["ACTIVE"]
        await asyncio.sleep(5)
        assert len(at.genrm.keys) == 2

    play(body)


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ([ApiReply(409, {"error": "CONFLICT", "detail": "another"})], "CONFLICT"),
        ([ApiReply(503, {"error": "CAPACITY_UNKNOWN"})], "REJECTED"),
        ([ApiReply(400, {"error": "INVALID_RANGE"})], "REJECTED"),
        ([ApiReply(200, {"status": "NOOP", "current": 3})], "NOOP"),
        ([REFUSED, REFUSED], "REJECTED"),
        ([LOST, ApiReply(409, {"error": "CONFLICT"})], "CONFLICT"),
    ],
)
def test_a_refused_request_leaves_nothing_open_and_starts_no_cooldown(told: list[Any], status: str) -> None:
    async def body(at: Stage) -> None:
        at.genrm.submits = told
        await asyncio.sleep(5.5)
        assert [item["status"] for item in await at.history()] == [status]
        view = await at.view()
        assert not view["pending_requests"] and view["last_scale_action"] is None
        await asyncio.sleep(5)
        assert (await at.view())["last_scale_action"] == "scale_out"

    play(body)


@pytest.mark.parametrize("told", [ApiReply(503, {"error": "CAPACITY_UNKNOWN"}), ApiReply(500, {}), REFUSED])
def test_what_says_nothing_of_the_attempt_before_does_not_drop_it(told: Any) -> None:
    """A 503 comes before the look at the key: the submission before it may have been accepted all the same."""

    async def body(at: Stage) -> None:
        at.genrm.submits = [LOST, told]
        await asyncio.sleep(5.5)
        assert [one["status"] for one in (await at.view())["pending_requests"]] == ["SUBMITTING"]
        await asyncio.sleep(5)
        assert len(at.genrm.keys) == 1 and (await at.view())["pending_requests"][0]["request_id"] == "op-0"

    play(body)


def test_an_operation_that_the_service_has_lost_is_no_success_and_no_wait() -> None:
    """M54."""

    async def body(at: Stage) -> None:
        await asyncio.sleep(5.5)
        at.genrm.forgets = True
        await asyncio.sleep(5)
        (item,) = await at.history()
        assert item["status"] == "ERROR" and "does not know" in item["error_message"]

    play(body)


def test_the_budget_goes_with_scale_outs_only() -> None:
    async def body(at: Stage) -> None:
        await asyncio.sleep(5.5)
        assert at.genrm.posts[0][1]["timeout_secs"] == 120
        at.genrm.end("ACTIVE")
        at.load(0.01)
        await asyncio.sleep(30)
        assert at.genrm.posts[1][0] == "scale_in" and "timeout_secs" not in at.genrm.posts[1][1]

    play(body, engines=2, scale_out_request_timeout_secs=120)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.sampled_from(["ok", "lost", "refused", "503", "409", "dirty", "clean", "forget"]), min_size=1, max_size=15
    )
)
def test_there_is_never_more_than_one_open_request(steps: list[str]) -> None:
    """Whatever comes back, a new key is used only once the one before is over, and cooldowns are kept."""
    replies: dict[str, Any] = {
        "lost": LOST, "refused": REFUSED, "503": ApiReply(503, {"error": "X"}), "409": ApiReply(409, {"error": "X"}),
    }  # fmt: skip

    async def body(at: Stage) -> None:
        for step in steps:
            if step in replies:
                at.genrm.submits.append(replies[step])
            elif step == "forget":
                at.genrm.forgets = not at.genrm.forgets
            elif step in ("dirty", "clean") and at.genrm.keys and not at.genrm.forgets:
                operation = at.genrm.operations[f"op-{len(at.genrm.keys) - 1}"]
                operation.update(status="ACTIVE", cleanup_required=step == "dirty")
                at.genrm.reconcile_cleans = step == "clean"
            await asyncio.sleep(7)
            view = await at.view()
            assert len(view["pending_requests"]) <= 1
            assert at.genrm.current == 1  # nothing here changes it, so every target is the same
            assert {b["num_replicas"] for _, b in at.genrm.posts} <= {3}

    play(body)


# --- what stops a decision ---


def test_nothing_is_removed_while_one_replica_is_unknown() -> None:
    async def body(at: Stage) -> None:
        at.pages.pages[16001] = page(token_usage=0.01, num_queue_reqs=0)  # no throughput
        await asyncio.sleep(60)
        assert not at.genrm.posts and "16001" in (await at.view())["last_decision"]["reason"]
        at.pages.pages[16001] = "hang"
        await asyncio.sleep(60)
        assert not at.genrm.posts
        at.load(0.01)
        await asyncio.sleep(30)
        assert [(d, b["num_replicas"]) for d, b in at.genrm.posts] == [("scale_in", 1)]

    play(body, engines=2, usage=0.01)


def test_several_instances_are_not_decided_on() -> None:
    async def body(at: Stage) -> None:
        at.genrm.instances = 2
        await asyncio.sleep(30)
        assert not at.genrm.posts and "2 instances" in (await at.view())["refusal"]

    play(body, metrics_interval_secs=1, scale_out_policy={"condition_duration_secs": 10})


@pytest.mark.parametrize("body", [None, [], {"instances": {"m": 5}}, {"engines": 7}, {"engines": [1, {"host": 2}]}])
def test_an_answer_that_lists_nothing_is_an_empty_frame(body: Any) -> None:
    async def play_it(at: Stage) -> None:
        async def engines() -> ApiReply:
            return ApiReply(200, body)

        at.genrm.engines = engines  # type: ignore[method-assign]
        await asyncio.sleep(30)
        assert not at.genrm.posts and (await at.view())["recent_metrics"]["is_empty"]

    play(play_it, scale_out_policy={"condition_duration_secs": 10})


def test_disabled_it_decides_nothing_and_follows_what_is_open() -> None:
    async def body(at: Stage) -> None:
        await asyncio.sleep(5.5)
        assert (await at.api.enable({"enabled": False})).status == 200
        at.genrm.end("ACTIVE")
        await asyncio.sleep(60)
        assert len(at.genrm.posts) == 1 and len(await at.history()) == 1
        await at.api.enable({"enabled": True})
        await asyncio.sleep(6)
        assert len(at.genrm.posts) == 2

    play(body)
