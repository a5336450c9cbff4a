"""Reads Mooncake's JSON lines: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

``hash_ids`` name the prompt's blocks of ``BLOCK_TOKENS`` tokens, the last one usually partial; equal ids are equal
text after an equal prefix. They become ``prefix_blocks`` and drive the prefix cache of the engines.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from decimal import Decimal

from analysis.errors import BadInput
from scenarios.workloads.arrival import Arrival, Counts, Row, arrange, bad_row, check_count
from scenarios.workloads.table import open_lines

BLOCK_TOKENS = 512
_BLOCK_IDS = 1 << 63
_LATEST_MS = 10**16  # times of the epoch, too, though they count from the first row
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_mooncake(
    path: pathlib.Path, *, speed_up: float = 1.0, limit: int | None = None, counts: Counts | None = None
) -> Iterator[Arrival]:
    """Arrivals of a Mooncake trace.

    Args:
        path: the JSONL file.
        speed_up: 2.0 halves every time between arrivals.
        limit: at most this many arrivals.
        counts: filled with what was read and passed over.

    Raises:
        BadInput: the file cannot be read, or a row is bad; the message names file, line, key and value.
    """
    counts = counts if counts is not None else Counts()
    return arrange(_rows(path), path, "timestamp", speed_up=speed_up, limit=limit, counts=counts)


def _rows(path: pathlib.Path) -> Iterator[Row]:
    decode = json.JSONDecoder(parse_float=Decimal).decode  # json.loads would make a decoder for every line
    for line, text in open_lines(path):
        if not text or text.isspace():
            continue
        try:
            row = decode(text)
        except json.JSONDecodeError as error:
            what = f"no JSON ({error.msg}); each line is one JSON object"
            bad_row(path, line, f"character {error.colno}", text[error.pos : error.pos + 20], what)
        except (ValueError, ArithmeticError, RecursionError) as error:  # beyond what Python reads
            what = "nested too deeply" if isinstance(error, RecursionError) else "a number is too long or too large"
            raise BadInput(f"{path}:{line}: {what}; correct or remove the row") from error
        if not isinstance(row, dict):
            bad_row(path, line, _KEYS[0], row, "the line is no JSON object")
        try:
            timestamp, input_length = row["timestamp"], row["input_length"]
            output_length, blocks = row["output_length"], row["hash_ids"]
        except KeyError as error:
            bad_row(path, line, error.args[0], "", f"the key is missing; each line needs {', '.join(_KEYS)}")
        for block in blocks if type(blocks) is list else (None,):
            if type(block) is not int or not 0 <= block < _BLOCK_IDS:
                bad_row(path, line, "hash_ids", blocks, "must be a list of whole numbers, none negative, below 2**63")
        prompt = _integer(path, line, "input_length", input_length, least=1)
        if len(blocks) * BLOCK_TOKENS >= prompt + BLOCK_TOKENS:
            fix = f"{len(blocks)} blocks of {BLOCK_TOKENS} tokens are more than the {prompt} tokens of input_length"
            bad_row(path, line, "hash_ids", blocks, fix)
        yield Row(
            _milliseconds(path, line, timestamp),
            line,
            prompt,
            _integer(path, line, "output_length", output_length, least=0),
            tuple(blocks),
        )


def _integer(path: pathlib.Path, line: int, key: str, value: object, *, least: int) -> int:
    if type(value) is not int:
        bad_row(path, line, key, value, "is no count of tokens; write a whole number")
    return check_count(path, line, key, value, least=least)


def _milliseconds(path: pathlib.Path, line: int, value: object) -> int:
    if type(value) is int and 0 <= value <= _LATEST_MS:
        return value * 1_000_000
    if isinstance(value, Decimal) and value.is_finite() and 0 <= value <= _LATEST_MS:
        return int(value * 1_000_000)
    bad_row(path, line, "timestamp", value, f"must be milliseconds since the start, from 0 to {_LATEST_MS}")
