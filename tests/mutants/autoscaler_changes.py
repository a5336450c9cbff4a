"""Wrong autoscalers that are told something while they work, and streaks that go on where nothing is known."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from protocol.ports import ActorHandle, backend
from protocol.scaling.autoscaler import Autoscaler, TargetBusy, _Begun, _Replaced
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Direction
from protocol.scaling.decision import Streak, advance_all
from protocol.scaling.metrics import Frame
from protocol.scaling.policy import AutoscalerConfig, Rules
from protocol.scaling.requests import SUBMITTING, TERMINAL, ScaleRequest, ServiceState
from protocol.scaling.targets import ServiceTarget
from protocol.scaling.worker import Worker
from tests.mutants.autoscalers import IsToldToLeave, _Told
from tests.mutants.registry import Mutant

_ANSWER_LATE_S = 1.5

# --- situations ---


class _Connection:
    """What a connection holds at its far end."""

    async def ping(self) -> None:
        return None


class _WithSession:
    """A target that holds a connection from its first call on, until it is closed."""

    def __init__(self, target: ServiceTarget) -> None:
        self._target = target
        self._held: ActorHandle | None = None
        self.url = target.url

    async def _open(self) -> ServiceTarget:
        if self._held is None:
            port = backend()
            self._held = await port.spawn(_Connection, name=f"session-of-{port.me.name}")
        return self._target

    async def engines(self) -> ApiReply:
        return await (await self._open()).engines()

    async def submit(self, direction: Direction, body: dict[str, Any]) -> ApiReply:
        return await (await self._open()).submit(direction, body)

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        return await (await self._open()).status(direction, request_id)

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        return await (await self._open()).reconcile(direction, request_id)

    async def close(self) -> None:
        if self._held is not None:
            await backend().kill(self._held)
            self._held = None
        await self._target.close()


class LeavesIdle(_Told):
    """Is asked to remove its service, of which nothing is open. A connection to it is held until it is closed."""

    def connect(self, url: str) -> ServiceTarget:
        return _WithSession(super().connect(url))

    async def told(self) -> None:
        await self.patch_config({"service_targets": dict.fromkeys(self._autoscaler.runtimes)})


class _AnswersLate:
    """A target whose answers to submissions take their time on the way back."""

    def __init__(self, target: ServiceTarget) -> None:
        self._target = target
        self.url = target.url
        self.engines, self.status = target.engines, target.status
        self.reconcile, self.close = target.reconcile, target.close

    async def submit(self, direction: Direction, body: dict[str, Any]) -> ApiReply:
        reply = await self._target.submit(direction, body)
        await asyncio.sleep(_ANSWER_LATE_S)
        return reply


class IsPatchedWhileItAsks(_Told):
    """Gets another cooldown while its first submission is under way: accepted, and not answered yet."""

    after_s = 0.1
    patch: Mapping[str, Any] = {"scale_in_cooldown_secs": 7}

    def connect(self, url: str) -> ServiceTarget:
        return _AnswersLate(super().connect(url))

    async def told(self) -> None:
        while not self._autoscaler.open_requests():
            await asyncio.sleep(0.05)
        await asyncio.sleep(_ANSWER_LATE_S / 2)
        await self.patch_config(self.patch)


class IsDisabledWhileItAsks(IsPatchedWhileItAsks):
    """Is disabled while its first submission is under way."""

    patch = {"enabled": False}


class _ToldWhen(_Told):
    """Is asked to remove its service once, as soon as a request of it has come so far."""

    after_s = 0.1

    def so_far(self, request: ScaleRequest) -> bool:
        raise NotImplementedError  # abstract: each below has its own

    async def told(self) -> None:
        runtimes = self._autoscaler.runtimes
        while not any(self.so_far(one) for runtime in runtimes.values() for one in runtime.state.pending):
            await asyncio.sleep(0.1)
        await self.patch_config({"service_targets": dict.fromkeys(runtimes)})


class IsToldToLeaveRunning(_ToldWhen):
    """Is asked to remove its service once its scale-out is accepted and not over."""

    def so_far(self, request: ScaleRequest) -> bool:
        return request.status not in (SUBMITTING, *TERMINAL[request.action])


class IsToldToLeaveDirty(_ToldWhen):
    """Is asked to remove its service once its scale-out is over and not clean."""

    def so_far(self, request: ScaleRequest) -> bool:
        return request.status in TERMINAL[request.action] and not request.resolved


# --- removals ---


class _Collects(Autoscaler):
    async def apply(self, change: Callable[[AutoscalerConfig], AutoscalerConfig]) -> None:
        before = {name: runtime.collector for name, runtime in self.runtimes.items()}
        await super().apply(change)
        for name, collector in before.items():
            if name not in self.runtimes:
                await collector.start()


class GoesOnCollecting(LeavesIdle):
    """Removes a service and goes on collecting its metrics."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _Collects(config, self.connect)


