"""Reading evidence back: a stream of events, a tolerated cut last line, a bad line by its number, changed bytes.

Source: DESIGN.md, "Evidence and verdicts".
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from analysis.errors import BadInput
from protocol.evidence import KINDS, Event, EventKind, decode

_CHUNK = 1 << 20
_INT = 1 << 63  # whole numbers are below: what reads evidence may hold them in 64 bits or make floats of them
# What a value ``v`` of a declared type is once JSON is parsed, as an expression over it and its class ``c``. By
# identity, for bool is a subclass of int. A NaN is within no bounds.
_TESTS = {
    "int": "c is int and -_M < v < _M",
    "float": "(c is float or c is int) and -1e300 < v < 1e300",
    "str": "c is str",
    "bool": "c is bool",
    "int?": "c is _N or c is int and -_M < v < _M",
    "float?": "c is _N or (c is float or c is int) and -1e300 < v < 1e300",
    "str?": "c is str or c is _N",
}
Validator = Callable[[dict[str, Any]], str]


def _compile(kind: EventKind) -> Validator:
    """A function that names the first field of a wrong type, or "". Made per kind: a run has millions of events."""
    source = [f"def wrong(d):\n if len(d) != {len(kind.fields)}: return '*'"]
    for field, (type_, _) in kind.fields.items():
        if type_ == "json":
            source.append(f" d[{field!r}]")
        else:
            source.append(f" v = d[{field!r}]\n c = v.__class__\n if not ({_TESTS[type_]}): return {field!r}")
    source.append(" return ''")
    namespace: dict[str, Any] = {"_N": type(None), "_M": _INT}
    exec("\n".join(source), namespace)
    made: Validator = namespace["wrong"]
    return made


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
        self._validators: dict[str, Validator] = {}

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
        except (ValueError, RecursionError) as error:
            raise self._bad(f"not an event ({error})") from error
        kind = KINDS.get(event.kind) if event.kind.__class__ is str else None
        if kind is None:
            raise self._bad(f"kind {event.kind!r} is not declared in protocol/evidence.py; written by another version?")
        data = event.data
        validator = self._validators.get(kind.name)
        if validator is None:
            validator = self._validators[kind.name] = _compile(kind)
        try:
            wrong = validator(data)
        except (KeyError, TypeError):
            wrong = "*"
        if wrong == "*":
            have = sorted(data) if isinstance(data, dict) else data
            raise self._bad(f"{event.kind} has fields {have}; declared are {sorted(kind.fields)}")
        if wrong:
            raise self._bad(f"{event.kind}.{wrong} is {_short(data[wrong])}; declared as {kind.fields[wrong][0]}")
        seq, t_ns, n, lc = event.seq, event.t_ns, event.n, event.lc
        actor, inc, cause = event.actor, event.inc, event.cause
        if not (
            seq.__class__ is t_ns.__class__ is inc.__class__ is n.__class__ is lc.__class__ is int
            and seq < _INT
            and -_INT < t_ns < _INT
            and -1 <= inc < _INT
            and 0 <= n < _INT
            and 0 <= lc < _INT
            and actor.__class__ is str
            and (cause is None or (cause.__class__ is str and cause.count("/") >= 2))
        ):
            raise self._bad(self._bad_envelope(event))
        return event

    @staticmethod
    def _bad_envelope(event: Event) -> str:
        for name in ("seq", "t_ns", "inc", "n", "lc"):
            value = getattr(event, name)
            if type(value) is not int or not -_INT < value < _INT or (name != "t_ns" and value < -(name == "inc")):
                return f"{name} is {_short(value)}; must be a whole number of 64 bits, not negative but for t_ns"
        if type(event.actor) is not str:
            return f"actor is {event.actor!r}; must be a name"
        return f"cause is {event.cause!r}; must be actor/incarnation/n"

    def _bad(self, what: str) -> BadInput:
        return BadInput(f"{self.path}: line {self.lines + 1}: {what}")


def read_json(path: pathlib.Path) -> Any:
    """The content of a JSON file.

    Raises:
        BadInput: it is absent or no JSON; the message names file and line.
    """
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: is no file")
    try:
        read = json.loads(path.read_bytes())
        json.dumps(read, ensure_ascii=False).encode()  # half a surrogate pair would fail wherever it is printed
        return read
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}: line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise BadInput(f"{path}: a text in it is none ({error.reason})") from error
    except ValueError as error:  # a number of thousands of digits
        raise BadInput(f"{path}: not JSON that this package wrote ({error})") from error
    except RecursionError as error:
        raise BadInput(f"{path}: not JSON that this package wrote (nested too deeply)") from error


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


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
