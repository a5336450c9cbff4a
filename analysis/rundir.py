"""The run directory: what lies where, and how each file gets there.

``run.json`` is written before the run, ``events.jsonl`` streamed during it; every other file appears whole or not at
all (a temporary file beside it, then a rename). Source: DESIGN.md, "Evidence and verdicts".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analysis.errors import BadInput
from analysis.reader import EventReader, read_json, sha256_file
from protocol.evidence import SCHEMA_VERSION

RUN, EVENTS, VERDICT = "run.json", "events.jsonl", "verdict.json"
REPORT, TRACE, MANIFEST = "report.html", "trace.json", "manifest.json"
FILES = (RUN, EVENTS, VERDICT, REPORT, TRACE)


class Preregistered(BaseModel):
    """What was fixed before the run: thresholds, and what must have been judged. A judge knows nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acceptance: tuple[dict[str, dict[str, Any]], ...] = ()
    """The scenario's acceptance list: one ``{criterion: parameters}`` an entry (analysis/acceptance.py)."""
    required: tuple[str, ...] = ("run_finished", "no_anomalies", "no_leaks", "nothing_lost")
    """Invariants that must have judged something, or the run is inconclusive. Others may find nothing to judge."""
    faults: int | None = None
    """Fault steps in the scenario; fewer injected make faults_hit inconclusive. None: not stated."""
    converge_within_s: float = Field(default=60.0, gt=0, le=1e9)
    """After the last fault is healed, every request that was open must end within this time."""
    shadow_s: float = Field(default=60.0, ge=0, le=1e9)
    """How long after its healing a fault still explains a failed request (time-outs and retries run on)."""


class EngineProfileInfo(BaseModel):
    """Which engine profile a service ran with, and the SHA-256 of its file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str
    sha256: str


class RunInfo(BaseModel):
    """``run.json``."""

    model_config = ConfigDict(extra="forbid")

    scenario: str
    scenario_text: str
    scenario_sha256: str
    seed: int
    backend: Literal["sim", "real"]
    schema_version: int = SCHEMA_VERSION
    versions: dict[str, str]
    machine: dict[str, str]
    engines: dict[str, EngineProfileInfo] = {}
    """The engine profile of each service."""
    repeat: str = ""
    """The command that repeats this run."""
    preregistered: Preregistered = Preregistered()


class RunDir:
    """The paths of one run directory."""

    def __init__(self, path: pathlib.Path | str) -> None:
        self.path = pathlib.Path(path)
        self.run, self.events, self.verdict = self.path / RUN, self.path / EVENTS, self.path / VERDICT
        self.report, self.trace, self.manifest = self.path / REPORT, self.path / TRACE, self.path / MANIFEST

    @classmethod
    def create(cls, path: pathlib.Path | str) -> RunDir:
        """Make the directory.

        Raises:
            BadInput: it exists already, or cannot be made.
        """
        made = cls(path)
        try:
            made.path.mkdir(parents=True)
        except FileExistsError as error:
            raise BadInput(f"{made.path}: exists already; name another output folder or remove it") from error
        except OSError as error:
            raise BadInput(f"{made.path}: cannot be made ({error.strerror}); name another folder") from error
        return made

    @classmethod
    def open(cls, path: pathlib.Path | str) -> RunDir:
        """An existing run directory.

        Raises:
            BadInput: it has no run.json or no events.jsonl.
        """
        found = cls(path)
        for needed in (found.run, found.events):
            if not needed.is_file():
                raise BadInput(f"{found.path}: no run directory ({needed.name} is missing)")
        return found

    def info(self) -> RunInfo:
        """``run.json``, checked.

        Raises:
            BadInput: absent, no JSON, or a key is wrong; the message names file and key.
        """
        raw = read_json(self.run)
        try:
            info = RunInfo.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise BadInput(f"{self.run}: {f'key {key!r}: ' if key else ''}{first['msg']}") from error
        if info.schema_version != SCHEMA_VERSION:
            raise BadInput(
                f"{self.run}: key 'schema_version' is {info.schema_version}; this version reads {SCHEMA_VERSION}"
            )
        if hashlib.sha256(info.scenario_text.encode()).hexdigest() != info.scenario_sha256:
            raise BadInput(f"{self.run}: key 'scenario_sha256' is not the SHA-256 of 'scenario_text'")
        if not info.scenario.isprintable():
            raise BadInput(f"{self.run}: key 'scenario' is no name")
        return info

    def read_events(self) -> EventReader:
        return EventReader(self.events)


def write_atomic(path: pathlib.Path, content: str | bytes) -> None:
    """Write a whole file or none.

    Raises:
        BadInput: the folder cannot be written.
    """
    with atomic_file(path) as file:
        # Evidence may hold what no UTF-8 text can: half a surrogate pair is written as JSON writes it, as an escape.
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file that takes its name when the block ends well; otherwise nothing is left of it.

    Raises:
        BadInput: the folder cannot be written, or the name is of something that is no file, such as a device.
    """
    if path.name in ("", "..") or path.is_dir():
        raise BadInput(f"{path}: is a directory; name a file in it")
    if path.exists() and not path.is_file():  # /dev/null would be replaced by a file of that name
        raise BadInput(f"{path}: is no regular file; name another one")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def to_json(value: Any) -> str:
    """The one way in which this package writes JSON files: sorted, indented, one trailing newline."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def this_machine() -> dict[str, str]:
    """What run.json says of the machine. No host name: evidence is meant to be shared."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "cpus": str(os.cpu_count() or 0),
    }


