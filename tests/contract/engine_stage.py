"""What a fact about engines works with: one engine of one arm, and short-hands for what is asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from protocol.errors import NetworkError
from protocol.messages import AdminReply, EngineAddress, GenerateRequest, GenerateResult, WeightUpdate
from protocol.ports import Backend, EngineClient, EngineSpec
from protocol.training.checkpoint import MANIFEST, describe, encode_manifest

Part = Literal["main", "scheduler", "detokenizer"]
BLOCK = 32
"""Tokens of a prefix block, in the profile of the arms without a model and in the prompts of the genuine one."""
READY_WITHIN_S = 180.0


@dataclass
class Hands:
    """What no port offers: signals to an engine, by its name; its main process, None for a simulated one."""

    sigterm: Callable[[Backend, str], Awaitable[None]]
    kill: Callable[[Backend, str, Part], Awaitable[None]]
    main_pid: Callable[[Backend, str], Awaitable[int | None]]


class Stage:
    """One engine that is ready. Times are seconds.

    Args:
        token_s: about how long one output token takes, alone.
    """

    def __init__(self, backend: Backend, hands: Hands, address: EngineAddress, spec: EngineSpec) -> None:
        self.backend = backend
        self.hands = hands
        self.address = address
        self.spec = spec
        self.client: EngineClient = backend.engines.client(address)
        self.token_s = math.inf
        self.context = 0
        self._tasks: list[asyncio.Task[Any]] = []

    @classmethod
    async def open(cls, backend: Backend, hands: Hands, spec: EngineSpec, name: str) -> Stage:
        """Launch an engine and wait until it is ready."""
        stage = cls(backend, hands, await backend.engines.launch(spec, name=name), spec)
        await stage.until_ready()
        await stage.pace()
        stage.context = (await stage.page("/v1/models"))["data"][0]["max_model_len"]
        return stage

    async def pace(self) -> None:
        """Learn ``token_s``: the least of what was ever seen, since the first generation of a genuine engine is slow,
        and so is any on a busy machine."""
        for _ in range(4):
            began = self.now
            await self.client.generate(self.request(100))
            self.token_s = min(self.token_s, (self.now - began) / 100)

    async def until_ready(self) -> list[int | None]:
        """The statuses of /ready before it was 200, one for each change; None where connecting was refused."""
        seen: list[int | None] = []
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                status: int | None = None
                with contextlib.suppress(NetworkError):
                    status, _ = await self.client.get("/ready", read_timeout_s=5.0)
                if status == 200:
                    return seen
                if not seen or seen[-1] != status:
                    seen.append(status)
                await asyncio.sleep(0.02)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- asking ---

    def request(
        self, tokens: int = 8, *, prompt: int = 20, rid: str = "", blocks: tuple[int, ...] = ()
    ) -> GenerateRequest:
        return GenerateRequest(rid or self.backend.new_id("fact"), prompt, tokens, prefix_blocks=blocks)

    def lasting(self, seconds: float) -> int:
        """Output tokens that take about so long."""
        return max(2, min(round(seconds / self.token_s), self.context - 100))

    def start(self, seconds: float, *, rid: str = "") -> asyncio.Task[GenerateResult]:
        """A generation of about so long, under way in a task."""
        return self.task(self.client.generate(self.request(self.lasting(seconds), rid=rid)))

    def task(self, coroutine: Any) -> asyncio.Task[Any]:
        """A task that does not outlive the fact."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.append(task)
        return task

    async def admin(self, route: str, **body: Any) -> tuple[AdminReply, float]:
        """(the reply to a POST, how long it took)."""
        began = self.now
        reply = await self.client.post(route, body)
        return reply, self.now - began

    async def pause(self, mode: str) -> float:
        reply, took = await self.admin("/pause_generation", mode=mode)
        assert reply.status == 200, reply
        return took

    async def resume(self) -> None:
        reply, _ = await self.admin("/continue_generation")
        assert reply.status == 200, reply

    async def load(self, path: str, version: str, **more: bool) -> tuple[AdminReply, float]:
        began = self.now
        reply = await self.client.update_weights(WeightUpdate(path, version, **more))
        return reply, self.now - began

    async def page(self, route: str) -> Any:
        status, text = await self.client.get(route)
        assert status == 200, (route, status, text)
        return json.loads(text)

    async def running(self) -> int:
        """Running requests by /v1/loads."""
        return int((await self.page("/v1/loads"))["loads"][0]["num_running_reqs"])

    async def until_running(self, within_s: float = 2.0) -> None:
        """Until /v1/loads shows a running request; AssertionError after ``within_s``."""
        began = self.now
        while not await self.running():
            assert self.now - began < within_s, f"nothing runs after {within_s} s"
            await asyncio.sleep(0.02)

    async def until_idle(self, within_s: float) -> float:
        """How long until /v1/loads shows nothing running; AssertionError after ``within_s``."""
        began = self.now
        while await self.running():
            assert self.now - began < within_s, f"still running after {within_s} s"
            await asyncio.sleep(0.05)
        return self.now - began

    async def export(self, version: str) -> str:
        """Write an export of ``version`` that every arm can load; returns its path."""
        from real.tiny_model import files

        path = f"exports/{version}"
        shards = [(name, data, len(data)) for name, data in files(version).items()]
        for name, data, size in shards:
            await self.backend.storage.write(f"{path}/{name}", data, size_bytes=size)
        await self.backend.storage.write(f"{path}/{MANIFEST}", encode_manifest(describe(version, shards)))
        return path

    async def events(self, route: str, body: dict[str, Any]) -> AsyncIterator[str]:
        """The data of each event of a stream."""
        stream = self.client.forward_stream(route, json.dumps({**body, "stream": True}))
        async with contextlib.aclosing(stream):
            async for event in stream:
                yield event

    # --- between facts ---

    async def tidy(self) -> None:
        """Nothing paused, in flight or cached; the tasks of the last fact are over."""
        await self.resume()
        await self.admin("/abort_request", abort_all=True)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.until_idle(10.0)
        for _ in range(50):
            reply, _ = await self.admin("/flush_cache")
            if reply.status == 200:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"cannot flush: {reply}")
