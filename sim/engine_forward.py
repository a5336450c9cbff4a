"""JSON generation calls at a simulated engine: what a gateway forwards, and posts to the same routes.

``EngineClient.forward`` and ``forward_stream`` send the client's text as it is, ``post`` a JSON object.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from protocol.errors import HttpError
from protocol.messages import AdminReply
from sim.engine_calls import ROUTES, bad_body, read_call
from sim.engine_json import DONE, BadBody, JsonCall, event_text, json_object
from sim.http import Streamed

if TYPE_CHECKING:
    from sim.engine_process import EngineProcess
    from sim.http import Exchange

__all__ = ["ROUTES", "serve_json"]


def serve_json(process: EngineProcess, exchange: Exchange) -> tuple[str, ...]:
    """Answer one call. Returns the ids of its requests, () where it was refused.

    Raises:
        EngineNotListening: nothing was done.
    """
    route, raw, engine = exchange.method, exchange.body, process.engine
    engine.check_listening()
    # Every id of one engine has this form and width, so that none is a prefix of another.
    new_id = f"{process.name}-{process.incarnation}-{exchange.number:012d}"
    body: dict[str, Any] = {}
    try:
        body = json_object(raw) if isinstance(raw, str) else raw
        call = read_call(route, body, engine, new_id=new_id, now_s=engine.env.now / 1e9)
    except BadBody as error:
        stream = bool(body.get("stream", False))
        status, document = bad_body(route, error, stream=stream)
        events = [json.dumps(document), DONE] if status == 200 else []
        engine.serve(lambda: _Answer(process, exchange).refuse(status, document, events))
        return ()
    answer = _Answer(process, exchange, named=call.named_events)
    if call.stream:
        _stream(call, answer, process)
    else:
        _whole(call, answer)
    process.conversations.received(process, route, body, call)
    for job in call.jobs:
        process.by_rid[job.rid] = exchange
        process.report_sampling(job.rid, call.asked)
    call.submit(engine)
    return tuple(job.rid for job in call.jobs)


def _whole(call: JsonCall, answer: _Answer) -> None:
    def news() -> None:
        if any(job.result is None for job in call.jobs):
            return
        refused = call.refused
        if refused is None:
            answer.process.conversations.finished(call)
            answer.give(json.dumps(call.whole()))
        else:
            answer.refuse(refused.status, call.refusal(refused.error, refused.status), [])

    for job in call.jobs:
        job.news = news


def _stream(call: JsonCall, answer: _Answer, process: EngineProcess) -> None:
    job = call.jobs[0]
    begun = False

    def news() -> None:
        nonlocal begun
        refused = call.refused if job.result is not None else None
        if refused is not None and not call.refused_in_stream:
            answer.refuse(refused.status, call.refusal(refused.error, refused.status), [])
            return
        if not begun:
            begun = True
            answer.add(call.begin())
        if job.result is None:
            answer.add(call.more(process.engine.version))
        else:
            process.conversations.finished(call)
            answer.add(call.end())
            answer.give("")

    job.news = news


class _Answer:
    """The answer to one exchange."""

    def __init__(self, process: EngineProcess, exchange: Exchange, *, named: bool = False) -> None:
        self.process = process
        self._named = named
        self._exchange = exchange
        self._streamed = None if exchange.on_item is None else Streamed(exchange)
        self._kept: list[str] = []  # events, for a caller that wants the whole text

    def add(self, events: list[str]) -> None:
        """Events of a stream."""
        if self._streamed is None:
            self._kept.extend(events)
            return
        for event in events:
            self._streamed.add(event, len(event))

    def give(self, text: str) -> None:
        """The whole answer, or the end of the stream."""
        text = text or "".join(event_text(event, named=self._named) for event in self._kept)
        posted = not isinstance(self._exchange.body, str)
        self._finish(AdminReply(200, text) if posted else text, len(text))

    def refuse(self, status: int, document: Any, events: list[str]) -> None:
        """A refusal: ``document`` with ``status``, or, where that is 200, ``events``."""
        if status == 200:
            self.add(events)
            self.give("")
            return
        text = json.dumps(document)
        posted = not isinstance(self._exchange.body, str)
        self._finish(AdminReply(status, text, False) if posted else HttpError(status=status, body=text), len(text))

    def _finish(self, payload: Any, size: int) -> None:
        self.process.ended(self._exchange)
        (self._streamed or self._exchange).answer(payload, size)
