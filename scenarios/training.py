"""A training loop at the edge: rollouts whose samples ask a judge, training, new weights for the rollout engines.

It stands in for a learner whose reward model is scaled: what it does to the services is real (samples are generated,
judged, and weights are exported and loaded), the optimizer's work is time that passes. An ordinary actor; it records
when steps and rollouts begin and end, which is what continuity is judged by. Source: scaling_acceptance.md 5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.config import AdminConfig
from protocol.errors import SeatrialError
from protocol.evidence import observer
from protocol.messages import EngineAddress, GenerateRequest, GenerateResult, WeightUpdate
from protocol.ports import ActorHandle, backend
from protocol.serving.admin import post_update_weights
from protocol.training.checkpoint import load_manifest
from scenarios.client import ClientReport, record_answer, record_error, record_gave_up, wait_to_begin
from scenarios.schema import TrainingModel, WorkloadModel
from scenarios.workloads.source import sizes, tokens


@observer
class TrainingClient:
    """Runs a training loop. An actor.

    Args:
        workload: of training; its service is the judge.
        number: of the workload in the scenario.
        seed: of the draws.
        judge: handle of the Gateway of the judges.
        rollout: handle of the Gateway of the rollout engines.
        exporter: handle of the Exporter whose exports the rollout engines load.
        admin: how an update is posted.
    """

    def __init__(
        self,
        workload: WorkloadModel,
        number: int,
        seed: int,
        judge: ActorHandle,
        rollout: ActorHandle,
        exporter: ActorHandle,
        admin: AdminConfig,
    ) -> None:
        self._workload = workload
        self._number = number
        self._seed = seed
        self._judge = judge
        self._rollout = rollout
        self._exporter = exporter
        self._admin = admin
        self._sent = 0
        self._answered = 0
        self._emit: Callable[..., None]

    async def start(self) -> None:
        self._emit = backend().emit

    async def run(self) -> ClientReport:
        """Run every step, and report."""
        from sim.random import Streams  # the draws are the same in both worlds

        workload, emit = self._workload, self._emit
        assert workload.arrivals is not None and workload.arrivals.training is not None
        training: TrainingModel = workload.arrivals.training
        await wait_to_begin(workload)
        streams = Streams(self._seed)
        prefix = f"workload.{self._number}."
        prompt, output = sizes(workload, lambda name: streams.stream(prefix + name))
        judged_prompt = tokens(training.judge_prompt_tokens, streams.stream(prefix + "judge_prompt"))
        judged_output = tokens(training.judge_output_tokens, streams.stream(prefix + "judge_output"))
        for step in range(training.steps):
            emit("train.step", step=step, what="started")
            judged = training.judged[min(step, len(training.judged) - 1)]
            drawn = [(prompt(), output()) for _ in range(training.samples)]
            asked = [(judged_prompt(), judged_output()) for _ in range(judged)]
            answers = await asyncio.gather(
                *(self._sample(size, asked[n] if n < judged else None) for n, size in enumerate(drawn))
            )
            emit(
                "train.rollout",
                rollout=step,
                samples=sum(sampled for sampled, _ in answers),
                judged=sum(verdict for _, verdict in answers),
            )
            await asyncio.sleep(training.first_train_s if step == 0 else training.train_s)
            emit("train.weights", version=str(step + 1), loaded=await self._publish(str(step + 1)))
            await asyncio.sleep(training.after_s)
            emit("train.step", step=step, what="ended")
        emit("train.finished", steps=training.steps)
        return ClientReport(self._sent, self._answered)

    async def _sample(self, size: tuple[int, int], judged: tuple[int, int] | None) -> tuple[bool, bool]:
        """Generate one sample, and have it judged where it has an answer to judge: whether each of the two came."""
        if not await self._one(self._rollout, *size):
            return False, False
        return True, judged is not None and await self._one(self._judge, *judged)

    async def _one(self, gateway: ActorHandle, prompt: int, output: int) -> bool:
        emit, name = self._emit, backend().new_id("req")
        workload = self._workload
        request = GenerateRequest(name, prompt, output, workload.ignore_eos, idempotent=workload.idempotent)
        emit("request.sent", request=name, prompt_tokens=prompt, max_new_tokens=output, idempotent=request.idempotent)
        self._sent += 1
        try:
            async with asyncio.timeout(workload.patience_s):
                result: GenerateResult = await gateway.generate(request)
        except SeatrialError as error:
            record_error(emit, name, error)
            return False
        except TimeoutError:
            record_gave_up(emit, name)
            return False
        if not record_answer(emit, name, result):
            return False
        self._answered += 1
        return True

    async def _publish(self, version: str) -> int:
        """New weights for every rollout engine, which has nothing to do now. How many have loaded them."""
        path = str(await self._exporter.export(version))
        manifest = await load_manifest(backend().storage, path)
        update = WeightUpdate(path, manifest.version)
        roster: tuple[EngineAddress, ...] = await self._rollout.roster()
        loaded = 0
        for address in roster:
            try:
                await post_update_weights(backend().engines.client(address), update, self._admin)
                loaded += 1
            except SeatrialError:
                continue  # seen in the evidence of the engine; the next step tries again
        return loaded
