"""What the tests of engines share: a run with stub engines, and a look at what is left of one."""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket
import stat
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from protocol.errors import NetworkError
from protocol.evidence import Event, decode
from protocol.messages import EngineAddress
from protocol.ports import EngineClient, EngineSpec
from real.engines.settings import EngineSettings
from tests.processes import is_running

if TYPE_CHECKING:
    from real.backend import RealBackend

STUB = pathlib.Path(__file__).with_name("stub_engine.py")
SPEC = EngineSpec("some-model")


def first_port() -> int:
    """Ports of this test process's own: the engines of others of this machine take the lowest free ones too.

    Without that, another's engine may take the port of one that was killed before the same name has started again.
    """
    return 30100 + 12 * (os.getpid() % 200)


def stub_settings(folder: pathlib.Path, *arguments: str) -> EngineSettings:
    """Settings of kind ``sglang`` whose interpreter runs the stub in place of ``-m sglang.launch_server``."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -I {STUB} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return EngineSettings("sglang", str(python), arguments=arguments, first_port=first_port())


def run_with_stubs(
    folder: pathlib.Path, body: Callable[[RealBackend], Coroutine[Any, Any, None]], *arguments: str
) -> list[Event]:
    """Run a driver with stub engines; returns all evidence, in order of time."""
    from real.backend import run_real

    run_real(body, folder=str(folder), engines=stub_settings(folder, *arguments))
    return events_of(folder)


def events_of(folder: pathlib.Path) -> list[Event]:
    files = sorted((folder / "events").glob("*.jsonl"))
    events = [decode(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(events, key=lambda event: (event.t_ns, event.lc))


def kinds_of(events: list[Event], actor: str, *kinds: str) -> list[Event]:
    """Events of one actor, of some kinds (all by default)."""
    return [event for event in events if event.actor == actor and (not kinds or event.kind in kinds)]


async def ready(client: EngineClient, within_s: float = 20.0) -> None:
    """Wait for /ready to answer 200."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                if (await client.get("/ready", connect_timeout_s=1.0, read_timeout_s=5.0))[0] == 200:
                    return
            except NetworkError:
                pass  # it does not listen yet
            await asyncio.sleep(0.05)


async def launched(backend: RealBackend, name: str = "genrm-0", spec: EngineSpec = SPEC) -> EngineClient:
    """Launch an engine and wait until it is ready."""
    client = backend.engines.client(await backend.engines.launch(spec, name=name))
    await ready(client)
    return client


async def until(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    """Wait for something to become true. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


def gone(pids: list[int], within_s: float = 10.0) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + within_s
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_free(address: EngineAddress) -> bool:
    """Whether somebody else can listen at an address."""
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taker.bind((address.host, address.port))
            taker.listen()
        except OSError:
            return False
    return True


def open_logs(folder: pathlib.Path) -> list[str]:
    """Files under the run's ``logs`` that some process of ours still has open."""
    found = []
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                links = [os.readlink(entry) for entry in (process / "fd").iterdir()]
            except OSError:
                continue  # it ended, or is not ours
            found += [link for link in links if link.startswith(str(folder / "logs"))]
    return found
