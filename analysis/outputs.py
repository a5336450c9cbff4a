"""What a finished run still needs: verdict, report, trace, manifest. The runner and the command line share it."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.errors import BadInput
from analysis.reader import sha256_file
from analysis.report import build_timeline, write_report
from analysis.rundir import RunDir, is_complete, to_json, verify_manifest, write_atomic, write_manifest
from analysis.timeline import Timeline
from analysis.trace import write_trace
from analysis.verdict import Verdict, judge_run


def complete_run(
    directory: RunDir,
    verdict: Verdict | None = None,
    known: dict[str, str] | None = None,
    timeline: Timeline | None = None,
) -> Verdict:
    """Write everything that follows the events of a run, the manifest last.

    Args:
        directory: has run.json and events.jsonl; trace.json too if a TraceWriter ran live.
        verdict: reached live; None judges the file.
        known: digests computed while writing, as in :func:`analysis.rundir.write_manifest`.
        timeline: fed live; None reads the file for it. A long run spares minutes by feeding everything live.

    Raises:
        BadInput: something cannot be read or written.
    """
    reached = judge_run(directory) if verdict is None else verdict
    write_atomic(directory.verdict, to_json(reached.as_json()))
    write_report(directory, reached, build_timeline(directory) if timeline is None else timeline)
    if not directory.trace.is_file():
        write_trace(directory)
    write_manifest(directory, known)
    return reached


def require_unchanged(directory: RunDir) -> str:
    """Refuse a run of which a byte was changed.

    Returns:
        What must be said of a run without a manifest; "" for a verified one.

    Raises:
        BadInput: names each file that differs.
    """
    problems = verify_manifest(directory)
    if problems and is_complete(directory):
        raise BadInput("\n".join(problems))
    return problems[0] if problems else ""


def require_distinct(directories: Sequence[RunDir]) -> None:
    """Refuse a run that comes twice, as a copy too: it would count twice, and would have no spread beside itself.

    Raises:
        BadInput: names both.
    """
    seen: dict[str, RunDir] = {}
    for directory in directories:
        before = seen.setdefault(sha256_file(directory.events), directory)
        if before is not directory:
            raise BadInput(f"{directory.path}: the same run as {before.path} (their events are equal); name each once")


def rewrite(directory: RunDir, report: bool = False, trace: bool = False) -> None:
    """Write report or trace anew and take them into the manifest, if the run has one.

    Raises:
        BadInput: the run was changed, or cannot be read or written.
    """
    unverified = require_unchanged(directory)
    if report:
        write_report(directory, judge_run(directory), build_timeline(directory))
    if trace:
        write_trace(directory)
    if not unverified:
        write_manifest(directory)
