"""What the checks of publications share: which actor is whose gate, entrypoint or replica, and calls to gates."""

from __future__ import annotations

from typing import NamedTuple

from protocol.evidence import Event

UPDATES = frozenset(f"/update_weights_from_{source}" for source in ("disk", "tensor", "distributed", "ipc"))
"""Routes that change weights."""
TURNS = frozenset(("/generate", "/v1/chat/completions", "/v1/messages"))
"""Routes of turns: an entrypoint's and those of a session server."""
GENERATIONS = TURNS | {"/v1/completions"}
"""Routes by which an engine generates."""
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
_NOT_OF_GATES = frozenset(("handle", "generate", "retire_route_sessions", "retire_sessions"))


def may_be_of_a_gate(method: str) -> bool:
    """Whether a call of this method may go to a gate: no route, and none of what turns and episodes call elsewhere."""
    return method[:1] != "/" and method not in _NOT_OF_GATES


class Place(NamedTuple):
    """One entrypoint of one service; ``gate`` is empty where there is none."""

    service: str
    entrypoint: str
    gate: str
    replica: str


class Fleet:
    """Every entrypoint of a run, from ``publishing.deployed``."""

    def __init__(self) -> None:
        self.by_gate: dict[str, Place] = {}
        self.by_entrypoint: dict[str, Place] = {}
        self.by_replica: dict[str, Place] = {}
        self.services: dict[str, list[Place]] = {}
        self.controllers: dict[str, Event] = {}
        """Controller to the event that says what its deadlines are."""
        self._fresh: dict[tuple[str, int], None] = {}

    def deployed(self, event: Event) -> None:
        service = event.data["service"]
        for entrypoint, gate, replica in event.data["entrypoints"]:
            place = Place(service, entrypoint, gate, replica)
            self.by_entrypoint[entrypoint] = place
            self.by_replica[replica] = place
            if gate:
                self.by_gate[gate] = place
                self.services.setdefault(service, []).append(place)
        self.controllers[event.data["controller"]] = event

    def started(self, event: Event) -> None:
        """An engine process began: one that replaces another serves nobody yet, and may be given its weights.

        Those that were there when the service was deployed had started before that, and replace nobody.
        """
        if event.actor in self.by_replica:
            self._fresh[event.actor, event.inc] = None

    def sent_turn(self, event: Event) -> None:
        """A generation is on its way to an engine process."""
        if self._fresh:
            self._fresh.pop((event.data["target"], event.data["target_inc"]), None)

    def is_fresh(self, update: Event) -> bool:
        """Whether an update goes to a process that nobody has sent a generation to yet."""
        return (update.data["target"], update.data["target_inc"]) in self._fresh


class GateCalls:
    """The calls to gates that are under way: number to send."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open: dict[int, Event] = {}

    def sent(self, event: Event) -> Place | None:
        """The place of the gate that a call goes to, or None when it goes to no gate."""
        place = self._fleet.by_gate.get(event.data["target"])
        if place is not None:
            self._open[event.data["call"]] = event
        return place

    def done(self, event: Event) -> tuple[Event, Place] | None:
        """The send that a ``call.done`` ends, and where; None when it was to no gate."""
        sent = self._open.pop(event.data["call"], None)
        return None if sent is None else (sent, self._fleet.by_gate[sent.data["target"]])
