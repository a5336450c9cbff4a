"""What an HTTP server counts of its requests, as a Prometheus page, together with a page that its handlers gave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from protocol.prometheus import families
from protocol.serving.http import PROMETHEUS, HttpAnswer

_OTHER = "other"  # any path without a handler: clients must not be able to make as many series as they like
_GONE = 499
"""The status of a request whose client went away before its answer."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Seen:
    """One request under way. ``status`` is set when its answer has been given."""

    __slots__ = ("status",)

    def __init__(self) -> None:
        self.status = _GONE


class HttpMetrics:
    """Counts requests.

    Args:
        paths: the routes that are told apart.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "seatrial_http_requests",
            "Requests by status: 499 the client left, 5xx also of a stream that broke.",
            ("route", "status"),
            registry=self._registry,
        )
        self._open = Gauge("seatrial_http_open_requests", "Requests under way.", ("route",), registry=self._registry)
        self._seconds = Histogram(
            "seatrial_http_request_duration_seconds", "From the head of a request to the end of its answer.",
            ("route",), buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip

    @contextlib.contextmanager
    def request(self, path: str) -> Iterator[Seen]:
        """Around one request, the sending of its answer included."""
        route = path if path in self._paths else _OTHER
        seen = Seen()
        begun = time.monotonic()
        self._open.labels(route).inc()
        try:
            yield seen
        finally:
            self._open.labels(route).dec()
            self._requests.labels(route, str(seen.status)).inc()
            self._seconds.labels(route).observe(time.monotonic() - begun)

    def page(self, text: str) -> HttpAnswer:
        """The page of the server with another one in front of it. Raises ValueError for text that is no such page."""
        own = list(self._registry.collect())
        for family in own:  # when each series was first seen is of no use to anybody here, and doubles the page
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        page = generate_latest(_Families([*families(text), *own]))
        return HttpAnswer(200, page.decode(), PROMETHEUS)


class _Families(CollectorRegistry):
    """Families that have been collected already."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
