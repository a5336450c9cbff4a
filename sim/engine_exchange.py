"""HTTP exchanges with a simulated engine as bytes: what a proxy sends and gets (``EngineClient.exchange``).

The engine's routes are those of the other calls; here their answers become the bytes that SGLang would send. A streamed
answer comes in pieces that know nothing of events: some end in the middle of one, as on a real connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from protocol.errors import HttpError
from protocol.messages import AdminReply, HttpHead, RawRequest, WeightUpdate
from sim.engine_anthropic import ROUTE as MESSAGES
from sim.engine_calls import ROUTES, bad_body
from sim.engine_json import BadBody, event_text, json_object

if TYPE_CHECKING:
    from sim.engine_client import EngineClientPort
    from sim.random import Stream

Headers = tuple[tuple[str, str], ...]

JSON_HEADERS: Headers = (("content-type", "application/json"),)
STREAM_HEADERS: Headers = (("content-type", "text/event-stream; charset=utf-8"),)
_TEXT_HEADERS: Headers = (("content-type", "text/plain; charset=utf-8"),)
_UPDATE = "/update_weights_from_disk"


async def exchange(
    client: EngineClientPort, request: RawRequest, connect_timeout_s: float | None, read_timeout_s: float | None
) -> AsyncGenerator[HttpHead | bytes, None]:
    """The pieces of an answer. Raises as ``EngineClient.exchange``."""
    answer: tuple[int, Headers, bytes]
    path, limits = request.path, {"connect_timeout_s": connect_timeout_s, "read_timeout_s": read_timeout_s}
    if request.method == "GET":
        status, text = await client.get(path, **limits)
        headers = _TEXT_HEADERS if path == "/metrics" else JSON_HEADERS
        answer = status, headers, text.encode()
    elif request.method != "POST":
        answer = 405, JSON_HEADERS, b'{"detail":"Method Not Allowed"}'
    else:
        try:
            body = json_object(request.body)
        except BadBody as error:
            status, document = bad_body(path, error, stream=False)
            answer = status, JSON_HEADERS, json.dumps(document).encode()
        else:
            if path in ROUTES and body.get("stream"):
                async with contextlib.aclosing(_streamed(client, path, request.body, limits)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            answer = await _posted(client, path, body, request.body, limits)
    status, headers, raw = answer
    yield HttpHead(status, (*headers, ("content-length", str(len(raw)))))
    if raw:
        yield raw


async def _posted(
    client: EngineClientPort, path: str, body: dict[str, Any], raw: bytes, limits: dict[str, float | None]
) -> tuple[int, Headers, bytes]:
    if path in ROUTES:
        try:
            return 200, JSON_HEADERS, (await client.forward(path, raw.decode(), **limits)).encode()
        except HttpError as error:
            return error.fields["status"], JSON_HEADERS, error.fields["body"].encode()
    if path == _UPDATE:
        update = WeightUpdate(
            str(body.get("model_path", "")),
            str(body.get("weight_version") or ""),
            bool(body.get("flush_cache", True)),
            bool(body.get("abort_all_requests", False)),
        )
        reply: AdminReply = await client.update_weights(update, **limits)
    else:
        reply = await client.post(path, body, **limits)
    text = reply.body
    if not text.startswith("{"):
        text = json.dumps({"success": reply.success, "message": text})
    return reply.status, JSON_HEADERS, text.encode()


async def _streamed(
    client: EngineClientPort, path: str, raw: bytes, limits: dict[str, float | None]
) -> AsyncGenerator[HttpHead | bytes, None]:
    cut = Cutter(client.cuts())
    begun = False
    try:
        async with contextlib.aclosing(client.forward_stream(path, raw.decode(), **limits)) as events:
            async for event in events:
                if not begun:
                    begun = True
                    yield HttpHead(200, STREAM_HEADERS)
                for piece in cut.feed(event_text(event, named=path == MESSAGES).encode()):
                    yield piece
                await asyncio.sleep(0)  # what was read in one go need not be handled in one go
    except HttpError as error:  # before the first event, with a status
        body = error.fields["body"].encode()
        yield HttpHead(error.fields["status"], (*JSON_HEADERS, ("content-length", str(len(body)))))
        yield body
    if rest := cut.rest():
        yield rest


class Cutter:
    """Cuts the bytes of events where a connection might: two of three pieces end inside an event."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._kept = b""

    def feed(self, event: bytes) -> list[bytes]:
        """The piece that goes now, if any; the rest goes with the next."""
        whole = self._kept + event
        at = len(whole)
        if self._stream.below(3):
            at -= self._stream.below(len(event))
        piece, self._kept = whole[:at], whole[at:]
        return [piece] if piece else []

    def rest(self) -> bytes:
        rest, self._kept = self._kept, b""
        return rest
