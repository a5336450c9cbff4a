"""The autoscaler: what it may ask for, and when (scaling.md 6.3 to 6.5).

From what the recorder in front of a service's control API saw (``scale.asked`` and ``scale.answered`` of that actor),
from faults, and from the settings that were deployed. Only ``autoscaler_sustained`` reads claims: what an autoscaler
saw of the metrics, nobody else knows.
"""

from __future__ import annotations

from typing import Any

from analysis.checks.base import Check, Group, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.scaling_views import SUBMISSIONS, TERMINAL
from protocol.evidence import Event
from protocol.messages import service_of

_BLINDING = ("metrics_missing", "metrics_nan", "sigstop")
_SLACK_NS = 10**6
_ENOUGH = (0.5, 1.0)  # of the replicas must have reported for a scale-out, for a scale-in


class Request:
    """One key that an autoscaler has used. ``operation``: empty before it was admitted."""

    __slots__ = ("action", "admitted_ns", "asked", "open", "operation", "state")

    def __init__(self, asked: Event) -> None:
        self.asked = asked
        self.action: str = asked.data["direction"]
        self.operation = ""
        self.admitted_ns = 0
        self.state = ""
        self.open = False
        """Admitted, and not known to be terminal and clean."""


class Scaler:
    """One autoscaler with its settings, and what it has asked for so far."""

    def __init__(self, deployed: Event) -> None:
        self.settings: dict[str, Any] = deployed.data
        self.service: str = deployed.data["service"]
        self.actor: str = deployed.data["scaler"]
        self.requests: dict[str, Request] = {}
        self.latest_admitted: Request | None = None

    def seconds(self, name: str) -> int:
        """A setting in nanoseconds."""
        return round(self.settings[name] * 1e9)


class AutoscalerCheck(Check):
    """Base: follows every autoscaler's requests, and calls the hooks of a check before it takes an event in."""

    needs = ("autoscaler.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.scalers: dict[str, Scaler] = {}  # actor in front of the control API -> autoscaler
        self._asks: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "autoscaler.deployed": self._on_deployed,
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
            "actor.died": self._on_died,
        }

    def submitted(self, scaler: Scaler, asked: Event, again: bool) -> None:
        """A submission; ``again``: its key was used before."""

    def admitted(self, scaler: Scaler, request: Request, answered: Event) -> None:
        """A submission was admitted, for the first time under its key."""

    def _on_deployed(self, event: Event) -> None:
        self.scalers[event.data["api"]] = Scaler(event)

    def _on_asked(self, event: Event) -> None:
        scaler = self.scalers.get(event.actor)
        if scaler is None:
            return
        self._asks[event.data["ask"]] = event
        if event.data["route"] in SUBMISSIONS:
            key = event.data["key"] or event.data["ask"]
            self.submitted(scaler, event, key in scaler.requests)
            scaler.requests.setdefault(key, Request(event))

    def _on_answered(self, event: Event) -> None:
        asked = self._asks.pop(event.data["ask"], None)
        if asked is None:
            return
        scaler, data = self.scalers[asked.actor], event.data
        if asked.data["route"] in SUBMISSIONS:
            request = scaler.requests[asked.data["key"] or asked.data["ask"]]
            if data["status"] == 200 and data["operation"] and not request.operation:
                self.admitted(scaler, request, event)
                request.operation, request.admitted_ns, request.open = data["operation"], event.t_ns, True
                scaler.latest_admitted = request
            return
        for request in scaler.requests.values():
            if request.operation == asked.data["operation"]:
                if data["status"] == 200:
                    request.state = data["state"]
                    request.open = not (data["state"] in TERMINAL and data["cleanup"] == "false")
                elif data["status"] == 404:
                    request.open = False  # its state is lost; there is nothing to wait for

    def _on_died(self, event: Event) -> None:
        """An autoscaler that begins anew knows of nothing: its service's mutual exclusion is what is left."""
        for scaler in self.scalers.values():
            if scaler.actor == event.actor:
                scaler.requests.clear()
                scaler.latest_admitted = None
                # What it asked is answered to nobody.
                mine = [ask for ask, asked in self._asks.items() if self.scalers[asked.actor] is scaler]
                for ask in mine:
                    del self._asks[ask]


