"""What the tests of the simulated world share: an evidence list, and small components."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from protocol.evidence import Event, declare
from protocol.ports import ActorHandle, backend, data_call

declare("test.mark", "component", "A mark that a test component makes.", what="str: which")


class Evidence:
    """A recorder that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def fates(self) -> list[str]:
        return [event.data["fate"] for event in self.of("call.fate")]


class Echo:
    """Answers, and remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def echo(self, value: Any) -> Any:
        self.seen.append(value)
        return value

    async def history(self) -> list[Any]:
        return self.seen

    async def slow(self, duration_s: float) -> str:
        await asyncio.sleep(duration_s)
        return "done"

    async def at(self) -> float:
        return asyncio.get_running_loop().time()

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    @data_call
    async def data(self, value: Any) -> Any:
        self.seen.append(value)
        return value


class Chain:
    """Marks, calls the next one, and marks again."""

    def __init__(self, following: ActorHandle | None) -> None:
        self.following = following

    async def go(self, what: str) -> None:
        backend().emit("test.mark", what=f"{what} in")
        if self.following is not None:
            await self.following.go(what)
        backend().emit("test.mark", what=f"{what} out")


class Immortal:
    """Tries everything that it can after its own death, in the very step of it and in ``finally``."""

    def __init__(self, echo: ActorHandle) -> None:
        self.echo = echo

    async def _act(self, when: str) -> None:
        world = backend()
        world.emit("test.mark", what=when)
        self.echo.echo(when)
        world.new_id("req")
        asyncio.get_running_loop().call_later(0.01, self._timer, when)
        asyncio.get_running_loop().call_soon(self._timer, when)
        asyncio.get_running_loop().create_task(world.storage.write(when, b"x"))
        asyncio.get_running_loop().create_task(world.spawn(Echo, name=f"child-{when}"))
        asyncio.get_running_loop().create_task(world.kill(self.echo))

    def _timer(self, when: str) -> None:
        self.echo.echo(f"timer {when}")
        backend().emit("test.mark", what=f"timer {when}")

    async def be_killed_at_mark(self) -> None:
        """A hook of the test kills this actor at this emission; the rest of the step must have no effect."""
        try:
            backend().emit("test.mark", what="the last")
            await self._act("after")
            await asyncio.sleep(0)
            await self._act("later")
        finally:
            await self._act("finally")

    async def wait(self) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await self._act("finally")
