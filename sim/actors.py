"""An actor of the simulated world: one process, one loop, one thread around a plain class.

What arrives is served one message at a time, each for its cost; its method then runs as a task of the actor's loop.
Data calls take one of ``Limits.data_calls`` slots, first come, first served; control calls take none.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from protocol.errors import CallCancelled, message_of, portable
from sim.calls import Call, RemoteStream
from sim.copying import SMALL, Packed, nominal_size, unpack
from sim.loop import background
from sim.loop_objects import SimTask
from sim.network import CONTROL, REPLY
from sim.world import Process

if TYPE_CHECKING:
    from sim.actor_system import ActorSystem
    from sim.births import Birth

cause: contextvars.ContextVar[str | None] = contextvars.ContextVar("seatrial_cause", default=None)
"""Id of the event (the send) that the running task follows from. Tasks that a handler makes inherit it."""


_new_task: Any = SimTask.__new__
_init_task: Any = SimTask.__init__


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}"


class ActorProcess(Process):
    """A process that hosts an actor (or the driver).

    Args:
        system: of which it is a part.
        data_calls: how many data calls run at once.
        cost_ns: what serving one message occupies it for.
    """

    __slots__ = (
        "system",
        "loop",
        "prefix",
        "role",
        "instance",
        "data_calls",
        "cost_ns",
        "running_data",
        "waiting",
        "context",
        "birth",
        "started",
        "seen_dead",
        "declared_dead",
        "death_known",
        "background_tasks",
    )

    def __init__(
        self,
        system: ActorSystem,
        name: str,
        incarnation: int,
        node: str,
        *,
        data_calls: int,
        cost_ns: int,
        role: str = "actor",
    ) -> None:
        super().__init__(system.world, name, incarnation, node)
        self.system = system
        self.prefix = f"{name}/{incarnation}/"
        self.role = role  # type: ignore[misc]  # a slot here, a class attribute in the base
        self.loop = system.world.kernel.new_loop(self.id, system.cluster.clock_of(node))
        self.instance: Any = None
        self.data_calls = data_calls
        self.cost_ns = cost_ns
        self.running_data = 0
        self.waiting: deque[Call] = deque()
        self.context = contextvars.Context()
        self.birth: Birth | None = None
        self.started = False
        self.seen_dead: set[tuple[str, int]] = set()  # asked for membership only, never iterated
        self.declared_dead = False  # the cluster says so; as a zombie it may act on
        self.death_known = False  # whoever calls it from now on is told at once
        self.background_tasks: dict[asyncio.Task[Any], None] = {}

    # --- life ---

    def construct(self, birth: Birth) -> None:
        """Run the constructor, then ``start()``; the first thing that happens in this process."""
        self.birth = birth
        try:
            args, kwargs = unpack(birth.spec.packed)
            self.instance = birth.spec.cls(*args, **kwargs)
        except SystemExit as error:
            self.die("exited", describe(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a CancelledError too: nobody else would ever answer the spawner
            self._failed_birth(error)
        else:
            task = self.task(self._begin(), "start")
            self.background_tasks[task] = None  # held: asyncio keeps only weak references

    async def _begin(self) -> None:
        try:
            if hasattr(self.instance, "start"):
                await self.instance.start()
        except SystemExit as error:
            self.die("exited", describe(error))
        except (KeyboardInterrupt, GeneratorExit):
            raise  # the person at the terminal, or the end of the run, which closes what is suspended
        except BaseException as error:  # as in the constructor
            self._failed_birth(error)
        else:
            if self.alive:
                self.started = True
                self.system.born(self)
        current = asyncio.current_task()
        if current is not None:
            self.background_tasks.pop(current, None)

    def _failed_birth(self, error: BaseException) -> None:
        if self.alive:
            self.system.stillborn(self, portable(error))
            self.die("crashed", describe(error))

    def on_die(self, reason: str) -> None:
        self.loop.kill()
        self.waiting.clear()
        self.system.died(self, reason)

    def on_stop(self) -> None:
        self.loop.freeze()

    def on_cont(self) -> None:
        self.loop.thaw()

    async def living(self) -> None:
        """Returns at once in a living process, and never in one that died in this very step: its ports are inert."""
        if not self.alive:
            await self.loop.create_future()

    # --- tasks ---

    def task(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A task in a context of its own. Named, for asyncio's own names count through the whole OS process."""
        task = SimTask(coroutine, loop=self.loop, name=name, context=self.context.copy())
        task._named = True
        return task

    def own_background(self, task: asyncio.Task[Any]) -> None:
        """From now on this task's failure is the actor's crash."""
        self.background_tasks[task] = None
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self.background_tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.die("crashed", f"background task {task.get_name()}: {describe(error)}")

    # --- serving ---

    def request_arrives(self, call: Call) -> None:
        """From the network."""
        loop = self.loop
        if self.cost_ns or loop._blocked or loop._inbox or loop._io:
            loop.deliver(self._start, call, cost_ns=self.cost_ns, plain=True)
        else:
            self._start(call)  # nothing is ahead of it, and it runs no code of the actor's: that will be a task

    def _start(self, call: Call) -> None:
        if call.sent_lc > self.lc:
            self.lc = call.sent_lc
        lane = call.lane
        if lane is None:
            self._admit(call)
            return
        if call.position > lane.next:
            lane.early[call.position] = call
            if call.cancelled and not call.answered:
                self._answer_cancelled(call)
        elif call.position == lane.next:
            self._admit(call)
        # A lower position is a duplicate of a call that has started: sequence numbers make delivery at most once.

    def _admit(self, call: Call | None) -> None:
        """Its turn: run it, or queue it for a slot. Then the ordered calls that waited for it, in the same way."""
        while call is not None:
            if call.cancelled:
                if not call.answered:
                    self._answer_cancelled(call)
            elif call.spec.data and self.running_data >= self.data_calls:
                call.waiting = True
                self.waiting.append(call)
                return
            else:
                self._run(call)
            call = _next_in_lane(call)

    def pass_over(self, call: Call) -> None:
        """An ordered call was lost on the way: it takes its turn without running."""
        call.cancelled = call.answered = True
        self._start(call)

    def _run(self, call: Call) -> None:
        spec = call.spec
        if spec.data:
            self.running_data += 1
        serve = self._serve_stream(call) if spec.stream else self._serve(call)
        loop = self.loop
        # Numbered before it is made, which hashes it: to look for a number in vain costs as much again.
        call.task = task = _new_task(SimTask)
        task._number = next(loop._kernel._numbers)
        _init_task(task, serve, loop=loop, name=spec.name, context=self.context.copy())
        task._named = True

    async def _serve(self, call: Call) -> None:
        cause.set(call.sent_id)
        if call.background:
            background.set(True)
        try:
            packed = call.packed
            args, kwargs = packed if type(packed) is tuple else unpack(packed)  # as they are, most of the time
            value = await getattr(self.instance, call.method)(*args, **kwargs)
        except asyncio.CancelledError:
            self._finish(call, False, _cancelled(call))
        except SystemExit as error:
            self.die("exited", describe(error))
        except BaseException as error:
            self._raised(call, error, 0)
        else:
            self._finish(call, True, value)

    async def _serve_stream(self, call: Call) -> None:
        cause.set(call.sent_id)
        if call.background:
            background.set(True)
        index = 0
        try:
            args, kwargs = unpack(call.packed)
            generator = getattr(self.instance, call.method)(*args, **kwargs)
            try:
                async for item in generator:
                    self._send_item(call, index, item)
                    index += 1
                    await asyncio.sleep(0)  # others get a turn, and a cancel is noticed, however fast it yields
            finally:
                await generator.aclose()
        except asyncio.CancelledError:
            self._finish(call, False, _cancelled(call), index)
        except SystemExit as error:
            self.die("exited", describe(error))
        except BaseException as error:
            self._raised(call, error, index)
        else:
            self._finish(call, True, None, index)

    def _raised(self, call: Call, error: BaseException, length: int) -> None:
        """Answer with an error, of whatever class: nobody else would, and the caller would wait for ever."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        if isinstance(error, GeneratorExit) and asyncio.current_task(self.loop) is not call.task:
            raise error  # nobody raised it: what is suspended is closed, at the end of the run
        self._finish(call, False, portable(error), length)

    def _send_item(self, call: Call, index: int, item: Any) -> None:
        packed = self.system.copier.pack(item)
        stream = self.system.streams.get(call.number)
        if stream is not None:
            size = nominal_size(packed)
            self.system.network.send(
                self, call.caller, CONTROL, call, size, stream.item_arrives, index, packed, self.lc
            )

    def _finish(self, call: Call, ok: bool, value: Any, length: int = 0) -> None:
        call.task = None
        call.answered = True
        if call.spec.data:
            self.running_data -= 1
            while self.waiting and self.running_data < self.data_calls:
                following = self.waiting.popleft()
                following.waiting = False
                self._run(following)
                self._admit(_next_in_lane(following))
        self._answer(call, ok, value, length)

    def _answer_cancelled(self, call: Call) -> None:
        call.answered = True
        self._answer(call, False, _cancelled(call), 0)

    def _answer(self, call: Call, ok: bool, value: Any, length: int) -> None:
        if not self.alive:
            return
        system = self.system
        try:
            packed = system.copier.pack(value)
        except TypeError as error:
            ok, packed = False, system.copier.pack(portable(error))
        # An error's traceback holds paths: its length must not decide when it arrives.
        size = len(packed) if ok and type(packed) is Packed else SMALL
        latest = f"{self.prefix}{self.n}"
        if call.spec.stream:
            stream: RemoteStream | None = system.streams.pop(call.number, None)
            if stream is not None:
                system.network.send(
                    self, call.caller, REPLY, call, size, stream.end_arrives, length, ok, packed, latest, self.lc
                )
        else:
            system.network.send(self, call.caller, REPLY, call, size, call.arrive, ok, packed, latest, self.lc)

    def cancel_arrives(self, call: Call) -> None:
        """From the network: ``handle.cancel``."""
        self.loop.deliver(self._cancel, call)

    def _cancel(self, call: Call) -> None:
        if call.task is not None:
            call.task.cancel()
        elif call.waiting:
            call.waiting = False
            self.waiting.remove(call)
            self._answer_cancelled(call)
            self._admit(_next_in_lane(call))
        elif not call.answered:
            call.cancelled = True  # it overtook its call, or that one waits for its turn
            if call.lane is not None and call.lane.early.get(call.position) is call:
                self._answer_cancelled(call)  # at once; its place in the lane is passed over when its turn comes


def _cancelled(call: Call) -> CallCancelled:
    return CallCancelled(f"call of {call.method!r} was cancelled in the callee")


def _next_in_lane(call: Call) -> Call | None:
    """Let the next ordered call start (this one's first step is queued before it); None if it is not here yet."""
    lane = call.lane
    if lane is None:
        return None
    lane.next = call.position + 1
    return lane.early.pop(lane.next, None)
