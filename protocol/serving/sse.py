"""Server-sent events out of the bytes of a streamed answer, each with the bytes that it came as."""

from __future__ import annotations

import re
from typing import NamedTuple

_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile("\r\n|\n|\r")  # str.splitlines would also cut where a text has a separator of paragraphs


class ServerEvent(NamedTuple):
    """One event. ``raw``: its bytes, blank line included; ``data``: its data lines joined; ``name``: of ``event:``."""

    raw: bytes
    data: str
    name: str = ""


class EventTooLong(Exception):
    """An event is longer than may be kept."""


class EventParser:
    """Cuts a stream of bytes into events, wherever its pieces are cut.

    Args:
        longest_bytes: of one event; a longer one raises EventTooLong.
    """

    def __init__(self, longest_bytes: int) -> None:
        self._longest = longest_bytes
        self._pending = b""

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """The events that ``piece`` completes. One without data (a comment) is given too, with empty ``data``.

        Raises EventTooLong; the stream cannot be read on then.
        """
        # A blank line may be cut in two: look again at the last three bytes of what was there.
        start = max(len(self._pending) - 3, 0)
        self._pending += piece
        events = []
        begin = 0
        while (end := _END.search(self._pending, max(start, begin))) is not None:
            events.append(_event(self._pending[begin : end.end()]))
            begin = end.end()
        self._pending = self._pending[begin:]
        if len(self._pending) > self._longest:
            raise EventTooLong(f"an event is longer than {self._longest} bytes")
        return events

    @property
    def rest(self) -> bytes:
        """Bytes after the last whole event. Once the stream has ended: an event that was cut short."""
        return self._pending


def event_bytes(data: str, name: str = "") -> bytes:
    """An event as it is sent."""
    head = f"event: {name}\n" if name else ""
    return (head + "".join(f"data: {line}\n" for line in data.split("\n")) + "\n").encode()


def _event(raw: bytes) -> ServerEvent:
    name, data = "", []
    for line in _LINE_END.split(raw.decode("utf-8", "replace")):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return ServerEvent(raw, "\n".join(data), name)
