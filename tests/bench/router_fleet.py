"""Engines and what stands in front of them, for the comparison with sglang-router: all are processes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

from tests.bench.router_counts import Seen
from tests.real.served import ROOT, free_port

PROFILE = "qwen3-0.6b-rtx4090"
STARTUP_S = 1.0
PATIENCE_S = 30.0

TUNED = (
    "--policy", "round_robin", "--health-check-endpoint", "/ready", "--health-check-interval-secs", "1",
    "--health-check-timeout-secs", "2", "--health-failure-threshold", "3", "--health-success-threshold", "1",
    "--cb-failure-threshold", "3", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "2",
    "--cb-window-duration-secs", "10", "--worker-startup-check-interval", "1",
)  # fmt: skip
"""sglang-router as quick as its options let it be, with the probe, interval and number of failures that ours has.

Not the 1 s of ours for a probe: whatever ``--health-check-endpoint`` says, the router asks a new worker for /health
under this time-out, SGLang's takes 1 s at least, and then no worker is taken (tried). Not ``power_of_two``: that asks
for loads at a route that SGLang 0.5.23 no longer has, and says "No loads fetched from workers".
"""


@dataclasses.dataclass(frozen=True)
class Arm:
    """What stands in front: ``kind`` is ours, router or direct (nothing)."""

    name: str
    kind: str
    options: tuple[str, ...] = ()


ARMS = (
    Arm("direct", "direct"),
    Arm("ours", "ours"),
    Arm("router", "router", ("--policy", "round_robin")),
    Arm("router, tuned", "router", TUNED),
)


class Child:
    """A process with its output in a file."""

    def __init__(self, command: list[str], log: pathlib.Path) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def cpu_s(self) -> float:
        """Processor time used so far, by all its threads."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


class Engine(Child):
    """An emulated engine. ``name`` is the process: one that is started again at the same port has another."""

    def __init__(self, folder: pathlib.Path, name: str, port: int | None = None) -> None:
        self.name = name
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._requests = folder / f"{name}.requests.jsonl"
        super().__init__(
            [sys.executable, "-m", "real.emulated", "--profile", PROFILE, "--startup-s", f"{STARTUP_S:g}",
             "--port", str(self.port), "--name", name, "--request-log", str(self._requests)],
            folder / f"{name}.log",
        )  # fmt: skip

    def listening(self) -> float | None:
        """When it began to take connections, by its own log; None before."""
        for entry in self._entries():
            if entry["event"] == "listening":
                return float(entry["t"])
        return None

    def wait(self) -> None:
        within(lambda: self.listening() is not None, self, f"{self.name} listens")

    def seen(self, prefix: str) -> list[Seen]:
        """The requests whose ids begin with ``prefix``, as this process saw them."""
        found: list[Seen] = []
        open_at: dict[str, list[int]] = {}
        for entry in self._entries():
            rid = entry.get("rid", "")
            if not rid.startswith(prefix):
                continue
            if entry["event"] == "begun":
                open_at.setdefault(rid, []).append(len(found))
                found.append(Seen(self.name, rid, float(entry["t"])))
            else:
                number = open_at[rid].pop(0)
                found[number] = dataclasses.replace(found[number], status=int(entry["status"]))
        return found

    def _entries(self) -> list[dict[str, Any]]:
        if not self._requests.exists():
            return []
        lines = self._requests.read_text().split("\n")[:-1]  # what follows the last line's end was cut by a kill
        return [json.loads(line) for line in lines]


