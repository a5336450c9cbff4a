"""Handles, calls and streams of the simulated world: what a process holds of another one.

A handle is an address. It speaks for whichever process uses it: the running loop says who is calling, so that a handle
which crossed in a message, or was captured in a closure, never speaks through its former owner.

A call is sent when the method is called. It is not itself a future: awaiting it makes one, so that a wait which is
cancelled or timed out leaves the call, and its outcome, as they are.
"""

from __future__ import annotations

import asyncio
import inspect
import zlib
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from protocol import ports
from protocol.errors import ConnectionLost, Outcome, SeatrialError
from protocol.ports import ActorHandle
from sim.copying import Packed, unpack
from sim.network import REQUEST

if TYPE_CHECKING:
    from sim.actors import ActorProcess

RESERVED: Final = ("name", "incarnation", "ordered", "cancel")
"""Members of a handle; a remote method of such a name could never be called."""


class Method:
    """A remote method of a class: a call, or a stream (async generator)."""

    __slots__ = ("name", "stream", "data")

    def __init__(self, name: str, stream: bool, data: bool) -> None:
        self.name = name
        self.stream = stream
        self.data = data


def remote_methods(cls: type) -> dict[str, Method]:
    """The remote methods of a class: its public ``async def`` methods and async generators.

    Raises:
        TypeError: one has a name that a handle uses itself.
    """
    methods: dict[str, Method] = {}
    for name in dir(cls):
        if name.startswith("_"):
            continue
        member: Any = inspect.getattr_static(cls, name)
        member = getattr(member, "__func__", member)
        stream = inspect.isasyncgenfunction(member)
        if not stream and not inspect.iscoroutinefunction(member):
            continue
        if name in RESERVED:
            raise TypeError(f"{cls.__qualname__}.{name}: a handle has a member of this name; rename the method")
        methods[name] = Method(name, stream, getattr(member, "__seatrial_data_call__", False) is True)
    return methods


class Lane:
    """One sequence of ordered calls, from one view in one process. Kernel bookkeeping for both of its ends."""

    __slots__ = ("sent", "next", "early")

    def __init__(self) -> None:
        self.sent = 0
        self.next = 0
        self.early: dict[int, Call] = {}


class ActorRef:
    """The ``ActorHandle`` port: (name, incarnation) and the remote methods of the class that was spawned."""

    def __init__(self, name: str, incarnation: int, methods: dict[str, Method]) -> None:
        self._name = name
        self._incarnation = incarnation
        self._methods = methods

    @property
    def name(self) -> str:
        return self._name

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def ordered(self) -> ActorHandle:
        return OrderedRef(self._name, self._incarnation, self._methods)

    def cancel(self, call: ports.Call) -> None:
        sent: Any = call.call if isinstance(call, RemoteStream) else call
        if not isinstance(sent, Call):
            raise TypeError(f"cancel() takes a call made through a handle, not {type(call).__name__}")
        process = calling_process(self)
        process.system.cancel_call(process, sent)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Underscored names first: while unpickling, `_methods` itself is looked up here.
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is no remote method (public `async def`)")
        method = self._methods.get(name)
        if method is None:
            raise AttributeError(
                f"{name!r} is no remote method (public `async def`) of {self._name}/{self._incarnation}"
            )
        if type(self) is not ActorRef:
            return Sender(self, method)
        # Found directly from the second time on. The sender holds a twin, for a cycle would outlive its last use.
        sender = self.__dict__[name] = Sender(ActorRef(self._name, self._incarnation, self._methods), method)
        return sender

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorRef):
            return NotImplemented
        return self._name == other._name and self._incarnation == other._incarnation

    def __hash__(self) -> int:
        # Not hash(str), which differs from process to process and would order sets of handles differently.
        return zlib.crc32(self._name.encode()) * 1_000_003 + self._incarnation

    def __repr__(self) -> str:
        return f"<handle {self._name}/{self._incarnation}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._name, self._incarnation, False)


class OrderedRef(ActorRef):
    """A view whose calls start in the order in which they were made."""

    def __init__(self, name: str, incarnation: int, methods: dict[str, Method]) -> None:
        super().__init__(name, incarnation, methods)
        self._lanes: dict[str, Lane] = {}

    def _lane(self, process: ActorProcess) -> Lane:
        """This view's sequence of calls from a process."""
        lane = self._lanes.get(process.id)
        if lane is None:
            lane = self._lanes[process.id] = Lane()
        return lane

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._name, self._incarnation, True)


