"""The public address of one engine: forwards to the engine's private port, and records what passes.

The front is the world's eye. Each event is written before the effect that it reports: ``engine.accepted`` before a
request is forwarded, ``engine.finished`` before its answer is relayed. What comes while the engine is stopped waits
here, as it would in the engine's kernel, and is accepted when it goes on. Nothing is listened to before the engine's
own port accepts, so that a caller is refused until then, as it would be by the engine. Every call has a connection of
its own, to the front and on to the engine, and both break when the engine does. A connection that was idle before is
another matter: an engine that was stopped for longer than it keeps idle ones (uvicorn: 5 s) closes it as soon as it
goes on, the request in it unread (on uvloop, which looks at timers first; seen).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from real.engines import headers
from real.engines.generations import ROUTES, Generations
from real.engines.inbound import Inbound
from real.engines.posts import Posts
from real.engines.served import Served
from real.engines.traffic import Message, Traffic
from real.evidence import ProcessLog
from real.hosts import is_loopback

_LOG = logging.getLogger(__name__)
_BODY_BYTES = 256 << 20  # a prompt of a million tokens is 7 MB; anything near this is no request
_BACKLOG = 4096
_STOPPED_LOOK_S = 0.02


class Front:
    """The HTTP server in front of one engine process.

    Args:
        log: of the engine, under whose name everything is recorded.
        port: the engine's private port on 127.0.0.1.
        served: the weights that it starts with.
        storage: folder that stands for the shared storage.
        traffic: what may happen to messages.
        became_ready: called when /ready first answers 200, before anybody hears of it.
        in_flight_changed: called with the number of generations in flight.
        is_stopped: whether the engine's main process is stopped now.
        tells_sampling: record how each call is sampled.
        token: what every call must bring; empty: nothing, which is for loopback alone.
    """

    def __init__(
        self,
        log: ProcessLog,
        *,
        port: int,
        served: Served,
        storage: str,
        traffic: Traffic,
        became_ready: Callable[[], None],
        in_flight_changed: Callable[[int], None],
        is_stopped: Callable[[], bool],
        tells_sampling: bool = False,
        token: str = "",
    ) -> None:
        self._log = log
        self._traffic = traffic
        self.served = served
        self._became_ready = became_ready
        self._is_stopped = is_stopped
        self._token = token.encode()
        self._engine = headers.process_text(log.actor, log.incarnation)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers={"Accept-Encoding": "identity"},  # a page that a fault is to change must be text
            auto_decompress=False,
            read_bufsize=1 << 20,
        )
        self._generations = Generations(
            log, self._session, served, traffic, self.keep, in_flight_changed, tells_sampling
        )
        self._posts = Posts(log, self._session, served, storage, self._generations)
        # The caller's going away cancels the handler, never the exchange with the engine, which is a task of its own.
        self._web = web.Server(
            self._handle, handler_cancellation=True, request_factory=self._make_request, access_log=None
        )
        self._server: asyncio.Server | None = None
        self._sealed = False

    @property
    def in_flight(self) -> int:
        """Generations between acceptance and answer."""
        return self._generations.in_flight

    async def get(self, route: str) -> int:
        """The status of a GET to the engine itself. Raises aiohttp.ClientError."""
        async with self._session.get(route) as answer:
            await answer.read()
            return int(answer.status)

    @property
    def listens(self) -> bool:
        return self._server is not None

    async def listen(self, bound: socket.socket) -> None:
        """Accept callers from now on, on a socket that was bound before. Idempotent.

        Raises:
            OSError: (EADDRINUSE) somebody else has listened there since.
            ValueError: other machines reach the address, and no token is asked for.
        """
        host = bound.getsockname()[0]
        if not self._token and not is_loopback(host):
            raise ValueError(f"the front of {self._engine} on {host}, which other machines reach, needs a token")
        if self._server is None:
            self._server = await asyncio.get_running_loop().create_server(self._web, sock=bound, backlog=_BACKLOG)

    def seal(self) -> None:
        """The engine is dead or about to be: nothing more is recorded or relayed."""
        self._sealed = True
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Refuse new callers and break the connections of those that wait. After ``seal``."""
        if self._server is not None:
            self._server.close()
        for connection in self._web.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._session.close()

    def keep(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task that ends with the engine at the latest."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, aiohttp.ClientError | OSError):
            _LOG.error("front of %s", self._engine, exc_info=error)

    def _make_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_BODY_BYTES)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers.get(headers.TOKEN, "").encode("utf-8", "surrogateescape")
        if self._token and not hmac.compare_digest(given, self._token):
            return _unwelcome()
        caller, caller_inc = headers.process_of(request.headers.get(headers.CALLER, ""))
        number = request.headers.get(headers.CALL, "")
        call = int(number) if number.isdigit() else 0
        log = self._log
        cause, lc = headers.cause_and_clock(request.headers)
        message = Message(caller, caller_inc, call, cause, request.rel_url.path, log.actor, log.incarnation)
        inbound = Inbound(request, await request.read(), message, lc)
        log.merge(lc)  # whatever befalls it is recorded after it was sent
        fate = await self._traffic.request(message)
        if self._sealed:  # the engine has died, and the port is about to close
            inbound.break_connection()
            raise asyncio.CancelledError
        if fate.what == "lose":
            await _silence()
        if fate.what == "duplicate":
            self.keep(self._exchange(inbound, fate.delay_s, relayed=False))
        broken = fate.what == "break_then_deliver"
        delay_s = 0.0 if fate.what == "duplicate" else fate.delay_s
        exchange = self.keep(self._exchange(inbound, delay_s, relayed=not broken))
        if broken:
            inbound.break_connection()
        try:
            response: web.StreamResponse = await asyncio.shield(exchange)
            return response
        except asyncio.CancelledError:
            if exchange.done():  # sealed: the engine is dead, and so is this connection
                inbound.break_connection()
            elif not broken:
                self._generations.caller_gone(exchange)
            raise
        except (aiohttp.ClientError, OSError):
            # The engine broke off without an answer; so does its front.
            inbound.break_connection()
            raise asyncio.CancelledError from None

    async def _exchange(self, inbound: Inbound, delay_s: float, *, relayed: bool) -> web.StreamResponse:
        """One delivery to the engine, and its answer."""
        if delay_s:
            await asyncio.sleep(delay_s)
        while self._is_stopped():
            await asyncio.sleep(_STOPPED_LOOK_S)
        method = inbound.request.method
        if method == "POST" and inbound.route in ROUTES:
            return await self._generations.deliver(inbound, self._relay if relayed else None)
        if method == "POST":
            self._generations.conversations.received(inbound.route, "", inbound.body)
            status, content_type, body = await self._posts.deliver(inbound)
        else:
            status, content_type, body = await self._page(inbound)
        response = self._response(status, content_type, body)
        if relayed and await self._traffic.reply(inbound.message) == "lose":
            await _silence()
        return response

    async def _page(self, inbound: Inbound) -> tuple[int, str, bytes]:
        self._log.merge(inbound.lc)
        request = inbound.request
        async with self._session.request(request.method, request.rel_url, data=inbound.body or None) as answer:
            body = await answer.read()
            status, content_type = answer.status, answer.headers.get("Content-Type", "text/plain")
        if inbound.route == "/ready" and status == 200:
            self._became_ready()
        status, body = self._traffic.page(inbound.message, status, body)
        return status, content_type, body

    async def _relay(self, inbound: Inbound, response: web.StreamResponse) -> None:
        """An answer to a generation is about to leave."""
        if await self._traffic.reply(inbound.message) == "lose":
            await _silence()
        self._sign(response)

    def _response(self, status: int, content_type: str, body: bytes) -> web.Response:
        response = web.Response(status=status, body=body, headers={"Content-Type": content_type})
        self._sign(response)
        return response

    def _sign(self, response: web.StreamResponse) -> None:
        """Say who answers, and what the answer follows from."""
        response.headers[headers.ENGINE] = self._engine
        response.headers[headers.CAUSE] = headers.cause_text(self._log.latest)
        response.headers[headers.CLOCK] = str(self._log.lc)
        response.force_close()


def _unwelcome() -> web.Response:
    """Somebody who is not of the run: nothing is read, recorded or forwarded."""
    response = web.Response(status=401, text=f"{headers.TOKEN} with the run's token is needed\n")
    response.force_close()
    return response


async def _silence() -> None:
    """Until the caller gives up or the engine dies."""
    await asyncio.get_running_loop().create_future()
