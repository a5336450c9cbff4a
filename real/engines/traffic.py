"""What may happen to an HTTP message on its way, and to a page as it leaves an engine: where faults come in.

The front asks its Traffic at two points of every call and for every part of a stream, and the client at one point
before it connects. This class lets
everything pass at once; `real.faults` has the one that looks at the faults in force.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from protocol.messages import EngineAddress

RequestFate = Literal["deliver", "lose", "duplicate", "break_then_deliver"]
ReplyFate = Literal["deliver", "lose"]
"""lose: the effect has happened, the connection stands in silence."""


class Fate(NamedTuple):
    """What happens to a request.

    deliver: the engine gets it after ``delay_s``. lose: it never does, and the connection stands in silence. duplicate:
    it gets it at once, and again after ``delay_s``. break_then_deliver: the caller's connection breaks at once, the
    engine gets the request after ``delay_s`` all the same.
    """

    what: RequestFate = "deliver"
    delay_s: float = 0.0


class Message(NamedTuple):
    """An HTTP call at the front of an engine."""

    caller: str
    """Name of the calling process, empty for a foreign client."""
    caller_inc: int
    call: int
    sent: str | None
    """Id of its ``call.sent``; None for a foreign client."""
    route: str
    engine: str
    engine_inc: int


class Traffic:
    """Lets every message pass. Methods may take their time (latency, delays, partitions)."""

    @property
    def plain(self) -> bool:
        """Nothing may befall a message now. Asked for every event of a stream."""
        return True

    async def destination(self, message: Message, address: EngineAddress) -> tuple[str, int]:
        """Client side, before connecting: the (host, port) to connect to."""
        return address.host, address.port

    async def request(self, message: Message) -> Fate:
        """Front, when a request has arrived and nothing was recorded or forwarded."""
        return Fate()

    async def reply(self, message: Message) -> ReplyFate:
        """Front, when an answer (or the first part of a stream) is about to leave."""
        return "deliver"

    async def part(self, message: Message) -> None:
        """Front, when a further part of a stream is about to leave: it may be held up, and is not lost by itself."""

    def bad_answer(self, message: Message) -> str | None:
        """Client side, of an exchange byte for byte: what its answer shall be made (`protocol.bad_answers`), if bad."""
        return None

    def page(self, message: Message, status: int, text: bytes) -> tuple[int, bytes]:
        """Front, the answer to a GET: what the caller is to see."""
        return status, text
