"""Writing evidence: a stream of event lines into ``events.jsonl``. Source: DESIGN.md, "Evidence and verdicts"."""

from __future__ import annotations

import hashlib
import pathlib

from analysis.errors import BadInput
from protocol.evidence import Event, encode


class JsonlWriter:
    """``events.jsonl`` while it is written, with its digest; memory does not grow with the run.

    A Recorder. Where the world has encoded the lines already, ``write`` takes them as they are. A write that fails (the
    disk is full, or gone) does not raise inside of the run, which has no use for the error: ``sha256`` does.

    Args:
        path: the file; must not exist.
        chunk: events that ``record`` holds before it writes them.

    Raises:
        BadInput: the file exists or cannot be made.
    """

    def __init__(self, path: pathlib.Path, chunk: int = 1024) -> None:
        try:
            # Unbuffered: a chunk is one write, so a killed process leaves at most one cut line.
            self._file = open(path, "xb", buffering=0)
        except OSError as error:
            raise BadInput(f"{path}: cannot be written ({error.strerror})") from error
        self.path = path
        self._error: OSError | None = None
        self._chunk = chunk
        self._lines: list[str] = []
        self._digest = hashlib.sha256()

    def record(self, event: Event) -> None:
        """Raises UndeclaredEvent for a kind or field that the schema lacks."""
        lines = self._lines
        lines.append(encode(event))
        if len(lines) >= self._chunk:
            self.flush()

    def flush(self) -> None:
        """Write what ``record`` holds."""
        lines = self._lines
        if not lines:
            return
        data = "".join(lines).encode("ascii")
        lines.clear()
        self.write(data)

    def write(self, data: bytes) -> None:
        """Append whole encoded lines."""
        if self._error is not None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._error = error
        self._digest.update(data)

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()

    @property
    def sha256(self) -> str:
        """Digest of the bytes written so far. Raises BadInput: not all of them could be."""
        if self._error is not None:
            raise BadInput(f"{self.path}: cannot be written ({self._error.strerror}); the run was not kept")
        return self._digest.hexdigest()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
