"""A gateway and entrypoints known to be wrong. A sweep runs them first: if nobody notices, it proves nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import AsyncGenerator

from protocol.messages import ForwardReply, ForwardRequest, GenerateRequest, GenerateResult, HttpHead, RawRequest
from protocol.ports import data_call
from protocol.serving.entrypoint import Entrypoint, TurnResult
from protocol.serving.gateway import Gateway
from protocol.serving.session_server import SessionServer

CAUGHT_BY = "answer_is_the_engines"
"""The check that must fail."""


COMPONENTS = {
    "gateway": "scenarios.canary:CanaryGateway",
    "entrypoint": "scenarios.canary:CanaryEntrypoint",
    "session_server": "scenarios.canary:CanarySessionServer",
}
"""What stands in the place of ours; requests go through the first, turns of agents through one of the others."""

_COUNT = re.compile(rb'"(completion|output)_tokens": (\d+)')


class CanaryGateway(Gateway):
    """Tells the client of one token more than the engine made."""

    @data_call
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """As the gateway, but for the count."""
        result = await super().generate(request)
        return dataclasses.replace(result, completion_tokens=result.completion_tokens + 1)

    @data_call
    async def forward(self, request: ForwardRequest) -> ForwardReply:
        """As the gateway, but for the count that SGLang's own answers have."""
        reply = await super().forward(request)
        try:
            answer = json.loads(reply.body)
            answer["meta_info"]["completion_tokens"] += 1
        except (ValueError, KeyError, TypeError):
            return reply  # another shape
        return dataclasses.replace(reply, body=json.dumps(answer))


class CanaryEntrypoint(Entrypoint):
    """Tells the agent of one token more than the engine made."""

    @data_call
    async def generate(self, request: GenerateRequest) -> TurnResult:
        """As the entrypoint, but for the count."""
        turn = await super().generate(request)
        told = dataclasses.replace(turn.result, completion_tokens=turn.result.completion_tokens + 1)
        return dataclasses.replace(turn, result=told)


class CanarySessionServer(SessionServer):
    """Tells the agent of one token more than the engine made."""

    @data_call
    async def http(self, request: RawRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        """As the session server, but for the count."""
        async for piece in super().http(request):
            if isinstance(piece, bytes):
                piece = _COUNT.sub(lambda found: b'"%s_tokens": %d' % (found[1], int(found[2]) + 1), piece)
            yield piece
