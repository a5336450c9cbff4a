"""The actor contract (DESIGN.md, "The central idea"; ``protocol/ports.py``): one body, a sim arm and a real arm."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pathlib
import threading
from typing import Any

import numpy as np
import pytest

from protocol import errors, ports
from protocol.errors import (
    ActorDied,
    CallCancelled,
    NameTaken,
    NoSuchActor,
    Outcome,
    PlacementError,
    RemoteError,
    SeatrialError,
    SpawnFailed,
    StorageNotFound,
)
from protocol.ports import ActorHandle, Backend, Limits
from tests.contract.components import (
    Background,
    Box,
    DiesInStart,
    FailsToConstruct,
    FailsToStart,
    HiddenMethod,
    Mortal,
    NeedsArgument,
    Raiser,
    Relay,
    Self,
    Source,
    Starts,
    StartsBadly,
    Surface,
    Turnstile,
    Worker,
)
from tests.contract.conftest import Arm

SOON_S = 0.05
"""Long enough for a call on Ray to have reached its callee and begun."""


async def until_dead(handle: ActorHandle, method: str, *args: Any) -> ActorDied:
    """Call until the death has been noticed; the error that tells of it."""
    while True:
        try:
            await getattr(handle, method)(*args)
        except ActorDied as error:
            return error
        await asyncio.sleep(0.01)


async def begun(worker: ActorHandle, n: int) -> None:
    """Wait until ``n`` pieces of work have begun."""
    while len((await worker.report())["begun"]) < n:
        await asyncio.sleep(0.01)


# ---- everything that crosses is copied ----


def test_arguments_are_copied_when_the_call_is_made(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        box = await backend.spawn(Box, name="box")
        mine = ["as sent"]
        call = box.put(mine)
        mine.append("changed after sending")
        await call
        assert await box.get() == ["as sent"]
        assert mine == ["as sent", "changed after sending"]

    world.run(body)


def test_callee_cannot_change_callers_objects(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        constructed_with = ["constructed"]
        box = await backend.spawn(Box, constructed_with, name="box")
        argument = ["argument"]
        assert await box.spoil(argument) == ["argument", "spoilt"]
        assert argument == ["argument"]
        assert constructed_with == ["constructed"]
        assert await box.get() == ["constructed", "spoilt"]

    world.run(body)


def test_results_are_copied(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        box = await backend.spawn(Box, ["kept"], name="box")
        first = await box.get()
        first.append("changed by the caller")
        assert await box.get() == ["kept"]

    world.run(body)


def test_exceptions_are_copied(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        box = await backend.spawn(Box, name="box")
        with pytest.raises(SeatrialError) as caught:
            await box.raise_kept()
        caught.value.fields["detail"].append("changed by the caller")
        assert await box.kept_detail() == ["original"]

    world.run(body)


@pytest.mark.parametrize("n", [3, 200_000], ids=["small", "large"])
def test_arrays_arrive_read_only(world: Arm, n: int) -> None:
    async def body(backend: Backend) -> None:
        mine = np.ones(n)
        box = await backend.spawn(Box, mine, name="box")
        assert not await box.content_is_writable()
        assert not await box.is_writable(mine)
        assert not (await box.zeros(n)).flags.writeable
        call = box.put({"nested": [mine]})
        mine[0] = 5.0  # still the sender's own, and too late to be seen
        await call
        arrived = (await box.get())["nested"][0]
        assert arrived[0] == 1.0
        assert not arrived.flags.writeable

    world.run(body)


def test_argument_that_cannot_be_serialised_raises_at_the_call(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        box = await backend.spawn(Box, "before", name="box")
        with pytest.raises(TypeError, match="pickle"):
            box.put(threading.Lock())  # not awaited: it raises where it is written
        assert await box.get() == "before"

    world.run(body)


def test_result_that_cannot_be_serialised_is_a_remote_error(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        box = await backend.spawn(Box, name="box")
        with pytest.raises(RemoteError, match="pickle") as caught:
            await box.unserialisable()
        assert caught.value.type == "TypeError"
        assert await box.get() is None  # the actor goes on

    world.run(body)


def test_handles_travel_in_constructors_messages_and_results(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        box = await backend.spawn(Box, "content", name="box")
        relay = await backend.spawn(Relay, box, name="relay")
        assert await relay.call("get") == "content"
        other = await backend.spawn(Box, "other content", name="other")
        await relay.aim({"target": other})
        assert await relay.call("get") == "other content"
        returned = await relay.aimed_at()
        assert returned == other and returned != box and hash(returned) == hash(other)
        assert (returned.name, returned.incarnation) == ("other", 1)
        assert await returned.get() == "other content"
        assert isinstance(returned, ActorHandle)
        myself = await relay.myself()
        assert myself == relay
        assert await myself.call("get") == "other content"

    world.run(body)


# ---- order ----


def test_ordered_view_starts_calls_in_the_order_made(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        view = worker.ordered()
        calls = [view.note(i) for i in range(300)]
        assert await asyncio.gather(*calls) == list(range(300))
        assert (await worker.report())["begun"] == list(range(300))

    world.run(body)


def test_unordered_calls_all_start_in_whatever_order(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        calls = [worker.note(i) for i in range(300)]
        assert await asyncio.gather(*calls) == list(range(300))
        assert sorted((await worker.report())["begun"]) == list(range(300))

    world.run(body)


def test_order_is_of_starts_not_of_ends(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        view = worker.ordered()
        slow, fast = view.work("slow", 0.3), view.work("fast", 0.0)
        await asyncio.gather(slow, fast)
        report = await worker.report()
        assert report["begun"] == ["slow", "fast"]
        assert report["finished"] == ["fast", "slow"]

    world.run(body)


def test_ordered_view_holds_control_calls_behind_a_data_call_that_waits(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker", limits=Limits(data_calls=1))
        occupying = worker.bounded_work("occupying", 0.4)
        await begun(worker, 1)
        view = worker.ordered()
        calls = [view.bounded_work("data", 0.0), view.note("control")]
        await worker.note("of no view")
        await asyncio.gather(occupying, *calls)
        assert (await worker.report())["begun"] == ["occupying", "of no view", "data", "control"]

    world.run(body)


def test_cancelled_call_does_not_hold_up_its_ordered_view(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker", limits=Limits(data_calls=1))
        worker.bounded_work("occupying", 3600)
        await begun(worker, 1)
        view = worker.ordered()
        first, second, third = view.bounded_work("first", 0.0), view.note("second"), view.note("third")
        for call in (second, first):
            worker.cancel(call)
            with pytest.raises(CallCancelled):
                await call
        assert await third == "third"
        assert (await worker.report())["begun"] == ["occupying", "third"]

    world.run(body)


def test_cancel_that_overtakes_its_call_does_not_hold_up_the_ordered_view(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        view = worker.ordered()
        for i in range(10):
            first, second = view.work("cancelled", 3600), view.note(i)
            view.cancel(first)
            with pytest.raises(CallCancelled):
                await first
            assert await second == i

    world.run(body)


# ---- abandoned and cancelled calls ----


def test_timing_out_a_wait_does_not_cancel_the_callee(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        call = worker.work("a", 0.3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await call
        assert await call == "a"  # the outcome is kept for whoever asks again
        assert await call == "a"
        report = await worker.report()
        assert report["finished"] == ["a"] and report["cancelled"] == []

    world.run(body)


def test_cancelling_a_waiting_task_does_not_cancel_the_callee(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")

        async def wait() -> None:
            await worker.work("a", 0.2)

        task = asyncio.create_task(wait())
        await begun(worker, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        report = await worker.report()
        assert report["finished"] == ["a"] and report["cancelled"] == []

    world.run(body)


def test_call_is_sent_when_made_not_when_awaited(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        worker.work("never awaited", 0.0)
        await begun(worker, 1)

    world.run(body)


def test_explicit_cancel_reaches_the_callee(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        call = worker.work("a", 3600)
        await begun(worker, 1)
        worker.cancel(call)
        with pytest.raises(CallCancelled) as caught:
            await call
        assert caught.value.outcome is Outcome.UNKNOWN
        report = await worker.report()
        assert report["cancelled"] == ["a"] and report["finished"] == []

    world.run(body)


def test_cancel_stops_at_the_callee(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        relay = await backend.spawn(Relay, worker, name="relay")
        call = relay.call("work", "a", 0.3)
        await begun(worker, 1)
        relay.cancel(call)
        with pytest.raises(CallCancelled):
            await call
        await asyncio.sleep(0.4)
        report = await worker.report()
        assert report["finished"] == ["a"] and report["cancelled"] == []

    world.run(body)


def test_cancel_at_once_and_cancel_too_late(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        at_once = worker.work("at once", 3600)
        worker.cancel(at_once)  # may overtake the call itself
        with pytest.raises(CallCancelled):
            await at_once
        answered = worker.work("answered", 0.0)
        assert await answered == "answered"
        worker.cancel(answered)
        await worker.ping()
        assert await answered == "answered"

    world.run(body)


def test_callee_may_refuse_a_cancel(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        call = worker.work_on_regardless(3600)
        await asyncio.sleep(SOON_S)
        await worker.ping()
        worker.cancel(call)
        assert await call in ("finished all the same",)

    world.run(body)


def test_cancel_of_a_queued_data_call_leaks_no_slot(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker", limits=Limits(data_calls=1))
        running = worker.bounded_work("running", 0.4)
        await begun(worker, 1)
        queued = worker.bounded_work("queued", 0.0)
        worker.cancel(queued)
        with pytest.raises(CallCancelled):
            await queued
        assert await running == "running"
        assert await worker.bounded_work("next", 0.0) == "next"
        assert (await worker.report())["begun"] == ["running", "next"]

    world.run(body)


def test_callee_that_raises_cancelled_error_is_a_cancelled_call(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        with pytest.raises(CallCancelled) as caught:
            await worker.cancel_itself()
        assert caught.value.outcome is Outcome.UNKNOWN
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0  # the caller itself was not cancelled
        assert await worker.ping() == "pong"

    world.run(body)


# ---- death, incarnations, names ----


def test_kill_with_calls_answered_running_and_queued(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker", limits=Limits(data_calls=1))
        answered = worker.work("answered", 0.0)
        running = worker.bounded_work("running", 3600)
        await begun(worker, 2)
        queued = [worker.bounded_work(i, 0.0) for i in range(20)]
        await worker.ping()
        await asyncio.sleep(SOON_S)
        await backend.kill(worker)
        assert await answered == "answered"
        for call in (running, *queued):
            with pytest.raises(ActorDied) as caught:
                await call
            assert caught.value.outcome is Outcome.UNKNOWN

    world.run(body)


def test_kill_runs_no_finally(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        mortal = await backend.spawn(Mortal, name="mortal")
        call = mortal.linger()
        while await backend.storage.list("") != ("began",):
            await asyncio.sleep(0.01)
        await backend.kill(mortal)
        with pytest.raises(ActorDied):
            await call
        await asyncio.sleep(0.1)
        assert await backend.storage.list("") == ("began",)

    world.run(body)


def test_kill_of_the_dead_is_silent(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        await backend.kill(worker)
        await backend.kill(worker)
        await until_dead(worker, "ping")
        await backend.kill(worker)
        successor = await backend.spawn(Worker, name="worker")
        await backend.kill(worker)  # the old incarnation, not its successor
        assert await successor.ping() == "pong"

    world.run(body)


def test_old_handle_is_dead_for_ever(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        old = await backend.spawn(Worker, name="worker")
        relay = await backend.spawn(Relay, old, name="relay")
        new = await backend.restart(old)
        assert (new.name, new.incarnation) == ("worker", 2)
        assert new != old
        await until_dead(old, "ping")
        for _ in range(3):
            with pytest.raises(ActorDied) as caught:
                await old.ping()
            assert caught.value.outcome is Outcome.NOT_DONE  # seen dead before: nothing was sent
        with pytest.raises(ActorDied):
            await relay.call("ping")  # and in every other process
        assert await new.ping() == "pong"
        assert await backend.lookup("worker") == new

    world.run(body)


def test_restart_constructs_again_from_the_same_serialised_arguments(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        argument = ["as serialised"]
        box = await backend.spawn(Box, argument, name="box")
        argument.append("changed by the spawner")
        await box.spoil([])
        assert await box.get() == ["as serialised", "spoilt"]
        box = await backend.restart(box)
        assert await box.get() == ["as serialised"]
        await box.put("state")
        box = await backend.restart(box)
        assert await box.get() == ["as serialised"]
        assert box.incarnation == 3

    world.run(body)


def test_restart_kills_a_living_incarnation(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        old = await backend.spawn(Worker, name="worker")
        call = old.work("a", 3600)
        await begun(old, 1)
        new = await backend.restart(old)
        with pytest.raises(ActorDied):
            await call
        assert (await new.report())["begun"] == []

    world.run(body)


def test_restart_by_an_old_handle_does_not_touch_the_living(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        old = await backend.spawn(Worker, name="worker")
        new = await backend.restart(old)
        with pytest.raises(NameTaken) as caught:
            await backend.restart(old)
        assert caught.value.outcome is Outcome.NOT_DONE
        assert await new.ping() == "pong"

    world.run(body)


def test_names(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        with pytest.raises(NoSuchActor) as absent:
            await backend.lookup("worker")
        assert absent.value.outcome is Outcome.NOT_DONE
        first = await backend.spawn(Worker, name="worker")
        assert first.incarnation == 1
        assert await backend.lookup("worker") == first
        with pytest.raises(NameTaken) as taken:
            await backend.spawn(Box, name="worker")
        assert taken.value.outcome is Outcome.NOT_DONE
        await backend.kill(first)
        with pytest.raises(NoSuchActor):
            await backend.lookup("worker")
        second = await backend.spawn(Box, "another class", name="worker")
        assert second.incarnation == 2
        found = await backend.lookup("worker")
        assert found == second and await found.get() == "another class"

    world.run(body)


def test_of_two_spawns_of_one_name_one_wins(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        outcomes = await asyncio.gather(
            *(backend.spawn(Worker, name="worker") for _ in range(3)), return_exceptions=True
        )
        losers = [outcome for outcome in outcomes if isinstance(outcome, NameTaken)]
        winners = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert (len(winners), len(losers)) == (1, 2), outcomes
        assert await winners[0].ping() == "pong"

    world.run(body)


def test_an_actor_outlives_its_spawner(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        parent = await backend.spawn(Relay, name="parent")
        child = await parent.spawn(Worker, "child")
        await backend.kill(parent)
        await until_dead(parent, "myself")
        await asyncio.sleep(0.2)
        assert await child.ping() == "pong"
        assert await backend.lookup("child") == child

    world.run(body)


# ---- errors cross whole ----

EXTRA: dict[str, dict[str, Any]] = {
    "HttpError": {"status": 503, "body": "overloaded"},
    "RemoteError": {"type": "x.Y", "traceback": "lines"},
}


def error_classes() -> list[type[SeatrialError]]:
    members = [member for _, member in inspect.getmembers(errors, inspect.isclass)]
    return [member for member in members if issubclass(member, SeatrialError)]


def test_every_error_class_arrives_as_itself(world: Arm) -> None:
    classes = error_classes()
    assert len(classes) >= 18

    async def body(backend: Backend) -> None:
        raiser = await backend.spawn(Raiser, name="raiser")
        relay = await backend.spawn(Relay, raiser, name="relay")
        for cls in classes:
            for outcome in (None, Outcome.DONE):
                fields = {"replica": "r-1", "shards": [1, 2], **EXTRA.get(cls.__name__, {})}
                for call in (
                    raiser.raise_class(cls, outcome, fields),
                    relay.call("raise_class", cls, outcome, fields),  # two hops
                ):
                    with pytest.raises(SeatrialError) as caught:
                        await call
                    error = caught.value
                    expected = cls("the message", outcome=outcome, **fields)
                    assert type(error) is cls
                    assert error.message == "the message"
                    assert error.outcome is expected.outcome
                    assert error.fields == expected.fields
                    assert error.__notes__ == ["first note", "second note"]
                    ours, foreign = error.attached
                    assert type(ours) is StorageNotFound
                    assert (ours.path, ours.outcome) == ("v7/shard-0", Outcome.NOT_DONE)
                    assert type(foreign) is RemoteError
                    assert foreign.type == "ValueError"

    world.run(body)


def test_an_error_object_can_be_an_argument(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        raiser = await backend.spawn(Raiser, name="raiser")
        with pytest.raises(StorageNotFound) as caught:
            await raiser.raise_this(StorageNotFound("gone", path="a/b"))
        assert caught.value.path == "a/b"

    world.run(body)


def test_foreign_exceptions_arrive_as_remote_errors(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        raiser = await backend.spawn(Raiser, name="raiser")
        with pytest.raises(RemoteError) as caught:
            await raiser.raise_foreign()
        error = caught.value
        assert error.type == f"{NeedsArgument.__module__}.NeedsArgument"
        assert "crowded (7)" in error.message
        assert "raise_foreign" in error.traceback and "Traceback" in error.traceback
        assert error.outcome is Outcome.UNKNOWN
        assert error.__notes__ == ["a note"]

        with pytest.raises(RemoteError) as caught:
            await raiser.raise_caused()
        assert caught.value.type == "OSError"
        assert "KeyError: 'inner'" in caught.value.traceback

        with pytest.raises(RemoteError) as caught:
            await raiser.raise_group()
        assert caught.value.type == "ExceptionGroup"
        assert "TypeError: two" in caught.value.traceback

        with pytest.raises(RemoteError) as caught:
            await raiser.raise_foreign("one argument too many")
        assert caught.value.type == "TypeError"

    world.run(body)


# ---- limits, one loop ----


def test_control_calls_pass_2000_waiting_data_calls_and_wake_them(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        turnstile = await backend.spawn(Turnstile, name="turnstile", limits=Limits(data_calls=10))
        calls = [turnstile.enter() for _ in range(2000)]
        while (await turnstile.occupancy())[0] < 10:
            await asyncio.sleep(0.01)
        await turnstile.release()
        assert sum(await asyncio.gather(*calls)) == 2000
        assert await turnstile.occupancy() == (0, 10)

    world.run(body)


def test_data_calls_are_unbounded_unless_limited(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        turnstile = await backend.spawn(Turnstile, name="turnstile")
        calls = [turnstile.enter() for _ in range(1200)]  # beyond Ray's own default of 1000
        while (await turnstile.occupancy())[0] < 1200:
            await asyncio.sleep(0.01)
        await turnstile.release()
        assert sum(await asyncio.gather(*calls)) == 1200

    world.run(body)


def test_limit_is_of_data_calls_alone(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker", limits=Limits(data_calls=2))
        data = [worker.bounded_work(i, 0.1) for i in range(6)]
        control = [worker.work(f"control-{i}", 0.1) for i in range(6)]
        await asyncio.gather(*data, *control)
        assert await worker.peak() == 2

    world.run(body)


def test_one_loop_and_one_thread(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        waiting = [worker.wait_for_door() for _ in range(3)]
        await asyncio.sleep(SOON_S)
        await worker.open_door()  # an Event of one call wakes others
        assert await asyncio.gather(*waiting) == ["through"] * 3
        counts = await asyncio.gather(*(worker.count_up() for _ in range(500)))
        assert sorted(counts) == list(range(1, 501))  # no update is lost

    world.run(body)


def test_blocking_holds_the_whole_actor(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        loop = asyncio.get_running_loop()
        worker = await backend.spawn(Worker, name="worker")
        began = loop.time()
        blocked = worker.ordered().block(0.5)
        await asyncio.sleep(0.1)
        await worker.ping()
        assert loop.time() - began >= 0.45
        await blocked

    world.run(body)


# ---- async generators ----


def test_generator_items_come_one_by_one(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        source = await backend.spawn(Source, name="source")
        assert [i async for i in source.count(5)] == [0, 1, 2, 3, 4]
        assert [i async for i in source.count(0)] == []
        items = source.two_steps()
        assert await anext(items) == "first"  # while the generator waits for the door
        await source.open_door()
        assert await anext(items) == "second"
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(items)

    world.run(body)


def test_giving_up_a_wait_for_an_item_loses_none(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        source = await backend.spawn(Source, name="source")
        items = source.two_steps()
        assert await anext(items) == "first"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(items)
        await source.open_door()
        assert [item async for item in items] == ["second"]

    world.run(body)


def test_early_close_runs_the_generators_finally(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        source = await backend.spawn(Source, name="source")
        async with contextlib.aclosing(source.endless("closed")) as items:
            async for i in items:
                if i == 3:
                    break
        async with asyncio.timeout(10):
            while await source.closed_generators() != ["closed"]:
                await asyncio.sleep(0.01)
        with pytest.raises(StopAsyncIteration):
            await anext(items)
        await items.aclose()  # again, silently

    world.run(body)


def test_cancelled_generator_ends_with_call_cancelled(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        source = await backend.spawn(Source, name="source")
        items = source.endless("cancelled")
        assert await anext(items) == 0
        source.cancel(items)
        with pytest.raises(CallCancelled):
            async for _ in items:
                pass
        assert await source.closed_generators() == ["cancelled"]

    world.run(body)


def test_cancel_takes_calls_alone(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        task = asyncio.create_task(asyncio.sleep(0))
        with pytest.raises(TypeError, match="Task"):
            worker.cancel(task)
        await task

    world.run(body)


def test_error_in_the_middle_of_a_generator(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        source = await backend.spawn(Source, name="source")
        for error, expected in (
            (StorageNotFound("gone", path="a"), StorageNotFound),
            (ValueError("foreign"), RemoteError),
            (asyncio.CancelledError(), CallCancelled),
        ):
            got = []
            with pytest.raises(expected):
                async for i in source.fails_after(2, error):
                    got.append(i)
            assert got == [0, 1]

    world.run(body)


BARE = ("BaseException", "Bare", "GeneratorExit", "BaseExceptionGroup")


def test_what_is_no_exception_is_an_answer_all_the_same_and_gives_its_slot_back(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        raiser = await backend.spawn(Raiser, name="raiser", limits=Limits(data_calls=1))
        for kind in BARE:
            with pytest.raises(RemoteError, match="bare") as caught:
                async with asyncio.timeout(10):
                    await raiser.bare(kind)
            assert caught.value.type.rpartition(".")[2] == kind and caught.value.outcome is Outcome.UNKNOWN
            got = []
            with pytest.raises(RemoteError, match="bare"):
                async with asyncio.timeout(10):
                    async for i in raiser.bare_after(2, kind):
                        got.append(i)
            assert got == [0, 1]

    world.run(body)


def test_what_is_no_exception_fails_a_start_all_the_same(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        for kind in ("BaseException", "BaseExceptionGroup", "CancelledError"):
            for in_constructor in (False, True):
                with pytest.raises(SpawnFailed, match=f"StartsBadly.* did not start: .*{kind}") as caught:
                    async with asyncio.timeout(20):
                        await backend.spawn(StartsBadly, kind, in_constructor=in_constructor, name="bad")
                assert str(caught.value).count("[outcome") == 1
        await backend.spawn(Raiser, name="bad")

    world.run(body)


def test_death_in_the_middle_of_a_generator(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        source = await backend.spawn(Source, name="source")
        got = []
        items = source.dies_after(2)
        with pytest.raises(ActorDied) as caught:
            async for i in items:
                got.append(i)
        assert caught.value.outcome is Outcome.UNKNOWN
        assert got == [0, 1]
        with pytest.raises(ActorDied):
            await anext(source.count(1))

    world.run(body)


def test_generator_holds_its_data_slot_to_its_end(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        source = await backend.spawn(Source, name="source", limits=Limits(data_calls=1))
        items = source.bounded()
        assert await anext(items) == 0
        waiting = source.bounded_call()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await waiting
        await source.open_door()
        assert [i async for i in items] == [1]
        assert await waiting == "had a slot"

    world.run(body)


# ---- remote methods ----


@pytest.mark.parametrize("member", ["unknown", "_private", "synchronous", "computed", "attribute", "__call__"])
def test_what_is_no_remote_method_raises_attribute_error_at_the_handle(world: Arm, member: str) -> None:
    async def body(backend: Backend) -> None:
        surface = await backend.spawn(Surface, name="surface")
        relay = await backend.spawn(Relay, surface, name="relay")
        for handle in (surface, surface.ordered(), await backend.lookup("surface"), await relay.aimed_at()):
            with pytest.raises(AttributeError, match=member) as caught:
                getattr(handle, member)
            assert member.startswith("_") or str(caught.value).endswith(f" of surface/{surface.incarnation}")
        assert await relay.look_up("surface", member) == "AttributeError"
        assert await surface.remote() == "remote"

    world.run(body)


def test_method_that_a_handle_would_hide_is_refused(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        with pytest.raises(TypeError, match=r"HiddenMethod\.cancel"):
            await backend.spawn(HiddenMethod, name="hidden")

    world.run(body)


# ---- start and failure ----


def test_failing_constructor(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        with pytest.raises(SpawnFailed) as caught:
            await backend.spawn(FailsToConstruct, name="x")
        (reason,) = caught.value.attached
        assert isinstance(reason, RemoteError) and reason.type == "ValueError"
        assert "no such colour" in reason.message and "FailsToConstruct" in str(caught.value)
        with pytest.raises(NoSuchActor):
            await backend.lookup("x")
        assert await (await backend.spawn(Worker, name="x")).ping() == "pong"  # the name is free

    world.run(body)


def test_wrong_constructor_arguments(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        with pytest.raises(SpawnFailed) as caught:
            await backend.spawn(Box, "one", "too many", name="x")
        (reason,) = caught.value.attached
        assert isinstance(reason, RemoteError) and reason.type == "TypeError"

    world.run(body)


def test_failing_start(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        with pytest.raises(SpawnFailed) as caught:
            await backend.spawn(FailsToStart, name="x")
        (reason,) = caught.value.attached
        assert type(reason) is StorageNotFound and reason.path == "v7/manifest"
        with pytest.raises(NoSuchActor):
            await backend.lookup("x")

    world.run(body)


def test_death_in_start(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        with pytest.raises(SpawnFailed) as caught:
            await backend.spawn(DiesInStart, name="x")
        (reason,) = caught.value.attached
        assert type(reason) is ActorDied
        with pytest.raises(NoSuchActor):
            await backend.lookup("x")

    world.run(body)


def test_calls_are_served_during_start_and_spawn_waits_for_it(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        relay = await backend.spawn(Relay, name="relay")
        starter = await backend.spawn(Starts, relay, name="starter")
        assert await starter.progress() == ["constructed", "started"]

    world.run(body)


def test_failed_background_task_is_the_actors_crash(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        actor = await backend.spawn(Background, name="x")
        await actor.begin_failing()
        with pytest.raises(ActorDied) as caught:
            await actor.wait(3600)
        assert caught.value.outcome is Outcome.UNKNOWN
        with pytest.raises(NoSuchActor):
            await backend.lookup("x")
        assert (await backend.spawn(Background, name="x")).incarnation == 2

    world.run(body)


def test_failed_periodic_task_is_the_actors_crash(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        actor = await backend.spawn(Background, name="x")
        await actor.begin_ticking(0.05, failing=True)
        with pytest.raises(ActorDied):
            await actor.wait(3600)

    world.run(body)


def test_periodic_task_runs_from_one_interval_on_until_it_is_cancelled(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        actor = await backend.spawn(Background, name="x")
        began = await actor.begin_ticking(0.1)
        await asyncio.sleep(0.55)
        await actor.stop()
        ticks = await actor.tick_times()
        assert 2 <= len(ticks) <= 5
        assert ticks[0] - began >= 0.099
        await asyncio.sleep(0.25)
        assert await actor.tick_times() == ticks  # stopped, and no crash

    world.run(body)


def test_nothing_after_an_actors_own_death_has_an_effect(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        mortal = await backend.spawn(Mortal, name="mortal")
        with pytest.raises(ActorDied) as caught:
            await mortal.die()
        assert caught.value.outcome is Outcome.UNKNOWN
        await asyncio.sleep(0.1)
        assert await backend.storage.list("") == ("before",)

    world.run(body)


# ---- SIGSTOP ----


def test_stopped_actor_is_silent_and_answers_when_continued(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        running = worker.work("running", 0.1)
        await begun(worker, 1)
        await backend.signal(worker, "SIGSTOP")
        sent_to_stopped = [worker.note(i) for i in range(5)]
        for call in (running, *sent_to_stopped):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await call
        assert await backend.lookup("worker") == worker  # stopped is not dead
        await backend.signal(worker, "SIGCONT")
        assert await running == "running"
        assert await asyncio.gather(*sent_to_stopped) == list(range(5))

    world.run(body)


def test_stopped_actor_can_be_killed_and_restarted(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        await backend.signal(worker, "SIGSTOP")
        call = worker.ping()
        new = await backend.restart(worker)
        with pytest.raises(ActorDied):
            await call
        assert await new.ping() == "pong"
        await backend.signal(worker, "SIGCONT")  # of the dead: silent
        await backend.signal(new, "SIGKILL")
        await until_dead(new, "ping")

    world.run(body)


# ---- a user's own class, ids, clocks, evidence ----

OUTSIDE = '''
import asyncio
import dataclasses


@dataclasses.dataclass
class Ticket:
    number: int
    holders: list


class TicketOffice:
    """Knows nothing of this package."""

    def __init__(self, first):
        self._next = first
        self._lock = asyncio.Lock()

    async def draw(self, holder):
        async with self._lock:
            number = self._next
            await asyncio.sleep(0.001)
            self._next = number + 1
        return Ticket(number, [holder])

    async def holders(self, ticket):
        return ticket.holders
'''


def test_class_from_outside_the_package_runs_unmodified(
    world: Arm, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    module = f"outside_{world.name}"
    (folder / f"{module}.py").write_text(OUTSIDE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    outside = __import__(module)

    async def body(backend: Backend) -> None:
        office = await backend.spawn(outside.TicketOffice, 10, name="office")
        tickets = await asyncio.gather(*(office.draw(f"holder-{i}") for i in range(5)))
        assert sorted(ticket.number for ticket in tickets) == [10, 11, 12, 13, 14]
        assert type(tickets[0]) is outside.Ticket
        assert await office.holders(tickets[3]) == ["holder-3"]

    world.run(body)


def test_deadlines_cross_as_durations(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        worker = await backend.spawn(Worker, name="worker")
        assert 0.199 <= await worker.wait_at_most(0.2) < 2.0  # a float clock may lose the last bits
        assert await worker.wait_at_most(-1.0) < 0.2  # already over

    world.run(body)


def test_a_process_knows_itself_and_its_node(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        nodes = await backend.nodes()
        assert len(nodes) == 1 and backend.node == nodes[0]
        assert (backend.me.name, backend.me.incarnation) == ("driver", 0)
        actor = await backend.spawn(Self, name="a", node=nodes[0])
        assert await actor.who() == ("a", 1, nodes[0])
        actor = await backend.restart(actor)
        assert await actor.who() == ("a", 2, nodes[0])
        with pytest.raises(PlacementError) as caught:
            await backend.spawn(Self, name="b", node="no such node")
        assert caught.value.outcome is Outcome.NOT_DONE
        assert (await backend.spawn(Self, name="b")).name == "b"  # the name is free again

    world.run(body)


def test_new_ids_are_unique_in_the_run_and_none_extends_another(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        actors = [await backend.spawn(Self, name=f"a-{i}") for i in range(2)]
        actors.append(await backend.restart(actors[0]))
        ids = [backend.new_id("req") for _ in range(200)]
        ids += await actors[1].ids(200)
        ids += await actors[2].ids(200)
        assert len(set(ids)) == 600
        assert {len(one) for one in ids} == {len(ids[0])}
        assert all(one.startswith("req") for one in ids)

    world.run(body)


def test_wall_time_is_seconds_since_the_epoch(world: Arm) -> None:
    async def body(backend: Backend) -> None:
        actor = await backend.spawn(Self, name="a")
        before = backend.wall_time()
        theirs = await actor.wall_time()
        after = backend.wall_time()
        assert 1.6e9 < before <= theirs <= after

    world.run(body)


def test_undeclared_evidence_is_refused_where_it_is_emitted(world: Arm) -> None:
    fields = {"replica": "r", "replica_inc": 1}

    async def body(backend: Backend) -> None:
        actor = await backend.spawn(Self, name="a")
        assert await actor.emit("gateway.routable", fields) == "recorded"
        assert await actor.emit("gateway.routible", fields) == "UndeclaredEvent"
        # A component may not pass a claim off as an observation of the world.
        assert await actor.emit("engine.resumed", {}) == "UndeclaredEvent"
        assert await actor.emit("gateway.routable", {"replica": "r"}) == "UndeclaredEvent"
        assert await actor.emit("gateway.routable", {**fields, "extra": 1}) == "UndeclaredEvent"
        assert await actor.emit("gateway.routable", {**fields, "replica_inc": "one"}) == "UndeclaredEvent"

    world.run(body)


def test_there_is_no_backend_outside_of_a_run(world: Arm) -> None:
    async def body(backend: Backend) -> bool:
        return ports.backend() is backend

    async def outside() -> None:
        ports.backend()

    assert world.run(body)
    with pytest.raises(RuntimeError, match="outside of an actor"):
        asyncio.run(outside())
