"""A scenario in the real world: the port of injector and driver to it, and its course from the driver's side.

As ``scenarios/sim_world.py``, but the world's processes write their own evidence; ``scenarios/real_run.py`` starts the
world before and merges what they have written afterwards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from protocol.errors import message_of
from protocol.evidence import SCHEMA_VERSION, Event
from protocol.messages import service_of
from protocol.ports import ActorHandle
from scenarios.deploy import DeployFailed, EngineDiedAtStart, Service
from scenarios.fault_port import FaultPort
from scenarios.injector import NS, Injector, SeenReplica
from scenarios.load import Scenario
from scenarios.orchestrate import Held, Progress, conduct

if TYPE_CHECKING:
    from real.backend import RealBackend
    from real.cluster import LocalCluster
    from real.engines.settings import EngineSettings
    from real.faults.injection import RealFaults

_LOOK_S = 0.5
_GRACE_S = 2.0  # for calls over HTTP that are in flight when the run ends
_SHORT = 400  # characters of a report that go into one event
_LONG = 8000  # of what ended the run: a component's own error may be of any length
_WAITS = 200

INTERRUPTED: Final = "interrupted"
"""What a run that somebody has interrupted says of its end."""


@dataclasses.dataclass(slots=True)
class RealEnd:
    """How a real run ended. ``reason`` is that of run.finished."""

    reason: str
    detail: str
    took_s: float
    alive: list[tuple[str, int]]
    """Processes that lived when it ended: (name, incarnation)."""
    refused: list[str]
    """Steps that could not be done."""
    broken: str = ""
    """What of the world itself broke, so that evidence is missing or says nothing of the components."""
    unfit: str = ""
    """Why there was no run at all: an engine that cannot even start, with its last words."""


class RealStage(FaultPort):
    """One scenario in the real world, on the Ray cluster that this process is connected to.

    Args:
        scenario: what runs, as ``for_real`` gives it.
        seed: of the workload's draws and the injector's.
        run: id of the run.
        folder: its temporary folder.
        engines: how they are started.
        machines: the nodes, where they are the run's own.
        http_port: where the control APIs of its scaled services listen (0: any free port); None: nowhere.
        watch: called twice a second.
        begins: called with the task whose cancellation ends the run in order, once there is one.
    """

    faults: RealFaults

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        run: str,
        folder: str,
        engines: EngineSettings,
        machines: LocalCluster | None,
        http_port: int | None = None,
        watch: Callable[[RealStage], None] | None = None,
        begins: Callable[[asyncio.Task[Any]], None] = lambda _: None,
    ) -> None:
        from real.tail import EvidenceTail

        super().__init__()
        self.scenario = scenario
        self.seed = seed
        self._run = run
        self._folder = folder
        self._engines = engines
        self._machines = machines
        self._watch = watch
        self._begins = begins
        self._http_port = http_port
        self.url = ""
        """Where the control APIs are; empty as long as they are not."""
        self.progress = Progress()
        self.tail = EvidenceTail(folder)
        self._draws = random.Random(f"injector/{seed}")
        self._quiet = asyncio.Event()
        self._listen: Callable[[str, Any], None] | None = None
        self._backend: RealBackend
        self._loop_origin: float | None = None  # the loop's time at that of the run's start
        self._timers = 0
        self._end = RealEnd("completed", "", 0.0, [], [])
        self.injector = Injector(scenario, self, self._now_quiet)

    @property
    def seconds(self) -> float:
        """Since the start of the run."""
        return self.now_ns() / NS

    # --- the run ---

    def run(self) -> RealEnd:
        """Run to the end; every actor and engine is dead then. Call it once. What fails is its end, not an error."""
        from real.backend import run_real

        try:
            run_real(self._body, folder=self._folder, engines=self._engines, run=self._run, begins=self._begins)
        except (KeyboardInterrupt, asyncio.CancelledError):
            # Where it is the watching that cancels, it has said why before.
            self._ended("crash", INTERRUPTED)
        except Exception as error:  # of the driver itself, also at taking the run down
            self._ended("crash", f"{type(error).__name__}: {message_of(error)}")
        return self._end

    def interrupted(self) -> RealEnd:
        """How it ended, for whom an interrupt has kept from the return of ``run``."""
        self._ended("crash", INTERRUPTED)
        return self._end

    async def _body(self, backend: RealBackend) -> None:
        from real.breakpoints import Breakpoints
        from real.faults.injection import real_faults

        self._backend = backend
        model = self.scenario.model
        backend.log.emit(
            "run.started", scenario=self.scenario.name, seed=self.seed, world="real",
            clock_error_ns=backend.run.clock_error_ns, schema=SCHEMA_VERSION,
        )  # fmt: skip
        bandwidth = model.storage.bandwidth_bytes_per_s
        self.faults = real_faults(backend, bandwidth=bandwidth, machines=self._machines)
        self._breakpoints = Breakpoints(self.faults.site.writer, backend.log, self._run)
        await self._breakpoints.open()
        self._breakpoints.hook("fault.healed", lambda _: self.injector.look())
        watching = asyncio.get_running_loop().create_task(self._keep_watching(asyncio.current_task()), name="watching")
        try:
            await self._conduct(model.limits.time_limit_s)
        finally:
            watching.cancel()
            self._note_end()
            await self._breakpoints.close()

    def _note_end(self) -> None:
        self._end.took_s = self.seconds
        self._end.refused = list(self.injector.refused)  # its timers go on while the run is taken down
        self._end.alive = [(card.name, card.incarnation) for card in self._backend.census.living()]
        self.tail.look()

    async def _conduct(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s) as limit:
                await conduct(self.scenario, self.seed, self, self.injector, self._quiet, self.progress)
        except TimeoutError:
            if not limit.expired():
                raise
            self.tail.look()
            waits = self.tail.open_calls_of_the_living()
            self._report_waits(waits)
            self._ended(
                "time_limit", f"{within_s:g} s are over in phase {self.progress.phase}; {len(waits)} calls wait"
            )
        except EngineDiedAtStart as failed:
            self._end.unfit = f"{failed}{self._last_words()}"
            self._ended("crash", self._end.unfit)
        except DeployFailed as failed:
            self._ended("crash", f"{failed}{self._last_words()}")
        except asyncio.CancelledError:
            self._ended("crash", INTERRUPTED)
            raise
        except Exception as error:  # the driver's death is the run's end, and evidence
            self._ended("crash", f"{type(error).__name__}: {message_of(error)}{self._last_words()}")

    def _ended(self, reason: str, detail: str) -> None:
        if self._end.reason == "completed":  # the first reason is the one
            self._end.reason, self._end.detail = reason, detail[:_LONG]

    def _last_words(self) -> str:
        """What the engines that died of themselves said last."""
        self.tail.look()
        for death in self.tail.deaths.values():
            if (death.actor, death.inc) in self.tail.born and death.data["reason"] in ("crashed", "exited"):
                return f"\n{death.actor} {death.data['reason']}: {death.data['detail']}"
        return ""

    async def _keep_watching(self, body: asyncio.Task[Any] | None) -> None:
        """Ends the run when its world breaks, and when that cannot be seen any more: then its evidence says nothing."""
        try:
            broken = ""
            while not broken:
                await asyncio.sleep(_LOOK_S)
                broken = self._what_is_broken()
        except Exception as error:
            broken = f"the run could not be watched any more: {type(error).__name__}: {message_of(error)}"
        self._ended("crash", broken)
        self._end.broken = broken
        assert body is not None
        body.cancel()

    def _what_is_broken(self) -> str:
        """One look at the world, which the display is shown too; empty while all is well."""
        from real.evidence import evidence_is_lost

        if evidence_is_lost(self._folder):
            return f"the disk of {self._folder} is full, and events could not be written"
        if self._machines is not None:
            daemon = self._machines.ended()
            if not daemon and not _is_running(self._backend.registry_pid):
                daemon = "registry of the run's processes"
            if daemon:
                # In a minute Ray would end this process too, and the evidence would go with the run's folder.
                self._backend.ray_has_ended = True
                return f"Ray's {daemon} has ended, and no fault did that"
        self.tail.look()
        if self._watch is not None:
            self._watch(self)
        return ""

    def _report_waits(self, waits: list[Event]) -> None:
        for sent in waits[:_WAITS]:
            target = f"{sent.data['target']}/{sent.data['target_inc']}"
            waiter = f"{sent.actor}/{sent.inc}"
            what = f"{sent.data['method']} of {target}"
            self.observe("run.wait", waiter=waiter, waits_for=what, should_wake=target)

    # --- Stage ---

    def held(self) -> list[Held]:
        """Open calls and requests in engines."""
        self.tail.look()
        calls = [
            Held("call", f"call {sent.data['call']} of {sent.actor}/{sent.inc} to {sent.data['method']}")
            for sent in self.tail.open_calls_of_the_living()
            if sent.actor != self._backend.me.name
        ]
        engines = [
            Held("request", f"{card.in_flight} requests in {card.name}/{card.incarnation}")
            for card in self._backend.census.living()
            if card.role == "engine" and card.in_flight
        ]
        return calls + engines

    def left(self) -> list[Held]:
        """Processes, placement groups and GPUs."""
        from real.nodes import gpus
        from real.placement import groups_of

        found = [
            Held("process", f"{card.role} {card.name}/{card.incarnation} on {card.node}")
            for card in self._backend.census.living()
            if card.role != "driver"
        ]
        found += [Held("placement_group", f"{group} is {state}") for group, state in groups_of(self._run)]
        free, have = gpus()
        if self._machines is not None and free < have - 1e-6:
            found.append(Held("resources", f"the nodes have {free:g} of {have:g} GPUs free"))
        return found

    def report_leaks(self, found: Sequence[Held]) -> None:
        for held in found:
            self.observe("leak.found", what=held.what, detail=held.detail[:_SHORT])

    async def opened(self, services: Mapping[str, Service]) -> list[ActorHandle]:
        """The control APIs over HTTP, where that was asked for."""
        scaled = [(name, one) for name, one in services.items() if one.cells[0].scale_api is not None]
        if self._http_port is None or not scaled:
            return []
        from protocol.config import HttpConfig
        from real.http_control import ControlFront, Served
        from real.http_server import ServerSettings
        from scenarios.outside import OutsideFront

        settings = ServerSettings(port=self._http_port, shutdown_grace_s=_GRACE_S)
        node = (await self._backend.nodes())[0]
        served, fronts = [], []
        for name, one in scaled:
            front = await self._backend.spawn(
                OutsideFront, name, one.cells[0].scale_api, name=f"outside-{name}", node=node
            )  # fmt: skip
            fronts.append(front)
            scaler = None if one.autoscaling is None else one.autoscaling.scaler
            scaling = self.scenario.model.topology.services[name].scaling
            of_rollouts = scaling is not None and scaling.kind == "rollout"
            served.append(Served(name, front, scaler, "rollout" if of_rollouts else "scale"))
        front = await self._backend.spawn(
            ControlFront, settings, HttpConfig(), tuple(served), name="http-control", node=node
        )  # fmt: skip
        host, port = await front.address()
        self.url = f"http://{host}:{port}"
        return [front, *fronts]

    def told_driver(self, listen: Callable[[str, Any], None]) -> None:
        self._listen = listen

    def _now_quiet(self) -> None:
        self._quiet.set()

    # --- InjectorPort ---

    def now_ns(self) -> int:
        return self._backend.log.now_ns()

    def at(self, t_ns: int, fire: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if self._loop_origin is None:
            self._loop_origin = loop.time() - self.now_ns() / NS
        # asyncio does not say which of two timers of one instant is first; here it is the one that was asked for first.
        self._timers += 1
        loop.call_at(self._loop_origin + t_ns / NS + self._timers * 1e-7, fire)

    def hook(
        self, kind: str, see: Callable[[Event], None], *, where: dict[str, Any], from_ns: int, wait: bool
    ) -> Callable[[], None]:
        return self._breakpoints.hook(kind, see, where=where, from_ns=from_ns, wait=wait)

    def observe(self, kind: str, **data: Any) -> None:
        self._backend.log.emit(kind, **data)

    def replicas(self, service: str) -> Sequence[SeenReplica]:
        self.tail.look()
        return [
            SeenReplica(card.name, card.in_flight, self.tail.born.get((card.name, card.incarnation), 0))
            for card in self._backend.census.living()
            if card.role == "engine" and service_of(card.name) == service
        ]

    def below(self, n: int) -> int:
        return self._draws.randrange(n)

    def verb(self, name: str, params: Any) -> None:
        if self._listen is not None:
            asyncio.get_running_loop().call_soon(self._listen, name, params)


def _is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