def write_run_json(
    directory: RunDir,
    *,
    scenario: str,
    scenario_text: str,
    seed: int,
    backend: Literal["sim", "real"],
    versions: dict[str, str],
    preregistered: Preregistered,
    repeat: str = "",
    engines: Mapping[str, EngineProfileInfo] | None = None,
    machine: dict[str, str] | None = None,
) -> RunInfo:
    """Write ``run.json``. Call it before the run starts: thresholds count only if they were fixed before.

    Args:
        directory: an empty run directory.
        scenario: the scenario's name.
        scenario_text: the scenario file after ``--set``, as text.
        versions: package name to version.
        repeat: the command that repeats the run.
        engines: the engine profile of each service.
        machine: as :func:`this_machine`, which is the default.

    Raises:
        BadInput: events exist already, or the file cannot be written.
    """
    if directory.events.exists():
        raise BadInput(f"{directory.run}: {EVENTS} exists already; run.json must be written before the run")
    info = RunInfo(
        scenario=scenario,
        scenario_text=scenario_text,
        scenario_sha256=hashlib.sha256(scenario_text.encode()).hexdigest(),
        seed=seed,
        backend=backend,
        versions=versions,
        machine=this_machine() if machine is None else machine,
        engines=dict(engines or {}),
        repeat=repeat,
        preregistered=preregistered,
    )
    write_atomic(directory.run, to_json(info.model_dump(mode="json")))
    return info


def write_manifest(directory: RunDir, known: dict[str, str] | None = None) -> None:
    """Write ``manifest.json``: the SHA-256 of every file of the run. The last thing that a run does.

    Args:
        known: digests that were computed while writing (file name to hex), to spare reading a large file again.
    """
    files = {}
    for name in FILES:
        path = directory.path / name
        if path.is_file():
            files[name] = known[name] if known and name in known else sha256_file(path)
    write_atomic(directory.manifest, _render_manifest(files))


def _render_manifest(files: dict[str, str]) -> str:
    own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return to_json({"files": files, "sha256_of_files": own})


def verify_manifest(directory: RunDir) -> list[str]:
    """What differs from ``manifest.json``: one line a file, naming it; empty when every byte is as written.

    A run without a manifest did not end by itself: that is one of the lines too, see :func:`is_complete`.
    """
    if not is_complete(directory):
        return [f"{directory.manifest}: missing; the run did not end by itself, its bytes cannot be verified"]
    try:
        raw = read_json(directory.manifest)
        files = raw["files"]
        expected = {str(name): str(digest) for name, digest in files.items()}
        intact = directory.manifest.read_text(encoding="utf-8") == _render_manifest(expected)
    except (BadInput, KeyError, TypeError, AttributeError, UnicodeDecodeError):
        intact, expected = False, {}
    if not intact:
        return [f"{directory.manifest}: changed (it does not carry its own digest)"]
    problems = []
    for name, digest in sorted(expected.items()):
        path = directory.path / name
        if name not in FILES:
            problems.append(f"{path}: named in the manifest but no file of a run")
        elif not path.is_file():
            problems.append(f"{path}: missing")
        elif sha256_file(path) != digest:
            problems.append(f"{path}: changed (its SHA-256 is not the one in {MANIFEST})")
    for name in FILES:
        if name not in expected and (directory.path / name).is_file():
            problems.append(f"{directory.path / name}: not in {MANIFEST}; added afterwards")
    return problems


def is_complete(directory: RunDir) -> bool:
    """Whether the run got as far as its manifest. What is there and is no file has taken its place."""
    return os.path.lexists(directory.manifest)
