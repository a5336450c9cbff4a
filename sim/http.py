"""HTTP exchanges between a simulated caller and a simulated server process: connect phase, read phase, disconnects.

Each exchange opens a connection of its own; the handshake is folded into the request's one-way trip. So the connect
phase ends when the request arrives, and until then nothing can have happened (ConnectTimeout, ConnectionRefused: not
done). After that only an answer tells (ReadTimeout, ConnectionLost: unknown).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from protocol.errors import (
    ConnectionLost,
    ConnectionRefused,
    ConnectTimeout,
    ReadTimeout,
    SeatrialError,
)
from sim.network import CONTROL, REPLY, REQUEST, Network
from sim.timings import ns

if TYPE_CHECKING:
    from protocol.messages import EngineAddress
    from sim.clock import Entry
    from sim.loop import ActorLoop
    from sim.read_timeouts import ReadTimeouts
    from sim.world import Process

# States of an exchange, in order; it never goes back.
CONNECTING, SENT, ARRIVED, ANSWERED, CLOSED = range(5)


class Exchange:
    """One request and its answer. ``future`` (on the caller's loop) gets the payload or the error.

    ``address`` is whom the caller means, as evidence has it; ``server`` is who listens there now.
    """

    __slots__ = (
        "network", "number", "method", "http", "background", "sent_id", "lc", "body", "caller", "loop", "address",
        "server", "future", "state", "on_item", "read_at", "_connect", "_connect_ns", "_connected_at", "_read",
        "_read_late", "_read_rest",
    )  # fmt: skip

    def __init__(
        self,
        network: Network,
        caller: Process,
        loop: ActorLoop,
        address: EngineAddress,
        server: Any,
        route: str,
        body: Any,
        background: bool,
    ) -> None:
        self.network = network
        self.number = network.next_number()
        self.method = route
        self.http = True
        self.background = background
        self.sent_id = ""
        self.lc = 0
        self.body = body
        self.caller = caller
        self.loop = loop
        self.address = address
        self.server = server
        self.future: asyncio.Future[Any] = loop.create_future()
        self.state = CONNECTING
        self.read_at = (0, 0)
        self.on_item: Callable[[Any], None] | None = None
        self._connect: Entry | None = None
        self._connect_ns = 0
        self._connected_at = -1  # never, so far
        self._read: ReadTimeouts | None = None
        self._read_late: ReadTimeouts | None = None  # its time was over before there was a connection
        self._read_rest: Entry | None = None  # what is left of it, counted from a connection that was long in coming

    # --- the caller's side ---

    def open(self, size: int, connect_timeout_s: float | None, read_timeout_s: float | None) -> asyncio.Future[Any]:
        """Send the request. Times in seconds; None or infinity: the system's connect time-out, no read time-out."""
        world = self.network.world
        address = self.address
        event = world.record(
            self.caller,
            "call.sent",
            None,
            {"call": self.number, "target": address.name, "target_inc": address.incarnation, "method": self.method},
            True,
        )
        if event is None:
            return self.future  # a dead caller: the future stays pending for ever, and nobody is there to see it
        self.sent_id = f"{event.actor}/{event.inc}/{event.n}"
        self.lc = event.lc
        connect_s = self.network.timings.os_connect_timeout_s
        if connect_timeout_s is not None and connect_timeout_s != math.inf:
            connect_s = connect_timeout_s
        call_after = world.clock.call_after
        self._connect_ns = ns(connect_s)
        if not self.network.certain(self.caller, self.server, self._connect_ns):
            self._connect = call_after(self._connect_ns, self._connect_expired, background=self.background)
        # Else it arrives in time and the timer would only ever be cancelled; arriving at a lost node starts it late.
        if read_timeout_s is not None and read_timeout_s != math.inf:
            # It begins with the connection, as aiohttp's sock_read does. Counted from here all the same, for a connect
            # phase is nearly always one trip; ``read_expired`` sees to those that took longer.
            self._read = self.network.read_timeouts(read_timeout_s, self.background)
            self._read.add(self)
        self.network.send(self.caller, self.server, REQUEST, self, size, self._arrive)
        return self.future

    def abandon(self) -> None:
        """The caller stops waiting (cancelled): the connection is closed, the outcome unknown. Idempotent."""
        if self.state < ANSWERED:
            self._end("unknown", "Cancelled")
            self._close()

    def lost(self, leg: int) -> None:
        """A fate or a lossy link took a message: the connection stands, and nothing comes."""
        if leg == REQUEST:
            self.late()

    def late(self) -> None:
        """Its request is under way for longer than a link takes: the connection stands, and waits.

        Not with the dead: nobody accepts it there, and the connect time-out goes on.
        """
        if self.state == CONNECTING and self.server.alive:
            self._connected(SENT)

    def fail_now(self) -> None:
        """The caller sees its connection break, though the request is delivered later."""
        self.late()
        self._fail(ConnectionLost(f"{self.method}: connection to {self.server.name} lost"), keep_request=True)

    # --- the network's side ---

    def _arrive(self) -> None:
        if self.state == CLOSED and self._connected_at < 0:
            return  # given up before there was a connection: nothing was sent
        server = self.server
        if not server.alive:
            if self.network.machine_is_up(server.node):
                # Its kernel answers for a dead process at once.
                self.network.send(self.network.world.os_of(server.node), self.caller, CONTROL, self, 0, self.refused)
            elif self._connect is None and self.state == CONNECTING:
                after = self.network.world.clock.call_after
                self._connect = after(self._connect_ns, self._connect_expired, background=self.background)
            return
        if self.state == CONNECTING:
            self._connected(ARRIVED)
        elif self.state == SENT:
            self.state = ARRIVED
        if self.lc > server.lc:
            server.lc = self.lc
        server.receive(self)
        if self.state == CLOSED:
            server.client_gone(self)  # it was under way when its caller closed the connection

    def answer(self, payload: Any, size: int = 0) -> None:
        """The server's answer: a value, or an exception (HttpError) to raise at the caller."""
        server = self.server
        self.network.send(server, self.caller, REPLY, self, size, self._answered, payload, server.lc, server.n)

    def broken(self) -> None:
        """The server's end of the connection is closed without an answer."""
        self._fail(ConnectionLost(f"{self.method}: connection to {self.server.name} lost"))

    def _item(self, value: Any) -> None:
        if self.state == ARRIVED and self.on_item is not None:
            self.loop.deliver(self.on_item, value)

    def _answered(self, payload: Any, lc: int, n: int) -> None:
        if self.state >= ANSWERED:
            return
        self.state = ANSWERED
        if lc > self.caller.lc:
            self.caller.lc = lc
        self._stop_timers()
        if isinstance(payload, SeatrialError):
            self._end(payload.outcome.value, type(payload).__name__, n)
        else:
            self._end("done", "", n)
        loop = self.loop
        if loop._blocked or loop._inbox or loop._io:
            loop.deliver(settle, self.future, payload)
        else:
            settle(self.future, payload)  # nothing is ahead of it: as Call.arrive does

    def refused(self) -> None:
        """The port is closed: nothing was done."""
        self._fail(ConnectionRefused(f"{self.method}: nobody listens at {self.server.name}"))

    def _connect_expired(self) -> None:
        self._connect = None
        if self.state == CONNECTING:
            self._stop_timers()
            self._fail(ConnectTimeout(f"{self.method}: no connection to {self.server.name}"))

    def _connected(self, state: int) -> None:
        """There is a connection."""
        self.state = state
        self._connected_at = self.network.world.clock._now
        self._stop_connect()
        late = self._read_late
        if late is not None:
            self._read, self._read_late = late, None
            late.add(self)

    @property
    def settled(self) -> bool:
        """Answered, failed or given up (sim.read_timeouts.Waiting)."""
        return self.state >= ANSWERED

    def read_expired(self) -> None:
        """The read time-out is over (sim.read_timeouts.Waiting)."""
        reads, self._read = self._read, None
        assert reads is not None
        if self.state == CONNECTING:
            self._read_late = reads
            return
        clock = self.network.world.clock
        rest = self._connected_at + reads.timeout_ns - clock._now
        trip = self.network.link(self.caller.node, self.server.node).spec.latency_s
        if rest > ns(trip):
            self._read_rest = clock.call_after(rest, self._read_over, background=self.background)
        else:
            self._read_over()

    def _read_over(self) -> None:
        self._read_rest = None
        if self.state in (SENT, ARRIVED):
            self._fail(ReadTimeout(f"{self.method}: no answer from {self.server.name}"))

    def _fail(self, error: SeatrialError, keep_request: bool = False) -> None:
        if self.state >= ANSWERED:
            return
        self._end(error.outcome.value, type(error).__name__)
        self.loop.deliver(settle, self.future, error)
        if keep_request:
            self.state = ANSWERED
            self._stop_timers()
        else:
            self._close()

    def _close(self) -> None:
        arrived = self.state == ARRIVED
        self.state = CLOSED
        self._stop_timers()
        if arrived:
            self.network.send(self.caller, self.server, CONTROL, self, 0, self.server.client_gone, self)

    def _end(self, outcome: str, error: str, answered_at: int = 0) -> None:
        cause = f"{self.server.name}/{self.server.incarnation}/{answered_at}" if answered_at else None
        self.network.world.record(
            self.caller, "call.done", cause, {"call": self.number, "outcome": outcome, "error": error}, True
        )

    def _stop_connect(self) -> None:
        if self._connect is not None:
            self._connect.cancel()
            self._connect = None

    def _stop_timers(self) -> None:
        self._stop_connect()
        if self._read is not None:
            self._read.note_settled()
            self._read = None
        if self._read_rest is not None:
            self._read_rest.cancel()
            self._read_rest = None


class Streamed:
    """The answer to one delivery of a request, item by item.

    The items reach the caller in the order they were sent, as bytes on a connection do, and the end of it after them,
    whatever the network does to the messages that carry them here.
    """

    __slots__ = ("_arrived", "_end", "_exchange", "_next", "_sent")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._sent = 0
        self._next = 0
        self._arrived: dict[int, Any] = {}
        self._end: tuple[Any, int, int] | None = None

    def add(self, value: Any, size: int = 0) -> None:
        """Send one item."""
        exchange = self._exchange
        number, self._sent = self._sent, self._sent + 1
        exchange.network.send(exchange.server, exchange.caller, CONTROL, exchange, size, self._arrive, number, value)

    def answer(self, payload: Any, size: int = 0) -> None:
        """Send the end, as ``Exchange.answer``."""
        exchange, server = self._exchange, self._exchange.server
        exchange.network.send(
            server, exchange.caller, REPLY, exchange, size, self._arrive_end, payload, server.lc, server.n
        )

    def _arrive(self, number: int, value: Any) -> None:
        arrived = self._arrived
        if number == self._next:  # nearly always
            self._exchange._item(value)
            self._next += 1
        else:
            arrived[number] = value
        while arrived and self._next in arrived:
            self._exchange._item(arrived.pop(self._next))
            self._next += 1
        if self._end is not None:
            self._arrive_end(*self._end)

    def _arrive_end(self, payload: Any, lc: int, n: int) -> None:
        if self._next < self._sent:
            self._end = (payload, lc, n)
        else:
            self._exchange._answered(payload, lc, n)


def settle(future: asyncio.Future[Any], value: Any) -> None:
    """Give a future its value or its error, unless its owner has given up."""
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