class AutoscalerKeepsBounds(AutoscalerCheck):
    """An autoscaler asks for no total below its floor or above its ceiling."""

    name = "autoscaler_keeps_bounds"
    expected = "every target within min_engines and max_engines"

    def submitted(self, scaler: Scaler, asked: Event, again: bool) -> None:
        self.judged += 1
        low, high, target = scaler.settings["min_engines"], scaler.settings["max_engines"], asked.data["target"]
        if target is None or not low <= target <= high:
            self.violation(f"{asked.data['route']} to {target}, which is not within {low} and {high}", asked.seq)

    def observed(self) -> str:
        return f"{self.judged} submissions, {self.violations} out of bounds"


class AutoscalerCooldown(AutoscalerCheck):
    """After a request was accepted an autoscaler asks for nothing new until the cooldown of that action is over."""

    name = "autoscaler_cooldown"
    expected = "a new request only after the cooldown of the one before"

    def submitted(self, scaler: Scaler, asked: Event, again: bool) -> None:
        if again:
            return
        self.judged += 1
        before = scaler.latest_admitted
        if before is None:
            return
        cooldown_ns = scaler.seconds("out_cooldown_s" if before.action == "scale_out" else "in_cooldown_s")
        since_ns = asked.t_ns - before.admitted_ns
        if since_ns + _SLACK_NS + self.ledger.order.clock_error_ns < cooldown_ns:
            self.violation(
                f"{asked.data['route']} {since_ns / 1e9:.1f} s after {before.operation} was accepted; the cooldown is "
                f"{cooldown_ns / 1e9:g} s",
                before.asked.seq,
                asked.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} requests, {self.violations} within a cooldown"


class AutoscalerOneRequest(AutoscalerCheck):
    """An autoscaler has one request open at a time: until it was told terminal and clean, it asks for nothing new."""

    name = "autoscaler_one_request"
    expected = "a new request only once the one before is terminal and clean"

    def submitted(self, scaler: Scaler, asked: Event, again: bool) -> None:
        if again:
            return
        self.judged += 1
        for request in scaler.requests.values():
            if request.open:
                self.violation(
                    f"{asked.data['route']} under a new key while {request.operation} is "
                    f"{request.state or 'PENDING'} and not known to be clean",
                    request.asked.seq,
                    asked.seq,
                )

    def observed(self) -> str:
        return f"{self.judged} requests, {self.violations} beside an open one"


class NoBlindScaleIn(AutoscalerCheck):
    """No scale-in is asked for while a replica's metrics are withheld by a fault: nobody knows what it does."""

    name = "no_blind_scale_in"
    expected = "no scale-in while a living replica shows no metrics"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._blind: dict[str, tuple[str, Event]] = {}  # fault -> its target and its beginning

    def handlers(self) -> dict[str, Handler]:
        return {**super().handlers(), "fault.injected": self._on_fault, "fault.healed": self._on_healed}

    def _on_fault(self, event: Event) -> None:
        if event.data["name"] in _BLINDING:
            self._blind[str(event.data["fault"])] = (event.data["target"], event)

    def _on_healed(self, event: Event) -> None:
        self._blind.pop(str(event.data["fault"]), None)

    def _on_died(self, event: Event) -> None:
        super()._on_died(event)
        self._blind = {fault: one for fault, one in self._blind.items() if one[0] != event.actor}

    def submitted(self, scaler: Scaler, asked: Event, again: bool) -> None:
        if asked.data["route"] != "scale_in" or again:
            return
        self.judged += 1
        known_ns = scaler.seconds("evaluation_interval_s") + 2 * scaler.seconds("metrics_interval_s")
        for target, fault in self._blind.values():
            if service_of(target) == scaler.service and asked.t_ns - fault.t_ns > known_ns:
                self.violation(
                    f"scale-in to {asked.data['target']} while {target} has shown no metrics for "
                    f"{(asked.t_ns - fault.t_ns) / 1e9:.1f} s",
                    fault.seq,
                    asked.seq,
                )

    def observed(self) -> str:
        return f"{self.judged} scale-ins, {self.violations} blind"


