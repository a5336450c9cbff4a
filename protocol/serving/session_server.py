"""The session server: a reverse proxy in front of one backend, which keeps a session's turns true.

It is an entrypoint (the gate, its leases and their settlement are the entrypoint's) that speaks HTTP: requests in,
bytes out, no socket in sight (serving.md 2.5, 5.1, 5.2). A turn of OpenAI's or Anthropic's format passes hooks and,
where there is a gate, a lease; everything else is forwarded as it is. It fails closed: what cannot be recorded is an
error, never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from protocol.config import SessionServerConfig
from protocol.errors import GatePoisoned, GateRefused, NetworkError, SeatrialError
from protocol.messages import EngineAddress, HttpHead, RawRequest
from protocol.ports import ActorHandle, data_call
from protocol.serving.downstream import Downstream
from protocol.serving.entrypoint import Entrypoint
from protocol.serving.formats import format_of, generation_of
from protocol.serving.gate import RequestLease, SettlementReceipt
from protocol.serving.http import status_of
from protocol.serving.native import NativeFormat, json_object
from protocol.serving.settlement import failed
from protocol.serving.turn_forward import Ending, TurnForward, forwarded_headers, relayed_headers, rest_of
from protocol.serving.turn_hooks import (
    MODEL_STEP,
    REQUEST,
    SESSION,
    BadSession,
    HookFailed,
    Turn,
    TurnHooks,
    session_of,
)


class SessionServer(Entrypoint):
    """Serves HTTP in front of one replica. An actor; also an :class:`Entrypoint`, for callers that speak to that.

    Args:
        config: time-outs, bounds, which engine it is.
        address: the replica at the start; a later incarnation of it is found through the gateway.
        gateway: handle of the Gateway.
        gate: handle of the RequestGate; None: turns are forwarded without a lease.
        hooks: what is done with turns beside forwarding them.
    """

    def __init__(
        self,
        config: SessionServerConfig,
        address: EngineAddress,
        gateway: ActorHandle,
        gate: ActorHandle | None,
        hooks: TurnHooks,
    ) -> None:
        super().__init__(config, address, gateway, gate)
        self._settings = config
        self._hooks = hooks
        self._serving: dict[asyncio.Task[None], None] = {}
        self._turns_of: dict[str, list[Downstream]] = {}
        """Sessions to the generations that are served for them, their clients there or not."""

    async def stop(self) -> None:
        for task in tuple(self._serving):
            task.cancel()
        await super().stop()

    async def give_up(self, session_ids: tuple[str, ...]) -> None:
        """Sessions are over: what is not sent of them yet never is. What is sent is served to its end. Idempotent."""
        for session in session_ids:
            for out in self._turns_of.get(session, ()):
                out.given_up = True

    @data_call
    async def http(self, request: RawRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        """Answer one request: the head, then the body in pieces.

        A reader that closes the iterator is a client that has gone. A generation is served to its end all the same;
        any other call is given up. An answer whose backend breaks off in mid-body raises its NetworkError.
        """
        out = Downstream()
        serving = asyncio.get_running_loop().create_task(self._serve(request, out), name=f"http {request.path}")
        self._serving[serving] = None
        serving.add_done_callback(self._served)
        try:
            async with contextlib.aclosing(out.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._client_gone(request, serving)

    def _client_gone(self, request: RawRequest, serving: asyncio.Task[None]) -> None:
        if self._generates(request) is None:
            serving.cancel()

    def _generates(self, request: RawRequest) -> NativeFormat | None:
        """The format of a generation; None for every other call."""
        return generation_of(request.method, request.route)

    def _served(self, serving: asyncio.Task[None]) -> None:
        del self._serving[serving]
        if not serving.cancelled():
            serving.exception()  # the client has been told

    async def _serve(self, request: RawRequest, out: Downstream) -> None:
        path = request.route
        form = format_of(path)
        try:
            generation = self._generates(request)
            if len(request.body) > self._settings.max_body_bytes:
                out.fail(form, 413, f"the body is longer than {self._settings.max_body_bytes} bytes", retry=False)
            elif "/v1/responses" in path:
                out.fail(form, 501, "/v1/responses is not served here; use chat completions or messages")
            elif generation is not None:
                await self._generation(request, generation, out)
            else:
                await self._transparent(request, form, out)
        except Exception as error:
            if out.begun:
                out.end(error)
            else:
                out.fail(form, 500, f"{type(error).__name__}: {error}")
            raise
        finally:
            out.end()

    # --- what is no generation ---

    async def _transparent(self, request: RawRequest, form: NativeFormat, out: Downstream) -> None:
        """Forward as it is; a top-level session id of a JSON object alone is taken out (serving.md 5.2)."""
        body = request.body
        told = json_object(body.decode("utf-8", "replace")) if SESSION.encode() in body else None
        if told is not None and SESSION in told:
            body = json.dumps({key: value for key, value in told.items() if key != SESSION}).encode()
        headers = forwarded_headers(request, compressed=True)
        try:
            client = await self._replica()
            pieces = client.exchange(
                RawRequest(request.method, request.target, headers, body),
                connect_timeout_s=self._settings.connect_timeout_s,
                read_timeout_s=self._settings.forward_timeout_s,
            )
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if isinstance(piece, HttpHead):
                        out.head(piece.status, relayed_headers(piece))
                    else:
                        out.write(piece)
        except NetworkError as error:
            self._stale = True
            if out.begun:
                out.end(error)  # in mid-body nothing but the connection can tell
            else:
                out.fail(form, status_of(error), error.message, retry=status_of(error) == 503)

    # --- generations ---

    async def _generation(self, request: RawRequest, form: NativeFormat, out: Downstream) -> None:
        body = json_object(request.body.decode("utf-8", "replace"))
        if body is None:
            out.fail(form, 400, "the body must be a JSON object")
            return
        try:
            session = session_of(body)
        except BadSession as error:
            out.fail(form, 400, str(error))
            return
        gated = self._gate is not None
        if gated and not session:
            out.fail(form, 400, f"a generation here must carry a {SESSION}")
        elif gated and body.get("stream") and not self._settings.gated_streams:
            out.fail(form, 400, "a generation here must not be streamed")
        elif _is_traced(body) and body.get("n") not in (None, 1):  # which of them goes into the transcript?
            out.fail(form, 400, f"a turn of a session has one answer: leave n={json.dumps(body['n'])[:20]} out")
        else:
            turns = self._turns_of.setdefault(session, [])
            turns.append(out)
            try:
                await self._admitted(request, form, out, body, session)
            finally:
                turns.remove(out)
                if not turns:
                    del self._turns_of[session]

    async def _admitted(
        self, request: RawRequest, form: NativeFormat, out: Downstream, body: dict[str, Any], session: str
    ) -> None:
        """A generation, under a lease where there is a gate."""
        if self._gate is None:
            ending = await self._forwarded(request, form, out, body, session, None)
            ending.tell()
            return
        try:
            gate, lease = await self._lease(self._gate, session, lambda: out.left)
        except SeatrialError as error:
            retry = isinstance(error, GateRefused) and not isinstance(error, GatePoisoned)
            out.fail(form, status_of(error), f"{type(error).__name__}: {error.message}", retry=retry)
            return
        if out.left:  # while it waited, and may have retired its session since
            await self._settle(gate, lease, self._recorded(lease, SettlementReceipt(True, True, "failed: never sent")))
            return
        receipt: SettlementReceipt | None = None
        try:
            ending = await self._forwarded(request, form, out, body, session, lease)
            receipt = self._recorded(lease, ending.receipt)
        finally:
            await self._settle(gate, lease, receipt)
        ending.tell()

    async def _forwarded(
        self,
        request: RawRequest,
        form: NativeFormat,
        out: Downstream,
        body: dict[str, Any],
        session: str,
        lease: RequestLease | None,
    ) -> Ending:
        turn = self._turn_of(request, form, body, session, lease)
        try:
            forward = self._forward_of(form, turn, out, await self._replica())
        except NetworkError as error:  # nothing was sent
            status, text = status_of(error), error.message
            return Ending(failed(error, self._rejection), lambda: out.fail(form, status, text, retry=True))
        ending = await forward.run(request)
        if forward.broke is not None:
            self._stale = True
        try:
            await forward.hooked(self._hooks.on_end(turn, ending.receipt.label))
        except Exception:
            recorded = SettlementReceipt(ending.receipt.backend_ended, False, f"{ending.receipt.label}; not recorded")
            return Ending(recorded, lambda: out.fail(form, 500, "the end of the turn could not be recorded"))
        return ending

    def _turn_of(
        self, request: RawRequest, form: NativeFormat, body: dict[str, Any], session: str, lease: RequestLease | None
    ) -> Turn:
        turn = Turn(
            form.name,
            request.path,
            dict(body),
            session,
            bool(body.get("stream")),
            _is_traced(body),
            "" if lease is None else lease.request_id,
            -1 if lease is None else lease.model_step,
            self._ask,
            engine=self._config.engine,
        )
        if session:
            turn.body[SESSION] = session
        if lease is not None:
            turn.body[REQUEST] = lease.request_id
            turn.body[MODEL_STEP] = lease.model_step
            turn.body.setdefault("rid", lease.request_id)
        return turn

    def _forward_of(self, form: NativeFormat, turn: Turn, out: Downstream, client: Any) -> TurnForward:
        return TurnForward(
            self._settings, client, self._hooks, self._rejection, form, turn, out, lambda: self._aborting
        )

    async def _ask(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST to another route of the backend, for hooks. Raises HookFailed, NetworkError."""
        client = await self._replica()
        request = RawRequest("POST", route, (("content-type", "application/json"),), json.dumps(body).encode())
        timeout_s = self._settings.hook_timeout_s
        async with contextlib.aclosing(
            client.exchange(request, connect_timeout_s=self._settings.connect_timeout_s, read_timeout_s=timeout_s)
        ) as pieces:
            head = await anext(pieces)
            raw = await rest_of(pieces)
        assert isinstance(head, HttpHead), "an exchange begins with its head"
        answer = json_object(raw.decode("utf-8", "replace"))
        if head.status != 200 or answer is None:
            raise HookFailed(f"{route} of the backend answered {head.status}: {raw[:100].decode('utf-8', 'replace')}")
        return answer


def _is_traced(body: dict[str, Any]) -> bool:
    """Whether a generation is a turn of a session, to be recorded; an evaluation says that it wants no ids."""
    session, messages = body.get(SESSION), body.get("messages")
    return session is not None and isinstance(messages, list) and body.get("return_token_ids") is not False
