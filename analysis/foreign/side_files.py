"""The other files of a published run as our events: load, capacity, an autoscaler's history, training."""

from __future__ import annotations

import re
import statistics
from typing import Any

from analysis.foreign.builder import FRONT, Builder
from analysis.foreign.driver import Driver, engines_in
from analysis.foreign.files import (
    BOUNDARIES,
    HISTORY,
    HISTORY_B,
    LOAD,
    REANALYSIS,
    TIMELINE,
    TRAINING,
    Files,
    Record,
    number,
    text,
    whole,
)

PHASES = (
    ("LOW", "low_start", None),
    ("HIGH", "high_start", "phase_low_done"),
    ("STEADY", "steady_start", "phase_high_done"),
    ("LOW_AGAIN", "low_prime_start", "phase_steady_done"),
    ("end", "run_end", "phase_low_prime_done"),
)
_ENDS = {
    "phase_low_done": "low_end",
    "phase_high_done": "high_end",
    "phase_steady_done": "steady_end",
    "phase_low_prime_done": "run_end",
}
_STEP = re.compile(r"(?:\x1b\[[0-9;]*m)*\s*(step|rollout)\s+(\d+)\b", re.IGNORECASE)
_FROZEN = {"min_engines": 1, "max_engines": 2, "out_cooldown_s": 20.0, "in_cooldown_s": 60.0, "metrics_interval_s": 3.0,
           "evaluation_interval_s": 5.0, "out_duration_s": 15.0, "in_duration_s": 45.0}  # fmt: skip
"""The settings of the frozen protocol (scaling_acceptance.md 4); the runs do not repeat them."""


def boundaries(files: Files, driver: Driver, builder: Builder) -> float | None:
    """The phases of the load. Returns what to take off an epoch time to get the driver's, None where nobody knows."""
    phases = files.mapping(BOUNDARIES).get("phases")
    stated: Record = phases if isinstance(phases, dict) else {}
    if files.read[BOUNDARIES].state == "read" and not stated:
        files.read[BOUNDARIES].notes.append("has no object 'phases'")
    offsets = [
        epoch - driver.times[name]
        for name, key in _ENDS.items()
        if name in driver.times and (epoch := number(stated.get(key))) is not None
    ]
    offset = statistics.median(offsets) if offsets else None
    if offset is not None and max(offsets) - min(offsets) > 2:
        files.read[BOUNDARIES].notes.append(
            f"its clock is {min(offsets):.1f} to {max(offsets):.1f} s beside the driver's: they do not belong together"
        )
        offset = None
    for name, key, _ in PHASES:
        at = number(stated.get(key))
        if at is not None and offset is not None:
            builder.add(at - offset, "foreign.phase", "world", name=name)
    return offset


def load(files: Files, builder: Builder) -> None:
    """Requests with the time of their start. Their ends are not on record, only the order of the ends.

    Each is put at the earliest instant that the order allows; latencies of such a run mean nothing.
    """
    latest = 0.0
    for index, row in enumerate(files.records(LOAD)):
        began, ok, request = float(row["t"]), row.get("ok"), f"load-{index:06d}"
        latest = max(latest, began)
        if not isinstance(ok, bool):
            files.read[LOAD].notes.append(f"entry {index}: 'ok' is no bool; it counts as failed")
        client = f"client-{text(row.get('phase'), 20) or 'none'}"
        builder.add(began, "request.sent", client, request=request, prompt_tokens=0, max_new_tokens=0, idempotent=True)
        builder.add(
            latest, "request.done", client, request=request, outcome="done" if ok is True else "unknown",
            status=200 if ok is True else 0, error="" if ok is True else "failed", completion_tokens=0, version="",
            replica="", replica_inc=0, attempts=1,
        )  # fmt: skip


def timeline(files: Files, driver: Driver, builder: Builder) -> None:
    """Capacity and served counts, each second. Counters belong to addresses; a new engine may begin with an old one."""
    for row in files.records(TIMELINE):
        listed, served, in_flight = engines_in(row)
        if not listed:
            continue
        names = driver.replicas.listed(listed)
        initial = not driver.replicas.initial
        if initial:
            driver.replicas.initial = tuple(names)
        builder.add(
            float(row["t"]), "foreign.engines", current=whole(row.get("current")), initial=initial, whole=True,
            served={name: served.get(one) for name, one in zip(names, listed, strict=True)},
            in_flight={name: in_flight.get(one) for name, one in zip(names, listed, strict=True)},
        )  # fmt: skip


