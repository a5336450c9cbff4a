"""Whether a publication that is done got anywhere: what the replicas serve that are alive when it ends."""

from __future__ import annotations

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger
from analysis.checks.publishing_views import Fleet
from protocol.evidence import Event


class Serving:
    """What each replica is seen to serve while it is alive, and what it served until it died."""

    def __init__(self) -> None:
        self.latest: dict[str, Event] = {}
        """Replica that is alive to what it was seen to serve last."""
        self.gone: dict[str, Event] = {}
        """Replica without a living process to its latest death."""
        self.lost: dict[str, tuple[Event, Event]] = {}
        """Replica to what the process that died latest was seen to serve last, and to its death."""
        self._past: dict[str, int] = {}  # replica -> incarnation that died latest

    def started(self, event: Event) -> None:
        """An engine process began; what it serves is not known yet."""
        if self._is_of_the_living(event):
            self.gone.pop(event.actor, None)
            self.latest.pop(event.actor, None)

    def weights(self, event: Event) -> None:
        """An engine process serves weights, by ``engine.ready`` or ``engine.weights``."""
        if self._is_of_the_living(event):
            self.gone.pop(event.actor, None)
            self.latest[event.actor] = event

    def died(self, event: Event) -> None:
        """A replica's process died."""
        replica = event.actor
        latest = self.latest.get(replica)
        if latest is not None and latest.inc > event.inc:
            return  # another process is in its place by now
        self.gone[replica] = event
        self._past[replica] = event.inc
        self.lost.pop(replica, None)
        if latest is not None:
            self.lost[replica] = (self.latest.pop(replica), event)

    def _is_of_the_living(self, event: Event) -> bool:
        return event.inc > self._past.get(event.actor, -1)


class PublishedIsServed(Check):
    """A publication that has ended *done* has got somewhere: a replica of its service serves that version (W-3, E3).

    Judged are the replicas that are alive when it ends. Where one has served the version and died before that, and no
    other serves it, nobody can tell whether the publication was to blame.

    Who finds nobody to update has published nothing, whatever its trainer counts on from there. Kills: a publication
    without a target that passes for one that is done (W-3).
    """

    name = "published_is_served"
    expected = "after each publication that is done its version is served by somebody"
    needs = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._serving = Serving()
        self._asked: dict[str, Event] = {}  # service -> its latest publication

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "publication.asked": self._on_asked,
            "engine.started": self._serving.started,
            "engine.ready": self._serving.weights,
            "engine.weights": self._serving.weights,
            "actor.died": self._on_died,
            "publication.ended": self._on_ended,
        }

    def _on_asked(self, event: Event) -> None:
        self._asked[event.data["service"]] = event

    def _on_died(self, event: Event) -> None:
        if event.actor in self._fleet.by_replica or event.actor in self._serving.latest:
            self._serving.died(event)

    def _on_ended(self, event: Event) -> None:
        if event.data["outcome"] != "done":
            return
        service, version = event.data["service"], str(event.data["model_step"])
        replicas = [place.replica for place in self._fleet.by_replica.values() if place.service == service]
        alive = [replica for replica in replicas if replica not in self._serving.gone]
        seen = [self._serving.latest[replica] for replica in alive if replica in self._serving.latest]
        published = f"version {version} of {service} is published"
        if any(one.data["version"] == version for one in seen):
            self.judged += 1
        elif not alive:
            self.doubt(f"{published}; none of its replicas is alive", event.seq)
        elif len(seen) < len(alive):
            self.doubt(f"{published}; what its replicas serve is not known", event.seq)
        elif (lost := self._lost(service, version, replicas)) is not None:
            served, died = lost
            self.doubt(
                f"{published}; {served.actor}, which served it, has died since, and nobody else serves it",
                served.seq,
                died.seq,
                event.seq,
            )
        else:
            self.judged += 1
            versions = ", ".join(sorted({one.data["version"] for one in seen}))
            self.violation(
                f"the publication of version {version} of {service} ended done, and its replicas serve {versions}",
                *[one.seq for one in seen[:4]],
                event.seq,
            )

    def _lost(self, service: str, version: str, replicas: list[str]) -> tuple[Event, Event] | None:
        """What a replica served that has died since the publication was asked for, where it was that version."""
        asked = self._asked.get(service)
        for served, died in (self._serving.lost[replica] for replica in replicas if replica in self._serving.lost):
            if served.data["version"] == version and (asked is None or died.seq > asked.seq):
                return served, died
        return None

    def observed(self) -> str:
        return f"{self.judged} publications done, {self.violations} of which nobody serves"
