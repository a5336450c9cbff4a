"""What the analysis says about input that it cannot use: one clear message, exit code 2. And where it says it."""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any


class BadInput(Exception):
    """A file or folder that cannot be used. The message names file, line, key and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? ``, or nothing where no known word is like it."""
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]!r}? " if near else ""


def unknown_kind(kind: str, kinds: Iterable[str]) -> str:
    """What is said of an event kind that is none: the nearest one, and where all of them are."""
    return f"event kind {kind!r} is unknown; {nearest(kind, kinds)}docs/evidence.md lists them all"


def print_anything() -> None:
    """Let stdout and stderr take every text: what they cannot show, such as half a surrogate pair, as an escape.

    And let their readers leave: exit code 1 says that a check failed, never that ``head`` had seen enough.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started the command
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="backslashreplace")
        raw = getattr(stream.buffer, "raw", stream.buffer)  # PYTHONUNBUFFERED: no buffer in between
        if stream is getattr(sys, f"__{name}__") and isinstance(raw, io.FileIO):
            buffered = io.BufferedWriter(_Unread(raw, name))
            setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, "backslashreplace", line_buffering=True))


class _Unread(io.RawIOBase):
    """A stream that outlives its reader: what nobody takes goes nowhere, and the command runs to its end.

    Args:
        raw: what it writes to.
        name: ``stdout`` or ``stderr``; where stdout cannot take results for another reason, that is told once.
    """

    def __init__(self, raw: io.FileIO, name: str) -> None:
        self._raw = raw
        self._name = name
        self._open = True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()

    def write(self, data: Any) -> int | None:
        """Raises BadInput the first time that stdout takes nothing though it is read, such as a full disk."""
        if not self._open:
            return len(data)
        try:
            return self._raw.write(data)
        except BrokenPipeError:
            self._open = False
        except OSError as error:
            self._open = False
            if self._name == "stdout":
                raise BadInput(f"stdout: cannot be written ({error.strerror})") from error
        return len(data)


def require_current_folder() -> None:
    """Raises BadInput where the folder that a command was started in is gone: no relative path means anything then."""
    try:
        os.getcwd()
    except OSError as error:
        raise BadInput(f"the current folder is gone ({error.strerror}); change to one that is there") from error


def tell_defect() -> None:
    """What is said of an exception that nobody foresaw, in an ``except`` block. Its exit code must not be a verdict's:
    3, for nothing was judged."""
    traceback.print_exc()
    print("error: that is a defect of seatrial, please report it; there is no verdict", file=sys.stderr)
