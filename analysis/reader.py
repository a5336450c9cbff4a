"""Reading evidence back: a stream of events, a tolerated cut last line, a bad line by its number, changed bytes.

Source: DESIGN.md, "Evidence and verdicts".
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from analysis.errors import BadInput
from protocol.evidence import KINDS, Event, decode

_CHUNK = 1 << 20
_DATA_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "int?": (int, type(None)),
    "float?": (float, int, type(None)),
    "str?": (str, type(None)),
    "json": (object,),
}


class EventReader:
    """The events of one ``events.jsonl``, in file order; iterate once.

    Args:
        path: the file.

    After the iteration ``cut`` holds the reason if the last line was cut short (a process killed in the middle of a
    write leaves such a line), else "". ``lines`` is the number of whole lines read.

    Raises:
        BadInput: the file cannot be read, or a line that is not the last is no event of the schema.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.cut = ""
        self.lines = 0

    def __iter__(self) -> Iterator[Event]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read ({error.strerror}); name a run directory") from error
        last_seq = -1
        with file:
            for line in file:
                if not line.endswith(b"\n"):
                    # Every event is written with its newline in one piece, so only a cut write lacks it.
                    self.cut = f"{self.path}: line {self.lines + 1} is cut short after {len(line)} bytes"
                    return
                event = self._parse(line)
                if event.seq <= last_seq:
                    raise self._bad(f"seq {event.seq} does not rise (the line before has {last_seq})")
                last_seq = event.seq
                self.lines += 1
                yield event

    def _parse(self, line: bytes) -> Event:
        try:
            event = decode(line)
        except ValueError as error:
            raise self._bad(f"not an event ({error})") from error
        kind = KINDS.get(event.kind)
        if kind is None:
            raise self._bad(f"kind {event.kind!r} is not declared in protocol/evidence.py; written by another version?")
        data = event.data
        if not isinstance(data, dict) or data.keys() != kind.fields.keys():
            have = sorted(data) if isinstance(data, dict) else data
            raise self._bad(f"{event.kind} has fields {have}; declared are {sorted(kind.fields)}")
        for field, (type_, _) in kind.fields.items():
            value = data[field]
            if not isinstance(value, _DATA_TYPES[type_]) or (type_ in ("int", "int?") and isinstance(value, bool)):
                raise self._bad(f"{event.kind}.{field} is {value!r}; declared as {type_}")
        for name in ("seq", "t_ns", "inc", "n", "lc"):
            if type(getattr(event, name)) is not int:
                raise self._bad(f"{name} is {getattr(event, name)!r}; must be a whole number")
        if event.cause is not None and (not isinstance(event.cause, str) or event.cause.count("/") < 2):
            raise self._bad(f"cause is {event.cause!r}; must be actor/incarnation/n")
        return event

    def _bad(self, what: str) -> BadInput:
        return BadInput(f"{self.path}: line {self.lines + 1}: {what}")


def read_json(path: pathlib.Path) -> Any:
    """The content of a JSON file.

    Raises:
        BadInput: it is absent or no JSON; the message names file and line.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}: line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


def sha256_file(path: pathlib.Path) -> str:
    """SHA-256 of a file's bytes, read in pieces.

    Raises:
        BadInput: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_CHUNK):
                digest.update(piece)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()
