"""Processes and calls: nothing acts after its death, nothing crashes, every wait ends."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from analysis.order import parse_cause
from protocol.evidence import KINDS, Event

# Written on behalf of a process by the world around it, so they may follow its death.
_ACTS = ("call.sent", "call.done", "request.sent", "request.done")


class NoUseAfterDeath(Check):
    """A dead incarnation does nothing any more, and no answer of it was made after its death."""

    name = "no_use_after_death"
    expected = "no event of a process after its death"
    needs = ("actor.died",)
    joins_at = ("actor.died",)
    believes = "that a process still speaks; what it says is not believed"

    def handlers(self) -> dict[str, Handler]:
        acts = [
            name
            for name, kind in KINDS.items()
            if name in _ACTS or kind.observer == "component" or name.startswith("engine.")
        ]
        found: dict[str, Handler] = dict.fromkeys(acts, self._on_act)
        found["call.done"] = self._on_call_done
        found["actor.died"] = self._on_died
        return found

    def _on_died(self, event: Event) -> None:
        self.judged += 1

    def _on_act(self, event: Event) -> None:
        dead = self.ledger.dead.get(event.actor)
        if dead is not None and event.inc <= dead:
            self._acted(event)

    def _acted(self, event: Event) -> None:
        process = (event.actor, event.inc)
        died = self.ledger.deaths.get(process)
        if died is None or self.ledger.is_zombie(process):
            return
        text = f"{event.actor}/{event.inc} died and then did {event.kind}"
        # A death is seen from outside, so the dead process's own counter cannot order it: the clocks must.
        gap = event.t_ns - died.t_ns
        if self.ledger.causal is None or gap > self.ledger.order.clock_error_ns:
            self.violation(text, died.seq, event.seq)
        elif gap > 0:
            self.doubt(f"{text}, if the clocks can be trusted that far", died.seq, event.seq)

    def _on_call_done(self, event: Event) -> None:
        ledger = self.ledger
        if not ledger.deaths:
            return
        self._on_act(event)
        if event.cause is None or event.data["outcome"] != "done" or ledger.causal is not None:
            return  # in the real world the answer is an act of its own process and is judged as such
        if event.cause.rsplit("/", 2)[0] not in ledger.dead:
            return  # the usual case, found without reading the numbers
        answerer, counter = parse_cause(event.cause)
        died = ledger.deaths.get(answerer)
        if died is not None and counter > died.n and not ledger.is_zombie(answerer):
            self.violation(
                f"call {event.data['call']} was answered by {answerer[0]}/{answerer[1]} after its death",
                died.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} deaths, {self.violations} acts afterwards"


class NoCrash(Check):
    """No actor dies of an error of its own; faults kill, they do not raise."""

    name = "no_crash"
    expected = "no actor crashes"
    needs = ("actor.spawned",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._actors: dict[Process, None] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"actor.spawned": self._on_spawned, "actor.died": self._on_died}

    def _on_spawned(self, event: Event) -> None:
        if event.data["role"] == "actor":
            self.judged += 1
            self._actors[event.actor, event.inc] = None

    def _on_died(self, event: Event) -> None:
        if (event.actor, event.inc) in self._actors:
            del self._actors[event.actor, event.inc]
            if event.data["reason"] == "crashed":
                detail = event.data["detail"].strip().splitlines()
                self.violation(f"{event.actor}/{event.inc} crashed: {detail[-1] if detail else 'no text'}", event.seq)

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} actors crashed"


class EveryWaitEnds(Check):
    """Every call ends at its caller, unless the caller died."""

    name = "every_wait_ends"
    expected = "each call sent ends, unless its caller died"
    needs = ("call.sent", "call.done")

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        # A call sent shortly before the end may still be under way.
        self._bound_ns = round(ledger.preregistered.converge_within_s * 1e9)

    def handlers(self) -> dict[str, Handler]:
        return {"call.done": self._on_done}

    def wants_call(self, method: str) -> bool:
        return False  # the ledger matches ends with sends; what is left for here are ends that match none

    def _on_done(self, event: Event) -> None:
        self.judged += 1
        self.violation(f"call {event.data['call']} ended twice, or was never sent", event.seq)

    def conclude(self) -> None:
        ledger = self.ledger
        self.judged += ledger.ended_calls
        for call, sent in ledger.open_calls.items():
            data = sent.data
            open_ns = ledger.last_ns - sent.t_ns
            text = f"call {call} of {sent.actor} to {data['target']}.{data['method']} was open {open_ns / 1e9:.3f} s"
            if ledger.stuck or (ledger.completed and open_ns > self._bound_ns):
                self.judged += 1
                self.violation(f"{text} when the run ended", sent.seq)
            elif ledger.finished is None:
                self.doubt(f"{text} where the evidence ends", sent.seq)

    def observed(self) -> str:
        return f"{self.judged} calls judged, {self.violations} never ended or ended twice"
