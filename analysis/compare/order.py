"""The order of protocol events of two runs: which of them follow from which, by cause and not by the clock.

An event of the protocol gets a name that is the same in every world: what it was, of whom, and which time it was. *x
before y* holds in a run where a chain of causes and of one process's own events leads from x to y (DESIGN.md, "Evidence
and verdicts"). Two runs disagree where x comes before y in one and y before x in the other; a pair that only one of
them orders is counted, and no contradiction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from analysis.checks.scaling_views import SUBMISSIONS, TERMINAL
from analysis.order import Order
from analysis.rundir import RunDir
from protocol.evidence import Event

_NO_CLOCK = 1 << 62  # a clock error that no gap exceeds: only causes order
_WAY = {"scale_out": "out", "scale_in": "in"}
_FIRST_ONLY = ("CREATING", "HEALTH_CHECKING", "READY", "DRAINING", "REMOVING", "PENDING")


@dataclasses.dataclass
class Named:
    """A protocol event. ``known``: for each process, the highest counter of its events that came before this one."""

    name: str
    process: tuple[str, int]
    n: int
    t_ns: int
    known: dict[tuple[str, int], int]

    def before(self, other: Named) -> bool:
        if self.process == other.process:
            return self.n < other.n
        return other.known.get(self.process, -1) >= self.n


@dataclasses.dataclass
class Difference:
    """How two runs' orders differ. Pairs are of names that both runs have."""

    names: int
    pairs: int
    """Pairs that both runs order by cause."""
    reversed: list[tuple[str, str]]
    only_first: int
    only_second: int
    missing_in_first: list[str]
    missing_in_second: list[str]
    same_sequence: bool
    """The names that both have came in the same order of time."""
    swapped: list[tuple[str, str]]
    """Neighbours in the first run's time that came the other way round in the second."""
    partial: bool = False
    """The second run was imported: its recorders kept only what its driver saw."""

    @property
    def equal(self) -> bool:
        """No pair is the other way round, and no protocol event of one is missing in the other.

        Of an imported run, only what it has must be there: nobody recorded the rest. One without any is equal to none.
        """
        missing = self.missing_in_first or (self.missing_in_second and not self.partial)
        return bool(self.names) and not (self.reversed or missing)


class ProtocolEvents(dict[str, Named]):
    """The protocol events of a run by name. ``partial``: the run was imported."""

    partial = False


def protocol_events(directory: RunDir) -> ProtocolEvents:
    """The protocol events of a run. Raises BadInput: the run cannot be read."""
    naming, order = _Names(_replicas(directory)), Order(_NO_CLOCK)
    found = ProtocolEvents()
    for event in directory.read_events():
        order.see(event)
        if event.kind == "run.started":
            found.partial = event.data["world"] == "imported"
        name = naming.name(event)
        if name is not None and name not in found:
            process = (event.actor, event.inc)
            found[name] = Named(name, process, event.n, event.t_ns, order.known_at(process, event.n))
    return found


def _replicas(directory: RunDir) -> dict[str, str]:
    """A name for each engine that is the same in every run: victims by their faults, the others by their order."""
    engines: dict[str, None] = {}
    struck: dict[str, None] = {}
    for event in directory.read_events():
        if event.kind == "engine.started":
            engines[event.actor] = None
        elif event.kind == "fault.injected":
            struck[event.data["target"]] = None
    victims = [name for name in struck if name in engines]
    others = [name for name in sorted(engines) if name not in struck]
    named = {name: f"victim {number}" for number, name in enumerate(victims, 1)}
    return {**named, **{name: f"replica {number}" for number, name in enumerate(others, 1)}}


def difference(first: ProtocolEvents, second: ProtocolEvents) -> Difference:
    """How the second run's order of protocol events differs from the first's."""
    names = [name for name in first if name in second]
    turned: list[tuple[str, str]] = []
    both = only_first = only_second = 0
    for index, x in enumerate(names):
        for y in names[index + 1 :]:
            a, b = _relation(first[x], first[y]), _relation(second[x], second[y])
            if a and b:
                both += 1
                if a != b:
                    turned.append((x, y) if a > 0 else (y, x))
            elif a:
                only_first += 1
            elif b:
                only_second += 1
    by_time = [sorted(names, key=lambda name, run=run: run[name].t_ns) for run in (first, second)]  # type: ignore[misc]  # a bound default
    place = {name: index for index, name in enumerate(by_time[1])}
    swapped = [(x, y) for x, y in zip(by_time[0], by_time[0][1:], strict=False)
               if place[x] > place[y] and second[x].t_ns != second[y].t_ns]  # fmt: skip
    return Difference(
        len(names), both, turned, only_first, only_second,
        [name for name in second if name not in first], [name for name in first if name not in second],
        not swapped, swapped, second.partial,
    )  # fmt: skip


def _relation(x: Named, y: Named) -> int:
    return 1 if x.before(y) else -1 if y.before(x) else 0