def within(true: Any, child: Child, what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for ``true()``. RuntimeError, with the process's last words, when it ends or the time does."""
    ends = time.monotonic() + patience_s
    while not true():
        if child.process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(f"not true in time: {what}\n{child.words()}")
        time.sleep(0.02)


class Front:
    """What the client asks. ``urls`` are taken in turn."""

    process: Child | None = None

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def replace(self, old: Engine, new: Engine) -> None:
        """Tell it of ``new`` and to forget ``old``."""
        self.urls = [new.url if url == old.url else url for url in self.urls]

    def retries(self) -> float:
        """Sends that were repeated, by its own count."""
        return 0.0

    def cpu_s(self) -> float:
        return self.process.cpu_s() if self.process is not None else 0.0

    def end(self) -> None:
        if self.process is not None:
            self.process.process.send_signal(signal.SIGTERM)
            try:
                self.process.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.end()


class Ours(Front):
    """``python -m real.serve`` with its defaults and the engines in a file."""

    def __init__(self, folder: pathlib.Path, engines: list[Engine]) -> None:
        self._roster = folder / "roster.txt"
        self._engines = list(engines)
        self._write()
        self.process = child = Child(
            [sys.executable, "-m", "real.serve", "--roster", str(self._roster), "--grace-s", "1"], folder / "ours.log"
        )
        named = [f"127.0.0.1:{engine.port} is routed to" for engine in engines]
        within(lambda: all(name in child.log.read_text() for name in named), child, "all engines are routed to")
        found = re.search(r"serving on (http://\S+) ", child.log.read_text())
        assert found is not None
        super().__init__([found.group(1)])

    def replace(self, old: Engine, new: Engine) -> None:
        self._engines = [new if engine is old else engine for engine in self._engines]
        self._write()
        assert self.process is not None
        child = self.process
        gone = f"127.0.0.1:{old.port} is no longer named"
        within(lambda: gone in child.log.read_text(), child, gone)

    def retries(self) -> float:
        return metric(f"{self.urls[0]}/metrics", "seatrial_gateway_retries_total")

    def _write(self) -> None:
        fresh = self._roster.with_suffix(".new")
        fresh.write_text("".join(f"{engine.url}\n" for engine in self._engines))
        fresh.rename(self._roster)


class Router(Front):
    """sglang-router, workers over its own API."""

    def __init__(self, folder: pathlib.Path, engines: list[Engine], python: str, options: tuple[str, ...]) -> None:
        port, self._pages = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        self.process = child = Child(
            [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port),
             "--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._pages), "--log-level", "warn",
             *options, "--worker-urls", *(engine.url for engine in engines)],
            folder / "router.log",
        )  # fmt: skip
        super().__init__([url])
        within(lambda: len(self._healthy()) == len(engines), child, "all workers are healthy", 60.0)

    def replace(self, old: Engine, new: Engine) -> None:
        worker = next(one["id"] for one in self._workers() if one["url"] == old.url)
        call("POST", f"{self.urls[0]}/workers", {"url": new.url})
        call("DELETE", f"{self.urls[0]}/workers/{worker}")
        assert self.process is not None
        within(lambda: old.url not in {one["url"] for one in self._workers()}, self.process, "the worker is gone")

    def retries(self) -> float:
        return metric(f"http://127.0.0.1:{self._pages}/metrics", "smg_worker_retries_total")

    def _workers(self) -> list[dict[str, Any]]:
        return list(json.loads(call("GET", f"{self.urls[0]}/workers"))["workers"])

    def _healthy(self) -> list[str]:
        try:
            return [one["url"] for one in self._workers() if one["is_healthy"]]
        except OSError:
            return []


def front(arm: Arm, folder: pathlib.Path, engines: list[Engine], python: str) -> Front:
    """Start what stands in front; it routes to all engines when this returns."""
    if arm.kind == "direct":
        return Front([engine.url for engine in engines])
    return Ours(folder, engines) if arm.kind == "ours" else Router(folder, engines, python, arm.options)


def call(method: str, url: str, body: Any = None) -> str:
    """The text of an answer. OSError where there is none, or one that is no success."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def metric(url: str, name: str) -> float:
    """The sum over all series of a counter; 0 where it has none yet."""
    lines = [line for line in call("GET", url).splitlines() if re.match(rf"{name}[{{ ]", line)]
    return sum(float(line.rsplit(None, 1)[-1]) for line in lines)
