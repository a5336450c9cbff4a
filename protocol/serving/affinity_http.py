"""The affinity router over HTTP: in front of session servers, one a backend, in the place of a single one.

Requests in, bytes out, as of a session server (serving.md 4). A turn goes to the one backend of its session and is sent
at most once; what only reads or counts goes where its session is, or to any healthy backend. All else is refused:
nobody can say here which of the engines is meant, and weights change, and turns are sent, only behind their gates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from protocol.errors import (
    ActorDied,
    CallCancelled,
    ConnectionLost,
    HttpError,
    NetworkError,
    ReadTimeout,
    SeatrialError,
)
from protocol.messages import HttpHead, RawRequest
from protocol.ports import ActorHandle, backend, data_call
from protocol.serving.affinity import RoutedBackend, SessionAffinityRouter, refused
from protocol.serving.downstream import JSON_HEADERS, Downstream
from protocol.serving.formats import format_of, generation_of
from protocol.serving.http import status_of
from protocol.serving.native import json_object
from protocol.serving.turn_hooks import SESSION, BadSession, session_of
from protocol.tombstones import Tombstones

RETIRE = "/retire_sessions"
_OF_ENGINES = (
    "update_weight",  # _version, s_from_disk, s_from_tensor, ...
    "init_weights",
    "destroy_weights",
    "pause_generation",
    "continue_generation",
    "flush_cache",
    "abort_request",
    "release_memory",
    "resume_memory",
    "sleep",
    "wake",
    "terminate",
    "start_",  # _profile, _expert_distribution_record
    "stop_",
    "dump_",
)
"""How the routes begin that are for an operator of one engine, who may call some of them by GET."""
_READING = ("GET", "HEAD", "OPTIONS")
_COUNTING = ("count_tokens", "tokenize", "detokenize", "responses")
"""How the other routes end that any engine may answer, session or not; the last is answered 501 by session servers."""
_BROKEN = (500, 502, 503, 504)
"""What a session server answers when it, or a hook of it, does not get through to its engine."""


class HttpAffinityRouter(SessionAffinityRouter):
    """Routes HTTP by session. An actor; its backends are handles of SessionServers.

    ``POST /retire_sessions`` with ``{"session_ids": [...]}`` is :meth:`retire_sessions`, for users without a handle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left: dict[str, dict[ActorHandle, None]] = {}
        """Sessions, bound or with a tombstone, to the servers that may have a turn of theirs unsent, with no reader."""
        config = self._config
        self._tombstones = Tombstones(
            config.tombstone_ttl_s,
            config.max_tombstones,
            let_go=lambda session: self._left.pop(session, None),  # whose retirement failed and was not repeated
        )

    @data_call
    async def http(self, request: RawRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        """Answer one request: the head, then the body in pieces.

        Refusals are told in the client's own format: 400 without a session id, 403 for a route of engines, 410 for a
        retired session, 503 without capacity or with a backend that is not healthy. What fails before the head is 502,
        504 after ``forward_timeout_s``, or 503 where nothing was sent; what fails after it raises a NetworkError, so
        that the connection breaks. Nothing is replayed. A reader that closes the iterator is a client that has gone.
        """
        out = Downstream()
        if request.route == RETIRE:
            await self._retire(request, out)
        else:
            session = _session_in(request)
            try:
                target = self._target(request, session)
            except HttpError as error:
                self._refuse(request, session or "", error, out)
            else:
                async with contextlib.aclosing(self._relayed(request, session or "", target, out)) as pieces:
                    async for piece in pieces:
                        yield piece
        async with contextlib.aclosing(out.pieces()) as told:
            async for piece in told:
                yield piece

    # --- where to ---

    def _target(self, request: RawRequest, session: str | None) -> RoutedBackend:
        """The backend of a request. Raises HttpError, *not done*."""
        generates = generation_of(request.method, request.route) is not None
        parts = request.route.rstrip("/").split("/")
        for part in parts:
            if part.startswith(_OF_ENGINES):
                raise refused(403, f"{part} is for one engine and not for a session: ask the engine itself")
        if not generates and request.method not in _READING and parts[-1] not in _COUNTING:
            # What an engine has besides may change it, or generate behind the back of its gate.
            raise refused(403, f"{request.method} {request.route} is nothing for a session: ask the engine itself")
        if generates:
            if session is None:
                raise refused(400, f"the body must be a JSON object whose {SESSION} is a text or an integer")
            return self._backends[self._acquire(session)]
        self._tombstones.expire(asyncio.get_running_loop().time())
        if session and (session in self._bindings or session in self._tombstones):
            return self._backends[self._acquire(session)]  # which binds nothing
        return self._least_loaded()

    def _refuse(self, request: RawRequest, session: str, error: HttpError, out: Downstream) -> None:
        status = error.fields["status"]
        backend().emit("affinity.refused", session=session, request="", status=status, why=error.message)
        out.fail(format_of(request.route), status, error.message, retry=status == 503)
        out.end()

    # --- there and back ---

    async def _relayed(
        self, request: RawRequest, session: str, target: RoutedBackend, out: Downstream
    ) -> AsyncGenerator[HttpHead | bytes, None]:
        """The answer of a backend as it comes; what fails before its head is told to ``out``. Raises NetworkError."""
        target.in_flight += 1
        stream = target.handle.http(request)
        turn = (target.handle, stream)
        self._open.setdefault(session, []).append(turn)
        ended = False  # by the server, which has nothing of the turn any more
        waiting = True  # for the head: once it has come, nothing of the turn will be sent that is not sent already
        try:
            while True:
                try:
                    piece = await self._next(target, stream)
                except StopAsyncIteration:
                    ended = True
                    if waiting:
                        self._failed(request, session, target, ConnectionLost(f"{target.name} answered nothing"), out)
                    break
                except SeatrialError as error:
                    if waiting:
                        self._failed(request, session, target, error, out)
                        break
                    if isinstance(error, NetworkError):
                        raise
                    raise ConnectionLost(f"{target.name}: {type(error).__name__}: {error.message}") from error
                if waiting:
                    waiting = False
                    self._over(session, turn)
                    if piece.status in _BROKEN:
                        self._suspect(target)
                yield piece
        finally:
            target.in_flight -= 1
            if waiting:
                if not ended and generation_of(request.method, request.route) is not None:
                    self._leave(session, target.handle)
                self._over(session, turn)
            await stream.aclose()
        out.end()

    def _leave(self, session: str, server: ActorHandle) -> None:
        """A turn has lost its reader before its head: its server serves it on, and may not have sent it yet."""
        if session in self._bindings or session in self._tombstones:
            self._left.setdefault(session, {})[server] = None

    async def _next(self, target: RoutedBackend, stream: Any) -> Any:
        waits_s = self._config.forward_timeout_s
        try:
            async with asyncio.timeout(waits_s):
                return await anext(stream)
        except TimeoutError:
            raise ReadTimeout(f"{target.name} gave nothing for {waits_s} s") from None

    def _failed(
        self, request: RawRequest, session: str, target: RoutedBackend, error: SeatrialError, out: Downstream
    ) -> None:
        """Before the head: nobody else is asked, whatever is known of it."""
        form = format_of(request.route)
        if isinstance(error, CallCancelled) and session in self._tombstones:
            out.fail(form, 410, f"session {session} was retired while the call was under way")
            return
        if isinstance(error, NetworkError | ActorDied):
            self._suspect(target)
        status = status_of(error)
        out.fail(form, status, f"{type(error).__name__}: {error.message}", retry=status == 503)

    # --- the end of episodes ---

    def _may_be_sent(self, session: str) -> bool:
        return session in self._left or super()._may_be_sent(session)

    async def _given_up(self, sessions: list[str]) -> None:
        """A turn may wait in a hook though its client has left: its server is told not to send it, once it has it."""
        servers: dict[ActorHandle, dict[str, None]] = {}
        for session in sessions:
            for server in (*(handle for handle, _ in self._open.get(session, ())), *self._left.get(session, ())):
                servers.setdefault(server, {})[session] = None
        # Side by side: one that is silent keeps nothing from the others.
        ends = (self._given_up_at(server, list(named)) for server, named in servers.items())
        for failed in await asyncio.gather(*ends, return_exceptions=True):
            if failed is not None:
                raise failed

    async def _given_up_at(self, server: ActorHandle, sessions: list[str]) -> None:
        await super()._given_up(sessions)
        left = tuple(session for session in sessions if server in self._left.get(session, ()))
        if not left:
            return
        try:
            await server.give_up(left)
        except ActorDied:
            pass  # it sends nothing any more
        except (CallCancelled, NetworkError):
            raise ReadTimeout(f"turns of {left[0]} may still be sent: {server.name} does not answer") from None
        for session in left:
            if (servers := self._left.get(session)) is not None:
                servers.pop(server, None)
                if not servers:
                    del self._left[session]

    async def _retire(self, request: RawRequest, out: Downstream) -> None:
        form = format_of(request.route)
        body = json_object(request.body.decode("utf-8", "replace"))
        try:
            if request.method != "POST":
                out.fail(form, 405, f"{RETIRE} takes POST, not {request.method}")
                return
            given = None if body is None else body.get("session_ids")
            if not isinstance(given, list):
                raise BadSession('the body must be {"session_ids": [...]}')
            named = tuple(session_of({SESSION: one}) for one in given)
            if not all(named):
                raise BadSession("session_ids: null is no id")
            await self.retire_sessions(named)
        except BadSession as error:
            out.fail(form, 400, str(error))
        except ReadTimeout as error:  # repeating it is harmless
            out.fail(form, 504, error.message, retry=True)
        else:
            out.whole(200, json.dumps({"retired": len(set(named))}).encode(), JSON_HEADERS)
        finally:
            out.end()


def _session_in(request: RawRequest) -> str | None:
    """The session that a request names, empty where it names none; None where it cannot name one."""
    if generation_of(request.method, request.route) is None and SESSION.encode() not in request.body:
        return ""
    body = json_object(request.body.decode("utf-8", "replace"))
    try:
        return None if body is None else session_of(body)
    except BadSession:
        return None
