"""Components of the tests of the real world."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from protocol.ports import ActorHandle, backend


class Claimant:
    """Emits evidence, then does things."""

    async def claim(self, n: int) -> int:
        for i in range(n):
            backend().emit("gateway.routable", replica=f"r-{i}", replica_inc=1)
        return os.getpid()

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def claim_and_die(self, n: int) -> None:
        await self.claim(n)
        await backend().kill(backend().me)

    async def claim_and_crash(self, n: int) -> None:
        await self.claim(n)
        backend().background(self._fail(), name="fails")
        await asyncio.sleep(3600)

    async def _fail(self) -> None:
        raise RuntimeError("as planned")

    async def pass_on(self, other: ActorHandle) -> None:
        await self.claim(1)
        await other.claim(1)
        await self.claim(1)

    async def leave(self) -> None:
        raise SystemExit(3)


class FailingHooks:
    """Hooks of a session server that record nothing."""

    def __init__(self, store: Any) -> None:
        self.store = store

    async def on_request(self, turn: Any) -> None:
        pass

    async def on_response(self, turn: Any, answer: Any) -> None:
        raise RuntimeError("nothing is recorded here")

    async def on_end(self, turn: Any, label: str) -> None:
        pass


class WritingHooks(FailingHooks):
    """Hooks that write a line for each whole turn to the file that the environment names."""

    async def on_response(self, turn: Any, answer: Any) -> None:
        with open(os.environ["TURNS_FILE"], "a") as file:
            file.write(f"{turn.session_id} {len(answer.text.split())}\n")
