"""Requests: each sent one ends exactly once, has its effect once, and fails only in the shadow of a fault."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import NOBODY, Ledger
from protocol.evidence import Event

_CLOSED_KEPT = 65_536


class NothingLost(Check):
    """Every ``request.sent`` has exactly one ``request.done`` by the end of the run."""

    name = "nothing_lost"
    expected = "each request sent ends exactly once"
    needs = ("request.sent", "request.done")

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._done = 0

    def handlers(self) -> dict[str, Handler]:
        return {"request.done": self._on_done}

    def _on_done(self, event: Event) -> None:
        self._done += 1
        request = self.ledger.requests.get(event.data["request"])
        if request is None:
            self.violation(f"request {event.data['request']} ended twice, or was never sent", event.seq)
        elif request.done_seq:
            text = f"request {event.data['request']} ended twice"
            self.violation(text, request.sent_seq, request.done_seq, event.seq)

    def conclude(self) -> None:
        self.judged = self.ledger.requests_sent
        for name, request in self.ledger.requests.items():
            if request.done_seq:
                continue
            if self.ledger.ended:
                self.violation(f"request {name} was sent and never ended", request.sent_seq)
            else:
                self.doubt(f"request {name} was open when the evidence ends", request.sent_seq)

    def observed(self) -> str:
        return f"{self.ledger.requests_sent} sent, {self._done} ended"


class NothingTwice(Check):
    """A request that may not be replayed has its effect on at most one engine, once; no request is answered twice.

    A turn, which may never be replayed, so reaches one backend at most (A-I3).
    """

    name = "nothing_twice"
    expected = "no non-idempotent request takes effect twice, none ends twice"
    needs = ("request.done", "engine.finished")

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        # A copy may be delivered after both sides have closed the request: the latest closed ones are remembered.
        self._closed: OrderedDict[str, tuple[str, int, int]] = OrderedDict()
        self._effects = 0

    def handlers(self) -> dict[str, Handler]:
        return {"engine.finished": self._on_finished, "request.done": self._on_done}

    def _on_done(self, event: Event) -> None:
        self.judged += 1
        request = self.ledger.requests.get(event.data["request"])
        if request is None:
            self.violation(f"request {event.data['request']} ended twice, or was never sent", event.seq)
        elif request.done_seq:
            self.violation(f"request {event.data['request']} ended twice", request.done_seq, event.seq)

    def _on_finished(self, event: Event) -> None:
        data = event.data
        name = data["request"]
        request = self.ledger.requests.get(name)
        if request is not None and request.idempotent:
            return
        self.judged += 1
        if not data["completion_tokens"]:
            return
        earlier = self._closed.get(name)
        if earlier is not None:
            engine, inc, seq = earlier
            self.violation(
                f"request {name} is not idempotent and took effect on {engine}/{inc} and on {event.actor}/{event.inc}",
                seq,
                event.seq,
            )
        elif request is not None:
            self._effects += 1
            self._closed[name] = (event.actor, event.inc, event.seq)
            if len(self._closed) > _CLOSED_KEPT:
                self._closed.popitem(last=False)

    def observed(self) -> str:
        return f"{self._effects} non-idempotent requests took effect; {self.violations} took effect or ended twice"


class AnswerIsTheEngines(Check):
    """What the client was told is what the engine that it names produced: tokens and weight version."""

    name = "answer_is_the_engines"
    expected = "version and token count of each answer equal those of the engine's run"
    needs = ("request.done",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._untold: dict[str, None] = {}  # open requests over HTTP in a form of answer that names no version
        self._aborted: dict[str, None] = {}  # open turns that an entrypoint may have ended before it sent them

    def handlers(self) -> dict[str, Handler]:
        return {"http.sent": self._on_http, "turn.done": self._on_turn, "request.done": self._on_done}

    def _on_turn(self, event: Event) -> None:
        if event.data["finish_reason"] == "abort":
            self._aborted[event.data["request"]] = None

    def _on_http(self, event: Event) -> None:
        # Anthropic's answers and streamed ones name no version; where one is named it is compared all the same.
        if event.data["stream"] or event.data["format"] != "openai":
            self._untold[event.data["request"]] = None

    def _on_done(self, event: Event) -> None:
        data = event.data
        untold = self._untold.pop(data["request"], self) is None and not data["version"]
        unsent = bool(self._aborted) and self._aborted.pop(data["request"], self) is None and not data["replica"]
        if data["outcome"] != "done":
            return
        request = self.ledger.requests.get(data["request"])
        if request is None:
            return  # nothing_lost says so
        if unsent and not data["completion_tokens"] and not request.runs:
            return  # aborted before it went to any engine, which the answer says
        if self.ledger.world == "imported":
            return  # the engines' side of a run of others is not on record
        self.judged += 1
        engine = (data["replica"], data["replica_inc"])
        last = None
        for run in request.runs:
            # A gateway that hides the replica's name is judged by what any engine made of the request.
            if run.finished_seq and (run.engine == engine or not engine[0]):
                last = run
                if run.completion_tokens == data["completion_tokens"] and (
                    run.version == data["version"] or untold or not run.completion_tokens
                ):
                    return
        if last is None:
            self.violation(
                f"request {data['request']} is answered in the name of {engine[0] or 'any engine'}/{engine[1]}, "
                "which never finished it",
                request.sent_seq,
                event.seq,
            )
        else:
            self.violation(
                f"request {data['request']}: the client has {data['completion_tokens']} tokens of version "
                f"{data['version']!r}, the engine made {last.completion_tokens} of {last.version!r}",
                last.finished_seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} answers differ"


class UnexplainedFailures(Check):
    """A request that does not end *done* is in the shadow of a fault on its path, or an engine refused it with 4xx.

    Or its engine aborted it because somebody had it do so: a pause in abort mode, or an abort, of anybody but the one
    who had sent it there. A server that cuts the turn of a client who is there explains nothing by that.
    """

    name = "unexplained_failures"
    expected = "each request that is not answered is explained by a fault"
    needs = ("request.done",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._grace_ns = round(ledger.preregistered.shadow_s * 1e9)
        self._explained: dict[str, int] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"request.done": self._on_done}

    def _on_done(self, event: Event) -> None:
        self.judged += 1
        data = event.data
        if data["outcome"] == "done":
            return
        request = self.ledger.requests.get(data["request"])
        if request is None:
            return  # nothing_lost says so
        if data["error"] == "Left":
            reason = "left on purpose"
        elif request.abort_asker not in ("", NOBODY) and _told_aborted(data):
            reason = f"aborted by its engine, as {request.abort_asker} had asked"
        elif request.refused is not None and data["status"] == request.refused[1]:
            reason = f"refused with {request.refused[1]}"
        else:
            error_ns = self.ledger.order.clock_error_ns
            window = self.ledger.shadow.explain(
                request.sent_ns - error_ns,
                event.t_ns + error_ns,
                self._grace_ns,
                error=data["error"],
                client=event.actor,
            )
            if window is None and request.abort_asker == NOBODY and _told_aborted(data):
                text = f"request {data['request']} was aborted by its engine; who had asked for that is not on record"
                self.doubt(text, request.sent_seq, event.seq)
                return
            if window is None:
                cut = "; its engine aborted it, and nobody but its sender wanted that" if request.aborted else ""
                self.violation(_failure(data) + cut, request.sent_seq, event.seq)
                return
            reason = f"{window.name} on {window.target}"
        self._explained[reason] = self._explained.get(reason, 0) + 1

    def observed(self) -> str:
        said = ", ".join(f"{count} {reason}" for reason, count in self._explained.items())
        explained = sum(self._explained.values())
        return f"{self.violations + explained} failed of {self.judged}, {self.violations} unexplained" + (
            f" (in the shadow of: {said})" if said else ""
        )


def _told_aborted(data: dict[str, Any]) -> bool:
    """Whether the client was told an error that an aborted generation makes."""
    return data["error"] == "HttpError" and data["status"] in (200, 503)


def _failure(data: dict[str, Any]) -> str:
    return (
        f"request {data['request']} ended {data['outcome']} with status {data['status']} "
        f"({data['error'] or 'no error'}) while no fault was on that can touch it"
    )


class Converges(Check):
    """After the last fault is healed, whatever is open or is sent ends within the stated bound."""

    name = "converges"
    needs = ("fault.injected", "run.healed")
    expected = "after the last healing every request ends within the bound"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._bound_ns = round(ledger.preregistered.converge_within_s * 1e9)
        self._slowest_ns = 0

    def handlers(self) -> dict[str, Handler]:
        return {"request.done": self._on_done, "run.healed": self._on_healed}

    def _on_healed(self, event: Event) -> None:
        # A later healing starts the bound again: what was judged against an earlier one no longer counts.
        self.judged = 0
        self._slowest_ns = 0

    def _on_done(self, event: Event) -> None:
        healed = self.ledger.healed
        request = self.ledger.requests.get(event.data["request"])
        if healed is None or request is None:
            return
        self.judged += 1
        self._judge(event.data["request"], request.sent_ns, event.t_ns, healed, request.sent_seq, event.seq)

    def _judge(self, name: str, sent_ns: int, until_ns: int, healed: Event, *seqs: int) -> None:
        took = until_ns - max(sent_ns, healed.t_ns)
        if took > self._slowest_ns:
            self._slowest_ns = took
        if took <= self._bound_ns:
            return
        text = f"request {name} took {took / 1e9:.3f} s from the last healing on (bound {self._bound_ns / 1e9:g} s)"
        if took > self._bound_ns + self.ledger.order.clock_error_ns:
            self.violation(text, healed.seq, *seqs)
        else:
            self.doubt(f"{text}; within the clock error", healed.seq, *seqs)

    def conclude(self) -> None:
        healed = self.ledger.healed
        if healed is None:
            if self.ledger.shadow.windows:
                self.doubt("faults were injected and the last healing is not in the evidence")
            return
        for name, request in self.ledger.requests.items():
            if not request.done_seq:
                self._judge(name, request.sent_ns, self.ledger.last_ns, healed, request.sent_seq)

    def observed(self) -> str:
        return f"slowest {self._slowest_ns / 1e9:.3f} s of bound {self._bound_ns / 1e9:g} s, {self.judged} judged"
