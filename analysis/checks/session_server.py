"""Session servers: what clients may believe is recorded, errors are errors, nothing is put in where it must not be.

Computed from what agents saw (scenarios/http_agents.py) and what the fronts of engines saw of their prompts; what
session servers and the trace store say of themselves is not asked (serving.md 5.2, 5.7).
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler, shown
from analysis.checks.ledger import Ledger
from protocol.evidence import Event

_NEEDS = ("session_servers.deployed",)
_PRIVATE = ("session_id", "request_id", "model_step")


class _Turn:
    """A turn under way or not yet looked for in the trace store."""

    __slots__ = ("reason", "seen", "sent")

    def __init__(self, sent: Event) -> None:
        self.sent = sent
        self.seen: Event | None = None
        self.reason: Event | None = None
        """How an engine ended it."""


class SessionTurnsAreTraced(Check):
    """What a client may put in its transcript is in the trace store, and so is what a client who left did not see.

    A turn that was seen to succeed is there when its client has seen the end (S-I1, S-11). A generation that ran to its
    end is recorded or its client sees an error, also when the client has left (S-I7, S-14). A turn that the engine
    aborted is no turn (S-22).
    """

    name = "session_turns_are_traced"
    expected = "no generation without either a trace write or an error that its client sees"
    needs = _NEEDS

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._turns: dict[str, _Turn] = {}
        self._missing = 0
        self._excused = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "http.sent": self._on_sent,
            "http.seen": self._on_seen,
            "http.traced": self._on_traced,
            "engine.finished": self._on_finished,
        }

    def _on_sent(self, event: Event) -> None:
        if event.data["traced"]:
            self._turns[event.data["request"]] = _Turn(event)

    def _on_finished(self, event: Event) -> None:
        turn = self._turns.get(event.data["request"])
        if turn is not None:
            turn.reason = event

    def _on_seen(self, event: Event) -> None:
        turn = self._turns.get(event.data["request"])
        if turn is not None:
            turn.seen = event
            if event.data["seen"] not in ("ok", "left"):
                del self._turns[event.data["request"]]  # an error that its client sees, or for another check to judge

    def _on_traced(self, event: Event) -> None:
        turn = self._turns.pop(event.data["request"], None)
        if turn is None or turn.seen is None:
            return
        request = event.data["request"]
        if event.data["error"]:
            # Nobody can say. Only a fault may be why.
            if self._explained(turn, event):
                self._excused += 1
            else:
                self.doubt(f"the trace store did not say whether it has turn {request}", event.seq)
            return
        self.judged += 1
        aborted = turn.reason is not None and turn.reason.data["reason"] == "abort"
        if event.data["found"]:
            if aborted and turn.reason is not None:
                self.violation(
                    f"turn {request} was aborted by {turn.reason.actor} after "
                    f"{turn.reason.data['completion_tokens']} tokens, and is recorded as a whole turn",
                    turn.reason.seq,
                    event.seq,
                )
        elif turn.seen.data["seen"] == "ok":
            self._missing += 1
            self.violation(
                f"the client of turn {request} has seen it succeed, and the trace store does not have it",
                turn.seen.seq,
                event.seq,
            )
        elif not aborted and turn.reason is not None:
            if self._explained(turn, event):
                self._excused += 1
                return
            self._missing += 1
            self.violation(
                f"the client of turn {request} left; {turn.reason.actor} generated all of it, and the trace store does "
                "not have it",
                turn.seen.seq,
                turn.reason.seq,
                event.seq,
            )
        elif aborted and turn.reason is not None and not self._explained(turn, event):
            self._missing += 1
            self.violation(
                f"the client of turn {request} left, and with it the generation was given up after "
                f"{turn.reason.data['completion_tokens']} tokens",
                turn.seen.seq,
                turn.reason.seq,
            )

    def _explained(self, turn: _Turn, until: Event) -> bool:
        """Whether a fault was on while the turn was under way: its client has left, and cannot see an error."""
        grace_ns = round(self.ledger.preregistered.shadow_s * 1e9)
        return self.ledger.shadow.explain(turn.sent.t_ns, until.t_ns, grace_ns) is not None

    def observed(self) -> str:
        return f"{self._missing} of {self.judged} turns not recorded, {self._excused} in the shadow of a fault"


class FailuresAreTold(Check):
    """A client sees an answer, or an error in its own format: never half of one that looks whole (5.2; S-12, S-13)."""

    name = "failures_are_told"
    expected = "each answer is whole, or an error in the client's own format"
    needs = _NEEDS

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._sent: dict[str, Event] = {}
        self._broken: dict[str, tuple[Event, Event]] = {}  # seen to break while no fault was on; why is to come
        self._errors = 0

    def handlers(self) -> dict[str, Handler]:
        return {"http.sent": self._on_sent, "http.seen": self._on_seen, "request.done": self._on_done}

    def _on_sent(self, event: Event) -> None:
        self._sent[event.data["request"]] = event

    def _on_seen(self, event: Event) -> None:
        sent = self._sent.pop(event.data["request"], None)
        if sent is None or event.data["seen"] == "left":
            return
        self.judged += 1
        seen, request = event.data["seen"], event.data["request"]
        self._errors += seen == "error"
        what = {
            "malformed": "an answer that is none, with a status that says success",
            "incomplete": "a stream that ends without its end and without an error",
            "foreign_error": "an error that is not in its own format",
            "broken": "a connection that breaks",
        }.get(seen)
        if what is None or (seen == "broken" and self._explained(sent, event, "")):
            return
        if seen == "broken":
            self._broken[request] = (sent, event)  # what broke it comes with request.done
            return
        if seen == "foreign_error" and self._explained(sent, event, "bad_answer"):
            return  # the backend's own words, byte for byte
        self._neither(sent, event, what)

    def _on_done(self, event: Event) -> None:
        if self._broken and (found := self._broken.pop(event.data["request"], None)) is not None:
            sent, seen = found
            if not self._explained(sent, seen, "", event.data["error"]):
                self._neither(sent, seen, "a connection that breaks")

    def conclude(self) -> None:
        for sent, seen in self._broken.values():
            self._neither(sent, seen, "a connection that breaks")

    def _neither(self, sent: Event, seen: Event, what: str) -> None:
        self.violation(
            f"the client of turn {sent.data['request']} ({sent.data['format']}) got {what}: status "
            f"{seen.data['status']}, {seen.data['detail'][:80]!r}",
            sent.seq,
            seen.seq,
        )

    def _explained(self, sent: Event, seen: Event, name: str, error: str = "") -> bool:
        shadow = self.ledger.shadow
        grace_ns = round(self.ledger.preregistered.shadow_s * 1e9)
        if not name:
            return shadow.explain(sent.t_ns, seen.t_ns, grace_ns, error=error, client=seen.actor) is not None
        windows = shadow.windows.values()
        return any(window.name == name and window.on(sent.t_ns, seen.t_ns, grace_ns) for window in windows)

    def observed(self) -> str:
        return f"{self.judged} answers, {self._errors} of them errors; {self.violations} neither"


class PromptsContinueTheRecord(Check):
    """The ids sent for a turn begin with the ids of the turns before it, as they were read and generated (S-I6)."""

    name = "prompts_continue_the_record"
    expected = "each prompt begins with the prompt and the output of the turn before it"
    needs = _NEEDS

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._after: dict[str, str] = {}  # open turn to the latest one in its conversation
        self._where: dict[str, tuple[str, tuple[str, int]]] = {}  # session to its latest turn, and where that ran
        self._ran: dict[str, tuple[str, int]] = {}  # open turn to where it runs
        self._session: dict[str, str] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "http.sent": self._on_sent,
            "engine.prompt": self._on_prompt,
            "http.seen": self._on_seen,
            "session.ended": self._on_ended,
        }

    def _on_sent(self, event: Event) -> None:
        if event.data["traced"]:
            self._after[event.data["request"]] = event.data["after"]
            self._session[event.data["request"]] = event.data["session"]

    def _on_prompt(self, event: Event) -> None:
        request = event.data["request"]
        after = self._after.get(request)
        if after is None:
            return
        here = (event.actor, event.inc)
        self._ran[request] = here
        latest = self._where.get(self._session[request])
        if latest is None or latest != (after, here):
            return  # a first turn, or another process than the one that saw the turn before
        self.judged += 1
        if event.data["continues"] != after:
            self.violation(
                f"the prompt of turn {request} ({event.data['tokens']} tokens) does not begin with the ids of turn "
                f"{after}, only with {event.data['continued_tokens']} of {event.data['continues'] or 'none'}",
                event.seq,
            )

    def _on_seen(self, event: Event) -> None:
        request = event.data["request"]
        ran, session = self._ran.pop(request, None), self._session.pop(request, None)
        if self._after.pop(request, None) is not None and event.data["seen"] == "ok" and ran and session:
            self._where[session] = (request, ran)

    def _on_ended(self, event: Event) -> None:
        self._where.pop(event.data["session"], None)

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} prompts do not go on from the turn before"


class OnlyGenerationsAreTouched(Check):
    """Nothing that is for hooks alone reaches an engine, and what is no generation passes as it is (2.5, 5.2)."""

    name = "only_generations_are_touched"
    expected = "no private field upstream; other calls as the client sent them, answered as the engine answers"
    needs = _NEEDS

    def handlers(self) -> dict[str, Handler]:
        return {"engine.prompt": self._on_prompt, "http.passed": self._on_passed}

    def _on_prompt(self, event: Event) -> None:
        self.judged += 1
        data = event.data
        found = [name for name in data["unasked"] if not data["request"] or name in _PRIVATE]
        if found:
            what = f"turn {data['request']}" if data["request"] else f"a call of {data['route']}"
            self.violation(f"{what} reached {event.actor} with {shown(found)} in its body", event.seq)

    def _on_passed(self, event: Event) -> None:
        self.judged += 1
        if event.data["as_expected"]:
            return
        grace_ns = round(self.ledger.preregistered.shadow_s * 1e9)
        error = event.data["detail"].partition(" ")[2].partition(" ")[0]  # after how the exchange ended
        explain = self.ledger.shadow.explain
        if explain(event.t_ns, event.t_ns, grace_ns, error=error, client=event.actor) is None:
            self.violation(
                f"{event.data['route']} was not passed as it is: status {event.data['status']}, "
                f"{event.data['detail'][:80]}",
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} calls were touched"


class SessionsAreReleased(Check):
    """A session that has turns in the trace store is found there by whoever releases it (S-20)."""

    name = "sessions_are_released"
    expected = "each session with recorded turns is released under the id that its agent gave it"
    needs = _NEEDS

    def handlers(self) -> dict[str, Handler]:
        return {"http.released": self._on_released}

    def _on_released(self, event: Event) -> None:
        data = event.data
        if data["error"] or not data["traced"]:
            return
        self.judged += 1
        if not data["released"]:
            self.violation(f"session {data['session']} has {data['traced']} turns and was not released", event.seq)

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} sessions not released"
