"""Sessions and their backends: one backend for a life, nothing after retirement, nothing left (serving.md 4.4)."""

from __future__ import annotations

from collections import OrderedDict

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from analysis.checks.publishing_views import PAUSE, TURNS, Fleet
from analysis.order import parse_cause
from protocol.evidence import Event

_RETIRED_KEPT = 65_536
_OVER_KEPT = 4_096


class OneBackendASession(Check):
    """The requests of a session reach one backend, and after its retirement none (A-I1, A-I2, A-I5).

    A turn that its agent has given up may reach a backend late. It must not have been sent there after the agent had
    retired the session, which may be served anew elsewhere by then. Kills: turns that wait at a gate and are sent when
    nobody waits for them any more.
    """

    name = "one_backend_a_session"
    expected = "one replica for each session, across publications; none once it is retired"
    needs = ("turn.sent",)
    joins_at = ("turn.sent",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._turns: dict[str, str] = {}  # open turn -> session
        self._over: OrderedDict[str, str] = OrderedDict()  # the latest turns that are over for their agents
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
        request = event.data["request"]
        session = self._turns.pop(request, None)
        if session is not None and event.data["outcome"] != "done":
            self._over[request] = session
            if len(self._over) > _OVER_KEPT:
                self._over.popitem(last=False)

    def _on_accepted(self, event: Event) -> None:
        request = event.data["request"]
        session = self._turns.get(request)
        if session is None:
            session = self._over.get(request)
            if session is None:
                return
            if session in self._retired:
                self._on_given_up(event, session)
            if session not in self._bound:
                return  # its episode is over
        self.judged += 1
        first = self._bound.setdefault(session, event)
        if first.actor != event.actor:
            self.violation(
                f"session {session} was on {first.actor} and came to {event.actor} with {event.data['request']}",
                first.seq,
                event.seq,
            )

    def _on_given_up(self, event: Event, session: str) -> None:
        """Judge a turn that comes to a backend when its session is retired: it may have been under way by then."""
        self.judged += 1
        retired = self._retired[session]
        text = f"session {session} is retired, and its turn {event.data['request']} "
        sent = None
        if event.cause is not None:
            (actor, inc), number = parse_cause(event.cause)
            sends = self.ledger.open_calls.values()
            sent = next((one for one in sends if (one.actor, one.inc, one.n) == (actor, inc, number)), None)
        if sent is None:
            self.doubt(f"{text}came to {event.actor}; who sent it, and when, is not seen", retired.seq, event.seq)
            return
        order = self.ledger.order.compare(retired, sent)
        if order == "before":
            self.violation(f"{text}was sent to {event.actor} after that", retired.seq, sent.seq, event.seq)
        elif order == "unordered":
            self.doubt(f"{text}came to {event.actor}; the clocks cannot tell", retired.seq, sent.seq, event.seq)

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


class AbortedIsNotCompleted(Check):
    """What comes back while an entrypoint aborts is no complete turn, whatever the engine says of it (3.1).

    An entrypoint aborts from the native pause that flagged it to the continue that takes the flag away, or its death.
    What is answered as aborted though no engine ended it so came from an entrypoint that was told to abort while it had
    that turn: else an unknown outcome is taken for an end. Kills: a response received after the abort and counted as
    completed (C-12), lost answers told as aborted turns, and a flag that is never taken away.
    """

    name = "aborted_is_not_completed"
    expected = "what ends under an abort is answered as aborted, and nothing else is"
    needs = ("publication.asked",)
    joins_at = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._pausing: dict[str, bool] = {}  # controller -> whether what it does last is a pause
        self._flagging: dict[int, tuple[str, bool]] = {}
        self._since: dict[str, Event] = {}  # entrypoint -> flagged
        self._ended: dict[str, tuple[Event, Event]] = {}  # open turn -> flag, end at the engine
        self._told: dict[str, Event | None] = {}  # entrypoint that was told to abort -> the latest end of that
        self._begun: dict[str, Event] = {}  # open turn -> how far it is known to have come: sent, or in an engine

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "turn.sent": self._on_begun,
            "engine.accepted": self._on_accepted,
            "engine.finished": self._on_finished,
            "turn.done": self._on_turn,
            "request.done": self._on_over,
            "actor.died": self._on_died,
        }

    def wants_call(self, method: str) -> bool:
        return method in ("pause_generation", "continue_generation", "set_aborting")

    def _on_begun(self, event: Event) -> None:
        self._begun[event.data["request"]] = event

    def _on_accepted(self, event: Event) -> None:
        if event.data["request"] in self._begun:
            self._begun[event.data["request"]] = event

    def _on_died(self, event: Event) -> None:
        self._since.pop(event.actor, None)  # its next incarnation was told nothing
        if event.actor in self._told and self._told[event.actor] is None:
            self._told[event.actor] = event

    def _on_sent(self, event: Event) -> None:
        data = event.data
        method = data["method"]
        if method in ("pause_generation", "continue_generation") and data["target"] in self._fleet.controllers:
            self._pausing[data["target"]] = method == "pause_generation"
        elif method == "set_aborting":
            pausing = self._pausing.get(event.actor, False)
            self._flagging[data["call"]] = (data["target"], pausing)
            if pausing:
                self._told[data["target"]] = None
                # A continue under way may come to its end before this; it is no end of what is told now.
                for call in [call for call, one in self._flagging.items() if one == (data["target"], False)]:
                    del self._flagging[call]
            else:
                self._since.pop(data["target"], None)

    def _on_done(self, event: Event) -> None:
        if not self._flagging:
            return
        entrypoint, flagged = self._flagging.pop(event.data["call"], ("", False))
        if event.data["outcome"] != "done" or not entrypoint:
            return
        if flagged:
            self._since[entrypoint] = event
        elif entrypoint in self._told and self._told[entrypoint] is None:
            self._told[entrypoint] = event

    def _on_finished(self, event: Event) -> None:
        if self._since:
            place = self._fleet.by_replica.get(event.actor)
            flag = None if place is None else self._since.get(place.entrypoint)
            if flag is not None and self.ledger.order.compare(flag, event) == "before":
                self._ended[event.data["request"]] = (flag, event)

    def _on_turn(self, event: Event) -> None:
        found = self._ended.get(event.data["request"])
        if found is None:
            if event.data["finish_reason"] == "abort":
                self._on_aborted(event)
            return
        self.judged += 1
        if event.data["finish_reason"] != "abort":
            flag, ended = found
            self.violation(
                f"turn {event.data['request']} ended on {ended.actor} after {event.data['entrypoint']} was to abort, "
                f"and was answered as {event.data['finish_reason']}",
                flag.seq,
                ended.seq,
                event.seq,
            )

    def _on_aborted(self, event: Event) -> None:
        """Judge an answer *aborted* of a turn that is not known to have ended under a flag."""
        request = self.ledger.requests.get(event.data["request"])
        if request is None or request.aborted:
            return  # its engine ended it so
        self.judged += 1
        entrypoint = event.data["entrypoint"]
        text = f"turn {event.data['request']} was answered as aborted; no engine had ended it so, and "
        if entrypoint not in self._told:
            self.violation(f"{text}nobody had told {entrypoint} to abort", request.sent_seq, event.seq)
            return
        ended, begun = self._told[entrypoint], self._begun.get(event.data["request"])
        if ended is None or begun is None:
            return  # it is told to now; or the turn is older than any telling
        order = self.ledger.order.compare(ended, begun)
        if order == "before":
            came = "was sent" if begun.kind == "turn.sent" else f"came to {begun.actor}"
            text += f"{entrypoint} was to abort no more ({ended.kind}) when it {came}"
            self.violation(text, ended.seq, begun.seq, event.seq)
        elif order == "unordered":
            text += f"the clocks cannot tell whether {entrypoint} still was to"
            self.doubt(text, ended.seq, begun.seq, event.seq)

    def _on_over(self, event: Event) -> None:
        self._begun.pop(event.data["request"], None)
        if self._ended:
            self._ended.pop(event.data["request"], None)

    def observed(self) -> str:
        return f"{self.judged} turns ended under an abort, {self.violations} answered otherwise than they ended"


