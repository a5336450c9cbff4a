"""An operation that is over excludes the others only as long as something of it may be left: every way to the end.

And the other way round: a reconcile goes on with nothing that is not known to be closed and idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from protocol.config import AdminConfig, RecoveryConfig
from protocol.errors import ReadTimeout
from protocol.messages import EngineAddress
from protocol.ports import EngineSpec
from protocol.scaling.lifecycle import ScaleManager
from protocol.serving.gateway import Gateway
from protocol.serving.recovery import Recovery
from tests.protocol.fake import FakeHandle
from tests.protocol.scaling.world import ScalingWorld, Service, run, service


async def _clean_in_the_end(s: Service, direction: str, operation: str, within_s: float = 60.0) -> None:
    """Reconcile until it is clean, and then have another operation admitted."""
    async with asyncio.timeout(within_s):
        while True:
            reply = await s.api.reconcile(direction, operation)
            if reply.status == 200 and reply.body["cleanup_required"] is False:
                break
            await asyncio.sleep(1)
    assert (await s.status(direction, operation))["status"] == "FAILED"
    assert await s.api.unresolved() == ()
    assert (await s.submit("scale_out", 4)).body["status"] == "PENDING"


def test_a_scale_in_of_several_that_was_aborted_between_two_can_be_cleaned_up() -> None:
    """The first victim goes slowly: the watcher gives up before the manager looks for the abort."""

    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 3)
        calls = [s.generate(4.0) for _ in range(3)]
        await asyncio.sleep(0.1)
        ending = world.engines.terminate

        async def slowly(name: str) -> None:
            await asyncio.sleep(8)
            await ending(name)

        world.engines.terminate = slowly  # type: ignore[method-assign]  # of this world alone
        world.placement_groups.removal_s = 58.0
        into = await s.scaled("scale_in", 1, timeout_secs=5.0)
        assert (into["status"], into["cleanup_required"], into["removed"]) == ("FAILED", True, 0)
        await asyncio.gather(*calls)
        await asyncio.sleep(10)
        progress = await s.manager.progress(into["request_id"])
        assert (progress.phase, progress.physical_done, progress.victim, progress.removed) == ("FAILED", True, None, 1)
        assert progress.cleanup_required is False
        await _clean_in_the_end(s, "scale_in", into["request_id"])
        assert world.slots("retired") == ["engine-2"]  # and nobody else

    run(body)


class _Away:
    """A manager that is not reached: calls are lost, or their answers."""

    def __init__(self, manager: FakeHandle) -> None:
        self.target = manager.target
        self.lost: dict[str, str] = {}
        manager.target = self

    def __getattr__(self, name: str) -> Any:
        bound = getattr(self.target, name)

        async def call(*args: Any) -> Any:
            lost = self.lost.get(name, self.lost.get("*", ""))
            if lost == "call":
                await asyncio.get_running_loop().create_future()
            answer = await bound(*args)
            if lost == "answer":
                self.lost = {"*": "call"}  # and from now on nothing arrives
                await asyncio.get_running_loop().create_future()
            return answer

        return call


@pytest.mark.parametrize("direction", ["scale_out", "scale_in"])
@pytest.mark.parametrize("lost", ["begin", "execute", "all"])
def test_what_was_begun_or_never_arrived_and_is_over_is_called_off_by_a_reconcile(direction: str, lost: str) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, scaling={"progress_timeout_s": 1.0})
        await s.scaled("scale_out", 3)
        away = _Away(s.manager)
        target = 4 if direction == "scale_out" else 2
        operation = await s.admitted(direction, target, timeout_secs=5.0)
        # Lost on its way there, or on its way back; then the manager is not reached at all until all is over.
        away.lost = {
            "begin": {"begin": "answer"},
            "execute": {"execute": "call", "abort": "call", "progress": "call"},
        }.get(lost, {"*": "call"})
        over = await s.ended(direction, operation)
        assert (over["status"], over["cleanup_required"]) == ("FAILED", True)
        refused = await s.api.reconcile(direction, operation)
        assert (refused.status, refused.body["error"]) == (503, "MANAGER_UNKNOWN")
        assert (await s.submit("scale_out", 4)).status == 503 or lost == "execute"
        away.lost = {}
        await _clean_in_the_end(s, direction, operation)
        # What comes late begins nothing any more.
        before = await s.capacity()
        await s.manager.begin(operation, direction, target)
        assert not await s.manager.execute(operation)
        assert (await s.manager.progress(operation)).physical_done and before[0] == 3

    run(body)


def test_an_operation_that_the_manager_had_and_has_lost_stays_dirty() -> None:
    """It was executed, so nobody may say that nothing of it is left."""

    async def body(world: ScalingWorld) -> None:
        s = await service(world, scaling={"progress_timeout_s": 1.0})
        world.engines.startup_s = 100.0
        operation = await s.admitted("scale_out", 2, timeout_secs=5.0)
        await asyncio.sleep(2)
        away = _Away(s.manager)
        away.lost = {"*": "call"}
        await s.ended("scale_out", operation)
        away.lost = {}
        del away.target._lifecycles[operation]
        refused = await s.api.reconcile("scale_out", operation)
        assert (refused.status, refused.body["error"]) == (503, "STATE_LOST")
        assert (await s.status("scale_out", operation))["cleanup_required"] is True

    run(body)


class _Deaf(Gateway):
    """A gateway that ``close_admission`` does not reach while ``deaf``."""

    deaf = False

    async def close_admission(self, address: EngineAddress, why: str) -> bool:
        if self.deaf:
            raise ReadTimeout("lost")
        return await super().close_admission(address, why)


def test_a_victim_that_is_not_known_to_be_closed_is_not_touched() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        s.gateway.target.__class__ = _Deaf
        s.gateway.target.deaf = True
        into = await s.scaled("scale_in", 1, timeout_secs=2.0)
        victim = s.engine("engine-1").address
        await s.gateway.set_routable(victim, False, "slow")  # for the moment: health may take it back
        refused = await s.api.reconcile("scale_in", into["request_id"])
        assert (refused.status, refused.body["error"]) == (503, "VICTIM_UNKNOWN") and "closed" in refused.body["detail"]
        assert s.engine("engine-1").alive
        assert await s.gateway.set_routable(victim, True, "")
        s.gateway.target.deaf = False
        clean = await s.api.reconcile("scale_in", into["request_id"])
        assert (clean.status, clean.body["cleanup_required"]) == (200, False)

    run(body)


def test_a_victim_whose_process_is_gone_needs_no_gateway() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"removal_timeout_s": 1.0})
        await s.scaled("scale_out", 2)
        world.placement_groups.removal_s = 20.0
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["cleanup_required"]) == ("FAILED", True)
        await asyncio.sleep(20)
        s.gateway.dead = True
        clean = await s.api.reconcile("scale_in", into["request_id"])
        assert (clean.status, clean.body["cleanup_required"]) == (200, False)

    run(body)


# --- managers of the user's own ---


def _without(*missing: str) -> type:
    """A manager that lacks some methods."""

    class Manager(ScaleManager):
        def __getattribute__(self, name: str) -> Any:
            if name in missing:
                raise AttributeError(name)
            return super().__getattribute__(name)

    return Manager


@pytest.mark.parametrize("missing", [("begin",), ("begin", "execute", "abort", "progress", "reconcile"), ("execute",)])
def test_a_manager_that_cannot_scale_ends_the_operation_and_frees_the_model(missing: tuple[str, ...]) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, manager=_without(*missing))
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["cleanup_required"]) == ("FAILED", False)
        assert (
            out["detail"] == "manager_scale_not_implemented"
            and missing[-1 if len(missing) == 1 else 0] in out["error_message"]
        )
        assert (await s.submit("scale_out", 2)).body["status"] == "PENDING"
        assert world.placement_groups.states == {}

    run(body)


@pytest.mark.parametrize(
    ("direction", "missing"), [("scale_out", "reconcile"), ("scale_in", "reconcile"), ("scale_in", "progress")]
)
def test_a_manager_without_the_hook_of_a_reconcile_is_503(direction: str, missing: str) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, lifecycle={"removal_timeout_s": 1.0, "placement_timeout_s": 2.0})
        if direction == "scale_in":
            await s.scaled("scale_out", 2)
        else:
            world.placement_groups.stuck = True
        world.placement_groups.removal_s = 1000.0
        over = await s.scaled(direction, 2 if direction == "scale_out" else 1)
        assert over["cleanup_required"] is True
        s.manager.target.__class__ = _without(missing)
        refused = await s.api.reconcile(direction, over["request_id"])
        assert (refused.status, refused.body["error"]) == (503, "NO_RECONCILE_HOOK") and missing in refused.body[
            "detail"
        ]
        assert (await s.status(direction, over["request_id"]))["cleanup_required"] is True

    run(body)


def test_an_abort_that_breaks_takes_nobody_down() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)

        async def broken(*_: Any) -> Any:
            raise ValueError("no")

        s.manager.target.progress = s.manager.target.abort = broken
        out = await s.scaled("scale_out", 2)
        assert (out["status"], out["cleanup_required"]) == ("FAILED", True) and "ValueError" in out["error_message"]
        assert (await s.api.health()).status == 200

    run(body)


def test_without_a_capacity_hook_the_gateways_list_is_counted() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world, manager=_without("capacity"))
        assert (await s.submit("scale_out", 1)).body["status"] == "NOOP"
        assert (await s.scaled("scale_out", 2))["status"] == "ACTIVE"
        assert (await s.api.metrics()).body["num_engines"] == (await s.api.engines()).body["current"] == 2
        s.gateway.dead = True
        assert (await s.submit("scale_out", 3)).status == 503

    run(body)


# --- what recovery has adopted and not published ---


async def _recovering(world: ScalingWorld, s: Service, **config: Any) -> FakeHandle:
    made: FakeHandle = await world.spawn(
        Recovery, RecoveryConfig(**{"attempt_timeout_s": 20.0, "backoff_s": 1.0, **config}), AdminConfig(), s.gateway,
        EngineSpec("fake"), (), None, s.manager, name="recovery",
    )  # fmt: skip
    return made


def _cut_off_after(world: ScalingWorld, s: Service, stage: str) -> None:
    """From a stage of a recovery on the gateway is not reached."""

    def see(kind: str, fields: dict[str, Any]) -> None:
        if kind == "recovery.step" and fields["stage"] == stage:
            s.gateway.fail_next = [ReadTimeout("cut off")] * 10_000

    world.on_emit = see


async def _settle(recovery: FakeHandle) -> None:
    while await recovery.recovering():
        await asyncio.sleep(0.1)


def test_a_replica_that_was_adopted_and_not_published_is_recovered_again() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        recovery = await _recovering(world, s)
        old = s.engine("engine-1").address
        s.engine("engine-1").alive = False
        _cut_off_after(world, s, "validated")
        await recovery.recover(old, "dead")
        while not world.of("recovery.step", stage="retry"):
            await asyncio.sleep(0.1)
        world.on_emit = lambda kind, fields: None
        s.gateway.fail_next = []
        await _settle(recovery)
        assert world.of("recovery.step")[-1]["stage"] == "published"
        assert await s.routable() == ["engine-0", "engine-1"]
        into = await s.scaled("scale_in", 1)
        assert (into["status"], into["cleanup_required"]) == ("COMPLETED", False)
        assert world.placement_groups.open == [] and await s.routable() == ["engine-0"]

    run(body)


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_victim_that_was_adopted_and_not_published_is_drained_as_the_gateway_knows_it(attempts: int) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        recovery = await _recovering(world, s, attempts=attempts)
        s.engine("engine-1").alive = False
        _cut_off_after(world, s, "validated")
        await recovery.recover(s.engine("engine-1").address, "dead")
        while len(world.of("recovery.step", stage="validated")) < 1:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        await s.manager.begin("in", "scale_in", 1)  # an API is cut off as well, and refuses
        await s.manager.execute("in")
        await asyncio.sleep(30 if attempts == 1 else 1)
        world.on_emit = lambda kind, fields: None
        s.gateway.fail_next = []
        await _settle(recovery)
        assert await s.routable() == ["engine-0"]  # in drain: nobody puts it back
        model = next(iter(s.api.target._models.values()))
        async with asyncio.timeout(60):
            while (progress := await s.manager.progress("in")).phase != "COMPLETED":
                if progress.victim is not None and await model.gate.idle(progress.victim):
                    await s.manager.confirm_drained("in", progress.victim)
                await asyncio.sleep(0.5)
        assert world.placement_groups.open == [] and not s.engine("engine-1").alive
        confirmed = world.of("scale.drain", what="confirmed")
        assert [one["replica_inc"] for one in confirmed] == [0]  # the only one that was ever routed to

    run(body)


def test_a_victim_whose_publication_was_not_answered_is_drained_where_its_calls_are() -> None:
    """The gateway has it, recovery does not know: it must not be ended under its calls, and not forgotten either."""

    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        recovery = await _recovering(world, s)
        s.engine("engine-1").alive = False
        taken = s.gateway.target.replace_replica
        calls: list[asyncio.Task[Any]] = []

        async def unanswered(old: EngineAddress, new: EngineAddress) -> bool:
            await taken(old, new)
            calls.extend(s.generate(8.0) for _ in range(2))
            await asyncio.sleep(0.1)
            await s.manager.begin("in", "scale_in", 1)
            await s.manager.execute("in")
            raise ReadTimeout("lost")

        s.gateway.target.replace_replica = unanswered
        await recovery.recover(s.engine("engine-1").address, "dead")
        await _settle(recovery)
        new = s.engine("engine-1")
        assert new.alive and new.incarnation == 1
        assert world.of("recovery.step")[-1]["detail"] == "superseded by a later incarnation"
        model = next(iter(s.api.target._models.values()))
        async with asyncio.timeout(60):
            while (progress := await s.manager.progress("in")).phase != "COMPLETED":
                if progress.victim is not None and await model.gate.idle(progress.victim):
                    assert all(call.done() for call in calls)
                    await s.manager.confirm_drained("in", progress.victim)
                await asyncio.sleep(0.5)
        assert {result.engine for result in await asyncio.gather(*calls)} == {"engine-0", "engine-1"}
        assert world.of("scale.drain", what="confirmed")[0]["replica_inc"] == 1 and not new.alive

    run(body)


@pytest.mark.parametrize("before_the_fence", [True, False])
def test_a_publication_that_comes_after_the_proof_is_refused_or_keeps_the_victim(before_the_fence: bool) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        old = s.engine("engine-1").address
        s.engine("engine-1").alive = False
        new = await world.engines.launch(EngineSpec("fake"), name="engine-1")
        assert await s.manager.adopt(old, new)
        into = await s.admitted("scale_in", 1, timeout_secs=20.0)
        late: list[bool] = []

        async def publish() -> None:
            late.append(await s.gateway.target.replace_replica(old, new))

        def confirmed(kind: str, fields: dict[str, Any]) -> None:
            if kind == "scale.drain" and fields["what"] == "confirmed":  # the message was long under way
                if before_the_fence:
                    with contextlib.suppress(StopIteration):
                        publish().send(None)  # at once: it waits for nothing
                else:
                    world.background(publish(), name="late")

        world.on_emit = confirmed
        over = await s.ended("scale_in", into)
        assert late == [before_the_fence]
        if before_the_fence:
            assert (over["status"], over["cleanup_required"]) == ("FAILED", True)
            assert s.engine("engine-1").alive and "later incarnation" in over["error_message"]
            assert (await s.api.reconcile("scale_in", into)).body["cleanup_required"] is False
        else:
            assert (over["status"], over["cleanup_required"]) == ("COMPLETED", False)
        assert not s.engine("engine-1").alive and await s.routable() == ["engine-0"]

    run(body)


def test_a_fence_of_which_nothing_is_heard_is_asked_for_again() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        old = s.engine("engine-1").address
        s.engine("engine-1").alive = False
        assert await s.manager.adopt(old, await world.engines.launch(EngineSpec("fake"), name="engine-1"))
        into = await s.admitted("scale_in", 1, timeout_secs=20.0)
        listed = s.gateway.target.roster

        async def lost() -> Any:
            raise ReadTimeout("lost")

        def confirmed(kind: str, fields: dict[str, Any]) -> None:
            if kind == "scale.drain" and fields["what"] == "confirmed":
                s.gateway.target.roster = lost

        world.on_emit = confirmed
        over = await s.ended("scale_in", into)
        assert (over["status"], over["cleanup_required"]) == ("FAILED", True) and s.engine("engine-1").alive
        assert old not in await listed()  # it is forgotten, and the manager does not know
        refused = await s.api.reconcile("scale_in", into)
        assert (refused.status, refused.body["error"]) == (503, "VICTIM_UNKNOWN")
        s.gateway.target.roster = listed
        assert (await s.api.reconcile("scale_in", into)).body["cleanup_required"] is False
        assert not s.engine("engine-1").alive and world.placement_groups.open == []

    run(body)


def test_adoptions_that_come_late_change_nothing() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        old = s.initial[0].address
        first, second = (EngineAddress("engine-0", inc, "host", 30_000) for inc in (1, 2))
        assert await s.manager.adopt(old, first) and await s.manager.adopt(old, second)
        assert not await s.manager.adopt(old, first)
        assert (await s.manager.may_recover(old)).allowed and (await s.manager.may_recover(second)).allowed
        assert (await s.manager.may_recover(first)).why == "superseded by another incarnation"
        third = EngineAddress("engine-0", 3, "host", 30_000)
        assert await s.manager.adopt(second, third)
        assert not (await s.manager.may_recover(old)).allowed

    run(body)


# --- what is wrong with a submission ---


@pytest.mark.parametrize(
    ("bad", "says", "not_of"),
    [
        ({"num_replicas": True}, "num_replicas is the total", "timeout"),
        ({"num_replicas": 2, "timeout_secs": "5"}, "timeout_secs is the budget of the whole operation", "total"),
        ({"num_replicas": 2, "idempotency_key": 7}, "idempotency_key is a string", "total"),
        ({"num_replicas": 2, "model_name": 7}, "model_name is a string", "total"),
        ({"num_replicas": 2, "delta": 1}, "send a JSON object with num_replicas", "total"),
        ([], "send a JSON object with num_replicas", "total"),
        ({}, "num_replicas is the total", "timeout"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_send_for_what_is_wrong(bad: Any, says: str, not_of: str) -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        reply = await s.api.scale_out(bad)
        assert (reply.status, reply.body["error"]) == (422, "INVALID_TYPE")
        assert says in reply.body["detail"] and not_of not in reply.body["detail"]

    run(body)


def test_a_victim_that_was_chosen_at_the_deadline_is_closed_all_the_same() -> None:
    async def body(world: ScalingWorld) -> None:
        s = await service(world)
        await s.scaled("scale_out", 2)
        calls = [s.generate(20.0) for _ in range(4)]
        await asyncio.sleep(0.01)
        into = await s.scaled("scale_in", 1, timeout_secs=0.05)
        assert (into["status"], into["cleanup_required"]) == ("FAILED", True)
        assert await s.routable() == ["engine-0"] and s.engine("engine-1").alive
        await asyncio.gather(*calls)
        assert (await s.api.reconcile("scale_in", into["request_id"])).body["cleanup_required"] is False

    run(body)
