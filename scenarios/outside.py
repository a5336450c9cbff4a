"""Stands between the control API of a run and callers from outside, and records what they ask and get.

A part of the world, as the recorder in front of an autoscaler's API: without it a verdict would know of a replica that
nobody had asked for. Callers from outside may send anything, so only what evidence can hold is recorded of it.
"""

from __future__ import annotations

from typing import Any

from protocol.evidence import observer
from protocol.ports import ActorHandle, data_call
from protocol.scaling.bodies import ApiReply
from protocol.scaling.contract import Direction
from scenarios.autoscaling import ScaleFront

_LARGEST = 1 << 63


@observer
class OutsideFront(ScaleFront):
    """A ScaleApi, or a RolloutScaling, for callers from outside. An actor.

    Args:
        service: its name in the scenario.
        api: handle of it.
    """

    def __init__(self, service: str, api: ActorHandle) -> None:
        super().__init__(service, api)
        self._handle = api

    async def call_off(self, direction: Direction, request_id: str) -> ApiReply:
        return await self._ask("cancel", direction, request_id)

    async def metrics(self) -> ApiReply:
        reply: ApiReply = await self._api.call("metrics")
        return reply

    async def health(self) -> ApiReply:
        reply: ApiReply = await self._api.call("health")
        return reply

    @data_call
    async def generate(self, body: Any) -> ApiReply:
        reply: ApiReply = await self._handle.generate(body)
        return reply

    async def stop(self) -> None:
        return None

    def _recordable(self, body: Any) -> dict[str, Any]:
        return recordable(body)


def recordable(body: Any) -> dict[str, Any]:
    """What evidence says of a submission: fields of another type than it should have are left out."""
    given = body if isinstance(body, dict) else {}
    target, key, timeout = (given.get(name) for name in ("num_replicas", "idempotency_key", "timeout_secs"))
    engines = given.get("engine_urls")
    found: dict[str, Any] = {}
    if type(target) is int and abs(target) < _LARGEST:
        found["num_replicas"] = target
    if isinstance(key, str):
        found["idempotency_key"] = key
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and abs(timeout) < 1e300:
        found["timeout_secs"] = float(timeout)
    if isinstance(engines, list):
        found["engine_urls"] = engines
    return found
