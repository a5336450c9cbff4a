"""Components of the contract tests: ordinary classes, as a user would write them. They ask for no world."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from protocol.errors import SeatrialError, StorageNotFound
from protocol.evidence import UndeclaredEvent
from protocol.ports import ActorHandle, backend, data_call


class Box:
    """Holds what it is given, by reference."""

    def __init__(self, content: Any = None) -> None:
        self.content = content
        self.error = SeatrialError("kept", detail=["original"])

    async def put(self, content: Any) -> None:
        self.content = content

    async def get(self) -> Any:
        return self.content

    async def spoil(self, content: list[Any]) -> list[Any]:
        """Changes its argument, and what it was constructed with."""
        content.append("spoilt")
        self.content.append("spoilt")
        return content

    async def raise_kept(self) -> None:
        raise self.error

    async def kept_detail(self) -> list[str]:
        detail: list[str] = self.error.fields["detail"]
        return detail

    async def is_writable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    async def content_is_writable(self) -> bool:
        return bool(self.content.flags.writeable)

    async def zeros(self, n: int) -> Any:
        return np.zeros(n)

    async def unserialisable(self) -> Any:
        return threading.Lock()


class Relay:
    """Calls others through handles that it was given."""

    def __init__(self, target: ActorHandle | None = None) -> None:
        self.target = target

    async def aim(self, message: dict[str, ActorHandle]) -> None:
        self.target = message["target"]

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self.target, method)(*args)

    async def aimed_at(self) -> ActorHandle | None:
        return self.target

    async def myself(self) -> ActorHandle:
        return backend().me

    async def look_up(self, name: str, attribute: str) -> str:
        """The class of the error that an attribute of a looked-up handle raises, here in this process."""
        try:
            getattr(await backend().lookup(name), attribute)
        except AttributeError as error:
            return type(error).__name__
        return "no error"

    async def spawn(self, cls: type, name: str) -> ActorHandle:
        return await backend().spawn(cls, name=name)


class Worker:
    """Does things that take time, and knows what became of them."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.finished: list[Any] = []
        self.cancelled: list[Any] = []
        self.running = 0
        self.most_running = 0
        self.door = asyncio.Event()

    async def ping(self) -> str:
        return "pong"

    async def report(self) -> dict[str, list[Any]]:
        return {"begun": self.begun, "finished": self.finished, "cancelled": self.cancelled}

    async def work(self, key: Any, duration_s: float) -> Any:
        self.begun.append(key)
        try:
            await asyncio.sleep(duration_s)
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        self.finished.append(key)
        return key

    async def note(self, key: Any) -> Any:
        self.begun.append(key)
        return key

    async def work_on_regardless(self, duration_s: float) -> str:
        try:
            await asyncio.sleep(duration_s)
        except asyncio.CancelledError:
            return "finished all the same"
        return "finished"

    async def wait_at_most(self, remaining_s: float) -> float:
        """A deadline that came as a duration; returns how long the wait took by this node's clock."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(began + remaining_s):
                await asyncio.sleep(3600)
        except TimeoutError:
            pass
        return loop.time() - began

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    async def wait_for_door(self) -> str:
        await self.door.wait()
        return "through"

    async def open_door(self) -> None:
        self.door.set()

    async def count_up(self) -> int:
        """Reads, lets others run, writes: one thread, so nothing is lost between two awaits."""
        await asyncio.sleep(0)
        self.running += 1
        return self.running

    @data_call
    async def bounded_work(self, key: Any, duration_s: float) -> Any:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.work(key, duration_s)
        finally:
            self.running -= 1

    async def peak(self) -> int:
        return self.most_running

    async def block(self, duration_s: float) -> None:
        await backend().blocking(duration_s)


class Turnstile:
    """A condition that data calls wait on and a control call notifies."""

    def __init__(self) -> None:
        self.condition = asyncio.Condition()
        self.open = False
        self.inside = 0
        self.most_inside = 0

    @data_call
    async def enter(self) -> int:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            async with self.condition:
                await self.condition.wait_for(lambda: self.open)
        finally:
            self.inside -= 1
        return 1

    async def occupancy(self) -> tuple[int, int]:
        return self.inside, self.most_inside

    async def release(self) -> None:
        async with self.condition:
            self.open = True
            self.condition.notify_all()


class Bare(BaseException):
    """No Exception: ``except Exception`` lets it pass."""


def raise_bare(kind: str) -> None:
    """Raise something that is no Exception."""
    raise {
        "BaseException": BaseException("bare"),
        "Bare": Bare("bare"),
        "GeneratorExit": GeneratorExit("bare"),
        "BaseExceptionGroup": BaseExceptionGroup("bare", [asyncio.CancelledError()]),
        "CancelledError": asyncio.CancelledError("bare"),
    }[kind]


class StartsBadly:
    """Its ``start()``, or its constructor, raises something that is no Exception."""

    def __init__(self, kind: str, *, in_constructor: bool = False) -> None:
        self.kind = kind
        if in_constructor:
            raise_bare(kind)

    async def start(self) -> None:
        await asyncio.sleep(0)
        raise_bare(self.kind)


class Raiser:
    """Raises what it is asked to."""

    @data_call
    async def bare(self, kind: str) -> None:
        await asyncio.sleep(0)
        raise_bare(kind)

    @data_call
    async def bare_after(self, n: int, kind: str) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise_bare(kind)

    async def raise_this(self, error: BaseException) -> None:
        raise error

    async def raise_class(self, cls: type[SeatrialError], outcome: Any, fields: dict[str, Any]) -> None:
        error = cls(
            "the message",
            outcome=outcome,
            attached=(StorageNotFound("a shard", path="v7/shard-0"), ValueError("foreign")),
            **fields,
        )
        error.add_note("first note")
        error.add_note("second note")
        raise error

    async def raise_foreign(self) -> None:
        error = NeedsArgument("crowded", code=7)
        error.add_note("a note")
        raise error

    async def raise_caused(self) -> None:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise OSError("outer") from inner

    async def raise_group(self) -> None:
        raise ExceptionGroup("both", [ValueError("one"), TypeError("two")])


class NeedsArgument(Exception):
    """Cannot be rebuilt from its ``args`` alone: Ray by itself loses its class."""

    def __init__(self, why: str, *, code: int) -> None:
        super().__init__(f"{why} ({code})")
        self.code = code


class Source:
    """Async generators."""

    def __init__(self) -> None:
        self.door = asyncio.Event()
        self.closed: list[str] = []

    async def open_door(self) -> None:
        self.door.set()

    async def closed_generators(self) -> list[str]:
        return self.closed

    async def count(self, n: int, interval_s: float = 0.0) -> AsyncIterator[int]:
        for i in range(n):
            yield i
            await asyncio.sleep(interval_s)

    async def two_steps(self) -> AsyncIterator[str]:
        yield "first"
        await self.door.wait()
        yield "second"

    async def endless(self, key: str) -> AsyncIterator[int]:
        i = 0
        try:
            while True:
                yield i
                i += 1
                await asyncio.sleep(0.01)
        finally:
            self.closed.append(key)

    async def fails_after(self, n: int, error: BaseException) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise error

    async def dies_after(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        await asyncio.sleep(0.2)  # what was yielded is on its way
        await backend().kill(backend().me)
        yield -1

    @data_call
    async def bounded(self) -> AsyncIterator[int]:
        yield 0
        await self.door.wait()
        yield 1

    @data_call
    async def bounded_call(self) -> str:
        return "had a slot"


class Surface:
    """One of each kind of member."""

    attribute = 1

    async def remote(self) -> str:
        return "remote"

    async def _private(self) -> str:
        return "private"

    def synchronous(self) -> str:
        return "synchronous"

    @property
    def computed(self) -> str:
        return "computed"


class HiddenMethod:
    async def cancel(self) -> None: ...


class FailsToConstruct:
    def __init__(self) -> None:
        raise ValueError("no such colour")


class FailsToStart:
    async def start(self) -> None:
        raise StorageNotFound("no manifest", path="v7/manifest")


class DiesInStart:
    async def start(self) -> None:
        await backend().kill(backend().me)


class Starts:
    """Registers itself with a peer, which calls it back before ``start`` has returned."""

    def __init__(self, peer: ActorHandle) -> None:
        self.peer = peer
        self.steps = ["constructed"]

    async def start(self) -> None:
        await self.peer.aim({"target": backend().me})
        assert await self.peer.call("progress") == ["constructed"]
        await asyncio.sleep(0.05)
        self.steps.append("started")

    async def progress(self) -> list[str]:
        return self.steps


class Background:
    """Owns background tasks, some of which fail."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.task: asyncio.Task[None] | None = None

    async def _fail_later(self) -> None:
        await asyncio.sleep(0.1)
        raise RuntimeError("background task failed")

    async def _tick(self) -> None:
        self.ticks.append(asyncio.get_running_loop().time())

    async def _tick_and_fail(self) -> None:
        await self._tick()
        if len(self.ticks) == 3:
            raise RuntimeError("third tick")

    async def begin_failing(self) -> None:
        self.task = backend().background(self._fail_later(), name="fails")

    async def begin_ticking(self, interval_s: float, *, failing: bool = False) -> float:
        self.task = backend().periodic(interval_s, self._tick_and_fail if failing else self._tick, name="ticks")
        return asyncio.get_running_loop().time()

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()

    async def tick_times(self) -> list[float]:
        return self.ticks

    async def wait(self, duration_s: float) -> str:
        await asyncio.sleep(duration_s)
        return "waited"


class Mortal:
    """Writes to storage around its own death."""

    async def die(self) -> None:
        world = backend()
        await world.storage.write("before", b"1")
        try:
            await world.kill(world.me)
            await world.storage.write("after", b"1")
        finally:
            await world.storage.write("finally", b"1")

    async def linger(self) -> None:
        await backend().storage.write("began", b"1")
        try:
            await asyncio.sleep(3600)
        finally:
            await backend().storage.write("finally", b"1")


class Self:
    """What a component learns of its world."""

    async def who(self) -> tuple[str, int, str]:
        return backend().me.name, backend().me.incarnation, backend().node

    async def ids(self, n: int) -> list[str]:
        return [backend().new_id("req") for _ in range(n)]

    async def wall_time(self) -> float:
        return backend().wall_time()

    async def emit(self, kind: str, fields: dict[str, Any]) -> str:
        try:
            backend().emit(kind, **fields)
        except UndeclaredEvent:
            return "UndeclaredEvent"
        return "recorded"
