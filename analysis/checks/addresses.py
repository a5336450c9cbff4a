"""Addresses of engines: who has one, has it alone."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from protocol.evidence import Event

_NOTICED_NS = 2 * 10**9


class OneEngineAnAddress(Check):
    """No engine starts on the node and port of one that lives: two of them would share a device, or a port range.

    Every placement group of one GPU sees its GPU as index 0; who takes that for the number of the device gives all
    replicas the first one's (M15b; scaling.md 3).
    """

    name = "one_engine_an_address"
    expected = "each living engine has a port of its node for itself"
    needs = ("engine.started",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._at: dict[tuple[str, int], tuple[Process, int]] = {}  # node and port -> engine, seq of its start
        self._of: dict[Process, tuple[str, int]] = {}
        self._beside: dict[Process, tuple[int, Event]] = {}  # whose address was taken: its start, who took it

    def handlers(self) -> dict[str, Handler]:
        return {"engine.started": self._on_started, "actor.died": self._on_died, "node.lost": self._on_lost}

    def _on_started(self, event: Event) -> None:
        process = (event.actor, event.inc)
        place = (self.ledger.nodes.get(process, ""), event.data["port"])
        self.judged += 1
        other = self._at.get(place)
        # Another incarnation of one name: the one before has ended, or the name would be taken.
        if other is not None and other[0][0] != event.actor:
            self._beside.setdefault(other[0], (other[1], event))
        self._at[place] = (process, event.seq)
        self._of[process] = place

    def _on_died(self, event: Event) -> None:
        process = (event.actor, event.inc)
        place = self._of.pop(process, None)
        if place is not None and place in self._at and self._at[place][0] == process:
            del self._at[place]
        _, taken = self._beside.get(process, (0, None))
        if taken is not None and event.t_ns - taken.t_ns <= _NOTICED_NS:
            del self._beside[process]  # a death is told of a little later than its port is free

    def _on_lost(self, event: Event) -> None:
        """Whether its processes still act or not, the node is given out anew."""
        for place in [place for place in self._at if place[0] == event.data["node"]]:
            self._of.pop(self._at.pop(place)[0], None)

    def conclude(self) -> None:
        for (name, inc), (seq, event) in self._beside.items():
            self.violation(
                f"{event.actor}/{event.inc} starts at port {event.data['port']}, which {name}/{inc} has", seq, event.seq
            )

    def observed(self) -> str:
        return f"{self.judged} engines started, {self.violations} at an address that was taken"
