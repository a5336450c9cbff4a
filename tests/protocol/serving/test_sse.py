"""Server-sent events wherever the pieces of a stream are cut."""

from __future__ import annotations

import pytest

from protocol.serving.sse import EventParser, EventTooLong, event_bytes

STREAM = b'event: message_start\ndata: {"a": 1}\n\n: a comment\n\ndata: two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_any_cut_gives_the_same_events(size: int) -> None:
    parser = EventParser(1 << 20)
    events = []
    for at in range(0, len(STREAM), size):
        events += parser.feed(STREAM[at : at + size])
    assert [(event.name, event.data) for event in events] == [
        ("message_start", '{"a": 1}'), ("", ""), ("", "two\nlines"), ("", "[DONE]"),
    ]  # fmt: skip
    assert b"".join(event.raw for event in events) == STREAM and parser.rest == b""


def test_what_is_cut_short_is_left() -> None:
    parser = EventParser(100)
    assert parser.feed(b"data: one\n\ndata: tw")[0].data == "one"
    assert parser.rest == b"data: tw"


def test_an_endless_event_is_refused() -> None:
    parser = EventParser(10)
    with pytest.raises(EventTooLong):
        parser.feed(b"data: much too long")


def test_an_event_is_read_as_it_is_written() -> None:
    (event,) = EventParser(100).feed(event_bytes("a\nb", "error"))
    assert (event.name, event.data) == ("error", "a\nb")
