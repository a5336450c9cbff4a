"""What SGLang does that whoever stands in front of it cannot see in its answers (engines.md 3).

A load whose flush is refused has changed the weights all the same, and the prefix cache is that of the old ones. An
abort ends every request whose id begins with the one given. After SIGTERM new requests are taken, and each of them
keeps the process from ending. Judged from what the engines' fronts saw, in both worlds.
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from analysis.checks.publishing_views import GENERATIONS
from protocol.evidence import Event

_NS = 1_000_000_000
_NOTICED_NS = 15 * _NS
"""A SIGTERM is nobody's message: it is seen at the next question that the engine answers differently."""


class NothingServedFromAnOldCache(Check):
    """An engine whose weights changed and whose flush was refused gets no generation before it is flushed (W-I4)."""

    name = "nothing_served_from_an_old_cache"
    expected = "after a refused flush: a flush that is done, or no generation"
    needs = ("engine.weights",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._hashes: dict[Process, str] = {}
        self._outlived: dict[Process, Event] = {}  # engine process -> the load whose flush was refused

    def handlers(self) -> dict[str, Handler]:
        return {
            "engine.ready": self._on_ready,
            "engine.weights": self._on_weights,
            "engine.flushed": self._on_flushed,
            "engine.accepted": self._on_accepted,
            "actor.died": self._on_died,
        }

    def _on_ready(self, event: Event) -> None:
        self._hashes[event.actor, event.inc] = event.data["weight_hash"]

    def _on_weights(self, event: Event) -> None:
        self.judged += 1
        process = (event.actor, event.inc)
        before = self._hashes.get(process)
        self._hashes[process] = weight_hash = event.data["weight_hash"]
        if not event.data["ok"] and before is not None and before != weight_hash:
            self._outlived.setdefault(process, event)

    def _on_flushed(self, event: Event) -> None:
        self._outlived.pop((event.actor, event.inc), None)

    def _on_accepted(self, event: Event) -> None:
        if self._outlived:
            load = self._outlived.get((event.actor, event.inc))
            if load is not None:
                self.violation(
                    f"{event.actor}/{event.inc} took request {event.data['request']} with the weights of version "
                    f"{load.data['version']!r} and the prefix cache of those before: their flush was refused",
                    load.seq,
                    event.seq,
                )

    def _on_died(self, event: Event) -> None:
        self._hashes.pop((event.actor, event.inc), None)
        self._outlived.pop((event.actor, event.inc), None)

    def observed(self) -> str:
        return f"{self.judged} loads, {self.violations} generations on a cache that had outlived its weights"


class AbortEndsTheOneAsked(Check):
    """An abort of one request ends no other: ids are matched as prefixes, so that none may begin with another."""

    name = "abort_ends_the_one_asked"
    expected = "0 requests ended by the abort of another one"
    needs = ("engine.abort_asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._open: dict[Process, dict[str, Event]] = {}  # engine process -> requests in it
        self._struck: dict[Process, dict[str, Event]] = {}  # those of them that begin with an id that was aborted

    def handlers(self) -> dict[str, Handler]:
        return {
            "engine.accepted": self._on_accepted,
            "engine.finished": self._on_finished,
            "engine.refused": self._on_refused,
            "engine.abort_asked": self._on_asked,
            "engine.paused": self._on_paused,
            "actor.died": self._on_died,
        }

    def _on_accepted(self, event: Event) -> None:
        self._open.setdefault((event.actor, event.inc), {})[event.data["request"]] = event

    def _on_asked(self, event: Event) -> None:
        self.judged += 1
        process = (event.actor, event.inc)
        asked = event.data["request"]
        if event.data["everything"]:
            self._struck.pop(process, None)
            return
        struck = self._struck.get(process)
        if struck is not None:
            struck.pop(asked, None)  # somebody wants this one ended, too
        if asked:
            for request in self._open.get(process, ()):
                if request != asked and request.startswith(asked):
                    self._struck.setdefault(process, {}).setdefault(request, event)

    def _on_paused(self, event: Event) -> None:
        if event.data["mode"] == "abort":
            self._struck.pop((event.actor, event.inc), None)

    def _on_finished(self, event: Event) -> None:
        asked = self._gone(event)
        if asked is not None and event.data["reason"] == "abort":
            self.violation(
                f"{event.actor}/{event.inc} ended request {event.data['request']} when {asked.data['request']!r} was "
                "to be aborted: its id begins with that",
                asked.seq,
                event.seq,
            )

    def _on_refused(self, event: Event) -> None:
        self._gone(event)

    def _gone(self, event: Event) -> Event | None:
        process = (event.actor, event.inc)
        running = self._open.get(process)
        if running is not None:
            running.pop(event.data["request"], None)
        struck = self._struck.get(process)
        return None if struck is None else struck.pop(event.data["request"], None)

    def _on_died(self, event: Event) -> None:
        self._open.pop((event.actor, event.inc), None)
        self._struck.pop((event.actor, event.inc), None)

    def observed(self) -> str:
        return f"{self.judged} aborts asked for, {self.violations} requests ended by that of another one"


class NothingToALeavingEngine(Check):
    """After SIGTERM an engine gets no new generations, once its router can have seen it: each keeps it from ending."""

    name = "nothing_to_a_leaving_engine"
    expected = f"0 generations sent to an engine {_NOTICED_NS // _NS} s or more after its SIGTERM"
    needs = ("engine.leaving",)
    joins_at = ("engine.leaving",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._leaving: dict[Process, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"engine.leaving": self._on_leaving, "call.sent": self._on_sent, "actor.died": self._on_died}

    def wants_call(self, method: str) -> bool:
        return method in GENERATIONS

    def _on_leaving(self, event: Event) -> None:
        self.judged += 1
        self._leaving.setdefault((event.actor, event.inc), event)

    def _on_sent(self, event: Event) -> None:
        if self._leaving and event.data["method"] in GENERATIONS:
            leaving = self._leaving.get((event.data["target"], event.data["target_inc"]))
            if leaving is not None:
                after_ns = event.t_ns - leaving.t_ns
                if after_ns > _NOTICED_NS + self.ledger.order.clock_error_ns:
                    self.violation(
                        f"{event.actor}/{event.inc} sent a generation to {leaving.actor}/{leaving.inc} "
                        f"{after_ns / _NS:.1f} s after its SIGTERM: so it never ends",
                        leaving.seq,
                        event.seq,
                    )

    def _on_died(self, event: Event) -> None:
        self._leaving.pop((event.actor, event.inc), None)

    def observed(self) -> str:
        return f"{self.judged} engines told to leave, {self.violations} generations sent to one later on"
