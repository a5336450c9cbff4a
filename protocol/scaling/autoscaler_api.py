"""The autoscaler's HTTP surface, as plain handlers: request in, status code and body out. One code for both worlds.

Source: scaling.md 6.6.

| route | handler |
| --- | --- |
| GET /status | ``status`` |
| GET /conditions?service= | ``conditions`` |
| GET /scale_history?service=&limit=&action= | ``scale_history``, newest first |
| GET /metrics_history?service= | ``metrics_history``, newest first |
| POST /clear_history | ``clear_history`` |
| GET, PATCH /config | ``get_config``, ``patch_config`` (JSON merge patch) |
| POST /enable | ``enable`` |
| POST /start | ``activate``: a deployed autoscaler does nothing before |
| GET /health | ``health`` |
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from pydantic import ValidationError

from protocol.ports import backend
from protocol.scaling.autoscaler import Autoscaler, Runtime, TargetBusy
from protocol.scaling.autoscaler_bodies import (
    AutoscalerHealthBody,
    AutoscalerStatusBody,
    ClearedBody,
    ConditionsBody,
    EnableBody,
    HistoryBody,
    HistoryQuery,
    MetricsHistoryBody,
    ServiceBody,
    StartedBody,
    body_of,
)
from protocol.scaling.bodies import ApiReply, ErrorBody
from protocol.scaling.decision import IN_CONDITIONS, OUT_CONDITIONS, conditions
from protocol.scaling.policy import ROLLOUT, AutoscalerConfig
from protocol.scaling.targets import ServiceTarget, connect

_LEGACY = (
    "current_engines", "min_engines", "max_engines", "last_scale_time", "last_scale_action", "last_decision",
    "pending_requests", "recent_metrics", "total_scale_operations",
)  # fmt: skip


class AutoscalerApi:
    """The autoscaler as it is deployed. An actor.

    Args:
        config: what it begins with.
        begin: start at once, without a call of ``activate``.
    """

    def __init__(self, config: AutoscalerConfig, *, begin: bool = False) -> None:
        self._config = config
        self._begin = begin
        self._autoscaler: Autoscaler

    async def start(self) -> None:
        self._autoscaler = self.make(self._config)
        if self._begin:
            await self.activate()

    def make(self, config: AutoscalerConfig) -> Autoscaler:
        """What the handlers are in front of."""
        return Autoscaler(config, self.connect)

    def connect(self, url: str) -> ServiceTarget:
        """The target at a URL; a world that can reach other ones overrides it."""
        return connect(url)

    async def stop(self) -> None:
        await self._autoscaler.stop()

    # --- control ---

    async def activate(self) -> ApiReply:
        """POST /start: collect and decide from now on. 200."""
        await self._autoscaler.activate()
        return ApiReply(200, body_of(StartedBody(True, list(self._autoscaler.runtimes))))

    async def wind_down(self) -> tuple[str, ...]:
        """Decide nothing any more, and say which requests are open. For whoever is about to end the service."""
        self._autoscaler.wind_down()
        return self._autoscaler.open_requests()

    async def enable(self, body: Any = None) -> ApiReply:
        """POST /enable: decide, or decide nothing. 200 or 422."""
        try:
            asked = EnableBody.model_validate({} if body is None else body)
        except ValidationError as error:
            return _invalid(error)
        return await self.patch_config({"enabled": asked.enabled})

    async def get_config(self) -> ApiReply:
        """GET /config: 200. What it answers can be sent back."""
        return ApiReply(200, self._autoscaler.config.document())

    async def patch_config(self, patch: Any) -> ApiReply:
        """PATCH /config: a JSON merge patch; null takes a service out. 200, 409 or 422; then nothing has changed."""
        if not isinstance(patch, dict):
            return _error(422, "INVALID_PATCH", "a patch is a JSON object with the keys that change")
        try:
            await self._autoscaler.apply(lambda config: config.patched(patch))
        except ValidationError as error:
            return _invalid(error)
        except RecursionError:
            return _error(422, "INVALID_PATCH", "the patch is nested too deeply")
        except TargetBusy as busy:
            return _error(409, "TARGET_BUSY", busy.message)
        return await self.get_config()

    async def clear_history(self, service: str | None = None) -> ApiReply:
        """POST /clear_history: forget what is over, of one service or of all. 200 or 404."""
        if service is not None and self._runtime(service) is None:
            return self._unknown(service)
        cleared = 0
        for name, runtime in self._autoscaler.runtimes.items():
            if service in (None, name):
                cleared += len(runtime.state.history)
                runtime.state.history.clear()
        return ApiReply(200, body_of(ClearedBody(cleared)))

    # --- looking ---

    async def health(self) -> ApiReply:
        """GET /health: 200. ``errors``: services whose latest evaluation or round of metrics broke."""
        scaler = self._autoscaler
        told = {name: one.state.last_error or one.collector.last_error for name, one in scaler.runtimes.items()}
        errors = {name: error for name, error in told.items() if error}
        status = "degraded" if errors else "healthy"
        return ApiReply(
            200, body_of(AutoscalerHealthBody(status, scaler.activated, scaler.config.enabled, errors))
        )  # fmt: skip

    async def status(self) -> ApiReply:
        """GET /status: every service, and the rollout service once more at the top, as older readers expect. 200."""
        scaler = self._autoscaler
        services: dict[str, Any] = {name: self._service(name, runtime) for name, runtime in scaler.runtimes.items()}
        legacy = {key: services.get(ROLLOUT, {}).get(key) for key in _LEGACY}
        body = AutoscalerStatusBody(
            enabled=scaler.config.enabled, started=scaler.activated, **legacy, services=services
        )  # fmt: skip
        return ApiReply(200, body_of(body))

    def _service(self, name: str, runtime: Runtime) -> dict[str, Any]:
        rules, state, frames = self._autoscaler.config.rules(name), runtime.state, runtime.collector.frames
        known = runtime.collector.current
        # Nobody listed is nobody known: a service that never answered has an unknown number of replicas, not 0 of them.
        # What follows is JSON already.
        pending: Any = [{**request.item(), "cleanup": request.cleanup} for request in state.pending]
        latest: Any = frames[-1].snapshot() if frames else None
        body = ServiceBody(
            current_engines=known if known is not None or not frames else frames[-1].num_engines or None,
            min_engines=rules.min_engines,
            max_engines=rules.max_engines,
            last_scale_time=state.last_action_at,
            last_scale_action=state.last_action,
            last_decision=state.last_choice,
            pending_requests=pending,
            recent_metrics=latest,
            total_scale_operations=state.accepted,
            refusal=runtime.collector.refusal,
        )
        return body_of(body)

    async def conditions(self, service: str = ROLLOUT) -> ApiReply:
        """GET /conditions: each condition with its value, threshold, and for how long it has held. 200 or 404."""
        runtime = self._runtime(service)
        if runtime is None:
            return self._unknown(service)
        rules = self._autoscaler.config.rules(service)
        frame = runtime.collector.latest(asyncio.get_running_loop().time())
        found = conditions(frame, rules)
        streaks = runtime.state.streaks
        sides = (("scale_out", OUT_CONDITIONS, rules.scale_out), ("scale_in", IN_CONDITIONS, rules.scale_in))
        shown: dict[str, Any] = {}
        for side, names, policy in sides:
            shown[side] = {
                name: {
                    "value": found[name].value,
                    "threshold": found[name].threshold,
                    "met": found[name].holds,
                    "held_secs": streaks[name].elapsed_s if name in streaks else None,
                    "required_secs": policy.condition_duration_secs,
                }
                for name in names
            }
        return ApiReply(200, body_of(ConditionsBody(service, backend().wall_time(), **shown)))

    async def scale_history(self, **query: Any) -> ApiReply:
        """GET /scale_history: what is over, newest first. 200, 404 or 422.

        Args:
            query: ``service``, ``limit``, ``action`` as in :class:`HistoryQuery`.
        """
        try:
            asked = HistoryQuery.model_validate(query)
        except ValidationError as error:
            return _invalid(error)
        runtime = self._runtime(asked.service)
        if runtime is None:
            return self._unknown(asked.service)
        items: Any = [r.item() for r in reversed(runtime.state.history) if asked.action in (None, r.action)]
        return ApiReply(200, body_of(HistoryBody(asked.service, len(items), items[: asked.limit])))

    async def metrics_history(self, service: str = ROLLOUT) -> ApiReply:
        """GET /metrics_history: frames, newest first. 200 or 404."""
        runtime = self._runtime(service)
        if runtime is None:
            return self._unknown(service)
        frames: Any = [frame.snapshot() for frame in reversed(runtime.collector.frames)]
        return ApiReply(200, body_of(MetricsHistoryBody(service, frames)))

    def _runtime(self, service: Any) -> Runtime | None:
        """None also for what is no name: over HTTP a query is text, from an actor it may be anything."""
        return self._autoscaler.runtimes.get(service) if isinstance(service, str) else None

    def _unknown(self, service: str) -> ApiReply:
        known = ", ".join(sorted(self._autoscaler.runtimes)) or "none: it has not been started"
        return _error(404, "UNKNOWN_SERVICE", f"service {service!r} is not scaled here; known: {known}")


def _invalid(error: ValidationError) -> ApiReply:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _error(422, "INVALID_CONFIG", f"{where}: {first['msg']}" if where else first["msg"])


def _error(status: int, code: str, detail: str) -> ApiReply:
    return ApiReply(status, dataclasses.asdict(ErrorBody(code, detail)))
