"""Services of an autoscaler, added, changed and removed while it runs, and its API (scaling.md 6.4, 6.6)."""

from __future__ import annotations

import ast
import asyncio
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConnectionRefused
from protocol.scaling import policy
from protocol.scaling.bodies import ApiReply
from protocol.scaling.policy import AutoscalerConfig
from protocol.scaling.requests import KEPT_HISTORY
from protocol.scaling.targets import NoWayThere
from protocol.scaling.targets import connect as connect_to
from tests.protocol.scaling.autoscaler_world import QUICK, Api, FakeService, Pages, Stage, page, play
from tests.protocol.scaling.world import ScalingWorld, run

# --- services ---

TWO = {"service_targets": {"genrm": "a://genrm", "other": "a://other"}}


def test_a_service_that_hangs_delays_no_other() -> None:
    """M31 and M31b: also not in the rounds after the first."""

    async def body(at: Stage) -> None:
        at.services["a://other"].hangs = True
        at.load(0.5)
        await asyncio.sleep(30)
        at.load(0.95)
        await asyncio.sleep(6)
        assert len(at.genrm.posts) == 1
        evaluated = [e for e in at.world.of("autoscaler.evaluated") if e["service"] == "genrm"]
        assert len(evaluated) == 7

    play(body, **TWO)


def test_a_service_is_added_and_removed_while_it_runs() -> None:
    """M30: its collector runs before it is seen, and stops with it."""

    async def body(at: Stage) -> None:
        assert (await at.api.patch_config({"service_targets": {"other": "a://other"}})).status == 200
        assert (await at.view("other"))["recent_metrics"]["coverage"] == 1.0
        await asyncio.sleep(5.5)
        assert len(at.services["a://other"].posts) == 1
        at.services["a://other"].end("ACTIVE")
        await asyncio.sleep(5)
        assert (await at.api.patch_config({"service_targets": {"other": None}})).status == 200
        assert "other" not in (await at.api.status()).body["services"] and at.services["a://other"].closed == 1
        before = len(at.services["a://other"].posts)
        await asyncio.sleep(60)
        assert len(at.services["a://other"].posts) == before

    play(body)


def test_after_the_end_of_a_run_no_service_decides_nor_one_that_is_added_later() -> None:
    async def body(at: Stage) -> None:
        at.load(0.5)
        assert await at.api.wind_down() == ()
        assert (await at.api.patch_config({"service_targets": {"other": "a://other"}})).status == 200
        assert (await at.api.patch_config({"max_engines": 9})).status == 200
        at.load(0.95)
        await asyncio.sleep(60)
        assert at.services["a://other"].posts == [] and at.genrm.posts == []

    play(body)


@pytest.mark.parametrize("state", ["submitting", "running", "dirty"])
def test_a_service_with_something_open_is_not_removed(state: str) -> None:
    """M36: 409 before anything has changed."""

    async def body(at: Stage) -> None:
        at.genrm.reconcile_cleans = False
        if state == "submitting":
            at.genrm.submit_s = 3.0
        await asyncio.sleep(6)
        if state == "dirty":
            at.genrm.end("FAILED", True)
            await asyncio.sleep(5)
        before = (await at.api.get_config()).body
        reply = await at.api.patch_config({"service_targets": {"genrm": None}, "max_engines": 7})
        assert reply.status == 409 and "cannot be removed" in reply.body["detail"]
        assert (await at.api.get_config()).body == before and "genrm" in (await at.api.status()).body["services"]

    play(body)


def test_a_change_of_configuration_lets_the_worker_finish_its_submission() -> None:
    """M35: accepted while the configuration changed, it is in the books once, with its cooldown."""

    async def body(at: Stage) -> None:
        at.genrm.submit_s = 3.0
        await asyncio.sleep(6)  # sent at 5 s
        assert (await at.api.patch_config({"max_engines": 8})).status == 200
        assert [one["status"] for one in (await at.view())["pending_requests"]] == ["SUBMITTING"]
        await asyncio.sleep(3)
        view = await at.view()
        assert [one["request_id"] for one in view["pending_requests"]] == ["op-0"]
        assert view["max_engines"] == 8 and view["last_scale_action"] == "scale_out"
        at.genrm.submit_s = 0.0
        at.genrm.end("ACTIVE")
        await asyncio.sleep(15)
        assert len(at.genrm.keys) == 1
        await asyncio.sleep(10)
        assert len(at.genrm.keys) == 2
        before = len(at.world.of("autoscaler.evaluated"))
        await asyncio.sleep(50)
        assert len(at.world.of("autoscaler.evaluated")) == before + 10  # one worker, not two

    play(body)


