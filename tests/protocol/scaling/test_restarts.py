"""Who is killed and started anew knows with a journal what it knew before, and goes on; without one it begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import DiskFull
from protocol.messages import EngineAddress
from protocol.scaling.contract import Victim
from tests.protocol.scaling.world import ScalingWorld, Service, run, service

MANAGER = {"lifecycle": {"journal": "manager"}}
API = {"scaling": {"journal": "api"}}


def at(world: ScalingWorld, kind: str, act: Callable[[], None], nth: int = 1, **fields: Any) -> list[None]:
    """Do something at the n-th emission like this; the result has an entry when it was done."""
    seen = 0
    done: list[None] = []
    before = world.on_emit

    def look(emitted: str, data: dict[str, Any]) -> None:
        nonlocal seen
        before(emitted, data)
        if emitted == kind and all(data.get(name) == value for name, value in fields.items()):
            seen += 1
            if seen == nth:
                done.append(None)
                act()

    world.on_emit = look
    return done


def restart_soon(s: Service, part: str) -> Callable[[], None]:
    """Kill it in the instant, start it anew a moment later."""

    async def back() -> None:
        await asyncio.sleep(0.3)
        setattr(s, part, await s.again[part]())

    def act() -> None:
        s.kill(part)
        s.world.background(back(), name="back")

    return act


OUT = [
    ("scale.slot", {"what": "candidate", "replica": "engine-2"}, 0),
    ("scale.slot", {"what": "owns_group", "replica": "engine-2"}, 1),
    ("scale.slot", {"what": "launched", "replica": "engine-2"}, 1),
    ("gateway.routable", {"replica": "engine-2"}, 0),
    ("scale.slot", {"what": "published", "replica": "engine-2"}, 0),
]


@pytest.mark.parametrize(("kind", "fields", "failed"), OUT, ids=[str(what[1].get("what", "taken")) for what in OUT])
def test_a_scale_out_goes_on_after_its_manager_was_killed(kind: str, fields: dict[str, Any], failed: int) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER)
        hit = at(world, kind, restart_soon(s, "manager"), **fields)
        out = await s.scaled("scale_out", 4)
        assert hit and s.manager.incarnation == 1
        assert (out["status"], out["cleanup_required"], out["current"]) == ("ACTIVE", False, 4)
        assert await s.capacity() == (4, 4, 4, 0)
        # One that the gateway had taken was not made twice; of one that had nothing yet, nothing was taken down.
        assert len(world.placement_groups.open) == 3 and len(world.placement_groups.states) == 3 + failed
        assert len(await s.routable()) == 4
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["cleanup_required"], into["removed"]) == ("COMPLETED", False, 3)
        assert world.placement_groups.open == [] and await s.capacity() == (1, 1, 1, 0)

    run(body)


IN = [
    ("scale.drain", {"what": "chosen"}),
    ("scale.drain", {"what": "confirmed"}),
    ("scale.slot", {"what": "stopped"}),
    ("scale.slot", {"what": "retired"}),
]


@pytest.mark.parametrize(("kind", "fields"), IN, ids=[what[1]["what"] for what in IN])
def test_a_scale_in_goes_on_after_its_manager_was_killed(kind: str, fields: dict[str, Any]) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER)
        await s.scaled("scale_out", 4)
        hit = at(world, kind, restart_soon(s, "manager"), nth=2, **fields)
        into = await s.scaled("scale_in", 1)
        assert hit and s.manager.incarnation == 1
        assert (into["status"], into["cleanup_required"], into["removed"]) == ("COMPLETED", False, 3)
        assert world.placement_groups.open == [] and await s.capacity() == (1, 1, 1, 0)
        assert await s.routable() == ["engine-0"] and s.engine("engine-0").alive
        assert sorted(world.placement_groups.removals) == ["pg-0", "pg-1", "pg-2"]

    run(body)


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "never arrived"])
def test_a_removal_that_a_killed_manager_had_asked_for_is_looked_for_before_it_is_asked_for_again(
    accepted: bool,
) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"journal": "manager", "removal_timeout_s": 3.0})
        await s.scaled("scale_out", 2)
        groups, killed = world.placement_groups, restart_soon(s, "manager")
        remove = groups.remove

        async def asked(group: str) -> None:
            groups.remove = remove  # type: ignore[method-assign]  # of this world alone
            killed()
            if accepted:
                asyncio.get_running_loop().call_later(1.0, groups.states.__setitem__, group, "REMOVED")
            await asyncio.sleep(60)

        groups.remove = asked  # type: ignore[method-assign]  # of this world alone
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["cleanup_required"]) == ("COMPLETED", False)
        assert groups.removals == ([] if accepted else ["pg-0"]) and groups.open == []

    run(body)


def test_a_late_proof_of_the_drain_before_the_restart_is_none() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER, scaling={"poll_interval_s": 30.0})
        await s.scaled("scale_out", 2)
        operation = await s.admitted("scale_in", 1)
        await asyncio.sleep(1)
        old = (await s.manager.progress(operation)).victim
        await s.restart("manager")
        await asyncio.sleep(1)
        progress = await s.manager.progress(operation)
        assert progress.phase == "DRAINING" and progress.victim == Victim(old.address, old.rank, old.generation + 1)
        assert not await s.manager.confirm_drained(operation, old)
        assert (await s.ended("scale_in", operation))["status"] == "COMPLETED"

    run(body)


def test_an_abort_is_not_forgotten() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER)
        world.engines.startup_s = 1e6
        operation = await s.admitted("scale_out", 3)
        await asyncio.sleep(1)
        assert await s.manager.abort(operation, "scale_out", True)
        await s.restart("manager")
        out = await s.ended("scale_out", operation)
        assert (out["status"], out["cleanup_required"], out["current"]) == ("FAILED", False, 1)
        assert world.placement_groups.open == []

    run(body)


def test_a_parked_victim_stays_parked_and_can_be_reconciled() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER)
        await s.scaled("scale_out", 2)
        calls = [s.generate(50.0) for _ in range(4)]
        await asyncio.sleep(0.01)
        operation = await s.admitted("scale_in", 1, timeout_secs=2.0)
        assert (await s.ended("scale_in", operation))["cleanup_required"] is True
        await s.restart("manager")
        assert await s.capacity() == (2, 1, 2, 0) and await s.routable() == ["engine-0"]
        assert (await s.api.reconcile("scale_in", operation)).status == 409
        await asyncio.gather(*calls)
        reply = await s.api.reconcile("scale_in", operation)
        assert (reply.status, reply.body["cleanup_required"]) == (200, False)
        assert world.placement_groups.open == [] and await s.capacity() == (1, 1, 1, 0)

    run(body)


def test_a_group_that_was_asked_for_and_never_named_is_not_taken_for_gone() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER)
        groups, killed = world.placement_groups, restart_soon(s, "manager")
        create = groups.create

        async def asked(*bundles: Any, **more: Any) -> str:
            groups.create = create  # type: ignore[method-assign]  # of this world alone
            await create(*bundles, **more)
            killed()
            await asyncio.sleep(60)
            return ""

        groups.create = asked  # type: ignore[method-assign]  # of this world alone
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["cleanup_required"]) == ("FAILED", True)
        assert "nobody can name it" in out["error_message"] and groups.open == ["pg-0"]
        assert (await s.submit("scale_out", 2)).status == 409

    run(body)


def test_a_manager_without_a_journal_forgets_what_it_owns() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 3)
        await s.restart("manager")
        assert await s.capacity() == (1, 1, 1, 0) and len(world.placement_groups.open) == 2

    run(body)


def test_an_incarnation_of_recovery_is_remembered() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER)
        await s.scaled("scale_out", 2)
        old = s.engine("engine-1").address
        new = EngineAddress(old.name, old.incarnation + 1, old.host, old.port + 1)
        assert await s.manager.adopt(old, new)
        await s.restart("manager")
        assert (await s.manager.may_recover(new)).allowed and (await s.manager.may_recover(old)).allowed
        other = EngineAddress(old.name, old.incarnation + 2, old.host, old.port)
        assert (await s.manager.may_recover(other)).why == "superseded by another incarnation"

    run(body)


# --- the control API ---


def test_the_api_knows_its_operations_and_keys_again_and_watches_on() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **API)
        noop = await s.submit("scale_out", 1, idempotency_key="same")
        world.engines.startup_s = 5.0
        operation = await s.admitted("scale_out", 3, idempotency_key="out", timeout_secs=60.0)
        await asyncio.sleep(2)
        assert (await s.status("scale_out", operation))["status"] == "CREATING"
        await s.restart("api")
        assert (await s.submit("scale_in", 1)).body["error"] == "CONFLICT"
        again = await s.submit("scale_out", 3, idempotency_key="out", timeout_secs=60.0)
        assert (again.body["request_id"], again.body["status"]) == (operation, "CREATING")
        other = await s.submit("scale_out", 2, idempotency_key="out", timeout_secs=60.0)
        assert other.body["error"] == "IDEMPOTENCY_CONFLICT"
        ended = await s.ended("scale_out", operation)
        assert (ended["status"], ended["cleanup_required"], ended["current"]) == ("ACTIVE", False, 3)
        await s.restart("api")
        assert await s.status("scale_out", operation) == ended
        assert await s.submit("scale_out", 1, idempotency_key="same") == noop
        assert (await s.scaled("scale_in", 1))["status"] == "COMPLETED"

    run(body)


def test_the_budget_and_the_window_of_a_key_go_on_after_a_restart() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, scaling={"journal": "api", "idempotency_window_s": 100.0})
        world.engines.startup_s = 1e6
        operation = await s.admitted("scale_out", 2, idempotency_key="out", timeout_secs=20.0)
        began = asyncio.get_running_loop().time()
        for _ in range(3):
            await asyncio.sleep(5)
            await s.restart("api")
        assert (await s.ended("scale_out", operation))["status"] == "FAILED"
        assert 20 <= asyncio.get_running_loop().time() - began < 24
        await asyncio.sleep(70)
        await s.restart("api")
        assert (await s.submit("scale_out", 2, idempotency_key="out", timeout_secs=20.0)).body[
            "request_id"
        ] == operation
        await asyncio.sleep(10)
        await s.restart("api")
        assert (await s.submit("scale_out", 2, idempotency_key="out", timeout_secs=20.0)).body[
            "request_id"
        ] != operation

    run(body)


def test_nothing_is_told_or_begun_of_an_operation_that_cannot_be_kept() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **API)
        world.storage.fail[".new"] = DiskFull("no space left", path="api")
        reply = await s.submit("scale_out", 2, idempotency_key="out")
        assert (reply.status, reply.body["error"]) == (503, "NOT_KEPT") and "same key" in reply.body["detail"]
        again = await s.submit("scale_out", 2, idempotency_key="out")
        assert again.status == 200
        assert (await s.ended("scale_out", again.body["request_id"]))["status"] == "ACTIVE"
        assert len(world.of("scale.decision", result="ADMITTED")) == 1

    run(body)


def test_what_a_status_has_told_is_so_after_a_restart() -> None:
    """Though the operation goes on while that is being kept."""

    async def body(world: ScalingWorld) -> None:
        s = await service(world, **API)
        operation = await s.admitted("scale_out", 2)
        while not world.of("scale.state", state="HEALTH_CHECKING"):
            await asyncio.sleep(0.001)
        write = world.storage.write

        async def slow(path: str, data: bytes, **more: Any) -> None:
            await asyncio.sleep(10)
            await write(path, data, **more)

        world.storage.write = slow  # type: ignore[method-assign]  # of this world alone
        told = await s.status("scale_out", operation)
        assert world.of("scale.terminal")
        await s.restart("api")
        assert (await s.status("scale_out", operation))["status"] == told["status"]

    run(body)


def test_an_api_without_a_journal_begins_anew() -> None:
    """Hazard H12."""

    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        operation = await s.admitted("scale_out", 2)
        await s.restart("api")
        assert (await s.api.status("scale_out", operation)).status == 404

    run(body)


# --- the gateway ---


def test_the_gateway_has_its_replicas_again_and_health_readmits_them() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, 4, gateway={"journal": "gateway"})
        first, closed, gone, last = (engine.address for engine in s.initial)
        await s.gateway.close_admission(closed, "drain")
        await s.gateway.remove_replica(gone)
        told = (await s.gateway.health_view(0, 5.0)).version
        await s.restart("gateway")
        view = await s.gateway.health_view(told, 5.0)
        assert view.roster == (first, closed, last) and view.suspects == (first, last)
        assert await s.routable() == []
        for address in (first, closed, last):
            await s.gateway.set_routable(address, True, "")
        assert await s.routable() == [first.name, last.name]
        # What was removed does not come back, nor an incarnation that is older than the one that was known.
        assert not await s.gateway.add_replica(gone)
        assert await s.gateway.add_replica(first)

    run(body)


def test_a_gateway_that_cannot_keep_something_answers_when_it_can_and_nobody_breaks_over_it() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, gateway={"journal": "gateway"})

        def full() -> None:
            world.storage.fail[".new"] = DiskFull("no space left", path="gateway")

        hits = [
            at(world, "scale.slot", full, what="launched"),  # it is about to be published
            at(world, "scale.drain", full, what="chosen"),  # about to be closed
            at(world, "scale.slot", full, what="stopped"),  # about to be forgotten
        ]
        assert (await s.scaled("scale_out", 2))["status"] == "ACTIVE"
        assert (await s.scaled("scale_in", 1))["status"] == "COMPLETED"
        assert all(hits) and not world.storage.fail

    run(body)


def test_the_gateway_with_a_journal_is_drained_after_a_restart_too() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, **MANAGER, gateway={"journal": "gateway"})
        await s.scaled("scale_out", 3)
        hit = at(world, "scale.drain", restart_soon(s, "gateway"), what="chosen")
        into = await s.scaled("scale_in", 1)
        assert hit and (into["status"], into["removed"]) == ("COMPLETED", 2)

    run(body)
