"""A world of one process: components as plain objects on one asyncio loop, engines that somebody else runs.

For `real.serve`, which puts our gateway in front of engines without Ray. Nothing crosses a process here, so nothing is
copied, killed or restarted; what such a world cannot do is refused by name.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, NoReturn

import aiohttp

from protocol.errors import CallCancelled, NameTaken, NoSuchActor
from protocol.messages import EngineAddress
from protocol.ports import (
    ActorHandle,
    Call,
    EngineClient,
    EngineSpec,
    Limits,
    Objects,
    Placement,
    PlacementGroups,
    Signal,
    Storage,
)
from real.plain_client import PlainEngineClient

Emit = Callable[[str, dict[str, Any]], None]


class LocalBackend:
    """The ``Backend`` port for components in one process.

    Args:
        session: for calls to engines; the owner closes it.
        emit: gets every event, (kind, fields).
        crashed: gets the error of a background task that failed.
    """

    def __init__(self, session: aiohttp.ClientSession, *, emit: Emit, crashed: Callable[[BaseException], None]) -> None:
        self.engines = LocalEngines(session)
        self.emitted = emit
        self.crashed = crashed
        self.node = os.uname().nodename
        self._actors: dict[str, LocalHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prefix = f"{time.time_ns():016x}"  # ids must differ from those of an earlier process at the same engines
        self._ids = 0

    @property
    def me(self) -> ActorHandle:
        return LocalHandle("driver", None)

    @property
    def placement_groups(self) -> PlacementGroups:
        _refuse("placement groups")

    @property
    def storage(self) -> Storage:
        _refuse("storage")

    @property
    def objects(self) -> Objects:
        _refuse("an object store")

    async def spawn(
        self,
        cls: type,
        *args: Any,
        name: str,
        node: str | None = None,
        placement: Placement | None = None,
        limits: Limits = Limits(),
        **kwargs: Any,
    ) -> ActorHandle:
        """Construct and start a component here. Raises NameTaken, and what the component raises."""
        if name in self._actors:
            raise NameTaken(f"a component is named {name!r}")
        if node not in (None, self.node) or placement is not None or limits != Limits():
            _refuse("a place or limits for a component")
        target = cls(*args, **kwargs)
        if hasattr(target, "start"):
            await target.start()
        self._actors[name] = LocalHandle(name, target)
        return self._actors[name]

    async def kill(self, handle: ActorHandle) -> None:
        _refuse("killing a component")

    async def signal(self, handle: ActorHandle, signal: Signal) -> None:
        _refuse("signals to a component")

    async def restart(self, handle: ActorHandle) -> ActorHandle:
        _refuse("restarting a component")

    async def lookup(self, name: str) -> ActorHandle:
        if name not in self._actors:
            raise NoSuchActor(f"no component is named {name!r}")
        return self._actors[name]

    async def nodes(self) -> tuple[str, ...]:
        return (self.node,)

    def periodic(self, interval_s: float, function: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await function()

        return self.background(repeat(), name=name)

    def background(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def blocking(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def wall_time(self) -> float:
        return time.time()

    def new_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}-{self._prefix}-{self._ids:010x}"

    def emit(self, kind: str, **fields: Any) -> None:
        self.emitted(kind, fields)

    async def close(self) -> None:
        """Stop every component, the last one first, and end what still runs in the background."""
        for handle in reversed(self._actors.values()):
            if hasattr(handle.target, "stop"):
                await handle.target.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)


class LocalHandle:
    """The ``ActorHandle`` port on an object of this process."""

    incarnation = 0

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target

    def ordered(self) -> LocalHandle:
        return self  # calls start in the order in which they are made anyway

    def cancel(self, call: Call) -> None:
        assert isinstance(call, LocalCall | LocalStream)
        call.cancel()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        found = None if method.startswith("_") else getattr(self.target, method, None)
        if inspect.isasyncgenfunction(found):
            return functools.partial(_stream, found)
        if not inspect.iscoroutinefunction(found):
            raise AttributeError(f"{method!r} is no remote method (public `async def`) of {self.name}")
        return functools.partial(_call, found)


def _call(method: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> LocalCall:
    return LocalCall(asyncio.get_running_loop().create_task(method(*args, **kwargs)))


def _stream(method: Callable[..., AsyncGenerator[Any, None]], *args: Any, **kwargs: Any) -> LocalStream:
    return LocalStream(method(*args, **kwargs))


class LocalCall:
    """The ``Call`` port: giving up the wait does not stop the callee."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # abandoned calls are no news

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self.task).__await__()

    def cancel(self) -> None:
        """Ask the callee to stop."""
        self.task.cancel()


class LocalStream:
    """The iterator of an async generator. It runs no further than its one reader: nothing piles up for a slow one.

    A time-out around ``anext`` ends the generator, for it runs in the reader's task.
    """

    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        self._items = items
        self._reader: asyncio.Task[Any] | None = None
        self._cancelled = False

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> Any:
        if self._cancelled:
            await self._items.aclose()
            raise CallCancelled("the stream was cancelled")
        reader = self._reader = asyncio.current_task()
        assert reader is not None
        try:
            return await anext(self._items)
        except asyncio.CancelledError:
            if self._cancelled and not reader.uncancel():  # and nobody else wants it to end
                raise CallCancelled("the stream was cancelled") from None
            raise
        finally:
            self._reader = None

    async def aclose(self) -> None:
        await self._items.aclose()

    def cancel(self) -> None:
        """End the generator; its reader gets CallCancelled. While nobody reads, it ends at the next anext or aclose."""
        if not self._cancelled:
            self._cancelled = True
            if self._reader is not None:
                self._reader.cancel()


class LocalEngines:
    """The ``Engines`` port for engines that somebody else starts and ends."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def launch(
        self, spec: EngineSpec, *, name: str, node: str | None = None, placement: Placement | None = None
    ) -> EngineAddress:
        _refuse("starting an engine")

    async def alive(self, name: str) -> bool:
        """Always: nobody here supervises its process, and "dead" would have it replaced."""
        return True

    async def terminate(self, name: str) -> None:
        _refuse("ending an engine")

    def client(self, address: EngineAddress) -> EngineClient:
        return PlainEngineClient(self._session, address)


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(f"{what}: not in a world of one process; use the backend on Ray (--backend real)")