@pytest.mark.parametrize("how", ["connect", "collect", "moved", "interval"])
def test_a_patch_whose_services_do_not_begin_changes_nothing(how: str) -> None:
    """Neither half of it: no target without a runtime, no other bound, no collector of an interval that is not so."""

    async def body(at: Stage) -> None:
        other = at.services["a://other"]

        async def engines() -> ApiReply:
            raise RuntimeError("something nobody foresaw")

        other.engines = engines  # type: ignore[method-assign]  # of this fake alone
        patch: dict[str, Any] = {
            "connect": {"service_targets": {"new": "a://nowhere"}},
            "collect": {"service_targets": {"new": "a://other", "newer": "a://rollout"}},
            "moved": {"service_targets": {"genrm": "a://other"}},
            "interval": {"service_targets": {"new": "a://other"}, "metrics_interval_secs": 2},
        }[how]
        before = (await at.api.get_config()).body
        runtimes = dict(at.api._autoscaler.runtimes)
        with pytest.raises((RuntimeError, KeyError)):
            await at.api.patch_config({**patch, "max_engines": 9})
        assert (await at.api.get_config()).body == before
        assert at.api._autoscaler.runtimes == runtimes and at.genrm.closed == 0
        asked: list[float] = []
        for one in ("a://other", "a://rollout"):

            async def count() -> ApiReply:
                asked.append(asyncio.get_running_loop().time())
                return ApiReply(200, {})

            at.services[one].engines = count  # type: ignore[method-assign]  # of this fake alone
        await asyncio.sleep(6)
        assert len(at.genrm.posts) == 1 and not asked  # it is scaled as before, and no collector was left behind
        assert (await at.api.patch_config({**patch, "max_engines": 9} if how != "connect" else {})).status == 200
        if how != "connect":
            await asyncio.sleep(6)
            assert asked and (await at.view())["max_engines"] == 9

    play(body)


def test_an_autoscaler_that_could_not_start_can_be_started_again() -> None:
    async def body(world: ScalingWorld) -> None:
        world.engines = Pages()  # type: ignore[assignment]  # all that a collector asks of it
        api = Api(AutoscalerConfig.model_validate(QUICK))
        api.services = {}
        await api.start()
        with pytest.raises(KeyError):
            await api.activate()
        assert not (await api.health()).body["started"]
        api.services = {"a://genrm": FakeService("a://genrm")}
        assert (await api.activate()).body == {"started": True, "services": ["genrm"]}
        assert (await api.status()).body["services"]
        await api.stop()

    run(body)


def test_a_service_that_asked_for_something_while_others_began_is_not_removed() -> None:
    """The first look at it was before the new service's first round, which takes a second here."""

    async def body(at: Stage) -> None:
        at.services["a://other"].hangs = True
        await asyncio.sleep(4.5)  # decides at 5 s
        assert not at.genrm.posts
        reply = await at.api.patch_config({"service_targets": {"genrm": None, "new": "a://other"}})
        assert reply.status == 409 and at.genrm.posts
        assert list((await at.api.status()).body["services"]) == ["genrm"]
        at.genrm.end("ACTIVE")
        await asyncio.sleep(6)
        assert [item["status"] for item in await at.history()] == ["ACTIVE"]

    play(body)


def test_requests_follow_the_rollout_url_in_both_spellings() -> None:
    """M32."""

    async def body(at: Stage) -> None:
        await at.api.patch_config({"rollout_service_url": "a://other"})
        await asyncio.sleep(6)
        assert at.services["a://other"].posts and not at.services["a://rollout"].posts
        shown = (await at.api.get_config()).body
        assert shown["service_targets"]["rollout"] == shown["rollout_service_url"] == "a://other"

    play(body, service_targets={"rollout": "a://rollout"})


def test_an_operation_is_followed_where_it_was_sent() -> None:
    async def body(at: Stage) -> None:
        await asyncio.sleep(5.5)
        await at.api.patch_config({"service_targets": {"genrm": "a://other"}})
        at.genrm.end("ACTIVE")
        await asyncio.sleep(6)
        assert [item["status"] for item in await at.history()] == ["ACTIVE"]

    play(body)


def test_an_evaluation_that_breaks_is_noted_and_the_next_one_comes() -> None:
    async def body(at: Stage) -> None:
        at.genrm.submits = [ApiReply(200, None), ApiReply(200, None)]  # type: ignore[arg-type]
        await asyncio.sleep(5.5)
        health = await at.api.health()
        assert health.body["status"] == "degraded" and "AttributeError" in health.body["errors"]["genrm"]
        await asyncio.sleep(10)
        assert (await at.api.health()).body["status"] == "healthy" and len(at.genrm.keys) == 1

    play(body)


_ODD = ['x{a="b", ="c"} 1\n', f"sglang:num_queue_reqs {'9' * 400}\n", f"x 1 {'9' * 400}\n"]


