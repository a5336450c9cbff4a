"""Wrong gates, entrypoints, controllers, routers and publishers."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

from protocol.config import EntrypointConfig, GateConfig
from protocol.errors import GatePoisoned, HttpError, NetworkError, SeatrialError
from protocol.messages import EngineAddress, ExportManifest, GenerateRequest, WeightUpdate
from protocol.ports import ActorHandle, EngineClient, backend, data_call
from protocol.serving.admin import post_update_weights
from protocol.serving.affinity import SessionAffinityRouter
from protocol.serving.barrier import Barrier
from protocol.serving.controller import RolloutController
from protocol.serving.entrypoint import Entrypoint, TurnResult
from protocol.serving.gate import GateSnapshot, RequestGate, RequestLease, SettlementReceipt
from protocol.training.checkpoint import load_manifest
from protocol.training.publication import WeightPublisher
from tests.mutants.registry import Mutant

# --- gates ---


class PassesALateDrain(RequestGate):
    """A drain whose time is up returns as if all leases had ended."""

    async def drain(self, epoch: int, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s / 2):
                await super().drain(epoch, timeout_s)
        except TimeoutError:
            self._drained = True


class DrainsAtOnce(RequestGate):
    """Lets a version be installed while leases are active."""

    async def drain(self, epoch: int, timeout_s: float) -> None:
        self._expect("drain", epoch)
        self._drained = True


class CountsWaiters(RequestGate):
    """Counts who waits for admission as in flight."""

    @data_call
    async def request(self, session_id: str, timeout_s: float, request_id: str) -> RequestLease:
        waiting = f"waiting-{session_id}"
        self._active[waiting] = RequestLease(waiting, session_id, self._epoch, self._model_step)
        try:
            return await super().request(session_id, timeout_s, request_id)
        finally:
            self._active.pop(waiting, None)
            if not self._active:
                self._wake()


class ForgivesAtTheNextSeal(RequestGate):
    """The next seal clears the poison."""

    async def seal(self, epoch: int) -> None:
        self._failures.clear()
        await super().seal(epoch)

    async def snapshot(self) -> GateSnapshot:
        return dataclasses.replace(await super().snapshot(), failures=())


class TakesAnyEpoch(RequestGate):
    """A late reopen of an older cycle opens the gate."""

    async def reopen(self, epoch: int) -> None:
        if epoch < self._epoch:
            self._open = True
            self._wake()
        else:
            await super().reopen(epoch)


class IsBornOpen(RequestGate):
    """Is born open, with the version that training began with."""

    def __init__(self, config: GateConfig) -> None:
        super().__init__(GateConfig(initially_closed=False, initial_model_step=0))


# --- entrypoints ---


class TakesUnknownForEnded(Entrypoint):
    """Settles a turn whose answer never came as a failed attempt that has ended."""

    def _recorded(self, lease: RequestLease, receipt: SettlementReceipt) -> SettlementReceipt:
        return SettlementReceipt(True, True, receipt.label)


class LeaksOnError(Entrypoint):
    """Forgets to settle the lease of a turn that failed."""

    async def _settle(self, gate: ActorHandle, lease: RequestLease, receipt: SettlementReceipt | None) -> None:
        if receipt is not None and receipt.label in ("completed", "aborted"):
            await super()._settle(gate, lease, receipt)


class KnowsAnotherEngine(Entrypoint):
    """Recognises the context rejection of another engine than the one that serves."""

    def __init__(self, config: EntrypointConfig, *args: Any) -> None:
        super().__init__(config.model_copy(update={"engine": "lmdeploy 0.16"}), *args)


class StampsLate(Entrypoint):
    """Reads the version when it works on the answer, not at the grant."""

    async def _turn(self, request: GenerateRequest) -> TurnResult:
        turn = await super()._turn(request)
        await asyncio.sleep(0.5)
        assert self._gate is not None
        snapshot: GateSnapshot = await self._gate.snapshot()
        return dataclasses.replace(turn, model_step=snapshot.model_step)


class SometimesWithoutLease(Entrypoint):
    """Forwards every second turn without a lease, as a streaming path once did."""

    turns = 0
    stamped = 0

    async def _turn(self, request: GenerateRequest) -> TurnResult:
        self.turns += 1
        if self.turns % 2:
            turn = await super()._turn(request)
            self.stamped = turn.model_step
            return turn
        return TurnResult(await self._forward(request), self.stamped, backend().me.name)


# --- controllers ---


class SealsOneByOne(RolloutController):
    """Seals and drains one entrypoint after the other."""

    async def _gates(self, members: Any, stage: str, method: str, deadline: float, arguments: Any) -> None:
        if method == "seal":
            for member in members:
                await self._ask(member.gate, "seal", arguments, deadline)
                await self._ask(member.gate, "drain", lambda left_s: (*arguments(left_s), left_s), deadline)
        elif method != "drain":
            await super()._gates(members, stage, method, deadline, arguments)


class GivesEachStageItsTime(RolloutController):
    """Gives every stage the whole time-out anew."""

    async def _gates(self, members: Any, stage: str, method: str, deadline: float, arguments: Any) -> None:
        await super()._gates(members, stage, method, self._deadline(None, self._config.prepare_timeout_s), arguments)


class LooksAtTheTimeAtTheEnd(RolloutController):
    """Looks at the deadline when all is done, with gates open by then."""

    async def resume_requests(self, model_step: int, timeout_s: float | None = None) -> None:
        await super().resume_requests(model_step, 60.0)


class ReopensOneByOne(RolloutController):
    """Reopens each entrypoint right after its own installation."""

    async def _gates(self, members: Any, stage: str, method: str, deadline: float, arguments: Any) -> None:
        if method == "install_version":
            for member in members:
                await self._ask(member.gate, method, arguments, deadline)
                await self._ask(member.gate, "reopen", lambda left_s: arguments(left_s)[:1], deadline)
        elif method != "reopen":
            await super()._gates(members, stage, method, deadline, arguments)


class ReopensBeforeItInstalls(RolloutController):
    """Reopens the gates first, and installs the version afterwards."""

    async def _gates(self, members: Any, stage: str, method: str, deadline: float, arguments: Any) -> None:
        other = {"install_version": "reopen", "reopen": "install_version"}.get(method, method)
        if other == "reopen":
            await super()._gates(members, stage, other, deadline, lambda left_s: arguments(left_s)[:1])
        elif other == "install_version":
            return
        else:
            await super()._gates(members, stage, method, deadline, arguments)


class ReopensToBeNice(RolloutController):
    """When a publication fails it reopens what it can reach."""

    async def resume_requests(self, model_step: int, timeout_s: float | None = None) -> None:
        try:
            await super().resume_requests(model_step, timeout_s)
        except SeatrialError:
            barrier: Barrier | None = self._barrier
            for member in barrier.members if barrier is not None else ():
                try:
                    async with asyncio.timeout(0.2):
                        await member.gate.reopen(barrier.epoch if barrier is not None else 0)
                except (SeatrialError, TimeoutError):
                    continue
            raise


class RetiresNothing(RolloutController):
    """Does not tell the router that an episode is over."""

    async def retire_route_sessions(self, session_ids: tuple[str, ...]) -> None:
        return None


# --- routers ---


class MovesSessions(SessionAffinityRouter):
    """Binds a session anew when its backend is not healthy."""

    def _acquire(self, session: str) -> str:
        bound = self._backends.get(self._bindings.get(session, ""))
        if bound is not None and (not bound.healthy or bound.suspect_until > asyncio.get_running_loop().time()):
            bound.assigned -= 1
            del self._bindings[session]
        return super()._acquire(session)


class SendsTwice(SessionAffinityRouter):
    """Sends a turn again when its answer does not come."""

    @data_call
    async def handle(self, request: GenerateRequest) -> TurnResult:
        try:
            return await super().handle(request)
        except NetworkError:
            return await super().handle(request)


class ForgetsBindings(SessionAffinityRouter):
    """Forgets who is bound where whenever it hears of its backends."""

    async def _sync(self) -> None:
        await super()._sync()
        self._bindings.clear()
        for found in self._backends.values():
            found.assigned = 0


class HasNoTombstones(SessionAffinityRouter):
    """Forgets a retired session at once: a late request of it is served."""

    async def retire_sessions(self, session_ids: tuple[str, ...]) -> None:
        await super().retire_sessions(session_ids)
        self._tombstones.expire(math.inf)


class CountsTombstones(SessionAffinityRouter):
    """Tombstones are never forgotten, and take the places of sessions."""

    def _expire(self) -> int:
        return 0

    def _acquire(self, session: str) -> str:
        if session not in self._bindings and session not in self._tombstones:
            if len(self._bindings) + len(self._tombstones) >= self._config.max_sessions:
                raise HttpError("no room", status=503, body="no room")
        return super()._acquire(session)


class CountsFailedForEver(SessionAffinityRouter):
    """A turn that failed stays counted in flight."""

    @data_call
    async def handle(self, request: GenerateRequest) -> TurnResult:
        try:
            return await super().handle(request)
        except NetworkError:
            self._backends[self._bindings[request.session_id]].in_flight += 1
            raise


class BindsWithoutHealth(SessionAffinityRouter):
    """Binds new sessions without a look at who is healthy."""

    def _acquire(self, session: str) -> str:
        if session and session not in self._bindings and session not in self._tombstones:
            chosen = min(self._backends.values(), key=lambda one: (one.in_flight, one.assigned))
            chosen.assigned += 1
            self._bindings[session] = chosen.name
        return super()._acquire(session)


# --- publishers ---


class UpdatesBeforeItSeals(WeightPublisher):
    """Changes the weights first, and seals the gates afterwards."""

    async def publish(self, model_step: int) -> None:
        path = await self._export(model_step)
        manifest = await load_manifest(backend().storage, path)
        if model_step:
            for address in self.seen:
                await self._load(backend().engines.client(address), path, manifest)
        await self._controller.prepare_pause()
        self.seen: tuple[EngineAddress, ...] = await self._controller.targets()
        if not model_step:
            await self._update(path, manifest)
        await self._controller.resume_requests(model_step)


class KeepsTheCache(WeightPublisher):
    """Does not flush the prefix cache with the update."""

    async def _load(self, client: EngineClient, path: str, manifest: ExportManifest) -> None:
        await post_update_weights(client, WeightUpdate(path, manifest.version, flush_cache=False), self._admin)


class GoesOnAfterPoison(WeightPublisher):
    """Publishes all the same when the gates are poisoned: the weights change under whatever still runs."""

    async def publish(self, model_step: int) -> None:
        try:
            await super().publish(model_step)
        except GatePoisoned:
            path = await self._export(model_step)
            manifest = await load_manifest(backend().storage, path)
            for address in self.seen:
                await self._load(backend().engines.client(address), path, manifest)

    async def _update(self, path: str, manifest: ExportManifest) -> None:
        self.seen: tuple[EngineAddress, ...] = await self._controller.targets()
        await super()._update(path, manifest)


def _gate(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "gate", RequestGate, cls, scenario, check)


def _entrypoint(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "entrypoint", Entrypoint, cls, scenario, check)


def _controller(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "controller", RolloutController, cls, scenario, check)


def _router(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "affinity", SessionAffinityRouter, cls, scenario, check)


def _publisher(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "publisher", WeightPublisher, cls, scenario, check)


MUTANTS = (
    _gate("late drain passes", "G-1", PassesALateDrain, "publish_slow_drain", "no_update_under_lease"),
    _gate("drain does not wait", "G-10", DrainsAtOnce, "publish_busy", "no_update_under_lease"),
    _gate("waiters count as in flight", "G-3", CountsWaiters, "publish_busy", "occurs"),
    _gate("poison is forgiven", "G-5", ForgivesAtTheNextSeal, "publish_unknown", "poisoned_gate_admits_nothing"),
    _gate("stale epoch reopens", "G-11", TakesAnyEpoch, "publish_late_reopen", "turn_of_one_version"),
    _gate("gate born open", "G-13", IsBornOpen, "publish_gate_restarted", "turn_of_one_version"),
    _entrypoint(
        "unknown end settles safely", "G-2", TakesUnknownForEnded, "publish_unknown", "poisoned_gate_admits_nothing"
    ),
    _entrypoint("lease leaks on an error", "G-4", LeaksOnError, "publish_too_long", "occurs"),
    _entrypoint("drifted rejection pattern", "G-7", KnowsAnotherEngine, "publish_too_long", "occurs"),
    _entrypoint("version read at the response", "G-8", StampsLate, "publish_busy", "turn_of_one_version"),
    _entrypoint("turns without a lease", "G-14", SometimesWithoutLease, "publish_busy", "no_update_under_lease"),
    _controller("seal and drain one by one", "C-1", SealsOneByOne, "publish", "publication_order"),
    _controller("each stage has a time-out", "C-2", GivesEachStageItsTime, "publish_lost_seals", "one_deadline"),
    _controller("reopens one by one", "C-3", ReopensOneByOne, "publish", "publication_order"),
    _controller("reopen before install", "G-9", ReopensBeforeItInstalls, "publish", "publication_order"),
    _controller("failure reopens", "C-5", ReopensToBeNice, "publish_cut_off", "publication_order"),
    _controller("deadline looked at late", "C-7", LooksAtTheTimeAtTheEnd, "publish_cut_off", "one_deadline"),
    _controller("retirement not passed on", "A-4", RetiresNothing, "sessions_come_and_go", "router_empty_at_the_end"),
    _router("session moves", "A-1", MovesSessions, "sessions_killed", "one_backend_a_session"),
    _router("turn sent twice", "A-2", SendsTwice, "sessions_lost_reply", "nothing_twice"),
    _router("bindings forgotten", "A-3", ForgetsBindings, "publish", "one_backend_a_session"),
    _router("no tombstones", "A-5", HasNoTombstones, "sessions_come_and_go", "one_backend_a_session"),
    _router("tombstones take places", "A-6", CountsTombstones, "sessions_come_and_go", "unexplained_failures"),
    _router("failed turns stay counted", "A-7", CountsFailedForEver, "sessions_killed", "router_empty_at_the_end"),
    _router("placement without health", "A-8", BindsWithoutHealth, "sessions_killed", "answered_fraction"),
    _publisher("update before the seal", "W-4", UpdatesBeforeItSeals, "publish", "publication_order"),
    _publisher("prefix cache kept", "W-5", KeepsTheCache, "publish_busy", "no_stale_prefix"),
    _publisher("publishes over poison", "G-I3", GoesOnAfterPoison, "publish_unknown", "publication_order"),
)
