"""What goes to the client of one exchange: written by whoever serves it, read by whoever holds the connection.

The two ends are apart, so that a client who leaves ends the reading and nothing else (serving.md 5.2).
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator

from protocol.messages import HttpHead
from protocol.serving.native import NativeFormat

JSON_HEADERS = (("content-type", "application/json"),)


class Downstream:
    """The way to one client. What is written after the client has left is dropped."""

    def __init__(self) -> None:
        self.left = False
        """The client reads no more."""
        self.given_up = False
        """What is served is not to be sent to a backend any more."""
        self.begun = False
        """The head has been written."""
        self._pieces: deque[HttpHead | bytes] = deque()
        self._over = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def head(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        """Begin the answer. Once."""
        assert not self.begun, "an answer has one head"
        self.begun = True
        self._put(HttpHead(status, headers))

    def write(self, piece: bytes) -> None:
        """More of the body."""
        assert self.begun, "a body comes after its head"
        if piece:
            self._put(piece)

    def whole(self, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = JSON_HEADERS) -> None:
        """A whole answer."""
        self.head(status, (*headers, ("content-length", str(len(body)))))
        self.write(body)

    def fail(self, form: NativeFormat, status: int, text: str, *, retry: bool = False) -> None:
        """Tell of a failure in the client's own format: an answer, or the last event of a stream that has begun.

        ``retry``: nothing was done, so the call may be made again. Clients of both formats repeat a 5xx otherwise too.
        """
        if self.begun:
            self.write(form.error_event(status, text))
        else:
            headers = (*JSON_HEADERS, ("x-should-retry", "true" if retry else "false"))
            self.whole(status, json.dumps(form.error(status, text)).encode(), headers)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes. With an error the connection breaks. Idempotent."""
        if not self._over:
            self._over = True
            self._error = error
            self._wake()

    async def pieces(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """For whoever holds the connection: everything in order, then the error that ``end`` was given, raised.

        Leaving it is the client's leaving.
        """
        try:
            while True:
                while self._pieces:
                    yield self._pieces.popleft()
                if self._over:
                    break
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._error is not None:
                raise self._error
        finally:
            self.left = True
            self._pieces.clear()

    def _put(self, piece: HttpHead | bytes) -> None:
        if not self.left:
            self._pieces.append(piece)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
