"""The ``EngineClient`` port towards an engine that is not of this run: its HTTP API as SGLang has it, nothing added."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp

from protocol.errors import ConnectionLost, HttpError
from protocol.messages import (
    AdminReply,
    EngineAddress,
    GenerateRequest,
    GenerateResult,
    HttpHead,
    RawRequest,
    VersionSpan,
    WeightUpdate,
)
from real.engines import bodies
from real.http_call import get_text, post_stream, post_text, raw


class PlainEngineClient:
    """Calls one engine; a connection each.

    Args:
        session: from ``real.http_call.new_session``.
        address: of the engine.
    """

    def __init__(self, session: aiohttp.ClientSession, address: EngineAddress) -> None:
        self._session = session
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._url = f"http://{host}:{address.port}"

    @property
    def address(self) -> EngineAddress:
        return self._address

    async def generate(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> GenerateResult:
        body = bodies.generation(request, stream=False)
        text = await self.forward("/generate", body, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s)
        return self._result(request, _answer("/generate", text)["meta_info"])

    async def stream(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AsyncIterator[int]:
        body = bodies.generation(request, stream=True)
        events = self.forward_stream(
            "/generate", body, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if event != "[DONE]":
                    answer = _answer("/generate", event)
                    if "error" in answer:
                        raise HttpError(status=int(answer["error"].get("code") or 500), body=event)
                    yield int(answer["meta_info"]["completion_tokens"])

    async def post(
        self,
        route: str,
        body: dict[str, Any],
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AdminReply:
        try:
            text = await self.forward(
                route, json.dumps(body), connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
            )
            status = 200
        except HttpError as error:
            status, text = error.fields["status"], error.fields["body"]
        return bodies.admin_reply(status, text)

    async def update_weights(
        self, update: WeightUpdate, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AdminReply:
        return await self.post(
            "/update_weights_from_disk",
            bodies.weight_update(update),
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
        )

    async def get(
        self, route: str, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> tuple[int, str]:
        return await get_text(
            self._session, self._url + route, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
        )

    async def forward(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> str:
        return await post_text(
            self._session, self._url + route, body, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
        )

    def forward_stream(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[str, None]:
        return post_stream(
            self._session, self._url + route, body, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
        )

    def exchange(
        self,
        request: RawRequest,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[HttpHead | bytes, None]:
        return raw(
            self._session, self._url, request, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
        )

    def _result(self, request: GenerateRequest, meta: dict[str, Any]) -> GenerateResult:
        finish: dict[str, Any] = meta.get("finish_reason") or {}
        return GenerateResult(
            request.request_id,
            str(finish.get("type", "")),
            int(meta["prompt_tokens"]),
            int(meta["completion_tokens"]),
            int(meta.get("cached_tokens") or 0),
            str(meta.get("weight_version", "")),
            tuple(
                VersionSpan(str(span["version"]), int(span["start"]), int(span["end"]))
                for span in meta.get("weight_versions") or ()
            ),
            int(meta.get("num_retractions") or 0),
            float(meta.get("queue_time") or 0.0),
            e2e_latency_s=float(meta.get("e2e_latency") or 0.0),
            engine=self._address.name,
            engine_incarnation=self._address.incarnation,
        )


def _answer(route: str, text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise ConnectionLost(f"{route}: the answer is no JSON: {error}") from None
    if not isinstance(answer, dict):
        raise ConnectionLost(f"{route}: the answer is no JSON object")
    return answer
