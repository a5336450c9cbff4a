"""The ``EngineClient`` port on aiohttp: one connection a call, each end told apart by what it says of the effect."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

import aiohttp
import yarl

from protocol.bad_answers import bad
from protocol.errors import (
    ConnectionLost,
    ConnectionRefused,
    ConnectTimeout,
    HttpError,
    Outcome,
    ReadTimeout,
    SeatrialError,
)
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
from real.caller import Caller
from real.engines import bodies, headers
from real.engines.served import ending_of
from real.engines.traffic import Message, Traffic
from real.evidence import ProcessLog
from real.http_call import AS_IT_IS, has_a_name, head_of, limits, raw_url
from real.options import url_host

_JSON = {"Content-Type": "application/json"}
_COMMENT = b": seatrial "


class Sessions:
    """The aiohttp session of one process, made when the first call needs it.

    Args:
        token: the run's secret, which every call brings; empty: none.
    """

    def __init__(self, token: str = "") -> None:
        self._headers = {headers.TOKEN: token} if token else {}
        self._session: aiohttp.ClientSession | None = None

    def get(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False,
                read_bufsize=1 << 20, headers=self._headers,
            )  # fmt: skip
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


class _Exchange:
    """One call: recorded when it leaves and when its end is known, whatever the end is."""

    def __init__(self, client: RealEngineClient, route: str, read_timeout_s: float | None) -> None:
        self._client = client
        self.route = route
        self.number = client.caller.next_number()
        target = client.address
        self._sent = client.log.emit(
            "call.sent", call=self.number, target=target.name, target_inc=target.incarnation, method=route
        )
        self.lc = client.log.lc
        now = asyncio.get_running_loop().time()
        self._deadline = None if read_timeout_s is None else now + read_timeout_s
        self._over = False

    def headers(self) -> dict[str, str]:
        log = self._client.log
        return {
            headers.CALLER: headers.process_text(log.actor, log.incarnation),
            headers.CALL: str(self.number),
            headers.CAUSE: headers.cause_text(self._sent),
            headers.CLOCK: str(self.lc),
        }

    def message(self) -> Message:
        log, target = self._client.log, self._client.address
        return Message(log.actor, log.incarnation, self.number, self._sent, self.route, target.name, target.incarnation)

    async def read(self, coroutine: Any) -> Any:
        """Await a part of the answer within what is left of the read time-out, which is for the whole of it."""
        async with asyncio.timeout_at(self._deadline):
            return await coroutine

    def done(self, cause: str | None, lc: int, error: SeatrialError | None = None) -> None:
        outcome = Outcome.DONE if error is None else error.outcome
        self._end(outcome, "" if error is None else type(error).__name__, cause, lc)

    def abandoned(self) -> None:
        """The caller waits no longer. Without effect after the end."""
        self._end(Outcome.UNKNOWN, "Cancelled", None, 0)

    def failed(self, error: BaseException) -> NoReturn:
        """Record the end by a failure, and raise it as ours."""
        ours = self._translated(error)
        self._end(ours.outcome, type(ours).__name__, None, 0)
        raise ours from error

    def _end(self, outcome: Outcome, error: str, cause: str | None, lc: int) -> None:
        if not self._over:
            self._over = True
            self._client.log.answered(lc, cause, "call.done", call=self.number, outcome=outcome.value, error=error)

    def _translated(self, error: BaseException) -> SeatrialError:
        name = self._client.address.name
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return ConnectTimeout(f"{self.route}: no connection to {name}")
        if isinstance(error, aiohttp.ClientConnectorError):
            if error.errno == errno.ECONNREFUSED:
                return ConnectionRefused(f"{self.route}: nobody listens at {name}")
            return ConnectTimeout(f"{self.route}: no connection to {name}: {error.strerror}")
        if isinstance(error, TimeoutError):
            return ReadTimeout(f"{self.route}: no answer from {name}")
        if isinstance(error, aiohttp.InvalidURL) and not isinstance(error, aiohttp.RedirectClientError):
            return ConnectionRefused(f"{self.route}: the address of {name} is none")
        return ConnectionLost(f"{self.route}: connection to {name} lost ({type(error).__name__})")


_FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


class RealEngineClient:
    """One engine's HTTP API for one caller. Every call goes to whoever has the address now.

    Args:
        sessions: of the calling process.
        caller: numbers the calls of that process.
        log: takes its evidence.
        block_tokens: see ``EngineSettings``.
        traffic: what may happen to messages before they leave.
    """

    def __init__(
        self,
        address: EngineAddress,
        sessions: Sessions,
        caller: Caller,
        log: ProcessLog,
        block_tokens: int,
        traffic: Traffic,
    ) -> None:
        self._address = address
        self._sessions = sessions
        self.caller = caller
        self.log = log
        self._block_tokens = block_tokens
        self._traffic = traffic

    @property
    def address(self) -> EngineAddress:
        return self._address

    async def generate(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> GenerateResult:
        asked = {headers.REQUEST: request.request_id, headers.STREAM: "0"}
        body = self._generation(request, stream=False)
        answer, text = await self._call(
            "POST", "/generate", body, asked, connect_timeout_s, read_timeout_s, raises=True
        )
        return _result(answer, json.loads(text))

    async def stream(
        self, request: GenerateRequest, *, connect_timeout_s: float | None = None, read_timeout_s: float | None = None
    ) -> AsyncIterator[int]:
        """Cumulative counts of output tokens. Tokens may coalesce; the end of the iteration is ``[DONE]``."""
        asked = {headers.REQUEST: request.request_id, headers.STREAM: "1"}
        body = self._generation(request, stream=True)
        events = self._events("/generate", body, asked, connect_timeout_s, read_timeout_s, raises=True)
        async with contextlib.aclosing(events):
            async for event in events:
                if event != "[DONE]":
                    yield int(json.loads(event)["meta_info"]["completion_tokens"])

    async def post(
        self,
        route: str,
        body: dict[str, Any],
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AdminReply:
        data = json.dumps(body).encode()
        answer, text = await self._call("POST", route, data, {}, connect_timeout_s, read_timeout_s, raises=False)
        return bodies.admin_reply(answer.status, text)

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
        answer, text = await self._call("GET", route, None, {}, connect_timeout_s, read_timeout_s, raises=False)
        return answer.status, text

    async def forward(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> str:
        _, text = await self._call("POST", route, body.encode(), {}, connect_timeout_s, read_timeout_s, raises=True)
        return text

    def forward_stream(
        self,
        route: str,
        body: str,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[str, None]:
        # A refusal that SGLang streams with status 200 is an event like any other to a client of its routes.
        return self._events(route, body.encode(), {}, connect_timeout_s, read_timeout_s, raises=False)

    def exchange(
        self,
        request: RawRequest,
        *,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
    ) -> AsyncGenerator[HttpHead | bytes, None]:
        """Byte for byte, but for the comment that the engine's front puts before the end of a stream."""
        pieces = self._raw(request, connect_timeout_s, read_timeout_s)
        caller = self.log.actor, self.log.incarnation
        message = Message(*caller, 0, None, request.path, self._address.name, self._address.incarnation)
        what = self._traffic.bad_answer(message)
        return pieces if what is None else bad(pieces, what, request.path)

    # ---- inside ----

    async def _raw(
        self, request: RawRequest, connect_timeout_s: float | None, read_timeout_s: float | None
    ) -> AsyncGenerator[HttpHead | bytes, None]:
        exchange = _Exchange(self, request.path, read_timeout_s)
        try:
            host, port = await self._destination(exchange, connect_timeout_s)
            bounds = limits(connect_timeout_s=connect_timeout_s, sock_read_s=read_timeout_s)
            async with await self._answered(
                request.method, raw_url(f"http://{url_host(host)}:{port}", request), data=request.body or None,
                headers=(*request.headers, *exchange.headers().items()), timeout=bounds, **AS_IT_IS,
            ) as answer:  # fmt: skip
                cause, lc = headers.cause_and_clock(answer.headers)
                yield head_of(answer)
                kept = b""
                while part := await exchange.read(answer.content.readany()):
                    part, kept = kept + part, b""
                    at = part.find(_COMMENT)
                    if at >= 0:
                        end = part.find(b"\n\n", at)
                        if end < 0:
                            part, kept = part[:at], part[at:]
                        else:
                            cause, lc = _cause_in(part[at:end])
                            part = part[:at] + part[end + 2 :]
                    if part:
                        yield part
                if kept:
                    yield kept
            exchange.done(cause, lc)
        except _FAILURES as error:
            exchange.failed(error)
        finally:
            exchange.abandoned()

    def _generation(self, request: GenerateRequest, *, stream: bool) -> bytes:
        return bodies.generation(request, stream=stream, block_tokens=self._block_tokens).encode()

    async def _destination(self, exchange: _Exchange, connect_timeout_s: float | None) -> tuple[str, int]:
        """Host and port to connect to: a fault may hold the handshake up before it begins, or lead it elsewhere."""
        try:
            async with asyncio.timeout(connect_timeout_s):
                return await self._traffic.destination(exchange.message(), self._address)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError from None

    @contextlib.asynccontextmanager
    async def _open(
        self,
        exchange: _Exchange,
        method: str,
        body: bytes | None,
        asked: dict[str, str],
        connect_timeout_s: float | None,
        read_timeout_s: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        host, port = await self._destination(exchange, connect_timeout_s)
        bounds = limits(connect_timeout_s=connect_timeout_s, sock_read_s=read_timeout_s)
        sent = {**exchange.headers(), **asked}
        if body is not None:
            sent |= _JSON
        url = f"http://{url_host(host)}:{port}{exchange.route}"
        async with await self._answered(method, url, data=body, headers=sent, timeout=bounds) as answer:
            yield answer

    async def _answered(self, method: str, url: str | yarl.URL, **options: Any) -> aiohttp.ClientResponse:
        """The head of an answer; whoever asks for it closes it.

        Raises:
            aiohttp.InvalidURL: also for a host whose name is none, for which aiohttp has a UnicodeError.
        """
        try:
            return await self._sessions.get().request(method, url, **options)
        except UnicodeError:
            if has_a_name(url):
                raise aiohttp.ClientError(f"{url}: redirected to a host whose name is none") from None
            raise aiohttp.InvalidURL(url) from None

    async def _call(
        self,
        method: str,
        route: str,
        body: bytes | None,
        asked: dict[str, str],
        connect_timeout_s: float | None,
        read_timeout_s: float | None,
        *,
        raises: bool,
    ) -> tuple[aiohttp.ClientResponse, str]:
        exchange = _Exchange(self, route, read_timeout_s)
        try:
            async with self._open(exchange, method, body, asked, connect_timeout_s, read_timeout_s) as answer:
                text = (await exchange.read(answer.read())).decode(errors="replace")
        except _FAILURES as error:
            exchange.failed(error)
        except asyncio.CancelledError:
            exchange.abandoned()
            raise
        cause, lc = headers.cause_and_clock(answer.headers)
        refused = HttpError(status=answer.status, body=text) if raises and not 200 <= answer.status < 300 else None
        exchange.done(cause, lc, refused)
        if refused is not None:
            raise refused
        return answer, text

    async def _events(
        self,
        route: str,
        body: bytes,
        asked: dict[str, str],
        connect_timeout_s: float | None,
        read_timeout_s: float | None,
        *,
        raises: bool,
    ) -> AsyncGenerator[str, None]:
        """The data of each server-sent event of an answer, ``[DONE]`` included. ``raises``: also a streamed refusal."""
        exchange = _Exchange(self, route, read_timeout_s)
        try:
            async with self._open(exchange, "POST", body, asked, connect_timeout_s, read_timeout_s) as answer:
                cause, lc = headers.cause_and_clock(answer.headers)
                if not 200 <= answer.status < 300:
                    text = (await exchange.read(answer.read())).decode(errors="replace")
                    refused = HttpError(status=answer.status, body=text)
                    exchange.done(cause, lc, refused)
                    raise refused
                pending = b""
                while part := await exchange.read(answer.content.readany()):
                    pending += part
                    *events, pending = pending.split(b"\n\n")
                    for event in events:
                        if event.startswith(_COMMENT):
                            cause, lc = _cause_in(event)
                            continue
                        data = event.partition(b"data:")[2].strip()
                        if data == b"[DONE]":
                            exchange.done(cause, lc)
                            yield "[DONE]"
                            return
                        if raises and data.startswith(b'{"error"') and (error := _error_in(data)) is not None:
                            exchange.done(cause, lc, error)
                            raise error
                        yield data.decode(errors="replace")
                raise aiohttp.ServerDisconnectedError("the stream ended without [DONE]")
        except _FAILURES as error:
            exchange.failed(error)
        finally:
            exchange.abandoned()


def _cause_in(event: bytes) -> tuple[str | None, int]:
    cause, lc = event[len(_COMMENT) :].decode().split()
    return headers.cause_and_clock({headers.CAUSE: cause, headers.CLOCK: lc})


def _error_in(data: bytes) -> HttpError | None:
    """What SGLang streams with status 200 in place of a refusal."""
    error = json.loads(data)["error"]
    code = error.get("code")
    return HttpError(status=int(code), body=str(error.get("message", ""))) if isinstance(code, int) else None


def _result(answer: aiohttp.ClientResponse, document: dict[str, Any]) -> GenerateResult:
    meta = document["meta_info"]
    ending = ending_of(document)
    hashes = json.loads(answer.headers.get(headers.HASHES, "{}"))
    engine, incarnation = headers.process_of(answer.headers.get(headers.ENGINE, ""))
    return GenerateResult(
        str(meta["id"]),
        ending.reason,
        int(meta["prompt_tokens"]),
        ending.completion_tokens,
        ending.cached_tokens,
        str(meta.get("weight_version", "")),
        tuple(VersionSpan(version, start, end, hashes.get(version, "")) for version, start, end in ending.versions),
        int(meta.get("num_retractions", 0)),
        float(meta.get("queue_time") or 0.0),
        float(meta.get("first_token_latency") or 0.0),
        float(meta.get("e2e_latency") or 0.0),
        engine,
        incarnation,
    )