def history(files: Files, builder: Builder, offset: float | None, start_s: float) -> None:
    """An autoscaler's decisions. Both files list the newest first, and the second repeats the first."""
    entries: dict[str, tuple[str, Record]] = {}
    listed_a = {text(row.get("request_id"), 80) for row in files.records(HISTORY, "triggered_at")}
    of_boundaries = files.mapping(BOUNDARIES).get("history")
    stamps = (
        [number(row.get("triggered_at")) for row in of_boundaries if isinstance(row, dict)]
        if isinstance(of_boundaries, list)
        else []
    )
    for name in (HISTORY, HISTORY_B):
        seen: set[str] = set()
        for row in files.records(name, "triggered_at"):
            operation = text(row.get("request_id"), 80)
            if row.get("action") not in ("scale_out", "scale_in") or not operation:
                files.read[name].notes.append(f"{operation or 'an entry'} has no action or no id and was left out")
            elif operation in seen:
                files.read[name].notes.append(f"{operation} is listed twice and counts once")
            else:
                in_a = name == HISTORY or operation in listed_a or number(row["triggered_at"]) in stamps
                entries.setdefault(operation, ("a" if in_a else "b", row))
            seen.add(operation)
    if not entries:
        return
    if offset is None:
        where = HISTORY if files.read[HISTORY].state == "read" else HISTORY_B
        files.read[where].notes.append(f"its times cannot be placed without {BOUNDARIES}; it was left out")
        return
    builder.add(
        start_s, "autoscaler.deployed", "world", service="genrm", scaler="autoscaler-genrm", api=FRONT, **_FROZEN
    )
    for operation, (round_, row) in sorted(entries.items(), key=lambda item: float(item[1][1]["triggered_at"])):
        _decision(builder, operation, round_, row, offset)


def _decision(builder: Builder, operation: str, round_: str, row: Record, offset: float) -> None:
    at_s, action = float(row["triggered_at"]) - offset, str(row["action"])
    frame, conditions = row.get("metrics_snapshot"), row.get("triggered_conditions")
    builder.add(
        at_s, "foreign.decision", FRONT, action=action, operation=operation, round=round_,
        conditions=[text(one, 60) for one in conditions] if isinstance(conditions, list) else [],
        frame=frame if isinstance(frame, dict) else {},
    )  # fmt: skip
    builder.asked(at_s, action, action, target=whole(row.get("to_engines")), key=operation, admitted=operation,
                  state="PENDING", actor=FRONT, current=whole(row.get("from_engines")))  # fmt: skip
    ended = number(row.get("completed_at"))
    if ended is not None:
        # A client moves an operation to its history only when it was told that it is clean (scaling.md 6.5).
        builder.asked(ended - offset, "status", action, operation, state=text(row.get("status"), 40), cleanup="false",
                      current=whole(row.get("to_engines")), actor=FRONT)  # fmt: skip


def training(files: Files, builder: Builder, offset: float) -> None:
    """Steps and rollouts of a training job. Its log has every line twice, some with colours; a summary line is none."""
    seen: dict[tuple[str, str], float] = {}
    ends: list[tuple[float, str]] = []
    lines = 0
    for row in files.records(TRAINING, "ts"):
        lines += 1
        kind, at_s = str(row.get("kind", "")), float(row["ts"]) - offset
        found = _STEP.match(kind)
        if found:
            what, number_ = found.group(1).lower(), str(int(found.group(2)[:9]))
            seen.setdefault((what, number_), at_s)
        elif "finished" in kind.lower():
            ends.append((at_s, text(kind, 60)))
        else:
            files.read[TRAINING].notes.append(f"{text(kind, 40)!r} is neither a step nor a rollout and was left out")
    read = files.mapping(REANALYSIS)
    saved = read.get("sample_integrity")
    counts = saved.get("saved_counts") if isinstance(saved, dict) else None
    for (what, number_), at_s in seen.items():
        index = int(number_)
        if what == "step":
            builder.add(at_s, "train.step", "trainer", step=index, what="started")
        else:
            known = counts[index] if isinstance(counts, list) and index < len(counts) else 0
            builder.add(at_s, "train.rollout", "trainer", rollout=index, samples=whole(known) or 0, judged=0)
    if lines > len(seen) + len(ends):
        files.read[TRAINING].notes.append(f"{lines} lines tell of {len(seen)} steps and rollouts; each counts once")
    timelines = read.get("step_timelines")
    ended: Any = timelines.get("step_execution_end") if isinstance(timelines, dict) else None
    epochs = ended.get("epochs") if isinstance(ended, dict) else None
    for number_, epoch in epochs.items() if isinstance(epochs, dict) else ():
        at = number(epoch)
        if at is not None and number_.isdigit() and len(number_) < 10:
            builder.add(at - offset, "train.step", "trainer", step=int(number_), what="ended")
    # Times are whole seconds: the end is told last.
    steps = sum(what == "step" for what, _ in seen)
    for at_s, kind in ends:
        if "training" in kind.lower():
            builder.add(at_s, "train.finished", "trainer", steps=steps)
        else:
            builder.add(at_s, "foreign.event", "trainer", name="finished", payload={"said": kind})
    for key in ("sample_integrity", "reward_evidence", "non_benign_error_lines"):
        if key in read:
            builder.add(builder.last_s, "foreign.event", name=f"reanalysis_{key}", payload={"value": read[key]})
