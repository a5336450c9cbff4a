"""Recovery: fenced, one at a time, never with weights that nobody has verified (scaling.md 3, 4, 9; serving.md 9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.config import AdminConfig, ExportConfig, GatewayConfig, HealthConfig, RecoveryConfig
from protocol.errors import ActorDied, ConnectionLost, ConnectTimeout, HttpError, Outcome, ReadTimeout
from protocol.messages import GenerateRequest
from protocol.ports import EngineSpec
from protocol.serving.gateway import Gateway
from protocol.serving.health import HealthProber
from protocol.serving.recovery import Recovery
from protocol.training.checkpoint import Exporter
from tests.protocol.fake import FakeBackend, FakeEngine, FakeHandle, FakeTrainer, fleet, run

ADMIN = AdminConfig(read_timeout_s=2.0, update_timeout_s=2.0, reconcile_timeout_s=3.0)


class Set:
    def __init__(self, world: FakeBackend, gateway: FakeHandle, recovery: FakeHandle, exporter: FakeHandle) -> None:
        self.world = world
        self.gateway = gateway
        self.recovery = recovery
        self.exporter = exporter

    async def settle(self) -> None:
        while await self.recovery.recovering():
            await asyncio.sleep(0.1)

    def stages(self) -> list[str]:
        return [s["stage"] for s in self.world.of("recovery.step")]

    async def members(self) -> list[tuple[str, int, bool]]:
        return [(v.address.name, v.address.incarnation, v.routable) for v in await self.gateway.engines()]


async def setup(
    world: FakeBackend, engines: tuple[FakeEngine, ...], *, export: str = "5", repair: bool = False, **config: Any
) -> Set:
    gateway = await world.spawn(Gateway, GatewayConfig(), name="gateway")
    for engine in engines:
        await gateway.add_replica(engine.address)
    exporter = await world.spawn(Exporter, ExportConfig(), FakeTrainer(), name="exporter")
    if export:
        await exporter.export(export)
    recovery = await world.spawn(
        Recovery,
        RecoveryConfig(**config),
        ADMIN,
        gateway,
        EngineSpec("fake"),
        (("engine-0", "node-1"), ("engine-1", "node-gone")),
        exporter if repair else None,
        name="recovery",
    )
    return Set(world, gateway, recovery, exporter)


def latest(world: FakeBackend, name: str = "engine-0") -> FakeEngine:
    engine = world.engines.latest(name)
    assert engine is not None
    return engine


def test_a_dead_replica_comes_back_with_the_latest_export() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        world.engines.startup_s = 5.0
        one.alive = False
        assert await made.recovery.recover(one.address, "dead")
        assert await made.recovery.recovering() == ("engine-0",)
        await asyncio.sleep(3)
        assert await made.members() == [("engine-0", 0, False), ("engine-1", 0, True)]
        await made.settle()
        assert made.stages() == ["launched", "ready", "loaded", "validated", "published"]
        assert {s["replica_inc"] for s in world.of("recovery.step")} == {1}
        assert await made.members() == [("engine-1", 0, True), ("engine-0", 1, True)]
        new = latest(world)
        assert (new.version, new.spec.weights_path) == ("5", "")
        assert world.engines.launched_with[-1] == ("engine-0", EngineSpec("fake"), "node-1")
        assert any(p.endswith("model-1.bin") for p in world.storage.reads)

    run(body)


def test_the_order_is_close_end_launch_load_validate_publish() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))
        log: list[str] = []

        def see(kind: str, fields: dict[str, Any]) -> None:
            if kind == "recovery.step" and fields["stage"] == "launched":
                assert not one.alive and "unroutable 0" in log  # fenced before a second process exists
            if kind == "gateway.unroutable":
                assert one.alive or "unroutable 0" in log
            if kind.startswith("gateway."):
                log.append(f"{kind.partition('.')[2]} {fields['replica_inc']}")
            elif kind == "recovery.step":
                log.append(fields["stage"])

        world.on_emit = see
        await made.recovery.recover(one.address, "wedged")
        await made.settle()
        assert log == ["unroutable 0", "launched", "ready", "loaded", "validated", "routable 1", "published"]

    run(body)


def test_a_stopped_process_is_ended_before_another_is_started() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), terminate_timeout_s=5.0, attempts=2, backoff_s=1.0)
        one.stopped = True
        world.engines.immortal.add("engine-0")
        await made.recovery.recover(one.address, "unhealthy")
        await made.settle()
        assert len(world.engines.every) == 1  # not seen gone: nothing was launched beside it
        assert made.stages() == ["retry", "retry", "gave_up"]
        assert await made.members() == [("engine-0", 0, False)]
        world.engines.immortal.clear()
        assert await made.recovery.recover(one.address, "unhealthy")
        await made.settle()
        assert await made.members() == [("engine-0", 1, True)]

    run(body)


def test_one_recovery_at_a_time_for_a_replica() -> None:
    async def body(world: FakeBackend) -> None:
        one, two = await fleet(world, 2)
        made = await setup(world, (one, two))
        one.alive = two.alive = False
        assert [await made.recovery.recover(one.address, "dead") for _ in range(5)] == [True] + [False] * 4
        assert await made.recovery.recover(two.address, "dead")
        await made.settle()
        assert len(world.engines.every) == 4 and len(world.of("recovery.began")) == 2
        assert world.engines.launched_with[-1][2] is None or world.engines.launched_with[-2][2] is None  # node-gone

    run(body)


def test_a_late_report_does_not_kill_the_successor() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert latest(world).incarnation == 1 and latest(world).alive
        assert made.stages()[-1] == "gave_up"
        assert await made.members() == [("engine-0", 1, True)]

    run(body)


def test_so_many_at_once_and_the_others_queue() -> None:
    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 6)
        made = await setup(world, engines, max_concurrent=2)
        world.engines.startup_s = 10.0
        for engine in engines:
            engine.alive = False
            await made.recovery.recover(engine.address, "dead")
        await asyncio.sleep(5)
        assert len(world.of("recovery.began")) == 2
        await made.settle()
        assert len([m for m in await made.members() if m[2]]) == 6
        assert asyncio.get_running_loop().time() == pytest.approx(30, abs=4)

    run(body)


@pytest.mark.parametrize("repair", [False, True], ids=["previous", "written again"])
def test_a_torn_export_is_rejected_and_never_loaded(repair: bool) -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), repair=repair)
        world.storage.tear = ["model-1.bin"]
        torn = await made.exporter.export("6")
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        rejected = world.of("export.rejected")
        assert [r["path"] for r in rejected] == [torn] * 3
        assert "model-1.bin" in rejected[0]["why"]
        loaded = [body.path for route, body in latest(world).posts if route == "/update_weights_from_disk"]
        assert loaded == ["exports/00000003-6" if repair else "exports/00000001-5"]
        assert (await made.members())[0] == ("engine-0", 1, True)

    run(body)


def test_with_no_whole_export_nothing_is_published() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), export="", attempts=2)
        world.storage.tear = ["model-0.bin"]
        await made.exporter.export("6")
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert made.stages() == ["launched", "ready", "retry"] * 2 + ["gave_up"]
        assert not latest(world).alive  # no process left behind
        assert await made.members() == [("engine-0", 0, False)]

    run(body)


def test_without_any_export_the_own_weights_are_served() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), export="")
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert made.stages() == ["launched", "ready", "validated", "published"]

    run(body)


def test_an_export_published_meanwhile_is_loaded_too() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))
        tasks: list[asyncio.Task[Any]] = []

        def see(kind: str, fields: dict[str, Any]) -> None:
            if kind == "recovery.step" and fields["stage"] == "ready":
                tasks.append(asyncio.ensure_future(made.exporter.export("6")))

        world.on_emit = see
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert latest(world).version == "6"
        assert made.stages().count("loaded") == 2

    run(body)


@pytest.mark.parametrize(
    "error",
    [ReadTimeout("x"), ConnectionLost("x"), HttpError(status=500)],
    ids=lambda e: f"{type(e).__name__}-{e.fields.get('status', '')}",
)
def test_an_update_of_unknown_outcome_is_what_the_engine_says_it_is(error: Exception) -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))

        def prepare(engine: FakeEngine) -> None:
            engine.post_script = [error]  # raised after the weights changed

        world.engines.prepare = prepare
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert made.stages() == ["launched", "ready", "loaded", "validated", "published"]
        assert len(latest(world).posts) == 1  # known to be done: not sent again

    run(body)


def test_an_update_that_was_refused_is_made_in_another_process() -> None:
    """The flush after it may have failed: then the weights have changed, and the prefix cache has not."""

    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), attempts=2)

        def prepare(engine: FakeEngine) -> None:
            if engine.incarnation == 1:
                refusal = HttpError(status=400, body="Weights were updated, but the cache was not flushed")
                refusal.outcome = Outcome.UNKNOWN  # so that the fake raises it after the weights have changed
                engine.post_script = [refusal]

        world.engines.prepare = prepare
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert made.stages() == ["launched", "ready", "retry", "launched", "ready", "loaded", "validated", "published"]
        assert "not flushed" in world.of("recovery.step", stage="retry")[0]["detail"]
        assert await made.members() == [("engine-0", 2, True)]

    run(body)


def test_an_update_that_did_not_happen_is_not_taken_for_done() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), attempts=2)

        def prepare(engine: FakeEngine) -> None:
            if engine.incarnation == 1:

                def undone() -> BaseException:
                    engine.version, engine.weight_hash = "0", "base"
                    return ReadTimeout("x")

                engine.post_script = [undone]

        world.engines.prepare = prepare
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        again = ["launched", "ready", "loaded", "validated", "published"]
        assert made.stages() == ["launched", "ready", "retry", *again]
        assert await made.members() == [("engine-0", 2, True)]

    run(body)


def test_old_weights_under_the_new_label_are_not_published() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), attempts=2)

        def prepare(engine: FakeEngine) -> None:
            def mislabel() -> None:
                engine.weight_hash = "base"

            if engine.incarnation == 1:
                engine.post_script = [mislabel]

        world.engines.prepare = prepare
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert made.stages()[:4] == ["launched", "ready", "loaded", "retry"]
        assert "base" in world.of("recovery.step", stage="retry")[0]["detail"]
        assert await made.members() == [("engine-0", 2, True)]

    run(body)


def test_connect_time_outs_of_the_update_are_retried() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))
        world.engines.prepare = lambda engine: engine.post_script.extend(ConnectTimeout("x") for _ in range(4))
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert [a["attempt"] for a in world.of("admin.attempt")] == [1, 2, 3, 4, 5]
        assert await made.members() == [("engine-0", 1, True)]

    run(body)


def test_a_process_that_dies_while_it_starts_is_tried_again() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))
        world.engines.startup_s = 1.0
        world.engines.prepare = lambda engine: setattr(engine, "alive", engine.incarnation > 1)
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert "SpawnFailed" in world.of("recovery.step", stage="retry")[0]["detail"]
        assert await made.members() == [("engine-0", 2, True)]

    run(body)


def test_one_that_never_gets_ready_is_given_up_within_the_deadline() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,), attempts=2, attempt_timeout_s=60.0, backoff_s=1.0)
        world.engines.startup_s = 1e6
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert asyncio.get_running_loop().time() == pytest.approx(123.0, abs=1.0)
        assert made.stages()[-1] == "gave_up" and not latest(world).alive

    run(body)


def test_a_replica_removed_meanwhile_is_not_brought_back() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))
        world.engines.startup_s = 10.0
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await asyncio.sleep(5)
        await made.gateway.remove_replica(one.address)  # scaled in
        await made.settle()
        assert await made.members() == [] and not latest(world).alive
        assert world.of("recovery.step")[-1]["stage"] == "gave_up"
        count = len(world.engines.every)
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert len(world.engines.every) == count

    run(body)


def test_a_publication_whose_answer_is_lost_is_asked_for_again() -> None:
    async def body(world: FakeBackend) -> None:
        (one,) = await fleet(world, 1)
        made = await setup(world, (one,))

        def see(kind: str, fields: dict[str, Any]) -> None:
            if kind == "recovery.step" and fields["stage"] == "validated":
                made.gateway.lose_next = 1
                made.gateway.fail_next = [ActorDied("x")]

        world.on_emit = see
        one.alive = False
        await made.recovery.recover(one.address, "dead")
        await made.settle()
        assert made.stages()[-1] == "published"
        assert await made.members() == [("engine-0", 1, True)] and len(world.engines.every) == 2

    run(body)


def test_gateway_health_and_recovery_together() -> None:
    """Killed, wedged and stopped replicas under load: every call is answered, and everything comes back."""

    async def body(world: FakeBackend) -> None:
        engines = await fleet(world, 4)
        made = await setup(world, engines)
        world.engines.startup_s = 5.0
        world.engines.prepare = lambda engine: setattr(engine, "duration_s", 1.0)
        for engine in engines:
            engine.duration_s = 1.0
        await world.spawn(HealthProber, HealthConfig(), made.gateway, made.recovery, name="health")

        async def client(number: int) -> int:
            await asyncio.sleep(number * 0.25)
            result = await made.gateway.generate(GenerateRequest(f"r-{number:06d}", 10, 4))
            return int(result.attempts)

        calls = [asyncio.ensure_future(client(n)) for n in range(400)]
        await asyncio.sleep(10)
        engines[0].alive = False
        await asyncio.sleep(20)
        engines[1].wedged = True
        await asyncio.sleep(20)
        engines[2].stopped = True
        await asyncio.sleep(10)
        engines[2].stopped = False
        attempts = await asyncio.gather(*calls)
        assert max(attempts) >= 2
        await asyncio.sleep(10)
        members = sorted(await made.members())
        assert members == [("engine-0", 1, True), ("engine-1", 1, True), ("engine-2", 0, True), ("engine-3", 0, True)]
        assert all(v.in_flight == 0 for v in await made.gateway.engines())

    run(body)
