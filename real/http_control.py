"""The control APIs of a run over HTTP, as an actor: each scaled service below its name, its autoscaler below that.

``/SERVICE/...`` is its scale API, of judges or of rollout replicas, ``/SERVICE/autoscaler/...`` its autoscaler,
``/openapi.json`` says what there is (docs/api.md). Address, token, bounds and the end are those of every server here
(`real.http_server`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from protocol.config import HttpConfig
from protocol.openapi import ApiName, document
from protocol.ports import ActorHandle
from protocol.rollout.elastic_http import rollout_routes
from protocol.scaling.http_tables import autoscaler_routes, scale_routes
from protocol.serving.http import HttpAnswer, HttpRequest, Routes, json_answer
from protocol.serving.http_routes import ControlRoutes, Mounted
from real.http_server import HttpServer, ServerSettings


class Served(NamedTuple):
    """A service: its name, its ScaleApi or RolloutScaling, its AutoscalerApi where it has one, and which it is."""

    name: str
    api: ActorHandle
    scaler: ActorHandle | None = None
    kind: Literal["scale", "rollout"] = "scale"


def control_routes(config: HttpConfig, services: tuple[Served, ...]) -> Routes:
    """Everything that is served for some services."""
    mounts: dict[str, ApiName] = {}
    tables: dict[str, Routes] = {}
    for name, api, scaler, kind in services:
        mounts[f"/{name}"] = kind
        tables[f"/{name}"] = (scale_routes if kind == "scale" else rollout_routes)(config, api)
        if scaler is not None:
            mounts[f"/{name}/autoscaler"] = "autoscaler"
            tables[f"/{name}/autoscaler"] = autoscaler_routes(config, scaler)
    described = document(mounts)

    async def openapi(request: HttpRequest) -> HttpAnswer:
        return json_answer(described)

    root = ControlRoutes(
        (), _nobody, max_body_bytes=config.max_body_bytes, retry_after_s=config.retry_after_s,
        more={("GET", "/openapi.json"): openapi},
    )  # fmt: skip
    return Mounted({**tables, "": root})


async def _nobody(*_: object) -> HttpAnswer:
    raise AssertionError("the root has no route of a component")


class ControlFront:
    """Serves the control APIs of some services. An actor.

    Args:
        settings: where to listen.
        config: bounds of the handlers.
        services: what to serve.
    """

    def __init__(self, settings: ServerSettings, config: HttpConfig, services: tuple[Served, ...]) -> None:
        self._server = HttpServer(control_routes(config, services), settings)
        self._address = ("", 0)

    async def start(self) -> None:
        self._address = await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def address(self) -> tuple[str, int]:
        """(host, port) where it listens."""
        return self._address
