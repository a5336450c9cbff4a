"""A scenario in the simulated world: puts the world together, is the port of injector and driver to it, runs it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from protocol.errors import message_of
from protocol.evidence import Event
from protocol.messages import service_of
from protocol.ports import ActorHandle
from scenarios.deploy import DeployFailed, Service
from scenarios.fault_port import FaultPort
from scenarios.injector import Injector, SeenReplica
from scenarios.load import Scenario
from scenarios.orchestrate import Held, Progress, conduct
from sim.clock import SimulationStopped
from sim.network import LinkSpec
from sim.resources import show
from sim.simulation import Simulation
from sim.timings import Timings

_SHORT = 400  # characters of a report that go into one event


@dataclasses.dataclass(slots=True)
class SimResult:
    """How a simulated run ended. ``reason`` is that of run.finished."""

    reason: str
    detail: str
    events: int
    simulated_s: float
    digest: str
    refused: list[str]
    """Steps that could not be done."""


class SimStage(FaultPort):
    """One scenario in one simulated world; a context manager.

    Args:
        scenario: what runs.
        seed: of everything.
        sinks: consumers of every event.
        batches: consumers of some hundred events at a time, such as the judge.
        write: takes the encoded lines.
        explore: draw orders and delays from the seed.
        copy_always: copy declared immutable messages too.
        hang_after_s: real seconds in which a callback of an actor must come back; None: sim.watchdog's.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        sinks: Iterable[Callable[[Event], None]] = (),
        batches: Iterable[Callable[[list[Event]], object]] = (),
        write: Callable[[bytes], object] | None = None,
        explore: bool = False,
        copy_always: bool = False,
        hang_after_s: float | None = None,
    ) -> None:
        super().__init__()
        self.scenario = scenario
        self.seed = seed
        model = scenario.model
        self.simulation = Simulation(
            seed=seed,
            nodes=model.topology.nodes,
            gpus_per_node=model.topology.gpus_per_node,
            sinks=sinks,
            batches=batches,
            write=write,
            explore=explore,
            copy_always=copy_always,
            timings=_timings(scenario),
            costs_s=_costs(scenario),
            hang_after_s=hang_after_s,
        )
        self.world = self.simulation.world
        self.progress = Progress()
        self._born: dict[str, int] = {}
        self._launches = 0
        self._draws = self.world.stream("injector")
        self._quiet = asyncio.Event()
        self._listen: Callable[[str, Any], None] | None = None
        simulation = self.simulation
        self.engines = simulation.engines
        for link in model.network.links:
            spec = LinkSpec(link.latency_s, link.jitter_s, link.loss, link.reorder, 0.005, link.bandwidth_bytes_per_s)
            simulation.network.set_link(link.source, link.target, spec)
        simulation.storage.bandwidth = round(model.storage.bandwidth_bytes_per_s)
        self.injector = Injector(scenario, self, self._now_quiet)
        self.faults = simulation.faults
        self.world.hook("fault.healed", lambda _: self.injector.look())
        self.world.hook("actor.spawned", self._see_birth)

    def __enter__(self) -> SimStage:
        self.simulation.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.simulation.__exit__(*error)

    # --- the run ---

    def run(self) -> SimResult:
        """Run to the end. Call it once."""
        world = self.world
        world.observe(
            "run.started", scenario=self.scenario.name, seed=self.seed, world="sim", clock_error_ns=0, schema=1
        )
        reason, detail = "completed", ""
        try:
            self.simulation.run(self._body, time_limit_s=self.scenario.model.limits.time_limit_s)
        except SimulationStopped as stopped:
            reason, detail = stopped.reason, stopped.report
            self._report_waits()
        except DeployFailed as failed:
            reason, detail = "crash", str(failed)
        except Exception as error:  # the driver's death is the run's end, and evidence
            reason, detail = "crash", f"{type(error).__name__}: {message_of(error)}"
        world.observe("run.finished", reason=reason, detail=detail, events=world.seq)
        return SimResult(reason, detail, world.seq, world.now_ns / 1e9, world.digest(), self.injector.refused)

    async def _body(self, backend: Any) -> None:
        await conduct(self.scenario, self.seed, self, self.injector, self._quiet, self.progress)

    def _report_waits(self) -> None:
        """Who waits for whom, from the calls that are open."""
        calls = [call for call in self.simulation.system.open_calls.values() if not call.background]
        for call in calls[:200]:
            target = call.target.id if call.target is not None else "nobody"
            self.world.observe(
                "run.wait", waiter=call.caller.id, waits_for=f"{call.method} of {target}", should_wake=target
            )

    # --- Stage ---

    def held(self) -> list[Held]:
        """Open calls and requests in engines."""
        calls = self.simulation.system.open_calls.values()
        open_calls = [
            Held("call", f"call {call.number} of {call.caller.id} to {call.method}")
            for call in calls
            # One whose wait was given up has ended for its caller, and says so in its call.done.
            if call.caller.role != "driver" and call.caller.alive and not (call.background or call.reported)
        ]
        engines = [
            Held("request", f"{engine.in_flight} requests in {engine.id}")
            for engine in self.engines.processes.values()
            if engine.alive and engine.in_flight
        ]
        return open_calls + engines

    def left(self) -> list[Held]:
        """Processes, placement groups, resources of nodes, and tasks of the driver beside the one that asks."""
        simulation, driver = self.simulation, self.simulation.driver
        found = [
            Held("process", f"{process.role} {process.id} on {process.node}")
            for process in self.world.processes.values()
            if process.alive and process is not driver
        ]
        found += [
            Held("placement_group", f"{group.id} {group.name} of {group.owner} is {group.state}")
            for group in simulation.placement_table.groups.values()
            if group.state != "REMOVED"
        ]
        found += [
            Held("resources", f"{node.name} has {show(node.free)} free of {show(node.capacity)}")
            for node in simulation.cluster.nodes.values()
            if node.up and not node.dead and node.free != node.capacity
        ]
        asking = asyncio.current_task(driver.loop)
        tasks = sorted(asyncio.all_tasks(driver.loop), key=hash)  # all_tasks gives a set
        found += [Held("task", f"the driver's {task.get_name()}") for task in tasks if task is not asking]
        return found

    def report_leaks(self, found: Sequence[Held]) -> None:
        for held in found:
            self.world.observe("leak.found", what=held.what, detail=held.detail[:_SHORT])

    async def opened(self, services: Mapping[str, Service]) -> list[ActorHandle]:
        return []  # nobody outside of a simulated run can call into it

    def told_driver(self, listen: Callable[[str, Any], None]) -> None:
        self._listen = listen

    def _now_quiet(self) -> None:
        self.simulation.driver.loop.deliver(self._quiet.set)

    # --- InjectorPort ---

    def now_ns(self) -> int:
        return self.world.now_ns

    def at(self, t_ns: int, fire: Callable[[], None]) -> None:
        self.world.clock.call_at(t_ns, fire)

    def hook(
        self, kind: str, see: Callable[[Event], None], *, where: dict[str, Any], from_ns: int, wait: bool
    ) -> Callable[[], None]:
        return self.world.hook(kind, see)  # every emission is shown, and its effect waits, in any case

    def observe(self, kind: str, **data: Any) -> None:
        self.world.observe(kind, **data)

    def replicas(self, service: str) -> Sequence[SeenReplica]:
        return [
            SeenReplica(name, engine.in_flight, self._born[engine.id])
            for name, engine in self.engines.processes.items()
            if service_of(name) == service and engine.alive and not engine.stopped
        ]

    def _see_birth(self, event: Event) -> None:
        if event.data["role"] == "engine":
            self._launches += 1
            self._born[f"{event.actor}/{event.inc}"] = self._launches

    def below(self, n: int) -> int:
        return self._draws.below(n)

    def verb(self, name: str, params: Any) -> None:
        if self._listen is not None:
            self.simulation.driver.loop.deliver(self._listen, name, params)


def _timings(scenario: Scenario) -> Timings:
    network = scenario.model.network
    given = {
        "link_latency_s": network.link_latency_s,
        "loopback_latency_s": network.loopback_latency_s,
    }
    return Timings(**{name: value for name, value in given.items() if value is not None})


def _costs(scenario: Scenario) -> dict[str, float]:
    return {
        f"gateway-{service}-{number}": spec.gateway_cost_s
        for service, spec in scenario.model.topology.services.items()
        if spec.gateway_cost_s is not None
        for number in range(spec.gateways)
    }
