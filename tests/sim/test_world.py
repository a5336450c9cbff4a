"""Processes and evidence of a simulated world: what an injector may do at the very emission of a death or a stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic  # bound here: in an actor the module's own is simulated
from typing import Any

import pytest

from protocol.evidence import Event, UndeclaredEvent, encode
from protocol.faulting import Target
from protocol.ports import EngineSpec, backend
from sim.clock import SimulationStopped
from sim.simulation import Simulation
from tests.contract.faulted import until_ready
from tests.sim.worlds import Echo


def run(body: Callable[[Any, Simulation], Any], **options: Any) -> tuple[list[Event], Simulation]:
    events: list[Event] = []
    with Simulation(sinks=[events.append], **options) as simulation:
        simulation.run(lambda port: body(port, simulation), time_limit_s=3600)
        simulation.faults.heal_all()
    return events, simulation


def of(events: list[Event], kind: str, actor: str) -> list[tuple[int, Any]]:
    return [(e.inc, e.data.get("reason")) for e in events if e.kind == kind and e.actor == actor]


def once(simulation: Simulation, kind: str, actor: str, act: Callable[[], None]) -> None:
    """Act at the emission of the first event of a kind, before its effect."""

    def see(event: Event) -> None:
        if event.actor == actor:
            off()
            act()

    off = simulation.world.hook(kind, see)


async def two(port: Any) -> None:
    """``engine-0`` and the actor ``echo`` on node-1."""
    address = await port.engines.launch(EngineSpec("tiny-cpu"), name="engine-0", node="node-1")
    await until_ready(port.engines.client(address))
    await port.spawn(Echo, name="echo", node="node-1")


@pytest.mark.parametrize("name", ["engine-0", "echo"])
def test_what_is_started_again_at_its_death_dies_once_and_its_successor_lives(name: str) -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await two(port)
        old = simulation.world.processes[name]

        def restart() -> None:
            simulation.faults.inject("restart_empty", Target(name=name), {}, must_hit={}, transient=True)

        once(simulation, "actor.died", name, restart)
        old.die("killed")
        await asyncio.sleep(5)
        new = simulation.world.processes[name]
        assert new.alive and not old.alive and new.incarnation == old.incarnation + 1
        node = simulation.cluster.node("node-1")
        assert node.capacity["GPU"] - node.free["GPU"] == 10_000  # one engine's: nothing was given back twice

    events, _ = run(body, nodes=2)
    assert [reason for _, reason in of(events, "actor.died", name)] == ["killed"]
    assert len(of(events, "actor.spawned", name)) == 2


@pytest.mark.parametrize("name", ["engine-0", "echo"])
def test_a_node_that_is_lost_at_a_death_ends_it_once(name: str) -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await two(port)
        process = simulation.world.processes[name]
        once(simulation, "actor.died", name, lambda: simulation.cluster.lose("node-1"))
        process.die("killed")
        assert not process.alive and process.death_reason == "node_lost"
        simulation.cluster.restore("node-1")
        node = simulation.cluster.node("node-1")
        assert node.free == node.capacity

    events, _ = run(body, nodes=2)
    other = "echo" if name == "engine-0" else "engine-0"
    assert [reason for _, reason in of(events, "actor.died", name)] == ["killed"]
    assert [reason for _, reason in of(events, "actor.died", other)] == ["node_lost"]


@pytest.mark.parametrize("kind", ["actor.stopped", "actor.continued"])
def test_what_is_killed_at_its_stop_or_continuation_is_only_dead(kind: str) -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await port.spawn(Echo, name="echo")
        process = simulation.world.processes["echo"]
        once(simulation, kind, "echo", lambda: process.die("killed"))
        process.stop()
        process.cont()
        assert not process.alive and process.stopped is (kind == "actor.continued")

    events, _ = run(body)
    assert [e.kind for e in events if e.actor == "echo"][-2:] == [kind, "actor.died"]


class Loose:
    """Emits what nobody declared, and goes on."""

    async def emit(self) -> None:
        for kind, fields in (("test.nothing", {}), ("test.mark", {"which": 1}), ("test.mark", {"what": 1})):
            with pytest.raises(UndeclaredEvent):
                backend().emit(kind, **fields)
        backend().emit("test.mark", what="in order")


def test_what_cannot_be_recorded_takes_no_number() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        await (await port.spawn(Loose, name="loose")).emit()

    events, simulation = run(body)
    assert [e.seq for e in events] == list(range(1, simulation.world.seq + 1))
    own = [e for e in events if e.actor == "loose"]
    assert [e.n for e in own] == list(range(1, len(own) + 1)) and own[-1].kind == "test.mark"


def test_batches_are_every_event_once_in_order_as_the_file_has_them() -> None:
    async def body(port: Any, simulation: Simulation) -> None:
        echo = await port.spawn(Echo, name="echo")
        for _ in range(400):
            await echo.echo(1)
        for _ in range(1100):  # more than a batch in one step
            simulation.world.observe("run.healed", faults=0)

    batches: list[list[Event]] = []
    written: list[bytes] = []
    events, simulation = run(body, batches=[batches.append], write=written.append)
    assert [event for batch in batches for event in batch] == events and simulation.world.seq == len(events)
    assert max(map(len, batches)) == 512 and len(batches) == len(written)
    # The lines of calls are made when a batch is handed on; they are what the event said when it was made.
    assert b"".join(written).decode() == "".join(map(encode, events))
    assert sum(event.kind == "call.done" for event in events) == 400


def test_what_an_endless_callback_has_recorded_is_handed_on_whole() -> None:
    taken: list[Event] = []

    def slow(batch: list[Event]) -> None:
        for event in batch:
            until = monotonic() + (0.7 if event.seq == 200 else 0)
            while monotonic() < until:
                pass  # here the watchdog finds that it has waited for long enough
            taken.append(event)

    def endless(world: Any) -> None:
        while True:
            world.observe("run.healed", faults=0)

    async def body(port: Any, simulation: Simulation) -> None:
        endless(simulation.world)

    with Simulation(batches=[slow], hang_after_s=0.5) as simulation:
        with pytest.raises(SimulationStopped, match="has not come back"):
            simulation.run(lambda port: body(port, simulation))
    assert [event.seq for event in taken] == list(range(1, simulation.world.seq + 1))