@pytest.mark.parametrize("odd", _ODD, ids=["no_label", "huge", "huge_stamp"])
def test_a_replica_with_an_odd_page_takes_no_service_down(odd: str) -> None:
    async def body(at: Stage) -> None:
        at.pages.pages[16001] = page(token_usage=0.01, gen_throughput=1) + odd
        await asyncio.sleep(60)
        view = await at.view()
        assert view["recent_metrics"]["unknown_engines"] == ["h:16001"] and not at.genrm.posts
        assert view["recent_metrics"]["total_queue_reqs"] == 0  # of the other replica
        assert (await at.api.health()).body["status"] == "healthy"
        at.load(0.01)
        await asyncio.sleep(10)
        assert [sent for sent, _ in at.genrm.posts] == ["scale_in"]

    play(body, engines=2, usage=0.01)


def test_a_round_of_metrics_that_breaks_is_noted_and_the_next_one_comes() -> None:
    """Of one service: the other one is decided on all the while."""

    async def body(at: Stage) -> None:
        other = at.services["a://other"]

        async def engines() -> ApiReply:
            raise RuntimeError("something nobody foresaw")

        right, other.engines = other.engines, engines  # type: ignore[method-assign]  # of this fake alone
        await asyncio.sleep(6)
        health = (await at.api.health()).body
        assert list(health["errors"]) == ["other"] and "nobody foresaw" in health["errors"]["other"]
        assert len(at.genrm.posts) == 1 and not other.posts
        other.engines = right  # type: ignore[method-assign]  # as it was
        await asyncio.sleep(6)
        assert (await at.api.health()).body["status"] == "healthy" and other.posts

    play(body, **TWO)


# --- the API ---


def test_it_does_nothing_before_it_is_started() -> None:
    async def body(world: ScalingWorld) -> None:
        world.engines = Pages()  # type: ignore[assignment]  # all that a collector asks of it
        api = Api(AutoscalerConfig.model_validate(QUICK))
        api.services = {"a://genrm": FakeService("a://genrm")}
        await api.start()
        await asyncio.sleep(60)
        assert (await api.status()).body["services"] == {} and not (await api.health()).body["started"]
        assert (await api.conditions("genrm")).status == 404
        assert (await api.activate()).body == {"started": True, "services": ["genrm"]}
        assert (await api.activate()).status == 200
        await api.stop()

    run(body)


def test_what_the_api_shows() -> None:
    async def body(at: Stage) -> None:
        await asyncio.sleep(5.5)
        at.genrm.end("ACTIVE")
        at.load(0.01)
        await asyncio.sleep(30)
        at.genrm.end("COMPLETED")
        await asyncio.sleep(5)
        assert [item["action"] for item in await at.history()] == ["scale_in", "scale_out"]
        assert [item["action"] for item in await at.history(action="scale_out")] == ["scale_out"]
        assert len(await at.history(limit=1)) == 1
        shown = (await at.api.conditions("genrm")).body
        assert shown["scale_in"]["token_usage_low"]["met"] and shown["scale_in"]["token_usage_low"]["held_secs"] >= 25
        frames = (await at.api.metrics_history("genrm")).body["metrics"]
        assert frames[0]["timestamp"] > frames[-1]["timestamp"]
        status = (await at.api.status()).body
        assert status["current_engines"] is None  # no rollout service here: unknown, not 0
        view = status["services"]["genrm"]
        assert (view["last_scale_action"], view["total_scale_operations"]) == ("scale_in", 2)
        assert (await at.api.clear_history("genrm")).body == {"cleared": 2} and not await at.history()

    play(body, engines=2)


def test_each_service_shows_its_own_last_action() -> None:
    """M33."""

    async def body(at: Stage) -> None:
        at.services["a://other"].hangs = True
        await asyncio.sleep(12)
        services = (await at.api.status()).body["services"]
        assert services["genrm"]["last_scale_action"] == "scale_out" and services["genrm"]["last_scale_time"]
        assert services["other"]["last_scale_action"] is None

    play(body, service_targets={"genrm": "a://genrm", "other": "a://other"}, max_engines=4)


@pytest.mark.parametrize(
    "patch",
    [
        [], None, {"max_engines": 0}, {"max_engines": True and "x"}, {"no_such": 1}, {"service_targets": {"x": ""}},
        {"service_targets": 5}, {"service_targets": None, "rollout_service_url": 7}, {"service_policies": {"x": {}}},
        {"service_policies": {"genrm": {"max_engines": 1, "min_engines": 2}}},
        {"scale_in_policy": {"token_usage_threshold": 0.99}}, {"evaluation_interval_secs": 0.5}, {"enabled": "yes?"},
        {"service_targets": {"genrm": "nonsense"}}, {"rollout_service_url": "localhost:8000/rollout"},
        {"max_engines": True}, {"max_engines": "7"}, {"max_engines": 7.0}, {"enabled": "yes"}, {"enabled": 1},
        {"scale_out_cooldown_secs": "5"}, {"scale_out_cooldown_secs": True}, {"scale_out_policy": {"max_delta": True}},
        {"service_policies": {"genrm": {"max_engines": True}}}, {"scale_in_policy": {"queue_depth_threshold": "0"}},
    ],
)  # fmt: skip
def test_a_wrong_patch_is_refused_with_422_and_changes_nothing(patch: Any) -> None:
    async def body(at: Stage) -> None:
        before = (await at.api.get_config()).body
        reply = await at.api.patch_config(patch)
        assert reply.status == 422 and reply.body["detail"], reply
        assert (await at.api.get_config()).body == before

    play(body)


