"""Elastic rollout replicas: what may be asked for, what happens to replicas, and how operations end (scaling.md 7)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from protocol.config import AdminConfig, ExportConfig, GatewayConfig, HttpConfig, LifecycleConfig, RolloutScalingConfig
from protocol.errors import PlacementError, ReadTimeout
from protocol.ports import EngineSpec
from protocol.rollout.elastic import RolloutScaling
from protocol.rollout.elastic_contract import CATEGORIES, by_weight, normalised, sanitised, weightiest
from protocol.rollout.elastic_keys import KeyRecord, ReplayKeys
from protocol.scaling.autoscaler_api import AutoscalerApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.http_tables import autoscaler_routes
from protocol.scaling.policy import AutoscalerConfig
from protocol.serving.gateway import Gateway
from protocol.serving.http import HttpAnswer, HttpRequest
from protocol.training.checkpoint import Exporter
from tests.protocol.fake import FakeHandle, FakeTrainer, fleet
from tests.protocol.scaling.autoscaler_world import QUICK, page
from tests.protocol.scaling.world import ScalingWorld, run


@dataclasses.dataclass
class Rollout:
    """A gateway and an elastic rollout service over some initial engines."""

    world: ScalingWorld
    gateway: FakeHandle
    api: FakeHandle

    async def ended(self, direction: str, reply: ApiReply) -> dict[str, Any]:
        assert reply.status == 200 and reply.body["status"] == "PENDING", reply
        while True:
            body: dict[str, Any] = (await self.api.status(direction, reply.body["request_id"])).body
            if body["status"] in ("ACTIVE", "PARTIAL", "CANCELLED", "COMPLETED", "FAILED"):
                return body
            await asyncio.sleep(0.05)

    async def out(self, target: int) -> dict[str, Any]:
        return await self.ended("scale_out", await self.api.scale_out({"num_replicas": target}))

    async def into(self, target: int, **more: Any) -> dict[str, Any]:
        return await self.ended("scale_in", await self.api.scale_in({"num_replicas": target, **more}))

    async def routable(self) -> list[str]:
        return list(await self.api.routable())

    def states(self) -> list[str]:
        return [data["state"] for data in self.world.of("scale.state")]


async def rollout(world: ScalingWorld, initial: int = 1, weight_service: Any = None, **config: Any) -> Rollout:
    gateway = await world.spawn(Gateway, GatewayConfig(), name="gateway")
    await fleet(world, initial)
    for engine in world.engines.every:
        await gateway.add_replica(engine.address)
    addresses = tuple(engine.address for engine in world.engines.every)
    api = await world.spawn(
        RolloutScaling, RolloutScalingConfig(**config), LifecycleConfig(placement_timeout_s=2), AdminConfig(), gateway,
        EngineSpec("fake"), "engine", addresses, weight_service, name="rollout",
    )  # fmt: skip
    return Rollout(world, gateway, api)


async def exported(world: ScalingWorld, version: str) -> str:
    trainer = await world.spawn(FakeTrainer, name=f"trainer-{version}")
    exporter = await world.spawn(Exporter, ExportConfig(), trainer, name=f"exporter-{version}")
    return str(await exporter.export(version))


def test_a_replica_passes_every_state_and_serves_the_present_weights() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world)
        await exported(world, "9")
        done = await r.out(2)
        assert (done["status"], done["delta"], done["created"], done["cleanup_required"]) == ("ACTIVE", 1, 1, False)
        assert r.states() == ["PENDING", "CREATING", "CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY"]
        new = world.engines.latest("engine-1")
        assert new is not None and new.version == "9"
        assert await r.routable() == ["engine-0", "engine-1"]

    run(body)


def test_replicas_go_newest_first_and_all_at_once() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world, drain_sleep_s=4)
        await r.out(4)
        before = asyncio.get_running_loop().time()
        done = await r.into(1)
        took = asyncio.get_running_loop().time() - before
        assert (done["status"], done["removed"], done["cleanup_required"]) == ("COMPLETED", 3, False)
        assert 4 <= took < 6  # one sleep for three victims
        assert world.slots("retired") == ["engine-3", "engine-2", "engine-1"]
        assert await r.routable() == ["engine-0"] and world.placement_groups.open == []

    run(body)


@pytest.mark.parametrize(("asked", "evict"), [({}, False), ({"evict": True}, True), ({"force": True}, True)])
def test_a_busy_victim_is_put_back_unless_its_eviction_was_asked_for(asked: dict[str, bool], evict: bool) -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world, drain_sleep_s=1)
        await r.out(2)
        calls = [asyncio.ensure_future(_call(r, 60)) for _ in range(2)]
        await asyncio.sleep(0.5)
        done = await r.into(1, **asked)
        assert done["status"] == ("COMPLETED" if evict else "FAILED") and done["cleanup_required"] is False
        assert await r.routable() == (["engine-0"] if evict else ["engine-0", "engine-1"])
        for call in calls:
            call.cancel()

    run(body)


async def _call(r: Rollout, seconds: float) -> Any:
    from protocol.messages import GenerateRequest

    for engine in r.world.engines.every:
        engine.duration_s = seconds
    return await r.gateway.generate(GenerateRequest(r.world.new_id("req"), 10, 4))


def test_an_update_is_refused_while_replicas_drain_and_a_scale_in_waits_for_one() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world, drain_sleep_s=3)
        await r.out(2)
        path = await exported(world, "9")
        reply = await r.api.scale_in({"num_replicas": 1})
        await asyncio.sleep(0.5)
        refused = await r.api.update_weights(path)
        assert (refused.status, refused.body["error"]) == (409, "DRAINING")
        await r.ended("scale_in", reply)
        assert (await r.api.update_weights(path)).body["replicas"] == 1

    run(body)


def test_cancelling_is_for_who_has_not_been_connected() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world)
        world.placement_groups.stuck = True
        reply = await r.api.scale_out({"num_replicas": 3})
        called = await r.api.call_off("scale_out", reply.body["request_id"])
        assert called.status == 200
        world.placement_groups.stuck = False
        done = await r.ended("scale_out", reply)
        assert done["status"] in ("CANCELLED", "FAILED") and done["created"] == 0 and not world.placement_groups.open
        late = await r.api.call_off("scale_out", reply.body["request_id"])
        assert (late.status, late.body["error"]) == (409, "NOT_CANCELLABLE")
        assert (await r.api.call_off("scale_in", reply.body["request_id"])).status == 404

    run(body)


def test_why_an_operation_failed_comes_through_to_the_history_of_the_autoscaler() -> None:
    """Every key on the way is declared: operation, status, request, history, wire (scaling.md 1.4)."""

    async def body(world: ScalingWorld) -> None:
        r = await rollout(world)
        (engine,) = world.engines.every
        engine.odd_metrics = page(token_usage=0.95, num_queue_reqs=0, gen_throughput=100)
        client = world.engines.client  # a collector knows replicas by host and port, and these engines by their names
        world.engines.client = lambda _: client(engine.address)  # type: ignore[method-assign]  # there is but this one
        world.placement_groups.create_fails = [PlacementError("no room")]
        scaler = AutoscalerApi(
            AutoscalerConfig.model_validate({**QUICK, "service_targets": {"rollout": "actor://rollout"}}), begin=True
        )
        await scaler.start()
        await asyncio.sleep(16)
        routes = autoscaler_routes(HttpConfig(), FakeHandle(world, "autoscaler", 0, scaler))
        answer = await routes.handle(HttpRequest("GET", "/scale_history", (), b"", (("service", "rollout"),)))
        assert isinstance(answer, HttpAnswer) and answer.status == 200
        (item,) = json.loads(answer.body)["history"]
        assert (item["status"], item["failure_categories"]) == ("FAILED", ["placement"])
        assert "no room" in item["error_message"]
        status = (await r.api.status("scale_out", item["request_id"])).body
        assert status["failure_categories"] == [status["failure_category"]] == ["placement"]
        await scaler.stop()

    run(body)


def test_failures_have_a_category_and_end_clean() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world)
        world.placement_groups.create_fails = [PlacementError("no room\nfor token=abc123 " + "x" * 900)]
        done = await r.out(2)
        assert (done["status"], done["failure_category"], done["cleanup_required"]) == ("FAILED", "placement", False)
        text = done["error_message"]
        assert len(text) <= 300 and "\n" not in text and "abc123" not in text
        world.placement_groups.remove_fails = [ReadTimeout("lost"), ReadTimeout("lost again")]
        world.spawn_fails = [PlacementError("no")]
        assert (await r.out(2))["status"] == "FAILED" and not world.placement_groups.open

    run(body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422), ({"num_replicas": "2"}, 422), ({"num_replicas": True}, 422), ({"num_replicas": 2.0}, 422),
        ({"num_replicas": 2, "engine_urls": ["a:1"]}, 422), ({"engine_urls": []}, 422),
        ({"engine_urls": ["ftp://a:1"]}, 422),
        ({"num_replicas": 2, "model": "k"}, 422), ({"num_replicas": 1}, 400),
    ],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], status: int) -> None:
    async def course(world: ScalingWorld) -> None:
        r = await rollout(world, 2)
        reply = await r.api.scale_out(body)
        assert reply.status == status and reply.body["detail"]
        if status == 400:
            assert reply.body["status"] == "REJECTED"
        assert not world.of("scale.state")

    run(course)


def test_engines_of_others_are_taken_once_and_only_let_go() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world)
        await world.engines.launch(EngineSpec("fake"), name="external-host-30000")  # as its URL names it here
        other = world.engines.latest("external-host-30000")
        assert other is not None
        url = f"{other.address.host}:{other.address.port}"
        done = await r.ended("scale_out", await r.api.scale_out({"engine_urls": [url, f"http://{url}"]}))
        assert (done["status"], done["delta"]) == ("ACTIVE", 1) and len(await r.routable()) == 2
        again = await r.api.scale_out({"engine_urls": [f"http://{url}/"]})
        assert again.body["status"] == "NOOP"
        dry = await r.api.scale_in({"num_replicas": 1, "dry_run": True})
        assert dry.body["status"] == "DRY_RUN" and len(dry.body["replicas"]) == 1 and len(await r.routable()) == 2
        assert (await r.into(1))["status"] == "COMPLETED" and other.alive and len(await r.routable()) == 1

    run(body)


def test_a_weight_service_that_fails_only_warns() -> None:
    class Deaf:
        async def unregister(self, name: str) -> None:
            raise ReadTimeout(f"{name}: no answer")

    async def body(world: ScalingWorld) -> None:
        deaf = await world.spawn(Deaf, name="weights")
        r = await rollout(world, weight_service=deaf, drain_sleep_s=0)
        await r.out(2)
        done = await r.into(1)
        assert done["status"] == "COMPLETED" and done["error_message"].startswith("warning: engine-1")

    run(body)


def test_one_operation_at_a_time_and_no_other_one_is_known() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world)
        reply = await r.api.scale_out({"num_replicas": 2})
        assert (await r.api.scale_in({"num_replicas": 1})).body["error"] == "CONFLICT"
        assert (await r.api.status("scale_in", reply.body["request_id"])).status == 404
        await r.ended("scale_out", reply)
        assert (await r.api.scale_out({"num_replicas": 2})).body["status"] == "NOOP"

    run(body)


def test_a_key_is_answered_with_its_operation_whatever_came_since() -> None:
    """The reply was lost: the same request again is no conflict with itself, and no second operation."""

    async def body(world: ScalingWorld) -> None:
        r = await rollout(world, drain_sleep_s=1)
        sent = {"num_replicas": 2, "idempotency_key": "k", "timeout_secs": 300.0}
        first = await r.api.scale_out(sent)
        again = await r.api.scale_out(sent)
        assert (again.status, again.body["request_id"]) == (200, first.body["request_id"])
        assert (await r.api.scale_out({"num_replicas": 2})).body["error"] == "CONFLICT"  # without its key it is another
        await r.ended("scale_out", first)
        replayed = (await r.api.scale_out(sent)).body
        assert (replayed["status"], replayed["request_id"]) == ("ACTIVE", first.body["request_id"])
        for other in (
            {**sent, "num_replicas": 3},
            {**sent, "timeout_secs": 301.0},
            {"num_replicas": 2, "idempotency_key": "k"},
        ):
            refused = await r.api.scale_out(other)
            assert (refused.status, refused.body["error"]) == (409, "IDEMPOTENCY_CONFLICT")
        # A key of the other direction is another key; a no-op is repeated word for word, whatever is so by now.
        no_op = await r.api.scale_in({"num_replicas": 5, "idempotency_key": "k"})
        assert no_op.body["status"] == "NOOP" and no_op.body["current"] == 2
        dry = {"num_replicas": 1, "idempotency_key": "dry", "dry_run": True}
        assert (await r.api.scale_in(dry)).body["status"] == "DRY_RUN"
        into = await r.api.scale_in({**dry, "dry_run": False})  # a dry run has used nothing up
        assert (await r.api.scale_in({**dry, "dry_run": False})).body["request_id"] == into.body["request_id"]
        await r.ended("scale_in", into)
        assert (await r.api.scale_in({"num_replicas": 5, "idempotency_key": "k"})) == no_op
        assert len({data["operation"] for data in world.of("scale.state")}) == 2

    run(body)


def test_a_key_costs_what_is_let_go_of_and_not_all_that_is_kept() -> None:
    asked: list[str] = []

    def goes_on(name: str) -> bool:
        asked.append(name)
        return name == "o0"

    keys = ReplayKeys(1000.0, 500, goes_on)
    for number in range(500):
        keys.remember("scale_out", f"k{number}", KeyRecord("{}", float(number), f"o{number}", None))
    asked.clear()
    for number in range(500, 510):
        keys.remember("scale_out", f"k{number}", KeyRecord("{}", float(number), f"o{number}", None))
        keys.forget(f"o{number - 400}")
    assert len(asked) <= 40
    assert keys.find("scale_out", "k0", 510.0) is not None and keys.find("scale_out", "k1", 510.0) is None
    assert keys.find("scale_out", "k100", 510.0) is None and keys.find("scale_out", "k110", 510.0) is not None


def test_keys_end_with_their_window_and_with_their_operation_and_are_bounded() -> None:
    async def body(world: ScalingWorld) -> None:
        r = await rollout(world, drain_sleep_s=0, idempotency_window_s=100, max_idempotency_records=3, max_history=3)
        keys = r.api.target._keys
        out = {"num_replicas": 2, "idempotency_key": "out"}
        first = await r.api.scale_out(out)
        for number in range(5):  # while it goes on: its key stays, the others go, oldest first
            keys.remember("scale_in", f"n{number}", KeyRecord("{}", asyncio.get_running_loop().time(), None, first))
        assert len(keys) == 3 and (await r.api.scale_out(out)).body["request_id"] == first.body["request_id"]
        await r.ended("scale_out", first)
        await asyncio.sleep(101)
        assert (await r.api.scale_out(out)).body["status"] == "NOOP"  # as good as new: two replicas are there already
        for target in (3, 4, 5, 6):
            await r.ended(
                "scale_out", await r.api.scale_out({"num_replicas": target, "idempotency_key": f"to {target}"})
            )
        assert (await r.api.scale_out({"num_replicas": 6, "idempotency_key": "to 6"})).body["status"] == "ACTIVE"
        await r.into(2)
        renewed = await r.api.scale_out({"num_replicas": 3, "idempotency_key": "to 3"})  # its operation is forgotten
        assert renewed.body["status"] == "PENDING" and len(keys) <= 4
        await r.ended("scale_out", renewed)

    run(body)


def test_texts_and_categories() -> None:
    assert normalised("host:80") == ("host", 80) == normalised("http://host:80/x")
    for bad in ("host", "ftp://host:1", "http://:80", ""):
        with pytest.raises(ValueError):
            normalised(bad)
    assert sanitised("a\nb\x00c  Authorization: Bearer", 100) == "a b c  Authorization=***"
    assert len(sanitised("x" * 1000, 50)) == 50
    assert weightiest(["placement", "health"]) == "health" and weightiest([]) == ""
    assert by_weight(["placement", "health", "placement"]) == ["health", "placement"]
    assert all(weightiest([one]) == one for one in CATEGORIES)
