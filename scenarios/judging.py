"""Judgements at the edge: labelled inputs, judged again and again, by whichever replica's turn it is.

An ordinary actor. It records what was asked, who answered and what the verdict was; whether replicas agree is the
judge's (of the run) to say. Source: scaling.md 8, scaling_acceptance.md 3.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator

from protocol.config import JudgeConfig
from protocol.errors import SeatrialError
from protocol.evidence import observer
from protocol.ports import ActorHandle, backend
from protocol.serving.judge import JudgeCall, JudgeReply
from scenarios.client import ClientReport, record_answer, record_error, record_gave_up, wait_to_begin
from scenarios.schema import JudgementsModel, WorkloadModel
from scenarios.workloads.source import sizes

_FIRST_ID, _IDS = 1000, 900  # token ids that every engine's vocabulary has
_LOOK_S = 0.5
Case = tuple[str, tuple[int, ...], int]  # name, input, most tokens of a reply


@observer
class JudgementClient:
    """Asks for judgements. An actor.

    Args:
        workload: of judgements.
        number: of the workload in the scenario.
        seed: of the draws.
        judge: handle of the ingress.
        gateway: handle of the Gateway behind it, asked only which replicas there are.
        config: the ingress's own defaults, which are part of what a seed is made of.
    """

    def __init__(
        self,
        workload: WorkloadModel,
        number: int,
        seed: int,
        judge: ActorHandle,
        gateway: ActorHandle,
        config: JudgeConfig,
    ) -> None:
        self._workload = workload
        self._number = number
        self._seed = seed
        self._judge = judge
        self._gateway = gateway
        self._config = config
        self._sent = 0
        self._answered = 0
        self._emit: Callable[..., None]

    async def start(self) -> None:
        self._emit = backend().emit

    async def run(self) -> ClientReport:
        """Judge every case in every arm, and report."""
        from sim.random import Streams  # the draws are the same in both worlds

        workload = self._workload
        assert workload.arrivals is not None and workload.arrivals.judgements is not None
        asked = workload.arrivals.judgements
        await wait_to_begin(workload)
        streams = Streams(self._seed)
        prefix = f"workload.{self._number}."
        length, most = sizes(workload, lambda name: streams.stream(prefix + name))
        below = streams.stream(prefix + "cases").below
        cases: list[Case] = [
            (f"{'pos' if case < asked.cases / 2 else 'neg'}-{case:02d}",
             tuple(_FIRST_ID + below(_IDS) for _ in range(length())), most())
            for case in range(asked.cases)
        ]  # fmt: skip
        while await self._routable() < asked.replicas:
            await asyncio.sleep(_LOOK_S)
        for arm in asked.arms:
            self._emit("judge.arm", service=workload.service, arm=arm, what="began", workload=self._number)
            waiting = iter(cases)
            async with asyncio.TaskGroup() as group:
                for worker in range(min(asked.at_once, asked.cases)):
                    group.create_task(self._work(waiting, arm, asked), name=f"judging-{worker}")
            self._emit("judge.arm", service=workload.service, arm=arm, what="ended", workload=self._number)
        return ClientReport(self._sent, self._answered)

    async def _routable(self) -> int:
        return sum(view.routable for view in await self._gateway.engines())

    async def _work(self, waiting: Iterator[Case], arm: str, asked: JudgementsModel) -> None:
        for case, ids, most in waiting:  # one iterator, which the workers share
            for _ in range(asked.repeats):
                await self._one(case, ids, most, arm, asked)

    async def _one(self, case: str, ids: tuple[int, ...], most: int, arm: str, asked: JudgementsModel) -> None:
        emit, name = self._emit, backend().new_id("req")
        temperature = 0.0 if arm == "greedy" else float(asked.temperature)
        emit(
            "judge.asked",
            request=name,
            service=self._workload.service,
            case=case,
            arm=arm,
            workload=self._number,
            temperature=temperature,
            seed=asked.seed,
            content=content_hash(self._config, ids, temperature, most),
        )
        emit("request.sent", request=name, prompt_tokens=len(ids), max_new_tokens=most, idempotent=True)
        self._sent += 1
        call = JudgeCall(name, ids, temperature=temperature, max_new_tokens=most, seed=asked.seed)
        try:
            async with asyncio.timeout(self._workload.patience_s):
                reply: JudgeReply = await self._judge.judge(call)
        except SeatrialError as error:
            record_error(emit, name, error, attempts=1)
            return
        except TimeoutError:
            record_gave_up(emit, name)
            return
        emit(
            "judge.replied",
            request=name,
            case=case,
            arm=arm,
            workload=self._number,
            verdict=verdict_of(reply),
            finish_reason=reply.finish_reason,
            reply_hash=hashlib.sha256(json.dumps(reply.output_ids).encode()).hexdigest()[:16],
            replica=reply.engine,
            replica_inc=reply.engine_incarnation,
        )
        record_answer(emit, name, reply)
        self._answered += 1


def verdict_of(reply: JudgeReply) -> int | None:
    """1 or 0, by the first token of the reply: no engine here has a model that would write either. None: no token."""
    return reply.output_ids[0] % 2 if reply.output_ids else None


def content_hash(config: JudgeConfig, ids: tuple[int, ...], temperature: float, most: int) -> str:
    """SHA-256 of the canonical JSON that a seed is made of. Written once more, so that an ingress is not believed."""
    sampling = {
        "max_new_tokens": most,
        "temperature": temperature,
        "top_k": -1 if config.top_k is None else config.top_k,
        "top_p": config.top_p,
    }
    content = {"input_ids": list(ids), "model": config.model_path, "sampling": sampling}
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
