"""The gateway's HTTP API: what SGLang's clients, OpenAI's clients and a metrics scraper ask of it.

| route | what |
| --- | --- |
| POST /generate, /v1/chat/completions, /v1/completions | forwarded to a replica, streamed with ``"stream": true`` |
| GET /v1/models | the answer of a replica |
| GET /health | 200 as long as the gateway answers |
| GET /ready | 200 with a routable replica, else 503 |
| GET /engines | every replica with its counters |
| GET /metrics | Prometheus text |

A replica is picked, counted and retried by the gateway as for any other caller (scaling.md 5.1).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from protocol.config import HttpConfig
from protocol.errors import NoReplica
from protocol.messages import ForwardReply, ForwardRequest
from protocol.ports import ActorHandle, backend
from protocol.serving.gateway import ReplicaView
from protocol.serving.gateway_bodies import GATEWAY_ROUTES, AliveBody, ReadyBody, ReplicasBody
from protocol.serving.http import (
    ONCE,
    PROMETHEUS,
    HttpAnswer,
    HttpRequest,
    HttpStream,
    Refusal,
    Routes,
    bad_request,
    json_answer,
    json_object,
)

_LONGEST_RID = 200


class GatewayApi:
    """The handlers in front of one gateway.

    Args:
        config: bounds.
        gateway: handle of the Gateway, or of a component of the user's own with the same methods.
    """

    def __init__(self, config: HttpConfig, gateway: ActorHandle) -> None:
        self._gateway = gateway
        self.routes = Routes(
            {(route.method, route.path): getattr(self, f"_{route.handler}") for route in GATEWAY_ROUTES},
            max_body_bytes=config.max_body_bytes,
            retry_after_s=config.retry_after_s,
        )

    async def handle(self, request: HttpRequest) -> HttpAnswer | HttpStream:
        """Answer a request (:meth:`protocol.serving.http.Routes.handle`). Cancelling it cancels what it forwarded."""
        return await self.routes.handle(request)

    async def _forward(self, request: HttpRequest) -> HttpAnswer | HttpStream:
        call, stream = forwarded(request)
        if stream:
            return HttpStream(self._ask("forward_stream", call))
        reply: ForwardReply = await self._ask_and_cancel("forward", call)
        return HttpAnswer(
            200,
            reply.body,
            headers=(
                ("x-seatrial-replica", f"{reply.engine}/{reply.engine_incarnation}"),
                ("x-seatrial-attempts", str(reply.attempts)),
            ),
        )

    async def _models(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, await self._ask_and_cancel("models"))

    async def _health(self, request: HttpRequest) -> HttpAnswer:
        await self._ask_and_cancel("roster")
        return json_answer(dataclasses.asdict(AliveBody("ok")))

    async def _ready(self, request: HttpRequest) -> HttpAnswer:
        views: tuple[ReplicaView, ...] = await self._ask_and_cancel("engines")
        routable = sum(view.routable for view in views)
        if not routable:
            raise NoReplica(f"none of {len(views)} replicas is routable")
        return json_answer(dataclasses.asdict(ReadyBody("ready", routable)))

    async def _engines(self, request: HttpRequest) -> HttpAnswer:
        views: tuple[ReplicaView, ...] = await self._ask_and_cancel("engines")
        return json_answer(dataclasses.asdict(ReplicasBody(list(views))))

    async def _metrics(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, await self._ask_and_cancel("metrics"), PROMETHEUS)

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            asked = getattr(self._gateway, method)
        except AttributeError:
            text = f"gateway {self._gateway.name} has no method {method!r}, which this route needs"
            raise Refusal(501, text, "not_implemented") from None
        return asked(*args)

    async def _ask_and_cancel(self, method: str, *args: Any) -> Any:
        """Giving up the wait does not stop a callee; a client that has gone wants no answer, so it is asked to stop."""
        call = self._ask(method, *args)
        try:
            return await call
        except asyncio.CancelledError:
            self._gateway.cancel(call)
            raise


def forwarded(request: HttpRequest) -> tuple[ForwardRequest, bool]:
    """What is sent to a replica for a client's request, and whether its answer is streamed. Raises Refusal (400).

    The client's ``rid`` is kept. A request for one completion without it gets an id of ours, of fixed width.
    """
    body = json_object(request)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request(f"stream must be true or false, not {json.dumps(stream)[:50]}")
    rid = body.get("rid")
    text = request.body.decode("utf-8")
    if rid is None:
        rid = backend().new_id("http")
        if not _many(body):
            text = json.dumps({**body, "rid": rid})
    elif isinstance(rid, list) and _many(body):
        rid = backend().new_id("http")  # one for evidence; the engine gets the client's, one a completion
    elif not (isinstance(rid, str) and 0 < len(rid) <= _LONGEST_RID and rid.isprintable()):
        raise bad_request(f"rid must be a printable string of 1 to {_LONGEST_RID} characters")
    once = request.header(ONCE, "true").lower()
    if once not in ("true", "false"):
        raise bad_request(f"header {ONCE} must be true or false")
    return ForwardRequest(rid, request.path, text, once == "true"), stream is True


def _many(body: dict[str, Any]) -> bool:
    """Whether a body asks for several completions: several prompts, or several of one."""
    sampling = body.get("sampling_params")
    n = sampling.get("n") if isinstance(sampling, dict) else body.get("n")
    if isinstance(sampling, list) or n not in (None, 1):
        return True
    for key in ("text", "input_ids", "prompt"):
        value = body.get(key)
        if isinstance(value, list) and not all(isinstance(token, int) for token in value):
            return True
    return False
