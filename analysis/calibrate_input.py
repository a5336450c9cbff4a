"""What calibration reads and computes with: the files of recorded runs, and least squares in plain Python."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

WHERE_TO_GET = (
    "The runs are the public evidence of the elastic reward-model demo: the folders below demos/task4_genrm/results in "
    "pull request 370 of the GitHub repository redai-studio/Relax. Put them under one directory and pass it: "
    "python -m analysis calibrate --data DIR"
)


class CalibrationError(ValueError):
    """Input that cannot be used. The text names file, key and fix; nothing was written."""


def least_squares(rows: list[list[float]], right: list[float]) -> list[float]:
    """x that minimises ``|rows x - right|``, by the normal equations and Gaussian elimination.

    In plain Python, so that a profile is the same on every machine. Columns are scaled to their largest entry.

    Raises:
        CalibrationError: the rows do not determine x.
    """
    width = len(rows[0]) if rows else 0
    scale = [max((abs(row[column]) for row in rows), default=0.0) for column in range(width)]
    if not width or not all(scale):
        raise CalibrationError("the runs do not tell the costs apart: one of them never occurs in what was measured")
    scaled = [[value / one for value, one in zip(row, scale, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(width)]
        + [sum(row[i] * one for row, one in zip(scaled, right, strict=True))]
        for i in range(width)
    ]
    for column in range(width):
        pivot = max(range(column, width), key=lambda index: abs(matrix[index][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            raise CalibrationError("the runs do not tell the costs apart: all of them were measured at one load")
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for index in range(width):
            if index != column:
                factor = matrix[index][column] / matrix[column][column]
                matrix[index] = [a - factor * b for a, b in zip(matrix[index], matrix[column], strict=True)]
    return [matrix[index][width] / matrix[index][index] / scale[index] for index in range(width)]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(data_dir: Path, name: str) -> Any:
    path = data_dir / name
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise CalibrationError(f"{path}: not there. {WHERE_TO_GET}") from None
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: not JSON ({error})") from None
    if not isinstance(read, list) or not all(isinstance(entry, dict) for entry in read):
        raise CalibrationError(f"{path}: no list of events; is this the right file?")
    return read


def event_of(events: Any, name: str, source: str) -> dict[str, Any]:
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and event.get("event") == name:
            return event
    raise CalibrationError(f"{source}: no event {name!r}; is this the right run?")


def operation(history: Any, action: str, source: str) -> dict[str, Any]:
    """The metrics frame of the oldest operation of that kind (round A; the files repeat it after round B's)."""
    for entry in reversed(history if isinstance(history, list) else []):
        if isinstance(entry, dict) and entry.get("action") == action and entry.get("metrics_snapshot"):
            frame = entry["metrics_snapshot"]
            if float(frame.get("total_throughput", 0)) > 0:
                return dict(frame)
    raise CalibrationError(f"{source}: no {action} with a metrics_snapshot under load; is this the right run?")
