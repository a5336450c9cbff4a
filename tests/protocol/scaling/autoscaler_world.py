"""A small world with an autoscaler in it, over services that do as told."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from protocol.errors import ConnectionRefused, ReadTimeout, SeatrialError
from protocol.messages import EngineAddress
from protocol.scaling.autoscaler_api import AutoscalerApi
from protocol.scaling.bodies import ApiReply
from protocol.scaling.policy import AutoscalerConfig
from protocol.scaling.targets import ServiceTarget
from tests.protocol.scaling.world import ScalingWorld, run

LOST = ReadTimeout("no answer")
REFUSED = ConnectionRefused("nobody there")


class Pages:
    """Engines of which there is nothing but a page of metrics. ``pages``: port to text, or "hang"."""

    def __init__(self) -> None:
        self.pages: dict[int, str] = {}

    def client(self, address: EngineAddress) -> Any:
        return _Client(self, address)


@dataclasses.dataclass
class _Client:
    world: Pages
    address: EngineAddress

    async def get(self, route: str, *, connect_timeout_s: float, read_timeout_s: float) -> tuple[int, str]:
        page = self.world.pages.get(self.address.port)
        if page == "hang":
            await asyncio.sleep(read_timeout_s)
            raise ReadTimeout("no page")
        return (404, "") if page is None else (200, page)


class FakeService:
    """A control API that does as told. ``submits``: what the next submissions do instead: an error, or a reply.

    An error in ``submits`` is raised after the effect when its outcome is unknown, as a lost reply is.
    """

    def __init__(self, url: str, engines: int = 1) -> None:
        self.url = url
        self.ports = list(range(16000, 16000 + engines))
        self.current = engines
        self.submits: list[Any] = []
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.keys: dict[str, str] = {}
        self.fingerprints: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.reconciles: list[str] = []
        self.reconcile_cleans = True
        self.forgets = False
        self.hangs = False
        self.instances = 1
        self.submit_s = 0.0
        self.closed = 0

    async def engines(self) -> ApiReply:
        if self.hangs:
            await asyncio.sleep(1e6)
        body = {"engines": [{"host": "h", "port": port} for port in self.ports], "current": self.current}
        if self.instances > 1:
            return ApiReply(200, {"instances": {f"m{n}": body for n in range(self.instances)}})
        return ApiReply(200, body)

    async def submit(self, direction: str, body: dict[str, Any]) -> ApiReply:
        self.posts.append((direction, dict(body)))
        await asyncio.sleep(self.submit_s)
        told = self.submits.pop(0) if self.submits else None
        if isinstance(told, ApiReply):
            return told
        if told is REFUSED:
            raise REFUSED
        key = body["idempotency_key"]
        if self.fingerprints.setdefault(key, dict(body)) != body:
            return ApiReply(
                409, {"error": "IDEMPOTENCY_CONFLICT", "detail": f"key {key!r} was used for another request"}
            )
        operation = self.keys.setdefault(key, f"op-{len(self.keys)}")
        self.operations.setdefault(operation, {"status": "PENDING", "cleanup_required": False})
        if isinstance(told, SeatrialError):
            raise told
        status = self.operations[operation]["status"]
        return ApiReply(200, {"status": status, "request_id": operation, "current": self.current})

    async def status(self, direction: str, request_id: str) -> ApiReply:
        if self.forgets:
            return ApiReply(404, {"error": "UNKNOWN_OPERATION"})
        return ApiReply(200, dict(self.operations[request_id]))

    async def reconcile(self, direction: str, request_id: str) -> ApiReply:
        self.reconciles.append(request_id)
        operation = self.operations[request_id]
        if not self.reconcile_cleans:
            return ApiReply(409, {"error": "IN_FLIGHT"})
        operation["cleanup_required"] = False
        return ApiReply(200, dict(operation))

    async def close(self) -> None:
        self.closed += 1

    def end(self, status: str, cleanup: Any = False) -> None:
        """Let the latest operation end. ``cleanup`` None: its status says nothing of it."""
        operation = self.operations[f"op-{len(self.keys) - 1}"]
        operation["status"] = status
        operation.pop("cleanup_required")
        if cleanup is not None:
            operation["cleanup_required"] = cleanup


class Api(AutoscalerApi):
    """The right one, over fake services by URL."""

    services: dict[str, FakeService]

    def connect(self, url: str) -> ServiceTarget:
        return self.services[url]


@dataclasses.dataclass
class Stage:
    world: Any
    api: Api
    services: dict[str, FakeService]
    pages: Pages

    @property
    def genrm(self) -> FakeService:
        return self.services["a://genrm"]

    async def view(self, service: str = "genrm") -> dict[str, Any]:
        found: dict[str, Any] = (await self.api.status()).body["services"][service]
        return found

    async def history(self, **query: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.api.scale_history(service="genrm", **query)).body["history"]
        return found

    def load(self, usage: float, queue: float = 0, ports: tuple[int, ...] = (16000, 16001, 16002)) -> None:
        for port in ports:
            self.pages.pages[port] = page(token_usage=usage, num_queue_reqs=queue, gen_throughput=100)


def page(**values: float) -> str:
    return "".join(f'sglang:{name}{{model_name="m"}} {value}\n' for name, value in values.items())


QUICK: dict[str, Any] = {
    "metrics_interval_secs": 1, "evaluation_interval_secs": 5, "max_engines": 4, "scale_out_cooldown_secs": 20,
    "scale_in_cooldown_secs": 60, "rollout_service_url": None, "service_targets": {"genrm": "a://genrm"},
    "scale_out_policy": {"condition_duration_secs": 0}, "scale_in_policy": {"condition_duration_secs": 0},
}  # fmt: skip


async def stage(world: ScalingWorld, *, engines: int = 1, usage: float = 0.95, **config: Any) -> Stage:
    """An autoscaler that was started at 0 s and evaluates at 5 s, 10 s and so on."""
    pages = Pages()
    world.engines = pages  # type: ignore[assignment]
    api = Api(AutoscalerConfig.model_validate({**QUICK, **config}))
    urls = ("a://genrm", "a://other", "a://rollout")
    api.services = {url: FakeService(url, engines) for url in urls}
    made = Stage(world, api, api.services, pages)
    made.load(usage)
    await api.start()
    await api.activate()
    return made


def play(body: Any, **config: Any) -> None:
    """Run ``body(stage)`` in a fresh world."""

    async def whole(world: ScalingWorld) -> None:
        made = await stage(world, **config)
        await body(made)
        await made.api.stop()

    run(whole)
