"""Weights that come to a simulated engine from training ranks: buckets, broadcast groups, device memory.

Routes and bodies are SGLang's, with the content of a bucket in place of handles to it. What an engine truly serves is
computed from the pieces that it got: with any of them missing or old, its hash is that of a mixture which nobody
exported, whatever its label says. Source: serving.md 9.2; engines.md 3.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from protocol.training.buckets import FullPiece, nominal_bytes
from protocol.training.checkpoint import hash_weights
from sim.engine_types import AdminResult

if TYPE_CHECKING:
    from sim.engine_process import EngineProcess

Answer = Callable[[AdminResult], None]

BROKEN_AFTER_NS = 10_000_000_000  # [ours] a member that is gone is noticed by the communication library after this
_OK = AdminResult(200, True, "Success")
_TAGS = ("weights", "kv_cache")


@dataclasses.dataclass(slots=True)
class _Arrival:
    process: EngineProcess
    apply: Callable[[], None]
    answer: Answer


class Group:
    """A broadcast group: every member must take part in every operation, in the same order."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        self.members: dict[str, EngineProcess] = {}  # by process id
        self.waiting: dict[int, dict[str, _Arrival]] = {}  # operation -> who has come to it; -1: forming

    def arrive(self, operation: int, process: EngineProcess, apply: Callable[[], None], answer: Answer) -> None:
        """A member comes to an operation, which happens once all have; a group with a dead member breaks."""
        waiting = self.waiting.setdefault(operation, {})
        mine = waiting[process.id] = _Arrival(process, apply, answer)
        if operation < 0:
            self.members[process.id] = process
        expected = self.world_size - 1  # rank 0 is the trainer, who speaks to all of them
        alive = [member for member in self.members.values() if member.alive]
        if len(waiting) == expected == len(alive):
            del self.waiting[operation]
            for arrival in waiting.values():
                arrival.apply()
            return
        broken_after = process.world.around("transfer_broken", BROKEN_AFTER_NS)
        process.engine.after(broken_after, lambda: self._break(operation, mine))

    def _break(self, operation: int, arrival: _Arrival) -> None:
        """After a while without the others: what waits is told so. Weights stay as they are."""
        waiting = self.waiting.get(operation, {})
        if waiting.get(arrival.process.id) is arrival:
            del waiting[arrival.process.id]
            arrival.answer(AdminResult(500, False, f"group {self.name}: a member did not come to the operation"))


class EngineTransfers:
    """One engine's half of transports, and what is resident of it on the device."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._pieces: dict[tuple[str, int], FullPiece] = {}  # of the update under way
        self._resident = dict.fromkeys(_TAGS)
        self._groups: dict[str, Group] = {}

    def post(self, route: str, body: dict[str, Any], done: Answer) -> None:
        """One of ``ROUTES``."""
        if self._process.engine.postponed(lambda: self.post(route, body, done)):
            return
        if route == "/init_weights_update_group":
            self._join(body, done)
        elif route == "/destroy_weights_update_group":
            found = self._groups.pop(str(body["group_name"]), None)
            done(_OK if found is not None else AdminResult(400, False, "The group to be destroyed does not exist."))
        elif route == "/update_weights_from_distributed":
            self._broadcast(body, done)
        elif route == "/release_memory_occupation":
            self._release(tuple(body["tags"]), done)
        elif route == "/resume_memory_occupation":
            self._resume(tuple(body["tags"]), done)
        else:
            self._take(route, body, done)

    # --- groups ---

    def _join(self, body: dict[str, Any], done: Answer) -> None:
        name = str(body["group_name"])
        groups = self._process.shared.transfer_groups
        group = groups.setdefault(name, Group(name, int(body["world_size"])))
        self._groups[name] = group
        group.arrive(-1, self._process, lambda: done(_OK), done)

    def _broadcast(self, body: dict[str, Any], done: Answer) -> None:
        group = self._groups.get(str(body["group_name"]))
        if group is None:
            done(AdminResult(400, False, f"Group {body['group_name']} not initialized."))
            return
        route = "/update_weights_from_distributed"
        group.arrive(int(body["bucket"]), self._process, lambda: self._take(route, body, done), done)

    # --- buckets ---

    def _take(self, route: str, body: dict[str, Any], done: Answer) -> None:
        pieces: Sequence[FullPiece] = body["pieces"]
        bucket, of = int(body["bucket"]), int(body["of"])
        if bucket == 0:
            self._pieces = {}
        for piece in pieces:
            self._pieces[piece.shard, piece.index] = piece
        version = body.get("weight_version")
        self._process.engine.load_weights(
            version,
            nominal_bytes(pieces),
            self._truth(of == bucket + 1),
            flush_cache=bool(body.get("flush_cache", True)),
            bucket=(route, bucket, of),
            done=done,
        )

    def _truth(self, last: bool) -> str:
        """The hash of what is there with these pieces: the export's, when all of every shard has come."""
        shards: dict[str, list[FullPiece]] = {}
        for (shard, _), piece in sorted(self._pieces.items(), key=lambda item: item[0]):
            shards.setdefault(shard, []).append(piece)
        complete = all(len(found) == found[0].of for found in shards.values())
        hashes = [hashlib.sha256(b"".join(piece.data for piece in found)).hexdigest() for found in shards.values()]
        if complete and last:
            return hash_weights(hashes)
        return "mixed:" + hash_weights([self._process.engine.weight_hash, *hashes])

    # --- memory ---

    def _release(self, tags: tuple[str, ...], done: Answer) -> None:
        engine = self._process.engine

        def release(_: object) -> None:
            if not engine.scheduler.flush():
                engine.reply(done, AdminResult(400, False, "Memory cannot be released while requests are running."))
                return
            for tag in tags:
                self._resident.pop(tag, None)
            if "weights" in tags:
                engine.weights.lose("released")
            self._record("released", tags)
            engine.reply(done, _OK)

        engine.scheduler.push(release, None)

    def _resume(self, tags: tuple[str, ...], done: Answer) -> None:
        engine = self._process.engine

        def resume(_: object) -> None:
            for tag in tags:
                self._resident[tag] = None
            self._record("resumed", tags)
            engine.reply(done, _OK)

        engine.scheduler.push(resume, None)

    def _record(self, action: str, tags: tuple[str, ...]) -> None:
        self._process.engine.record("engine.memory", action=action, tags=list(tags), resident=list(self._resident))


ROUTES = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
