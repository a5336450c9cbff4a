"""Pause, continue and the publication barrier: order, one deadline, fail closed, partial reopening (serving.md 3)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.config import ControllerConfig, ExportConfig, GateConfig
from protocol.errors import (
    ActorDied,
    BarrierError,
    ConnectTimeout,
    GatePoisoned,
    HttpError,
    Outcome,
    ReadTimeout,
)
from protocol.serving.barrier import Member
from protocol.serving.controller import RolloutController
from protocol.serving.entrypoint import TurnResult
from protocol.serving.gate import RequestGate
from protocol.training.checkpoint import Exporter
from protocol.training.publication import WeightPublisher
from tests.protocol.fake import FakeBackend, FakeHandle, FakeTrainer, run
from tests.protocol.serving.world import ADMIN, CONTROLLER, Fleet, fleet_of, raised


def whats(world: FakeBackend) -> list[str]:
    return [data["what"] for data in world.of("gate.changed")]


def test_every_stage_is_over_everywhere_before_the_next_begins() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 3)).opened()
        assert whats(world) == ["sealed"] * 3 + ["drained"] * 3 + ["installed"] * 3 + ["reopened"] * 3
        assert fleet.stages() == [
            "asked", "frozen", "sealed", "drained", "paused", "served", "installed", "continued", "reopened",
        ]  # fmt: skip
        assert fleet.posts("/pause_generation") == fleet.posts("/continue_generation") == [1, 1, 1]
        assert all(s.open and s.model_step == 0 and s.epoch == 1 for s in await fleet.snapshots())
        assert await fleet.controller.barrier() is None

    run(body)


def test_nothing_is_admitted_anywhere_while_one_entrypoint_drains() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 3)).opened()
        fleet.engines[0].duration_s = 5
        slow = fleet.begin("s", 0)
        await asyncio.sleep(0.5)
        publication = asyncio.get_running_loop().create_task(fleet.publisher.publish(1))
        await asyncio.sleep(1)
        late = fleet.begin("t", 2)
        await asyncio.sleep(1)
        assert not late.done() and not publication.done() and fleet.engines[2].version == "0"
        assert (await slow).model_step == 0
        await publication
        assert (await late).model_step == 1

    run(body)


def test_prepare_has_one_deadline_for_all_of_it() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 4)).opened()
        for engine in fleet.engines:
            engine.duration_s = 1_000
        turns = [fleet.begin(f"s-{index}", index) for index in range(4)]
        await asyncio.sleep(1)
        fleet.gates[1].lose_next = 2  # seals whose answers are lost
        began = asyncio.get_running_loop().time()
        error = await raised(fleet.controller.prepare_pause(10))
        assert asyncio.get_running_loop().time() - began <= 10.1
        assert isinstance(error, GatePoisoned | BarrierError)
        assert not any(s.open for s in await fleet.snapshots())
        assert await fleet.controller.barrier() is not None
        assert fleet.posts("/pause_generation") == [1] * 4  # of the first publication alone
        await asyncio.gather(*turns, return_exceptions=True)

    run(body)


def test_an_exhausted_deadline_opens_nothing() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 3)).opened()
        await fleet.controller.prepare_pause()
        for engine in fleet.engines:
            engine.version = "1"
        fleet.gates[2].lose_next = 100  # its install is never acknowledged
        error = await raised(fleet.controller.resume_requests(1, 5))
        assert (
            isinstance(error, BarrierError) and error.outcome is Outcome.UNKNOWN and "installed: 1 of 3" in str(error)
        )
        fleet.gates[2].lose_next = 0
        assert not any(s.open for s in await fleet.snapshots())
        assert fleet.posts("/continue_generation") == [1, 1, 1]
        assert isinstance(await raised(fleet.controller.resume_requests(1, 0.0)), BarrierError)
        assert not any(s.open for s in await fleet.snapshots())
        await fleet.controller.resume_requests(1, 5)
        assert all(s.open for s in await fleet.snapshots())

    run(body)


def test_a_partial_reopening_is_completed_by_the_same_call_again() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 3)).opened()
        await fleet.controller.prepare_pause()
        for engine in fleet.engines:
            engine.version = "1"

        def cut(kind: str, fields: dict[str, Any]) -> None:
            if kind == "controller.stage" and fields["stage"] == "continued":
                fleet.gates[1].fail_next = [ActorDied("gone")]  # of unknown outcome, as the reopening begins

        world.on_emit = cut
        error = await raised(fleet.controller.resume_requests(1))
        assert isinstance(error, BarrierError) and "reopened: 1 of 3" in error.message
        world.on_emit = lambda kind, fields: None
        before = await fleet.snapshots()
        assert [s.open for s in before] == [True, False, True]
        assert all(s.installed and s.model_step == 1 for s in before)
        assert (await fleet.turn("s", 0)).model_step == 1  # what is open serves the new version
        error = await raised(fleet.controller.prepare_pause())
        assert (
            isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE and "resume_requests" in error.message
        )
        await fleet.controller.resume_requests(1)
        assert [s.epoch for s in await fleet.snapshots()] == [2, 2, 2] and all(s.open for s in await fleet.snapshots())
        assert await fleet.controller.barrier() is None

    run(body)


def test_lost_replies_of_idempotent_calls_are_asked_for_again() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        for gate in fleet.gates:
            gate.lose_next = 2
        await fleet.publisher.publish(1)
        assert [s.model_step for s in await fleet.snapshots()] == [1, 1]

    run(body)


def test_a_failed_prepare_keeps_the_barrier_and_goes_on_when_repeated() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        fleet.engines[1].post_script = [HttpError(status=400, body="no")]
        assert isinstance(await raised(fleet.controller.prepare_pause()), BarrierError)
        view = await fleet.controller.barrier()
        assert view is not None and view.stage == "sealing" and view.epoch == 2
        assert isinstance(await raised(fleet.controller.targets()), BarrierError)
        assert isinstance(await raised(fleet.controller.resume_requests(1)), BarrierError)
        assert (await fleet.controller.prepare_pause()).epoch == 2

    run(body)


def test_what_the_backends_serve_decides_not_the_label() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        fleet.engines[0].version = "1"
        error = await raised(fleet.controller.resume_requests(1))
        assert isinstance(error, BarrierError) and "e-1 serves version '0'" in error.message
        assert not any(s.open or s.installed for s in await fleet.snapshots())

    run(body)


def test_a_changed_topology_is_refused() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        member = Member("e-9", fleet.gates[0], fleet.servers[0])
        for call in (fleet.controller.add_entrypoint(member), fleet.controller.remove_entrypoint("e-0")):
            error = await raised(call)
            assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE
        engine = fleet.engines[1]
        engine.alive = False
        await fleet.gateway.add_replica(await world.engines.launch(engine.spec, name=engine.name))
        for call in (fleet.controller.targets(), fleet.controller.resume_requests(0)):
            error = await raised(call)
            assert isinstance(error, BarrierError) and "e-1" in error.message
        assert not any(s.open for s in await fleet.snapshots())

    run(body)


def test_entrypoints_and_roster_must_be_the_same() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await fleet_of(world, 2)
        await fleet.gateway.remove_replica(fleet.engines[1].address)
        assert isinstance(await raised(fleet.controller.prepare_pause()), BarrierError)
        await fleet.controller.remove_entrypoint("e-1")
        await fleet.publisher.publish(0)
        assert [s.open for s in await fleet.snapshots()] == [True, False]
        await fleet.controller.remove_entrypoint("e-0")
        await fleet.gateway.remove_replica(fleet.engines[0].address)
        assert "there is none" in str(await raised(fleet.controller.prepare_pause()))

    run(body)


def test_health_is_held_from_the_freeze_to_the_end_and_native_pause_is_refused() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        prober = fleet.prober.target
        assert prober._held_until == 0.0
        await fleet.controller.prepare_pause()
        assert prober._held_until > asyncio.get_running_loop().time()
        error = await raised(fleet.controller.pause_generation())
        assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE
        await fleet.controller.continue_generation()
        assert prober._held_until > asyncio.get_running_loop().time()
        await fleet.controller.resume_requests(0)
        assert prober._held_until == 0.0

    run(body)


def test_two_calls_at_once_on_the_barrier_are_refused() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        both = await asyncio.gather(
            fleet.controller.prepare_pause(), fleet.controller.prepare_pause(), return_exceptions=True
        )
        assert [isinstance(one, BarrierError) for one in both] == [False, True]
        await fleet.controller.resume_requests(0)

    run(body)


def test_a_poisoned_gate_stops_the_publication_before_anything_is_sealed() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 3)).opened()
        await fleet.controller.assert_request_gates_healthy()
        fleet.engines[2].generate_script = [ReadTimeout("x")]
        await raised(fleet.turn("s", 2))
        assert isinstance(await raised(fleet.controller.assert_request_gates_healthy()), GatePoisoned)
        error = await raised(fleet.publisher.publish(1))
        assert isinstance(error, GatePoisoned) and error.outcome is Outcome.NOT_DONE
        assert [s.epoch for s in await fleet.snapshots()] == [1, 1, 1]
        assert await fleet.controller.barrier() is None

    run(body)


def test_a_new_controller_learns_the_epochs_of_the_gates() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.publisher.publish(1)
        await fleet.controller.prepare_pause()  # and dies
        again = type(fleet.controller.target)(
            ControllerConfig(),
            fleet.controller.target._admin,
            tuple(fleet.controller.target._members.values()),
            fleet.gateway,
        )
        assert (await again.prepare_pause()).epoch == 4
        await again.resume_requests(1)
        assert all(s.open for s in await fleet.snapshots())

    run(body)


def test_a_gate_that_was_restarted_is_found_again_between_barriers() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        fleet.gates[0].dead = True
        await world.spawn(RequestGate, GateConfig(), name="gate-0")
        turn = fleet.begin("s", 0)  # which waits at the new one, born closed
        await asyncio.sleep(1)
        assert not turn.done()
        await fleet.publisher.publish(1)
        assert (await turn).model_step == 1

    run(body)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_native_pause_and_continue(mode: Any) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        paused = await fleet.controller.pause_generation(mode)
        assert [r.outcome for r in paused] == ["done", "done"]
        assert fleet.engines[0].posts[-1] == ("/pause_generation", {"mode": mode})
        assert [server.target._aborting for server in fleet.servers] == [mode == "abort"] * 2
        assert fleet.prober.target._held_until > 0
        await fleet.controller.continue_generation()
        assert [server.target._aborting for server in fleet.servers] == [False, False]
        assert fleet.prober.target._held_until == 0.0 and not fleet.engines[0].paused

    run(body)


def test_a_backend_that_does_not_pause_is_a_failure_and_health_stays_held() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        fleet.engines[1].post_script = [HttpError(status=400, body="no")]
        error = await raised(fleet.controller.pause_generation())
        assert isinstance(error, BarrierError) and "e-1" in error.message
        fleet.engines[1].post_script = [ConnectTimeout("x") for _ in range(5)]
        assert isinstance(await raised(fleet.controller.continue_generation()), BarrierError)
        assert fleet.prober.target._held_until > 0

    run(body)


def test_an_update_that_is_refused_is_not_believed_for_its_label() -> None:
    """Its flush may have failed after the weights had changed; the label may have been this one before."""

    async def body(world: FakeBackend) -> None:
        from protocol.training.publication import WeightPublisher

        fleet = await (await fleet_of(world, 2)).opened()
        again = await world.spawn(WeightPublisher, ADMIN, fleet.controller, fleet.exporter, name="again")
        refusal = HttpError(status=400, body="Weights were updated, but the cache was not flushed")
        refusal.outcome = Outcome.UNKNOWN  # so that the fake raises it after the weights have changed
        fleet.engines[0].post_script = [lambda: None, refusal]  # the first is of the pause
        error = await raised(again.publish(0))
        assert isinstance(error, BarrierError) and "not flushed" in error.message
        assert not any(s.open for s in await fleet.snapshots())
        await again.publish(0)
        assert all(s.open for s in await fleet.snapshots())
        assert fleet.posts("/update_weights_from_disk") == [3, 2]

    run(body)


def test_no_update_is_sent_again_once_a_gate_may_be_open() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()

        def cut(kind: str, fields: dict[str, Any]) -> None:
            if kind == "controller.stage" and fields["stage"] == "continued":
                fleet.gates[1].fail_next = [ActorDied("gone")]

        world.on_emit = cut
        assert isinstance(await raised(fleet.publisher.publish(1)), BarrierError)
        world.on_emit = lambda kind, fields: None
        fleet.engines[1].get_script["/model_info"] = [ReadTimeout("x")]
        await fleet.publisher.publish(1)
        assert fleet.posts("/update_weights_from_disk") == [2, 2]
        assert all(s.open for s in await fleet.snapshots())

    run(body)


def test_publishing_again_goes_on_where_it_was() -> None:
    async def body(world: FakeBackend) -> None:
        fleet: Fleet = await (await fleet_of(world, 2)).opened()
        # The paused stage's POST comes first, then the update of e-1 is refused before any effect, five times.
        fleet.engines[1].post_script = [None, *[ConnectTimeout("x") for _ in range(5)]]
        error = await raised(fleet.publisher.publish(1))
        assert isinstance(error, BarrierError) and "updated: 1 of 2" in error.message
        assert not any(s.open for s in await fleet.snapshots())
        await fleet.publisher.publish(1)
        assert all(s.open and s.model_step == 1 for s in await fleet.snapshots())
        assert fleet.posts("/update_weights_from_disk") == [2, 2]  # of each version once

    run(body)


# --- versions never go back ---


def refused_as_older(error: BaseException) -> bool:
    return isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE and "is older than 2" in error.message


@pytest.mark.parametrize("restarted", ["nobody", "publisher", "controller and publisher"])
def test_an_older_version_is_refused_before_anything_is_done_for_it_and_a_newer_one_passes(restarted: str) -> None:
    async def body(world: FakeBackend) -> None:
        fleet: Fleet = await (await fleet_of(world, 2)).opened(2)
        controller, publisher = fleet.controller, fleet.publisher
        if "controller" in restarted:
            members = tuple(fleet.controller.target._members.values())
            controller = await world.spawn(
                RolloutController, CONTROLLER, ADMIN, members, fleet.gateway, fleet.prober, name="controller-2"
            )  # fmt: skip
        if "publisher" in restarted:
            publisher = await world.spawn(WeightPublisher, ADMIN, controller, fleet.exporter, name="publisher")
            world.incarnation = 2
        before = (await fleet.snapshots(), fleet.posts("/update_weights_from_disk"))
        exported = len(world.of("export.published"))
        for _ in range(2):
            assert refused_as_older(await raised(publisher.publish(1)))
        assert (await fleet.snapshots(), fleet.posts("/update_weights_from_disk")) == before, "nothing was even sealed"
        assert await controller.barrier() is None and (await fleet.turn("a")).model_step == 2
        assert len(world.of("export.published")) == exported, "the next recovery would load it"
        await publisher.publish(2)
        await publisher.publish(3)
        assert all(s.open and s.model_step == 3 for s in await fleet.snapshots())

    run(body)


def test_a_publisher_finds_an_exporter_that_was_restarted() -> None:
    async def body(world: FakeBackend) -> None:
        fleet: Fleet = await (await fleet_of(world, 2)).opened(1)
        fleet.exporter.dead = True
        assert isinstance(await raised(fleet.publisher.publish(2)), ActorDied)  # nobody has brought it back yet
        await world.spawn(Exporter, ExportConfig(), FakeTrainer(), name="exporter")
        await fleet.publisher.publish(2)
        assert all(s.open and s.model_step == 2 for s in await fleet.snapshots())

    run(body)


def test_a_restarted_publisher_that_is_not_told_what_is_published_exports_nothing() -> None:
    async def body(world: FakeBackend) -> None:
        fleet: Fleet = await (await fleet_of(world, 2)).opened(2)
        publisher = await world.spawn(WeightPublisher, ADMIN, fleet.controller, fleet.exporter, name="publisher")
        world.incarnation = 2
        written = sorted(world.storage.files)
        fleet.controller.target._busy = True  # the resumption of the one before it, say, about to install a version
        error = await raised(publisher.publish(3))
        assert isinstance(error, BarrierError) and "another call is at work" in error.message
        fleet.controller.target._busy = False
        fleet.gates[1].lose_next = 5
        assert "gate-1 did not answer snapshot" in str(await raised(publisher.publish(3)))
        assert sorted(world.storage.files) == written
        fleet.gates[1].lose_next = 0
        asked = fleet.stages().count("asked")
        await publisher.publish(3)
        await publisher.publish(4)
        assert fleet.stages().count("asked") == asked + 3, "what is published is asked once"

    run(body)


def test_an_older_version_in_a_barrier_is_refused_and_the_barrier_goes_on_with_a_newer_one() -> None:
    async def body(world: FakeBackend) -> None:
        fleet: Fleet = await (await fleet_of(world, 2)).opened(2)
        fleet.engines[1].post_script = [None, *[ConnectTimeout("x") for _ in range(5)]]
        assert "updated: 1 of 2" in str(await raised(fleet.publisher.publish(3)))  # the barrier is drained, and stays
        updates = fleet.posts("/update_weights_from_disk")
        assert refused_as_older(await raised(fleet.publisher.publish(1)))
        again = await world.spawn(WeightPublisher, ADMIN, fleet.controller, fleet.exporter, name="publisher-2")
        assert refused_as_older(await raised(again.publish(1)))
        assert refused_as_older(await raised(fleet.controller.resume_requests(1)))
        assert fleet.posts("/update_weights_from_disk") == updates, "the weights of version 1 are nowhere"
        view = await fleet.controller.barrier()
        assert view is not None and (view.stage, view.newest) == ("drained", 2)
        await fleet.publisher.publish(4)
        assert all(s.open and s.model_step == 4 for s in await fleet.snapshots())

    run(body)


def test_a_refused_version_leaves_the_fenced_to_rejoin() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await fleet_of(world, 2, controller=FENCING)
        await fleet.opened(2)
        fleet.controller.target._fenced = {"e-1": (1, 2)}
        assert refused_as_older(await raised(fleet.controller.prepare_pause(model_step=1)))
        assert fleet.controller.target._fenced == {"e-1": (1, 2)}

    run(body)


FENCING = ControllerConfig(call_timeout_s=1, fence=True)


def test_a_fenced_entrypoint_stays_closed_by_name_while_the_others_go_on() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 3, controller=FENCING)).opened()
        await fleet.controller.prepare_pause()
        for engine in (fleet.engines[0], fleet.engines[2]):
            engine.version = "1"
        await fleet.controller.fence((("e-1", "took no bucket"),))
        view = await fleet.controller.barrier()
        assert view is not None and view.fenced == ("e-1",)
        assert [address.name for address in await fleet.controller.targets()] == ["e-0", "e-2"]
        assert [address.name for address in await fleet.controller.inactive()] == ["e-1"]
        routable = {one.address.name: (one.routable, one.why) for one in await fleet.gateway.engines()}
        assert routable["e-1"] == (False, "took no bucket") and routable["e-0"][0]
        await fleet.controller.resume_requests(1)
        assert [s.open for s in await fleet.snapshots()] == [True, False, True]
        assert await fleet.controller.closed_gates() == ("e-1",)

    run(body)


def test_a_fenced_entrypoint_rejoins_when_its_backend_serves_the_version() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2, controller=FENCING)).opened()
        await fleet.controller.prepare_pause()
        fleet.engines[0].version = "1"
        await fleet.controller.fence((("e-1", "took no bucket"),))
        await fleet.controller.resume_requests(1)
        await asyncio.sleep(3)
        assert not (await fleet.snapshots())[1].open  # nobody is routed to it
        fleet.engines[1].paused = False  # as its successor is; it serves 0 still
        await fleet.gateway.set_routable(fleet.engines[1].address, True, "")
        await asyncio.sleep(3)
        assert not (await fleet.snapshots())[1].open
        fleet.engines[1].version = "1"
        await asyncio.sleep(3)
        assert (await fleet.turn("s", 1)).model_step == 1
        await fleet.controller.prepare_pause()
        assert len(await fleet.controller.targets()) == 2

    run(body)


def test_an_entrypoint_that_nobody_is_routed_to_is_fenced_from_the_start_and_sent_nothing() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2, controller=FENCING)).opened()
        await fleet.gateway.set_routable(fleet.engines[1].address, False, "health")
        posted = len(fleet.engines[1].posts)
        view = await fleet.controller.prepare_pause()
        assert view.fenced == ("e-1",) and not (await fleet.snapshots())[1].open
        fleet.engines[0].version = "1"
        await fleet.controller.resume_requests(1)
        assert len(fleet.engines[1].posts) == posted

    run(body)


@pytest.mark.parametrize("deaf", [False, True])
def test_where_nobody_is_routed_to_no_barrier_begins_and_the_next_publication_passes(deaf: bool) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2, controller=ControllerConfig(call_timeout_s=1, fence=True))).opened()
        engines = fleet.gateway.target.engines

        async def silent() -> Any:
            await asyncio.sleep(5)

        for engine in fleet.engines:
            await fleet.gateway.set_routable(engine.address, deaf, "ill")
        if deaf:
            fleet.gateway.target.engines = silent
        error = await raised(fleet.publisher.publish(1))
        assert isinstance(error, BarrierError) and await fleet.controller.barrier() is None
        assert ("who is routed to" if deaf else "no entrypoint is routed to") in error.message
        assert all(s.open and s.model_step == 0 for s in await fleet.snapshots())  # nothing was sealed
        assert fleet.prober.target._held_until == 0.0  # who is ill can be mended
        fleet.gateway.target.engines = engines
        await fleet.gateway.set_routable(fleet.engines[1].address, True, "well again")
        await fleet.gateway.set_routable(fleet.engines[0].address, False, "ill")
        await fleet.publisher.publish(1)
        assert [s.open for s in await fleet.snapshots()] == [False, True] and fleet.engines[1].version == "1"

    run(body)


def test_the_last_entrypoint_is_not_fenced() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2, controller=FENCING)).opened()
        await fleet.controller.prepare_pause()
        error = await raised(fleet.controller.fence((("e-0", "x"), ("e-1", "y"))))
        assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE
        assert len(await fleet.controller.targets()) == 2

    run(body)


async def rebuilt(world: FakeBackend, fleet: Fleet, index: int = 0) -> None:
    """Another incarnation of a gate, born closed."""
    fleet.gates[index].dead = True
    fleet.gates[index] = await world.spawn(RequestGate, GateConfig(), name=f"gate-{index}")


async def rebuilt_under_a_turn(world: FakeBackend, duration_s: float) -> tuple[Fleet, asyncio.Task[TurnResult]]:
    """Two entrypoints, and a turn at the first, which the gate before had granted a second ago."""
    fleet = await (await fleet_of(world, 2)).opened()
    fleet.engines[0].duration_s = duration_s
    turn = fleet.begin("s", 0)
    await asyncio.sleep(1)
    await rebuilt(world, fleet)
    return fleet, turn


def test_a_gate_that_was_restarted_is_drained_only_when_its_entrypoint_has_no_turn_from_before() -> None:
    async def body(world: FakeBackend) -> None:
        fleet, turn = await rebuilt_under_a_turn(world, 8)
        assert not (await fleet.snapshots())[0].active  # it knows nothing of the turn
        await fleet.controller.closed_gates()  # finds it again before the barrier does
        publication = asyncio.get_running_loop().create_task(fleet.publisher.publish(1))
        await asyncio.sleep(4)
        assert not publication.done() and fleet.engines[0].version == "0"
        result = await turn
        assert {span.version for span in result.result.spans} == {"0"} and result.model_step == 0
        await publication
        assert (await fleet.turn("t", 0)).model_step == 1 and "quiet" in fleet.stages()
        await fleet.publisher.publish(2)
        assert fleet.stages().count("quiet") == 1  # once

    run(body)


def test_a_new_controller_asks_behind_a_gate_that_was_never_sealed() -> None:
    async def body(world: FakeBackend) -> None:
        fleet, turn = await rebuilt_under_a_turn(world, 8)
        members = tuple(Member(e.name, g, s) for e, g, s in zip(fleet.engines, fleet.gates, fleet.servers, strict=True))
        again = type(fleet.controller.target)(ControllerConfig(), ADMIN, members, fleet.gateway)
        await again.prepare_pause()
        assert turn.done()

    run(body)


def test_turns_from_before_that_do_not_end_fail_the_preparation_and_not_for_ever() -> None:
    async def body(world: FakeBackend) -> None:
        fleet, turn = await rebuilt_under_a_turn(world, 12)
        error = await raised(fleet.controller.prepare_pause(5))
        assert isinstance(error, BarrierError) and "turns left from before gate-0 was restarted" in error.message
        await turn
        await fleet.publisher.publish(1)
        assert all(s.open and s.model_step == 1 for s in await fleet.snapshots())

    run(body)


def test_a_backend_that_cannot_say_whether_turns_are_left_is_refused_at_once_and_by_name() -> None:
    """The gate and the entrypoint were restarted; neither metrics nor flush tell. Another process in its place does."""

    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await rebuilt(world, fleet)
        fleet.servers[0].target._inherited = True  # as its start has it in a later incarnation
        engine = fleet.engines[0]
        engine.no_metrics, engine.flush_answer = True, 404
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            error = await raised(fleet.publisher.publish(1))
            assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE
            assert "lacks sglang:num_running_reqs" in error.message and "/flush_cache answers 404" in error.message
            assert asyncio.get_running_loop().time() - began < 1, "the deadline is 600 s"
        assert engine.version == "0" and not any(s.open for s in await fleet.snapshots())
        engine.alive = False
        await fleet.gateway.add_replica(await world.engines.launch(engine.spec, name=engine.name))
        fleet.engines[0] = world.engines.every[-1]
        await fleet.publisher.publish(1)
        assert (await fleet.turn("t", 0)).model_step == 1

    run(body)


def test_a_gate_that_is_rebuilt_after_a_drain_that_timed_out_lets_the_next_try_pass() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        fleet.engines[0].duration_s = 20
        turn = fleet.begin("s", 0)
        await asyncio.sleep(1)
        assert isinstance(await raised(fleet.controller.prepare_pause(5)), BarrierError | GatePoisoned)
        await raised(fleet.gates[0].drain(2, 0.1))  # the last of it, whose time is up
        await turn
        assert isinstance(await raised(fleet.controller.prepare_pause(5)), GatePoisoned)
        fleet.gates[0].dead = True
        assert isinstance(await raised(fleet.publisher.publish(1)), BarrierError)  # nobody has restarted it yet
        await rebuilt(world, fleet)
        await fleet.publisher.publish(1)
        assert all(s.open and s.model_step == 1 and s.epoch == 2 for s in await fleet.snapshots())

    run(body)


def test_an_entrypoint_that_is_gone_is_asked_now_and_then_whether_it_is_quiet() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        lookup, looks = world.lookup, []

        async def looked(name: str) -> Any:
            looks.append(name)
            await asyncio.sleep(0.0005)
            return await lookup(name)

        world.lookup = looked  # type: ignore[method-assign]  # counted, of this world alone
        await rebuilt(world, fleet)
        fleet.servers[0].dead = True
        error = await raised(fleet.controller.prepare_pause(2))
        assert isinstance(error, BarrierError) and asyncio.get_running_loop().time() < 2.1
        assert "entry-0 does not say whether turns are left" in error.message and "is dead" in error.message
        assert 4 <= looks.count("entry-0") <= 9

    run(body)


@pytest.mark.parametrize("question", ["closed_gates", "assert_request_gates_healthy"])
@pytest.mark.parametrize("stage", ["sealed", "drained"])
def test_a_gate_that_a_question_finds_again_in_a_preparation_does_not_pass_as_drained(
    stage: str, question: str
) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        asked: list[asyncio.Task[None]] = []

        async def asks() -> None:
            await rebuilt(world, fleet)
            await getattr(fleet.controller, question)()

        def cut(kind: str, fields: dict[str, Any]) -> None:
            if kind == "controller.stage" and fields["stage"] == stage and not asked:
                asked.append(asyncio.get_running_loop().create_task(asks()))

        for engine in fleet.engines:
            engine.post_delay_s = 2  # the pausing, after the drain
        world.on_emit = cut
        error = await raised(fleet.controller.prepare_pause())
        assert isinstance(error, BarrierError) and error.outcome is Outcome.UNKNOWN
        if stage == "drained":
            assert asked[0].done()
            assert "gate-0 was restarted before the barrier of epoch 2 was drained" in error.message
        await asked[0]
        view = await fleet.controller.barrier()
        assert view is not None and (view.stage, view.epoch) == ("sealing", 2)
        await fleet.publisher.publish(1)
        assert all(s.open and s.model_step == 1 and s.epoch == 2 for s in await fleet.snapshots())

    run(body)


def test_no_backend_is_named_for_an_update_once_a_gate_of_the_drained_barrier_was_restarted() -> None:
    """It is not sealed: one that is born open grants turns, which would run while the weights change."""

    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        assert len(await fleet.controller.targets()) == 2
        await rebuilt(world, fleet)
        await fleet.controller.closed_gates()  # finds it
        error = await raised(fleet.controller.targets())
        assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE
        assert "gate-0 was restarted in the barrier of epoch 2" in error.message
        await fleet.controller.prepare_pause()
        assert [address.name for address in await fleet.controller.targets()] == ["e-0", "e-1"]

    run(body)


@pytest.mark.parametrize("stage", ["sealed", "drained", "fenced"])
def test_a_controller_that_is_restarted_in_a_barrier_names_the_right_backends_again(stage: str) -> None:
    """It knows of no barrier, asks the gates, and begins another epoch over everybody who is routed to."""

    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 3, controller=FENCING)).opened()
        first = fleet.controller

        async def again() -> FakeHandle:
            first.dead = True
            members = tuple(
                Member(e.name, g, s) for e, g, s in zip(fleet.engines, fleet.gates, fleet.servers, strict=True)
            )
            return await world.spawn(
                RolloutController, FENCING, ADMIN, members, fleet.gateway, fleet.prober, fleet.router, name="controller"
            )  # fmt: skip

        def cut(kind: str, fields: dict[str, Any]) -> None:
            if kind == "controller.stage" and fields["stage"] == stage:
                first.fail_next = [ActorDied("controller/0 died")]  # and so the next call of it, say

        if stage == "fenced":
            await first.prepare_pause()
            await first.fence((("e-2", "its update was refused"),))
            first.fail_next = [ActorDied("controller/0 died")]
        else:
            world.on_emit = cut
        assert isinstance(await raised(fleet.publisher.publish(1)), ActorDied)
        world.on_emit = lambda kind, fields: None
        second = await again()
        assert "there is no barrier" in str(await raised(second.targets()))
        await second.prepare_pause()
        fenced = ["e-2"] if stage == "fenced" else []  # which its gateway knows of
        named = [name for name in ("e-0", "e-1", "e-2") if name not in fenced]
        assert [address.name for address in await second.targets()] == named
        view = await second.barrier()
        assert view is not None and view.epoch == 3 and list(view.fenced) == fenced
        await fleet.publisher.publish(1)  # it finds the one that lives
        for engine, gate in zip(fleet.engines, await fleet.snapshots(), strict=True):
            assert (gate.epoch, gate.open) == (3, engine.name not in fenced)
            assert gate.model_step == (1 if gate.open else 0)

    run(body)


@pytest.mark.parametrize("when", ["updated", "installed", "continued"])
def test_a_gate_that_is_restarted_past_the_drain_makes_the_next_try_begin_another_epoch(when: str) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        for engine in fleet.engines:
            engine.version = "1"
        if when == "updated":
            await rebuilt(world, fleet)

        def cut(kind: str, fields: dict[str, Any]) -> None:
            if kind == "controller.stage" and fields["stage"] == when:
                fleet.gates[0].dead = True

        world.on_emit = cut
        assert isinstance(await raised(fleet.controller.resume_requests(1)), BarrierError)
        world.on_emit = lambda kind, fields: None
        if when != "updated":
            await rebuilt(world, fleet)
            assert isinstance(await raised(fleet.controller.resume_requests(1)), BarrierError)  # finds it
        view = await fleet.controller.barrier()
        assert view is not None and (view.stage, view.epoch) == ("sealing", 2)
        error = await raised(fleet.controller.resume_requests(1))
        assert isinstance(error, BarrierError) and "gate-0 was restarted in the barrier of epoch 2" in error.message
        await fleet.publisher.publish(1)
        assert all(s.open and s.model_step == 1 and s.epoch == 3 for s in await fleet.snapshots())

    run(body)


@pytest.mark.parametrize("stage", ["served", "installed"])
def test_a_topology_that_changes_during_the_resumption_opens_nothing_and_has_a_way_out(stage: str) -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        for engine in fleet.engines:
            engine.version = "1"
        changes: list[asyncio.Task[None]] = []

        def change(kind: str, fields: dict[str, Any]) -> None:
            if kind == "controller.stage" and fields["stage"] == stage and not changes:
                changes.append(asyncio.get_running_loop().create_task(again()))

        async def again() -> None:  # what answers at the address says the same as the one before
            old = fleet.engines[1]
            old.alive = False
            address = await world.engines.launch(old.spec, name=old.name)
            old.alive = True
            await fleet.gateway.add_replica(address)

        world.on_emit = change
        error = await raised(fleet.controller.resume_requests(1))
        assert isinstance(error, BarrierError) and "the topology changed in the barrier of epoch 2: e-1" in str(error)
        assert not any(s.open for s in await fleet.snapshots())
        view = await fleet.controller.barrier()
        assert view is not None and view.stage == "sealing"
        await fleet.publisher.publish(1)
        assert all(s.open and s.epoch == 3 for s in await fleet.snapshots())

    run(body)


def test_health_is_held_anew_by_each_call_on_a_barrier() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        prober, loop = fleet.prober.target, asyncio.get_running_loop()
        await fleet.controller.prepare_pause()

        async def held_for(call: Any, own_s: float) -> None:
            prober._held_until = 0.0  # as of one that was restarted
            await asyncio.gather(call(), return_exceptions=True)
            assert prober._held_until >= loop.time() + own_s

        await held_for(fleet.controller.targets, ADMIN.update_timeout_s)
        await held_for(lambda: fleet.controller.fence((("e-0", "x"), ("e-1", "y"))), 0)
        await held_for(lambda: fleet.controller.resume_requests(1, 700), 600)

    run(body)


def test_health_is_held_between_the_calls_on_a_barrier_for_as_long_as_it_exists() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        for _ in range(20):
            await asyncio.sleep(300)
            assert fleet.prober.target._held_until > asyncio.get_running_loop().time() + 200
        await fleet.controller.resume_requests(0)
        assert fleet.prober.target._held_until == 0.0
        await asyncio.sleep(1_000)
        assert fleet.prober.target._held_until == 0.0

    run(body)


def test_a_prober_that_does_not_answer_ends_a_call_only_where_the_hold_runs_out() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        fleet.prober.lose_next = 1
        assert len(await fleet.controller.targets()) == 2
        fleet.prober.lose_next = 1_000
        await asyncio.sleep(3_000)
        error = await raised(fleet.controller.targets())
        assert isinstance(error, BarrierError) and "health cannot be held" in error.message
        error = await raised(fleet.controller.resume_requests(0))
        assert isinstance(error, BarrierError) and "health cannot be held" in error.message
        assert not any(s.open for s in await fleet.snapshots())

    run(body)


def test_a_prober_that_is_dead_for_good_keeps_no_drained_gate_closed() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        await fleet.controller.prepare_pause()
        fleet.prober.dead = True
        await asyncio.sleep(3_000)  # until no hold would be left
        await fleet.controller.resume_requests(0)
        assert all(s.open for s in await fleet.snapshots())

    run(body)


@pytest.mark.parametrize(("arrives", "paused"), [(False, True), (True, False), (True, True)])
def test_a_late_hold_ends_only_itself(arrives: bool, paused: bool) -> None:
    """A hold of a barrier whose answer, or which itself, is under way until the barrier is over."""

    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 1)).opened()
        prober, controller, loop = fleet.prober.target, fleet.controller.target, asyncio.get_running_loop()
        await fleet.controller.prepare_pause()
        hold, late_s = prober.hold, [0.9]

        async def late(for_s: float) -> None:
            first = late_s.pop() if late_s else 0.0
            await asyncio.sleep(first if arrives else 0.0)
            await hold(for_s)
            await asyncio.sleep(0.0 if arrives else first)

        prober.hold = late
        holding = loop.create_task(controller._hold_on())
        await asyncio.sleep(0.01)
        await fleet.controller.resume_requests(0)
        if paused:
            await fleet.controller.pause_generation("abort")
        assert not holding.done()
        await holding
        assert (prober._held_until > loop.time()) is paused
        assert controller._held_until == 0.0  # of a barrier, and there is none
        if paused:
            await fleet.controller.continue_generation()
            assert prober._held_until == 0.0

    run(body)


def test_a_native_pause_and_a_barrier_do_not_begin_side_by_side() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await (await fleet_of(world, 2)).opened()
        before = fleet.posts("/pause_generation")
        for engine in fleet.engines:
            engine.duration_s = 5
        turn = fleet.begin("s", 0)
        await asyncio.sleep(1)
        prepared, paused, continued = await asyncio.gather(
            fleet.controller.prepare_pause(),
            fleet.controller.pause_generation("abort"),
            fleet.controller.continue_generation(),
            return_exceptions=True,
        )
        for refused in (paused, continued):
            assert isinstance(refused, BarrierError) and refused.outcome is Outcome.NOT_DONE
        assert not isinstance(prepared, BaseException)
        assert fleet.posts("/pause_generation") == [count + 1 for count in before]
        assert not any(server.target._aborting for server in fleet.servers)
        assert (await turn).result.finish_reason == "length"
        await fleet.controller.resume_requests(0)
        paused, prepared = await asyncio.gather(
            fleet.controller.pause_generation("abort"), fleet.controller.prepare_pause(), return_exceptions=True
        )
        assert isinstance(prepared, BarrierError) and not isinstance(paused, BaseException)
        assert await fleet.controller.barrier() is None

    run(body)
