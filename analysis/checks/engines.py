"""Engines: versions served, prefix caches, routing before health, exports that are whole."""

from __future__ import annotations

from typing import Any

from analysis.checks.base import Check, Handler, shown
from analysis.checks.ledger import Ledger, Process
from analysis.checks.publishing_views import GENERATIONS
from protocol.evidence import Event
from protocol.messages import service_of

Weights = tuple[str, str]  # version, hash

HARMLESS = frozenset(("/tokenize", "/v1/tokenize", "/v1/messages/count_tokens"))
"""Routes of POSTs that change nothing, however often they are made."""


class ServedVersion(Check):
    """The spans of an engine's answer are of weights that this incarnation truly had while it ran the request."""

    name = "served_version"
    expected = "every span is of the weights the engine had then; spans cover the output"
    needs = ("engine.finished",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        # Per engine process: (weights, seq from which they were served), oldest first. One entry a weight change.
        self._history: dict[Process, list[tuple[Weights, int]]] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "engine.ready": self._on_weights,
            "engine.weights": self._on_weights,
            "engine.finished": self._on_finished,
            "actor.died": self._on_died,
        }

    def _on_weights(self, event: Event) -> None:
        history = self._history.setdefault((event.actor, event.inc), [])
        weights = (event.data["version"], event.data["weight_hash"])
        if not history or history[-1][0] != weights:
            history.append((weights, event.seq))

    def _on_died(self, event: Event) -> None:
        process = (event.actor, event.inc)
        if not self.ledger.is_zombie(process):
            self._history.pop(process, None)

    def _on_finished(self, event: Event) -> None:
        data = event.data
        spans = data["spans"]
        tokens = data["completion_tokens"]
        if not tokens and not spans:
            return
        self.judged += 1
        if not isinstance(spans, list | tuple):
            self.violation(f"request {data['request']}: spans are {shown(spans)}, no list", event.seq)
            return
        if not spans and self.ledger.causal is not None:
            # A chunked answer of a real engine names no version, and its weights changed while it ran.
            self.doubt(f"request {data['request']}: the engine did not say which weights computed it", event.seq)
            return
        history = self._history.get((event.actor, event.inc))
        if history and len(spans) == 1:
            version, start, end, weight_hash = spans[0]
            if start == 0 and end == tokens and history[-1][0] == (version, weight_hash):
                return
        self._look_closely(event, spans, tokens, history or [])

    def _look_closely(self, event: Event, spans: Any, tokens: int, history: list[tuple[Weights, int]]) -> None:
        name = event.data["request"]
        request = self.ledger.requests.get(name)
        run = self.ledger.running_at(request, (event.actor, event.inc)) if request is not None else None
        since = run.accepted_seq if run is not None else 0
        position = 0
        for version, start, end, weight_hash in spans:
            if start != position or end < start:
                self.violation(
                    f"request {name}: spans {shown(spans)} have a gap or overlap at token {position}", event.seq
                )
                return
            position = end
            index = _find(history, (version, weight_hash), since)
            if index is None:
                had = ", ".join(repr(weights[0]) for weights, _ in history) or "none that was announced"
                self.violation(
                    f"request {name}: tokens {start} to {end} are said to be of version {version!r} "
                    f"(hash {weight_hash!r}); {event.actor}/{event.inc} had {had} in turn",
                    *(seq for _, seq in history[-2:]),
                    event.seq,
                )
                return
            # Later spans are of the same or later weights.
            since = max(since, history[index][1])
        if position != tokens:
            self.violation(f"request {name}: spans {shown(spans)} cover {position} of {tokens} tokens", event.seq)

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} runs with a wrong version"


def _find(history: list[tuple[Weights, int]], weights: Weights, since: int) -> int | None:
    """The first place where ``weights`` were served at or after seq ``since``."""
    for index, (had, _) in enumerate(history):
        ended = history[index + 1][1] if index + 1 < len(history) else None
        if had == weights and (ended is None or ended > since):
            return index
    return None


