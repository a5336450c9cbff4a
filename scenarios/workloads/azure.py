"""Reads the Azure LLM inference traces (2023 and 2024): ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Times have up to nine fractional digits (the 2023 files have seven) and an optional UTC offset; they are kept to the
nanosecond, as integers. Lines may end in CRLF, and the last in nothing.
"""

from __future__ import annotations

import datetime
import pathlib
import re
from collections.abc import Iterator

from scenarios.workloads.arrival import Arrival, Counts, Row, arrange, bad_row, token_count
from scenarios.workloads.table import table_rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:([+-])(\d\d):(\d\d)|Z)?", re.ASCII)


def read_azure(
    path: pathlib.Path, *, speed_up: float = 1.0, limit: int | None = None, counts: Counts | None = None
) -> Iterator[Arrival]:
    """Arrivals of an Azure LLM inference trace.

    The trace says nothing of shared prefixes, so ``prefix_blocks`` is empty.

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
    for line, (stamp, prompt, output) in table_rows(path, COLUMNS):
        yield Row(
            _nanoseconds(path, line, stamp),
            line,
            token_count(path, line, COLUMNS[1], prompt, least=1),
            token_count(path, line, COLUMNS[2], output, least=0),
        )


def _nanoseconds(path: pathlib.Path, line: int, text: str) -> int:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        bad_row(path, line, COLUMNS[0], text, "is no time; write it as 2023-11-16 18:17:03.9799600")
    day, hour, minute, second, fraction, sign, offset_hour, offset_minute = found.groups()
    try:
        ordinal = datetime.date.fromisoformat(day).toordinal()
    except ValueError:
        bad_row(path, line, COLUMNS[0], text, "has a day that no month has")
    if int(hour) > 23 or int(minute) > 59 or int(second) > 59:
        bad_row(path, line, COLUMNS[0], text, "has a time of day that no day has")
    seconds = ordinal * 86_400 + int(hour) * 3600 + int(minute) * 60 + int(second)
    if sign is not None:
        offset = int(offset_hour) * 3600 + int(offset_minute) * 60
        seconds += -offset if sign == "+" else offset
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