class NoTurnIntoAnAbort(Check):
    """No entrypoint sends a turn to a backend that its controller has paused with abort, before that goes on (3.1).

    An abort reaches what is there. What comes later is held, and runs when the pause is over as if nobody had aborted
    it; so the entrypoints are told first. Kills: the flag set after the abort (C-11).
    """

    name = "no_turn_into_an_abort"
    expected = "from an abort to the continue nothing is sent to a backend"
    needs = ("engine.paused",)
    joins_at = ("engine.paused",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._asked: dict[Process, None] = {}  # engine process -> its controller posts a pause
        self._aborted: dict[Process, Event] = {}  # engine process -> the abort, until it goes on

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "engine.post": self._on_post,
            "engine.paused": self._on_paused,
            "engine.resumed": self._on_gone,
            "actor.died": self._on_gone,
            "call.sent": self._on_sent,
        }

    def wants_call(self, method: str) -> bool:
        return method in TURNS

    def _on_post(self, event: Event) -> None:
        if event.data["route"] == PAUSE and event.cause:
            process = (event.actor, event.inc)
            if parse_cause(event.cause)[0][0] in self._fleet.controllers:
                self._asked[process] = None
            else:
                self._asked.pop(process, None)  # of health, say: nobody's turns are to be aborted

    def _on_paused(self, event: Event) -> None:
        process = (event.actor, event.inc)
        if event.data["mode"] == "abort" and process in self._asked:
            self.judged += 1
            self._aborted.setdefault(process, event)

    def _on_gone(self, event: Event) -> None:
        self._asked.pop((event.actor, event.inc), None)
        self._aborted.pop((event.actor, event.inc), None)

    def _on_sent(self, event: Event) -> None:
        if not self._aborted or event.actor not in self._fleet.by_entrypoint:
            return
        aborted = self._aborted.get((event.data["target"], event.data["target_inc"]))
        if aborted is not None and self.ledger.order.compare(aborted, event) == "before":
            self.violation(
                f"{event.actor} sent a turn to {aborted.actor}/{aborted.inc}, which had aborted all of them, and was "
                "not told to go on",
                aborted.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} aborts, {self.violations} turns sent into one"


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
