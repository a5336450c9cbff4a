"""A routed proxy and who tells it which backends there are (serving.md 1.4). Computed from what reaches the proxy."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.publishing_views import Fleet, GateCalls
from analysis.checks.shadow import PROBE_PREFIX
from protocol.evidence import Event


class ProxyRegisteredOnce(Check):
    """A backend is registered at most once between two deletions of it (P-I1).

    Kills: a read time-out that is retried (P-1), a failed deletion that is forgotten (P-7).
    """

    name = "proxy_registered_once"
    expected = "no registration of a backend that is registered"
    needs = ("proxy.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._registered: dict[tuple[str, str], Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"proxy.post": self._on_post}

    def _on_post(self, event: Event) -> None:
        data = event.data
        key = (data["service"], data["url"])
        effect = data["effect"]
        if effect in ("registered", "duplicate"):
            self.judged += 1
            earlier = self._registered.setdefault(key, event)
            if effect == "duplicate":
                self.violation(f"{data['url']} was registered again, without a deletion", earlier.seq, event.seq)
        elif effect == "deleted":
            self._registered.pop(key, None)
        elif effect == "deleted_all":
            for other in [other for other in self._registered if other[0] == data["service"]]:
                del self._registered[other]

    def observed(self) -> str:
        return f"{self.judged} registrations, {self.violations} twice"


class ProxyPostDeliveredOnce(Check):
    """An admin operation reaches the proxy once: only what never connected is tried again, five times at most (P-I2).

    Which attempts are of one operation only its sender can tell: who claims it (``admin.attempt``) is believed where it
    accuses. Kills: retries of 4xx and 5xx (P-3), retries without a bound (P-4).
    """

    name = "proxy_post_delivered_once"
    expected = "one delivery an operation, and no more attempts than are allowed"
    needs = ("proxy.deployed",)
    believes = "which attempts are of one operation, to its sender's loss"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._attempts: dict[str, int] = {}  # proxy -> attempts allowed
        self._of: dict[str, str] = {}  # proxy -> who registers there
        self._delivered: dict[str, list[Event]] = {}  # registrations actor -> deliveries since its last claim
        self._operation: dict[str, tuple[str, list[Event]]] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "proxy.deployed": self._on_deployed,
            "proxy.post": self._on_post,
            "admin.attempt": self._on_attempt,
        }

    def _on_deployed(self, event: Event) -> None:
        self._attempts[event.data["proxy"]] = event.data["connect_attempts"]
        self._of[event.data["proxy"]] = event.data["registrations"]

    def _on_post(self, event: Event) -> None:
        sender = self._of.get(event.actor)
        if sender is not None and event.data["route"] != "chat":
            self.judged += 1
            self._delivered.setdefault(sender, []).append(event)

    def _on_attempt(self, event: Event) -> None:
        data = event.data
        allowed = self._attempts.get(data["target"])
        if allowed is None:
            return
        posts = self._delivered.pop(event.actor, [])
        operation, earlier = self._operation.get(event.actor, ("", []))
        if operation != data["operation"]:
            earlier = []
        together = [*earlier, *posts]
        self._operation[event.actor] = (data["operation"], together)
        if posts and len(together) > 1:
            self.violation(
                f"{data['operation']} ({data['route']}) was delivered to {data['target']} {len(together)} times",
                *(post.seq for post in together),
                event.seq,
            )
        if data["attempt"] > allowed:
            self.violation(f"{data['operation']} is at its attempt {data['attempt']} of {allowed}", event.seq)

    def observed(self) -> str:
        return f"{self.judged} deliveries, {self.violations} of an operation that had one, or with too many attempts"


class ProxyFollowsTheFleet(Check):
    """The proxy has the backends that are active, and loses no healthy one for the failure of another (P-I3).

    Kills: everything deleted for one failure (P-5), a failed registration that is never made again (P-6).
    """

    name = "proxy_follows_the_fleet"
    expected = "at the end exactly those that are routed to; no deletion of all once one is registered"
    needs = ("proxy.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._registered: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"proxy.post": self._on_post, "proxy.snapshot": self._on_snapshot}

    def _on_post(self, event: Event) -> None:
        data = event.data
        if data["effect"] == "registered":
            self._registered.setdefault(data["service"], event)
        elif data["effect"] == "deleted_all":
            self.judged += 1
            first = self._registered.get(data["service"])
            if first is not None:
                self.violation(
                    f"every backend of {data['service']} was deleted while some were in use", first.seq, event.seq
                )

    def _on_snapshot(self, event: Event) -> None:
        self.judged += 1
        table, due = set(event.data["table"]), set(event.data["routable"])
        if table != due:
            missing, left = sorted(due - table), sorted(table - due)
            what = [f"{', '.join(missing)} missing"] if missing else []
            what += [f"{', '.join(left)} still there"] if left else []
            self.violation(f"the proxy of {event.data['service']}: {'; '.join(what)}", event.seq)

    def observed(self) -> str:
        return f"{self.judged} looks, {self.violations} with another fleet"


class ProxyProbe(Check):
    """A probe gets through before the first turn, never at closed gates, and its session is retired (P-I4, P-I5).

    Kills: a probe whose session stays (P-8).
    """

    name = "proxy_probe"
    expected = "a probe answered before the first turn, sent at open gates, its session retired"
    needs = ("proxy.deployed",)
    joins_at = ("proxy.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._calls = GateCalls(self._fleet)
        self._closed: dict[str, dict[str, Event]] = {}  # service -> gates sealed and not reopened
        self._answered: dict[str, Event] = {}
        self._service: dict[str, str] = {}  # registrations actor -> service
        self._probes: dict[str, list[Event]] = {}  # service -> probes whose session nobody has retired yet

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "proxy.deployed": self._on_deployed,
            "proxy.post": self._on_post,
            "proxy.forwarded": self._on_forwarded,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
        }

    def _on_deployed(self, event: Event) -> None:
        self._service[event.data["registrations"]] = event.data["service"]

    def wants_call(self, method: str) -> bool:
        return method in ("retire_route_sessions", "seal", "reopen")

    def _on_sent(self, event: Event) -> None:
        method = event.data["method"]
        if method == "retire_route_sessions":
            waiting = self._probes.get(self._service.get(event.actor, ""))
            if waiting:
                waiting.pop(0)
        elif method in ("seal", "reopen"):
            self._calls.sent(event)

    def _on_done(self, event: Event) -> None:
        found = self._calls.done(event)
        if found is None or event.data["outcome"] != "done":
            return
        sent, place = found
        closed = self._closed.setdefault(place.service, {})
        if sent.data["method"] == "seal":
            closed[place.gate] = event
        else:
            closed.pop(place.gate, None)

    def _on_post(self, event: Event) -> None:
        data = event.data
        if data["route"] != "chat":
            return
        self.judged += 1
        if data["effect"] == "answered":
            self._answered.setdefault(data["service"], event)
        self._probes.setdefault(data["service"], []).append(event)

    def _on_forwarded(self, event: Event) -> None:
        service, session = event.data["service"], event.data["session"]
        if session.startswith(PROBE_PREFIX):
            sealed = next(iter(self._closed.get(service, {}).values()), None)
            if sealed is not None:
                self.violation(f"probe {session} was sent while gates of {service} were closed", sealed.seq, event.seq)
        elif service not in self._answered:
            self.violation(f"{session} was served by {service} before any probe got through", event.seq)

    def conclude(self) -> None:
        for service, probes in self._probes.items():
            for probe in probes:
                self.violation(f"session {probe.data['session']} of a probe of {service} was not retired", probe.seq)

    def observed(self) -> str:
        return f"{self.judged} probes, {self.violations} wrong"
