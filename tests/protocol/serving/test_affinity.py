"""The affinity router: one backend a session, fail closed, 410, tombstones that are forgotten (serving.md 4)."""

from __future__ import annotations

import asyncio

from protocol.config import AffinityConfig
from protocol.errors import ActorDied, ConnectionLost, HttpError, Outcome, ReadTimeout
from protocol.serving.affinity import AffinitySnapshot
from tests.protocol.fake import FakeBackend, run
from tests.protocol.serving.world import Fleet, fleet_of, raised


def status(error: BaseException) -> int:
    assert isinstance(error, HttpError) and error.outcome is Outcome.NOT_DONE, error
    return int(error.fields["status"])


async def routed(world: FakeBackend, count: int = 3, affinity: AffinityConfig = AffinityConfig()) -> Fleet:  # noqa: B008
    return await (await fleet_of(world, count, affinity=affinity)).opened()


def test_a_session_stays_where_it_is_across_publications() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await routed(world)
        first = {s: (await fleet.turn(s)).result.engine for s in ("a", "b", "c", "d")}
        assert sorted(first.values()) == ["e-0", "e-0", "e-1", "e-2"]  # the fewest assigned, the first of equals
        for model_step in (1, 2):
            await fleet.publisher.publish(model_step)
            for session, engine in first.items():
                turn = await fleet.turn(session)
                assert (turn.result.engine, turn.model_step) == (engine, model_step)
        pairs = tuple((e.name, s) for e, s in zip(fleet.engines, fleet.servers, strict=True))
        await fleet.router.replace_backends(pairs[:2])
        for session in ("a", "b"):
            assert (await fleet.turn(session)).result.engine == first[session]
        assert status(await raised(fleet.turn("c"))) == 503  # its backend is gone
        await fleet.router.replace_backends(pairs)
        assert (await fleet.turn("c")).result.engine == first["c"]
        await fleet.router.retire_sessions(("a", "c"))
        counts = {one.name: one.assigned for one in (await fleet.router.snapshot()).backends}
        assert counts == {**dict.fromkeys(counts, 1), first["c"]: 0}  # a backend that was away has its bindings still

    run(body)


def test_an_unhealthy_backend_fails_closed_and_gets_no_new_session() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await routed(world, 2)
        await fleet.turn("a")
        await fleet.router.set_backend("e-0", False)
        assert status(await raised(fleet.turn("a"))) == 503
        assert {(await fleet.turn(s)).result.engine for s in ("b", "c")} == {"e-1"}
        await fleet.router.set_backend("e-0", True)
        assert (await fleet.turn("a")).result.engine == "e-0"
        await fleet.router.set_backend("e-0", False)
        await fleet.router.set_backend("e-1", False)
        assert status(await raised(fleet.turn("d"))) == 503
        await fleet.router.set_backend("e-9", True)  # of no backend

    run(body)


def test_capacity_counts_bindings_and_not_tombstones() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await routed(world, 2, AffinityConfig(max_sessions=2, max_tombstones=3))
        for number in range(20):
            await fleet.turn(f"s-{number}")
            await fleet.router.retire_sessions((f"s-{number}",))
        await fleet.turn("a")
        await fleet.turn("b")
        assert status(await raised(fleet.turn("c"))) == 503
        assert (await fleet.turn("a")).model_step == 0
        snapshot: AffinitySnapshot = await fleet.router.snapshot()
        assert (snapshot.bindings, snapshot.tombstones) == (2, 3)
        assert status(await raised(fleet.turn("s-19"))) == 410

    run(body)


def test_a_retired_session_is_gone_until_its_tombstone_is_forgotten() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await routed(world, 1, AffinityConfig(tombstone_ttl_s=100))
        await fleet.turn("a")
        await fleet.router.retire_sessions(("a", "never-seen"))
        sent = len(fleet.engines[0].generated)
        for _ in range(2):
            assert status(await raised(fleet.turn("a"))) == 410
            assert status(await raised(fleet.turn("never-seen"))) == 410
            await fleet.router.retire_sessions(("a",))  # which does not prolong it
            await asyncio.sleep(60)
        assert len(fleet.engines[0].generated) == sent
        assert (await fleet.turn("a")).model_step == 0
        assert world.of("affinity.retired", bound=1) and len(world.of("affinity.refused", status=410)) == 4

    run(body)


def test_a_request_without_a_session_is_refused() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await routed(world, 1)
        assert status(await raised(fleet.turn(""))) == 400

    run(body)


