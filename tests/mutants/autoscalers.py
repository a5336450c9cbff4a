"""Wrong autoscalers, and the situations in which some of them show: right ones that are told something in mid-run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.messages import EngineAddress
from protocol.ports import backend
from protocol.scaling.api import ScaleApi
from protocol.scaling.autoscaler import Autoscaler
from protocol.scaling.autoscaler_api import AutoscalerApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.collector import Collector
from protocol.scaling.contract import Direction
from protocol.scaling.decision import Choice, Situation, Streak, advance_all, conditions, decide
from protocol.scaling.metrics import CRITICAL, Frame, HistogramWindow, Page, Reading, aggregate, percentile
from protocol.scaling.policy import ROLLOUT, AutoscalerConfig, Rules, ScaleInPolicy, ScaleOutPolicy, ServicePolicy
from protocol.scaling.requests import TERMINAL, ScaleRequest, ScaleRequests
from protocol.scaling.targets import ServiceTarget
from protocol.scaling.worker import Worker
from tests.mutants.registry import Mutant

_LATE_S = 2.0

# --- situations ---


class SilentOnCleanup(ScaleApi):
    """A control API whose status says nothing of the cleanup (as a response model without the field has it)."""

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        reply = await super().status(direction, request_id)
        return ApiReply(reply.status, {name: value for name, value in reply.body.items() if name != "cleanup_required"})


class _Told(AutoscalerApi):
    """Somebody speaks to it a little after its start."""

    after_s = _LATE_S

    async def start(self) -> None:
        await super().start()
        self._listening = backend().background(self._later(), name="told")

    async def _later(self) -> None:
        await asyncio.sleep(self.after_s)
        await self.told()

    async def told(self) -> None:
        raise NotImplementedError


class AddsItsServiceLate(_Told):
    """Begins without any service; its own is added while it runs."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        self._late = dict(config.service_targets)
        return super().make(config.patched({"service_targets": dict.fromkeys(self._late)}))

    async def told(self) -> None:
        await self.patch_config({"service_targets": self._late})


class _Hangs:
    """A service that never answers."""

    url = "actor://nobody"

    async def engines(self) -> ApiReply:
        await asyncio.sleep(1e5)
        raise AssertionError

    async def submit(self, direction: Direction, body: dict[str, Any]) -> ApiReply:
        return await self.engines()

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        return await self.engines()

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        return await self.engines()

    async def close(self) -> None:
        return None


class HasANeighbourThatHangs(AutoscalerApi):
    """Looks after a second service, which never answers."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return super().make(config.patched({"service_targets": {"neighbour": _Hangs.url}}))

    def connect(self, url: str) -> ServiceTarget:
        return _Hangs() if url == _Hangs.url else super().connect(url)


class MovesByTheOldSpelling(_Told):
    """Its rollout service is elsewhere at first; then ``rollout_service_url`` is changed."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        self._url = config.service_targets[ROLLOUT]
        return super().make(config.patched({"service_targets": {ROLLOUT: "actor://elsewhere"}}))

    async def told(self) -> None:
        await self.patch_config({"rollout_service_url": self._url})


class _OldPages(Collector):
    """The collector of replicas that do not show their throughput."""

    async def _scrape(self, address: EngineAddress, limit_s: float) -> Page | None:
        page = await super()._scrape(address, limit_s)
        if page is not None:
            page.gauges.pop("gen_throughput", None)
        return page


class _OverOldPages(Autoscaler):
    async def activate(self) -> None:
        await super().activate()
        for name, runtime in self.runtimes.items():
            await runtime.collector.stop()
            runtime.worker.retire()
            runtime.collector = _OldPages(name, runtime.target, self.config)
            await runtime.collector.start()
            runtime.worker = Worker(name, self.config, runtime.target, runtime.collector, runtime.state)
            runtime.worker.start()


