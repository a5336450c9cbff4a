"""Generations under way at one engine: delivered, watched to their end, and stopped when their caller has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp import web

from real.engines import headers
from real.engines.conversations import Conversations
from real.engines.inbound import Inbound
from real.engines.outgoing import Outgoing, Relay
from real.engines.served import Ending, Served, ending_of
from real.engines.traffic import Traffic
from real.evidence import ProcessLog

ROUTES = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages")

# How SGLang notices that a client has gone (engines.md, pause / continue / abort); the front stands between the two.
_STREAM_LOOK_S = 0.3
_CHECK_S = 4.0


class _Generation:
    """One delivery of a generation request."""

    __slots__ = ("accepted_s", "epoch", "rid", "streaming")

    def __init__(self, rid: str, streaming: bool, accepted_s: float, epoch: tuple[int, int]) -> None:
        self.rid = rid
        self.streaming = streaming
        self.accepted_s = accepted_s
        self.epoch = epoch


class Generations:
    """Delivers generation requests to one engine.

    Args:
        session: to the engine's private port.
        served: the weights it serves.
        traffic: what may happen to the events of streams; to answers as a whole it happens in their ``Relay``.
        keep: runs a task of the front.
        changed: called with the number of those in flight.
        tells_sampling: record how each call is sampled.
    """

    def __init__(
        self,
        log: ProcessLog,
        session: aiohttp.ClientSession,
        served: Served,
        traffic: Traffic,
        keep: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        changed: Callable[[int], None],
        tells_sampling: bool = False,
    ) -> None:
        self._log = log
        self._session = session
        self._served = served
        self._traffic = traffic
        self._keep = keep
        self._changed = changed
        self._tells_sampling = tells_sampling
        self._open: dict[asyncio.Task[Any], _Generation] = {}
        self._callers_gone: WeakSet[asyncio.Task[Any]] = WeakSet()  # of exchanges that had not begun, or were over
        self._foreign = 0
        self.conversations = Conversations(log)

    @property
    def in_flight(self) -> int:
        return len(self._open)

    async def deliver(self, inbound: Inbound, relay: Relay | None) -> web.StreamResponse:
        """Forward a request and relay its answer; ``relay`` None: to nobody (a duplicate).

        Raises aiohttp.ClientError: the engine broke the connection.
        """
        rid, streaming = self._identify(inbound)
        task = asyncio.current_task()
        assert task is not None
        accepted_s = asyncio.get_running_loop().time()
        if self._tells_sampling:
            self._log.answered(inbound.lc, inbound.cause, "engine.sampling", request=rid, **_sampling(inbound.body))
        self._log.answered(inbound.lc, inbound.cause, "engine.accepted", request=rid, running=len(self._open), queued=0)
        self.conversations.received(inbound.route, rid, inbound.body)
        generation = self._open[task] = _Generation(rid, streaming, accepted_s, self._served.epoch)
        self._changed(len(self._open))
        if task in self._callers_gone:
            self.caller_gone(task)
        outgoing: Outgoing | None = None
        try:
            content = {"Content-Type": "application/json"}
            async with self._session.post(inbound.route, data=inbound.body, headers=content) as answer:
                if answer.status == 200 and answer.content_type == "text/event-stream":
                    begun = web.StreamResponse(headers=_content_type(answer))
                    outgoing = Outgoing(inbound, begun, relay, self._traffic, self._keep)
                    await self._stream(answer, generation, outgoing)
                else:
                    body = await answer.read()
                    if answer.status == 200:
                        document = json.loads(body)
                        await self._finished(generation, ending_of(document))
                        self.conversations.finished(rid, document)
                    else:
                        self._refused(rid, answer.status, body.decode(errors="replace"))
                    response = web.Response(status=answer.status, body=body, headers=_content_type(answer))
        finally:
            self.conversations.finished(rid, None)
            del self._open[task]
            self._changed(len(self._open))
        if outgoing is not None:
            await outgoing.over()
            return outgoing.response
        if relay is not None:
            response.headers[headers.HASHES] = json.dumps(self._served.hashes)
            await relay(inbound, response)
        return response

    def caller_gone(self, exchange: asyncio.Task[Any]) -> None:
        """The caller of an exchange closed its connection: stop the generation when SGLang would have noticed."""
        generation = self._open.get(exchange)
        if generation is None:
            self._callers_gone.add(exchange)  # held up on its way to the engine, it is delivered all the same
            return
        if generation.streaming:
            delay = _STREAM_LOOK_S
        else:
            delay = _CHECK_S - (asyncio.get_running_loop().time() - generation.accepted_s) % _CHECK_S
        self._keep(self._stop(exchange, generation, delay))

    async def _stop(self, exchange: asyncio.Task[Any], generation: _Generation, delay: float) -> None:
        await asyncio.sleep(delay)
        if exchange in self._open:
            rid = generation.rid
            if any(other.rid != rid and other.rid.startswith(rid) for other in self._open.values()):
                self._log.answered(0, None, "engine.abort_asked", request=rid, everything=False)  # it ends those, too
            try:
                async with self._session.post("/abort_request", json={"rid": rid}) as answer:
                    await answer.read()
            except (aiohttp.ClientError, OSError):
                pass  # the engine is gone, and the generation with it

    def _identify(self, inbound: Inbound) -> tuple[str, bool]:
        """(request id, whether the answer is to be streamed). Callers of this run say so in headers."""
        given = inbound.request.headers
        rid = given.get(headers.REQUEST)
        if rid is not None:
            return rid, given.get(headers.STREAM) == "1"
        try:
            asked = json.loads(inbound.body)
            rid, streaming = asked.get("rid"), bool(asked.get("stream", False))
        except (ValueError, AttributeError):
            rid, streaming = None, False  # the engine will say what is wrong with it
        if not isinstance(rid, str) or not rid:
            self._foreign += 1
            rid = f"foreign-{self._log.actor}-{self._log.incarnation}-{self._foreign:07d}"
        return rid, streaming

    async def _finished(self, generation: _Generation, ending: Ending) -> None:
        served = self._served
        await served.explained(ending)
        self._log.answered(
            0, None, "engine.finished", request=generation.rid, reason=ending.reason,
            completion_tokens=ending.completion_tokens, cached_tokens=ending.cached_tokens,
            stale_cached_tokens=served.stale_cached_tokens(ending), spans=served.spans(ending, generation.epoch),
        )  # fmt: skip

    def _refused(self, rid: str, status: int, why: str) -> None:
        self._log.answered(0, None, "engine.refused", request=rid, status=status, why=why[:1000])

    async def _stream(self, answer: aiohttp.ClientResponse, generation: _Generation, outgoing: Outgoing) -> None:
        """Relay server-sent events one by one; the end of the generation is recorded before the event that tells it."""
        watch = StreamWatch()
        async for event in _events(answer.content):  # to the end, which is observed though nobody hears it
            watch.look(event)
            if watch.refusal is not None:
                self._refused(generation.rid, *watch.refusal)
            elif watch.ending is not None:
                await self._finished(generation, watch.ending)
                self.conversations.finished(generation.rid, watch.gathered)
            if watch.done:
                # A comment to every reader of events but ours, whom it tells what the whole answer follows from.
                cause = headers.cause_text(self._log.latest)
                event = f": seatrial {cause} {self._log.lc}\n\n".encode() + event
            await outgoing.send(event)
        if not watch.over:
            raise aiohttp.ClientPayloadError("the stream ended without its last event")


class StreamWatch:
    """Follows a stream of events to the end of the generation. ``ending`` and ``refusal`` are set for one event only.

    /generate tells the end in its last event. The OpenAI routes spread it over several chunks, complete at ``[DONE]``;
    /v1/messages likewise, complete at ``message_stop``. ``gathered``: what these chunks add up to.
    """

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.refusal: tuple[int, str] | None = None
        self.over = False
        self.done = False
        self._chunks = 0
        self.gathered: dict[str, Any] = {}

    def look(self, event: bytes) -> None:
        self.ending = self.refusal = None
        data = event.partition(b"data:")[2].strip()
        if data == b"[DONE]":
            self.done = True
            if self.gathered and not self.over:
                self._tell(self.gathered)
        # Parsing every cumulative event of a long answer would cost more than all else.
        elif data and b'"finish_reason":null' not in data and b'"finish_reason": null' not in data:
            self._parse(json.loads(data))
        elif b'"choices"' in data:
            self._chunks += 1

    def _parse(self, document: dict[str, Any]) -> None:
        kind = document.get("type")
        if kind == "message_delta":
            self.gathered |= {**document, **(document.get("delta") or {}), "type": "message"}
        elif kind == "message_stop":
            self.done = True
            if self.gathered and not self.over:
                self._tell(self.gathered)
        elif isinstance(kind, str) and kind != "error":
            return  # the other events of /v1/messages
        elif "error" in document:
            error = document["error"]
            self.over = True
            self.refusal = (int(error.get("code") or 400), str(error.get("message", error))[:1000])
        elif "meta_info" in document:
            self._tell(document)
        else:
            for key in ("choices", "usage", "metadata", "sglext"):
                if document.get(key):
                    self.gathered[key] = document[key]

    def _tell(self, document: dict[str, Any]) -> None:
        if "choices" in document and not document.get("usage"):
            document = {**document, "usage": {"completion_tokens": self._chunks}}  # the client asked for no usage
        self.over = True
        self.ending = ending_of(document)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Server-sent events, each with its blank line. Of any length: cumulative ones become long."""
    pending = b""
    while part := await content.readany():
        pending += part
        *events, pending = pending.split(b"\n\n")
        for event in events:
            yield event + b"\n\n"


def _content_type(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {"Content-Type": answer.headers.get("Content-Type", "application/json")}


def _sampling(body: bytes) -> dict[str, Any]:
    """Temperature and seed of a JSON call, as ``engine.sampling`` has them; greedy where it does not say."""
    try:
        given = json.loads(body).get("sampling_params") or {}
        temperature, seed = given.get("temperature"), given.get("sampling_seed")
    except (ValueError, AttributeError):
        temperature = seed = None
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        temperature = 0.0
    return {"temperature": float(temperature), "seed": seed if type(seed) is int else None}
