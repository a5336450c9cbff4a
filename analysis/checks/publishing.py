"""Publications under live agents: versions of turns, leases, poison, one deadline (serving.md 2.6, 3.4, 9.4).

Computed from what the world sees: calls at the handle boundary of gates, controller and replicas, what the engines ran
and with which weights, and what agents were told. What gates say of themselves is not asked.
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler, shown
from analysis.checks.ledger import Ledger
from analysis.checks.publishing_views import GENERATIONS, TURNS, UPDATES, Fleet, GateCalls, Place, may_be_of_a_gate
from protocol.evidence import Event

_NS = 1_000_000_000
_SETTLED_NS = 1 * _NS  # a settlement of unknown outcome has reached its gate by then
_SLACK_NS = 1 * _NS  # scheduling noise of a deadline


class TurnOfOneVersion(Check):
    """Every token of a turn is of the version that its answer is stamped with (G-I2)."""

    name = "turn_of_one_version"
    expected = "no token of a version other than the one recorded"
    needs = ("publication.asked",)
    joins_at = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._runs: dict[str, list[Event]] = {}  # open turn -> engines' runs of it

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "turn.sent": self._on_sent,
            "engine.finished": self._on_finished,
            "turn.done": self._on_turn,
            "request.done": self._on_done,
        }

    def _on_sent(self, event: Event) -> None:
        self._runs[event.data["request"]] = []

    def _on_finished(self, event: Event) -> None:
        runs = self._runs.get(event.data["request"])
        if runs is not None:
            runs.append(event)

    def _on_turn(self, event: Event) -> None:
        data = event.data
        runs = self._runs.get(data["request"])
        if runs is None:
            return  # sent before anything was published
        if data["model_step"] < 0:
            place = self._fleet.by_entrypoint.get(data["entrypoint"])
            if place is not None and place.gate:
                self.judged += 1
                text = f"turn {data['request']} came through {place.gate}, and its answer is stamped with no version"
                self.violation(text, event.seq)
            return  # no gate, no stamp
        if not runs and data["finish_reason"] == "abort":
            return  # answered as aborted before it went to any engine
        if not runs:
            self.doubt(f"turn {data['request']} was answered, and no engine is seen to have run it", event.seq)
            return
        self.judged += 1
        stamp = str(data["model_step"])
        for run in runs:
            others = [version for version, *_ in run.data["spans"] if version != stamp]
            if others:
                self.violation(
                    f"turn {data['request']} is stamped {stamp}; {run.actor} computed {shown(run.data['spans'])}",
                    run.seq,
                    event.seq,
                )

    def _on_done(self, event: Event) -> None:
        self._runs.pop(event.data["request"], None)

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} turns with a token of another version"


class NoUpdateUnderLease(Check):
    """No weight update starts while a lease is active or a turn runs on any entrypoint of the service (G-I1, W-I3).

    A process that replaces a dead one is given its weights before anybody is sent to it: no update of the fleet.
    """

    name = "no_update_under_lease"
    expected = "every update finds no active lease and no running turn"
    needs = ("publication.asked",)
    joins_at = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._calls = GateCalls(self._fleet)
        self._leases: dict[str, list[Event]] = {}  # gate -> grants that nobody has settled, oldest first
        self._turns: dict[str, Event | None] = {}  # open turn -> where it was accepted last, while it runs
        self._running: dict[str, dict[str, Event]] = {}  # service -> turns that run

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "engine.started": self._fleet.started,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "turn.sent": self._on_turn,
            "request.done": self._on_over,
            "engine.accepted": self._on_accepted,
            "engine.finished": self._on_finished,
            "engine.refused": self._on_refused,
            "actor.died": self._on_died,
        }

    def wants_call(self, method: str) -> bool:
        return method in ("request", "settle") or method in GENERATIONS or method in UPDATES

    def _on_sent(self, event: Event) -> None:
        if self._calls.sent(event) is not None:
            if event.data["method"] == "settle":
                leases = self._leases.get(event.data["target"])
                if leases:
                    leases.pop(0)
            return
        method = event.data["method"]
        if method in GENERATIONS:
            self._fleet.sent_turn(event)
        elif method in UPDATES:
            place = self._fleet.by_replica.get(event.data["target"])
            if place is not None and place.gate and not self._fleet.is_fresh(event):
                self._judge(event, place.service)

    def _judge(self, event: Event, service: str) -> None:
        self.judged += 1
        update = f"{event.actor} sent an update to {event.data['target']}"
        for place in self._fleet.services[service]:
            leases = self._leases.get(place.gate)
            if leases:
                self._seen(event, f"{update} while {len(leases)} leases of {place.gate} were active", leases[0])
                return
        running = self._running.get(service)
        if running:
            request, accepted = next(iter(running.items()))
            self._seen(event, f"{update} while turn {request} ran on {accepted.actor}", accepted)

    def _seen(self, update: Event, text: str, earlier: Event) -> None:
        if self.ledger.order.compare(earlier, update) == "before":
            self.violation(text, earlier.seq, update.seq)
        else:
            self.doubt(f"{text}; the clocks cannot tell", earlier.seq, update.seq)

    def _on_done(self, event: Event) -> None:
        found = self._calls.done(event)
        if found is None:
            return
        sent, place = found
        method, outcome = sent.data["method"], event.data["outcome"]
        if method == "request" and outcome == "done":
            self._leases.setdefault(place.gate, []).append(event)
        elif method == "settle" and outcome == "unknown" and event.data["error"] != "ActorDied":
            self._leases.setdefault(place.gate, []).insert(0, event)  # it is told again; a dead gate has no leases

    def _on_turn(self, event: Event) -> None:
        self._turns[event.data["request"]] = None

    def _on_over(self, event: Event) -> None:
        if self._turns.get(event.data["request"], self) is None:
            del self._turns[event.data["request"]]

    def _on_accepted(self, event: Event) -> None:
        request = event.data["request"]
        place = self._fleet.by_replica.get(event.actor)
        if place is not None and request in self._turns:
            self._turns[request] = event
            self._running.setdefault(place.service, {})[request] = event

    def _on_refused(self, event: Event) -> None:
        name = event.data["request"]
        request = self.ledger.requests.get(name)
        if request is None or request.is_running():
            return  # what stands in front of a real engine saw two of one id go in, and the first goes on
        place = self._fleet.by_replica.get(event.actor)
        if place is not None and self._running.get(place.service, {}).pop(name, None) is not None:
            self._turns[name] = None

    def _on_finished(self, event: Event) -> None:
        place = self._fleet.by_replica.get(event.actor)
        if place is not None and self._running.get(place.service, {}).pop(event.data["request"], None) is not None:
            del self._turns[event.data["request"]]

    def _on_died(self, event: Event) -> None:
        self._leases.pop(event.actor, None)
        place = self._fleet.by_replica.get(event.actor)
        if place is not None:
            running = self._running.get(place.service, {})
            for request in [name for name, accepted in running.items() if accepted.actor == event.actor]:
                del running[request]

    def observed(self) -> str:
        return f"{self.judged} updates, {self.violations} under a lease or a running turn"


class PoisonedGateAdmitsNothing(Check):
    """After an unknown outcome a gate grants nothing, and no drain, install or reopening of it succeeds (G-I3)."""

    name = "poisoned_gate_admits_nothing"
    expected = "nothing passes a gate after an unknown outcome"
    needs = ("publication.asked",)
    joins_at = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._calls = GateCalls(self._fleet)
        self._upstream: dict[int, tuple[Event, Place]] = {}
        self._unknown: dict[str, Event] = {}  # gate -> end of unknown outcome, or its own word that it is poisoned
        self._unknowns = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "actor.died": self._on_died,
        }

    def wants_call(self, method: str) -> bool:
        return method in TURNS or may_be_of_a_gate(method)

    def _on_sent(self, event: Event) -> None:
        if self._calls.sent(event) is None and event.data["method"] in TURNS:
            place = self._fleet.by_entrypoint.get(event.actor)
            if place is not None and place.gate:
                self._upstream[event.data["call"]] = (event, place)

    def _on_done(self, event: Event) -> None:
        upstream = self._upstream.pop(event.data["call"], None)
        if upstream is not None:
            self.judged += 1
            if event.data["outcome"] == "unknown":
                self._unknowns += 1
                self._unknown.setdefault(upstream[1].gate, event)
            return
        found = self._calls.done(event)
        if found is None:
            return
        sent, place = found
        unknown = self._unknown.get(place.gate)
        if event.data["error"] == "GatePoisoned":
            self.judged += 1
            self._unknown.setdefault(place.gate, event)
        elif unknown is not None and event.data["outcome"] == "done":
            method = sent.data["method"]
            after_ns = sent.t_ns - unknown.t_ns - self.ledger.order.clock_error_ns
            late = after_ns > (_SETTLED_NS if method == "request" else 0)
            if method in ("request", "drain", "install_version", "reopen") and late:
                self.violation(
                    f"{method} of {place.gate} succeeded after {unknown.actor} had an end of unknown outcome there "
                    f"({unknown.data['error']})",
                    unknown.seq,
                    sent.seq,
                    event.seq,
                )

    def _on_died(self, event: Event) -> None:
        self._unknown.pop(event.actor, None)  # rebuilt, and closed
        if event.actor in self._fleet.by_entrypoint:
            for call in [call for call, (sent, _) in self._upstream.items() if sent.actor == event.actor]:
                del self._upstream[call]

    def observed(self) -> str:
        return f"{self.judged} ends and refusals, {self._unknowns} unknown, {self.violations} calls passed after one"


class OneDeadline(Check):
    """prepare_pause and resume_requests end within their one deadline, and nothing is reopened after it (C-I3, C-7)."""

    name = "one_deadline"
    expected = "each call ends within its time-out, whatever the number of entrypoints"
    needs = ("publication.asked",)
    joins_at = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._open: dict[int, tuple[Event, int]] = {}  # call -> (send, time-out)
        self._resuming: dict[tuple[str, int], tuple[Event, int]] = {}  # controller process -> its latest resume
        self._longest_ns = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "call.sent": self._on_sent,
            "call.fate": self._on_fate,
            "call.done": self._on_done,
        }

    def wants_call(self, method: str) -> bool:
        return method in ("prepare_pause", "resume_requests", "reopen")

    def _on_fate(self, event: Event) -> None:
        self._open.pop(event.data["call"], None)  # the network kept the answer back: its time says nothing

    def _on_sent(self, event: Event) -> None:
        data = event.data
        method = data["method"]
        if method in ("prepare_pause", "resume_requests"):
            deployed = self._fleet.controllers.get(data["target"])
            if deployed is not None:
                field = "prepare_timeout_s" if method == "prepare_pause" else "resume_timeout_s"
                limit_ns = round(deployed.data[field] * _NS)
                self._open[data["call"]] = (event, limit_ns)
                if method == "resume_requests":
                    self._resuming[data["target"], data["target_inc"]] = (event, limit_ns)
        elif method == "reopen":
            resuming = self._resuming.get((event.actor, event.inc))
            if resuming is not None:
                began, limit_ns = resuming
                self._judge(began, event, limit_ns, f"reopened {data['target']}")

    def _on_done(self, event: Event) -> None:
        found = self._open.pop(event.data["call"], None)
        if found is not None:
            sent, limit_ns = found
            self._judge(sent, event, limit_ns, "ended")

    def _judge(self, began: Event, event: Event, limit_ns: int, what: str) -> None:
        self.judged += 1
        took_ns = event.t_ns - began.t_ns
        self._longest_ns = max(took_ns, self._longest_ns)
        if took_ns > limit_ns + _SLACK_NS + self.ledger.order.clock_error_ns:
            self.violation(
                f"{began.data['method']} of {began.data['target']} {what} after {took_ns / _NS:.3f} s; its one "
                f"deadline is {limit_ns / _NS:g} s",
                began.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} judged, the longest {self._longest_ns / _NS:.3f} s, {self.violations} too late"
