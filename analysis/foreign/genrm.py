"""``python -m analysis import genrm DIR``: a published run of the elastic judge as a run directory of ours.

Nothing in DIR is trusted. A missing or odd file is named in the evidence (``foreign.file``) and on the terminal;
what cannot be borne out makes the run inconclusive, what contradicts itself makes it fail. Thresholds come from the
published protocols (scaling_acceptance.md), which were fixed before any run that is imported.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any, NamedTuple

import yaml

from analysis.errors import BadInput
from analysis.foreign import documents, side_files
from analysis.foreign.builder import Builder
from analysis.foreign.driver import Driver
from analysis.foreign.files import EVENTS, KNOWN, LOAD, VERDICTS, Files, text
from analysis.foreign.protocols import PROTOCOLS, Protocol, recognise
from analysis.outputs import complete_run
from analysis.rundir import Preregistered, RunDir, write_run_json
from analysis.verdict import Verdict
from analysis.writer import JsonlWriter
from protocol.evidence import SCHEMA_VERSION

_CLOCK_ERROR_NS = 100_000_000  # an autoscaler's clock against the driver's, as the phases' boundaries place it
_EPOCH = 1e8  # a driver's own times are seconds since its start; larger ones are of the epoch


class Imported(NamedTuple):
    """What became of an import."""

    directory: RunDir
    verdict: Verdict
    protocol: Protocol
    missing: tuple[str, ...]
    """What is missing or odd, one line a file."""


def import_genrm(folder: pathlib.Path, out: pathlib.Path) -> Imported:
    """Turn one published run into a run directory, and judge it.

    Args:
        folder: the published run.
        out: run directory to make; must not exist.

    Raises:
        BadInput: ``folder`` is no directory, or ``out`` exists or cannot be made. Nothing of the files' content raises.
    """
    if not folder.is_dir():
        raise BadInput(
            f"{folder}: no such folder; name the directory of one published run, which holds {EVENTS} and {VERDICTS}"
        )
    files = Files(folder)
    protocol = recognise(files, folder.name)
    builder = Builder()
    driver, end_s, reason, detail = _translate(files, protocol, builder)
    directory = RunDir.create(out)
    described = _describe(folder, files, protocol)
    write_run_json(
        directory,
        scenario=protocol.scenario,
        scenario_text=described,
        seed=0,
        backend="real",
        versions={"imported": "genrm"},
        machine={"system": "as published", "gpus": "4 x RTX 4090", "note": "the machine of the import says nothing"},
        preregistered=Preregistered(
            acceptance=protocol.acceptance(documents=bool(files.documents)),
            required=_required(files, protocol), faults=protocol.faults or None,
            converge_within_s=600, shadow_s=60,
        ),
        repeat=f"python -m analysis import genrm {text(folder.name, 120)}",
    )  # fmt: skip
    with JsonlWriter(directory.events) as writer:
        for event in builder.events(end_s, reason, detail):
            writer.record(event)
    missing = [
        f"{name}: {read.state}{f' ({read.detail})' if read.detail else ''}"
        for name, read in files.read.items()
        if read.notes or (read.state != "read" and name in (EVENTS, VERDICTS, *protocol.files))
    ]
    return Imported(directory, complete_run(directory), protocol, tuple(missing))


def _translate(files: Files, protocol: Protocol, builder: Builder) -> tuple[Driver, float | None, str, str]:
    records = files.records(EVENTS)
    stated = files.mapping(VERDICTS)
    first = float(records[0]["t"]) if records else 0.0
    offset = first if first > _EPOCH else 0.0
    builder.add(
        0.0, "run.started", "world", scenario=protocol.scenario, seed=0, world="imported",
        clock_error_ns=_CLOCK_ERROR_NS if protocol.two_clocks else 0, schema=SCHEMA_VERSION,
    )  # fmt: skip
    driver = Driver(builder, offset)
    for record in records:
        driver.take(record)
    files.read[EVENTS].notes += driver.notes
    epoch_offset = side_files.boundaries(files, driver, builder)
    load_start = driver.times.get("autoscaler_started", 0.0)
    driver.begin(load_start)
    side_files.load(files, builder)
    side_files.timeline(files, driver, builder)
    side_files.history(files, builder, epoch_offset, load_start)
    side_files.training(files, builder, offset)
    documents.check(files, builder)
    error = stated.get("functional_error")
    end_s = driver.ended_s
    if error:
        driver.failed(builder.last_s, str(error))
    for key, value in (driver.verdict or {}).items():
        builder.add(builder.last_s, "foreign.verdict", file=EVENTS, key=text(key, 120), value=value)
    for key, value in stated.items():
        builder.add(builder.last_s, "foreign.verdict", file=VERDICTS, key=text(key, 120), value=value)
    _leftover(files, driver, stated, builder)
    for name in (*KNOWN, *(name for name in files.read if name not in KNOWN)):
        read = files.read[name]
        if read.state != "missing" or name in (EVENTS, VERDICTS, *protocol.files):
            builder.add(
                0.0,
                "foreign.file",
                name=text(name, 200),
                state=read.state,
                sha256=read.sha256,
                detail=text(read.detail, 2000),
            )
    reason, detail = "completed", ""
    if error or stated.get("functional_pass") is False:
        reason, detail = "crash", text(error) or "functional_pass is false"
        end_s = builder.last_s if end_s is None else end_s
    return driver, None if end_s is None else max(end_s, builder.last_s), reason, detail


def _leftover(files: Files, driver: Driver, stated: dict[str, Any], builder: Builder) -> None:
    """GPUs that were not free again in the end are a leak, whatever the verdict says of them."""
    free = stated.get("leftover_ray_free_gpus")
    if isinstance(free, bool) or not isinstance(free, (int, float)):
        return
    builder.add(
        builder.last_s,
        "foreign.resources",
        when="final",
        free_gpus=float(free),
        groups=None,
        memory_mib=None,
        samples=1,
    )


def _required(files: Files, protocol: Protocol) -> tuple[str, ...]:
    """Where the load is on record request by request, there must have been some."""
    listed = files.read[LOAD].state == "read" and "nothing_lost" not in protocol.required
    return (*protocol.required, *(["nothing_lost"] if listed else []))


def _describe(folder: pathlib.Path, files: Files, protocol: Protocol) -> str:
    read = {name: read.sha256 for name, read in files.read.items() if read.state == "read"}
    described = {
        "name": protocol.scenario,
        "summary": protocol.summary,
        "imported": {
            "from": text(folder.name, 200),
            "protocol": protocol.name,
            "files": read,
            "missing": sorted(name for name in (EVENTS, VERDICTS, *protocol.files) if files.read[name].state != "read"),
            "content_sha256": hashlib.sha256("".join(sorted(read.values())).encode()).hexdigest(),
        },
    }
    return yaml.safe_dump(described, sort_keys=False, width=120)


__all__ = ["LOAD", "PROTOCOLS", "Imported", "import_genrm"]