class OldReplicas(AutoscalerApi):
    """Its replicas show no throughput."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        return _OverOldPages(config, self.connect)


class IsToldToLeave(_Told):
    """Is asked to remove its service as soon as it has something open, and never again."""

    after_s = 0.1

    async def told(self) -> None:
        while not self._autoscaler.open_requests():
            await asyncio.sleep(0.1)
        await self.patch_config({"service_targets": dict.fromkeys(self._autoscaler.runtimes)})


class HasOneSettingOfItsOwn(AutoscalerApi):
    """Its service has a policy of its own with one field."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        own = {service: {"scale_out_policy": {"max_delta": 1}} for service in config.service_targets}
        return super().make(config.patched({"service_policies": own}))


class IsToldTheImpossible(_Told):
    """Is asked for a scale-in threshold above that of the scale-out, for its service only."""

    impossible: Mapping[str, Any] = {
        "scale_in_policy": {"token_usage_threshold": 0.9, "condition_duration_secs": 0, "projected_usage_max": 1.0},
        "scale_out_policy": {"token_usage_threshold": 0.05, "condition_duration_secs": 0},
    }

    async def told(self) -> None:
        await self.patch_config({"service_policies": dict.fromkeys(self._autoscaler.runtimes, self.impossible)})


# --- wrong requests ---


class AbsentIsClean(ScaleRequests):
    """Takes a status that says nothing of the cleanup for a clean one."""

    def _take(self, request: ScaleRequest, reply: ApiReply) -> None:
        super()._take(request, reply)
        if request.cleanup == "unknown":
            request.cleanup = "false"


class BelievesReplays(ScaleRequests):
    """Takes a terminal state in the answer to a submission for the end of the operation."""

    def _answered(self, request: ScaleRequest, reply: ApiReply) -> None:
        super()._answered(request, reply)
        if reply.status == 200 and reply.body.get("status") in TERMINAL[request.action]:
            self._close(request, reply.body["status"], None)


class AdoptsInTwoWays(ScaleRequests):
    """Starts no cooldown for a request that was accepted when it was sent again."""

    async def follow(self) -> None:
        state = self._state
        before = (state.last_action, state.last_action_s, state.last_action_at)
        await super().follow()
        state.last_action, state.last_action_s, state.last_action_at = before


class TerminalIsOver(ScaleRequests):
    """Takes a terminal operation for done with, whether or not it is clean."""

    async def _look(self, request: ScaleRequest) -> None:
        await super()._look(request)
        if request in self._state.pending and request.status in TERMINAL[request.action]:
            self._close(request, request.status, request.error_message)


class UnknownIsRefused(ScaleRequests):
    """Drops a request whose answer was lost, as if it had been refused."""

    def _doubt(self, request: ScaleRequest) -> None:
        super()._doubt(request)
        request.uncertain = False


# --- wrong services ---


class AddsWithoutCollector(AddsItsServiceLate):
    """Adds a service without starting its collector."""

    async def told(self) -> None:
        await super().told()
        for runtime in self._autoscaler.runtimes.values():
            await runtime.collector.stop()
            runtime.collector.frames.clear()


class _Serial(Autoscaler):
    async def activate(self) -> None:
        await super().activate()
        for runtime in self.runtimes.values():
            runtime.worker.retire()
            await runtime.collector.stop()
        backend().periodic(self.config.evaluation_interval_secs, self._round, name="all")

    async def _round(self) -> None:
        for name, runtime in sorted(self.runtimes.items(), key=lambda pair: pair[0] != "neighbour"):
            if name == "neighbour":
                await runtime.target.engines()
            await runtime.collector.collect()
            await runtime.worker.tick()


class EvaluatesInTurn(HasANeighbourThatHangs):
    """Evaluates its services one after another."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        made = super().make(config)
        return _Serial(made.config, self.connect)


class _Barrier(_Serial):
    async def _round(self) -> None:
        async def one(name: str, runtime: Any) -> None:
            if name == "neighbour" and runtime.state.seen_frame_s:
                await runtime.target.engines()
            await runtime.collector.collect()
            await runtime.worker.tick()
            runtime.state.seen_frame_s = runtime.state.seen_frame_s or 1.0

        await asyncio.gather(*(one(name, runtime) for name, runtime in self.runtimes.items()))


class WaitsForTheRound(HasANeighbourThatHangs):
    """Evaluates its services together, and begins the next round when all have ended."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        made = super().make(config)
        return _Barrier(made.config, self.connect)