@pytest.mark.parametrize(
    "url",
    [
        "nonsense", "localhost:8000/genrm", "//localhost:8000", "http://", "http:///genrm", "http://:8000", "actor://",
        "http://localhost:99999", "http://localhost:0", "http://[::1", "http://a b", "http://a/\nb", "http://a/?b=c",
    ],
)  # fmt: skip
def test_what_is_no_url_is_refused_with_what_to_send(url: str) -> None:
    async def body(at: Stage) -> None:
        for patch in ({"service_targets": {"other": url}}, {"rollout_service_url": url}):
            reply = await at.api.patch_config(patch)
            assert (reply.status, reply.body["error"]) == (422, "INVALID_CONFIG")
            assert reply.body["detail"].startswith(("service_targets.other: ", "rollout_service_url: "))
            assert "as in http://" in reply.body["detail"]

    play(body)


@pytest.mark.parametrize("url", ["http://localhost:8000/genrm", "https://[::1]:1/a", "http://a", "actor://scale-a-0"])
def test_a_url_is_taken(url: str) -> None:
    assert AutoscalerConfig(service_targets={"genrm": url}).service_targets["genrm"] == url


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from([*AutoscalerConfig.model_fields, "genrm", "rollout", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*AutoscalerConfig.model_fields, "x"]), JSON, max_size=3))
def test_no_patch_is_an_error_nobody_foresaw(patch: dict[str, Any]) -> None:
    async def body(world: ScalingWorld) -> None:
        api = Api(AutoscalerConfig.model_validate(QUICK))
        await api.start()
        assert (await api.patch_config(patch)).status in (200, 422)

    run(body)


def test_unknown_services_and_wrong_queries() -> None:
    async def body(at: Stage) -> None:
        for reply in (
            await at.api.conditions("nobody"), await at.api.metrics_history("nobody"),
            await at.api.clear_history("nobody"), await at.api.scale_history(service="nobody"),
        ):  # fmt: skip
            assert reply.status == 404 and "genrm" in reply.body["detail"]
        for odd in ([], {}, None, 7):
            replies = [await at.api.conditions(odd), await at.api.metrics_history(odd)]
            replies += [] if odd is None else [await at.api.clear_history(odd)]  # None: of all
            assert [reply.status for reply in replies] == [404] * len(replies)
        for query in ({"limit": 0}, {"limit": 5000}, {"action": "sideways"}, {"what": 1}):
            assert (await at.api.scale_history(service="genrm", **query)).status == 422
        assert (await at.api.enable({"enabled": 1})).status == 422

    play(body)


def test_the_history_is_bounded() -> None:
    async def body(at: Stage) -> None:
        at.genrm.submits = [ApiReply(409, {"error": "CONFLICT"})] * (KEPT_HISTORY + 20)
        await asyncio.sleep(5 * (KEPT_HISTORY + 10))
        assert (await at.api.scale_history(service="genrm", limit=1)).body["total"] == KEPT_HISTORY
        assert len((await at.api.metrics_history("genrm")).body["metrics"]) == 1000

    play(body, metrics_interval_secs=5)


def test_a_url_that_leads_nowhere_is_refused() -> None:
    async def body(world: ScalingWorld) -> None:
        target = connect_to("http://localhost:8000/rollout")
        assert isinstance(target, NoWayThere)
        for call in (target.engines(), target.submit("scale_out", {}), target.status("scale_in", "x")):
            with pytest.raises(ConnectionRefused, match="no way"):
                await call
        await target.close()

    run(body)


def test_every_setting_is_read() -> None:
    """No dead option."""
    root = pathlib.Path(policy.__file__).parent
    read = {
        node.attr
        for file in ("policy", "decision", "metrics", "collector", "worker", "autoscaler", "autoscaler_api")
        for node in ast.walk(ast.parse((root / f"{file}.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    read.add("rollout_service_url")  # the other spelling of a target, kept equal to it
    for model in (AutoscalerConfig, policy.ServicePolicy, policy.ScaleOutPolicy, policy.ScaleInPolicy):
        assert set(model.model_fields) <= read, model.__name__
