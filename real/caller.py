"""The calling side of the wire: what a process sends, and what becomes of it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from protocol.errors import ActorDied, Outcome, SeatrialError, portable
from real.evidence import ProcessLog
from real.faults.links import Befallen, Links, Passing, broken
from real.handles import Header, RealCall, RealHandle, RealStream, Reply
from real.registry import NAMESPACE, ProcessIdentity, RunConfig, ray_name

T = TypeVar("T")

_CALLS_PER_PROCESS = 1 << 32


class Caller:
    """Sends the calls of one process and translates their ends.

    Args:
        identity: of the process; numbers of calls are made from its number.
        log: takes ``call.sent`` before a call leaves and ``call.done`` when its end is known.
        links: what befalls a message. While no fault of a link is in force, calls go straight to Ray.
    """

    def __init__(self, run: RunConfig, identity: ProcessIdentity, log: ProcessLog, links: Links) -> None:
        self._run = run
        self._me = identity.name
        self._links = links
        self._first_number = identity.number * _CALLS_PER_PROCESS
        self._numbers = 0
        self._log = log
        self._peers: dict[RealHandle, Any] = {}
        self._dead: set[RealHandle] = set()
        self._given_up: set[int] = set()  # calls whose end is recorded, and whose answer may yet come
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
            return RealCall(number, reply, self._gave_up)
        passing, header = self._sent(number, handle, method)
        if self._links.plain:
            ref = self._submit(passing, lambda: peer.call.remote(header, args, kwargs))
            self.keep(self._receive(passing, handle, ref, reply), name=f"reply of {method}")
        else:
            packed = self._submit(passing, lambda: cloudpickle.dumps((args, kwargs)))
            late = self._send_past_faults(passing, header, handle, packed, reply)
            self.keep(late, name=f"call of {method}")
        return RealCall(number, reply, self._gave_up)

    def send_stream(self, handle: RealHandle, method: str, /, *args: Any, **kwargs: Any) -> RealStream:
        """Start an async generator now."""
        number = self.next_number()
        stream = RealStream(number, lambda: self.cancel_call(handle, number))
        peer = self.peer(handle)
        if peer is None:
            stream.ended(died(handle, method, Outcome.NOT_DONE))
            return stream
        passing, header = self._sent(number, handle, method)
        if self._links.plain:
            refs = self._submit(passing, lambda: _generator(peer).remote(header, args, kwargs))
            self.keep(self._receive_stream(passing, handle, refs, stream), name=f"items of {method}")
        else:
            packed = self._submit(passing, lambda: cloudpickle.dumps((args, kwargs)))
            late = self._send_past_faults(passing, header, handle, packed, stream)
            self.keep(late, name=f"stream of {method}")
        return stream

    def cancel_call(self, handle: RealHandle, number: int) -> None:
        if self._links.plain:
            self._cancel(handle, number)
        else:
            self.keep(self._cancel_past_faults(handle, number), name=f"cancel of {number}")

    def _cancel(self, handle: RealHandle, number: int) -> None:
        peer = self.peer(handle)
        if peer is not None:
            peer.cancel.remote(number)

    async def _cancel_past_faults(self, handle: RealHandle, number: int) -> None:
        await self._links.cross(Passing(number, "cancel", self._me, handle.name, None), "control")
        self._cancel(handle, number)

    def _sent(self, number: int, handle: RealHandle, method: str) -> tuple[Passing, Header]:
        sent = self._log.emit(
            "call.sent", call=number, target=handle.name, target_inc=handle.incarnation, method=method
        )
        header = Header(number, method, sent, self._log.lc, handle.next_order())
        return Passing(number, method, self._me, handle.name, sent), header

    def _submit(self, passing: Passing, send: Callable[[], T]) -> T:
        try:
            return send()
        except Exception as error:
            self._log.emit("call.done", call=passing.call, outcome=Outcome.NOT_DONE.value, error=type(error).__name__)
            raise

    # ---- a request under faults ----

    async def _send_past_faults(
        self, passing: Passing, header: Header, handle: RealHandle, packed: bytes, to: asyncio.Future[Any] | RealStream
    ) -> None:
        """Let a request meet what is in force. ``to`` gets the answer."""
        fate = self._links.fate(passing, "request") or Befallen("none")
        if fate.fate == "request_lost":
            peer = self.peer(handle)
            if header.order is not None and peer is not None:
                peer.pass_over.remote(header.order)
            return await self._nothing_comes(passing, handle, to)
        if fate.fate == "error_now":
            self._answer(passing, to, broken(passing.method, handle.name))
        if fate.fate in ("delayed", "error_now"):
            await asyncio.sleep(fate.delay_s)
        # A number of an ordered view is taken once: a second delivery of it would be refused.
        if fate.fate == "duplicated" and header.order is None:
            again = self._deliver(passing, header, handle, packed, to, fate.delay_s)
            self.keep(again, name=f"second delivery of {passing.method}")
        await self._deliver(passing, header, handle, packed, to)

    async def _deliver(
        self,
        passing: Passing,
        header: Header,
        handle: RealHandle,
        packed: bytes,
        to: asyncio.Future[Any] | RealStream,
        delay_s: float = 0.0,
    ) -> None:
        await asyncio.sleep(delay_s)
        await self._links.cross(passing, "request")
        peer = self.peer(handle)
        if peer is None:
            return self._answer(passing, to, died(handle, passing.method, Outcome.UNKNOWN))
        args, kwargs = pickle.loads(packed)
        if isinstance(to, RealStream):
            await self._receive_stream(passing, handle, _generator(peer).remote(header, args, kwargs), to)
        else:
            await self._receive(passing, handle, peer.call.remote(header, args, kwargs), to)

    async def _nothing_comes(self, passing: Passing, handle: RealHandle, to: asyncio.Future[Any] | RealStream) -> None:
        """A message is lost; its caller hears of nothing but the callee's death."""
        peer = self.peer(handle)
        error: SeatrialError = died(handle, passing.method, Outcome.UNKNOWN)
        if peer is not None:
            try:
                await peer.until_death.remote()
            except RayError as failure:
                error = self._translated(handle, passing.method, failure)
        self._answer(passing, to, error)

    async def _reply_passes(self, passing: Passing) -> bool:
        """Let an answer meet what is in force; False: it is lost."""
        if self._links.plain:
            return True
        if self._links.fate(passing, "reply") is not None:
            return False
        await self._links.cross(passing, "reply")
        return True

    # ---- answers ----

    async def _receive(self, passing: Passing, handle: RealHandle, ref: Any, reply: asyncio.Future[Any]) -> None:
        try:
            answer: Reply = await ref
        except RayError as failure:
            return self._answer(passing, reply, self._translated(handle, passing.method, failure))
        if not await self._reply_passes(passing):
            return await self._nothing_comes(passing, handle, reply)
        error = answer.value if answer.what == "error" else None
        self._answer(passing, reply, error, answer.value, answer.cause, answer.lc)

    async def _receive_stream(self, passing: Passing, handle: RealHandle, refs: Any, stream: RealStream) -> None:
        answer = Reply("end", None, None, 0)
        mine = False
        latest: asyncio.Task[None] | None = None  # the latest item that did not arrive at once
        try:
            async for ref in refs:
                answer = await ref
                mine = mine or stream.begin()
                if answer.what != "value":
                    break
                if self._links.plain and (latest is None or latest.done()):
                    if mine:
                        stream.arrived(answer.value)
                else:
                    # Each starts on its way when it comes: latency moves a stream, it does not stretch it.
                    item = self._item_arrives(passing, latest, stream if mine else None, answer.value)
                    latest = self.keep(item, name=f"item of {passing.method}")
        except RayError as failure:
            return self._answer(passing, stream, self._translated(handle, passing.method, failure))
        if not mine:
            return  # of two deliveries the other one answers
        passes = await self._reply_passes(passing)
        if latest is not None:
            await latest
        if not passes:
            return await self._nothing_comes(passing, handle, stream)
        error = answer.value if answer.what == "error" else None
        self._answer(passing, stream, error, None, answer.cause, answer.lc)

    async def _item_arrives(
        self, passing: Passing, before: asyncio.Task[None] | None, stream: RealStream | None, value: Any
    ) -> None:
        """An item that meets what is in force: it arrives after the one ``before`` it, however fast it was."""
        await self._links.cross(passing, "reply")
        if before is not None:
            await before
        if stream is not None:
            stream.arrived(value)

    def _answer(
        self,
        passing: Passing,
        to: asyncio.Future[Any] | RealStream,
        error: BaseException | None,
        value: Any = None,
        cause: str | None = None,
        lc: int = 0,
    ) -> None:
        """A call has ended here. Only the first end counts: its duplicate may answer too."""
        if to.done():
            return
        self._ended(passing.call, error, cause, lc)
        if isinstance(to, RealStream):
            to.ended(error)
        elif error is None:
            to.set_result(value)
        else:
            to.set_exception(error)

    def _gave_up(self, number: int) -> None:
        """A wait was given up: that is an end at the caller, and the first one is what evidence has."""
        if number not in self._given_up:
            self._given_up.add(number)
            self._log.emit("call.done", call=number, outcome=Outcome.UNKNOWN.value, error="CancelledError")

    def _ended(self, number: int, error: BaseException | None, cause: str | None, lc: int) -> None:
        if number in self._given_up:
            self._given_up.discard(number)
            self._log.merge(lc)
            return
        outcome = Outcome.DONE if error is None else getattr(error, "outcome", Outcome.UNKNOWN)
        name = "" if error is None else type(error).__name__
        self._log.answered(lc, cause, "call.done", call=number, outcome=outcome.value, error=name)

    def _translated(self, handle: RealHandle, method: str, error: RayError) -> SeatrialError:
        """Ray's error for a call whose answer did not come, as ours."""
        if isinstance(error, ActorDiedError) and handle not in self._dead:
            self.bury(handle)
            self._log.emit("actor.death_noticed", target=handle.name, target_inc=handle.incarnation)
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


def _generator(peer: Any) -> Any:
    return peer.stream.options(num_returns="streaming")


def died(handle: RealHandle, method: str, outcome: Outcome) -> ActorDied:
    """The error of a call to a dead incarnation."""
    return ActorDied(f"{handle.name}/{handle.incarnation} is dead; call of {method!r}", outcome=outcome)
