"""Handles, calls and streams on Ray: what a process holds of another one."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from protocol import ports

if TYPE_CHECKING:
    from real.caller import Caller


class Header(NamedTuple):
    """What travels with a call beside its arguments."""

    call: int
    method: str
    cause: str | None
    lc: int
    order: tuple[int, int] | None
    """(sequence, position in it) of a call through an ``ordered()`` view."""


class Reply(NamedTuple):
    """An answer. Errors travel as data: raised inside Ray they would lose their fields."""

    what: str
    """``value``, ``error``; for a stream also ``end``."""
    value: Any
    cause: str | None
    lc: int


class RealHandle:
    """The ``ActorHandle`` port: an address, resolved to a Ray actor when it is first called.

    Args:
        caller: of the process that holds the handle; it does not travel.
        calls: names of the remote methods; ``streams``: of the async generators.
    """

    __slots__ = ("_caller", "_calls", "_sequence", "_streams", "incarnation", "name")

    name: str
    incarnation: int

    def __init__(
        self,
        caller: Caller,
        name: str,
        incarnation: int,
        calls: frozenset[str],
        streams: frozenset[str],
        sequence: int | None = None,
    ) -> None:
        self._caller = caller
        self.name = name
        self.incarnation = incarnation
        self._calls = calls
        self._streams = streams
        self._sequence = None if sequence is None else (sequence, itertools.count())

    def ordered(self) -> RealHandle:
        return RealHandle(
            self._caller, self.name, self.incarnation, self._calls, self._streams, self._caller.next_number()
        )

    def cancel(self, call: ports.Call) -> None:
        if not isinstance(call, RealCall | RealStream):
            raise TypeError(f"cancel() takes a call made through a handle, not {type(call).__name__}")
        self._caller.cancel_call(self, call.number)

    def next_order(self) -> tuple[int, int] | None:
        if self._sequence is None:
            return None
        sequence, positions = self._sequence
        return sequence, next(positions)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        # Underscored names first: while unpickling, the slots that the test below reads are still empty.
        if method.startswith("_"):
            raise AttributeError(f"{method!r} is no remote method (public `async def`)")
        if method in self._calls:
            return functools.partial(self._caller.send, self, method)
        if method in self._streams:
            return functools.partial(self._caller.send_stream, self, method)
        raise AttributeError(f"{method!r} is no remote method (public `async def`) of {self.name}/{self.incarnation}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RealHandle):
            return NotImplemented
        return (self.name, self.incarnation) == (other.name, other.incarnation)

    def __hash__(self) -> int:
        return hash((self.name, self.incarnation))

    def __repr__(self) -> str:
        return f"<handle {self.name}/{self.incarnation}>"

    def __reduce__(self) -> tuple[Any, ...]:
        ordered = self._sequence is not None
        return _arrive, (self.name, self.incarnation, self._calls, self._streams, ordered)


def _arrive(name: str, incarnation: int, calls: frozenset[str], streams: frozenset[str], ordered: bool) -> RealHandle:
    """A handle that arrives in this process; it speaks through this process's backend."""
    backend: Any = ports._process_backend[-1]
    handle = RealHandle(backend.caller, name, incarnation, calls, streams)
    # Positions of a sequence cannot be shared by two processes; the copy begins one of its own.
    return handle.ordered() if ordered else handle


class RealCall:
    """The ``Call`` port. The answer arrives whether or not anybody waits for it.

    Args:
        gave_up: records that nobody waits any more; called at every wait that ends before the answer.
    """

    __slots__ = ("_gave_up", "_reply", "number")

    def __init__(self, number: int, reply: asyncio.Future[Any], gave_up: Callable[[int], None]) -> None:
        self.number = number
        self._reply = reply
        self._gave_up = gave_up
        reply.add_done_callback(_looked_at)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from asyncio.shield(self._reply).__await__())
        except asyncio.CancelledError:
            if not self._reply.done():
                self._gave_up(self.number)
            raise


def _looked_at(reply: asyncio.Future[Any]) -> None:
    # A call that nobody awaits is abandoned on purpose; asyncio would log its error as never retrieved.
    if not reply.cancelled():
        reply.exception()


class RealStream:
    """The async iterator of a remote async generator. One reader; a time-out around ``anext`` loses no item.

    Args:
        close: asks the callee to stop.
    """

    def __init__(self, number: int, close: Callable[[], None]) -> None:
        self.number = number
        self._close = close
        self._arrived: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue()
        self._over = False
        self._ended = False
        self._begun = False

    def begin(self) -> bool:
        """A delivery of the call begins to answer: whether it is the first one to do so."""
        first, self._begun = not self._begun, True
        return first

    def arrived(self, item: Any) -> None:
        self._arrived.put_nowait((True, item))

    def ended(self, error: BaseException | None) -> None:
        self._ended = True
        self._arrived.put_nowait((False, error))

    def done(self) -> bool:
        """Whether its end has arrived."""
        return self._ended

    def __aiter__(self) -> RealStream:
        return self

    async def __anext__(self) -> Any:
        if self._over:
            raise StopAsyncIteration
        is_item, value = await self._arrived.get()
        if is_item:
            return value
        self._over = True
        if value is None:
            raise StopAsyncIteration
        raise value

    async def aclose(self) -> None:
        """Stop the generator in the callee, and read no more. Returns before the callee has stopped."""
        if not self._over:
            self._over = True
            self._close()