class _NeverClosed(_WithSession):
    async def close(self) -> None:
        return None


class LeavesItsSession(LeavesIdle):
    """Removes a service and does not close the session that it has with it."""

    def connect(self, url: str) -> ServiceTarget:
        return _NeverClosed(_Told.connect(self, url))


class RemovesWhatRuns(IsToldToLeaveRunning):
    """Removes a service while a request of it runs: it looks only for those that were not answered yet."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _LooksFor(config, self.connect, lambda request: request.status == SUBMITTING)


class RemovesWhatIsDirty(IsToldToLeaveDirty):
    """Removes a service while a request of it is over and not clean: it looks only for those that are not over."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _LooksFor(config, self.connect, lambda request: request.status not in TERMINAL[request.action])


class _LooksFor(Autoscaler):
    def __init__(
        self,
        config: AutoscalerConfig,
        connect: Callable[[str], ServiceTarget],
        is_open: Callable[[ScaleRequest], bool],
    ) -> None:
        super().__init__(config, connect)
        self._is_open = is_open

    def _check_idle(self, services: list[str]) -> None:
        for service in services:
            if any(self._is_open(request) for request in self.runtimes[service].state.pending):
                raise TargetBusy(f"service {service!r} cannot be removed")


class _RefusesAfterwards(Autoscaler):
    async def apply(self, change: Callable[[AutoscalerConfig], AutoscalerConfig]) -> None:
        config = change(self.config)
        gone = [service for service in self.runtimes if service not in config.service_targets]
        self.config = config
        for service in gone:
            runtime = self.runtimes.pop(service)
            runtime.worker.retire()
            await runtime.collector.stop()
            if runtime.state.open_request() is not None:
                raise TargetBusy(f"service {service!r} cannot be removed")


class RefusesAfterTheChange(IsToldToLeave):
    """Refuses to remove a service with a request open when its configuration has changed already."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _RefusesAfterwards(config, self.connect)


# --- workers that are replaced in a submission ---


class _Cancels(Autoscaler):
    def _install(self, config: AutoscalerConfig, begun: dict[str, _Begun]) -> _Replaced:
        for runtime in self.runtimes.values():
            state = runtime.state
            state.pending[:] = [request for request in state.pending if request.status != SUBMITTING]
            runtime.worker._at_work = state.busy = False  # so that retiring cancels it at once
        return super()._install(config, begun)


class CancelsTheSubmission(IsPatchedWhileItAsks):
    """Cancels the worker in its submission, of which nothing is noted before the answer."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _Cancels(config, self.connect)


class _Forgets(Autoscaler):
    def _install(self, config: AutoscalerConfig, begun: dict[str, _Begun]) -> _Replaced:
        for name, runtime in self.runtimes.items():
            self.runtimes[name] = dataclasses.replace(runtime, state=ServiceState())
        return super()._install(config, begun)


class SuccessorKnowsNothing(IsPatchedWhileItAsks):
    """Gives the next worker a state of its own: what the one before has open, it knows nothing of."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _Forgets(config, self.connect)


class _Keeps(Autoscaler):
    def _install(self, config: AutoscalerConfig, begun: dict[str, _Begun]) -> _Replaced:
        before: list[Worker] = [runtime.worker for runtime in self.runtimes.values()]
        replaced = super()._install(config, begun)
        for worker in before:
            worker._retired = False  # it finds the runtime of its service by name, and takes itself for its worker
        return replaced


class KeepsTheOldWorker(IsDisabledWhileItAsks):
    """Lets the worker before go on after its submission, by the configuration before."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _Keeps(config, self.connect)


