"""What the checks of traces share: the parts of a training run, and the values of the object store."""

from __future__ import annotations

from collections import OrderedDict

from protocol.evidence import Event

_KEPT = 65_536  # values that ended, the latest ones


class Service:
    """The parts of one training run, from ``rollouts.deployed``."""

    def __init__(self, event: Event) -> None:
        data = event.data
        self.name: str = data["service"]
        self.store: str = data["store"]
        self.buffer: str = data["buffer"]
        self.learner: str = data["learner"]
        self.agents: list[str] = data["agents"]
        parts = [data[part] for part in ("store", "buffer", "producer", "learner", "evaluator") if data[part]]
        self.parts: list[str] = [*parts, *data["agents"], *data["workers"]]
        self.broken = False
        """A part of it died, and not the store: what it had at hand is left, and nobody else may release it."""


class Services:
    """Every training run of a run, by the names of its parts."""

    def __init__(self) -> None:
        self.by_name: dict[str, Service] = {}
        self.by_agent: dict[str, Service] = {}
        self.by_part: dict[str, Service] = {}

    def deployed(self, event: Event) -> None:
        service = Service(event)
        self.by_name[service.name] = service
        self.by_agent.update(dict.fromkeys(service.agents, service))
        self.by_part.update(dict.fromkeys(service.parts, service))

    def died(self, event: Event) -> Service | None:
        """The training run that the dead process was a part of."""
        service = self.by_part.get(event.actor)
        if service is not None and event.actor != service.store:
            service.broken = True
        return service


class Value:
    """A value that has not ended. ``holds``: (process, holder) to how often."""

    __slots__ = ("holds", "put")

    def __init__(self, put: Event) -> None:
        self.put = put
        self.holds: dict[tuple[str, str], int] = {(f"{put.actor}/{put.inc}", put.data["holder"]): 1}


class Values:
    """The values of the object store: those that have not ended, and the latest ends."""

    def __init__(self) -> None:
        self.alive: dict[str, Value] = {}
        self.ended: OrderedDict[str, Event] = OrderedDict()
        self.orphaned: OrderedDict[str, Event] = OrderedDict()
        """Whose only holders died: a world may keep them or not."""

    def put(self, event: Event) -> None:
        self.alive[event.data["object"]] = Value(event)

    def borrowed(self, event: Event) -> None:
        value = self.alive.get(event.data["object"])
        if value is not None and event.data["ok"]:
            hold = _hold(event)
            value.holds[hold] = value.holds.get(hold, 0) + 1

    def given_back(self, event: Event) -> None:
        value = self.alive.get(event.data["object"])
        hold = _hold(event)
        if value is not None and hold in value.holds:
            value.holds[hold] -= 1
            if not value.holds[hold]:
                del value.holds[hold]
            if not value.holds:
                self.freed(event)

    def freed(self, event: Event) -> None:
        name = event.data["object"]
        if self.alive.pop(name, None) is not None or self.orphaned.pop(name, None) is not None:
            _keep(self.ended, name, event)

    def died(self, event: Event) -> None:
        """What a process put is lost with it, and its holds are worth nothing any more."""
        process = f"{event.actor}/{event.inc}"
        for name, value in list(self.alive.items()):
            if f"{value.put.actor}/{value.put.inc}" == process:
                del self.alive[name]
                continue
            for hold in [hold for hold in value.holds if hold[0] == process]:
                del value.holds[hold]
            if not value.holds:
                del self.alive[name]
                _keep(self.orphaned, name, event)


def _hold(event: Event) -> tuple[str, str]:
    return f"{event.actor}/{event.inc}", event.data["holder"]


def _keep(kept: OrderedDict[str, Event], name: str, event: Event) -> None:
    kept[name] = event
    if len(kept) > _KEPT:
        kept.popitem(last=False)
