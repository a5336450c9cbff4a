"""Evidence as pandas tables. For looking; no verdict is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from analysis.errors import BadInput, unknown_kind
from analysis.rundir import RunDir
from protocol.evidence import KINDS, Event

if TYPE_CHECKING:
    import pandas as pd

# pandas is imported where it is used: a verdict must not need it.


def event_rows(events: Iterable[Event], kind: str | None = None) -> Iterator[dict[str, Any]]:
    """One flat row an event: the envelope, then the fields of its kind."""
    for event in events:
        if kind is None or event.kind == kind:
            yield {
                "seq": event.seq,
                "t_s": event.t_s,
                "kind": event.kind,
                "actor": event.actor,
                "inc": event.inc,
                **event.data,
            }


def request_rows(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """One row a request, in the order in which they ended; those that never ended come last."""
    open_requests: dict[str, dict[str, Any]] = {}
    for event in events:
        data = event.data
        if event.kind == "request.sent":
            open_requests[data["request"]] = {**data, "sent_s": event.t_s}
        elif event.kind == "request.done" and data["request"] in open_requests:
            row = open_requests.pop(data["request"])
            yield {**row, **data, "done_s": event.t_s, "latency_s": event.t_s - row["sent_s"]}
    for row in open_requests.values():
        yield {**row, "outcome": "open"}


def fault_rows(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """One row a fault."""
    open_faults: dict[int, dict[str, Any]] = {}
    for event in events:
        data = event.data
        if event.kind == "fault.injected":
            open_faults[data["fault"]] = {
                "fault": data["fault"],
                "name": data["name"],
                "target": data["target"],
                "from_s": event.t_s,
            }
        elif event.kind == "fault.healed" and data["fault"] in open_faults:
            row = open_faults.pop(data["fault"])
            yield {**row, "to_s": event.t_s, "hits": data["hits"], "satisfied": data["satisfied"]}
    yield from open_faults.values()


def version_rows(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """One row a span of tokens that an engine made: which weights, when, how many tokens."""
    for event in events:
        if event.kind == "engine.finished":
            for version, start, end, weight_hash in event.data["spans"] or ():
                yield {
                    "t_s": event.t_s,
                    "replica": event.actor,
                    "inc": event.inc,
                    "request": event.data["request"],
                    "version": version,
                    "weight_hash": weight_hash,
                    "tokens": end - start,
                }


_ROWS = {"requests": request_rows, "faults": fault_rows, "versions": version_rows, "events": event_rows}
TABLES = tuple(_ROWS)


def rows(directory: RunDir, table: str, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Stream the rows of a table.

    Args:
        table: one of TABLES.
        kind: for ``events`` only: the event kind.

    Raises:
        BadInput: unknown table or kind, or the events cannot be read.
    """
    if table not in _ROWS:
        raise BadInput(f"table {table!r} is unknown; known are {', '.join(TABLES)}")
    if kind is not None and kind not in KINDS:
        raise BadInput(unknown_kind(kind, KINDS))
    if kind is not None and table != "events":
        raise BadInput(f"--kind goes with the table 'events', not with {table!r}")
    reader = directory.read_events()
    return event_rows(reader, kind) if table == "events" else _ROWS[table](reader)


def frame(directory: RunDir, table: str, kind: str | None = None) -> pd.DataFrame:
    """A table as a DataFrame. Holds it whole in memory; raises as :func:`rows`."""
    import pandas as pd

    return pd.DataFrame(list(rows(directory, table, kind)))
