"""What an engine says of its work: does anything run or wait there? (Names: SGLang's.)"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.errors import BarrierError, HttpError, Outcome
from protocol.ports import EngineClient
from protocol.prometheus import as_float, families
from protocol.serving.admin import FLUSH, post_once

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


async def found_idle(client: EngineClient, limit_s: float) -> bool:
    """Ask an engine whether nothing runs there and nothing waits. False: something does, or that is not known now.

    Its page of metrics says so. Where that lacks a gauge, the flush of its prefix cache does: the scheduler makes it
    only when it has nothing to do (serving.md 9.2, engines.md 3), unless it is paused, when it may hold requests back.
    /v1/loads does not: it shows what the scheduler last reported, from before a long prefill, say.

    Args:
        client: of the engine.
        limit_s: longest time to connect, and longest wait for an answer, of each of up to three requests.

    Raises:
        NetworkError: the engine was not reached, or did not answer.
        BarrierError: *not done*: it has no way to say so as it is; the text names what is missing.
    """
    status, page = await client.get("/metrics", connect_timeout_s=limit_s, read_timeout_s=limit_s)
    try:
        totals = figures(page, AT_WORK) if status == 200 else {}
    except ValueError:
        totals = {}
    if says_idle(totals):
        return True
    if any(total > 0 for total in totals.values()):
        return False
    missing = [name for name in AT_WORK if totals.get(name) != 0]  # NaN is no evidence either
    ready, _ = await client.get("/ready", connect_timeout_s=limit_s, read_timeout_s=limit_s)
    if ready != 200:
        raise _mute(client, missing, f"GET /ready answers {ready}: a flush would not tell what a pause holds back")
    try:
        reply = await post_once(
            client.address.name,
            FLUSH,
            lambda: client.post(FLUSH, {}, connect_timeout_s=limit_s, read_timeout_s=limit_s),
            connect_attempts=1,
            backoff_s=0.0,
        )
        status, success = reply.status, reply.success
    except HttpError as error:
        status, success = int(error.fields["status"]), False
    if status == 400 or status >= 500:
        return False  # refused, as by one that has something to do; or failed
    if not success:
        raise _mute(client, missing, f"POST {FLUSH} answers {status}")
    return True


def _mute(client: EngineClient, missing: list[str], why: str) -> BarrierError:
    return BarrierError(
        f"{client.address.name} cannot say whether anything runs there: its page of metrics lacks "
        f"{', '.join(missing)}, and {why}. Have it say so, or replace its process",
        outcome=Outcome.NOT_DONE,
    )


def _samples(page: str, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for family in families(page):
        for sample in family.samples:
            if sample.name in names and sample.labels.get("method") != "GET":
                yield sample.name, as_float(sample.value)
