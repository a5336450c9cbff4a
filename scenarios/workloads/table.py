"""Rows of a CSV file with named columns, streamed, with errors that name the line."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Iterator, Sequence

from analysis.errors import BadInput
from scenarios.workloads.arrival import bad_row

LONGEST_LINE = 1 << 20  # a thousand times the longest of the public traces


def table_rows(path: pathlib.Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(line number, the values of ``columns`` in that order) of every row that is not blank.

    Further columns are allowed, in any order, and passed over. LF and CRLF both end a line.

    Raises:
        BadInput: the file cannot be read, has no header with these columns, or a row is short, long or no CSV.
    """
    for line, text in open_lines(path, header=True):
        try:
            names = [name.strip() for name in next(csv.reader([text], strict=True), [])]
        except csv.Error as error:
            raise BadInput(f"{path}:{line}: the header is no row of CSV ({_said(error)})") from error
        for column in columns:
            if names.count(column) != 1:
                wrong = f"has {'several columns' if column in names else 'no column'} {column!r}"
                raise BadInput(
                    f"{path}:{line}: the header {wrong} (found: {_shown(names)}); each of {', '.join(columns)} is "
                    "needed once"
                )
        break
    else:
        raise BadInput(f"{path}: is empty; a header line with {', '.join(columns)} is needed")
    places = [names.index(column) for column in columns]
    straight = places == list(range(len(names)))
    for line, text in open_lines(path):
        if line == 1 or not text or text.isspace():
            continue
        if '"' in text:
            try:
                values = next(csv.reader([text], strict=True))
            except csv.Error as error:
                raise BadInput(f"{path}:{line}: no row of CSV ({_said(error)}); each row is one line") from error
        else:
            values = text.split(",")
        if len(values) != len(names):
            column = names[len(values)] if len(values) < len(names) else f"number {len(names) + 1}"
            bad_row(path, line, column, text, f"the row has {len(values)} values, the header {len(names)} columns")
        yield line, values if straight else [values[place] for place in places]


def _said(error: csv.Error) -> str:
    return "it ends in a carriage return alone" if "new-line" in str(error) else str(error)


def _shown(names: list[str]) -> str:
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."


def open_lines(path: pathlib.Path, *, header: bool = False) -> Iterator[tuple[int, str]]:
    """(line number, text without its end) of a UTF-8 file. ``header``: the first line alone.

    Raises:
        BadInput: the file is absent, unreadable or no UTF-8, or a line is longer than ``LONGEST_LINE`` bytes.
    """
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(raw) > LONGEST_LINE:
                    fix = "a trace has one request a line"
                    raise BadInput(f"{path}:{number}: the line is longer than {LONGEST_LINE} bytes; {fix}")
                if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                    raw = raw[3:]
                try:
                    text = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise BadInput(
                        f"{path}:{number}: byte {error.start + 1} is no UTF-8; save the file as UTF-8 text"
                    ) from error
                yield number, text.rstrip("\r\n")
                if header:
                    return
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file; name an existing trace") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
