"""The process that hosts a component on Ray: one Ray async actor, one event loop, one thread.

The rules are those of DESIGN.md ("The central idea") and of ``protocol/ports.py``. What Ray leaves open is
settled here:

* **Remote methods** are found on the class when it is spawned and travel in the handle, so that ``handle.nope`` raises
  AttributeError where it is written. A name of the handle itself (``name``, ``incarnation``, ``ordered``, ``cancel``)
  would hide a method; such a class is refused by ``spawn`` with a TypeError.
* **Concurrency**: Ray's own limit is set out of reach. Data calls take a slot of a FIFO semaphore, control calls none.
* **Cancelling** is a message to this process, never ``ray.cancel``, which also cancels whatever the callee called.
* **Errors** are returned as data: Ray re-raises a copy that lost its fields.
* **Crash**: the process leaves by ``os._exit``; no ``finally`` runs, as after a SIGKILL.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import pickle
import sys
from collections.abc import AsyncIterator
from typing import Any

from protocol.errors import CallCancelled, portable
from real.backend import RealBackend
from real.handles import Header, Reply
from real.registry import ProcessIdentity, RunConfig, SpawnSpec

_QUEUE_ITEMS = 1  # between the generator and Ray, which takes one item at a time


@dataclasses.dataclass
class _Sequence:
    """Calls of one ``ordered()`` view, as they arrive."""

    next: int = 0
    waiting: dict[int, asyncio.Future[None]] = dataclasses.field(default_factory=dict)
    given_up: set[int] = dataclasses.field(default_factory=set)


class ActorHost:
    """The Ray actor class around a component. Its methods are the wire; the component's are called by name."""

    def __init__(self, run: RunConfig, identity: ProcessIdentity) -> None:
        for folder in run.python_path:  # where the driver finds its classes, this process must find them too
            if folder not in sys.path:
                sys.path.append(folder)
        self._backend = RealBackend(run, identity)
        self._backend.own_process()
        self._instance: Any = None
        self._slots = asyncio.Semaphore(1)
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._sequences: dict[int, _Sequence] = {}
        # A cancel may overtake its call. Bounded, because most of these name calls that have answered meanwhile.
        self._cancelled_before: collections.deque[int] = collections.deque(maxlen=1024)

    async def boot(self, spec: SpawnSpec, cause: str | None, lc: int) -> Reply:
        """Construct the component and await its ``start()``. An error is the spawner's to report."""
        self._slots = asyncio.Semaphore(spec.data_calls)
        log = self._backend.log
        log.received(lc, cause)
        log.emit("actor.spawned", cls=spec.cls, node=self._backend.node, role="actor")
        try:
            await self._backend.register()
            cls, args, kwargs = pickle.loads(spec.payload, buffers=spec.buffers)
            self._backend.hosts = cls
            self._instance = cls(*args, **kwargs)
            start = getattr(self._instance, "start", None)
            if start is not None:
                await start()
            await self._backend.registered_as_started()
        except (SystemExit, KeyboardInterrupt):
            raise  # Ray ends the process
        except BaseException as error:  # a CancelledError too: nobody else would ever answer the spawner
            log.emit("actor.died", reason="crashed", detail=f"{type(error).__name__}: {error}")
            # The spawner kills this process when it has the answer; should it be dead itself, nobody else would.
            asyncio.get_running_loop().call_later(5.0, os._exit, 1)
            return Reply("error", portable(error), log.latest, log.lc)
        return Reply("value", None, log.latest, log.lc)

    async def call(self, header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
        """Run one remote method."""
        log = self._backend.log
        log.received(header.lc, header.cause)
        task = asyncio.current_task()
        assert task is not None
        reply = Reply("error", _cancelled(header), None, 0)
        try:
            with self._cancellable(header, task):
                async with self._admitted(header):
                    value = await getattr(self._instance, header.method)(*args, **kwargs)
            reply = Reply("value", value, None, 0)
        except asyncio.CancelledError:
            pass
        except (SystemExit, KeyboardInterrupt) as error:
            self._backend.crash(error)
        except BaseException as error:  # of whatever class: nobody else would answer
            reply = Reply("error", portable(error), None, 0)
        return reply._replace(cause=log.latest, lc=log.lc)

    async def stream(self, header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[Reply]:
        """Run one remote async generator; its items in order, then ``end`` or ``error``."""
        log = self._backend.log
        log.received(header.lc, header.cause)
        items: asyncio.Queue[Reply] = asyncio.Queue(_QUEUE_ITEMS)
        # A task of its own: this generator is driven by Ray's task, which must survive a cancel of the component's.
        pump = asyncio.get_running_loop().create_task(self._pump(header, args, kwargs, items))
        try:
            while True:
                reply = await items.get()
                yield reply._replace(cause=log.latest, lc=log.lc)
                if reply.what != "value":
                    return
        finally:
            pump.cancel()

    async def cancel(self, call: int) -> None:
        """Cancel the task of a call; without effect when it has answered."""
        task = self._running.get(call)
        if task is None:
            self._cancelled_before.append(call)
        else:
            task.cancel()

    async def pass_over(self, order: tuple[int, int]) -> None:
        """A call of an ordered view was lost; the later ones must not wait for it."""
        sequence, position = order
        _pass_on(self._sequences.setdefault(sequence, _Sequence()), position)

    async def until_death(self) -> None:
        """Never answers: who waits for it learns of this process's death."""
        await asyncio.get_running_loop().create_future()

    async def _pump(
        self, header: Header, args: tuple[Any, ...], kwargs: dict[str, Any], items: asyncio.Queue[Reply]
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        last = Reply("end", None, None, 0)
        try:
            with self._cancellable(header, task):
                async with self._admitted(header):
                    generator = getattr(self._instance, header.method)(*args, **kwargs)
                    async with contextlib.aclosing(generator):
                        async for item in generator:
                            await items.put(Reply("value", item, None, 0))
        except asyncio.CancelledError:
            last = Reply("error", _cancelled(header), None, 0)
        except (SystemExit, KeyboardInterrupt) as error:
            self._backend.crash(error)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and asyncio.current_task(task.get_loop()) is not task:
                raise  # nobody raised it: what is suspended is closed, at the end of the process
            last = Reply("error", portable(error), None, 0)
        await items.put(last)

    @contextlib.contextmanager
    def _cancellable(self, header: Header, task: asyncio.Task[Any]) -> Any:
        self._running[header.call] = task
        self._backend.card.in_flight += 1
        try:
            yield
        finally:
            self._backend.card.in_flight -= 1
            # A duplicate, which is a fault, has the number of its original.
            if self._running.get(header.call) is task:
                del self._running[header.call]

    @contextlib.asynccontextmanager
    async def _admitted(self, header: Header) -> AsyncIterator[None]:
        """Wait for the call's turn in its sequence, then for a slot if it is a data call."""
        method = getattr(type(self._instance), header.method)
        slot: Any = self._slots if getattr(method, "__seatrial_data_call__", False) else contextlib.nullcontext()
        async with contextlib.AsyncExitStack() as stack:
            overtaken = header.call in self._cancelled_before
            if overtaken:
                self._cancelled_before.remove(header.call)
            if header.order is not None:
                sequence = self._sequences.setdefault(header.order[0], _Sequence())
                position = header.order[1]
                try:
                    if overtaken:
                        raise asyncio.CancelledError
                    await _turn(sequence, position)
                    await stack.enter_async_context(slot)
                finally:
                    # Also when it was cancelled while waiting: the later ones must not wait for it for ever. They run
                    # in a later iteration of the loop, so this call takes its first step before them.
                    _pass_on(sequence, position)
            elif overtaken:
                raise asyncio.CancelledError
            else:
                await stack.enter_async_context(slot)
            yield


async def _turn(sequence: _Sequence, position: int) -> None:
    if position != sequence.next:
        sequence.waiting[position] = asyncio.get_running_loop().create_future()
        await sequence.waiting[position]


def _pass_on(sequence: _Sequence, position: int) -> None:
    sequence.waiting.pop(position, None)
    sequence.given_up.add(position)
    while sequence.next in sequence.given_up:
        sequence.given_up.discard(sequence.next)
        sequence.next += 1
    waiter = sequence.waiting.get(sequence.next)
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _cancelled(header: Header) -> CallCancelled:
    return CallCancelled(f"call of {header.method!r} was cancelled in the callee")
