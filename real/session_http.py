"""Serves a session server's handlers with aiohttp: bytes in, bytes out (handlers: `protocol.serving.session_server`).

Address, token and the end are those of every server here (`real.http_server`). A client that goes away ends the
reading of its answer; what the session server makes of that is its own affair.
"""

from __future__ import annotations

import contextlib
import json

from aiohttp import web

from protocol.errors import NetworkError
from protocol.messages import HttpHead, RawRequest
from protocol.ports import ActorHandle
from protocol.serving.formats import format_of
from protocol.serving.http import Refusal, Routes, status_of
from real.http_metrics import Seen
from real.http_server import ClientStalled, HttpServer, ServerSettings

_FRAMING = ("content-length", "transfer-encoding", "connection")


class SessionFront(HttpServer):
    """One listening address in front of one session server. An actor.

    Args:
        settings: where to listen, and with which token; a token is taken out of what is forwarded.
        server: handle of the SessionServer.
        max_body_bytes: of a request; a longer one is refused with 413.
    """

    def __init__(self, settings: ServerSettings, server: ActorHandle, max_body_bytes: int) -> None:
        super().__init__(Routes({}, max_body_bytes=max_body_bytes, retry_after_s=1), settings)
        self._server = server
        self._own_token = bool(settings.token.get_secret_value())
        self._address = ("", 0)

    async def start(self) -> tuple[str, int]:
        self._address = await super().start()
        return self._address

    async def address(self) -> tuple[str, int]:
        """(host, port) where it listens."""
        return self._address

    async def _handle(self, raw: web.Request) -> web.StreamResponse:
        with self._in_hand(raw), self._metrics.request(raw.path) as seen:
            try:
                self._check_token(raw)
                if not raw.raw_path.startswith("/"):  # what it is appended to would be another address
                    said = "the target of a request must be a path that begins with '/'"
                    raise Refusal(400, said, "invalid_request_error")
                body = await self._body(raw)
            except Refusal as refusal:
                raw.protocol.keep_alive(False)  # the body may not have been read
                seen.status = refusal.status
                return _refused(raw.path, refusal)
            return await self._relay(raw, body, seen)

    async def _relay(self, raw: web.Request, body: bytes, seen: Seen) -> web.StreamResponse:
        # The body was decoded here; forwarded with that header it would be decoded once more.
        dropped = ("content-encoding", *(("authorization",) if self._own_token else ()))
        headers = tuple((name, value) for name, value in raw.headers.items() if name.lower() not in dropped)
        request = RawRequest(raw.method, raw.raw_path, headers, body)
        async with contextlib.aclosing(self._server.http(request)) as pieces:
            head = await anext(pieces)
            response = _begun(head)
            await response.prepare(raw)
            try:
                async for piece in pieces:
                    await self._write(raw, response, piece)
                await self._taken(raw, response.write_eof())
                seen.status = response.status
            except NetworkError as error:
                seen.status = status_of(error)
                # The backend broke off: so must this connection, or the body would look whole.
                if raw.transport is not None:
                    raw.transport.abort()
            except ClientStalled:
                pass  # as with one that has gone: there is nobody to tell
        return response


def _begun(head: HttpHead) -> web.StreamResponse:
    response = web.StreamResponse(status=head.status)
    for name, value in head.headers:
        if name.lower() not in _FRAMING:
            response.headers.add(name, value)
    length = head.header("content-length")
    if length.isdigit():
        response.content_length = int(length)
    return response


def _refused(path: str, refusal: Refusal) -> web.Response:
    """A refusal of the server itself, in the format of its path."""
    body = json.dumps(format_of(path).error(refusal.status, str(refusal)))
    return web.Response(
        status=refusal.status, text=body, content_type="application/json", headers=dict(refusal.headers)
    )