def _arrive(name: str, incarnation: int, ordered: bool) -> ActorRef:
    """A handle that arrives in this process. Its copy of an ordered view begins a sequence of its own."""
    backend = getattr(_get_running_loop(), "seatrial_backend", None)
    if backend is None:
        raise RuntimeError(f"a handle of {name}/{incarnation} was deserialised outside of any actor")
    ref: ActorRef = backend.process.system.ref(name, incarnation)
    return OrderedRef(name, incarnation, ref._methods) if ordered else ref


class Sender:
    """``handle.method``: calling it sends.

    ``name`` and ``incarnation`` are the handle's: a class with a ``__getattr__`` is slow to read from.
    """

    __slots__ = ("ref", "name", "incarnation", "method")

    def __init__(self, ref: ActorRef, method: Method) -> None:
        self.ref = ref
        self.name = ref._name
        self.incarnation = ref._incarnation
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loop: Any = _get_running_loop()
        try:
            process = loop.seatrial_backend.process
        except AttributeError:
            process = calling_process(self.ref)
        return process.system.send_call(process, self, args, kwargs)


def calling_process(ref: ActorRef) -> ActorProcess:
    """The process that is running.

    Raises:
        RuntimeError: no actor is running.
    """
    backend = getattr(_get_running_loop(), "seatrial_backend", None)
    if backend is None:
        raise RuntimeError(f"{ref!r} was used outside of any actor or driver")
    process: ActorProcess = backend.process
    return process


class Call:
    """The ``Call`` port, and the envelope of its messages.

    ``packed`` is what crosses; ``task``, ``waiting``, ``cancelled`` and ``answered`` are the callee's bookkeeping.
    """

    __slots__ = (
        "answered", "background", "caller", "cancelled", "done", "error", "lane", "method", "more_waiters", "number",
        "packed", "position", "ref_incarnation", "ref_name", "reported", "sent_id", "sent_lc", "spec", "target",
        "task", "value", "waiter", "waiting", "__weakref__",
    )  # fmt: skip

    http = False

    def __init__(self, caller: ActorProcess, sender: Sender) -> None:
        self.caller = caller
        self.ref_name = sender.name
        self.ref_incarnation = sender.incarnation
        self.spec = sender.method
        self.method = sender.method.name
        self.number = 0
        self.sent_id = ""
        self.sent_lc = 0
        self.background = False
        self.packed: Any = None
        self.target: ActorProcess | None = None
        self.lane: Lane | None = None
        self.position = 0
        self.task: asyncio.Task[Any] | None = None
        self.waiting = False
        self.cancelled = False
        self.answered = False
        self.done = False
        self.reported = False
        self.error: BaseException | None = None
        self.value: Any = None
        self.waiter: asyncio.Future[None] | None = None
        self.more_waiters: list[asyncio.Future[None]] | None = None

    def __repr__(self) -> str:
        return f"<call {self.number} {self.ref_name}/{self.ref_incarnation}.{self.method}>"

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done:
            waiter: asyncio.Future[None] = asyncio.Future(loop=self.caller.loop)
            self.wait(waiter)
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.unwait(waiter)
                if not self.done:
                    self.report("unknown", "CancelledError", None)
                raise
        error = self.error
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # else error, traceback, frame and call keep each other alive
        return self.value

    def wait(self, waiter: asyncio.Future[None]) -> None:
        """Have a future set when the call is done."""
        if self.waiter is None:
            self.waiter = waiter
        elif self.more_waiters is None:
            self.more_waiters = [waiter]
        else:
            self.more_waiters.append(waiter)

    def unwait(self, waiter: asyncio.Future[None]) -> None:
        if self.waiter is waiter:
            self.waiter = None
        elif self.more_waiters is not None:
            self.more_waiters = [other for other in self.more_waiters if other is not waiter]

    @property
    def awaited(self) -> bool:
        return self.waiter is not None or bool(self.more_waiters)

    # --- at the caller ---

    def arrive(self, ok: bool, packed: Any, cause: str | None, lc: int) -> None:
        """The answer reaches the caller's node."""
        if self.done:
            return
        loop = self.caller.loop
        if loop._blocked or loop._inbox or loop._io:
            loop.deliver(self.settle, ok, packed, cause, lc)
        else:
            # Nothing is ahead of it: read it now, and save an iteration of the loop.
            if type(packed) is Packed:
                loop._kernel.current = loop  # a handle in it speaks for this actor
                _set_running_loop(loop)
            self.settle(ok, packed, cause, lc)

    def settle(self, ok: bool, packed: Any, cause: str | None, lc: int) -> None:
        """The answer is read by the caller."""
        if self.done:
            return
        caller = self.caller
        if lc > caller.lc:
            caller.lc = lc
        try:
            value = unpack(packed) if type(packed) is Packed else packed
        except Exception as error:
            # The callee did its work; only what it said cannot be read here.
            ok, value = False, SeatrialError(f"the answer of {self!r} cannot be read: {error}", outcome=Outcome.DONE)
        if ok:
            self.finish("done", "", cause, None, value)
        else:
            self.finish(value.outcome.value, type(value).__name__, cause, value, None)

    def fail(self, error: SeatrialError, cause: str | None = None) -> None:
        """End it at the caller with an error that the world made."""
        if not self.done:
            self.finish(error.outcome.value, type(error).__name__, cause, error, None)

    def finish(self, outcome: str, name: str, cause: str | None, error: BaseException | None, value: Any) -> None:
        self.caller.system.open_calls.pop(self.number, None)
        if not self.reported:
            self.report(outcome, name, cause)
        self.done = True
        self.error = error
        self.value = value
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.more_waiters is not None:
            for waiter in self.more_waiters:
                if not waiter.done():
                    waiter.set_result(None)
        self.waiter = self.more_waiters = None

    def report(self, outcome: str, error: str, cause: str | None) -> None:
        """Evidence of the end at the caller; the first end counts (an abandoned wait is one)."""
        if not self.reported and self.number:
            self.reported = True
            data = {"call": self.number, "outcome": outcome, "error": error}
            self.caller.world.record(self.caller, "call.done", cause, data, True)

    # --- what the network says ---

    def lost(self, leg: int) -> None:
        if leg == REQUEST and self.lane is not None and self.target is not None:
            # The later calls of its view must not wait for one that never comes.
            self.target.loop.deliver(self.target.pass_over, self)

    def late(self) -> None:
        """Nothing: a call has no connect phase."""

    def fail_now(self) -> None:
        error = ConnectionLost(f"the connection broke during {self!r}")
        self.caller.loop.deliver(self.fail, error)


