"""How new weights get from training ranks into engines: one class a transport, one object a rank (serving.md 9.2).

Every rank takes part in every update: the content of a bucket is put together from all of them (`buckets.share`).

- *ipc* (colocated): the head rank of each engine gathers its ranks' handles and POSTs one bucket at a time; all ranks
  meet after each group of buckets. Knows no flush.
- *nccl* (disaggregated): rank 0 and all engines form a group, told by HTTP first; then each bucket is a broadcast in
  which every engine takes part, and the other ranks meet at a barrier per bucket. Knows no flush. One engine that is
  gone breaks it for all, so a group is made for the targets of its binding and for no others.
- *checkpoint_engine* (colocated): *register* puts a copy aside, split over the ranks by bucket; *update* brings it to
  the heads (all engines: broadcast; some: from whoever has each bucket) and each engine loads it in one POST, with a
  flush. What was registered outlives the trainer's memory.

(*disk*, an engine that reads an export, needs no ranks: `protocol.training.publication`.) None of them pauses,
continues, releases or takes memory: that is the order of `protocol.training.weight_sync`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from protocol.config import AdminConfig, WeightSyncConfig
from protocol.errors import BarrierError, HttpError, NetworkError, Outcome, SeatrialError
from protocol.messages import EngineAddress, message
from protocol.ports import backend
from protocol.serving.admin import post_once
from protocol.training.buckets import FullPiece, Plan, nominal_bytes, whole

FROM_TENSOR = "/update_weights_from_tensor"
FROM_DISTRIBUTED = "/update_weights_from_distributed"
FROM_IPC = "/update_weights_from_ipc"
INIT_GROUP = "/init_weights_update_group"
DESTROY_GROUP = "/destroy_weights_update_group"

TargetState = Literal["active", "inactive"]


@message
class Target:
    """An engine to update: its address, whether it is routed to, and the training ranks beside it, the head first."""

    address: EngineAddress
    state: TargetState
    ranks: tuple[int, ...]


@message
class Binding:
    """Whom an update is for, as every rank is told before each one. ``ranks``: the training ranks."""

    transport: str
    ranks: int
    bucket_bytes: int
    master_port: int
    targets: tuple[Target, ...]

    def signature(self) -> str:
        """Changes with transport, sizes, and the place **and state** of every target: a group is good for one alone."""
        places = [
            f"{t.address.name}/{t.address.incarnation}@{t.address.host}:{t.address.port}={t.state}/{t.ranks}"
            for t in self.targets
        ]
        return f"{self.transport} {self.ranks} {self.bucket_bytes} {self.master_port} {' '.join(places)}"

    @property
    def active(self) -> tuple[Target, ...]:
        """The targets that are updated. An inactive one is sent nothing: it would time out, and all would wait."""
        return tuple(target for target in self.targets if target.state == "active")


@message
class Failure:
    """An engine that an update did not get into. ``culprit``: it failed by itself, not with a group of others."""

    name: str
    why: str
    culprit: bool = True


class RankPort(Protocol):
    """What a transport needs of its rank."""

    number: int
    config: WeightSyncConfig
    admin: AdminConfig

    def layout(self) -> Plan:
        """The buckets of the model."""
        ...

    def shares(self, bucket: int) -> tuple[bytes, ...]:
        """This rank's part of each piece of a bucket, as its memory has it now."""
        ...

    async def gather(
        self, what: str, ranks: tuple[int, ...], payload: tuple[bytes, ...] = ()
    ) -> tuple[tuple[bytes, ...], ...]:
        """Meet other ranks in this update: see ``Rendezvous.gather``."""
        ...


