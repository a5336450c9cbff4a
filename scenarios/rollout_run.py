"""A training run in small: who produces, keeps, consumes and evaluates rollouts of a service, and who looks on.

Runs in the driver, in either world. The operator is an ordinary actor at the edge; it starts the parts, publishes for
the learner, and records what it sees of buffer and trace store.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any

from protocol.errors import NoSuchActor, Outcome, SeatrialError
from protocol.evidence import observer
from protocol.ports import ActorHandle, backend
from protocol.rollout.producer import Producer
from protocol.rollout.replay_buffer import ReplayBuffer, StoredGroup
from protocol.rollout.segments import StoreSnapshot
from protocol.training.evaluator import Evaluator
from protocol.training.learner import Learner, TrainWorker
from scenarios.client import ClientReport, wait_to_begin
from scenarios.faults import PublishParams
from scenarios.publishing import PublicationOperator, Publishing, spawn_store
from scenarios.rollouts import RolloutAgent
from scenarios.routing import living
from scenarios.schema import RolloutsModel, ServiceModel, WorkloadModel

_LOOK_S = 0.5
_ANSWER_S = 30.0


@dataclasses.dataclass(slots=True)
class Rollouts:
    """The parts of a training run, once they are up. ``evaluator`` is None where nothing is evaluated."""

    store: ActorHandle
    buffer: ActorHandle
    producer: ActorHandle
    learner: ActorHandle
    evaluator: ActorHandle | None
    agents: list[ActorHandle]
    workers: list[ActorHandle]

    async def actors(self) -> list[ActorHandle]:
        """Every actor of it in its present incarnation, who asks others before those who are asked."""
        evaluators = [] if self.evaluator is None else [self.evaluator]
        return await living(
            (self.learner, *evaluators, self.producer, *self.workers, *self.agents, self.buffer, self.store)
        )


async def deploy_rollouts(
    service: str,
    spec: ServiceModel,
    publishing: Publishing,
    workload: WorkloadModel,
    number: int,
    seed: int,
    classes: dict[str, type],
    block_tokens: int,
) -> tuple[Rollouts, ActorHandle]:
    """Start the parts of a training run; returns them and its operator, whose ``run`` is the run.

    Args:
        service: its name in the scenario, and spec its model.
        publishing: of the service.
        workload: of rollouts, number ``number`` in the scenario.
        seed: of the draws.
        classes: components of the user's own.
        block_tokens: tokens of a prefix block of the engines.

    Raises:
        SeatrialError: an actor could not be spawned.
    """
    model = spec.rollouts
    assert model is not None
    port = backend()
    name = f"traces-{service}"
    store = await spawn_store(name, model.trace_store, classes)
    buffer = await port.spawn(
        classes.get("replay_buffer", ReplayBuffer), model.buffer, model.access, name, name=f"buffer-{service}"
    )  # fmt: skip
    agents = [
        await port.spawn(
            RolloutAgent, workload, number, seed, publishing.router, publishing.controller, block_tokens,
            model.access, name, name=f"agent-{service}-{share}",
        )
        for share in range(workload.clients)
    ]  # fmt: skip
    producer = await port.spawn(
        classes.get("producer", Producer), model.producer, model.access, name, buffer, tuple(agents),
        name=f"producer-{service}",
    )  # fmt: skip
    workers = [
        await port.spawn(classes.get("train_worker", TrainWorker), model.learner, name=f"trainworker-{service}-{rank}")
        for rank in range(model.ranks)
    ]
    operator = await port.spawn(
        RolloutOperator, service, model, workload, publishing.publisher, publishing.router,
        name=f"client-{service}-{number}-0",
    )  # fmt: skip
    learner = await port.spawn(
        classes.get("learner", Learner), model.learner, model.access, name, buffer, tuple(workers), operator, producer,
        name=f"learner-{service}",
    )  # fmt: skip
    evaluator = None
    if model.evaluator is not None:
        evaluator = await port.spawn(
            classes.get("evaluator", Evaluator), model.evaluator, model.access, name, tuple(agents),
            name=f"evaluator-{service}",
        )  # fmt: skip
    parts = Rollouts(store, buffer, producer, learner, evaluator, agents, workers)
    port.emit(
        "rollouts.deployed",
        service=service,
        store=store.name,
        buffer=buffer.name,
        producer=producer.name,
        learner=learner.name,
        evaluator="" if evaluator is None else evaluator.name,
        agents=[agent.name for agent in agents],
        workers=[worker.name for worker in workers],
    )
    await operator.know(store, buffer, producer, learner, evaluator, tuple(agents))
    return parts, operator


@observer
class RolloutOperator:
    """Has a training run done, and looks on. An actor.

    Args:
        service: its name in the scenario.
        model: of its rollouts.
        workload: whose groups are produced.
        publisher: handle of the WeightPublisher.
        router: handle of the SessionAffinityRouter.
    """

    def __init__(
        self, service: str, model: RolloutsModel, workload: WorkloadModel, publisher: ActorHandle, router: ActorHandle
    ) -> None:
        self._service = service
        self._model = model
        self._workload = workload
        self._publications = PublicationOperator(service, publisher, router)
        self._store: ActorHandle
        self._buffer: ActorHandle
        self._producer: ActorHandle
        self._learner: ActorHandle
        self._evaluator: ActorHandle | None
        self._agents: tuple[ActorHandle, ...]

    async def know(
        self,
        store: ActorHandle,
        buffer: ActorHandle,
        producer: ActorHandle,
        learner: ActorHandle,
        evaluator: ActorHandle | None,
        agents: tuple[ActorHandle, ...],
    ) -> None:
        """Who the parts are."""
        self._store, self._buffer, self._producer = store, buffer, producer
        self._learner, self._evaluator, self._agents = learner, evaluator, agents

    async def publish(self, model_step: int) -> None:
        """For the learner: publish the weights of a step. Failures are recorded; the run goes on."""
        await self._publications.publish(PublishParams(model_step=model_step, attempts=3))

    async def run(self) -> ClientReport:
        """Produce and train until every group has come to an end that it can come to, and report."""
        await wait_to_begin(self._workload)
        looking = asyncio.get_running_loop().create_task(self._keep_looking(), name="looking")
        try:
            await self._course()
        finally:
            looking.cancel()
        await self._look("final")
        reports = [await self._asked(agent, "report") for agent in self._agents]
        told = [report for report in reports if report is not None]
        return ClientReport(sum(report.sent for report in told), sum(report.answered for report in told))

    async def _course(self) -> None:
        arrivals = self._workload.arrivals
        assert arrivals is not None and arrivals.rollouts is not None
        groups = arrivals.rollouts.groups
        if self._model.learner.mode == "colocated":
            at_once = self._model.learner.batch_groups
            await self._part("learner", self._learner.train_alone(-(-groups // at_once), at_once))
            if self._evaluator is not None:
                await self._part("evaluator", self._evaluator.evaluate())
            return
        async with asyncio.TaskGroup() as running:
            running.create_task(self._part("learner", self._learner.train()), name="learner")
            if self._evaluator is not None:
                running.create_task(self._part("evaluator", self._evaluator.run()), name="evaluator")
            await self._part("producer", self._producer.produce(groups))
            await self._asked(self._learner, "finish")
            if self._evaluator is not None:
                await self._asked(self._evaluator, "finish")

    async def _part(self, part: str, call: Awaitable[Any]) -> None:
        """Wait for a part, as long as it takes; a deadlock is the world's to find."""
        failure: SeatrialError | None = None
        counts: Any = None
        try:
            counts = await call
        except SeatrialError as error:
            failure = error
        self._emit(
            "rollouts.ended",
            part=part,
            outcome=Outcome.DONE.value if failure is None else failure.outcome.value,
            error="" if failure is None else type(failure).__name__,
            counts=dataclasses.asdict(counts) if dataclasses.is_dataclass(counts) else counts,  # type: ignore[arg-type]  # never a class
        )

    # --- looking on ---

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look("course")

    async def _look(self, when: str) -> None:
        """Ask the buffer, the store, and the buffer again: what was there both times was there in between."""
        before: tuple[StoredGroup, ...] | None = await self._asked(self._buffer, "contents")
        try:
            self._store = await backend().lookup(self._store.name)
        except NoSuchActor:
            return
        seen: StoreSnapshot | None = await self._asked(self._store, "snapshot")
        after: tuple[StoredGroup, ...] | None = await self._asked(self._buffer, "contents")
        if before is not None and seen is not None and after is not None:
            self._emit(
                "trace.snapshot", when=when, before=_rows(before), sessions=list(seen.sessions), after=_rows(after)
            )

    async def _asked(self, handle: ActorHandle, method: str) -> Any:
        """None: a part of the user's own that has no such method, or one that does not answer."""
        asked: Any = getattr(handle, method, None)
        if asked is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asked()
        except (SeatrialError, TimeoutError):
            return None

    def _emit(self, kind: str, **fields: Any) -> None:
        backend().emit(kind, service=self._service, **fields)


def _rows(stored: tuple[StoredGroup, ...]) -> list[list[Any]]:
    return [
        [member.rollout_id, member.session_id, one.group.status, one.number]
        for one in stored
        for member in one.group.members
    ]
