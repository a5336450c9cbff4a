"""Sessions and their backends: one backend for a life, nothing after retirement, nothing left (serving.md 4.4)."""

from __future__ import annotations

from collections import OrderedDict

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from protocol.evidence import Event

_RETIRED_KEPT = 65_536


class OneBackendASession(Check):
    """The requests of a session reach one backend, and after its retirement none (A-I1, A-I2, A-I5)."""

    name = "one_backend_a_session"
    expected = "one replica for each session, across publications; none once it is retired"
    needs = ("turn.sent",)
    joins_at = ("turn.sent",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._turns: dict[str, str] = {}  # open turn -> session
        self._bound: dict[str, Event] = {}  # session -> first acceptance
        self._retired: OrderedDict[str, Event] = OrderedDict()  # the latest ones

    def handlers(self) -> dict[str, Handler]:
        return {
            "turn.sent": self._on_sent,
            "request.done": self._on_done,
            "engine.accepted": self._on_accepted,
            "session.ended": self._on_ended,
            "session.late": self._on_late,
        }

    def _on_sent(self, event: Event) -> None:
        self._turns[event.data["request"]] = event.data["session"]

    def _on_done(self, event: Event) -> None:
        self._turns.pop(event.data["request"], None)

    def _on_accepted(self, event: Event) -> None:
        session = self._turns.get(event.data["request"])
        if session is None:
            return
        self.judged += 1
        first = self._bound.setdefault(session, event)
        if first.actor != event.actor:
            self.violation(
                f"session {session} was on {first.actor} and came to {event.actor} with {event.data['request']}",
                first.seq,
                event.seq,
            )

    def _on_ended(self, event: Event) -> None:
        self._bound.pop(event.data["session"], None)
        if event.data["retired"]:
            self._retired[event.data["session"]] = event
            if len(self._retired) > _RETIRED_KEPT:
                self._retired.popitem(last=False)

    def _on_late(self, event: Event) -> None:
        retired = self._retired.get(event.data["session"])
        if retired is None:
            return
        self.judged += 1
        if event.data["status"] == 200:
            text = (
                f"session {event.data['session']} is retired, and its late request {event.data['request']} was served"
            )
            self.violation(text, retired.seq, event.seq)

    def observed(self) -> str:
        return f"{self.judged} arrivals judged, {self.violations} elsewhere or too late"


class RouterEmptyAtTheEnd(Check):
    """Every episode was retired, and then the router has nothing bound, assigned or in flight (A-I4, A-I6)."""

    name = "router_empty_at_the_end"
    expected = "0 bound, 0 assigned, 0 in flight"
    needs = ("publishing.deployed",)  # so that the row shows where nobody could look

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._kept: dict[str, Event] = {}  # service -> an episode whose retirement nobody acknowledged
        self._last = "no snapshot"

    def handlers(self) -> dict[str, Handler]:
        return {"session.ended": self._on_ended, "affinity.snapshot": self._on_snapshot}

    def _on_ended(self, event: Event) -> None:
        if not event.data["retired"]:
            self._kept.setdefault(event.data["service"], event)

    def _on_snapshot(self, event: Event) -> None:
        self.judged += 1
        data = event.data
        self._last = (
            f"{data['bindings']} bound, {data['assigned']} assigned, {data['in_flight']} in flight, "
            f"{data['tombstones']} tombstones"
        )
        kept = self._kept.get(data["service"])
        if data["in_flight"] or (kept is None and (data["bindings"] or data["assigned"])):
            self.violation(f"all episodes are over and the router of {data['service']} has {self._last}", event.seq)
        elif kept is not None and (data["bindings"] or data["assigned"]):
            text = f"{self._last}; the retirement of {kept.data['session']} was not acknowledged"
            self.violation(text, kept.seq, event.seq)

    def observed(self) -> str:
        return self._last
