"""Traces of sessions: what is in the trace store, and whose it is (serving.md 5.7).

Computed from what agents were told by the store, and from what an operator saw of buffer and store. What the store, the
buffer and the producer say of themselves is not asked.
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.traces_views import Services
from protocol.evidence import Event

_NS = 1_000_000_000
_ANSWER_NS = 2 * _NS  # a question that waits for nobody is answered by then
_FOUND_NS = 2 * _NS  # who was told of a death has asked for the name again by then
_GONE = ("ActorDied", "NoSuchActor")
_ASKED = ("count", "contents")


class TraceSurvives(Check):
    """What was recorded of a session is there as long as somebody may need it: in flight, retryable or buffered.

    An agent that goes on finds all that it has recorded (S-I1, S-I4), and takes a training trace at the end; a session
    of a group that lay in the buffer before and after the store was asked was in the store in between. Only the death
    of the store excuses a loss. Kills S-1, S-2, S-3, S-5 and S-18.
    """

    name = "trace_survives"
    expected = "every look-up, export and look at the buffer finds what was recorded"
    needs = ("rollouts.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._services = Services()
        # Service to session to the latest record of it; kept to the last look, for until then somebody may come back.
        self._recorded: dict[str, dict[str, Event]] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollouts.deployed": self._services.deployed,
            "trace.recorded": self._on_recorded,
            "trace.looked_up": self._on_looked_up,
            "trace.exported": self._on_exported,
            "trace.snapshot": self._on_snapshot,
            "actor.died": self._on_died,
        }

    def _sessions(self, event: Event) -> dict[str, Event] | None:
        service = self._services.by_agent.get(event.actor)
        return None if service is None else self._recorded.setdefault(service.name, {})

    def _on_recorded(self, event: Event) -> None:
        sessions = self._sessions(event)
        if sessions is not None and event.data["outcome"] == "done" and not event.data["again"]:
            sessions[event.data["session"]] = event

    def _on_died(self, event: Event) -> None:
        service = self._services.died(event)
        if service is not None and event.actor == service.store:
            self._recorded.pop(service.name, None)  # all that it had went with it

    def _on_looked_up(self, event: Event) -> None:
        data = event.data
        recorded = (self._sessions(event) or {}).get(data["session"])
        if recorded is None or not data["expected"] or data["error"]:
            return
        self.judged += 1
        if data["found"] < data["expected"]:
            self.violation(
                f"session {data['session']} was recorded up to {data['expected']} characters, and {data['found']} of "
                "them are in the trace store when its agent goes on",
                recorded.seq,
                event.seq,
            )

    def _on_exported(self, event: Event) -> None:
        data = event.data
        recorded = (self._sessions(event) or {}).get(data["session"])
        if recorded is None or data["error"] not in ("", "TraceNotFound"):
            return
        self.judged += 1
        if data["error"]:
            self.violation(
                f"the conversation of session {data['session']}, {data['chars']} characters, was recorded and does not "
                "match any trace key at its end",
                recorded.seq,
                event.seq,
            )

    def _on_snapshot(self, event: Event) -> None:
        data = event.data
        sessions = self._recorded.get(data["service"], {})
        there = set(data["sessions"])
        after = {(row[1], row[3]) for row in data["after"]}
        for _, session, status, number in data["before"]:
            recorded = sessions.get(session)
            if recorded is None or (session, number) not in after:
                continue  # not traced, or taken out meanwhile
            self.judged += 1
            if session not in there:
                self.violation(
                    f"the group of session {session} lies in the buffer of {data['service']}, {status}, and "
                    "the session is not in the trace store",
                    recorded.seq,
                    event.seq,
                )
        if data["when"] == "final":
            self._recorded.pop(data["service"], None)

    def observed(self) -> str:
        return f"{self.judged} looks, {self.violations} in vain"


class TraceIsTheTranscript(Check):
    """A training trace is what the agent has seen, token by token, with its versions and requests (S-I1, S-I2).

    Nothing is lost on the way, nothing recorded is replaced by a later answer, and either every segment has its expert
    choices or none has. Kills S-10 and S-16.
    """

    name = "trace_is_the_transcript"
    expected = "the agent's own tokens, versions and requests; experts for all segments or none"
    needs = ("trace.exported",)

    def handlers(self) -> dict[str, Handler]:
        return {"trace.exported": self._on_exported}

    def _on_exported(self, event: Event) -> None:
        data = event.data
        if data["error"]:
            return
        self.judged += 1
        trace = f"the training trace of session {data['session']}"
        if data["tokens"] != data["expected_tokens"]:
            self.violation(f"{trace} has {data['tokens']} tokens; its agent saw {data['expected_tokens']}", event.seq)
        elif not data["same"]:
            self.violation(f"{trace} has tokens, versions or requests that its agent never saw there", event.seq)
        elif data["experts"] not in (0, data["segments"]):
            self.violation(
                f"{trace} has expert choices for {data['experts']} of {data['segments']} segments", event.seq
            )

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} training traces differ"


class StoreHoldsTheBuffer(Check):
    """When nobody works any more, the trace store has the sessions of the groups in the buffer and no others (S-I5).

    A service of which a part died is passed over. Kills S-4, and S-9 where the one that loses the store cleans up.
    """

    name = "store_holds_the_buffer"
    expected = "no session but those of groups in the buffer"
    needs = ("rollouts.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._services = Services()

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollouts.deployed": self._services.deployed,
            "actor.died": self._on_died,
            "trace.snapshot": self._on_snapshot,
        }

    def _on_died(self, event: Event) -> None:
        self._services.died(event)

    def _on_snapshot(self, event: Event) -> None:
        data = event.data
        service = self._services.by_name.get(data["service"])
        if data["when"] != "final" or service is None or service.broken:
            return
        needed = {row[1] for row in data["after"]}
        self.judged += len(data["sessions"]) + 1
        left = [session for session in data["sessions"] if session not in needed]
        if left:
            some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
            self.violation(
                f"{len(left)} sessions are left in the trace store of {data['service']} ({some}), and no group in the "
                "buffer needs them",
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} sessions and looks, {self.violations} with sessions left over"


class BufferAnswers(Check):
    """A question to the replay buffer is answered at once, whatever the trace store is doing (E16).

    The store is asked outside of anything that others wait for. Kills S-8.
    """

    name = "buffer_answers"
    expected = f"count and contents within {_ANSWER_NS // _NS} s"
    needs = ("rollouts.deployed",)
    joins_at = ("rollouts.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._buffers: set[str] = set()
        self._open: dict[int, Event] = {}
        self._faulted: dict[int, str] = {}  # fault in force -> its target
        self._longest_ns = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollouts.deployed": self._on_deployed,
            "call.sent": self._on_sent,
            "call.fate": self._on_fate,
            "call.done": self._on_done,
            "fault.injected": self._on_fault,
            "fault.healed": self._on_healed,
        }

    def _on_deployed(self, event: Event) -> None:
        self._buffers.add(event.data["buffer"])

    def wants_call(self, method: str) -> bool:
        return method in _ASKED

    def _on_sent(self, event: Event) -> None:
        target = event.data["target"]
        if target in self._buffers and event.data["method"] in _ASKED:
            if not {target, event.actor} & set(self._faulted.values()):
                self._open[event.data["call"]] = event

    def _on_fate(self, event: Event) -> None:
        self._open.pop(event.data["call"], None)  # the network kept it: its time says nothing

    def _on_fault(self, event: Event) -> None:
        """A fault of the buffer itself, or of whoever asks, explains any time."""
        target = self._faulted[event.data["fault"]] = event.data["target"]
        for call, sent in list(self._open.items()):
            if target in (sent.data["target"], sent.actor):
                del self._open[call]

    def _on_healed(self, event: Event) -> None:
        self._faulted.pop(event.data["fault"], None)

    def _on_done(self, event: Event) -> None:
        sent = self._open.pop(event.data["call"], None)
        if sent is None or event.data["error"] in ("ActorDied", "CallCancelled"):
            return
        self.judged += 1
        took_ns = event.t_ns - sent.t_ns
        self._longest_ns = max(self._longest_ns, took_ns)
        if took_ns > _ANSWER_NS + self.ledger.order.clock_error_ns:
            self.violation(
                f"{sent.data['target']} took {took_ns / _NS:.3f} s to answer {sent.data['method']}", sent.seq, event.seq
            )

    def observed(self) -> str:
        return f"{self.judged} answers, the longest after {self._longest_ns / _NS:.3f} s, {self.violations} too late"


class StoreIsFoundAgain(Check):
    """Who needs the trace store finds the one that lives, also after an earlier one has died (serving.md 5.3).

    Kills S-9.
    """

    name = "store_is_found_again"
    expected = f"no agent talks to a dead store {_FOUND_NS // _NS} s after another one is up"
    needs = ("rollouts.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._services = Services()
        self._up: dict[str, Event] = {}  # store -> birth of the one that lives

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollouts.deployed": self._on_deployed,
            "actor.spawned": self._on_spawned,
            "actor.died": self._on_died,
            "trace.looked_up": self._on_answer,
            "trace.recorded": self._on_answer,
            "trace.exported": self._on_answer,
        }

    def _on_deployed(self, event: Event) -> None:
        self._services.deployed(event)
        self._up.setdefault(event.data["store"], event)

    def _on_spawned(self, event: Event) -> None:
        service = self._services.by_part.get(event.actor)
        if service is not None and event.actor == service.store:
            self._up[event.actor] = event

    def _on_died(self, event: Event) -> None:
        self._up.pop(event.actor, None)

    def _on_answer(self, event: Event) -> None:
        service = self._services.by_agent.get(event.actor)
        up = None if service is None else self._up.get(service.store)
        if up is None:
            return
        self.judged += 1
        if event.data["error"] in _GONE and event.t_ns - up.t_ns > _FOUND_NS + self.ledger.order.clock_error_ns:
            self.violation(
                f"{event.actor} was told {event.data['error']} of {up.actor}, which has been up for "
                f"{(event.t_ns - up.t_ns) / _NS:.1f} s",
                up.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} answers, {self.violations} of a store that is no more"
