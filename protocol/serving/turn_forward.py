"""One turn through a session server: to the backend, to its end, past the hooks, and what the client is told.

The table of serving.md 5.2, row by row. Whatever the client does, the backend's answer is read to its end: only then is
it known what became of the turn, and only then are the last bytes given, which tell the client that it has succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from protocol.config import SessionServerConfig
from protocol.errors import HttpError, NetworkError, Outcome, SeatrialError, message_of
from protocol.messages import HttpHead, RawRequest
from protocol.ports import EngineClient
from protocol.serving.downstream import Downstream
from protocol.serving.gate import SettlementReceipt
from protocol.serving.http import status_of
from protocol.serving.native import Answer, NativeFormat, Role, StreamReader, json_object
from protocol.serving.settlement import RejectionPattern, failed
from protocol.serving.sse import EventParser, EventTooLong, ServerEvent
from protocol.serving.turn_hooks import PRIVATE, Turn, TurnHooks

Pieces = AsyncGenerator[HttpHead | bytes, None]
Headers = tuple[tuple[str, str], ...]

HOP_BY_HOP = (
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
)  # fmt: skip
_NOT_FORWARDED = (*HOP_BY_HOP, "host", "content-length", "expect")
REQUEST_ID = "x-seatrial-request-id"
MODEL_STEP = "x-seatrial-model-step"


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a turn has ended: what its gate is told, and how the client hears the last of it."""

    receipt: SettlementReceipt
    tell: Callable[[], None]


