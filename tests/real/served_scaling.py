"""The control APIs of a small scaled service, really served: ``python -m tests.real.served_scaling [--token TOKEN]``.

The right gateway, manager, registry, scale API and autoscaler in one process on an ordinary asyncio loop; placement
groups and engines are those of ``tests.protocol``, which take no time. The first line says where it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from protocol.config import HttpConfig
from protocol.messages import EngineAddress
from protocol.scaling.autoscaler_api import AutoscalerApi
from protocol.scaling.policy import AutoscalerConfig
from real.http_control import Served
from real.http_server import ServerSettings
from scenarios.outside import OutsideFront
from tests.protocol.fake import FakeEngine
from tests.protocol.scaling.autoscaler_world import page
from tests.protocol.scaling.world import ScalingWorld, service
from tests.real.served_control import Engines, serve_until_told

NAME = "genrm"


def place(ports: tuple[int, ...]) -> None:
    """Replica n of this process is at 127.0.0.1 and the n-th of these ports, where somebody serves its page."""

    def address(engine: FakeEngine) -> EngineAddress:
        return EngineAddress(engine.name, engine.incarnation, "127.0.0.1", ports[int(engine.name.split("-")[1])])

    FakeEngine.address = property(address)  # type: ignore[assignment, method-assign]  # of this process alone


class Page:
    """A replica that is half used, and whose queue is empty."""

    async def get(self, route: str, **_: Any) -> tuple[int, str]:
        return 200, page(token_usage=0.5, num_queue_reqs=0, num_running_reqs=3, gen_throughput=100)


async def serve(token: str, max_body_bytes: int, ports: tuple[int, ...]) -> None:
    if ports:
        place(ports)
    world = ScalingWorld()
    world.engines = Engines(world, Page())
    asyncio.get_running_loop().seatrial_backend = world  # type: ignore[attr-defined]  # a mark, looked for by name
    made = await service(world, lifecycle={"drain_timeout_s": 3}, scaling={"completion_wait_s": 1, "timeout_s": 10})
    config = {
        "service_targets": {NAME: f"actor://{made.api.name}"}, "rollout_service_url": None, "max_engines": 3,
        "metrics_interval_secs": 0.2, "evaluation_interval_secs": 0.5,
    }  # fmt: skip
    scaler = await world.spawn(AutoscalerApi, AutoscalerConfig.model_validate(config), name="autoscaler")
    outside = await world.spawn(OutsideFront, NAME, made.api, name="outside")  # as in a real run: all of it is recorded
    settings = ServerSettings(token=token, shutdown_grace_s=2.0, body_timeout_s=1.0)  # type: ignore[arg-type]  # pydantic's
    http = HttpConfig(max_body_bytes=max_body_bytes)
    await serve_until_told(world, settings, http, Served(NAME, outside, scaler), scaler, made.api)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--token", default="")
    parser.add_argument("--max-body-bytes", type=int, default=65_536)
    parser.add_argument("--page-port", type=int, action="append", default=[])
    given = parser.parse_args()
    asyncio.run(serve(given.token, given.max_body_bytes, tuple(given.page_port)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