def test_nothing_is_replayed_and_counts_come_back() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await fleet_of(world, 2, affinity=AffinityConfig(forward_timeout_s=10))
        for server in fleet.servers:
            server.target._gate = None  # without gates, or the first failure would poison
        for error in (ConnectionLost("x"), ReadTimeout("x"), HttpError(status=500), HttpError(status=400)):
            fleet.engines[0].generate_script = [error]
            assert type(await raised(fleet.turn("a"))) is type(error)
        fleet.servers[0].fail_next = [ActorDied("x")]
        assert isinstance(await raised(fleet.turn("a")), ActorDied)
        fleet.servers[0].lose_next = 1
        assert isinstance(await raised(fleet.turn("a")), ReadTimeout)
        turn = asyncio.get_running_loop().create_task(fleet.turn("a"))
        await asyncio.sleep(0)
        turn.cancel()  # the client is gone
        await asyncio.gather(turn, return_exceptions=True)
        assert fleet.engines[1].generated == []
        snapshot: AffinitySnapshot = await fleet.router.snapshot()
        assert [(b.in_flight, b.assigned) for b in snapshot.backends] == [(0, 1), (0, 0)]
        await fleet.router.retire_sessions(("a",))
        assert [b.assigned for b in (await fleet.router.snapshot()).backends] == [0, 0]

    run(body)


def test_a_backend_that_fails_at_once_attracts_no_new_session() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await routed(world, 2, AffinityConfig(suspect_s=10))
        assert (await fleet.turn("a")).result.engine == "e-0"
        fleet.servers[0].fail_next = [ActorDied("x")]
        await raised(fleet.turn("a"))
        assert {(await fleet.turn(s)).result.engine for s in ("b", "c", "d")} == {"e-1"}
        assert (await fleet.turn("a")).result.engine == "e-0"  # a bound session stays
        await asyncio.sleep(11)
        assert (await fleet.turn("e")).result.engine == "e-0"

    run(body)


def test_it_follows_the_gateway() -> None:
    async def body(world: FakeBackend) -> None:
        from protocol.serving.affinity import SessionAffinityRouter

        fleet = await routed(world, 2)
        pairs = tuple((e.name, s) for e, s in zip(fleet.engines, fleet.servers, strict=True))
        router = await world.spawn(SessionAffinityRouter, AffinityConfig(), pairs, fleet.gateway, name="following")
        await fleet.gateway.set_routable(fleet.engines[0].address, False, "ill")
        await asyncio.sleep(1)
        assert [b.healthy for b in (await router.snapshot()).backends] == [False, True]
        fleet.gateway.lose_next = 1
        await asyncio.sleep(8)
        assert [b.healthy for b in (await router.snapshot()).backends] == [False, True]
        await fleet.gateway.set_routable(fleet.engines[0].address, True, "")
        await asyncio.sleep(1)
        assert [b.healthy for b in (await router.snapshot()).backends] == [True, True]
        assert await router.acquire("x") == "e-0"

    run(body)


def test_a_retirement_gives_up_the_turns_that_are_under_way_and_waits_until_none_can_be_sent() -> None:
    async def body(world: FakeBackend) -> None:
        fleet = await routed(world, 1)
        handle = fleet.servers[0]
        calls: list[asyncio.Task[object]] = []

        class Entry:
            """As a handle that can cancel: the calls are tasks, which one may await and cancel."""

            name, incarnation = "entry-0", 0

            def generate(self, request: object) -> asyncio.Task[object]:
                calls.append(asyncio.get_running_loop().create_task(handle.generate(request)))
                return calls[-1]

            def cancel(self, call: asyncio.Task[object]) -> None:
                asyncio.get_running_loop().call_later(1.0 if answers else 100.0, call.cancel)

        await fleet.router.replace_backends((("e-0", Entry()),))
        fleet.engines[0].duration_s = 20
        answers = True
        first = asyncio.get_running_loop().create_task(fleet.turn("a"))
        other = asyncio.get_running_loop().create_task(fleet.turn("b"))
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        await fleet.router.retire_sessions(("a",))
        assert asyncio.get_running_loop().time() - began == 1.0 and first.done() and not other.done()
        answers = False
        error = await raised(fleet.router.retire_sessions(("b",)))
        assert isinstance(error, ReadTimeout) and "may still be sent" in error.message
        assert status(await raised(fleet.turn("b"))) == 410  # but it is retired
        await asyncio.gather(first, other, return_exceptions=True)

    run(body)
