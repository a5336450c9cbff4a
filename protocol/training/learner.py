"""The learner: takes batches from the replay buffer, has them trained on, and cleans up after them (training.md 7).

While groups are produced beside it (*disaggregated*) it releases the sessions of its own batch and no others: at any
moment somebody else's session may be in the trace store. Alone (*colocated*) it may release everything, but only where
the buffer has nothing left that is still needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from protocol.config import LearnerConfig, TraceAccessConfig
from protocol.errors import ReadTimeout, SeatrialError
from protocol.messages import message
from protocol.ports import ActorHandle, backend, data_call
from protocol.rollout.groups import RolloutGroup
from protocol.rollout.trace_access import TraceAccess

T = TypeVar("T")


@message
class TrainedCounts:
    """``steps`` taken, ``groups`` trained on, ``failed`` steps whose workers did not all finish."""

    steps: int = 0
    groups: int = 0
    failed: int = 0


class TrainWorker:
    """One rank of training. An actor.

    It reads the references of a batch and never frees one: several segments and all ranks share them, and whoever
    handed out the batch frees when all ranks have finished (S-21).

    Args:
        config: how long a fit takes.
    """

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config

    @data_call
    async def fit(self, groups: tuple[RolloutGroup, ...]) -> int:
        """Train on a batch; returns the bytes of expert choices that were read.

        Raises:
            ObjectFreed, ObjectLost (*not done*): a reference of the batch leads to nothing.
        """
        read = 0
        for group in groups:
            for member in group.members:
                for ref in member.experts:
                    read += len(await backend().objects.get(ref))
        await asyncio.sleep(self._config.fit_s)
        return read


class Learner:
    """Trains on batches until it is told to finish. An actor.

    Args:
        config: mode, size of a batch, time-outs.
        access: how the trace store is reached.
        store: its name.
        buffer: handle of the ReplayBuffer.
        workers: handles of the TrainWorkers.
        publisher: handle of who publishes, ``publish(model_step)``, or None.
        producer: handle of the Producer, which a colocated learner has produce before each step.
    """

    def __init__(
        self,
        config: LearnerConfig,
        access: TraceAccessConfig,
        store: str,
        buffer: ActorHandle,
        workers: tuple[ActorHandle, ...],
        publisher: ActorHandle | None = None,
        producer: ActorHandle | None = None,
    ) -> None:
        self._config = config
        self._traces = TraceAccess(access, store)
        self._buffer = buffer
        self._workers = workers
        self._publisher = publisher
        self._producer = producer
        self._finishing = False
        self._step = 0
        self._groups = 0
        self._failed = 0

    async def train(self) -> TrainedCounts:
        """Train on whatever the buffer has, until it has no batch any more after ``finish``."""
        while True:
            finishing = self._finishing  # asked before the buffer is: what came in between is trained on
            batch = await self._answer(self._buffer.take_batch(self._config.batch_groups))
            if batch:
                await self._train_on(batch)
            elif finishing:
                return self._counts()
            else:
                await asyncio.sleep(self._config.poll_s)

    async def train_alone(self, rounds: int, groups: int) -> TrainedCounts:
        """Colocated: have ``groups`` more groups produced and train on what came of them, so many times."""
        assert self._producer is not None
        for _ in range(rounds):
            await self._producer.produce(groups)
            while batch := await self._answer(self._buffer.take_batch(self._config.batch_groups)):
                await self._train_on(batch)
        return self._counts()

    async def finish(self) -> None:
        """Nothing more will be produced."""
        self._finishing = True

    async def _train_on(self, batch: tuple[RolloutGroup, ...]) -> None:
        ok = False
        released = "own"
        try:
            await self._fit(batch)
            ok = True
        except SeatrialError:  # a failing fit leaves nothing behind (T-9)
            self._failed += 1
        finally:
            released = await self._clean_up(batch)
        self._step += 1
        self._groups += len(batch)
        backend().emit(
            "learner.step", step=self._step, groups=[group.group_id for group in batch], released=released, ok=ok
        )
        await self._answer(self._buffer.refresh(self._step + 1))
        if self._publisher is not None and self._step % self._config.sync_weights_interval == 0:
            await self._publisher.publish(self._step)

    async def _fit(self, batch: tuple[RolloutGroup, ...]) -> None:
        """All ranks at once. Returns, or raises, when all have ended: nobody reads the batch any more then."""
        fits = [self._answer(worker.fit(batch)) for worker in self._workers]
        for ended in await asyncio.gather(*fits, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def _clean_up(self, batch: tuple[RolloutGroup, ...]) -> str:
        """The batch is used up. Says whose sessions were released."""
        await self._traces.release_and_discard_rollout_groups(batch)
        if self._config.mode == "colocated" and not await self._answer(self._buffer.count()):
            await self._traces.call("release_all")
            return "all"
        return "own"

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                return await call
        except TimeoutError:
            raise ReadTimeout("the buffer or a training worker did not answer the learner") from None

    def _counts(self) -> TrainedCounts:
        return TrainedCounts(self._step, self._groups, self._failed)
