"""What the analysis says about input that it cannot use: one clear message, exit code 2."""

from __future__ import annotations

import io
import sys


class BadInput(Exception):
    """A file or folder that cannot be used. The message names file, line, key and what to do."""


def print_anything() -> None:
    """Let stdout and stderr take every text: what they cannot show, such as half a surrogate pair, as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