class ShowsTheLatestOfAll(HasANeighbourThatHangs):
    """Shows the latest action of all services with each of them."""

    async def status(self) -> ApiReply:
        reply = await super().status()
        services = reply.body["services"]
        done = [one["last_scale_action"] for one in services.values() if one["last_scale_action"]]
        for one in services.values():
            one["last_scale_action"] = done[-1] if done else None
        return reply


class ShadowsTheOldSpelling(MovesByTheOldSpelling):
    """Changes ``rollout_service_url`` and goes on with the target that it has."""

    async def told(self) -> None:
        scaler = self._autoscaler
        scaler.config = scaler.config.model_copy(update={"rollout_service_url": self._url})


class RemovesWhatIsOpen(IsToldToLeave):
    """Removes a service while a request of it is open."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        made = super().make(config)
        made._check_idle = lambda service: None  # type: ignore[method-assign]
        return made


class FillsWithDefaults(AutoscalerConfig):
    """Fills a policy that is given in part with the defaults of the library."""

    def rules(self, service: str) -> Rules:
        own = self.service_policies.get(service)
        inherited = super().rules(service)
        if own is None:
            return inherited
        return dataclasses.replace(
            inherited,
            scale_out=own.scale_out_policy or self.scale_out_policy,
            scale_in=own.scale_in_policy or self.scale_in_policy,
        )


class InheritsFromTheLibrary(HasOneSettingOfItsOwn):
    """Fills a policy that is given in part with the defaults of the library."""

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        made = super().make(config)
        made.config = FillsWithDefaults.model_validate(made.config.document())
        return made


class TakesTheImpossible(IsToldTheImpossible):
    """Does not check a service's policy with what it inherits."""

    async def told(self) -> None:
        own = ServicePolicy(
            scale_out_policy=ScaleOutPolicy(**self.impossible["scale_out_policy"]),
            scale_in_policy=ScaleInPolicy(**self.impossible["scale_in_policy"]),
        )
        policies = dict.fromkeys(self._autoscaler.runtimes, own)
        await self._autoscaler.apply(lambda config: config.model_copy(update={"service_policies": policies}))


# --- wrong metrics and decisions ---


class SinceTheStart(HistogramWindow):
    """Takes a percentile of everything since the replica's start."""

    def p95(self, at_s: float) -> Reading | None:
        if self._last is None or not self._last[-1][1]:
            return None
        value, overflow = percentile(self._last, 0.95)
        return Reading(value, at_s, int(self._last[-1][1]), overflow)


def leaves_out_whoever_is_unknown(
    replicas: Mapping[str, Mapping[str, Reading] | None], throughputs: Sequence[float], at_s: float, wall_s: float
) -> Frame:
    """Leaves a replica out of every figure when one critical field is missing."""
    whole = {
        name: None if fields is None or any(field not in fields for field in CRITICAL) else fields
        for name, fields in replicas.items()
    }
    return aggregate(whole, throughputs, at_s, wall_s)


def knows_everybody(
    replicas: Mapping[str, Mapping[str, Reading] | None], throughputs: Sequence[float], at_s: float, wall_s: float
) -> Frame:
    """Counts a replica that shows no metrics as one of which all is known."""
    answered = {name: fields for name, fields in replicas.items() if fields is not None}
    frame = aggregate(answered, throughputs, at_s, wall_s)
    return dataclasses.replace(frame, num_engines=len(replicas), unknown_engines=())


