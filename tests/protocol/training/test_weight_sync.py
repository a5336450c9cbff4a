"""Weights by training ranks: buckets, binding, order, failures of engines and of ranks (serving.md 9)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from protocol.config import AdminConfig, WeightSyncConfig
from protocol.errors import BarrierError, ConnectionRefused, ConnectTimeout, HttpError, Outcome
from protocol.messages import EngineAddress
from protocol.ports import EngineSpec
from protocol.training.buckets import Shard, plan, share, whole
from protocol.training.ranks import TrainingRank
from protocol.training.rendezvous import Rendezvous
from protocol.training.transports import INIT_GROUP, Binding, Failure, Target
from protocol.training.weight_sync import RELEASE, RESUME, WeightSync
from tests.protocol.fake import FakeBackend, FakeEngine, FakeHandle, FakeTrainer, run
from tests.protocol.serving.world import raised

ADMIN = AdminConfig(connect_attempts=2, connect_backoff_s=0.1)
UPDATE = {
    "ipc": "/update_weights_from_tensor",
    "nccl": "/update_weights_from_distributed",
    "checkpoint_engine": "/update_weights_from_ipc",
}
EVERY = tuple(UPDATE)


@dataclasses.dataclass
class Training:
    world: FakeBackend
    engines: list[FakeEngine]
    ranks: list[FakeHandle]
    sync: WeightSync

    @property
    def addresses(self) -> list[EngineAddress]:
        return [engine.address for engine in self.engines]

    def stages(self) -> list[str]:
        return [data["stage"] for data in self.world.of("weights.stage")]

    def got(self, engine: FakeEngine, transport: str) -> tuple[dict[str, bytes], list[str | None]]:
        """The shards that an engine has been sent, and the label of each bucket."""
        shards: dict[str, dict[int, bytes]] = {}
        labels = []
        for route, body in engine.posts:
            if route == UPDATE[transport]:
                labels.append(body["weight_version"])
                for piece in body["pieces"]:
                    shards.setdefault(piece.shard, {})[piece.index] = piece.data
        return {name: b"".join(found[n] for n in sorted(found)) for name, found in shards.items()}, labels


async def training(world: FakeBackend, transport: str, *, engines: int = 3, ranks: int = 2, **config: Any) -> Training:
    """FakeTrainer has two shards of 1,000 nominal bytes; buckets are of 400, so there are six."""
    given = WeightSyncConfig(transport=transport, ranks=ranks, bucket_gb=400e-9, **config)  # type: ignore[arg-type]  # keys by name
    meeting = await world.spawn(Rendezvous, name="rendezvous")
    handles = [
        await world.spawn(TrainingRank, given, ADMIN, number, FakeTrainer(), meeting, name=f"rank-{number}")
        for number in range(ranks)
    ]
    for index in range(engines):
        await world.engines.launch(EngineSpec("fake"), name=f"e-{index}")
    return Training(world, list(world.engines.every), handles, WeightSync(given, ADMIN, tuple(handles), meeting))


@pytest.mark.parametrize(
    ("sizes", "bucket"), [([(10, 1000), (7, 1000)], 400), ([(3, 5)], 100), ([(64, 9), (1, 90), (5, 1)], 10)]
)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_buckets_hold_every_byte_once(sizes: list[tuple[int, int]], bucket: int, ranks: int) -> None:
    data = {f"s{n}": bytes((n * 7 + i) % 251 for i in range(size)) for n, (size, _) in enumerate(sizes)}
    buckets = plan([Shard(f"s{n}", size, nominal) for n, (size, nominal) in enumerate(sizes)], bucket)
    found: dict[str, bytes] = dict.fromkeys(data, b"")
    for pieces in buckets:
        assert sum(piece.nominal for piece in pieces) <= bucket
        shares = [[share(data[piece.shard], piece, rank, ranks) for piece in pieces] for rank in range(ranks)]
        for piece in whole(pieces, shares):
            found[piece.shard] += piece.data
    assert found == data
    assert sum(piece.nominal for pieces in buckets for piece in pieces) == sum(nominal for _, nominal in sizes)


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize(("engines", "ranks"), [(1, 1), (3, 2), (2, 4)])
def test_every_engine_gets_the_trainers_bytes_and_the_label_last(transport: str, engines: int, ranks: int) -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, transport, engines=engines, ranks=ranks)
        assert await made.sync.update("7", made.addresses) == ()
        trainers = {name: data for name, data, _ in await FakeTrainer().shards("7")}
        for engine in made.engines:
            shards, labels = made.got(engine, transport)
            assert shards == trainers
            assert labels[-1] == "7" and not any(labels[:-1])

    run(body)


@pytest.mark.parametrize(
    ("transport", "stages"),
    [
        ("ipc", ["released", "taken", "bound", "weights_back", "updated", "offloaded", "kv_back"]),
        (
            "checkpoint_engine",
            ["released", "taken", "bound", "registered", "offloaded", "bound", "weights_back", "updated", "kv_back"],
        ),
        ("nccl", ["taken", "flushed", "bound", "updated"]),
    ],
)
def test_each_transport_keeps_its_order_and_never_pauses(transport: str, stages: list[str]) -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, transport)
        await made.sync.update("1", made.addresses)
        assert made.stages() == stages
        routes = [route for route, _ in made.engines[0].posts]
        assert not {"/pause_generation", "/continue_generation"} & set(routes)
        memory = [(route, tuple(body["tags"])) for route, body in made.engines[0].posts if "memory" in route]
        if transport != "nccl":
            assert memory == [(RELEASE, ("kv_cache", "weights")), (RESUME, ("weights",)), (RESUME, ("kv_cache",))]

    run(body)


def test_a_group_is_formed_once_for_a_binding_and_anew_for_another() -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, "nccl")

        def joins() -> list[int]:
            return [sum(route == INIT_GROUP for route, _ in engine.posts) for engine in made.engines]

        await made.sync.update("1", made.addresses)
        await made.sync.update("2", made.addresses)
        assert joins() == [1, 1, 1]
        await made.sync.update("3", made.addresses[:2], made.addresses[2:])  # one has become inactive
        assert joins() == [2, 2, 1]
        assert not any(
            UPDATE["nccl"] == route and body.get("weight_version") == "3" for route, body in made.engines[2].posts
        )

    run(body)


def test_the_signature_has_place_and_state_of_every_target() -> None:
    def of(**changes: Any) -> str:
        address = EngineAddress("e-0", changes.pop("incarnation", 0), "host", changes.pop("port", 30_000))
        target = Target(address, changes.pop("state", "active"), changes.pop("ranks", (0,)))
        return Binding("nccl", 2, 10, changes.pop("master_port", 30_000), (target,)).signature()

    other = [of(incarnation=1), of(port=30_001), of(state="inactive"), of(ranks=(1,)), of(master_port=1)]
    assert len({of(), *other}) == 1 + len(other) and of() == of()


@pytest.mark.parametrize("transport", EVERY)
def test_an_engine_that_fails_is_named_and_the_others_have_it_all(transport: str) -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, transport)
        broken = made.engines[1]

        def fail(kind: str, fields: dict[str, Any]) -> None:
            if kind == "admin.attempt" and fields["target"] == "e-1" and fields["route"] in (INIT_GROUP, RESUME):
                broken.post_script = [ConnectTimeout("no connection")] * 2

        world.on_emit = fail
        failed = await made.sync.update("1", made.addresses)
        assert [failure.name for failure in failed] == ["e-1"] and "ConnectTimeout" in failed[0].why
        trainers = {name: data for name, data, _ in await FakeTrainer().shards("1")}
        for engine in (made.engines[0], made.engines[2]):
            shards, labels = made.got(engine, transport)
            assert shards == trainers and labels[-1] == "1"
        assert not made.got(broken, transport)[0]

    run(body)


def test_members_of_a_broken_group_get_another_one() -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, "nccl")

        def fail(kind: str, fields: dict[str, Any]) -> None:
            if kind == "admin.attempt" and fields["route"] == INIT_GROUP and not made.engines[1].post_script:
                # The second engine is gone at the first bucket; the library tells its neighbours so.
                made.engines[1].post_script = [ConnectionRefused("gone")]
                made.engines[0].post_script = [HttpError("a member is gone", status=500, body="")]
                world.on_emit = lambda kind, fields: None

        world.on_emit = fail
        failed = await made.sync.update("1", made.addresses)
        assert [(failure.name, failure.culprit) for failure in failed] == [("e-1", True)]
        for engine in (made.engines[0], made.engines[2]):
            groups = [body["world_size"] for route, body in engine.posts if route == INIT_GROUP]
            assert groups == [4, 3]
            assert made.got(engine, "nccl")[1][-1] == "1"

    run(body)


def test_no_active_engine_is_an_error_and_nothing_is_done() -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, "ipc")
        error = await raised(made.sync.update("1", [], made.addresses))
        assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE
        assert not made.stages() and not made.engines[0].posts

    run(body)


def test_no_engine_at_all_that_takes_it_is_an_error() -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, "ipc", engines=2)
        for engine in made.engines:
            engine.post_script = [ConnectTimeout("no connection")] * 2
        error = await raised(made.sync.update("1", made.addresses))
        assert isinstance(error, BarrierError) and "e-0" in error.message

    run(body)


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_every_rank_leaves_when_one_fails(transport: str, how: str) -> None:
    class Failing(TrainingRank):
        async def gather(self, what: str, ranks: tuple[int, ...], payload: tuple[bytes, ...] = ()) -> Any:
            if what == "bucket 2" and self.number == 1:
                if how == "hangs":
                    await asyncio.get_running_loop().create_future()
                raise ConnectionRefused("its device is gone")
            return await super().gather(what, ranks, payload)

    async def body(world: FakeBackend) -> None:
        made = await training(world, transport, ranks=3, timeout_s=30)
        left: list[str] = []
        for number, handle in enumerate(made.ranks):
            target = handle.target
            rank = Failing(target.config, target.admin, number, target._trainer, target._rendezvous)
            handle.target = rank
            for method in ("update", "register"):
                inner = getattr(rank, method)

                async def noted(*args: Any, inner: Any = inner, name: str = handle.name) -> Any:
                    try:
                        return await inner(*args)
                    finally:
                        left.append(name)

                setattr(rank, method, noted)
        began = asyncio.get_running_loop().time()
        error = await raised(made.sync.update("1", made.addresses))
        assert isinstance(error, BarrierError) and "3 of 3 ranks failed" in error.message
        assert ("device is gone" in error.message) == (how == "raises")
        assert sorted(left) == ["rank-0", "rank-1", "rank-2"]
        assert asyncio.get_running_loop().time() - began < (1 if how == "raises" else 31)

    run(body)


def test_a_checkpoint_engine_updates_only_what_is_registered_and_is_never_rebuilt() -> None:
    async def body(world: FakeBackend) -> None:
        made = await training(world, "checkpoint_engine")
        rank = made.ranks[0]
        error = await raised(rank.register("u", "1", 5.0))
        assert isinstance(error, BarrierError) and error.outcome is Outcome.NOT_DONE  # bound to nobody
        await made.sync.update("1", made.addresses)
        assert await rank.bind(Binding("checkpoint_engine", 2, 400, 1, ())) is False  # only told
        error = await raised(rank.update("u", "2", 5.0))
        assert isinstance(error, BarrierError) and "not registered" in error.message
        rank.target._shares.pop(3)
        error = await raised(rank.register("u2", "2", 5.0))
        assert isinstance(error, BarrierError) and ("bucket 3" in error.message or "ran out of time" in error.message)

    run(body)


def test_a_late_rank_is_refused_once_an_update_is_given_up() -> None:
    async def body(world: FakeBackend) -> None:
        meeting = await world.spawn(Rendezvous, name="r")
        waiting = asyncio.get_running_loop().create_task(meeting.gather("u", "bucket 0", 0, (0, 1)))
        await asyncio.sleep(1)
        await meeting.give_up("u", "rank 1 is dead")
        assert "rank 1 is dead" in str(await raised(waiting))
        assert "rank 1 is dead" in str(await raised(meeting.gather("u", "bucket 0", 1, (0, 1))))
        both = [meeting.gather("v", "x", n, (0, 1), (b"%d" % n,)) for n in range(2)]
        assert await asyncio.gather(*both) == [((b"0",), (b"1",))] * 2

    run(body)


def test_a_failure_says_whether_it_was_its_own() -> None:
    assert Failure("e", "why").culprit