class OneVersionOneHash(Check):
    """Two engines of a service that serve a version under one name serve the same weights.

    A label is a service's own: two services of different models both begin with ``default``.
    """

    name = "one_version_one_hash"
    expected = "one weight hash a version, over all engines of a service"
    needs = ("engine.ready", "engine.weights")

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._hashes: dict[tuple[str, str], tuple[str, int]] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"engine.ready": self._on_weights, "engine.weights": self._on_weights}

    def _on_weights(self, event: Event) -> None:
        version, weight_hash = event.data["version"], event.data["weight_hash"]
        self.judged += 1
        service = service_of(event.actor)
        known, seq = self._hashes.setdefault((service, version), (weight_hash, event.seq))
        if known != weight_hash:
            self.violation(
                f"{event.actor}/{event.inc} serves version {version!r} with hash {weight_hash!r}, "
                f"elsewhere it is {known!r}",
                seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{len(self._hashes)} versions in {self.judged} reports, {self.violations} disagree"


class NoStalePrefix(Check):
    """No cached prefix computed by other weights is used."""

    name = "no_stale_prefix"
    expected = "0 cached tokens of another weight version"
    needs = ("engine.finished",)

    def handlers(self) -> dict[str, Handler]:
        return {"engine.finished": self._on_finished}

    def _on_finished(self, event: Event) -> None:
        stale = event.data["stale_cached_tokens"]
        if stale is None:
            return  # a real engine does not always tell; what was not seen is not judged
        self.judged += 1
        if stale:
            self.violation(
                f"request {event.data['request']} on {event.actor}/{event.inc} used {stale} cached tokens "
                "of other weights",
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.violations} of {self.judged} runs used some"


class NoRouteBeforeHealth(Check):
    """Nobody sends a generation to an engine process before that process has reported ready.

    The process is the one that the sender means: who still believes in the one before it, at an address that is used
    again, has done nothing wrong.
    """

    name = "no_route_before_health"
    expected = "the first generation sent to each engine process follows its readiness"
    needs = ("engine.started",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._ready: dict[str, int] = {}  # name -> newest ready incarnation
        self._early: dict[Process, Event] = {}  # engine process not ready yet -> the first send to it

    def handlers(self) -> dict[str, Handler]:
        return {"call.sent": self._on_sent, "engine.ready": self._on_ready}

    def wants_call(self, method: str) -> bool:
        return method in GENERATIONS

    def _on_sent(self, event: Event) -> None:
        data = event.data
        if data["method"] in GENERATIONS:
            self.judged += 1
            if self._ready.get(data["target"], -1) < data["target_inc"]:
                self._early.setdefault((data["target"], data["target_inc"]), event)

    def _on_ready(self, event: Event) -> None:
        self._ready[event.actor] = max(event.inc, self._ready.get(event.actor, event.inc))
        sent = self._early.pop((event.actor, event.inc), None)
        if sent is None:
            return
        relation = self.ledger.order.compare(sent, event)
        if relation == "before":
            self.violation(f"{_generation(sent)} before it was ready", sent.seq, event.seq)
        elif relation == "unordered":
            text = f"{_generation(sent)} before it was ready, or after: the clocks cannot tell"
            self.doubt(text, sent.seq, event.seq)

    def conclude(self) -> None:
        for sent in self._early.values():
            if self.ledger.finished is None:
                self.doubt(f"{_generation(sent)}, of whose readiness the evidence has nothing", sent.seq)
            else:
                self.violation(f"{_generation(sent)}, which was never ready", sent.seq)

    def observed(self) -> str:
        return f"{self.judged} generations sent, {self.violations} engine processes got one too early"


def _generation(sent: Event) -> str:
    data = sent.data
    return f"{sent.actor}/{sent.inc} sent a generation (call {data['call']}) to {data['target']}/{data['target_inc']}"


class LoadedExportIsWhole(Check):
    """An engine serves no weights that it read from a file that nobody wrote whole."""

    name = "loaded_export_is_whole"
    expected = "every file behind served weights was read as it was written"
    needs = ("storage.read",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._whole: dict[str, set[str]] = {}  # path -> digests ever written whole
        self._pending: dict[str, list[Event]] = {}  # engine name -> broken reads since its last weights

    def handlers(self) -> dict[str, Handler]:
        return {
            "storage.written": self._on_written,
            "storage.renamed": self._on_renamed,
            "storage.read": self._on_read,
            "engine.weights": self._on_weights,
            "engine.ready": self._on_weights,
            "engine.started": self._on_started,
        }

    def _on_written(self, event: Event) -> None:
        self._whole.setdefault(event.data["path"], set()).add(event.data["sha256"])

    def _on_renamed(self, event: Event) -> None:
        old, new = event.data["old"], event.data["new"]
        prefix = old.rstrip("/") + "/"
        for path in list(self._whole):
            if path == old:
                self._whole.setdefault(new, set()).update(self._whole[path])
            elif path.startswith(prefix):
                moved = new.rstrip("/") + "/" + path[len(prefix) :]
                self._whole.setdefault(moved, set()).update(self._whole[path])

    def _on_read(self, event: Event) -> None:
        self.judged += 1
        if event.data["sha256"] not in self._whole.get(event.data["path"], ()):
            reader = event.data["reader"].split("/", 1)[0]
            self._pending.setdefault(reader, []).append(event)

    def _on_started(self, event: Event) -> None:
        self._pending.pop(event.actor, None)

    def _on_weights(self, event: Event) -> None:
        broken = self._pending.pop(event.actor, None)
        if broken and event.data.get("ok", True):
            self.violation(
                f"{event.actor}/{event.inc} serves version {event.data['version']!r} after reading "
                f"{broken[0].data['path']}, which nobody wrote whole in that form",
                *(read.seq for read in broken[:4]),
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} files read, {self.violations} loads of a broken one"


class AdminOnce(Check):
    """After an admin POST of unknown outcome nobody delivers it to that engine process again without asking first.

    Any other call to the process counts as asking. That the second is the first attempt of an operation of its own (the
    next round of flushes, say) only its sender can tell: who claims it (``admin.attempt``) is believed.
    """

    name = "admin_once"
    expected = "no second delivery after an unknown outcome, unless the engine was asked"
    needs = ("engine.post",)
    believes = "which attempts are of one operation: to its sender's loss, or where a second POST is another operation"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._open: dict[int, Event] = {}  # sends of HTTP calls
        # (sender, engine process) -> route -> end of the latest call there, if that left the outcome unknown.
        self._unknown: dict[tuple[Process, Process], dict[str, Event]] = {}
        self._again: dict[str, tuple[Event, Event]] = {}  # id of a send -> (unknown end, send), not delivered yet
        # (sender, engine, route) -> what was delivered again, and whose it is was not claimed yet.
        self._delivered: dict[tuple[Process, str, str], tuple[Event, Event, Event]] = {}
        self._claimants: dict[Process, None] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "engine.post": self._on_post,
            "admin.attempt": self._on_attempt,
            "actor.died": self._on_died,
        }

    def wants_call(self, method: str) -> bool:
        return method[:1] == "/" and method not in GENERATIONS and method not in HARMLESS

    def _on_sent(self, event: Event) -> None:
        data = event.data
        route = data["method"]
        self._open[data["call"]] = event
        key = ((event.actor, event.inc), (data["target"], data["target_inc"]))
        unknown = self._unknown.pop(key, None)
        if unknown is not None and route in unknown:
            self._again[event.id] = (unknown[route], event)

    def _on_done(self, event: Event) -> None:
        sent = self._open.pop(event.data["call"], None)
        if sent is None:
            return
        if event.data["outcome"] == "unknown":
            process = (sent.data["target"], sent.data["target_inc"])
            self._unknown.setdefault(((event.actor, event.inc), process), {})[sent.data["method"]] = event
        else:  # after an unknown end it may be delivered yet
            self._again.pop(sent.id, None)

    def _on_post(self, event: Event) -> None:
        self.judged += 1
        found = self._again.pop(event.cause or "", None)
        if found is not None:
            ended, sent = found
            sender = (sent.actor, sent.inc)
            self._delivered[sender, sent.data["target"], sent.data["method"]] = (ended, sent, event)

    def _on_attempt(self, event: Event) -> None:
        data = event.data
        sender = (event.actor, event.inc)
        self._claimants[sender] = None
        again = self._delivered.pop((sender, data["target"], data["route"]), None)
        if again is not None and data["attempt"] > 1:
            self._repeated(*again)

    def _on_died(self, event: Event) -> None:
        dead = (event.actor, event.inc)
        for call in [call for call, sent in self._open.items() if (sent.actor, sent.inc) == dead]:
            del self._open[call]
        for key in [key for key in self._unknown if dead in key]:
            del self._unknown[key]

    def _repeated(self, ended: Event, sent: Event, post: Event) -> None:
        data = sent.data
        self.violation(
            f"{sent.actor}/{sent.inc} posted {data['method']} to {data['target']}/{data['target_inc']} again after "
            f"call {ended.data['call']} of unknown outcome ({ended.data['error']}), without asking",
            ended.seq,
            sent.seq,
            post.seq,
        )

    def conclude(self) -> None:
        for (sender, _, _), again in self._delivered.items():
            if sender not in self._claimants:
                self._repeated(*again)

    def observed(self) -> str:
        return f"{self.judged} deliveries, {self.violations} repeated after an unknown outcome"
