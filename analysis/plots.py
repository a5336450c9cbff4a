"""Matplotlib figures of a run, for notebooks and papers. Faults are shaded. No verdict is computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.report import build_timeline, fault_bands
from analysis.rundir import RunDir
from analysis.svg import Band
from analysis.tables import request_rows, version_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib is imported where it is used: a verdict must not need it.


def _shade(bands: list[Band], axes: list[Axes]) -> None:
    for axis in axes:
        for start_s, end_s, _ in bands:
            axis.axvspan(start_s, max(end_s, start_s + 1e-3), color="tab:orange", alpha=0.18, linewidth=0)


def scale_timeline(directory: RunDir) -> Figure:
    """In-flight requests per replica, throughput and latency over the run.

    Raises:
        BadInput: the events cannot be read.
    """
    import matplotlib.pyplot as plt

    timeline = build_timeline(directory)
    times = timeline.times_s()
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(10, 8), constrained_layout=True)
    for name in sorted(timeline.replicas):
        axes[0].step(times, timeline.in_flight(name), where="mid", label=name, linewidth=1)
    axes[0].set_ylabel("in flight")
    if 0 < len(timeline.replicas) <= 10:
        axes[0].legend(loc="upper right", fontsize="small", ncols=2)
    for name in ("sent", "answered", "failed"):
        axes[1].step(times, timeline.rates(name), where="mid", label=name, linewidth=1)
    axes[1].set_ylabel("requests per second")
    axes[1].legend(loc="upper right", fontsize="small")
    for percent in (50, 99):
        series = [float("nan") if value is None else value for value in timeline.latency_s(percent)]
        axes[2].plot(times, series, ".-", markersize=3, linewidth=0.8, label=f"p{percent}")
    axes[2].set_ylabel("latency, s")
    axes[2].set_xlabel("time, s")
    axes[2].legend(loc="upper right", fontsize="small")
    _shade(fault_bands(timeline), list(axes))
    return figure


def continuity(directory: RunDir) -> Figure:
    """Whether service went on: each answer by replica and weight version, failed requests, gaps between answers.

    Raises:
        BadInput: the events cannot be read.
    """
    import matplotlib.pyplot as plt

    spans = list(version_rows(directory.read_events()))
    requests = [row for row in request_rows(directory.read_events()) if "done_s" in row]
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(10, 6), constrained_layout=True)
    replicas = sorted({row["replica"] for row in spans})
    for version in sorted({row["version"] for row in spans}):
        mine = [row for row in spans if row["version"] == version]
        axes[0].scatter(
            [row["t_s"] for row in mine],
            [replicas.index(row["replica"]) for row in mine],
            s=8,
            label=f"version {version}",
        )
    failed = [row["done_s"] for row in requests if row["outcome"] != "done"]
    axes[0].plot(failed, [-1] * len(failed), "rx", label="failed")
    axes[0].set_yticks(range(-1, len(replicas)), ["no answer", *replicas])
    axes[0].set_ylim(-1.5, len(replicas) - 0.5)
    if spans or failed:  # beside the dots, not over them
        axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    answered = sorted(row["done_s"] for row in requests if row["outcome"] == "done")
    gaps = [later - earlier for earlier, later in zip(answered, answered[1:], strict=False)]
    axes[1].plot(answered[1:], gaps, ".", markersize=3)
    axes[1].set_ylabel("gap between answers, s")
    axes[1].set_xlabel("time, s")
    _shade(fault_bands(build_timeline(directory)), list(axes))
    return figure


def longest_gap_s(directory: RunDir) -> float:
    """The longest time between two answers that follow one another, in seconds; 0 with fewer than two answers."""
    rows = request_rows(directory.read_events())
    answered = sorted(row["done_s"] for row in rows if row["outcome"] == "done")
    return max((later - earlier for earlier, later in zip(answered, answered[1:], strict=False)), default=0.0)
