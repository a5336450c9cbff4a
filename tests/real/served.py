"""Emulated engines and our gateway in front of them, each a process of its own, for tests over HTTP."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_PATIENCE_S = 60.0


class Process:
    """A process of the project that listens somewhere. Its output goes to ``log``."""

    def __init__(self, arguments: list[str], log: pathlib.Path) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.url = ""

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self._popen.wait(_PATIENCE_S)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def until_ready(self) -> None:
        """Wait for GET /ready to answer 200. Ends it where that does not come."""
        ends = time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends:
            assert self._popen.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.05)
        self.end()
        raise AssertionError(f"{self.url} was not ready in time:\n{self.log.read_text()}")

    def until_says(self, pattern: str, since: int = 0) -> re.Match[str]:
        """Wait for a line of its output, after as many characters of it. Ends it where that does not come."""
        ends = time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends:
            if found := re.compile(pattern).search(self.log.read_text(), since):
                return found
            assert self._popen.poll() is None, self.log.read_text()
            time.sleep(0.05)
        self.end()
        raise AssertionError(f"no {pattern!r} in time:\n{self.log.read_text()}")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def start_engine(folder: pathlib.Path, port: int | None = None, *, request_log: pathlib.Path | None = None) -> Process:
    """An emulated engine that starts in a second."""
    port = free_port() if port is None else port
    where = ["--profile", "qwen3-0.6b-rtx4090", "--startup-s", "1", "--port", str(port)]
    if request_log is not None:
        where += ["--request-log", str(request_log)]
    engine = Process(["real.emulated", *where], folder / f"engine-{port}-{time.monotonic_ns()}.log")
    engine.url = f"http://127.0.0.1:{port}"
    return engine


def start_gateway(folder: pathlib.Path, engines: list[Process], *arguments: str) -> Process:
    """``python -m real.serve`` in front of engines; it listens when this returns."""
    named = [part for engine in engines for part in ("--engine", engine.url)]
    gateway = Process(["real.serve", *named, *arguments], folder / f"serve-{time.monotonic_ns()}.log")
    gateway.url = gateway.until_says(r"serving on (http://\S+) ").group(1)
    return gateway


@contextlib.contextmanager
def fleet(folder: pathlib.Path, count: int, *arguments: str) -> Iterator[tuple[Process, list[Process]]]:
    """(gateway, engines), all routed to; ended with the block."""
    with contextlib.ExitStack() as stack:
        engines = [start_engine(folder) for _ in range(count)]
        for engine in engines:
            stack.callback(engine.end)
        gateway = start_gateway(folder, engines, *arguments)
        stack.callback(gateway.end)
        for engine in engines:
            gateway.until_says(f"{engine.url.removeprefix('http://')} is routed to")
        yield gateway, engines
