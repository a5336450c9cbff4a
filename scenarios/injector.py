"""Fires a scenario's steps: at a time, or at the n-th event that matches. Knows no world; a port does what it decides.

Times count from the start of the workload, and so do events. ``fault.injected`` and the like are recorded by the
world's half, which sees what a fault meets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from protocol.evidence import Event
from protocol.messages import service_of
from scenarios.load import Scenario
from scenarios.steps import SELECTORS, StepModel, TargetModel, WhenModel

NS = 1_000_000_000


class StepRefused(Exception):
    """A step that cannot be done now, such as a kill of what is dead. The text says why; nothing was done."""


class SeenReplica(NamedTuple):
    """A living replica as the world sees it. ``born``: position in the order of launches."""

    name: str
    in_flight: int
    born: int


class Aim(NamedTuple):
    """A target with every selector resolved; which fields count depends on the fault."""

    name: str = ""
    source: str = "*"
    destination: str = "*"
    prefix: str = ""


class InjectorPort(Protocol):
    """What a world does for the injector. Everything happens at once, in the instant of the call."""

    def now_ns(self) -> int: ...

    def at(self, t_ns: int, fire: Callable[[], None]) -> None:
        """Call at a time; at the present one: after the effect of the event that is being emitted."""
        ...

    def hook(
        self, kind: str, see: Callable[[Event], None], *, where: dict[str, Any], from_ns: int, wait: bool
    ) -> Callable[[], None]:
        """Call ``see`` at emissions of a kind, before their effect; returns how to end that.

        Args:
            where, from_ns: events without these fields, or before this time, need not be shown.
            wait: the effect must not happen before ``see`` has returned. Without it ``see`` may come a moment later.
        """
        ...

    def observe(self, kind: str, **data: Any) -> None: ...

    def replicas(self, service: str) -> Sequence[SeenReplica]: ...

    def below(self, n: int) -> int:
        """A draw."""
        ...

    def inject(
        self,
        name: str,
        aim: Aim,
        params: dict[str, Any],
        *,
        must_hit: dict[str, dict[str, int]],
        for_s: float | None,
        transient: bool,
    ) -> None:
        """Raises StepRefused."""
        ...

    def heal_all(self) -> None: ...

    def active(self) -> int:
        """Faults in force."""
        ...

    def timed(self) -> int:
        """Those of them that will be healed at a time."""
        ...

    def verb(self, name: str, params: Any) -> None:
        """Have the driver do it."""
        ...


class _Armed:
    """A step and how far it is."""

    __slots__ = ("index", "step", "seen", "off", "state")

    def __init__(self, index: int, step: StepModel) -> None:
        self.index = index
        self.step = step
        self.seen = 0
        self.off: Callable[[], None] | None = None
        self.state = "waiting"  # for its event; then "due" at a time, then "fired"


class Injector:
    """The steps of one run.

    Args:
        scenario: whose steps they are.
        port: the world.
        on_quiet: called when a step has fired or a fault has healed and nothing is due or in force any more.
    """

    def __init__(self, scenario: Scenario, port: InjectorPort, on_quiet: Callable[[], None]) -> None:
        self._model = scenario.model
        self._port = port
        self._on_quiet = on_quiet
        self._steps = [_Armed(index, step) for index, step in enumerate(scenario.model.steps)]
        self._injected = 0
        self._healed_told = 0
        self._over = False
        self.refused: list[str] = []
        """Steps that could not be done, for the person who runs it; the evidence lacks their faults."""

    # --- arming ---

    def begin(self) -> None:
        """The workload starts now."""
        origin = self._port.now_ns()
        self._port.observe("run.workload")
        for armed in self._steps:
            if armed.step.at_s is not None:
                self._due(armed, origin + round(armed.step.at_s * NS), None)
            else:
                self._watch(armed)

    def _watch(self, armed: _Armed) -> None:
        when = armed.step.when
        assert when is not None
        counts_from = self._port.now_ns() + round(when.from_s * NS)
        after = when.after
        if after is None:
            self._await(armed, when, counts_from)
            return

        def see(event: Event) -> None:
            if not self._over and _matches(event, after.where):
                off()
                self._await(armed, when, counts_from)

        armed.off = off = self._port.hook(after.event, see, where=after.where, from_ns=0, wait=False)

    def _await(self, armed: _Armed, when: WhenModel, counts_from: int) -> None:
        held = when.phase == "before" and not armed.step.after_s

        def see(event: Event) -> None:
            if armed.state != "waiting" or self._over or event.t_ns < counts_from or not _matches(event, when.where):
                return
            if not _of_service(event, armed.step.target):
                return
            armed.seen += 1
            if armed.seen < when.nth:
                return
            if armed.off is not None:
                armed.off()
            if held:
                armed.state = "due"
                self._fire(armed, event.t_ns, event, held=True)
            else:
                self._due(armed, event.t_ns + round(armed.step.after_s * NS), event)

        armed.off = self._port.hook(when.event, see, where=when.where, from_ns=counts_from, wait=held)

    def _due(self, armed: _Armed, t_ns: int, trigger: Event | None) -> None:
        armed.state = "due"
        self._port.at(t_ns, lambda: self._fire(armed, t_ns, trigger))

    # --- firing ---

    def _fire(self, armed: _Armed, asked_ns: int, trigger: Event | None, held: bool = False) -> None:
        if armed.state != "due" or self._over:
            return
        armed.state = "fired"
        step = armed.step
        self._port.observe(
            "run.step",
            step=armed.index,
            do=step.do,
            asked_ns=asked_ns if trigger is None else None,
            trigger=trigger.id if trigger is not None else None,
            phase=step.when.phase if step.when is not None else None,
            held=held,
            late_ns=max(0, self._port.now_ns() - asked_ns),
        )
        if step.fault is None:
            self._port.verb(step.do, step.parameters())
        else:
            try:
                self._inject(step, trigger)
            except StepRefused as error:
                self.refused.append(f"steps[{armed.index}] {step.do}: {error}")
        self.look()

    def _inject(self, step: StepModel, trigger: Event | None) -> None:
        fault = step.fault
        assert fault is not None
        must_hit = fault.must_hit
        if step.must_hit is not None:
            must_hit = {name: {"at_least": bound.at_least} for name, bound in step.must_hit.items()}
        self._port.inject(
            fault.name,
            self._aim(step.target, trigger),
            step.parameters().model_dump(mode="json"),
            must_hit=must_hit,
            for_s=step.for_s,
            transient=fault.healing == "recovered",
        )
        self._injected += 1

    def _aim(self, target: TargetModel | None, trigger: Event | None) -> Aim:
        if target is None:
            return Aim()
        if target.process is not None:
            return Aim(name=self._resolve(target.process, target.service, trigger))
        if target.node is not None:
            return Aim(name=target.node)
        if target.path is not None:
            return Aim(prefix=target.path)
        assert target.link is not None
        source, destination = (
            self._resolve(end, target.service, trigger) for end in (target.link.source, target.link.target)
        )
        return Aim(source=source, destination=destination)

    def _resolve(self, name: str, service: str | None, trigger: Event | None) -> str:
        """A selector becomes the name of a replica; any other name stays."""
        if name not in SELECTORS:
            return name
        if name == "replica_of_trigger":
            assert trigger is not None
            return _replica_of(trigger)
        found = self._port.replicas(service or next(iter(self._model.topology.services)))
        if not found:
            raise StepRefused(f"no replica is alive for {name!r}")
        if name == "busiest_replica":
            return max(found, key=lambda replica: (replica.in_flight, -replica.born)).name
        if name == "newest_replica":
            return max(found, key=lambda replica: replica.born).name
        if name == "oldest_replica":
            return min(found, key=lambda replica: replica.born).name
        return found[self._port.below(len(found))].name

    # --- the end ---

    def look(self) -> None:
        """A fault has healed, or a step has fired: is it quiet now?"""
        if not self.quiet():
            return
        waiting = not self._over and any(armed.state == "waiting" and armed.step.fault for armed in self._steps)
        if self._injected > self._healed_told and not waiting and not self._port.active():
            self._healed_told = self._injected
            self._port.observe("run.healed", faults=self._injected)
        self._on_quiet()

    def quiet(self) -> bool:
        """Nothing happens any more at a time: what waits for an event, or to meet something, may wait for ever."""
        return not any(armed.state == "due" for armed in self._steps) and not self._port.timed()

    def end(self) -> None:
        """The workload is over: nothing fires any more, and what is in force is healed."""
        self._over = True
        for armed in self._steps:
            if armed.off is not None:
                armed.off()
            if armed.state != "fired":
                why = "its event did not come" if armed.state == "waiting" else "its time did not come"
                self.refused.append(f"steps[{armed.index}] {armed.step.do}: {why}")
                armed.state = "fired"
        self._port.heal_all()
        self.look()


def _replica_of(event: Event) -> str:
    return str(event.data.get("replica") or event.actor)


def _of_service(event: Event, target: TargetModel | None) -> bool:
    """Whether an event counts for a step that befalls its replica: only one of the service that the target names."""
    if target is None or target.process != "replica_of_trigger" or target.service is None:
        return True
    return service_of(_replica_of(event)) == target.service


def _matches(event: Event, where: dict[str, Any]) -> bool:
    for key, value in where.items():
        if key in event.data:
            if event.data[key] != value:
                return False
        elif getattr(event, key) != value:  # actor or inc, as the schema has checked
            return False
    return True
