"""An emulated engine of the tests' own: a process, its address, and short-hands for its routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp

ROOT = pathlib.Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quick_profile(folder: pathlib.Path) -> str:
    """The profile ``tiny-cpu`` with a start-up of 0.2 s."""
    text = (ROOT / "sim" / "profiles" / "tiny-cpu.yaml").read_text(encoding="utf-8")
    changed = text.replace("startup: {value: 2,", "startup: {value: 0.2,")
    assert changed != text
    path = folder / "quick.yaml"
    path.write_text(changed, encoding="utf-8")
    return str(path)


class Emulated:
    """One process. ``url`` is where it listens once it is ready."""

    def __init__(self, profile: str, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "real.emulated", "--profile", profile, "--port", str(self.port), *arguments]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_ready(self, within_s: float = 30.0) -> None:
        while not self.listens():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() - self.began < within_s, "does not listen"
            time.sleep(0.01)

    def child(self, part: str) -> int:
        """Process id of a child by its title."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        titles = {
            pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(): int(pid) for pid in children
        }
        return titles[f"sglang::{part}"]

    def signal(self, number: signal.Signals, part: str = "main") -> None:
        os.kill(self.process.pid if part == "main" else self.child(part), number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def emulated(profile: str, *arguments: str, ready: bool = True) -> Iterator[Emulated]:
    engine = Emulated(profile, *arguments)
    try:
        if ready:
            engine.wait_ready()
        yield engine
    finally:
        engine.close()


class Client:
    """What the tests ask of one engine, each on a connection of its own."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, route: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.url + route, json={} if body is None else body) as answer:
            return answer.status, _content(await answer.text())

    async def get(self, route: str) -> tuple[int, Any]:
        async with self.session.get(self.url + route) as answer:
            return answer.status, _content(await answer.text())

    async def generate(self, prompt: list[int], new: int = 8, **more: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0} | more.pop("sampling", {})
        status, answer = await self.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def events(self, route: str, body: dict[str, Any]) -> AsyncIterator[str]:
        """The data of each event of a stream."""
        async with self.session.post(self.url + route, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            async for line in answer.content:
                if line.strip():
                    assert line.startswith(b"data: ")
                    yield line[6:].decode().rstrip("\n")


def _content(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def talk(engine: Emulated, body: Any) -> Any:
    """``await body(client)`` with a client of ``engine``."""

    async def run() -> Any:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(100):
            return await body(Client(engine.url, session))

    return asyncio.run(run())
