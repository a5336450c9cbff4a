"""What the analysis says about input that it cannot use: one clear message, exit code 2."""

from __future__ import annotations


class BadInput(Exception):
    """A file or folder that cannot be used. The message names file, line, key and what to do."""