class _Names:
    """Names of protocol events as they come.

    Args:
        replicas: the name of each engine.
    """

    def __init__(self, replicas: dict[str, str]) -> None:
        self._replicas = replicas
        self._asks: dict[str, Event] = {}
        self._operations: dict[str, str] = {}
        self._elastic: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._initial: dict[str, None] = {}
        self._leaving: dict[str, None] = {}
        self._over = False
        self._begun = False
        self._handlers: dict[str, Callable[[Event], str | None]] = {
            "run.workload": self._begins,
            "scale.snapshot": self._snapshot,
            "scale.asked": self._asked,
            "scale.answered": self._answered,
            "scale.slot": self._slot,
            "scale.drain": self._drain,
            "fault.injected": self._fault,
            "fault.healed": lambda e: self._next(f"{e.data['name']} healed"),
            "run.healed": lambda _: None,
            "actor.died": lambda e: self._of(e.actor, "died"),
            "engine.started": lambda e: self._of(e.actor, "starts"),
            "engine.ready": lambda e: self._of(e.actor, "ready"),
            "gateway.unroutable": lambda e: self._of(e.data["replica"], "unroutable"),
            "gateway.routable": self._routable,
            "health.changed": lambda e: self._watched(
                e.data["replica"], "healthy" if e.data["healthy"] else "unhealthy"
            ),
            "recovery.began": lambda e: self._watched(e.data["replica"], "recovery began"),
            "recovery.step": lambda e: self._watched(e.data["replica"], f"recovery: {e.data['stage']}"),
            "publication.asked": lambda e: f"publication {e.data['model_step']} asked",
            "publication.ended": lambda e: f"publication {e.data['model_step']} {e.data['outcome']}",
            "controller.stage": lambda e: self._next(f"stage {e.data['stage']}"),
            "train.step": lambda e: f"step {e.data['step']} {e.data['what']}",
            "train.rollout": lambda e: f"rollout {e.data['rollout']}",
            "train.finished": lambda _: "training finished",
        }

    def name(self, event: Event) -> str | None:
        if self._over:
            return None
        handler = self._handlers.get(event.kind)
        return None if handler is None else handler(event)

    def _next(self, name: str) -> str:
        number = self._counts[name] = self._counts.get(name, 0) + 1
        return f"{name} {number}"

    def _begins(self, event: Event) -> str | None:
        self._begun = True
        return "workload begins"

    def _routable(self, event: Event) -> str | None:
        # In which order the replicas of a deployment come up is chance.
        return self._of(event.data["replica"], "routable") if self._begun else None

    def _snapshot(self, event: Event) -> str | None:
        self._over = self._over or event.data["when"] == "final"  # what comes now is the take-down
        return None

    def _asked(self, event: Event) -> str | None:
        self._asks[event.data["ask"]] = event
        return None

    def _answered(self, event: Event) -> str | None:
        asked, data = self._asks.pop(event.data["ask"], None), event.data
        if asked is None:
            return None
        route = asked.data["route"]
        if route in SUBMISSIONS:
            if data["status"] == 409:
                return self._next(f"submission refused: {data['code']}")
            if data["status"] == 200 and data["operation"] and data["operation"] not in self._operations:
                way = self._next(_WAY[asked.data["direction"]])
                self._operations[data["operation"]] = way
                return f"{way} admitted"
            return None
        operation = self._operations.get(asked.data["operation"])
        if operation is None:
            return None
        if data["status"] != 200:
            return f"{operation}: {route} refused with {data['status']}"
        if data["state"] in _FIRST_ONLY:
            return None  # whether a poller sees these is chance
        if data["state"] in TERMINAL:
            # Some recorders do not keep the flag of a sound end; true is the one that matters.
            dirty = data["cleanup"] == "true"
            if f"{operation} {data['state']}, not clean" in self._counts and not dirty:
                return f"{operation} clean"
            if dirty:
                self._counts[f"{operation} {data['state']}, not clean"] = 1
            return f"{operation} {data['state']}{', not clean' if dirty else ''}"
        return None

    def _slot(self, event: Event) -> str | None:
        data = event.data
        if data["what"] in ("candidate", "published", "stopped", "retired", "held"):
            replica = self._elastic.setdefault(data["replica"], f"elastic {len(self._elastic) + 1}")
            return f"{replica} {data['what']}"
        return None

    def _drain(self, event: Event) -> str | None:
        if event.data["what"] == "chosen":
            self._leaving[event.data["replica"]] = None
        return None

    def _watched(self, replica: str, what: str) -> str | None:
        # Whether a prober still looks at a replica that is being removed is chance.
        return None if replica in self._leaving else self._of(replica, what)

    def _fault(self, event: Event) -> str | None:
        return self._next(event.data["name"])

    def _of(self, replica: str, what: str) -> str | None:
        named = self._replicas.get(replica)
        return None if named is None else self._next(f"{named} {what}")