def never_starts_anew(
    streaks: Mapping[str, Streak], frame: Frame, rules: Rules, config: AutoscalerConfig, now_s: float
) -> dict[str, Streak]:
    """Counts the time over frames that say nothing as if the condition had held."""
    if frame.is_empty or frame.unknown_engines:
        return {name: dataclasses.replace(one) for name, one in streaks.items()}
    found = conditions(frame, rules)
    made = advance_all(streaks, frame, rules, config, now_s)
    for name, one in streaks.items():
        if one.elapsed_s is not None and found[name].holds:
            made[name] = Streak(one.elapsed_s + now_s - one.at_s, now_s)
    return made


def without_a_ceiling(
    config: AutoscalerConfig, rules: Rules, frame: Frame, streaks: Mapping[str, Streak], situation: Situation
) -> Choice:
    """Adds replicas above the ceiling."""
    return decide(config, dataclasses.replace(rules, max_engines=99), frame, streaks, situation)


def _requests(name: str, source: str, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "protocol.scaling.worker:ScaleRequests", ScaleRequests, cls, scenario, check)


def _aggregate(name: str, source: str, function: Any, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "protocol.scaling.collector:aggregate", aggregate, function, scenario, check)


def _api(name: str, source: str, twin: type, cls: type, scenario: str, check: str) -> Mutant:
    return Mutant(name, source, "autoscaler", twin, cls, scenario, check)


_ONE = "autoscaler_one_request"

MUTANTS = (
    _requests("absent is clean", "M16", AbsentIsClean, "auto_silent_on_cleanup", _ONE),
    _requests("replays believed", "M17", BelievesReplays, "auto_deaf_and_dirty", _ONE),
    _requests("adopted in two ways", "M18", AdoptsInTwoWays, "auto_deaf", "autoscaler_cooldown"),
    _requests("terminal is over", "M19", TerminalIsOver, "auto_dirty", _ONE),
    _requests("unknown is refused", "M35", UnknownIsRefused, "auto_deaf", _ONE),
    _api("no collector", "M30", AddsItsServiceLate, AddsWithoutCollector, "auto_joins_late", "reached"),
    _api("services in turn", "M31", HasANeighbourThatHangs, EvaluatesInTurn, "auto_neighbour_hangs", "reached"),
    _api("a barrier of rounds", "M31b", HasANeighbourThatHangs, WaitsForTheRound, "auto_neighbour_hangs", "reached"),
    _api(
        "another's last action",
        "M33",
        HasANeighbourThatHangs,
        ShowsTheLatestOfAll,
        "auto_neighbour_seen",
        "autoscaler_shows_its_own",
    ),
    _api("the old spelling shadowed", "M32", MovesByTheOldSpelling, ShadowsTheOldSpelling, "auto_moves", "reached"),
    _aggregate("unknown left out", "M34", leaves_out_whoever_is_unknown, "auto_no_throughput", "reached"),
    _aggregate("unknown is known", "M34b", knows_everybody, "auto_one_blind", "no_blind_scale_in"),
    _api("removed with work open", "M36", IsToldToLeave, RemovesWhatIsOpen, "auto_leaves", "operations_end"),
    Mutant(
        "streaks never start anew",
        "M37",
        "protocol.scaling.worker:advance_all",
        advance_all,
        never_starts_anew,
        "auto_blinks",
        "autoscaler_sustained",
    ),
    _api("thresholds not checked", "H6", IsToldTheImpossible, TakesTheImpossible, "auto_contradiction", "reversals"),
    Mutant(
        "p95 since the start",
        "H7",
        "protocol.scaling.collector:HistogramWindow",
        HistogramWindow,
        SinceTheStart,
        "auto_slow_once",
        "reversals",
    ),
    _api(
        "defaults of the library", "H8", HasOneSettingOfItsOwn, InheritsFromTheLibrary, "auto_partial_policy", "reached"
    ),
    Mutant(
        "no ceiling",
        "scaling 6.3",
        "protocol.scaling.worker:decide",
        decide,
        without_a_ceiling,
        "auto_full",
        "autoscaler_keeps_bounds",
    ),
)