class Transport:
    """One rank's half of a way to bring weights over. Kept from update to update while its binding stays the same."""

    name: str

    def __init__(self, rank: RankPort, binding: Binding) -> None:
        self.rank = rank
        self.binding = binding
        self.everybody = tuple(range(binding.ranks))

    async def close(self) -> None:
        """Tear down what is kept with engines; best effort, for some of them may be gone."""

    async def update(self, update: str, version: str) -> tuple[Failure, ...]:
        """Bring ``version`` to every active target. Returns who did not take it; a failed target is sent no more.

        Raises SeatrialError, *unknown*, when this rank cannot go on.
        """
        raise NotImplementedError  # abstract: every transport below has its own

    # --- what transports share ---

    async def full(self, bucket: int) -> tuple[FullPiece, ...]:
        """A bucket from all ranks. Every rank calls it, and every rank gets it."""
        shares = await self.rank.gather(f"bucket {bucket}", self.everybody, self.rank.shares(bucket))
        return whole(self.rank.layout()[bucket], shares)

    def headed(self) -> tuple[Target, ...]:
        """The active targets that this rank speaks to."""
        return tuple(target for target in self.binding.active if target.ranks[0] == self.rank.number)

    async def post(self, address: EngineAddress, route: str, body: dict[str, Any]) -> None:
        """One POST. Raises as ``post_once``, and HttpError for an answer without success."""
        admin = self.rank.admin
        client = backend().engines.client(address)
        reply = await post_once(
            address.name,
            route,
            lambda: client.post(
                route,
                dict(body),
                connect_timeout_s=admin.connect_timeout_s,
                read_timeout_s=self.rank.config.post_timeout_s,
            ),
            admin.connect_attempts,
            admin.connect_backoff_s,
        )
        if not reply.success:
            raise HttpError(f"{route}: {reply.body}", status=reply.status, body=reply.body, outcome=Outcome.UNKNOWN)

    async def post_all(self, targets: Sequence[Target], route: str, body: dict[str, Any]) -> dict[str, Failure]:
        """The same POST to all at once; who did not take it, by name."""
        failed: dict[str, Failure] = {}

        async def one(target: Target) -> None:
            try:
                await self.post(target.address, route, body)
            except SeatrialError as error:
                name = target.address.name
                culprit = isinstance(error, NetworkError)
                failed[name] = Failure(name, f"{route}: {type(error).__name__}: {error.message}", culprit)

        await asyncio.gather(*(one(target) for target in targets))
        return failed

    def body(self, version: str, bucket: int, pieces: tuple[FullPiece, ...]) -> dict[str, Any]:
        """Of a POST of one bucket. The label comes with the last: until then an engine has the one before it."""
        of = len(self.rank.layout())
        return {
            "bucket": bucket,
            "of": of,
            "pieces": pieces,
            "weight_version": version if bucket == of - 1 else None,
            "flush_cache": False,
        }

    async def moved(self, pieces: tuple[FullPiece, ...]) -> None:
        """The time in which the bytes get there."""
        await asyncio.sleep(nominal_bytes(pieces) / (self.rank.config.link_gb_per_s * 1e9))


class Ipc(Transport):
    """Handles of device memory, a bucket at a time, from the head rank of each engine."""

    name = "ipc"

    async def update(self, update: str, version: str) -> tuple[Failure, ...]:
        failed: dict[str, Failure] = {}
        last = len(self.rank.layout()) - 1
        for bucket in range(last + 1):
            pieces = await self.full(bucket)
            for target in self.binding.active:
                if self.rank.number in target.ranks and len(target.ranks) > 1:
                    await self.rank.gather(f"handles {bucket} of {target.address.name}", target.ranks)
            good = [target for target in self.headed() if target.address.name not in failed]
            if good:
                await self.moved(pieces)
            failed |= await self.post_all(good, FROM_TENSOR, self.body(version, bucket, pieces))
            if bucket == last or (bucket + 1) % self.rank.config.barrier_every == 0:
                await self.rank.gather(f"after bucket {bucket}", self.everybody)
        return tuple(failed.values())


