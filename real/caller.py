"""The calling side of the wire: what a process sends, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from protocol.errors import ActorDied, Outcome, SeatrialError, portable
from real.evidence import ProcessLog
from real.handles import Header, RealCall, RealHandle, RealStream, Reply
from real.registry import NAMESPACE, ProcessIdentity, RunConfig, ray_name

T = TypeVar("T")

_CALLS_PER_PROCESS = 1 << 32


class Caller:
    """Sends the calls of one process and translates their ends.

    Args:
        identity: of the process; numbers of calls are made from its number.
        log: takes ``call.sent`` before a call leaves and ``call.done`` when its end is known.
    """

    def __init__(self, run: RunConfig, identity: ProcessIdentity, log: ProcessLog) -> None:
        self._run = run
        self._first_number = identity.number * _CALLS_PER_PROCESS
        self._numbers = 0
        self._log = log
        self._peers: dict[RealHandle, Any] = {}
        self._dead: set[RealHandle] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself holds a task only weakly

    def next_number(self) -> int:
        """A number that no other process of the run makes."""
        self._numbers += 1
        return self._first_number + self._numbers

    def send(self, handle: RealHandle, method: str, /, *args: Any, **kwargs: Any) -> RealCall:
        """Send a call now. Raises what Ray raises for an argument that cannot be serialised."""
        number = self.next_number()
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        peer = self.peer(handle)
        if peer is None:
            reply.set_exception(died(handle, method, Outcome.NOT_DONE))
            return RealCall(number, reply)
        ref = self._submit(number, handle, method, lambda header: peer.call.remote(header, args, kwargs))
        self.keep(self._receive(number, handle, method, ref, reply), name=f"reply of {method}")
        return RealCall(number, reply)

    def send_stream(self, handle: RealHandle, method: str, /, *args: Any, **kwargs: Any) -> RealStream:
        """Start an async generator now."""
        number = self.next_number()
        stream = RealStream(number, lambda: self.cancel_call(handle, number))
        peer = self.peer(handle)
        if peer is None:
            stream.ended(died(handle, method, Outcome.NOT_DONE))
            return stream
        remote = peer.stream.options(num_returns="streaming")
        refs = self._submit(number, handle, method, lambda header: remote.remote(header, args, kwargs))
        self.keep(self._receive_stream(number, handle, method, refs, stream), name=f"items of {method}")
        return stream

    def cancel_call(self, handle: RealHandle, number: int) -> None:
        peer = self.peer(handle)
        if peer is not None:
            peer.cancel.remote(number)

    def _submit(self, number: int, handle: RealHandle, method: str, send: Callable[[Header], T]) -> T:
        sent = self._log.emit(
            "call.sent", call=number, target=handle.name, target_inc=handle.incarnation, method=method
        )
        try:
            return send(Header(number, method, sent, self._log.lc, handle.next_order()))
        except Exception as error:
            self._log.emit("call.done", call=number, outcome=Outcome.NOT_DONE.value, error=type(error).__name__)
            raise

    async def _receive(
        self, number: int, handle: RealHandle, method: str, ref: Any, reply: asyncio.Future[Any]
    ) -> None:
        try:
            answer: Reply = await ref
        except RayError as failure:
            translated = self._translated(handle, method, failure)
            self._ended(number, translated, None, 0)
            reply.set_exception(translated)
            return
        error = answer.value if answer.what == "error" else None
        self._ended(number, error, answer.cause, answer.lc)
        if error is None:
            reply.set_result(answer.value)
        else:
            reply.set_exception(error)

    async def _receive_stream(
        self, number: int, handle: RealHandle, method: str, refs: Any, stream: RealStream
    ) -> None:
        error: BaseException | None = None
        answer: Reply | None = None
        try:
            async for ref in refs:
                answer = await ref
                if answer.what != "value":
                    break
                stream.arrived(answer.value)
        except RayError as failure:
            error = self._translated(handle, method, failure)
        else:
            error = answer.value if answer is not None and answer.what == "error" else None
        self._ended(number, error, answer.cause if answer else None, answer.lc if answer else 0)
        stream.ended(error)

    def _ended(self, number: int, error: BaseException | None, cause: str | None, lc: int) -> None:
        outcome = Outcome.DONE if error is None else getattr(error, "outcome", Outcome.UNKNOWN)
        name = "" if error is None else type(error).__name__
        self._log.answered(lc, cause, "call.done", call=number, outcome=outcome.value, error=name)

    def _translated(self, handle: RealHandle, method: str, error: RayError) -> SeatrialError:
        """Ray's error for a call whose answer did not come, as ours."""
        if isinstance(error, ActorDiedError):
            self.bury(handle)
        if isinstance(error, RayActorError):
            # ActorUnavailableError as well: the connection broke, and nobody knows what became of the call.
            return died(handle, method, Outcome.UNKNOWN)
        cause = error.cause if isinstance(error, RayTaskError) else error
        remote = portable(cause)
        assert isinstance(remote, SeatrialError)
        return remote

    def peer(self, handle: RealHandle) -> Any:
        """The Ray actor behind a handle; None when this process knows it dead."""
        if handle in self._dead:
            return None
        if handle not in self._peers:
            try:
                name = ray_name(self._run.run, handle.name, handle.incarnation)
                self._peers[handle] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                self._dead.add(handle)
                return None
        return self._peers[handle]

    def adopt(self, handle: RealHandle, peer: Any) -> None:
        """Remember the Ray actor that was just made for a handle."""
        self._peers[handle] = peer

    def bury(self, handle: RealHandle) -> None:
        """From here on the incarnation is known dead in this process."""
        self._dead.add(handle)
        self._peers.pop(handle, None)

    def keep(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run a task that nobody else holds."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def give_up(self) -> None:
        """Cancel what still runs for this process: waits for answers, starts of actors."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def died(handle: RealHandle, method: str, outcome: Outcome) -> ActorDied:
    """The error of a call to a dead incarnation."""
    return ActorDied(f"{handle.name}/{handle.incarnation} is dead; call of {method!r}", outcome=outcome)
