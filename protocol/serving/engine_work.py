"""What an engine says of its work on its page of metrics: does anything run or wait there? (Names: SGLang's.)"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.prometheus import as_float, families

# Nothing in these: the engine says that it has nothing to do. The gauges of a stuck scheduler are old ones; the count
# of open HTTP requests is the server's own, but leaves out streams, and has the requests of whoever asks (GET) in it.
AT_WORK = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:http_requests_active")


def figures(page: str, names: tuple[str, ...]) -> dict[str, float]:
    """The sums of some metrics of a page, GET requests left out. Raises ValueError: it is no page of metrics."""
    totals: dict[str, float] = {}
    for name, value in _samples(page, names):
        totals[name] = totals.get(name, 0.0) + value
    return totals


def says_idle(totals: dict[str, float]) -> bool:
    """Whether nothing runs and nothing waits; an engine that does not say so is not idle."""
    return all(totals.get(name) == 0 for name in AT_WORK)


def _samples(page: str, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for family in families(page):
        for sample in family.samples:
            if sample.name in names and sample.labels.get("method") != "GET":
                yield sample.name, as_float(sample.value)