class AutoscalerShowsItsOwn(AutoscalerCheck):
    """What an autoscaler's status says of a service is that service's own latest action (M33)."""

    name = "autoscaler_shows_its_own"
    expected = "the latest action that was accepted for that service, none before the first"
    needs = ("autoscaler.shown",)

    def handlers(self) -> dict[str, Handler]:
        return {**super().handlers(), "autoscaler.shown": self._on_shown}

    def _on_shown(self, event: Event) -> None:
        self.judged += 1
        for scaler in self.scalers.values():
            if scaler.actor == event.data["scaler"] and scaler.service == event.data["service"]:
                latest = scaler.latest_admitted
                break
        else:
            latest = None  # nobody records what is asked of that service: it was asked nothing
        own = None if latest is None else latest.action
        if event.data["last_action"] != own:
            witness = () if latest is None else (latest.asked.seq,)
            self.violation(
                f"{event.data['service']}: the last action shown is {event.data['last_action']}, its own is {own}",
                *witness,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} looks, {self.violations} at another service's action"


class AutoscalerSustained(Check):
    """A decision stands on frames that were valid for as long as its condition must hold, without a gap (M37).

    A frame is not valid for a direction if nobody reported, if fewer than enough did, or, for a scale-in, if of
    anybody nothing is known. And a condition that did not hold in the frame before has held for 0 s so far. Kills:
    streaks that go on over an empty frame, a thin one, an unknown replica or a gap; one that begins before its frame.
    """

    name = "autoscaler_sustained"
    group: Group = "claim"
    expected = "no decision sooner after an invalid frame or a gap than the condition must hold"
    needs = ("autoscaler.evaluated",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._settings: dict[str, dict[str, Any]] = {}
        self._coverage: dict[str, tuple[float, float]] = {}  # service -> what is enough, where that is not as usual
        self._broken: dict[tuple[str, str], Event] = {}  # service, action -> the latest frame not valid for it
        self._before: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "autoscaler.deployed": self._on_deployed,
            "autoscaler.coverage": self._on_coverage,
            "autoscaler.evaluated": self._on_evaluated,
        }

    def _on_deployed(self, event: Event) -> None:
        self._settings[event.data["service"]] = event.data

    def _on_coverage(self, event: Event) -> None:
        self._coverage[event.data["service"]] = event.data["out_least"], event.data["in_least"]

    def _on_evaluated(self, event: Event) -> None:
        service, frame = event.data["service"], event.data["frame"]
        settings = self._settings.get(service)
        before = self._before.get(service)
        self._before[service] = event
        if settings is None:
            return
        gap_ns = 2 * round(settings["evaluation_interval_s"] * 1e9) + _SLACK_NS
        # Before the first frame nothing was seen at all: no condition has held for longer than since then.
        broken = frame["is_empty"] or before is None or event.t_ns - before.t_ns > gap_ns
        out_least, in_least = self._coverage.get(service, _ENOUGH)
        coverage = frame.get("coverage", 1.0)
        if broken or coverage < out_least:
            self._broken[service, "scale_out"] = event
        if broken or frame["unknown_engines"] or coverage < in_least:
            self._broken[service, "scale_in"] = event
        if before is not None and 4 * (event.t_ns - before.t_ns) < 3 * gap_ns:
            self._judge_begun(before, event)
        action = event.data["action"]
        if action == "none":
            return
        self.judged += 1
        seen = self._broken.get((service, action))
        needed_s = settings["out_duration_s" if action == "scale_out" else "in_duration_s"]
        if seen is not None and event.t_ns - seen.t_ns + _SLACK_NS < round(needed_s * 1e9):
            self.violation(
                f"{action} {(event.t_ns - seen.t_ns) / 1e9:.1f} s after its first frame, an invalid one or a gap; "
                f"its conditions must hold for {needed_s:g} s",
                seen.seq,
                event.seq,
            )

    def _judge_begun(self, before: Event, event: Event) -> None:
        """Of two evaluations with none in between: what holds in the later one alone began there."""
        held: dict[str, float] = before.data["streaks"] or {}
        holds: dict[str, float] = event.data["streaks"] or {}
        for name, elapsed_s in holds.items():
            if name not in held and elapsed_s * 1e9 > _SLACK_NS:
                self.violation(
                    f"{name} is said to have held for {elapsed_s:g} s when it was first seen to hold",
                    before.seq,
                    event.seq,
                )

    def observed(self) -> str:
        return f"{self.judged} decisions, {self.violations} too early"
