"""What components claim of themselves. These rows explain; they never decide a verdict."""

from __future__ import annotations

from analysis.checks.base import Check, Group, Handler
from analysis.checks.ledger import Ledger, Process
from protocol.evidence import Event


class GatewayCounts(Check):
    """The gateway's in-flight counts add up: each pick is given back once, moves keep the sum, nothing is left."""

    name = "gateway_counts"
    group: Group = "claim"
    expected = "in-flight counts add up and end at 0"
    needs = ("gateway.picked", "gateway.released")

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._counts: dict[tuple[Process, Process], int] = {}  # (gateway, replica) -> count
        self._open: dict[tuple[str, str], int] = {}  # (gateway, request) -> seq of its pick

    def handlers(self) -> dict[str, Handler]:
        return {
            "gateway.picked": self._on_picked,
            "gateway.moved": self._on_moved,
            "gateway.released": self._on_released,
            "actor.died": self._on_died,
        }

    def _on_died(self, event: Event) -> None:
        # The counts die with their gateway.
        for key in [key for key in self._counts if key[0] == (event.actor, event.inc)]:
            del self._counts[key]
        for request in [request for request in self._open if request[0] == event.actor]:
            del self._open[request]

    def _add(self, event: Event, replica: str, inc: int, change: int) -> int:
        key = ((event.actor, event.inc), (replica, inc))
        count = self._counts.get(key, 0) + change
        if count:
            self._counts[key] = count
        else:
            self._counts.pop(key, None)
        if count < 0:
            self.violation(f"{event.actor} counts {count} in flight on {replica}/{inc}", event.seq)
        return count

    def _on_picked(self, event: Event) -> None:
        self.judged += 1
        data = event.data
        count = self._add(event, data["replica"], data["replica_inc"], 1)
        self._open[event.actor, data["request"]] = event.seq
        if count != data["in_flight"]:
            self._wrong(event, count)

    def _on_moved(self, event: Event) -> None:
        data = event.data
        self._add(event, data["old"], data["old_inc"], -1)
        self._add(event, data["replica"], data["replica_inc"], 1)

    def _on_released(self, event: Event) -> None:
        data = event.data
        count = self._add(event, data["replica"], data["replica_inc"], -1)
        if self._open.pop((event.actor, data["request"]), None) is None:
            self.violation(f"request {data['request']} was given back without a pick", event.seq)
        if count != data["in_flight"]:
            self._wrong(event, count)

    def _wrong(self, event: Event, count: int) -> None:
        data = event.data
        self.violation(
            f"{event.actor} says {data['in_flight']} in flight on {data['replica']}/{data['replica_inc']} "
            f"after {event.kind}; its own events add up to {count}",
            event.seq,
        )

    def conclude(self) -> None:
        if not self.ledger.completed:
            return
        for (_, request), seq in self._open.items():
            self.violation(f"request {request} was picked and never given back", seq)

    def observed(self) -> str:
        return f"{self.judged} picks, {self.violations} counts off"
