"""The course of a run in a fixed number of bins: one streaming pass, small whatever the size of the run."""

from __future__ import annotations

from typing import NamedTuple

from analysis.checks.criteria import latency_bin, latency_bin_top
from protocol.evidence import Event

BINS = 512
SHOWN_REPLICAS = 32
SHOWN_FAILURES = 200


class Failure(NamedTuple):
    """A request that did not end *done*."""

    seq: int
    request: str
    sent_s: float
    done_s: float
    outcome: str
    status: int
    error: str
    replica: str
    attempts: int


class FaultMark(NamedTuple):
    """A fault on the time axis; ``end_s`` is None while it is not healed."""

    fault: int
    name: str
    target: str
    start_s: float
    end_s: float | None
    hits: int
    satisfied: bool | None


class Moment(NamedTuple):
    """Something that happened to a process."""

    seq: int
    t_s: float
    process: str
    what: str


class Bin:
    """What happened in one bin of time."""

    __slots__ = ("answered", "failed", "in_flight", "latencies", "sent", "tokens")

    def __init__(self) -> None:
        self.sent = 0
        self.answered = 0
        self.failed = 0
        self.tokens = 0
        self.latencies: dict[int, int] = {}
        # Requests in flight as (highest, last) of this bin, for each replica that changed; "" is all of them.
        self.in_flight: dict[str, tuple[int, int]] = {}

    def count(self, name: str, in_flight: int) -> None:
        """Note a change of the number of requests in flight."""
        self.in_flight[name] = (max(in_flight, self.in_flight.get(name, (0, 0))[0]), in_flight)

    def absorb(self, other: Bin) -> None:
        """Take in the bin that follows."""
        self.sent += other.sent
        self.answered += other.answered
        self.failed += other.failed
        self.tokens += other.tokens
        for key, count in other.latencies.items():
            self.latencies[key] = self.latencies.get(key, 0) + count
        for name, (highest, last) in other.in_flight.items():
            self.in_flight[name] = (max(highest, self.in_flight.get(name, (0, 0))[0]), last)

    def quantile_s(self, numerator: int, denominator: int) -> float | None:
        """An upper bound of a quantile of the latencies that ended in this bin, in seconds."""
        left = -(-sum(self.latencies.values()) * numerator // denominator)
        for key in sorted(self.latencies):
            left -= self.latencies[key]
            if left <= 0:
                return latency_bin_top(key) / 1e9
        return None


class Timeline:
    """Folds events into bins; the bin width doubles whenever the run outgrows them."""

    def __init__(self) -> None:
        self.width_ns = 1_000_000
        self.bins: list[Bin] = [Bin()]
        self.events = 0
        self.requests = 0
        self.end_ns = 0
        self.failures: list[Failure] = []
        self.failed = 0
        self.faults: dict[int, FaultMark] = {}
        self.moments: list[Moment] = []
        self.replicas: list[str] = []
        self.hidden_replicas = 0
        self._sent: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._hidden: dict[str, None] = {}
        self._total = 0
        self._handlers = {
            "request.sent": self._on_sent,
            "request.done": self._on_done,
            "engine.accepted": self._on_accepted,
            "engine.finished": self._on_finished,
            "actor.died": self._on_died,
            "actor.stopped": self._on_moment,
            "actor.continued": self._on_moment,
            "engine.ready": self._on_moment,
            "fault.injected": self._on_injected,
            "fault.healed": self._on_healed,
            "actor.spawned": self._on_spawned,
        }
        self._actors: dict[str, int] = {}  # actors that are no engines -> newest incarnation
        self._missing: dict[int, int] = {}  # kill of one of them that nobody has brought back yet -> which incarnation

    def feed(self, event: Event) -> None:
        self.events += 1
        self.end_ns = event.t_ns
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)

    def at(self, t_ns: int) -> Bin:
        """The bin of an instant."""
        while t_ns >= self.width_ns * BINS:
            merged = []
            for index in range(0, len(self.bins), 2):
                one = self.bins[index]
                if index + 1 < len(self.bins):
                    one.absorb(self.bins[index + 1])
                merged.append(one)
            self.bins = merged
            self.width_ns *= 2
        index = t_ns // self.width_ns
        while len(self.bins) <= index:
            self.bins.append(Bin())
        return self.bins[index]

    def _on_sent(self, event: Event) -> None:
        self.requests += 1
        self._sent[event.data["request"]] = event.t_ns
        self.at(event.t_ns).sent += 1

    def _on_done(self, event: Event) -> None:
        data = event.data
        sent_ns = self._sent.pop(data["request"], event.t_ns)
        here = self.at(event.t_ns)
        if data["outcome"] == "done":
            here.answered += 1
            here.tokens += data["completion_tokens"]
            key = latency_bin(event.t_ns - sent_ns)
            here.latencies[key] = here.latencies.get(key, 0) + 1
            return
        here.failed += 1
        self.failed += 1
        if len(self.failures) < SHOWN_FAILURES:
            self.failures.append(
                Failure(
                    event.seq,
                    data["request"],
                    sent_ns / 1e9,
                    event.t_s,
                    data["outcome"],
                    data["status"],
                    data["error"],
                    data["replica"],
                    data["attempts"],
                )
            )

    def _on_accepted(self, event: Event) -> None:
        self._change(event, 1)

    def _on_finished(self, event: Event) -> None:
        self._change(event, -1)

    def _change(self, event: Event, by: int) -> None:
        self._set(event, max(0, self._running.get(event.actor, 0) + by))

    def _set(self, event: Event, count: int) -> None:
        name = event.actor
        if name not in self._running:
            if len(self.replicas) < SHOWN_REPLICAS:
                self.replicas.append(name)
            else:
                self._hidden[name] = None
                self.hidden_replicas += 1
        self._total += count - self._running.get(name, 0)
        self._running[name] = count
        here = self.at(event.t_ns)
        here.count("", self._total)
        if name not in self._hidden:
            here.count(name, count)

    def _on_died(self, event: Event) -> None:
        self._on_moment(event)
        if self._running.get(event.actor):
            self._set(event, 0)

    def _on_moment(self, event: Event) -> None:
        if len(self.moments) < 4 * SHOWN_FAILURES:
            what = event.kind.partition(".")[2]
            if event.kind == "actor.died":
                what = f"died ({event.data['reason']})"
            self.moments.append(Moment(event.seq, event.t_s, f"{event.actor}/{event.inc}", what))

    def _on_injected(self, event: Event) -> None:
        data = event.data
        self.faults[data["fault"]] = FaultMark(data["fault"], data["name"], data["target"], event.t_s, None, 0, None)
        if data["name"] == "sigkill" and data["target"] in self._actors:
            self._missing[data["fault"]] = self._actors[data["target"]]

    def _on_healed(self, event: Event) -> None:
        data = event.data
        mark = self.faults.get(data["fault"])
        if mark is not None:
            end_s = None if data["fault"] in self._missing else event.t_s
            self.faults[data["fault"]] = mark._replace(end_s=end_s, hits=data["hits"], satisfied=data["satisfied"])

    def _on_spawned(self, event: Event) -> None:
        """The kill of an actor is over when a later incarnation is there (as in checks/shadow.py)."""
        if event.data["role"] != "actor":
            return
        self._actors[event.actor] = max(event.inc, self._actors.get(event.actor, event.inc))
        for fault, inc in list(self._missing.items()):
            mark = self.faults[fault]
            if mark.target == event.actor and inc < event.inc:
                del self._missing[fault]
                self.faults[fault] = mark._replace(end_s=event.t_s)

    # --- series for plots, one value a bin
    def times_s(self) -> list[float]:
        """The middle of each bin."""
        return [(index + 0.5) * self.width_ns / 1e9 for index in range(len(self.bins))]

    def rates(self, name: str) -> list[float]:
        """``sent``, ``answered``, ``failed`` or ``tokens`` per second."""
        return [getattr(one, name) * 1e9 / self.width_ns for one in self.bins]

    def in_flight(self, replica: str = "") -> list[int]:
        """Highest number of requests in flight per bin, at one replica or (by default) at all of them."""
        series, last = [], 0
        for one in self.bins:
            # A bin in which nothing changed has what the one before was left with.
            highest, last = one.in_flight.get(replica, (last, last))
            series.append(highest)
        return series

    def latency_s(self, percent: int) -> list[float | None]:
        """A percentile of latency per bin; None where nothing was answered."""
        return [one.quantile_s(percent, 100) for one in self.bins]
