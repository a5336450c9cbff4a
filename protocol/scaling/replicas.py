"""What is done to one replica on its way in and out: waited for, made to generate, withdrawn from the gateway, ended.

Every wait is bounded by its caller or here, and an answer that did not come is never taken for one (DESIGN.md,
"Outcomes").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.config import LifecycleConfig
from protocol.errors import NetworkError, SeatrialError, SpawnFailed
from protocol.messages import EngineAddress
from protocol.ports import backend
from protocol.serving.peer import PEER_LOST, Peer

_FORGET_ATTEMPTS = 3


class Replicas:
    """Steps of a lifecycle that touch a replica or its row at the gateway.

    Args:
        config: time-outs.
        gateway: the Gateway that routes to the replicas.
    """

    def __init__(self, config: LifecycleConfig, gateway: Peer) -> None:
        self._config = config
        self._gateway = gateway

    async def wait_ready(self, address: EngineAddress, checkpoint: Callable[[], None]) -> None:
        """Wait for /ready, up to ``init_timeout_s``. Raises TimeoutError, SpawnFailed, what ``checkpoint`` raises."""
        config, engines = self._config, backend().engines
        client = engines.client(address)
        timeout_s = config.request_timeout_s
        async with asyncio.timeout(config.init_timeout_s):
            while True:
                checkpoint()
                try:
                    status, _ = await client.get("/ready", connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
                    if status == 200:
                        return
                except NetworkError:
                    if not await engines.alive(address.name):
                        raise SpawnFailed(f"{address.name} died while it started") from None
                await asyncio.sleep(config.poll_interval_s)

    async def wait_generating(self, address: EngineAddress, checkpoint: Callable[[], None]) -> None:
        """Wait until a token comes out: /ready says 200 of an engine that gets nothing done.

        As long as ``checkpoint`` lets it. Raises SpawnFailed when the process dies, and what ``checkpoint`` raises.
        """
        client = backend().engines.client(address)
        while True:
            try:
                status, _ = await client.get(
                    "/health_generate",
                    connect_timeout_s=self._config.request_timeout_s,
                    read_timeout_s=self._config.generate_timeout_s,
                )
                if status == 200:
                    return
            except NetworkError:
                if not await backend().engines.alive(address.name):
                    raise SpawnFailed(f"{address.name} died before it was healthy") from None
            checkpoint()
            await asyncio.sleep(self._config.poll_interval_s)

    async def withdraw(self, address: EngineAddress) -> bool:
        """Whether the gateway has nothing to do with a replica any more."""
        try:
            if not await self._gateway.call("close_admission", address, "scale-out failed"):
                return True  # it never took it
            if not await self._gateway.call("wait_idle", address, self._config.call_timeout_s / 2):
                return False
            await self._gateway.call("remove_replica", address)
            return True
        except PEER_LOST:
            return False

    async def members(self, *addresses: EngineAddress) -> tuple[EngineAddress, ...] | None:
        """Which of these incarnations of a replica the gateway has; None: it does not answer."""
        try:
            members: tuple[EngineAddress, ...] = await self._gateway.call("roster")
        except PEER_LOST:
            return None
        return tuple(address for address in addresses if address in members)

    async def forget_route(self, address: EngineAddress) -> None:
        """Idempotent. Admission is closed for ever, so that a gateway that does not answer only keeps a dead row."""
        for _ in range(_FORGET_ATTEMPTS):
            try:
                await self._gateway.call("remove_replica", address)
                return
            except PEER_LOST:
                await asyncio.sleep(self._config.poll_interval_s)

    async def end(self, name: str) -> str:
        """SIGKILL, and up to ``shutdown_timeout_s`` to see it gone. Returns why it was not seen, empty when it was.

        The removal of its placement group ends whatever is left.
        """
        engines = backend().engines
        try:
            async with asyncio.timeout(self._config.shutdown_timeout_s):
                await engines.terminate(name)
                while await engines.alive(name):
                    await asyncio.sleep(self._config.poll_interval_s)
        except (SeatrialError, TimeoutError) as error:
            return f"not seen gone: {type(error).__name__}: {error}"
        return ""
