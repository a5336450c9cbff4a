"""Signals to actors, and how the death of one becomes known to its callers.

A process that was killed is missed after ``kill_notice_s``, one whose node was lost after the health time-out; until
then its callers hear nothing. Whoever has seen a death is told at once from then on, and sends nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from protocol.errors import ActorDied
from protocol.ports import Signal
from sim.actors import ActorProcess
from sim.calls import ActorRef, Call
from sim.copying import SMALL
from sim.network import CONTROL
from sim.timings import ns
from sim.world import Process

if TYPE_CHECKING:
    from sim.actor_system import ActorSystem

Key = tuple[str, int]


def local_zombie(caller: ActorProcess, target: ActorProcess) -> bool:
    """Processes of a node that was declared dead still reach each other."""
    return target.alive and caller.node == target.node


class Deaths:
    """Part of an ActorSystem.

    Args:
        system: whose actors these are.
    """

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._world = system.world
        self._network = system.network
        self._signalled: dict[Key, list[asyncio.Future[None]]] = {}
        """Who waits until a signal to an incarnation is obeyed, or until it is known to be dead."""
        system.cluster.on_declared_dead.append(self._node_declared_dead)

    # --- signals ---

    async def signal(self, sender: ActorProcess, ref: ActorRef, signal: Signal) -> None:
        """Send a signal, and return when it has been obeyed. One to the dead is silent."""
        target = self._system.find(ref.name, ref.incarnation)
        if target is None or not target.alive or (target.declared_dead and not local_zombie(sender, target)):
            return
        if target is sender:
            _apply(target, signal)
            await asyncio.sleep(0)  # killed: never resumed; stopped: resumed when continued
            return
        done: asyncio.Future[None] = sender.loop.create_future()
        key = (ref.name, ref.incarnation)
        self._signalled.setdefault(key, []).append(done)
        letter = self._system.letter(sender, signal)

        def arrives() -> None:
            _apply(target, signal)
            back = self._network.link(target.node, sender.node).latency_ns
            self._world.clock.call_after(back, self._obeyed, key, done, sender, background=letter.background)

        self._network.send(sender, target, CONTROL, letter, SMALL, arrives)
        await done

    def _obeyed(self, key: Key, done: asyncio.Future[None], sender: ActorProcess) -> None:
        waiting = self._signalled.get(key, [])
        if done in waiting:
            waiting.remove(done)
            if not waiting:
                del self._signalled[key]
            sender.loop.deliver(_settle, done)

    # --- deaths ---

    def died(self, process: ActorProcess, reason: str) -> None:
        """A process has ended; its callers learn of it later."""
        process.death_known = False  # its neighbours reached it as a zombie; now they learn of its death too
        if reason == "node_lost":
            notice = self._system.cluster.silence_left_ns(process.node)
        else:
            notice = self._world.around("kill_notice", ns(self._system.timings.kill_notice_s))
        self._world.clock.call_after(notice, self._becomes_known, process)

    def _node_declared_dead(self, node: str, processes: list[Process]) -> None:
        for process in processes:
            if isinstance(process, ActorProcess):
                process.declared_dead = True
                self._becomes_known(process)

    def _becomes_known(self, process: ActorProcess) -> None:
        if process.death_known:
            return
        process.death_known = True
        self._system.died_in_birth(process)
        bereaved: dict[str, tuple[ActorProcess, list[Call]]] = {}
        for call in self._system.open_calls.values():
            if call.target is process and not local_zombie(call.caller, process):
                bereaved.setdefault(call.caller.id, (call.caller, []))[1].append(call)
        # A zombie's own events are no cause of the notice: nobody has heard of them.
        died = None if process.alive else f"{process.prefix}{process.n}"
        for caller, calls in bereaved.values():
            caller.loop.deliver(self._learn, caller, process, calls, died, 0 if process.alive else process.lc)
        for done in self._signalled.pop((process.name, process.incarnation), []):
            loop: Any = done.get_loop()
            loop.deliver(_settle, done)

    def _learn(self, caller: ActorProcess, dead: ActorProcess, calls: list[Call], died: str | None, lc: int) -> None:
        """A caller reads the notice of a death."""
        key = (dead.name, dead.incarnation)
        self._world.receive(caller, lc)
        if key not in caller.seen_dead:
            caller.seen_dead.add(key)
            self._world.emit(caller, "actor.death_noticed", cause=died, target=dead.name, target_inc=dead.incarnation)
        for call in calls:
            self._system.streams.pop(call.number, None)
            call.fail(ActorDied(f"{dead.id} died before it answered {call.method!r}"), died)

    def call_the_dead(self, call: Call) -> None:
        """A call to a process that is dead, of which its caller does not know yet."""
        target = call.target
        if target is not None and not target.death_known:
            return  # the notice of its death will end this call too
        latency = self._network.link(call.caller.node, call.caller.node).latency_ns
        self._world.clock.call_after(
            2 * latency, call.caller.loop.deliver, self._refused, call, background=call.background
        )

    def _refused(self, call: Call) -> None:
        call.caller.seen_dead.add((call.ref_name, call.ref_incarnation))
        call.fail(ActorDied(f"{call.ref_name}/{call.ref_incarnation} is dead"))


def _apply(target: ActorProcess, signal: Signal) -> None:
    if signal == "SIGKILL":
        target.die("killed")
    elif signal == "SIGSTOP":
        target.stop()
    else:
        target.cont()


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
