"""A control API, really served until a SIGTERM: what ``served_scaling`` and ``served_rollouts`` have in common."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from protocol.config import HttpConfig
from protocol.messages import EngineAddress
from real.http_control import ControlFront, Served
from real.http_server import ServerSettings
from tests.protocol.fake import FakeBackend, FakeEngines, FakeHandle


class Engines(FakeEngines):
    """Those of the tests of the protocol; ``elsewhere`` answers at every other address."""

    def __init__(self, world: FakeBackend, elsewhere: Any) -> None:
        super().__init__(world)
        self._elsewhere = elsewhere

    def client(self, address: EngineAddress) -> Any:
        known = any((one.name, one.incarnation) == (address.name, address.incarnation) for one in self.every)
        return super().client(address) if known else self._elsewhere


async def serve_until_told(
    world: FakeBackend, settings: ServerSettings, http: HttpConfig, served: Served, *behind: FakeHandle
) -> None:
    """Serve, and at a SIGTERM stop that and then, in order, who is behind it. The first line says where it listens."""
    front = await world.spawn(ControlFront, settings, http, (served,), name="front")
    host, port = await front.address()
    print(f"serving on http://{host}:{port} ", flush=True)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    await told.wait()
    for one in (front, *behind):
        await one.stop()
    print("stopped", flush=True)
