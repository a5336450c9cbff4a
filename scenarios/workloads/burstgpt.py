"""Reads BurstGPT's CSV: ``Timestamp`` (seconds), ``Request tokens``, ``Response tokens``; the rest is passed over.

Zero response tokens mark requests that failed at the service; they are passed over and counted, as in every trace.
``Session ID`` (in the later releases) becomes the session.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from decimal import Decimal

from scenarios.workloads.arrival import Arrival, Counts, Row, arrange, bad_row, token_count
from scenarios.workloads.table import open_lines, table_rows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION = "Session ID"
_SECONDS = re.compile(r"\d{1,12}(\.\d*)?([eE][-+]?\d{1,2})?", re.ASCII)


def read_burstgpt(
    path: pathlib.Path, *, speed_up: float = 1.0, limit: int | None = None, counts: Counts | None = None
) -> Iterator[Arrival]:
    """Arrivals of a BurstGPT trace.

    Args:
        path: the CSV file.
        speed_up: 2.0 halves every time between arrivals.
        limit: at most this many arrivals.
        counts: filled with what was read and passed over.

    Raises:
        BadInput: the file cannot be read, or a row is bad; the message names file, line, column and value.
    """
    counts = counts if counts is not None else Counts()
    return arrange(_rows(path), path, COLUMNS[0], speed_up=speed_up, limit=limit, counts=counts)


def _rows(path: pathlib.Path) -> Iterator[Row]:
    header = next((text for _, text in open_lines(path, header=True)), "")
    columns = (*COLUMNS, SESSION) if SESSION in [name.strip(' "') for name in header.split(",")] else COLUMNS
    for line, values in table_rows(path, columns):
        yield Row(
            _seconds(path, line, values[0]),
            line,
            token_count(path, line, COLUMNS[1], values[1], least=1),
            token_count(path, line, COLUMNS[2], values[2], least=0),
            (),
            values[3].strip() if len(values) > 3 else "",
        )


def _seconds(path: pathlib.Path, line: int, text: str) -> int:
    if not _SECONDS.fullmatch(text.strip()):
        bad_row(path, line, COLUMNS[0], text, "must be seconds since the start, a number that is not negative")
    return int(Decimal(text.strip()) * 1_000_000_000)
