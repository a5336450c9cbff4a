"""Puts an autoscaler over a scaled service, and records what it asks of the service's control API.

The recorder is an actor of its own in front of that API: a part of the world, so that verdicts need not believe what an
autoscaler says of itself. Faults between the two are faults of the autoscaler's network.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from protocol.config import ComponentConfig
from protocol.errors import ActorDied, NoSuchActor, SeatrialError
from protocol.evidence import observer
from protocol.ports import ActorHandle, backend
from protocol.scaling.autoscaler_api import AutoscalerApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Direction
from protocol.scaling.policy import ROLLOUT, AutoscalerConfig
from protocol.serving.peer import Peer
from scenarios.scaling import is_over, record_answered, record_asked

_DEFAULTS = AutoscalerConfig()
_ANSWER_S = 29.0  # a little less than the autoscaler waits
_RECONCILE_S = 149.0
_ASK_S = 5.0


@observer
class ScaleFront:
    """Stands for a control API. An actor.

    Args:
        service: its name in the scenario.
        api: handle of its ScaleApi.
    """

    def __init__(self, service: str, api: ActorHandle) -> None:
        self._service = service
        self._api = Peer(api, _ANSWER_S)
        self._slow = Peer(api, _RECONCILE_S)
        self._open: dict[str, Direction] = {}  # operations that were admitted and not seen to end

    async def left_open(self) -> dict[str, Direction]:
        """The operations that were admitted through here and not seen to end: for when nobody follows them any more."""
        return dict(self._open)

    async def engines(self) -> ApiReply:
        reply: ApiReply = await self._api.call("engines")
        return reply

    async def scale_out(self, body: dict[str, Any]) -> ApiReply:
        return await self._ask("scale_out", "scale_out", "", body)

    async def scale_in(self, body: dict[str, Any]) -> ApiReply:
        return await self._ask("scale_in", "scale_in", "", body)

    async def status(self, direction: Direction, request_id: str) -> ApiReply:
        return await self._ask("status", direction, request_id)

    async def reconcile(self, direction: Direction, request_id: str) -> ApiReply:
        return await self._ask("reconcile", direction, request_id)

    def _recordable(self, body: Any) -> dict[str, Any]:
        """What evidence says of a body."""
        given: dict[str, Any] = body or {}
        return given

    async def _ask(self, route: str, direction: Direction, operation: str, body: Any = None) -> ApiReply:
        ask = record_asked(self._service, route, direction, operation, self._recordable(body))
        peer = self._slow if route == "reconcile" else self._api
        arguments: tuple[Any, ...] = (direction, operation) if operation else (body,)
        reply: ApiReply | None = None
        try:
            reply = await peer.call("call_off" if route == "cancel" else route, *arguments)
        finally:
            record_answered(ask, route, reply)
        self._note(direction, operation, reply)
        return reply

    def _note(self, direction: Direction, operation: str, reply: ApiReply) -> None:
        named = operation or reply.body.get("request_id")
        if not isinstance(named, str) or not named:
            return
        if reply.status == 404 or (reply.status == 200 and is_over(direction, reply.body)):
            self._open.pop(named, None)
        elif reply.status == 200:
            self._open[named] = direction


@dataclasses.dataclass(slots=True)
class Autoscaling:
    """The autoscaler of one service. ``scaler``: None before the workload begins."""

    service: str
    config: AutoscalerConfig
    cls: type
    front: ActorHandle
    scaler: ActorHandle | None = None
    lost: bool = False
    """The incarnation that was started is no more: what it had asked for, nobody may follow."""

    async def begin(self) -> None:
        """Start it. Its evaluations are timed from here, so this is done when the workload begins."""
        port = backend()
        name = f"autoscaler-{self.service}"
        rules = self.config.rules(self.service)
        port.emit(
            "autoscaler.deployed",
            service=self.service,
            scaler=name,
            api=self.front.name,
            min_engines=rules.min_engines,
            max_engines=rules.max_engines,
            out_cooldown_s=float(self.config.scale_out_cooldown_secs),
            in_cooldown_s=float(self.config.scale_in_cooldown_secs),
            metrics_interval_s=float(self.config.metrics_interval_secs),
            evaluation_interval_s=float(self.config.evaluation_interval_secs),
            out_duration_s=float(rules.scale_out.condition_duration_secs),
            in_duration_s=float(rules.scale_in.condition_duration_secs),
        )
        enough = (self.config.min_coverage_scale_out, self.config.min_coverage_scale_in)
        if enough != (_DEFAULTS.min_coverage_scale_out, _DEFAULTS.min_coverage_scale_in):
            port.emit("autoscaler.coverage", service=self.service, out_least=enough[0], in_least=enough[1])
        self.scaler = await port.spawn(self.cls, self.config, name=name, begin=True)

    async def is_over(self) -> bool:
        """Have it decide nothing any more; whether nothing is open then."""
        return not await self._call("wind_down", ())

    async def look(self) -> None:
        """Read its status and record what it shows of each service."""
        reply: ApiReply | None = await self._call("status", None)
        services: dict[str, Any] = {} if reply is None else reply.body.get("services", {})
        for name, shown in services.items():
            backend().emit(
                "autoscaler.shown",
                scaler=f"autoscaler-{self.service}",
                service=name,
                last_action=shown.get("last_scale_action") or None,
            )

    async def stop(self) -> None:
        await self._call("stop", None)

    async def _call(self, method: str, default: Any) -> Any:
        """Ask the incarnation that lives now; a dead one, or one of the user's own without the method, says nothing."""
        try:
            async with asyncio.timeout(_ASK_S):
                living = await backend().lookup(f"autoscaler-{self.service}")
                self.lost = self.lost or (self.scaler is not None and living.incarnation != self.scaler.incarnation)
                return await getattr(living, method)()
        except (ActorDied, NoSuchActor):
            self.lost = True
            return default
        except (SeatrialError, TimeoutError, AttributeError):
            return default

    async def left_open(self) -> dict[str, Direction]:
        """What an autoscaler that died had asked for, and was not seen to end."""
        if not self.lost:
            return {}
        try:
            async with asyncio.timeout(_ASK_S):
                found: dict[str, Direction] = await self.front.left_open()
                return found
        except (SeatrialError, TimeoutError):
            return {}

    async def actors(self) -> list[ActorHandle]:
        """What there is to end."""
        if self.scaler is None:
            return [self.front]
        try:
            return [await backend().lookup(self.scaler.name), self.front]
        except SeatrialError:
            return [self.front]


async def deploy_autoscaling(
    service: str, config: ComponentConfig, cls: type | None, scale_api: ActorHandle
) -> Autoscaling:
    """Put the recorder up; the autoscaler itself starts with the workload."""
    assert isinstance(config, AutoscalerConfig)
    front = await backend().spawn(ScaleFront, service, scale_api, name=f"front-{service}")
    targets = {"service_targets": {service: f"actor://{front.name}"}}
    only = targets if service == ROLLOUT else {**targets, "rollout_service_url": None}
    return Autoscaling(service, config.patched(only), cls or AutoscalerApi, front)


async def all_over(scalers: Sequence[Autoscaling]) -> bool:
    """Whether no autoscaler has anything open. None of them decides anything from here on."""
    answers = await asyncio.gather(*(scaler.is_over() for scaler in scalers))
    return all(answers)
