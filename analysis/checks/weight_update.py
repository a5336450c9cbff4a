"""Weights that training ranks bring into engines: what they are, when they may come, who leaves (serving.md 9.4).

Computed from what engines have, what storage holds, and calls at the handle boundary of the ranks.
"""

from __future__ import annotations

import hashlib

from analysis.checks.base import Check, Handler
from analysis.checks.ledger import Ledger, Process
from analysis.checks.publishing_views import UPDATES, Fleet
from protocol.evidence import Event

_NS = 1_000_000_000
_SLACK_NS = 6 * _NS  # what a rank needs beyond its deadline to be given up by whoever called it
_LEARNT_NS = 5 * _NS  # by then who publishes has heard of a replacement
_TO_MEMBERS = UPDATES | {"/init_weights_update_group"}
_MANIFEST = "manifest.json"


class ServesTheTrainersWeights(Check):
    """What an engine serves as a version are the bytes that the trainer exported as that version (E2).

    Kills: the trainer's memory given away before the last bucket (W-9).
    """

    name = "serves_the_trainers_weights"
    expected = "the weight hash of every version is that of its export"
    needs = ("weights.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._applies = False
        self._shards: dict[str, dict[str, str]] = {}  # folder -> file -> SHA-256, of exports being written
        self._torn: dict[str, None] = {}
        self._truth: dict[str, dict[str, None]] = {}  # version -> hashes of its exports

    def handlers(self) -> dict[str, Handler]:
        return {
            "weights.deployed": self._on_deployed,
            "storage.written": self._on_written,
            "storage.torn": self._on_torn,
            "storage.renamed": self._on_renamed,
            "engine.weights": self._on_weights,
        }

    def _on_deployed(self, _: Event) -> None:
        self._applies = True

    def _on_written(self, event: Event) -> None:
        folder, _, name = event.data["path"].rpartition("/")
        if name != _MANIFEST:
            self._shards.setdefault(folder, {})[name] = event.data["sha256"]

    def _on_torn(self, event: Event) -> None:
        self._torn[event.data["path"].rpartition("/")[0]] = None

    def _on_renamed(self, event: Event) -> None:
        shards = self._shards.pop(event.data["old"], None)
        if shards and self._torn.pop(event.data["old"], self) is self:
            version = event.data["new"].rpartition("/")[2].partition("-")[2]
            hashes = "\n".join(shards[name] for name in sorted(shards))
            self._truth.setdefault(version, {})[hashlib.sha256(hashes.encode()).hexdigest()[:16]] = None

    def _on_weights(self, event: Event) -> None:
        if not self._applies or not event.data["ok"]:
            return
        truth = self._truth.get(event.data["version"])
        if truth is None:
            return
        self.judged += 1
        if event.data["weight_hash"] not in truth:
            self.violation(
                f"{event.actor}/{event.inc} serves as version {event.data['version']!r} weights of hash "
                f"{event.data['weight_hash']!r}; exported were {', '.join(truth)}",
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} updates, {self.violations} with weights that nobody exported"


class LabelFollowsWeights(Check):
    """The version of an engine process changes if and only if its weights do (W-I2).

    Kills: weights that come without their label.
    """

    name = "label_follows_weights"
    expected = "another version with other weights, and never one without the other"
    needs = ("engine.weights",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._last: dict[Process, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"engine.ready": self._on_weights, "engine.weights": self._on_weights, "actor.died": self._on_died}

    def _on_died(self, event: Event) -> None:
        self._last.pop((event.actor, event.inc), None)

    def _on_weights(self, event: Event) -> None:
        process = (event.actor, event.inc)
        last = self._last.get(process)
        self._last[process] = event
        if last is None or not (event.data["weight_hash"] and last.data["weight_hash"]):
            return  # a real engine does not always tell
        self.judged += 1
        label = event.data["version"] != last.data["version"]
        weights = event.data["weight_hash"] != last.data["weight_hash"]
        if label != weights:
            what = "its version without its weights" if label else "its weights under the same version"
            self.violation(
                f"{event.actor}/{event.inc} changed {what}: from {last.data['version']!r} "
                f"({last.data['weight_hash']}) to {event.data['version']!r} ({event.data['weight_hash']})",
                last.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} updates, {self.violations} with only one of the two changed"


class NothingRunsOnPartWeights(Check):
    """No generation is accepted by an engine that has a part of new weights, or has given its weights away (W-I3).

    Kills: gates that open by the label alone, while the weights come (W-4).
    """

    name = "nothing_runs_on_part_weights"
    expected = "0 generations between the first bucket and the last"
    needs = ("engine.bucket", "engine.memory")
    joins_at = ("engine.bucket", "engine.memory")

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._part: dict[str, Event] = {}  # engine -> since when
        self._hash: dict[str, str] = {}  # engine -> what its weights are, of those that wait for another bucket
        self._any = False

    def handlers(self) -> dict[str, Handler]:
        return {
            "engine.bucket": self._on_bucket,
            "engine.memory": self._on_memory,
            "engine.weights": self._on_weights,
            "engine.ready": self._on_whole,
            "engine.accepted": self._on_accepted,
            "actor.died": self._on_whole,
        }

    def _on_bucket(self, event: Event) -> None:
        self._any = True
        self._part.setdefault(event.actor, event)
        if event.data["bucket"] + 1 < event.data["of"]:
            self._hash[event.actor] = event.data["weight_hash"]

    def _on_memory(self, event: Event) -> None:
        if "weights" not in event.data["resident"]:
            self._any = True
            self._part[event.actor] = event
            self._hash.pop(event.actor, None)

    def _on_weights(self, event: Event) -> None:
        if event.data["ok"] or self._whole_all_the_same(event):
            self._on_whole(event)

    def _whole_all_the_same(self, load: Event) -> bool:
        """After a load that is called a failure.

        With its flush refused it is all there, and the weights are others than before. One that could not be read
        leaves them as they were: a part, or none.
        """
        since, before = self._part.get(load.actor), self._hash.get(load.actor)
        if before is not None:
            return bool(load.data["weight_hash"] != before)
        # Memory is given away only while nothing runs, so that no flush is refused after that without a violation.
        return since is not None and since.kind != "engine.memory"

    def _on_whole(self, event: Event) -> None:
        self._part.pop(event.actor, None)
        self._hash.pop(event.actor, None)

    def _on_accepted(self, event: Event) -> None:
        if not self._any:
            return
        self.judged += 1
        since = self._part.get(event.actor)
        if since is not None:
            self.violation(
                f"{event.actor}/{event.inc} accepted {event.data['request']} with weights that are not whole",
                since.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} generations, {self.violations} on a part of some weights"


class EveryRankLeaves(Check):
    """Every training rank leaves an update by its deadline, also when another one fails (W-I5).

    Kills: a failed rank of which nobody tells the others (W-7).
    """

    name = "every_rank_leaves"
    expected = "each rank's call ends by the deadline of the update"
    needs = ("weights.deployed",)
    joins_at = ("weights.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._limit_ns: dict[str, int] = {}  # rank -> deadline of an update
        self._open: dict[int, Event] = {}
        self._longest_ns = 0

    def handlers(self) -> dict[str, Handler]:
        return {
            "weights.deployed": self._on_deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "actor.died": self._on_died,
        }

    def _on_deployed(self, event: Event) -> None:
        for rank in event.data["ranks"]:
            self._limit_ns[rank] = round(event.data["timeout_s"] * _NS) + _SLACK_NS

    def wants_call(self, method: str) -> bool:
        return method in ("update", "register")

    def _on_sent(self, event: Event) -> None:
        if event.data["target"] in self._limit_ns and event.data["method"] in ("update", "register"):
            self._open[event.data["call"]] = event

    def _on_done(self, event: Event) -> None:
        sent = self._open.pop(event.data["call"], None)
        if sent is not None:
            self._judge(sent, event)

    def _judge(self, sent: Event, ended: Event) -> None:
        self.judged += 1
        rank = sent.data["target"]
        took_ns = ended.t_ns - sent.t_ns
        self._longest_ns = max(self._longest_ns, took_ns)
        if took_ns > self._limit_ns[rank] + self.ledger.order.clock_error_ns:
            self.violation(
                f"{rank} left its {sent.data['method']} after {took_ns / _NS:.3f} s; the deadline of it is "
                f"{(self._limit_ns[rank] - _SLACK_NS) / _NS:g} s",
                sent.seq,
                ended.seq,
            )

    def _on_died(self, event: Event) -> None:
        dead = [c for c, sent in self._open.items() if event.actor in (sent.actor, sent.data["target"])]
        for call in dead:
            del self._open[call]

    def conclude(self) -> None:
        last = self.ledger.last
        for sent in self._open.values():
            if last is not None and last.t_ns - sent.t_ns > self._limit_ns[sent.data["target"]]:
                self.violation(f"{sent.data['target']} never left its {sent.data['method']}", sent.seq, last.seq)

    def observed(self) -> str:
        return f"{self.judged} ended, the longest after {self._longest_ns / _NS:.3f} s, {self.violations} too late"


class UpdatesMeetTheLiving(Check):
    """An update is sent to the engine processes that live, not to ones that were replaced before (9.1).

    Kills: a binding made once (W-1), and one that is taken for another by its names (W-2).
    """

    name = "updates_meet_the_living"
    expected = "no update to a process whose successor was ready before"
    needs = ("publication.asked",)
    joins_at = ("publication.asked",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._ready: dict[str, Event] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "engine.ready": self._on_ready,
            "call.sent": self._on_sent,
        }

    def _on_ready(self, event: Event) -> None:
        self._ready[event.actor] = event

    def wants_call(self, method: str) -> bool:
        return method in _TO_MEMBERS

    def _on_sent(self, event: Event) -> None:
        data = event.data
        if data["method"] not in _TO_MEMBERS or data["target"] not in self._fleet.by_replica:
            return
        ready = self._ready.get(data["target"])
        if ready is None:
            return  # which of its processes lives, nobody has seen
        self.judged += 1
        if ready.inc > data["target_inc"] and event.t_ns - ready.t_ns > _LEARNT_NS:
            self.violation(
                f"{event.actor} sent {data['method']} to {data['target']}/{data['target_inc']}, long after "
                f"{data['target']}/{ready.inc} was ready",
                ready.seq,
                event.seq,
            )

    def observed(self) -> str:
        return f"{self.judged} updates, {self.violations} to a process that was replaced"


class MemoryOrder(Check):
    """KV memory is taken back last: after the weights are whole, and after the trainer has given its memory away (9.3).

    Before that there is no room for it on devices that training and serving share. Kills: KV memory first (W-10).
    """

    name = "memory_order"
    expected = "weights, update, offload of every rank, then KV memory"
    needs = ("engine.memory",)
    joins_at = ("weights.deployed",)

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._fleet = Fleet()
        self._ranks: dict[str, dict[str, Event]] = {}  # service -> rank -> when it took device memory
        self._of_rank: dict[str, str] = {}
        self._calls: dict[int, tuple[str, str]] = {}
        self._without: dict[str, Event] = {}  # engine -> since when its weights are away or not whole

    def handlers(self) -> dict[str, Handler]:
        return {
            "publishing.deployed": self._fleet.deployed,
            "weights.deployed": self._on_deployed,
            "call.sent": self._on_sent,
            "call.done": self._on_done,
            "engine.memory": self._on_memory,
            "engine.weights": self._on_weights,
            "engine.ready": self._on_whole,
            "actor.died": self._on_whole,
        }

    def _on_deployed(self, event: Event) -> None:
        for rank in event.data["ranks"]:
            self._of_rank[rank] = event.data["service"]

    def wants_call(self, method: str) -> bool:
        return method in ("take", "offload")

    def _on_sent(self, event: Event) -> None:
        rank = event.data["target"]
        if rank in self._of_rank and event.data["method"] in ("take", "offload"):
            self._calls[event.data["call"]] = (rank, event.data["method"])

    def _on_done(self, event: Event) -> None:
        found = self._calls.pop(event.data["call"], None)
        if found is None or event.data["outcome"] != "done":
            return
        rank, method = found
        resident = self._ranks.setdefault(self._of_rank[rank], {})
        if method == "take":
            resident[rank] = event
        else:
            resident.pop(rank, None)

    def _on_weights(self, event: Event) -> None:
        if event.data["ok"]:  # one that failed has left the engine without weights
            self._on_whole(event)

    def _on_whole(self, event: Event) -> None:
        self._without.pop(event.actor, None)

    def _on_memory(self, event: Event) -> None:
        if event.data["action"] == "released":
            if "weights" in event.data["tags"]:
                self._without[event.actor] = event
            return
        if "kv_cache" not in event.data["tags"]:
            return
        self.judged += 1
        since = self._without.get(event.actor)
        if since is not None:
            self.violation(f"{event.actor} took its KV memory back before new weights were in", since.seq, event.seq)
            return
        place = self._fleet.by_replica.get(event.actor)
        service = next(iter(self._ranks), "") if place is None else place.service
        for rank, took in self._ranks.get(service, {}).items():
            self.violation(f"{event.actor} took its KV memory back while {rank} had the device", took.seq, event.seq)
            return

    def observed(self) -> str:
        return f"KV memory taken back {self.judged} times, {self.violations} too early"
