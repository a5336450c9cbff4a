"""The judge's ingress: a judgement is asked for here, and leaves as a generation with a seed of its own content.

Source: scaling.md 8. Defaults are merged first (the contract's, then the instance's, then the request's), so that the
seed is of what is really sampled. The answer names the replica that gave it.
"""

from __future__ import annotations

import json

from protocol.config import JudgeConfig
from protocol.errors import HttpError
from protocol.messages import ForwardReply, ForwardRequest, message
from protocol.ports import ActorHandle, data_call
from protocol.serving.determinism import Sampling, check_sampling, effective, request_seed

ROUTE = "/generate"


@message
class JudgeCall:
    """One judgement to be made. None: the default. ``seed``: the caller's own, which always wins."""

    request_id: str
    input_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None


@message
class JudgeReply:
    """What the judge said, and who was asked. ``finish_reason``: ``stop``, ``length`` (cut off) or ``abort``."""

    output_ids: tuple[int, ...]
    finish_reason: str
    completion_tokens: int
    weight_version: str
    engine: str
    engine_incarnation: int
    attempts: int


class Judge:
    """Asks a gateway's replicas for judgements. An actor.

    Args:
        config: model path and the instance's own sampling.
        gateway: handle of the Gateway of the judges.
    """

    def __init__(self, config: JudgeConfig, gateway: ActorHandle) -> None:
        self._config = config
        self._gateway = gateway

    @data_call
    async def judge(self, call: JudgeCall) -> JudgeReply:
        """Judge one input.

        Raises:
            HttpError: 400, *not done*, for sampling that nothing can repeat; 502, *unknown*, for an answer that cannot
                be read.
            NetworkError, NoReplica: as of the gateway.
        """
        sampling = self.effective(call)
        check_sampling(sampling, call.min_p or 0.0)
        parameters = sampling.as_sent(self.seed_of(call, sampling))
        body = {"rid": call.request_id, "input_ids": list(call.input_ids), "sampling_params": parameters}
        request = ForwardRequest(call.request_id, ROUTE, json.dumps(body, separators=(",", ":")))
        reply: ForwardReply = await self._gateway.forward(request)
        return _read(reply)

    def effective(self, call: JudgeCall) -> Sampling:
        """The sampling of a call with every default merged in: the request's over the instance's."""
        asked = {name: getattr(call, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
        return effective(self._config, asked)

    def seed_of(self, call: JudgeCall, sampling: Sampling) -> int | None:
        """The seed that goes along; None: none."""
        return request_seed(self._config.model_path, call.input_ids, sampling, call.seed)


def _read(reply: ForwardReply) -> JudgeReply:
    try:
        answer = json.loads(reply.body)
        meta = answer["meta_info"]
        return JudgeReply(
            tuple(int(token) for token in answer["output_ids"]),
            str(meta["finish_reason"]["type"]),
            int(meta["completion_tokens"]),
            str(meta.get("weight_version", "")),
            reply.engine,
            reply.engine_incarnation,
            reply.attempts,
        )
    except (ValueError, KeyError, TypeError) as error:
        text = f"{reply.engine} answered what is no generation ({type(error).__name__}: {error})"
        raise HttpError(status=502, body=text) from None
