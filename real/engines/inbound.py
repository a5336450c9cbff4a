"""A request on its way through the front of an engine: its body, what its headers say, and its connection."""

from __future__ import annotations

from aiohttp import web

from real.engines.traffic import Message


class Inbound:
    """A request at the front, with what its headers say."""

    __slots__ = ("body", "cause", "delivery", "lc", "message", "request", "route")

    def __init__(self, request: web.BaseRequest, body: bytes, message: Message, lc: int) -> None:
        self.request = request
        self.body = body
        self.message = message
        self.route = message.route
        self.cause = message.sent
        self.lc = lc
        self.delivery = self.cause or f"{message.engine}/{message.engine_inc}/foreign"

    def break_connection(self) -> None:
        """Reset the caller's connection, as the death of a process does."""
        if self.request.transport is not None:
            self.request.transport.abort()