# --- streaks ---

_Streaks = Mapping[str, Streak]


def over_gaps(
    streaks: _Streaks, frame: Frame, rules: Rules, config: AutoscalerConfig, now_s: float
) -> dict[str, Streak]:
    """Counts the time of a gap between two evaluations as if the condition had held in it."""
    patient = config.model_copy(update={"evaluation_interval_secs": math.inf})
    return advance_all(streaks, frame, rules, patient, now_s)


def _held(streaks: _Streaks, made: dict[str, Streak], now_s: float) -> dict[str, Streak]:
    """With those that the latest frame has broken as they were, not grown."""
    broken = [name for name, one in made.items() if one.elapsed_s is None and name in streaks]
    return {**made, **{name: Streak(streaks[name].elapsed_s, now_s) for name in broken}}


def over_thin_frames(
    streaks: _Streaks, frame: Frame, rules: Rules, config: AutoscalerConfig, now_s: float
) -> dict[str, Streak]:
    """Keeps its streaks over a frame in which too few replicas have reported."""
    made = advance_all(streaks, frame, rules, config, now_s)
    thin = not frame.is_empty and frame.coverage < config.min_coverage_scale_out
    return _held(streaks, made, now_s) if thin else made


def over_the_unknown(
    streaks: _Streaks, frame: Frame, rules: Rules, config: AutoscalerConfig, now_s: float
) -> dict[str, Streak]:
    """Keeps its streaks over a frame in which nothing is known of a replica."""
    made = advance_all(streaks, frame, rules, config, now_s)
    return _held(streaks, made, now_s) if frame.unknown_engines and not frame.is_empty else made


def from_the_frame_before(
    streaks: _Streaks, frame: Frame, rules: Rules, config: AutoscalerConfig, now_s: float
) -> dict[str, Streak]:
    """Counts a condition that holds for the first time from the frame before on, in which it did not."""
    made = advance_all(streaks, frame, rules, config, now_s)
    for name, one in made.items():
        if one.elapsed_s == 0.0 and name in streaks and streaks[name].elapsed_s is None:
            made[name] = Streak(now_s - streaks[name].at_s, now_s)
    return made


def _api(name: str, source: str, twin: type, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "autoscaler", twin, cls, scenario, check)


def _streaks(name: str, function: Any, scenario: str) -> Mutant:
    place = "protocol.scaling.worker:advance_all"
    return Mutant(name, "M37", place, advance_all, function, scenario, "autoscaler_sustained")


_ONE = "autoscaler_one_request"

MUTANTS = (
    _api("removed and collected", "M30", LeavesIdle, GoesOnCollecting, "auto_removed_idle", "occurs"),
    _api("removed and connected", "M30", LeavesIdle, LeavesItsSession, "auto_removed_idle", "no_leaks"),
    _api("cancelled in a submission", "M35", IsPatchedWhileItAsks, CancelsTheSubmission, "auto_patched_in_post", _ONE),
    _api("successor knows nothing", "M35", IsPatchedWhileItAsks, SuccessorKnowsNothing, "auto_patched_in_post", _ONE),
    _api("old worker kept", "M35", IsDisabledWhileItAsks, KeepsTheOldWorker, "auto_disabled_in_post", "occurs"),
    _api(
        "removed while it runs", "M36", IsToldToLeaveRunning, RemovesWhatRuns, "auto_leaves_running", "operations_end"
    ),
    _api(
        "removed while not clean", "M36", IsToldToLeaveDirty, RemovesWhatIsDirty, "auto_leaves_dirty",
        "groups_released_once",
    ),
    _api("refused after the change", "M36", IsToldToLeave, RefusesAfterTheChange, "auto_refused_to_leave", "reached"),
    _streaks("streak over a gap", over_gaps, "auto_hangs_once"),
    _streaks("streak over a thin frame", over_thin_frames, "auto_thin"),
    _streaks("streak over the unknown", over_the_unknown, "auto_one_blinks"),
    _streaks("streak from before its frame", from_the_frame_before, "auto_blinks"),
)  # fmt: skip