class TurnForward:
    """Forwards one turn.

    Args:
        config: bounds.
        client: of the backend.
        hooks: called before and after.
        rejection: recognises the refusal of a too long context.
        form: the client's format.
        turn: what hooks see of it.
        out: the way to the client.
        aborting: whether the backend is being told to abort: what comes back meanwhile may be no whole turn.
    """

    def __init__(
        self,
        config: SessionServerConfig,
        client: EngineClient,
        hooks: TurnHooks,
        rejection: RejectionPattern,
        form: NativeFormat,
        turn: Turn,
        out: Downstream,
        aborting: Callable[[], bool],
    ) -> None:
        self.config = config
        self.client = client
        self.hooks = hooks
        self.rejection = rejection
        self.form = form
        self.turn = turn
        self.out = out
        self.aborting = aborting
        self.broke: NetworkError | None = None
        """How the connection to the backend broke, if it did."""

    async def run(self, request: RawRequest) -> Ending:
        """Forward it. Never raises what a backend or a hook does; nothing of it is sent when the request hook fails."""
        try:
            await self.hooked(self.hooks.on_request(self.turn))
        except Exception as error:
            return self.hook_failed("request hook", error)
        if self.aborting():
            return self.aborted()
        if self.out.given_up:
            receipt = SettlementReceipt(True, True, "failed: never sent")
            return Ending(receipt, lambda: self.out.fail(self.form, 410, "the session was retired meanwhile"))
        sent = RawRequest("POST", request.target, forwarded_headers(request), self.outgoing())
        pieces = self.client.exchange(
            sent, connect_timeout_s=self.config.connect_timeout_s, read_timeout_s=self.config.forward_timeout_s
        )
        try:
            async with contextlib.aclosing(pieces):
                head = await anext(pieces)
                assert isinstance(head, HttpHead), "an exchange begins with its head"
                if not 200 <= head.status < 300:
                    return await self.refused(head, pieces)
                if head.header("content-type").lower().startswith("text/event-stream"):
                    return await self.stream(head, pieces)
                return await self.whole(head, pieces)
        except NetworkError as error:
            self.broke = error
            return self.told(failed(error, self.rejection), status_of(error), error)

    def outgoing(self) -> bytes:
        """The body as the backend gets it: without what is for hooks alone."""
        return json.dumps({key: value for key, value in self.turn.body.items() if key not in PRIVATE}).encode()

    async def hooked(self, call: Any) -> None:
        """A hook, within its time."""
        async with asyncio.timeout(self.config.hook_timeout_s):
            await call

    # --- the rows of the table ---

    async def refused(self, head: HttpHead, pieces: Pieces) -> Ending:
        """Not 2xx: status, headers and body go to the client byte for byte."""
        body = await rest_of(pieces)
        error = HttpError(status=head.status, body=body.decode("utf-8", "replace"))
        return Ending(failed(error, self.rejection), lambda: self.as_it_is(head, body))

    async def whole(self, head: HttpHead, pieces: Pieces) -> Ending:
        """2xx with a whole body."""
        raw = await rest_of(pieces)
        body = json_object(raw.decode("utf-8", "replace"))
        if body is None:
            return self.malformed("the backend's answer is no JSON object")
        if self.form.is_error(body):
            return Ending(self.in_band(body), lambda: self.as_it_is(head, raw))
        answer = self.form.read(body)
        ending = await self.judged(answer)
        if ending is not None:
            return ending
        shown = self.form.shown(body, self.turn.request_id, self.turn.unasked)
        text = raw if shown == body else json.dumps(shown).encode()
        return self.completed(lambda: self.out.whole(head.status, text, self.stamped(head)))

    async def stream(self, head: HttpHead, pieces: Pieces) -> Ending:
        """2xx with events: each is relayed as it comes, but for the marker of the end."""
        out, turn = self.out, self.turn
        out.head(head.status, self.stamped(head))
        parser, reader = EventParser(self.config.longest_event_bytes), self.form.reader()
        end: ServerEvent | None = None
        receipt: SettlementReceipt | None = None  # of an error that the backend has told
        broken = ""
        try:
            async for piece in pieces:
                assert isinstance(piece, bytes), "an exchange has one head"
                for event in parser.feed(piece):
                    if receipt is not None:
                        out.write(event.raw)
                    elif end is None and not broken:
                        role = _role_of(event, reader)
                        if role == "content":
                            out.write(reader.shown(event, turn.request_id, turn.unasked))
                        elif role == "end":
                            end = event
                        elif role == "error":
                            receipt = self.in_band(json_object(event.data) or {})
                            out.write(event.raw)
                        else:
                            broken = "an event of the backend's stream is not of its format"
        except EventTooLong as error:
            broken = str(error)
        if receipt is not None:
            last = parser.rest
            return Ending(receipt, lambda: out.write(last))
        if broken or end is None or parser.rest:
            return self.malformed(broken or "the backend's stream ended before its end")
        ending = await self.judged(reader.answer())
        if ending is not None:
            return ending
        marker = end.raw
        return self.completed(lambda: out.write(marker))

    async def judged(self, answer: Answer) -> Ending | None:
        """The end of a turn whose answer came whole and is no success after all; None: it is one, and on record."""
        if answer.finish_reason == "abort" or self.aborting():
            return self.aborted()
        if not answer.finish_reason:
            return self.malformed("the backend's answer does not say that it has ended")
        if self.turn.traced:
            try:
                await self.hooked(self.hooks.on_response(self.turn, answer))
            except Exception as error:
                return self.hook_failed("response hook", error)
        return None

    # --- endings ---

    def completed(self, tell: Callable[[], None]) -> Ending:
        return Ending(SettlementReceipt(True, True, "completed"), tell)

    def hook_failed(self, what: str, error: BaseException) -> Ending:
        """The backend has ended, or was never asked: a failed attempt, which is safe."""
        text = f"{what}: {_said(error)}"
        receipt = SettlementReceipt(True, True, f"failed: {what}")
        return Ending(receipt, lambda: self.out.fail(self.form, 500, text))

    def aborted(self) -> Ending:
        """The backend has ended it in mid-generation: no turn, and nothing is recorded of it (S-22)."""
        receipt = SettlementReceipt(True, True, "aborted")
        return Ending(receipt, lambda: self.out.fail(self.form, 503, "the backend aborted the generation"))

    def malformed(self, text: str) -> Ending:
        """An answer that cannot be understood says nothing of what its sender still does."""
        receipt = SettlementReceipt(False, False, f"unknown: {text}")
        return Ending(receipt, lambda: self.out.fail(self.form, 500, text))

    def told(self, receipt: SettlementReceipt, status: int, error: SeatrialError) -> Ending:
        retry = error.outcome is Outcome.NOT_DONE
        return Ending(receipt, lambda: self.out.fail(self.form, status, _said(error), retry=retry))

    def in_band(self, body: dict[str, Any]) -> SettlementReceipt:
        """Of an error that came with a 2xx: as of the status that it would have been."""
        inner = body.get("error")
        code = (inner if isinstance(inner, dict) else body).get("code")
        status = code if type(code) is int and 400 <= code < 600 else 500
        return failed(HttpError(status=status, body=json.dumps(body)), self.rejection)

    def as_it_is(self, head: HttpHead, body: bytes) -> None:
        """The backend's answer, byte for byte."""
        self.out.head(head.status, relayed_headers(head))
        self.out.write(body)

    def stamped(self, head: HttpHead) -> Headers:
        """Headers of an answer of ours: the backend's, without its length, and with what the lease says."""
        kept = tuple((name, value) for name, value in relayed_headers(head) if name.lower() != "content-length")
        if not self.turn.request_id:
            return kept
        return (*kept, (REQUEST_ID, self.turn.request_id), (MODEL_STEP, str(self.turn.model_step)))


async def rest_of(pieces: Pieces) -> bytes:
    """The whole body of an answer whose head has been read. Raises NetworkError."""
    return b"".join([piece async for piece in pieces if isinstance(piece, bytes)])


def forwarded_headers(request: RawRequest, *, compressed: bool = False) -> Headers:
    """Headers of a request for the backend. A generation is asked for uncompressed: it is read on its way."""
    dropped = _NOT_FORWARDED if compressed else (*_NOT_FORWARDED, "accept-encoding")
    kept = tuple((name, value) for name, value in request.headers if name.lower() not in dropped)
    return kept if compressed else (*kept, ("accept-encoding", "identity"))


def relayed_headers(head: HttpHead) -> Headers:
    """Headers of an answer for the client: all that are not about one connection."""
    return tuple((name, value) for name, value in head.headers if name.lower() not in HOP_BY_HOP)


def _role_of(event: ServerEvent, reader: StreamReader) -> Role:
    """What an event is; one with parts of other types than its format has is broken, like one that is no JSON."""
    try:
        return reader.feed(event)
    except (ValueError, TypeError, OverflowError):
        return "broken"


def _said(error: BaseException) -> str:
    text = error.message if isinstance(error, SeatrialError) else message_of(error)
    return f"{type(error).__name__}: {text}"
