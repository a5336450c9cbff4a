"""Serves the protocol layer's HTTP handlers with aiohttp (handlers: `protocol.serving.http`).

Loopback unless told otherwise; any other address needs a bearer token. A client that goes away cancels its handler,
and with it what was forwarded. Stopping: nothing new is accepted, what is in flight may finish for a bounded time,
the rest is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Iterator, MutableMapping
from typing import Annotated, Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from protocol.config import HttpConfig, Seconds, SecondsOrNone
from protocol.ports import ActorHandle
from protocol.serving.gateway_api import GatewayApi
from protocol.serving.http import PROMETHEUS, HttpAnswer, HttpRequest, HttpStream, Refusal, Routes
from real.hosts import is_loopback
from real.http_metrics import HttpMetrics, Seen

_SHORTEST_TOKEN = 16
_CHUNK_FRAMING = 32  # bytes around a piece of an answer whose length is not known before, at most
_CLOSE_S = 1.0  # for aiohttp to close what has been cancelled, and for a client to stop sending a refused body


class _WithoutTraces(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log, without the stack where the fault is the client's: whoever reaches the port could fill the log."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        if isinstance(kwargs.get("exc_info"), (HttpProcessingError, web.RequestPayloadError)):
            return msg, {**kwargs, "exc_info": None}
        return msg, kwargs


class PortTaken(Exception):
    """The address cannot be bound; nothing was started."""


class ClientStalled(Exception):
    """A client does not read what it is sent; its connection has been cut off."""


class ServerSettings(BaseModel):
    """Where to serve, and for whom."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free one."""
    token: SecretStr = SecretStr("")
    """What a client must bring as ``Authorization: Bearer ...``. Empty: none, on loopback only."""
    shutdown_grace_s: SecondsOrNone = 30.0
    """How long what is in flight may go on once the server is asked to stop."""
    body_timeout_s: Seconds = 60.0
    """For a client to send a whole body."""
    head_timeout_s: Seconds = 30.0
    """From a connection's beginning, or from when the last whole answer was given to it, to the next request's head."""
    write_timeout_s: Seconds = 60.0
    """For a client to make room for the next piece of a streamed answer: one that does not read holds no stream, and
    nothing that was forwarded for it, for longer. As much is added to ``head_timeout_s`` for one that reads nothing
    more of the end of an answer."""

    @model_validator(mode="after")
    def _guarded(self) -> ServerSettings:
        token = self.token.get_secret_value()
        if not token and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines and needs a token; give one or use 127.0.0.1"
            )
        if token and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
            raise ValueError(f"token: at least {_SHORTEST_TOKEN} printable ASCII characters without spaces")
        return self


class _Idle(NamedTuple):
    """A connection without a request in hand: since when nothing of its last answer is taken, and bytes left of it."""

    since: float
    untaken: int


