"""What travels beside the body of an HTTP call and of its answer: who asks, who answers, causes, Lamport clocks."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping

CALLER = "X-Seatrial-Caller"
"""``name/incarnation`` of the calling process."""
CALL = "X-Seatrial-Call"
"""Number of the call, unique in the run."""
CAUSE = "X-Seatrial-Cause"
"""Id of the event that the message follows from; both ways."""
CLOCK = "X-Seatrial-Lc"
"""Lamport clock of the sender; both ways."""
REQUEST = "X-Seatrial-Request"
"""Id of the generation request."""
STREAM = "X-Seatrial-Stream"
"""``1`` where the answer is to be streamed."""
ENGINE = "X-Seatrial-Engine"
"""``name/incarnation`` of the engine that answered: not that of the address, when its port was used again."""
TOKEN = "X-Seatrial-Token"
"""The run's secret, without which a front on an address that others reach forwards nothing."""
HASHES = "X-Seatrial-Hashes"
"""JSON: weight version to weight hash, of the versions in this answer."""


def process_text(name: str, incarnation: int) -> str:
    return f"{urllib.parse.quote(name, safe='')}/{incarnation}"


def process_of(text: str) -> tuple[str, int]:
    """(name, incarnation); ``("", 0)`` where the text names no process: a caller that is not of this run."""
    name, _, incarnation = text.rpartition("/")
    return (urllib.parse.unquote(name), int(incarnation)) if incarnation.isdigit() else ("", 0)


def cause_and_clock(headers: Mapping[str, str]) -> tuple[str | None, int]:
    """What a message follows from: (event id or None, Lamport clock)."""
    clock = headers.get(CLOCK, "")
    cause = headers.get(CAUSE, "")
    return (urllib.parse.unquote(cause) or None), int(clock) if clock.isdigit() else 0


def cause_text(event: str | None) -> str:
    return urllib.parse.quote(event or "", safe="/")
