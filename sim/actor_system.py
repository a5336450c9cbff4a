"""Names, births, calls and deaths of the simulated actors: what Ray's control service and its wire do.

The registry is one for a world. Processes reach it through their backend; what they learn from it travels with the
latencies of ``Timings``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from protocol.errors import ActorDied, NameTaken, NoSuchActor, Outcome, PlacementError, SeatrialError, SpawnFailed, bare
from protocol.ports import Engines, Limits, Objects, Placement, Signal, Storage
from sim.actors import ActorProcess, cause
from sim.births import Birth, SpawnSpec
from sim.calls import ActorRef, Call, OrderedRef, RemoteStream, Sender, remote_methods
from sim.cluster import Cluster
from sim.copying import SMALL, Copier, nominal_size, serialise
from sim.deaths import Deaths, local_zombie
from sim.loop import ActorLoop, background
from sim.network import CONTROL, REQUEST, Letter, Network
from sim.placement import PlacementGroupTable
from sim.timings import Timings, ns
from sim.world import World

DRIVER: Final = "driver"
_UNLIMITED: Final = 1_000_000


class ActorSystem:
    """All actors of a world.

    Args:
        world: its clock and evidence.
        network: carries the calls.
        cluster: nodes to run on.
        timings: of spawning, and of noticing deaths.
        costs_s: service cost of a message by actor name or class name; others take ``timings.call_cost_s``.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        cluster: Cluster,
        placement_table: PlacementGroupTable,
        timings: Timings,
        costs_s: Mapping[str, float] | None = None,
    ) -> None:
        self.world = world
        self.network = network
        self.cluster = cluster
        self.placement_table = placement_table
        self.timings = timings
        self.storage_of: Callable[[ActorProcess], Storage] | None = None
        self.objects_of: Callable[[ActorProcess], Objects] | None = None
        """Makes a process's storage port."""
        self.engines_of: Callable[[ActorProcess], Engines] | None = None
        """Makes a process's engines port."""
        self.on_class: Callable[[type], object] | None = None
        """Told of every class that is spawned, before its constructor runs."""
        self.copier = Copier(world.copy_always)
        self.open_calls: dict[int, Call] = {}
        """Calls that their caller has no answer to yet, by number, in the order in which they were made."""
        self.streams: dict[int, RemoteStream] = {}
        self._costs = {name: ns(cost) for name, cost in (costs_s or {}).items()}
        self._cost_ns = ns(timings.call_cost_s)
        self._spawn_ns = ns(timings.spawn_s)
        self._reserved: dict[str, Birth] = {}
        self._specs: dict[str, dict[int, SpawnSpec]] = {}
        self._processes: dict[str, ActorProcess] = {}  # latest incarnation by name
        self._zombies: dict[tuple[str, int], ActorProcess] = {}  # alive, though a later incarnation has the name
        self._deaths = Deaths(self)
        world.kernel.on_exit = self._exited
        previous = world.kernel.open_work
        world.kernel.open_work = lambda: [*previous(), *self._open_work()]

    # --- handles ---

    def ref(self, name: str, incarnation: int) -> ActorRef:
        """A handle. Raises NoSuchActor: there never was such an actor."""
        if name == DRIVER:
            return ActorRef(name, incarnation, {})
        try:
            spec = self._specs[name][incarnation]
        except KeyError:
            raise NoSuchActor(f"there never was an actor {name}/{incarnation}") from None
        return ActorRef(name, incarnation, spec.methods)

    def find(self, name: str, incarnation: int) -> ActorProcess | None:
        """The process of a handle, dead or alive; None when a later incarnation has taken its place."""
        process = self._processes.get(name)
        if process is not None and process.incarnation == incarnation:
            return process
        return self._zombies.get((name, incarnation))

    def lookup(self, name: str) -> ActorRef:
        """Raises NoSuchActor."""
        process = self._processes.get(name)
        if process is None or not process.alive or not process.started or process.declared_dead:
            raise NoSuchActor(f"no living actor is named {name!r}")
        return self.ref(name, process.incarnation)

    # --- calls ---

    def send_call(
        self, caller: ActorProcess, sender: Sender, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | RemoteStream:
        """Send a call; see ``protocol.ports.ActorHandle``. Raises TypeError: an argument cannot be serialised."""
        ref, method = sender.ref, sender.method
        call = Call(caller, sender)
        sent = RemoteStream(call) if method.stream else call
        if not caller.alive:
            return sent  # the rest of a dead process's step: nobody will ever see an answer
        packed = call.packed = self.copier.pack_call(args, kwargs)
        name, incarnation = sender.name, sender.incarnation
        target = self._processes.get(name)
        reachable = True
        if target is None or target.incarnation != incarnation or not target.alive or target.declared_dead:
            target = self.find(name, incarnation)
            reachable = target is not None and local_zombie(caller, target)
            if not reachable and (name, incarnation) in caller.seen_dead:
                call.done = True
                call.error = ActorDied(f"{ref!r} is known to be dead; nothing was sent", outcome=Outcome.NOT_DONE)
                return sent
        number = self.network.next_number()
        event = self.world.record(
            caller,
            "call.sent",
            cause.get(),
            {"call": number, "target": name, "target_inc": incarnation, "method": method.name},
            True,
        )
        if event is None or not caller.alive:  # an injector may act at the emission, which precedes the effect
            return sent
        call.number = number
        call.background = background.get()
        call.sent_id = f"{caller.prefix}{event.n}"
        call.sent_lc = event.lc
        call.target = target
        self.open_calls[number] = call
        if not reachable or target is None:
            self._deaths.call_the_dead(call)
            return sent
        if isinstance(sent, RemoteStream):
            self.streams[number] = sent
        if type(ref) is OrderedRef:
            lane = call.lane = ref._lane(caller)
            call.position = lane.sent
            lane.sent += 1
        size = SMALL if type(packed) is tuple else nominal_size(packed)
        self.network.send(caller, target, REQUEST, call, size, target.request_arrives, call)
        return sent

    def cancel_call(self, process: ActorProcess, call: Call) -> None:
        """Ask the callee to stop a call."""
        target = call.target
        if call.number and not call.done and target is not None:
            self.network.send(process, target, CONTROL, call, SMALL, target.cancel_arrives, call)

    # --- births ---

    async def spawn(
        self,
        spawner: ActorProcess,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        node: str | None,
        placement: Placement | None,
        limits: Limits,
    ) -> ActorRef:
        """See ``protocol.ports.Backend.spawn``."""
        spec = SpawnSpec(cls, serialise((args, kwargs)), remote_methods(cls), limits, node, placement)
        return await self._launch(spawner, name, spec)

    async def restart(self, spawner: ActorProcess, ref: ActorRef) -> ActorRef:
        """See ``protocol.ports.Backend.restart``."""
        spec = self._specs.get(ref.name, {}).get(ref.incarnation)
        if spec is None:
            raise NoSuchActor(f"there never was an actor {ref.name}/{ref.incarnation} that can be restarted")
        await self.signal(spawner, ref, "SIGKILL")
        return await self._launch(spawner, ref.name, spec)

    async def _launch(self, spawner: ActorProcess, name: str, spec: SpawnSpec) -> ActorRef:
        if not spawner.alive:
            return await spawner.loop.create_future()  # type: ignore[no-any-return]  # it is never set
        if self._taken(name):
            raise NameTaken(f"a living process is named {name!r}")
        birth = self._reserved[name] = Birth(spec, name, spawner, self.letter(spawner, "spawn"))
        try:
            if spec.placement is not None:
                await self.placement_table.when_created(spec.placement.group_id, spawner.loop)
                node = self.placement_table.node_of(spec.placement)
            else:
                node = self.cluster.choose(spec.node, spawner.node)
        except BaseException:
            self._reserved.pop(name, None)
            raise
        self._ask(birth, node)
        assert birth.future is not None
        return await birth.future

    def _ask(self, birth: Birth, node: str) -> None:
        birth.asked = True
        self.world.clock.call_after(
            self.world.around("spawn", self._spawn_ns), self._bear, birth, node, background=birth.letter.background
        )

    def restart_from_outside(self, name: str) -> None:
        """Start the dead latest incarnation of a name again, as a supervisor outside of the world would, where it ran.

        Raises:
            NoSuchActor: there never was one.
            NameTaken: a living process has the name.
            PlacementError: its node or its placement group is gone.
        """
        node, spec = self.where_again(name)
        if self._taken(name):
            raise NameTaken(f"a living process is named {name!r}")
        birth = self._reserved[name] = Birth(spec, name, None, Letter(self.network.next_number(), "spawn", False, ""))
        self._ask(birth, node)

    def where_again(self, name: str) -> tuple[str, SpawnSpec]:
        """On which node, and as what, ``restart_from_outside`` starts the latest incarnation once that is dead.

        Raises:
            NoSuchActor, NameTaken, PlacementError: it cannot, as things are.
        """
        old = self._processes.get(name)
        if old is None or old.birth is None:
            raise NoSuchActor(f"there never was an actor {name!r} that can be restarted")
        if self._being_born(name):
            raise NameTaken(f"another process named {name!r} is being started")
        spec = old.birth.spec
        if spec.placement is not None:
            return self.placement_table.node_of(spec.placement), spec
        return self.cluster.choose(spec.node, old.node), spec

    def letter(self, sender: ActorProcess, method: str) -> Letter:
        """An envelope for control messages."""
        return Letter(self.network.next_number(), method, background.get(), f"{sender.prefix}{sender.n}")

    def _taken(self, name: str) -> bool:
        if self._being_born(name):
            return True
        process = self.world.processes.get(name)
        return process is not None and process.alive and not getattr(process, "declared_dead", False)

    def _being_born(self, name: str) -> bool:
        birth = self._reserved.get(name)
        return birth is not None and (birth.asked or (birth.spawner is not None and birth.spawner.alive))

    def _bear(self, birth: Birth, node: str) -> None:
        """The process starts."""
        self._reserved.pop(birth.name, None)
        spec, name = birth.spec, birth.name
        if self.on_class is not None:
            self.on_class(spec.cls)
        reason = self._unfit(node, spec.placement)
        if reason is not None:
            self._answer_birth(birth, None, SpawnFailed(f"{name!r} did not start", attached=(reason,)))
            return
        old = self._processes.get(name)
        if old is not None and old.alive:
            # A zombie: it lives on under a key of its own, so that the end of the run seals it too.
            self._zombies[(name, old.incarnation)] = old
            self.world.processes[old.id] = old
        self.world.incarnations.setdefault(name, 0)  # the first is 1
        incarnation = self.world.next_incarnation(name)
        cost = self._costs.get(name, self._costs.get(spec.cls.__name__, self._cost_ns))
        process = ActorProcess(self, name, incarnation, node, data_calls=spec.limits.data_calls, cost_ns=cost)
        self._adopt(process, spec, birth)
        self.cluster.enter(process)
        if spec.placement is not None:
            self.placement_table.enter(process, spec.placement)
        self.world.receive(process, birth.sent_lc)
        process.context.run(cause.set, birth.letter.sent_id or None)
        self.world.register(process, spec.cls.__qualname__)
        process.loop.deliver(process.context.copy().run, process.construct, birth)

    def _unfit(self, node: str, placement: Placement | None) -> PlacementError | None:
        """Why nothing can be started there any more."""
        if not self.cluster.alive(node):
            return PlacementError(f"node {node} was lost meanwhile")
        if placement is not None and not self.placement_table.holds(placement, node):
            return PlacementError(f"{placement} was removed, or placed anew, meanwhile")
        return None

    def _adopt(self, process: ActorProcess, spec: SpawnSpec, birth: Birth) -> None:
        process.birth = birth
        self._processes[process.name] = process
        self._specs.setdefault(process.name, {})[process.incarnation] = spec
        self.backend_for(process)

    def backend_for(self, process: ActorProcess) -> None:
        """Give a process its port to the world."""
        from sim.backend import SimBackend  # the port imports this module

        process.loop.seatrial_backend = SimBackend(self, process)

    def driver(self, node: str) -> ActorProcess:
        """The process that the run's body runs in. It costs nothing to talk to."""
        process = ActorProcess(self, DRIVER, 0, node, data_calls=_UNLIMITED, cost_ns=0, role="driver")
        process.started = True
        self._processes[DRIVER] = process
        self.backend_for(process)
        self.world.register(process, "driver")
        return process

    def born(self, process: ActorProcess) -> None:
        """``start()`` has returned."""
        if process.birth is not None:
            self._answer_birth(process.birth, self.ref(process.name, process.incarnation), None, process)

    def stillborn(self, process: ActorProcess, error: BaseException) -> None:
        """The constructor or ``start()`` raised."""
        if process.birth is not None:
            failed = SpawnFailed(f"{_what(process)} did not start: {bare(error)}", attached=(error,))
            self._answer_birth(process.birth, None, failed, process)

    def _answer_birth(
        self, birth: Birth, ref: ActorRef | None, error: SeatrialError | None, process: ActorProcess | None = None
    ) -> None:
        if birth.settled:
            return
        birth.settled = True
        spawner = birth.spawner
        if spawner is None:
            return
        if process is None:
            spawner.loop.deliver(birth.settle, ref, error)
            return
        lc = process.lc

        def arrive() -> None:
            spawner.loop.deliver(read)

        def read() -> None:
            self.world.receive(spawner, lc)
            birth.settle(ref, error)

        self.network.send(process, spawner, CONTROL, birth.letter, SMALL, arrive)

    # --- signals and deaths ---

    async def signal(self, sender: ActorProcess, ref: ActorRef, signal: Signal) -> None:
        """See ``Deaths.signal``."""
        await self._deaths.signal(sender, ref, signal)

    def died(self, process: ActorProcess, reason: str) -> None:
        """A process has ended; its callers learn of it later."""
        self._zombies.pop((process.name, process.incarnation), None)
        for number in [n for n, call in self.open_calls.items() if call.caller is process]:
            del self.open_calls[number]
            self.streams.pop(number, None)
        self._deaths.died(process, reason)

    def died_in_birth(self, process: ActorProcess) -> None:
        """Its death is known; so is that it never started."""
        if process.birth is not None and not process.birth.settled:
            dead = ActorDied(f"{process.id} died while it started: {process.death_reason}")
            failed = SpawnFailed(f"{_what(process)} died while it started", attached=(dead,))
            self._answer_birth(process.birth, None, failed)

    # --- deadlock ---

    def _exited(self, loop: ActorLoop, error: SystemExit) -> None:
        """``sys.exit`` anywhere in an actor ends its process; the driver's goes up, as an error of the run."""
        process = loop.seatrial_backend.process
        if process.role == "driver":
            raise error
        process.die("exited", f"SystemExit: {error}")

    def _open_work(self) -> list[str]:
        return [
            f"{call!r} of {call.caller.id}, waiting for {call.ref_name}/{call.ref_incarnation}"
            for call in self.open_calls.values()
            if call.awaited and not call.background
        ]


def _what(process: ActorProcess) -> str:
    assert process.birth is not None
    return f"{process.name!r} ({process.birth.spec.cls.__qualname__})"