class HttpServer:
    """One listening address in front of a table of handlers.

    Args:
        routes: answers every request.
        settings: address, token, bounds of time.
    """

    def __init__(self, routes: Routes, settings: ServerSettings) -> None:
        self._routes = routes
        self._settings = settings
        self._metrics = HttpMetrics(routes.paths)
        self._open: dict[asyncio.Task[Any], Any] = {}  # to the connection that it answers
        self._runner: web.AppRunner | None = None
        self._closing: asyncio.Task[None] | None = None
        self._idle: dict[Any, _Idle] = {}  # by connection

    async def start(self) -> tuple[str, int]:
        """Listen; returns (host, port). Raises PortTaken."""
        settings = self._settings
        app = web.Application(client_max_size=self._routes.max_body_bytes + 1)  # aiohttp refuses one that is as long
        app.router.add_route("*", "/{path:(?s:.*)}", self._handle)  # a line break may be in a path
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S, lingering_time=_CLOSE_S,
            logger=_WithoutTraces(logging.getLogger("aiohttp.server"), {}),
        )  # fmt: skip
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, settings.port, backlog=1024).start()
        except (OSError, UnicodeError) as error:  # the latter: a name that no host has
            await runner.cleanup()
            why = error.strerror if isinstance(error, OSError) else error
            raise PortTaken(f"cannot listen on {settings.host}:{settings.port}: {why}") from error
        self._runner = runner
        self._closing = asyncio.get_running_loop().create_task(self._close_the_idle(), name="close-idle-connections")
        host, port, *_ = runner.addresses[0]
        return host, port

    async def stop(self) -> None:
        """Stop accepting, let what is in flight finish for ``shutdown_grace_s``, cancel the rest. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if self._closing is not None:
            self._closing.cancel()
        for site in list(runner.sites):
            await site.stop()
        await asyncio.sleep(0)  # a request that had just arrived counts as in flight
        assert runner.server is not None
        runner.server.pre_shutdown()  # connections take no further request; aiohttp leaves the idle ones open
        busy = set(self._open.values())
        for connection in runner.server.connections:
            if connection not in busy and connection.transport is not None:
                connection.transport.close()
        if self._open:
            _, late = await asyncio.wait(self._open, timeout=self._settings.shutdown_grace_s)
            for task in late:
                task.cancel()
        await runner.cleanup()

    async def _close_the_idle(self) -> None:
        """Close connections on which no whole head comes. aiohttp has no bound for the first one, nor for slow ones."""
        limit_s = self._settings.head_timeout_s
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            assert self._runner is not None and self._runner.server is not None  # stop() ends this first
            busy = set(self._open.values())
            idle = [connection for connection in self._runner.server.connections if connection not in busy]
            self._idle = {connection: self._looked_at(connection, now()) for connection in idle}
            for connection, (since, _) in self._idle.items():
                if now() - since < limit_s or connection.transport is None:
                    continue
                connection.transport.close()  # once it has read the last answer to it
                if now() - since >= limit_s + self._settings.write_timeout_s:
                    connection.transport.abort()

    def _looked_at(self, connection: Any, now: float) -> _Idle:
        """An idle connection as it is now. The time of one that reads begins anew, however slowly it does."""
        untaken = 0 if connection.transport is None else connection.transport.get_write_buffer_size()
        before = self._idle.get(connection)
        return _Idle(now if before is None or untaken < before.untaken else before.since, untaken)

    @contextlib.contextmanager
    def _in_hand(self, raw: web.Request) -> Iterator[None]:
        """As long as a request is being answered: its connection is not idle, and the server's end waits for it."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = raw.protocol
        self._idle.pop(raw.protocol, None)  # a request between two looks begins the time anew
        try:
            yield
        finally:
            del self._open[task]

    async def _handle(self, raw: web.Request) -> web.StreamResponse:
        with self._in_hand(raw), self._metrics.request(self._routes.route_of(raw.path)) as seen:
            answer = await self._answer(raw)
            if isinstance(answer, HttpStream):
                return await self._send_stream(raw, answer, seen)
            seen.status = answer.status
            return _whole(answer)

    async def _answer(self, raw: web.Request) -> HttpAnswer | HttpStream:
        try:
            self._check_token(raw)
            body = await self._body(raw)
        except Refusal as refusal:
            raw.protocol.keep_alive(False)  # the body may not have been read
            return self._routes.at(raw.path).failed(refusal, repeatable=True)
        headers = tuple((name.lower(), value) for name, value in raw.headers.items())
        query = tuple(raw.query.items())
        answer = await self._routes.handle(HttpRequest(raw.method, raw.path, headers, body, query))
        if isinstance(answer, HttpAnswer) and answer.content_type == PROMETHEUS and answer.status == 200:
            try:
                return self._metrics.page(answer.body)
            except ValueError as error:  # a page of a component of the user's
                return self._routes.at(raw.path).failed(error, repeatable=True)
        return answer

    def _check_token(self, raw: web.Request) -> None:
        token = self._settings.token.get_secret_value()
        if not token:
            return
        given = raw.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise Refusal(
                401, "Authorization: Bearer with the token is needed", "authentication_error",
                (("WWW-Authenticate", "Bearer"),),
            )  # fmt: skip

    async def _body(self, raw: web.Request) -> bytes:
        if raw.content_length is not None and raw.content_length > self._routes.max_body_bytes:
            raise self._routes.too_long()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await raw.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._routes.too_long() from None
        except (HttpProcessingError, web.RequestPayloadError) as error:  # no gzip though it says so, a broken chunk
            said = " ".join(str(error).split()).removeprefix("400, message: ")
            raise Refusal(400, f"the body cannot be read: {said}", "invalid_request_error") from None
        except TimeoutError:
            waited = self._settings.body_timeout_s
            raise Refusal(408, f"the body did not arrive within {waited:g} s", "request_timeout") from None

    async def _send_stream(self, raw: web.Request, answer: HttpStream, seen: Seen) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        async with contextlib.aclosing(answer.events) as events:
            await response.prepare(raw)
            try:
                async for event in events:
                    data = "".join(f"data: {line}\n" for line in event.split("\n")).encode() + b"\n"
                    await self._write(raw, response, data)
                await self._taken(raw, response.write_eof())
                seen.status = answer.status
            except ClientStalled:
                pass  # as with one that has gone: there is nobody to tell
        return response

    async def _write(self, raw: web.Request, response: web.StreamResponse, piece: bytes) -> None:
        """Send a piece of an answer. Waits while the client reads slowly, so that few are ever kept for it.

        Raises:
            ClientStalled: as of :meth:`_taken`.
        """
        if _has_room(raw, len(piece)):
            await response.write(piece)  # waits for nobody then: a clock for each event would be for nothing
        else:
            await self._taken(raw, response.write(piece))

    async def _taken(self, raw: web.Request, sending: Awaitable[None]) -> None:
        """Send what may have to wait for the client.

        Raises:
            ClientStalled: for ``write_timeout_s`` it made no room for it.
        """
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await sending
        except TimeoutError:
            if raw.transport is not None:
                raw.transport.abort()
            raise ClientStalled from None


def _has_room(raw: web.Request, size: int) -> bool:
    """Whether nobody waits on a connection, and a piece of so many bytes leaves it below the mark above which one does.

    Who waits does so until it is below a lower mark.
    """
    transport = raw.transport
    if transport is None or raw.protocol.writing_paused:
        return False
    _, high = transport.get_write_buffer_limits()
    return transport.get_write_buffer_size() + size + _CHUNK_FRAMING <= high


def _whole(answer: HttpAnswer) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body.encode(), headers=dict(answer.headers))
    response.headers["Content-Type"] = answer.content_type
    return response


class HttpFront:
    """A gateway's HTTP API as an actor: it listens on the node it runs on.

    Args:
        settings: where to listen.
        config: bounds of the handlers.
        gateway: handle of the Gateway.
    """

    def __init__(self, settings: ServerSettings, config: HttpConfig, gateway: ActorHandle) -> None:
        self._server = HttpServer(GatewayApi(config, gateway).routes, settings)
        self._address = ("", 0)

    async def start(self) -> None:
        self._address = await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def address(self) -> tuple[str, int]:
        """(host, port) where it listens."""
        return self._address
