"""Scale out and scale in from the API to the placement groups, and every way out of a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import Outcome, PlacementError, ReadTimeout, SeatrialError
from protocol.messages import EngineAddress
from protocol.ports import Placement
from protocol.scaling.contract import Victim
from protocol.scaling.lifecycle import ScaleManager
from tests.protocol.scaling.world import ScalingWorld, Service, run, service

# --- the good course ---


def test_one_two_one() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["created"], out["current"], out["ready"], out["cleanup_required"]) == (
            "ACTIVE", 1, 2, 2, False,
        )  # fmt: skip
        assert await s.routable() == ["engine-0", "engine-1"]
        assert world.placement_groups.created == [("engine-1", ((("GPU", 1.0), ("CPU", 2.0)),), "STRICT_PACK")]
        assert world.engines.launched_with[-1][0] == "engine-1"
        assert await s.capacity() == (2, 2, 2, 0)
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["removed"], into["current"], into["cleanup_required"]) == (
            "COMPLETED",
            1,
            1,
            False,
        )
        assert await s.routable() == ["engine-0"] and not s.engine("engine-1").alive and s.engine("engine-0").alive
        assert world.placement_groups.open == [] and world.placement_groups.removals == ["pg-0"]
        assert await s.capacity() == (1, 1, 1, 0)
        assert world.slots("retired") == ["engine-1"]

    run(body)


def test_several_replicas_come_one_by_one_and_go_newest_first() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, 2)
        assert (await s.scaled("scale_out", 5))["created"] == 3
        assert world.slots("published") == ["engine-2", "engine-3", "engine-4"]
        assert (await s.scaled("scale_in", 3))["removed"] == 2
        assert world.slots("retired") == ["engine-4", "engine-3"]
        generations = [data["generation"] for data in world.of("scale.drain", what="confirmed")]
        assert generations == [1, 2]
        # Ranks are never used again.
        await s.scaled("scale_out", 4)
        assert world.slots("published")[-1] == "engine-5"

    run(body)


def test_it_is_published_after_health_and_not_before() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        world.engines.startup_s = 5.0
        operation = await s.admitted("scale_out", 2)
        seen = []
        while (await s.status("scale_out", operation))["status"] != "ACTIVE":
            seen.append((await s.status("scale_out", operation))["status"])
            if "engine-1" in await s.routable():
                assert "/health_generate" in s.engine("engine-1").gets
            await asyncio.sleep(0.05)
        assert list(dict.fromkeys(seen)) == ["PENDING", "CREATING", "HEALTH_CHECKING"]

    run(body)


def test_capacity_at_every_stage() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        world.engines.startup_s = 5.0
        world.placement_groups.removal_s = 10.0
        out = await s.admitted("scale_out", 2)
        await asyncio.sleep(3)
        assert await s.capacity() == (1, 1, 2, 0)  # a candidate
        await s.ended("scale_out", out)
        assert await s.capacity() == (2, 2, 2, 0)
        call = s.generate(8.0)
        other = s.generate(8.0)
        into = await s.admitted("scale_in", 1)
        await asyncio.sleep(2)
        assert await s.capacity() == (2, 1, 2, 0)  # it drains
        await asyncio.gather(call, other)
        await asyncio.sleep(2)
        assert await s.capacity() == (2, 1, 2, 1)  # its process is gone, its group is not
        await s.ended("scale_in", into)
        assert await s.capacity() == (1, 1, 1, 0)

    run(body)


# --- drain ---


def test_a_victim_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        long = [s.generate(20.0), s.generate(20.0)]
        await asyncio.sleep(0.1)
        into = await s.admitted("scale_in", 1)
        await asyncio.sleep(1.0)
        assert await s.routable() == ["engine-0"]
        before = list(s.engine("engine-1").generated)
        later = [s.generate(1.0) for _ in range(4)]
        assert s.engine("engine-1").alive
        results = await asyncio.gather(*long, *later)
        assert {r.engine for r in results[:2]} == {"engine-0", "engine-1"}
        assert {r.engine for r in results[2:]} == {"engine-0"}
        assert s.engine("engine-1").generated == before
        assert (await s.ended("scale_in", into))["status"] == "COMPLETED"

    run(body)


def test_only_the_very_proof_that_is_waited_for_counts() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, scaling={"poll_interval_s": 1000.0})  # the watcher stays out of it
        manager = s.manager
        await manager.begin("out", "scale_out", 3)
        await manager.execute("out")
        await asyncio.sleep(10)
        await manager.begin("in", "scale_in", 1)
        await manager.execute("in")
        await asyncio.sleep(0.1)
        victim = (await manager.progress("in")).victim
        assert victim == Victim(EngineAddress("engine-2", 0, "host", 30_000), 2, 1)
        wrong = (
            Victim(victim.address, victim.rank, 2),
            Victim(victim.address, 1, 1),
            Victim(EngineAddress("engine-2", 1, "host", 30_000), 2, 1),
            Victim(EngineAddress("engine-1", 0, "host", 30_000), 2, 1),
        )
        for proof in wrong:
            assert not await manager.confirm_drained("in", proof)
        assert not await manager.confirm_drained("out", victim)
        assert s.engine("engine-2").alive
        assert await manager.confirm_drained("in", victim)
        assert not await manager.confirm_drained("in", victim)  # twice
        await asyncio.sleep(1)
        assert not s.engine("engine-2").alive
        # The late copy must not confirm the next victim of the same operation.
        assert (await manager.progress("in")).victim.address.name == "engine-1"
        assert not await manager.confirm_drained("in", victim)
        await asyncio.sleep(1)
        assert s.engine("engine-1").alive
        assert len(world.of("scale.drain", what="ignored")) == 7

    run(body)


def test_a_victim_that_is_killed_while_it_drains_is_removed_all_the_same() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        calls = [s.generate(20.0), s.generate(20.0)]
        await asyncio.sleep(0.1)
        into = await s.admitted("scale_in", 1)
        await asyncio.sleep(0.2)
        s.engine("engine-1").alive = False
        results = await asyncio.gather(*calls)
        assert {r.engine for r in results} == {"engine-0"}
        assert (await s.ended("scale_in", into))["status"] == "COMPLETED"
        assert world.placement_groups.open == []

    run(body)


def test_a_deadline_parks_the_victim_and_a_reconcile_goes_on_with_the_same_one() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 3)
        calls = [s.generate(40.0) for _ in range(3)]
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        into = await s.scaled("scale_in", 1, timeout_secs=5.0)
        assert (into["status"], into["cleanup_required"], into["current"], into["ready"]) == ("FAILED", True, 3, 2)
        assert asyncio.get_running_loop().time() - began < 8
        assert s.engine("engine-2").alive and len(world.placement_groups.open) == 2
        assert await s.routable() == ["engine-0", "engine-1"]
        assert (await s.submit("scale_out", 4)).body["error"] == "CONFLICT"
        busy = await s.api.reconcile("scale_in", into["request_id"])
        assert (busy.status, busy.body["error"]) == (409, "IN_FLIGHT")
        await asyncio.gather(*calls)
        assert await s.routable() == ["engine-0", "engine-1"]  # never put back
        done = await s.api.reconcile("scale_in", into["request_id"])
        assert (done.status, done.body["status"], done.body["cleanup_required"], done.body["victim_cleared"]) == (
            200, "FAILED", False, True,
        )  # fmt: skip
        assert world.slots("retired") == ["engine-2"]  # and nobody else
        assert await s.capacity() == (2, 2, 2, 0)
        again = await s.api.reconcile("scale_in", into["request_id"])
        assert (again.status, again.body["cleanup_required"]) == (200, False)
        assert (await s.scaled("scale_in", 1))["status"] == "COMPLETED"

    run(body)


def test_as_published_an_abort_does_not_end_the_wait_for_a_drain() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"abort_ends_drain": False})
        await s.scaled("scale_out", 2)
        calls = [s.generate(20.0), s.generate(20.0)]
        await asyncio.sleep(0.1)
        submitted = asyncio.get_running_loop().time()
        into = await s.scaled("scale_in", 1, timeout_secs=5.0)
        assert into["cleanup_required"] and 65 < asyncio.get_running_loop().time() - submitted < 67
        await asyncio.gather(*calls)
        refused = 0
        while (await s.api.reconcile("scale_in", into["request_id"])).status == 409:
            refused += 1
            await asyncio.sleep(10)
        assert 600 < asyncio.get_running_loop().time() - submitted < 615 and refused > 50
        assert (await s.status("scale_in", into["request_id"]))["cleanup_required"] is False

    run(body)


def test_a_gateway_that_does_not_know_the_victim_proves_nothing() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"drain_timeout_s": 30.0})
        await s.scaled("scale_out", 2)
        await s.gateway.remove_replica(s.engine("engine-1").address)
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["cleanup_required"]) == ("FAILED", True)
        assert s.engine("engine-1").alive
        refused = await s.api.reconcile("scale_in", into["request_id"])
        assert (refused.status, refused.body["error"]) == (503, "VICTIM_UNKNOWN")

    run(body)


# --- the ways out of a scale-out ---


def _fails_at(place: str, world: ScalingWorld, s: Service) -> None:
    error = PlacementError("no")
    if place == "placement":
        world.placement_groups.stuck = True
    elif place == "create":
        world.placement_groups.create_fails = [error]
    elif place == "probe":
        world.spawn_fails = [error]
    elif place == "start":
        world.engines.prepare = lambda engine: engine.get_script.update({"/ready": [(503, "")] * 100_000})
    elif place == "death":
        world.engines.prepare = lambda engine: setattr(engine, "alive", False)
    elif place == "health":
        world.engines.prepare = lambda engine: engine.get_script.update({"/health_generate": [(503, "")] * 100_000})
    elif place == "wedged":
        world.engines.prepare = lambda engine: setattr(engine, "wedged", True)
    elif place == "publish":
        s.gateway.lose_next = 0
        world.engines.prepare = lambda engine: s.gateway.target._newest.update({engine.name: 9})


@pytest.mark.parametrize("place", ["placement", "create", "probe", "start", "death", "health", "wedged", "publish"])
def test_whatever_fails_the_candidate_and_its_group_are_gone(place: str) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"init_timeout_s": 60.0})
        _fails_at(place, world, s)
        out = await s.scaled("scale_out", 3)
        assert (out["status"], out["created"], out["failed"], out["cleanup_required"]) == ("FAILED", 0, 1, False), out
        assert out["error_message"] and out["current"] == out["ready"] == 1
        assert world.placement_groups.open == [] and await s.routable() == ["engine-0"]
        assert [e.name for e in world.engines.every if e.alive] == ["engine-0"]
        assert await s.capacity() == (1, 1, 1, 0)
        assert len(world.placement_groups.states) == len(world.placement_groups.removals)  # once each

    run(body)


def test_what_was_published_stays_when_the_next_one_fails() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        world.engines.prepare = lambda engine: setattr(engine, "alive", engine.name != "engine-2")
        out = await s.scaled("scale_out", 3)
        assert (out["status"], out["created"], out["failed"]) == ("PARTIAL", 1, 1)
        assert await s.routable() == ["engine-0", "engine-1"]

    run(body)


def test_a_probe_that_cannot_be_killed_hides_nothing() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        world.kill_fails = [SeatrialError("cannot kill")]
        assert (await s.scaled("scale_out", 2))["status"] == "ACTIVE"
        assert world.slots("probe_left") == ["engine-1"]

    run(body)


@pytest.mark.parametrize("after_s", [0.001, 0.3, 2.0, 5.6])
def test_a_late_success_after_the_deadline_is_torn_down(after_s: float) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        world.engines.startup_s = 5.0
        out = await s.scaled("scale_out", 2, timeout_secs=after_s)
        assert (out["status"], out["created"], out["cleanup_required"]) == ("FAILED", 0, False)
        await asyncio.sleep(60)
        assert await s.routable() == ["engine-0"] and world.placement_groups.open == []
        assert "engine-1" not in world.slots("published")

    run(body)


def test_a_lifecycle_that_does_not_stop_is_not_clean_and_excludes_the_next() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        world.placement_groups.stuck = True  # the wait for a group does not look for an abort
        out = await s.scaled("scale_out", 2, timeout_secs=5.0)
        assert (out["status"], out["cleanup_required"]) == ("FAILED", True)
        running = await s.api.reconcile("scale_out", out["request_id"])
        assert (running.status, running.body["error"]) == (409, "LIFECYCLE_RUNNING")
        assert (await s.submit("scale_out", 2)).status == 409
        await asyncio.sleep(120)
        clean = await s.api.reconcile("scale_out", out["request_id"])
        assert (clean.status, clean.body["status"], clean.body["cleanup_required"]) == (200, "FAILED", False)
        assert world.placement_groups.open == []

    run(body)


# --- removal ---


def test_a_removal_that_was_not_accepted_is_submitted_again_and_one_that_was_is_not() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"removal_timeout_s": 5.0})
        await s.scaled("scale_out", 2)
        groups = world.placement_groups
        groups.remove_fails = [PlacementError("busy", outcome=Outcome.UNKNOWN)]
        groups.removal_s = 20.0
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["cleanup_required"], into["removed"], into["current"]) == ("FAILED", True, 0, 2)
        assert groups.removals == [] and await s.capacity() == (2, 1, 2, 1)
        first = await s.api.reconcile("scale_in", into["request_id"])
        assert (first.status, first.body["cleanup_required"]) == (200, True)
        assert groups.removals == ["pg-0"]
        assert (await s.submit("scale_out", 3)).status == 409
        await asyncio.sleep(20)
        second = await s.api.reconcile("scale_in", into["request_id"])
        assert (second.status, second.body["cleanup_required"], second.body["status"]) == (200, False, "FAILED")
        assert groups.removals == ["pg-0"] and groups.open == []
        assert await s.capacity() == (1, 1, 1, 0)
        # The next one gets a new rank and a new group.
        await s.scaled("scale_out", 2)
        assert world.slots("published") == ["engine-1", "engine-2"] and groups.open == ["pg-1"]

    run(body)


def test_a_candidate_whose_group_stays_is_reported_and_cleaned_up_later() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"removal_timeout_s": 5.0})
        world.engines.prepare = lambda engine: setattr(engine, "alive", False)
        world.placement_groups.removal_s = 30.0
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["cleanup_required"]) == ("FAILED", True)
        assert await s.capacity() == (1, 1, 2, 1)
        await asyncio.sleep(30)
        assert (await s.status("scale_out", out["request_id"]))["cleanup_required"] is True  # nobody has looked
        assert (await s.api.reconcile("scale_out", out["request_id"])).body["cleanup_required"] is False
        assert world.placement_groups.removals == ["pg-0"]

    run(body)


def test_a_table_that_cannot_be_read_is_not_removed() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"removal_timeout_s": 5.0})
        await s.scaled("scale_out", 2)
        world.placement_groups.table_fails = [PlacementError("no table")] * 1000
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["cleanup_required"]) == ("FAILED", True)
        world.placement_groups.table_fails = []
        assert (await s.api.reconcile("scale_in", into["request_id"])).body["cleanup_required"] is False

    run(body)


# --- lost answers ---


def test_a_publication_of_unknown_outcome_is_asked_for_again() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)

        def lose(kind: str, fields: dict[str, Any]) -> None:
            if kind == "scale.slot" and fields["what"] == "launched":
                s.gateway.lose_next = 1

        world.on_emit = lose
        out = await s.scaled("scale_out", 2)
        assert out["status"] == "ACTIVE" and await s.routable() == ["engine-0", "engine-1"]

    run(body)


def test_a_replica_that_may_be_routed_to_is_kept_until_the_gateway_answers() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"health_timeout_s": 10.0})

        def lose(kind: str, fields: dict[str, Any]) -> None:
            if kind == "scale.slot" and fields["what"] == "launched":
                s.gateway.lose_next = 4

        world.on_emit = lose
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["cleanup_required"]) == ("FAILED", True)
        assert s.engine("engine-1").alive and len(world.placement_groups.open) == 1
        s.gateway.lose_next = 0
        assert (await s.api.reconcile("scale_out", out["request_id"])).body["cleanup_required"] is False
        assert not s.engine("engine-1").alive and await s.routable() == ["engine-0"]

    run(body)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_an_operation_is_handed_over_once_whatever_answers_are_lost(lost: int) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        operation = await s.admitted("scale_out", 2)
        s.manager.lose_next = lost
        out = await s.ended("scale_out", operation)
        assert (out["status"], out["created"]) == ("ACTIVE", 1)
        assert len(world.placement_groups.states) == 1

    run(body)


def test_a_manager_that_refuses_ends_the_operation_and_frees_the_model() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        s.manager.target._spec = type(s.manager.target._spec)("fake", num_gpus=2.0)
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["cleanup_required"]) == ("FAILED", False) and "GPUs" in out["error_message"]
        assert (await s.submit("scale_out", 2)).status == 200

    run(body)


def test_a_watcher_that_breaks_leaves_the_last_numbers_and_a_dirty_operation() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 3)
        into = await s.admitted("scale_in", 2)
        s.manager.fail_next = []

        async def broken(operation: str) -> Any:
            raise ValueError("not a progress")

        await asyncio.sleep(0.01)
        s.manager.target.progress = broken
        out = await s.ended("scale_in", into)
        assert (out["status"], out["cleanup_required"], out["current"]) == ("FAILED", True, 3)
        assert "its watcher broke" in out["error_message"]

    run(body)


def test_who_does_not_answer_has_nothing_admitted() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        s.manager.fail_next = [ReadTimeout("slow")]
        refused = await s.submit("scale_out", 2, idempotency_key="k")
        assert (refused.status, refused.body["error"]) == (503, "CAPACITY_UNKNOWN")
        assert await s.api.unresolved() == () and world.placement_groups.states == {}
        s.gateway.fail_next = [ReadTimeout("slow")]
        assert (await s.submit("scale_out", 2)).body["error"] == "DISCOVERY_FAILED"
        # The lenient views go on.
        s.manager.fail_next = [ReadTimeout("slow")] * 2
        engines, metrics = await s.api.engines(), await s.api.metrics()
        assert (engines.body["current"], engines.body["occupied"], engines.body["pending_cleanup"]) == (1, 1, 0)
        assert metrics.body["num_engines"] == 1 and "capacity_error" in metrics.body and "occupied" not in metrics.body

    run(body)


# --- reconcile ---


def test_what_a_reconcile_must_know_before_it_goes_on() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        assert (await s.api.reconcile("scale_in", "nobody")).status == 404
        await s.scaled("scale_out", 2)
        calls = [s.generate(30.0), s.generate(30.0)]
        await asyncio.sleep(0.1)
        operation = (await s.scaled("scale_in", 1, timeout_secs=2.0))["request_id"]
        assert (await s.api.reconcile("scale_out", operation)).status == 404  # the other direction
        s.manager.fail_next = [ReadTimeout("slow")]
        assert (await s.api.reconcile("scale_in", operation)).body["error"] == "VICTIM_UNKNOWN"
        assert (await s.api.reconcile("scale_in", operation)).body["error"] == "IN_FLIGHT"
        await asyncio.gather(*calls)
        s.gateway.fail_next = [ReadTimeout("slow")] * 2
        assert (await s.api.reconcile("scale_in", operation)).body["error"] == "VICTIM_UNKNOWN"
        lifecycle = s.manager.target._lifecycles[operation]
        victim, lifecycle.victim = lifecycle.victim, None
        for phase, physical in (("FAILED", True), ("COMPLETED", False), ("COMPLETED", None)):
            lifecycle.phase, lifecycle.physical_done = phase, physical
            assert (await s.api.reconcile("scale_in", operation)).status == 503
        lifecycle.victim, lifecycle.phase, lifecycle.physical_done = victim, "FAILED", True
        assert s.engine("engine-1").alive
        del s.manager.target._lifecycles[operation]
        assert (await s.api.reconcile("scale_in", operation)).body["error"] == "STATE_LOST"
        s.manager.target._lifecycles[operation] = lifecycle
        assert (await s.api.reconcile("scale_in", operation)).body["cleanup_required"] is False

    run(body)


def test_a_scale_in_whose_watcher_died_after_the_manager_was_done_can_be_reconciled() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        into = await s.admitted("scale_in", 1)
        await asyncio.sleep(0.9)
        (watch,) = s.api.target._watches
        operation = s.api.target._registry.get("scale_in", into)
        watch.cancel()
        await asyncio.sleep(5)
        assert (await s.manager.progress(into)).phase == "COMPLETED"
        s.api.target._registry.finish(operation, "FAILED", None, cleanup_required=True, error="its watcher died")
        assert (await s.api.reconcile("scale_in", into)).body["cleanup_required"] is False

    run(body)


# --- the API ---


@pytest.mark.parametrize(
    "bad",
    [{"num_replicas": v} for v in (True, "2", 2.0, 2.5, None, 0, -1)]
    + [{}, {"num_replicas": 2, "timeout_secs": 0}, {"num_replicas": 2, "timeout_secs": "5"}]
    + [{"num_replicas": 2, "idempotency_key": 7}, {"num_replicas": 2, "delta": 1}],
)
def test_a_body_of_the_wrong_types_is_422_and_leaves_nothing(bad: dict[str, Any]) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        reply = await s.api.scale_out(bad)
        assert (reply.status, reply.body["error"]) == (422, "INVALID_TYPE"), reply
        assert s.api.target._registry.sizes == (0, 0)

    run(body)


def test_models_are_resolved_and_unknown_ones_are_400() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        assert (await s.submit("scale_out", 1, model_name=None)).body["status"] == "NOOP"
        assert (await s.submit("scale_out", 1, model_name="default")).body["status"] == "NOOP"
        assert "request_id" not in (await s.submit("scale_out", 1)).body
        assert (await s.submit("scale_out", 1, model_name="nobody")).status == 400
        assert (await s.api.health()).body["status"] == "healthy"

    run(body)


# --- recovery ---


def test_recovery_may_not_revive_what_is_on_its_way() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        world.engines.startup_s = 5.0
        out = await s.admitted("scale_out", 2)
        await asyncio.sleep(2)
        candidate = s.engine("engine-1").address
        assert (await s.manager.may_recover(candidate)).why == "candidate"
        await s.ended("scale_out", out)
        leave = await s.manager.may_recover(candidate)
        assert leave.allowed and leave.placement == Placement("pg-0")
        initial = await s.manager.may_recover(s.initial[0].address)
        assert initial.allowed and initial.placement is None
        calls = [s.generate(10.0), s.generate(10.0)]
        await asyncio.sleep(0.1)
        into = await s.admitted("scale_in", 1)
        await asyncio.sleep(1)
        new = EngineAddress("engine-1", 1, "host", 30_000)
        assert (await s.manager.may_recover(candidate)).why == "draining"
        assert not await s.manager.adopt(candidate, new)
        await asyncio.gather(*calls)
        await s.ended("scale_in", into)
        assert (await s.manager.may_recover(candidate)).why == "retired"
        assert not await s.manager.adopt(candidate, new)
        assert (await s.manager.may_recover(EngineAddress("x", 0, "h", 1))).allowed is False

    run(body)


def test_a_recovered_replica_is_drained_in_its_new_incarnation() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        old = s.engine("engine-1").address
        s.engine("engine-1").alive = False
        new = await world.engines.launch(s.manager.target._spec, name="engine-1")
        assert await s.manager.adopt(old, new) and await s.manager.adopt(old, new)
        await s.gateway.replace_replica(old, new)
        into = await s.scaled("scale_in", 1)
        assert into["status"] == "COMPLETED"
        assert world.of("scale.drain", what="confirmed")[0]["replica_inc"] == 1

    run(body)


def test_the_manager_forgets_old_operations_and_keeps_what_is_dirty() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"max_history": 2, "removal_timeout_s": 1.0})
        manager: ScaleManager = s.manager.target
        for _ in range(4):
            await s.scaled("scale_out", 2)
            await s.scaled("scale_in", 1)
        assert len(manager._lifecycles) <= 2

    run(body)
