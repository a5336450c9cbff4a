"""Collects the metrics of one service's replicas, all at once every interval, and makes frames of them.

Source: scaling.md 6.2. A replica that does not answer, or not with a page, is in the frame as one of which nothing is
known. One that hangs takes one interval at most, and delays no other service: each has a collector of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from protocol.errors import SeatrialError
from protocol.messages import EngineAddress
from protocol.ports import backend
from protocol.scaling.metrics import (
    HISTOGRAMS,
    Frame,
    HistogramWindow,
    Page,
    Reading,
    aggregate,
    empty_frame,
    read_page,
)
from protocol.scaling.policy import AutoscalerConfig
from protocol.scaling.targets import ServiceTarget

_LONGEST_SCRAPE_S = 5.0
KEPT_FRAMES: Final = 1000


class Collector:
    """The collector of one service. A part of the Autoscaler.

    Args:
        service: its name.
        target: who is asked for the replicas.
        config: interval and window.
    """

    def __init__(self, service: str, target: ServiceTarget, config: AutoscalerConfig) -> None:
        self._service = service
        self._target = target
        self._interval_s = config.metrics_interval_secs
        self._stale_s = 2 * config.evaluation_interval_secs
        self._window_s = config.condition_window_secs
        self._windows: dict[str, dict[str, HistogramWindow]] = {}  # replica -> field -> window
        self._throughputs: deque[float] = deque(maxlen=10)
        self._task: asyncio.Task[None] | None = None
        self.frames: deque[Frame] = deque(maxlen=KEPT_FRAMES)
        """Oldest first."""
        self.current: int | None = None
        """Replicas in all, as the service says; None before it has said so."""
        self.refusal = ""
        """Why this service cannot be decided on."""
        self.last_error = ""
        """What broke the latest round."""

    async def start(self) -> None:
        """Take a first frame, then one every interval. What breaks the first one is raised."""
        await self.collect()
        name = f"metrics-{self._service}"
        self._task = backend().periodic(self._interval_s, self._round, name=name)

    async def _round(self) -> None:
        """One frame. A round that breaks is noted, and nothing is known: it must not take other services down."""
        try:
            await self.collect()
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            self._keep(empty_frame(self._windows, _now(), backend().wall_time()))
        else:
            self.last_error = ""

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def latest(self, now_s: float) -> Frame:
        """The latest frame; an empty one where that is too old to say anything of now."""
        if self.frames and now_s - self.frames[-1].taken_s <= self._stale_s:
            return self.frames[-1]
        return empty_frame(self._windows, now_s, backend().wall_time())

    async def collect(self) -> None:
        """Take one frame."""
        limit_s = min(self._interval_s, _LONGEST_SCRAPE_S)
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._target.engines()
        except (SeatrialError, TimeoutError):
            self._keep(empty_frame(self._windows, _now(), backend().wall_time()))
            return
        body: object = reply.body
        addresses = self._listed(body if reply.status == 200 and isinstance(body, Mapping) else {})
        self._windows = {name: self._windows.get(name) or self._new_windows() for name in addresses}
        pages = await asyncio.gather(*(self._scrape(address, limit_s) for address in addresses.values()))
        now_s = _now()
        replicas = {
            name: None if page is None else self._readings(name, page, now_s)
            for name, page in zip(addresses, pages, strict=True)
        }
        self._keep(aggregate(replicas, tuple(self._throughputs), now_s, backend().wall_time()))

    def _keep(self, frame: Frame) -> None:
        if frame.total_throughput is not None:
            self._throughputs.append(frame.total_throughput)
        self.frames.append(frame)

    def _new_windows(self) -> dict[str, HistogramWindow]:
        return {field: HistogramWindow(self._window_s) for field in HISTOGRAMS}

    def _listed(self, body: Mapping[str, Any]) -> dict[str, EngineAddress]:
        """The replicas of an answer to /engines, by ``host:port``."""
        instances = body.get("instances")
        if isinstance(instances, Mapping):
            if len(instances) != 1:
                self.refusal = f"it has {len(instances)} instances; one autoscaler target is one instance"
                return {}
            only = next(iter(instances.values()))
            body = only if isinstance(only, Mapping) else {}
        self.refusal = ""
        current = body.get("current")
        self.current = current if type(current) is int else None
        listed = body.get("engines")
        found = {}
        for one in listed if isinstance(listed, list) else ():
            host, port = (one.get("host"), one.get("port")) if isinstance(one, Mapping) else (None, None)
            if isinstance(host, str) and isinstance(port, int):
                found[f"{host}:{port}"] = EngineAddress(f"{host}:{port}", 0, host, port)
        return found

    async def _scrape(self, address: EngineAddress, limit_s: float) -> Page | None:
        try:
            client = backend().engines.client(address)
            status, text = await client.get("/metrics", connect_timeout_s=limit_s, read_timeout_s=limit_s)
            return read_page(text) if status == 200 else None
        except (SeatrialError, ValueError):
            return None

    def _readings(self, name: str, page: Page, now_s: float) -> dict[str, Reading]:
        found = {field: Reading(value, now_s, 1) for field, value in page.gauges.items()}
        for field, window in self._windows[name].items():
            if field in page.histograms:
                window.add(now_s, page.histograms[field])
            reading = window.p95(now_s)
            if reading is not None:
                found[field] = reading
        return found


def _now() -> float:
    return asyncio.get_running_loop().time()
