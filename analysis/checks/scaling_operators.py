"""Scaling as operators see it: what is admitted, which key stands for what, and how operations end (scaling.md 1, 2).

Computed from the operators' own questions and answers.
"""

from __future__ import annotations

from analysis.checks.base import Check, Handler, shown
from analysis.checks.ledger import Ledger
from analysis.checks.scaling_views import SUBMISSIONS, TERMINAL, Operators, Seen
from protocol.evidence import Event

_DAY_NS = 24 * 3600 * 10**9
_BUDGET_S = 600.0
_WAIT_S = 60.0
_ANSWERS_S = 60.0  # for the API to notice the deadline, and to be told of the end


class OnlyIntegersAdmitted(Check):
    """A submission whose target is no integer is refused: it is neither admitted nor a no-op (scaling.md 1.2).

    One that names engines, as rollout replicas may be (7), has no target.
    """

    name = "only_integers_admitted"
    expected = "422 for a target that is no integer"
    needs = ("scale.answered",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._operators = Operators()
        self._connects: set[str] = set()

    def handlers(self) -> dict[str, Handler]:
        return {
            "scale.asked": self._operators.on_asked,
            "scale.connects": self._on_connects,
            "scale.answered": self._on_answered,
        }

    def _on_connects(self, event: Event) -> None:
        self._connects.add(event.data["ask"])

    def _on_answered(self, event: Event) -> None:
        asked = self._operators.on_answered(event)
        if asked is None or asked.data["route"] not in SUBMISSIONS:
            return
        self.judged += 1
        if asked.data["target"] is None and event.data["ask"] not in self._connects and event.data["status"] == 200:
            self.violation(f"a target that is no integer was answered with {event.data['state']}", asked.seq, event.seq)

    def observed(self) -> str:
        return f"{self.judged} submissions, {self.violations} admitted that are no integer"


class OneOperationAtATime(Check):
    """No operation is admitted while another one of the service is not terminal, or not clean (scaling.md 1.8)."""

    name = "one_operation_at_a_time"
    expected = "each operation admitted finds all earlier ones terminal and clean"
    needs = ("scale.answered",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._operators = Operators()
        self._overlaps: dict[str, list[tuple[str, int]]] = {}  # earlier -> (admitted meanwhile, seq of its answer)

    def handlers(self) -> dict[str, Handler]:
        return {"scale.asked": self._operators.on_asked, "scale.answered": self._on_answered}

    def _on_answered(self, event: Event) -> None:
        operators, data = self._operators, event.data
        is_new = data["operation"] not in operators.operations
        asked = operators.on_answered(event)
        if asked is None or data["status"] != 200:
            return
        if asked.data["route"] in SUBMISSIONS:
            if data["operation"] and is_new:
                self.judged += 1
                for seen in operators.operations.values():
                    if seen.service == asked.data["service"] and not seen.resolved and seen.id != data["operation"]:
                        self._overlaps.setdefault(seen.id, []).append((data["operation"], event.seq))
            return
        open_still = data["state"] not in TERMINAL or data["cleanup"] == "true"
        for other, admitted_seq in self._overlaps.pop(asked.data["operation"], ()):
            # Asked after the other one was admitted and open even then, so it was open when that was admitted.
            if asked.seq > admitted_seq and open_still:
                self.violation(
                    f"{other} was admitted while {asked.data['operation']} was {data['state']}"
                    + (" and not cleaned up" if data["state"] in TERMINAL else ""),
                    admitted_seq,
                    event.seq,
                )
            elif asked.seq < admitted_seq:
                self._overlaps.setdefault(asked.data["operation"], []).append((other, admitted_seq))

    def observed(self) -> str:
        return f"{self.judged} operations admitted, {self.violations} beside another"


class SameKeySameOperation(Check):
    """One idempotency key stands for one request and one answer for 24 h: the same operation, or the same no-op.

    Or for as long as its API says (``scale.window``).
    """

    name = "same_key_same_operation"
    expected = "the same key and request: the same operation or no-op; another request: 409"
    needs = ("scale.answered",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._operators = Operators()
        self._most: dict[str, int] = {}  # service -> keys that are kept, where that is on record
        self._windows_ns: dict[str, int] = {}  # service -> how long a key answers, where that is not as usual
        self._answers: dict[tuple[str, str, str], tuple[Event, Event]] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "scale.bounds": self._on_bounds,
            "scale.window": self._on_window,
            "scale.asked": self._operators.on_asked,
            "scale.answered": self._on_answered,
        }

    def _on_window(self, event: Event) -> None:
        self._windows_ns[event.data["service"]] = round(event.data["window_s"] * 1e9)

    def _window_ns(self, asked: Event) -> int:
        return self._windows_ns.get(asked.data["service"], _DAY_NS)

    def _on_bounds(self, event: Event) -> None:
        self._most[event.data["service"]] = min(event.data["max_keys"], event.data["max_history"])

    def _on_answered(self, event: Event) -> None:
        asked = self._operators.on_answered(event)
        if asked is None or asked.data["route"] not in SUBMISSIONS or asked.data["key"] is None:
            return
        key = (asked.data["service"], asked.data["direction"], asked.data["key"])
        most = self._most.get(key[0])
        if (
            most is not None
            and key in self._answers
            and len(self._answers) - 1 - list(self._answers).index(key) >= most
        ):
            del self._answers[key]  # so many came after it that it may be forgotten (memory_is_bounded)
        first = self._answers.get(key)
        if event.data["status"] != 200:
            if first is not None and event.data["code"] == "CONFLICT":
                self._judge_conflict(asked, event, *first)
            return
        self.judged += 1
        self._judge_direction(asked, event)
        if first is None:
            self._answers[key] = (asked, event)
            return
        was_asked, was_answered = first
        window_ns = self._window_ns(asked)
        if event.t_ns - was_asked.t_ns >= window_ns:  # perhaps it was over when the API looked
            if event.data["operation"] != was_answered.data["operation"] or not event.data["operation"]:
                self._answers[key] = (asked, event)
            elif asked.t_ns > was_answered.t_ns + window_ns:  # certainly: its record was made before the answer
                text = f"key {key[2]!r} still answers after {window_ns / 3.6e12:g} h"
                self.violation(text, was_answered.seq, event.seq)
        elif _request(asked) != _request(was_asked):
            if asked.seq > was_answered.seq:
                self.violation(
                    f"key {key[2]!r} was used for {_request(was_asked)} and answered for {_request(asked)} as well",
                    was_answered.seq,
                    event.seq,
                )
        elif event.data["operation"] != was_answered.data["operation"]:
            self.violation(
                f"key {key[2]!r} got {was_answered.data['operation'] or 'a no-op'} and then "
                f"{event.data['operation'] or 'a no-op'}",
                was_answered.seq,
                event.seq,
            )
        elif not event.data["operation"] and _numbers(event) != _numbers(was_answered):
            self.violation(
                f"the no-op of key {key[2]!r} was {shown(_numbers(was_answered))} and then {shown(_numbers(event))}",
                was_answered.seq,
                event.seq,
            )

    def _judge_conflict(self, asked: Event, event: Event, was_asked: Event, was_answered: Event) -> None:
        in_window = event.t_ns - was_asked.t_ns < self._window_ns(asked)
        if in_window and asked.seq > was_answered.seq and _request(asked) == _request(was_asked):
            self.judged += 1
            self.violation(
                f"key {asked.data['key']!r} was answered before; its retry is refused as a conflict",
                was_answered.seq,
                event.seq,
            )

    def _judge_direction(self, asked: Event, event: Event) -> None:
        seen = self._operators.operations.get(event.data["operation"])
        if seen is not None and seen.direction != asked.data["direction"]:
            self.violation(
                f"a {asked.data['direction']} was answered with {seen.id}, which is a {seen.direction}",
                seen.admitted_seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} answers with a key, {self.violations} not as before"


def _request(asked: Event) -> tuple[object, object]:
    return asked.data["target"], asked.data["timeout_s"]


def _numbers(answered: Event) -> tuple[object, object]:
    return answered.data["current"], answered.data["ready"]


def _askers(asked: Event) -> tuple[str, ...]:
    return (asked.actor, *((asked.cause.partition("/")[0],) if asked.cause else ()))


class OperationsEnd(Check):
    """Every operation that was admitted is terminal by the end, and a terminal state is never changed.

    The cleanup flag may drop from true to false; it never rises (scaling.md 1.5, 2.3). Where whoever asked
    for an operation was killed, nobody may hear of its end: that only its service says so is a doubt. So is one that
    was under way where the evidence breaks off (a time limit, a dead driver), unless its time was long over by then.
    """

    name = "operations_end"
    expected = "each operation admitted ends, once"
    needs = ("scale.answered",)
    believes = "that an operation ended whose asker was killed: it is in doubt then, and no failure"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._operators = Operators()
        self._bounded: dict[str, None] = {}  # services whose API keeps few operations (memory_is_bounded)
        self._ended: dict[str, int] = {}  # operations that ended by their service's word, and were not asked for since
        self._askers: dict[str, tuple[str, ...]] = {}  # operation -> who asked for it last, and through whom
        self._died: dict[str, None] = {}  # before the take-down
        self._taken_down = False
        # Service -> seconds of an operation without a budget of its own, and after it; absent: the usual ones.
        self._times: dict[str, tuple[float, float | None]] = {}
        self._faults: dict[int, None] = {}  # in force
        self._calm_ns = 0  # the last one's end

    def handlers(self) -> dict[str, Handler]:
        return {
            "scale.bounds": self._on_bounds,
            "scale.budget": self._on_budget,
            "rollout.scaled": self._on_rollouts,
            "fault.injected": self._on_fault,
            "fault.healed": self._on_healed,
            "scale.asked": self._on_asked,
            "scale.terminal": self._on_terminal,
            "scale.snapshot": self._on_snapshot,
            "actor.died": self._on_died,
            "scale.answered": self._on_answered,
        }

    def _on_bounds(self, event: Event) -> None:
        self._bounded[event.data["service"]] = None

    def _on_budget(self, event: Event) -> None:
        self._times[event.data["service"]] = event.data["budget_s"], event.data["wait_s"]

    def _on_rollouts(self, event: Event) -> None:
        self._times[event.data["service"]] = 0.0, None  # its drains take as long as they take

    def _on_fault(self, event: Event) -> None:
        self._faults[event.data["fault"]] = None

    def _on_healed(self, event: Event) -> None:
        self._faults.pop(event.data["fault"], None)
        self._calm_ns = event.t_ns

    def _on_asked(self, event: Event) -> None:
        if event.data["operation"]:
            self._ended.pop(event.data["operation"], None)
            self._askers[event.data["operation"]] = _askers(event)
        self._operators.on_asked(event)

    def _on_terminal(self, event: Event) -> None:
        self._ended[event.data["operation"]] = event.seq

    def _on_snapshot(self, event: Event) -> None:
        self._taken_down = self._taken_down or event.data["when"] == "final"

    def _on_died(self, event: Event) -> None:
        if not self._taken_down:
            self._died[event.actor] = None

    def _on_answered(self, event: Event) -> None:
        asked = self._operators.asked.get(event.data["ask"])
        before = None if asked is None else self._operators.operations.get(asked.data["operation"])
        if asked is not None and before is not None and event.data["status"] == 200:
            changed = before.terminal and event.data["state"] != before.state
            rose = before.resolved and event.data["cleanup"] == "true"
            if asked.seq > before.last_seq and (changed or rose):
                self.violation(
                    f"{before.id} was {before.state} and is {event.data['state']}"
                    + (" and not clean any more" if rose else ""),
                    before.last_seq,
                    event.seq,
                )
        elif asked is not None and before is not None and before.resolved and before.service in self._bounded:
            pass  # it may be forgotten
        elif asked is not None and before is not None and event.data["status"] == 404:
            self.violation(f"{before.id} was admitted and is not known any more", before.admitted_seq, event.seq)
        if asked is not None and event.data["operation"]:
            self._askers.setdefault(event.data["operation"], _askers(asked))
        self._operators.on_answered(event)

    def conclude(self) -> None:
        for seen in self._operators.operations.values():
            self.judged += 1
            died = any(name in self._died for name in self._askers.get(seen.id, ()))
            if seen.terminal:
                continue
            text = f"{seen.id} was admitted and is {seen.state} where the evidence ends"
            may_end = self.ledger.finished is None or not (self.ledger.completed or self.ledger.hung)
            if died and seen.id in self._ended:
                said = "whoever had asked for it was killed, and only its service says that it has ended"
                self.doubt(f"{text}; {said}", seen.admitted_seq, self._ended[seen.id])
            elif may_end and not self._is_overdue(seen):
                self.doubt(f"{text}, which is before the run's own end", seen.admitted_seq, seen.last_seq)
            else:
                self.violation(text, seen.admitted_seq, seen.last_seq)

    def _is_overdue(self, seen: Seen) -> bool:
        """Whether its state was asked for when it must have been terminal, whatever would have come after."""
        usual_s = None if self.ledger.world == "imported" else _BUDGET_S
        budget_s, wait_s = self._times.get(seen.service, (usual_s, _WAIT_S))
        budget_s = budget_s if seen.budget_s is None else seen.budget_s
        if self._faults or budget_s is None or wait_s is None:
            return False
        deadline_ns = max(seen.admitted_ns + round(budget_s * 1e9), self._calm_ns)
        return seen.asked_ns >= deadline_ns + round((wait_s + _ANSWERS_S) * 1e9)

    def observed(self) -> str:
        return f"{self.judged} operations admitted, {self.violations} without one end"