class Nccl(Transport):
    """A group of rank 0 and every engine; each bucket is one broadcast."""

    name = "nccl"

    def __init__(self, rank: RankPort, binding: Binding) -> None:
        super().__init__(rank, binding)
        self._group = ""
        self._gone: dict[str, Failure] = {}

    async def close(self) -> None:
        if self._group:
            group, self._group = self._group, ""
            left = [target for target in self.binding.active if target.address.name not in self._gone]
            await self.post_all(left, DESTROY_GROUP, {"group_name": group})

    async def update(self, update: str, version: str) -> tuple[Failure, ...]:
        failed: dict[str, Failure] = {}
        is_root = self.rank.number == 0
        if is_root and not self._group:
            failed = await self._form(update)
        last = len(self.rank.layout()) - 1
        for bucket in range(last + 1):
            pieces = await self.full(bucket)
            if is_root and not failed:
                await self.moved(pieces)
                body = self.body(version, bucket, pieces) | {"group_name": self._group}
                failed = await self.post_all(self.binding.active, FROM_DISTRIBUTED, body)
            await self.rank.gather(f"after bucket {bucket}", self.everybody)
        if failed:
            self._gone = {name: failure for name, failure in failed.items() if failure.culprit}
            await self.close()  # a group that has lost a member never works again
            first = next(iter(failed))
            for target in self.binding.active:  # they have some of the buckets at most
                name = target.address.name
                failed.setdefault(name, Failure(name, f"its group lost {first}", culprit=False))
        return tuple(failed.values())

    async def _form(self, update: str) -> dict[str, Failure]:
        targets = self.binding.active
        self._group = update
        body = {
            "group_name": update,
            "world_size": 1 + len(targets),
            "master_address": backend().node,
            "master_port": self.binding.master_port,
            "backend": "nccl",
        }
        return await self.post_all(targets, INIT_GROUP, body)


class CheckpointEngine(Transport):
    """A registered copy of the weights, loaded by each engine in one POST."""

    name = "checkpoint_engine"

    def __init__(self, rank: RankPort, binding: Binding) -> None:
        super().__init__(rank, binding)
        self._registered: dict[str, dict[int, tuple[FullPiece, ...]]] = {}

    def rebind(self, binding: Binding) -> None:
        """Other targets; what is registered stays (it is never rebuilt)."""
        self.binding = binding

    async def register(self, update: str, version: str) -> None:
        """Put a copy of ``version`` aside, this rank the buckets that are its own, and drop the one before it.

        Raises BarrierError, *not done*, when this rank lacks a part of the model.
        """
        ranks = len(self.everybody)
        kept: dict[int, tuple[FullPiece, ...]] = {}
        for bucket in range(len(self.rank.layout())):
            pieces = await self.full(bucket)
            if bucket % ranks == self.rank.number:
                kept[bucket] = pieces
        self._registered = {version: kept}

    async def update(self, update: str, version: str) -> tuple[Failure, ...]:
        kept = self._registered.get(version)
        if kept is None:
            raise BarrierError(f"version {version} was not registered with rank {self.rank.number}")
        mine = self.headed()
        pieces: list[FullPiece] = []
        for bucket in range(len(self.rank.layout())):
            own = kept.get(bucket)
            payload = () if own is None else tuple(piece.data for piece in own)
            brought = await self.rank.gather(f"bucket {bucket}", self.everybody, payload)
            data = brought[bucket % len(self.everybody)]
            layout = self.rank.layout()[bucket]
            got = tuple(
                FullPiece(piece.shard, piece.index, piece.of, piece.nominal, bytes_)
                for piece, bytes_ in zip(layout, data, strict=True)
            )
            if mine:
                await self.moved(got)
                pieces += got
        body = {
            "bucket": 0,
            "of": 1,
            "pieces": tuple(pieces),
            "weight_version": version,
            "flush_cache": True,
        }
        failed = await self.post_all(mine, FROM_IPC, body)
        await self.rank.gather("after the update", self.everybody)
        return tuple(failed.values())


TRANSPORTS: dict[str, type[Transport]] = {kind.name: kind for kind in (Ipc, Nccl, CheckpointEngine)}
"""Those that need training ranks, by name."""
