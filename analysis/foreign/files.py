"""Reads the files of a published run without trusting any of them: what is missing or odd is said, never raised.

Formats: scaling_acceptance.md, section 8.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from typing import Any

EVENTS, VERDICTS, LOAD, TIMELINE = "events.json", "verdicts.json", "load_requests.json", "timeline.json"
HISTORY, HISTORY_B, BOUNDARIES = "scale_history.json", "scale_history_round_b.json", "phase_boundaries.json"
TRAINING, REANALYSIS = "train_events.json", "reanalysis_v2.json"
KNOWN = (EVENTS, VERDICTS, LOAD, TIMELINE, HISTORY, HISTORY_B, BOUNDARIES, TRAINING, REANALYSIS)
DOCUMENTS = (".md", ".openapi.json", "openapi.json")
_LARGEST = 256 * 1024 * 1024
_MOST_FILES = 200

Record = dict[str, Any]


@dataclasses.dataclass
class Read:
    """What became of one file. ``notes``: what was wrong with it, and what of it was left out."""

    name: str
    state: str = "missing"
    sha256: str = ""
    content: Any = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def detail(self) -> str:
        more = f"; and {len(self.notes) - 8} more" if len(self.notes) > 8 else ""
        return "; ".join(self.notes[:8]) + more


class Files:
    """The files of one published run.

    Args:
        folder: the run's directory; need not be one.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.read: dict[str, Read] = {name: _read(folder / name) for name in KNOWN}
        self.documents: list[pathlib.Path] = []
        for path in self._others():
            if path.name.endswith(DOCUMENTS):
                self.documents.append(path)
            self.read[path.name] = Read(path.name, "not_read", _digest(path))

    def _others(self) -> list[pathlib.Path]:
        try:
            found = sorted(path for path in self.folder.iterdir() if path.name not in KNOWN and path.is_file())
        except OSError:
            return []
        return found[:_MOST_FILES]

    def records(self, name: str, time_key: str | None = "t") -> list[Record]:
        """The objects of a file that holds an array of them; what is none is left out and noted.

        Args:
            time_key: must be a finite number in each; None where the records have no time of their own.
        """
        read = self.read[name]
        if read.state != "read":
            return []
        if not isinstance(read.content, list):
            read.state = "unreadable"
            read.notes.append("holds no array")
            return []
        kept = []
        for index, entry in enumerate(read.content):
            if not isinstance(entry, dict):
                read.notes.append(f"entry {index} is no object and was left out")
            elif time_key is not None and number(entry.get(time_key)) is None:
                read.notes.append(f"entry {index} has no time in {time_key!r} and was left out")
            else:
                kept.append(entry)
        return kept

    def mapping(self, name: str) -> Record:
        """The object that a file holds; empty where it holds none."""
        read = self.read[name]
        if read.state == "read" and not isinstance(read.content, dict):
            read.state = "unreadable"
            read.notes.append("holds no object")
        return read.content if read.state == "read" else {}


def number(value: object) -> float | None:
    """A finite number that is no bool, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and abs(found) < 1e12 else None


def whole(value: object) -> int | None:
    """A whole number that is no bool, else None."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def text(value: object, most: int = 400) -> str:
    """A short printable text of anything."""
    said = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return "".join(c if c.isprintable() else " " for c in said)[:most]


def _read(path: pathlib.Path) -> Read:
    read = Read(path.name)
    if not path.is_file():
        if path.exists():
            read.state = "unreadable"
            read.notes.append("is no file")
        return read
    try:
        if path.stat().st_size > _LARGEST:
            raise OSError(0, f"larger than {_LARGEST >> 20} MiB")
        raw = path.read_bytes()
    except OSError as error:
        read.state = "unreadable"
        read.notes.append(str(error.strerror or error))
        return read
    read.sha256 = hashlib.sha256(raw).hexdigest()
    try:
        read.content = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
        json.dumps(read.content, ensure_ascii=False).encode()  # half a surrogate pair would fail later
        read.state = "read"
    except (ValueError, RecursionError) as error:
        read.state, read.content = "unreadable", None
        read.notes.append(f"not JSON ({text(str(error), 120)})")
    return read


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _digest(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest()
