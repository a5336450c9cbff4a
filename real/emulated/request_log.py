"""What one emulated engine was asked and what it answered, a line of JSON each, in a file that outlives a SIGKILL.

``event`` is ``listening``, ``begun`` (with ``rid``) or ``ended`` (with ``rid`` and ``status``); ``t`` is the machine's
monotonic clock in seconds, which all processes share. ``status`` is that of the answer, 499 when the client had left.
Only requests that generate are written, and of those only the ones that bring an id (``rid``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from sim.engine_calls import ROUTES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CLIENT_LEFT = 499


class RequestLog:
    """Appends to a file, one write a line, so that what was written is there however the process ends.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        os.write(self._file, json.dumps({"t": time.monotonic(), "event": event, **fields}).encode() + b"\n")

    def middleware(self) -> Any:
        """For the engine's server."""

        @web.middleware
        async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in ROUTES:
                return await handler(request)
            rid = _rid(await request.read())
            if not rid:
                return await handler(request)
            self.write("begun", rid=rid)
            status = CLIENT_LEFT
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                self.write("ended", rid=rid, status=status)

        return logged


def _rid(body: bytes) -> str:
    try:
        document = json.loads(body)
    except ValueError:
        return ""  # the server refuses it
    rid = document.get("rid") if isinstance(document, dict) else None
    return rid if isinstance(rid, str) else ""
