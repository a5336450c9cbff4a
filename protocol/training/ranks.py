"""A training rank: its slice of the model, and its half of every weight update. An actor; all ranks are told alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from protocol.config import AdminConfig, WeightSyncConfig
from protocol.errors import BarrierError, Outcome, SeatrialError
from protocol.ports import ActorHandle, Trainer, backend
from protocol.training.buckets import Plan, Shard, plan, share
from protocol.training.transports import TRANSPORTS, Binding, CheckpointEngine, Failure, Transport

_TELL_S = 2.0


class TrainingRank:
    """One of the ranks that train.

    Args:
        config: transport, buckets, deadlines.
        admin: attempts and connect time-outs of POSTs.
        number: from 0.
        trainer: has the weights of every version (``protocol.ports.Trainer``); stands for this rank's optimizer steps.
        rendezvous: handle of the Rendezvous where ranks meet.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        admin: AdminConfig,
        number: int,
        trainer: Trainer,
        rendezvous: ActorHandle,
    ) -> None:
        self.config = config
        self.admin = admin
        self.number = number
        self._trainer = trainer
        self._rendezvous = rendezvous
        self._layout: Plan = ()
        self._shares: dict[int, tuple[bytes, ...]] = {}
        self._on_device = True
        self._transport: Transport | None = None
        self._signature = ""
        self._update = ""

    # --- its part of the model ---

    async def take(self, version: str) -> None:
        """Train up to a version, in effect: from now on this rank has its part of that one, on the device."""
        shards = await self._trainer.shards(version)
        self._layout = plan(
            [Shard(name, len(data), nominal) for name, data, nominal in shards], round(self.config.bucket_gb * 1e9)
        )
        content = {name: data for name, data, _ in shards}
        ranks = self.config.ranks
        self._shares = {
            number: tuple(share(content[piece.shard], piece, self.number, ranks) for piece in bucket)
            for number, bucket in enumerate(self._layout)
        }
        self._on_device = True

    async def offload(self) -> None:
        """Give the device memory of the model away. Handles to it are worth nothing from then on. Idempotent."""
        self._on_device = False

    def layout(self) -> Plan:
        """The pieces of every bucket; the same at every rank."""
        return self._layout

    def shares(self, bucket: int) -> tuple[bytes, ...]:
        """This rank's slice of each piece of a bucket. Raises BarrierError, *not done*: it has none."""
        shares = self._shares.get(bucket)
        if shares is None:
            raise BarrierError(f"rank {self.number} has no part of bucket {bucket}", outcome=Outcome.NOT_DONE)
        if self._on_device:
            return shares
        return tuple(bytes(len(one)) for one in shares)  # what lies there now is not the model

    async def gather(
        self, what: str, ranks: tuple[int, ...], payload: tuple[bytes, ...] = ()
    ) -> tuple[tuple[bytes, ...], ...]:
        """A collective of the update under way: what each of ``ranks`` has brought to ``what``, in their order.

        Raises as ``Rendezvous.gather``: *unknown* when a rank has left or the time is up.
        """
        met: tuple[tuple[bytes, ...], ...] = await self._rendezvous.gather(
            self._update, what, self.number, ranks, payload
        )
        return met

    # --- updates ---

    async def bind(self, binding: Binding) -> bool:
        """Whom the next update is for; before each one. Returns whether the transport was made anew.

        It is when anything of the binding has changed, state and place of every target included; what it kept with the
        old targets is torn down. A checkpoint engine is only told the new targets.
        """
        signature = binding.signature()
        old = self._transport
        if old is not None and signature == self._signature:
            return False
        self._signature = signature
        if isinstance(old, CheckpointEngine) and binding.transport == old.name:
            old.rebind(binding)
            return False
        if old is not None:
            await old.close()
        self._transport = TRANSPORTS[binding.transport](self, binding)
        return True

    async def register(self, update: str, version: str, timeout_s: float) -> None:
        """Put a copy aside, with a checkpoint engine. Raises BarrierError: *not done* with another, else *unknown*."""
        transport = self._bound()
        if not isinstance(transport, CheckpointEngine):
            raise BarrierError(f"{transport.name} registers nothing", outcome=Outcome.NOT_DONE)
        self._update = update
        async with self._leaving("register", timeout_s):
            await transport.register(update, version)

    async def update(self, update: str, version: str, timeout_s: float) -> tuple[Failure, ...]:
        """This rank's half of an update; returns the targets that it could not bring it to.

        It ends within ``timeout_s`` whatever becomes of the others, so that no rank waits at a barrier for ever.

        Raises BarrierError, *unknown*: the time was up, another rank gave up, or this one cannot go on.
        """
        transport = self._bound()
        self._update = update
        async with self._leaving("update", timeout_s):
            return await transport.update(update, version)

    def _bound(self) -> Transport:
        if self._transport is None:
            raise BarrierError(f"rank {self.number} is bound to no target", outcome=Outcome.NOT_DONE)
        return self._transport

    @contextlib.asynccontextmanager
    async def _leaving(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        """A part of an update that this rank leaves in time, and never without the others hearing of a failure."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            why = f"rank {self.number} ran out of time in its {what}"
            await self._tell(why)
            raise BarrierError(why) from None
        except Exception as error:
            await self._tell(f"rank {self.number}: {error}")
            raise

    async def _tell(self, why: str) -> None:
        backend().emit("weights.given_up", update=self._update, rank=self.number, why=why)
        with contextlib.suppress(SeatrialError, TimeoutError):  # the rank leaves, whatever becomes of the message
            async with asyncio.timeout(_TELL_S):
                await self._rendezvous.give_up(self._update, why)
