"""Admin POSTs to one engine: each delivery is recorded, and what it changed."""

from __future__ import annotations

import json
import os
from typing import Any

import aiohttp

from real.engines.generations import Generations
from real.engines.inbound import Inbound
from real.engines.served import Served
from real.engines.weights import WeightsNotFound, read_weights
from real.evidence import ProcessLog

_HALF_DONE = "Weights were updated, but"
"""So begins SGLang's 400 after a load whose flush was refused: the weights have changed all the same."""

Answer = tuple[int, str, bytes]
"""(status, content type, body)."""


class Posts:
    """Delivers admin POSTs to one engine.

    Args:
        session: to the engine's private port.
        served: the weights it serves; kept up to date here.
        storage: folder that stands for the shared storage.
        generations: what is in flight.
    """

    def __init__(
        self,
        log: ProcessLog,
        session: aiohttp.ClientSession,
        served: Served,
        storage: str,
        generations: Generations,
    ) -> None:
        self._log = log
        self._session = session
        self._served = served
        self._storage = storage
        self._generations = generations
        self._paused = False

    async def deliver(self, inbound: Inbound) -> Answer:
        """Forward a POST. Raises aiohttp.ClientError: the engine broke the connection."""
        self._log.answered(
            inbound.lc, inbound.cause, "engine.post", route=inbound.route, status=0, delivery=inbound.delivery
        )
        asked = _object(inbound.body)
        if asked.get("abort_all_requests", inbound.route == "/update_weight_version"):
            self._log.answered(inbound.lc, inbound.cause, "engine.abort_asked", request="", everything=True)
        if inbound.route == "/update_weights_from_disk":
            return await self._update_weights(asked)
        if inbound.route == "/pause_generation":
            return await self._pause(inbound, str(asked.get("mode", "abort")))
        if inbound.route == "/abort_request":
            rid, everything = str(asked.get("rid") or ""), bool(asked.get("abort_all"))
            self._log.answered(inbound.lc, inbound.cause, "engine.abort_asked", request=rid, everything=everything)
        status, content_type, body = answer = await self._forward(inbound)
        if status == 200:
            if inbound.route == "/continue_generation" and self._paused:
                self._paused = False
                self._log.answered(0, None, "engine.resumed")
            elif inbound.route == "/flush_cache":
                self._note_flushed()
            elif inbound.route == "/update_weight_version":
                self._served.relabelled(str(asked.get("new_version", "")))
        return answer

    async def _pause(self, inbound: Inbound, mode: str) -> Answer:
        # Mode abort takes effect at once and is answered when everything has ended, a second later at the earliest.
        at_once = mode == "abort"
        if at_once:
            self._note_paused(mode)
        answer = await self._forward(inbound)
        if answer[0] == 200 and not at_once:
            self._note_paused(mode)
        return answer

    def _note_paused(self, mode: str) -> None:
        self._paused = True
        self._log.answered(0, None, "engine.paused", mode=mode)

    def _note_flushed(self) -> None:
        if self._served.flushed():
            self._log.answered(0, None, "engine.flushed")

    async def _update_weights(self, asked: dict[str, Any]) -> Answer:
        """Read what the engine is about to load, have it loaded, and record what the engine serves from here on."""
        served = self._served
        path = str(asked.get("model_path", ""))
        version = str(asked.get("weight_version") or "")
        flush = bool(asked.get("flush_cache", True))
        try:
            found = await read_weights(self._storage, path, self._log)
        except WeightsNotFound:
            found = None  # the engine will find nothing either, and says so after its own time
        asked = {**asked, "model_path": os.path.join(self._storage, path)}
        served.change_begins()
        try:
            async with self._session.post("/update_weights_from_disk", json=asked) as reply:
                body = await reply.read()
                answer = (reply.status, reply.headers.get("Content-Type", "application/json"), body)
            said = _object(body)
            ok = reply.status == 200 and bool(said.get("success", True))
            text = str(said.get("message", body.decode(errors="replace")))[:1000]
            if found is not None and (ok or text.startswith(_HALF_DONE)):
                before = served.weight_hash
                served.changed(version, found.weight_hash, flushed=ok and flush)
                if not ok:
                    served.flush_refused(before)
                elif flush:
                    self._note_flushed()
            self._log.answered(
                0, None, "engine.weights", version=served.version, weight_hash=served.weight_hash, ok=ok, detail=text,
                in_flight=self._generations.in_flight,
            )  # fmt: skip
        finally:
            served.change_ended()
        return answer

    async def _forward(self, inbound: Inbound) -> Answer:
        request = inbound.request
        content = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.post(request.rel_url, data=inbound.body, headers=content) as answer:
            body = await answer.read()
            return answer.status, answer.headers.get("Content-Type", "text/plain"), body


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
