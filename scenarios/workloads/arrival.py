"""An arrival, and what every source of arrivals shares: errors that name the row, ordering, speed-up, limit.

A source is an iterator. Nothing here holds more than ``REORDER_WINDOW`` arrivals, so a trace of any length costs the
same memory.
"""

from __future__ import annotations

import pathlib
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple, NoReturn, Protocol

from analysis.errors import BadInput

REORDER_WINDOW = 1024
"""Rows within which times may be out of order. Wider disorder is an error: a stream cannot be sorted as a whole."""

MAX_TOKENS = 2**31 - 1
LONGEST_S = 10**9
"""No arrival is later after the first one. Some thirty years: beyond, a time is a slip of the pen."""

_TOO_MANY = f"must not exceed {MAX_TOKENS}; correct or remove the row"
_MOST_DIGITS = 10  # those of MAX_TOKENS; Python refuses to read numbers of some thousand


class Arrival(NamedTuple):
    """One request of a workload.

    Args:
        t_ns: nanoseconds since the start of the workload.
        prompt_tokens: tokens of the prompt, at least 1.
        output_tokens: tokens that will be generated, at least 1.
        prefix_blocks: ids of the prompt's leading blocks; equal ids are equal text. Empty: shares nothing.
        session: id of the session it belongs to, empty for none.
    """

    t_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    session: str = ""


class Stream(Protocol):
    """What a drawn workload needs of a random stream (``sim.random.Stream`` is one)."""

    def below(self, n: int) -> int: ...

    def exponential(self, mean: float) -> float: ...

    def lognormal(self, median: float, sigma: float) -> float: ...


class Counts:
    """What a reader passed over, for the summary of the run."""

    __slots__ = ("rows", "zero_output")

    def __init__(self) -> None:
        self.rows = 0
        self.zero_output = 0


def bad_row(path: pathlib.Path, line: int, column: str, value: object, fix: str) -> NoReturn:
    """Raise the one error of a bad row: file, line, column, value and what to do.

    Raises:
        BadInput: always.
    """
    shown = str(value) if isinstance(value, Decimal) else repr(value)
    raise BadInput(f"{path}:{line}: column {column!r}: {shown if len(shown) <= 80 else shown[:77] + '...'}: {fix}")


def token_count(path: pathlib.Path, line: int, column: str, text: str, *, least: int) -> int:
    """A count of tokens from text. Raises BadInput naming the row."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()):
        bad_row(path, line, column, text, "is no count of tokens; write a whole number without sign")
    if len(digits.lstrip("0")) > _MOST_DIGITS:
        bad_row(path, line, column, text, _TOO_MANY)
    return check_count(path, line, column, int(digits), least=least)


def check_count(path: pathlib.Path, line: int, column: str, count: int, *, least: int) -> int:
    """A count of tokens within its bounds. Raises BadInput naming the row."""
    if count < least:
        bad_row(path, line, column, count, f"must be at least {least}; correct or remove the row")
    if count > MAX_TOKENS:
        bad_row(path, line, column, count, _TOO_MANY)
    return count


class Row(NamedTuple):
    """One good row of a trace file, its time not yet relative to the first."""

    t_ns: int
    line: int
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    session: str = ""


def arrange(
    rows: Iterable[Row], path: pathlib.Path, column: str, *, speed_up: float, limit: int | None, counts: Counts
) -> Iterator[Arrival]:
    """Turn rows into arrivals: in order of time (file order where times are equal), relative to the first, sped up.

    Rows with zero output tokens are passed over and counted in ``counts.zero_output``: a generation of no token is no
    request that an engine could answer (BurstGPT marks failed requests so). ``limit`` counts arrivals.

    Raises:
        BadInput: a row lies further back in time than ``REORDER_WINDOW`` rows can mend, or no row is left.
    """
    pace = Fraction(str(speed_up))
    multiply, divide = pace.denominator, pace.numerator
    window: deque[Row] = deque()  # by (t_ns, line): equal times keep the order of the file
    first: int | None = None
    latest = 0
    given = 0

    def emit(row: Row) -> Arrival:
        nonlocal first, latest
        if first is None:
            first = row.t_ns
        elif row.t_ns < latest:
            early = f"is {(latest - row.t_ns) / 1e9:g} s earlier than a row more than {REORDER_WINDOW} rows before it"
            raise BadInput(f"{path}:{row.line}: column {column!r}: {early}; sort the file by time")
        latest = row.t_ns
        since = (row.t_ns - first) * multiply // divide
        if since > LONGEST_S * 1_000_000_000:
            late = f"is more than {LONGEST_S} s after the first row"
            raise BadInput(f"{path}:{row.line}: column {column!r}: {late}; correct or remove the row")
        return Arrival(since, row.prompt_tokens, row.output_tokens, row.prefix_blocks, row.session)

    for row in rows:
        counts.rows += 1
        if not row.output_tokens:
            counts.zero_output += 1
            continue
        if not window or row.t_ns >= window[-1].t_ns:
            window.append(row)
        else:
            insort(window, row)
        if len(window) > REORDER_WINDOW:
            yield emit(window.popleft())
            given += 1
            if given == limit:
                return
    while window:
        yield emit(window.popleft())
        given += 1
        if given == limit:
            return
    if not given:
        raise BadInput(f"{path}: has no row with output tokens; name a trace with requests in it")
