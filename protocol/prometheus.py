"""A page of Prometheus text, read with prometheus-client's parser, whose errors are made one kind here.

The parser is lax, and so are its errors: beside ValueError, a label without a name gives IndexError and a time stamp of
400 digits OverflowError. Who reads pages of other processes has to be able to say what an odd page raises.
"""

from __future__ import annotations

import math
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


def families(text: str) -> list[Any]:
    """All metric families of a page, each with its ``name``, ``type`` and ``samples``.

    Raises:
        ValueError: it is no Prometheus text.
    """
    try:
        return list(text_string_to_metric_families(text))
    except ValueError:
        raise
    except Exception as error:  # of a parser that is not ours, on text that is not ours either
        raise ValueError(f"no Prometheus text ({type(error).__name__}: {error})") from error


def as_float(value: float) -> float:
    """A sample's value, which the parser leaves an integer of any size; infinite where a float cannot hold it."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