class RemoteStream:
    """The async iterator of a remote async generator. A time-out around ``anext`` loses no item.

    The generator runs from the moment of the call, ahead of its reader. ``aclose()`` (or ``contextlib.aclosing``) stops
    it; merely leaving ``async for`` early does not.
    """

    __slots__ = ("call", "_items", "_early", "_next", "_length", "_waiter", "_closed")

    def __init__(self, call: Call) -> None:
        self.call = call
        self._items: deque[Any] = deque()
        self._early: dict[int, Any] = {}  # items that overtook others
        self._next = 0
        self._length: int | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        call = self.call
        while not self._items:
            if call.done and (self._length is None or self._next >= self._length):
                self._closed = True
                if call.error is not None:
                    raise call.error
                raise StopAsyncIteration
            self._waiter = asyncio.Future(loop=call.caller.loop)
            call.wait(self._waiter)
            try:
                await self._waiter
            finally:
                call.unwait(self._waiter)
        return self._items.popleft()

    async def aclose(self) -> None:
        """Stop the generator in the callee, and read no more. Returns before the callee has stopped."""
        if not self._closed:
            self._closed = True
            self._items.clear()
            if not self.call.done:
                self.call.caller.system.cancel_call(self.call.caller, self.call)
                self.call.report("unknown", "CancelledError", None)

    # --- from the network ---

    def item_arrives(self, index: int, packed: Any, lc: int) -> None:
        if not self._closed:
            self.call.caller.loop.deliver(self._take, index, packed, lc)

    def end_arrives(self, length: int, ok: bool, packed: Any, cause: str | None, lc: int) -> None:
        self._length = length
        self.call.arrive(ok, packed, cause, lc)

    def _take(self, index: int, packed: Any, lc: int) -> None:
        caller = self.call.caller
        if lc > caller.lc:
            caller.lc = lc
        if self._closed:
            return
        self._early[index] = unpack(packed)
        while self._next in self._early:
            self._items.append(self._early.pop(self._next))
            self._next += 1
        if self._items and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
