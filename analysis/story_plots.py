"""Pictures of scaling and of training under scaling, for a review. Nothing is judged here (see `analysis.story`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.report import fault_bands
from analysis.rundir import RunDir
from analysis.story import Operation, Story, story_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib is imported where it is used: a verdict must not need it.

_COLOURS = {"scale_out": "tab:green", "scale_in": "tab:purple"}
_WORDS = {"scale_out": "out", "scale_in": "in"}
_SHORT_S = 0.004
"""A window is at least this part of the picture wide, or nobody would see it."""


def read(directory: RunDir) -> Story:
    """The story of a run. Raises BadInput: the events cannot be read."""
    return story_of(directory.read_events())


def scale_story(story: Story) -> Figure | None:
    """Replicas, requests, throughput and latency, with operations, drains and decisions over them.

    None when nothing was scaled: there is no picture of that.
    """
    if not story.operations and not story.decisions:
        return None
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        4, 1, sharex=True, figsize=(12, 10), constrained_layout=True, height_ratios=[1.3, 1, 1, 1]
    )  # fmt: skip
    timeline, times = story.timeline, story.timeline.times_s()
    scaled = {one.service for one in story.decisions} or set(story.replicas)
    _replicas(story, axes[0], scaled)
    _drains(story, axes[0])
    axes[1].step(times, timeline.in_flight(), where="mid", linewidth=1, color="tab:blue", label="in flight at engines")
    if story.queue:
        at = [row[0] for row in story.queue]
        axes[1].plot(at, [row[1] for row in story.queue], "v-", markersize=3, linewidth=0.8, color="tab:red",
                     label="waiting, as the autoscaler saw it")  # fmt: skip
    axes[1].set_ylabel("requests")
    axes[2].step(times, timeline.rates("tokens"), where="mid", linewidth=1, color="tab:blue", label="tokens answered")
    axes[2].set_ylabel("tokens per second")
    failed = timeline.rates("failed")
    if any(failed):
        twin = axes[2].twinx()
        twin.step(times, failed, where="mid", linewidth=1, color="tab:red", label="failed requests per second")
        twin.set_ylabel("failed per second")
    for percent, colour in ((50, "tab:blue"), (99, "tab:red")):
        series = [float("nan") if value is None else value for value in timeline.latency_s(percent)]
        axes[3].plot(times, series, ".", markersize=3, color=colour, label=f"p{percent}")
    axes[3].set_ylabel("latency, s")
    axes[3].set_xlabel("time, s")
    _windows(story, list(axes))
    _decisions(story, list(axes))
    _legends(list(axes))
    axes[0].set_xlim(*_span(story))
    figure.suptitle("Replicas, load and what was decided")
    return figure


def training(story: Story) -> Figure | None:
    """Training steps with every gap, those at both edges of the run too, over the replicas and the judge's load.

    None when nothing was trained.
    """
    if not story.progress:
        return None
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        4, 1, sharex=True, figsize=(12, 9), constrained_layout=True, height_ratios=[0.8, 1, 1, 1]
    )  # fmt: skip
    span = _span(story)
    bars = [(one.started_s, (span[1] if one.ended_s is None else one.ended_s) - one.started_s, one.number)
            for one in story.steps.values()]  # fmt: skip
    for start, length, step in bars:
        axes[0].broken_barh([(start, length)], (0.1, 0.8), color="tab:blue", alpha=0.45 + 0.35 * (step % 2))
        axes[0].text(start + length / 2, 0.5, str(step), ha="center", va="center", color="white", fontsize="small")
    for kind, marker in (("rollout", "o"), ("weights", "^")):
        at = [t for t, what in story.progress if what.startswith(kind)]
        axes[0].plot(at, [1.05] * len(at), marker, markersize=5, linestyle="", label=f"{kind} done", clip_on=False)
    axes[0].set_ylim(0, 1.6)
    axes[0].set_yticks([])
    axes[0].set_ylabel("training steps")
    gaps = story.gaps()
    for index, gap in enumerate(gaps):
        edge = index in (0, len(gaps) - 1)
        colour = "tab:orange" if edge else "tab:red" if gap.during else "tab:grey"
        axes[1].broken_barh([(gap.from_s, gap.seconds)], (0, gap.seconds), color=colour, alpha=0.6)
    longest = max(gaps, key=lambda one: one.seconds)
    axes[1].annotate(f"{longest.seconds:.1f} s", ((longest.from_s + longest.to_s) / 2, longest.seconds), ha="center",
                     va="bottom", fontsize="small")  # fmt: skip
    for colour, text in (("tab:orange", "edge of the run"), ("tab:red", "during scaling"), ("tab:grey", "otherwise")):
        axes[1].plot([], [], "s", color=colour, alpha=0.6, label=text)
    axes[1].set_ylim(0, longest.seconds * 1.25)
    axes[1].set_ylabel("gap without\nprogress, s")
    _replicas(story, axes[2], set(story.replicas))
    _drains(story, axes[2])
    times = story.timeline.times_s()
    for name in story.timeline.replicas:
        axes[3].step(times, story.timeline.in_flight(name), where="mid", linewidth=1, label=name)
    axes[3].set_ylabel("in flight")
    axes[3].set_xlabel("time, s")
    _windows(story, list(axes))
    _legends(list(axes))
    axes[0].set_xlim(*span)
    figure.suptitle("Training while its judge is scaled")
    return figure


def _legends(axes: list[Axes]) -> None:
    """Beside the picture: there is no corner in which nothing may happen."""
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def _span(story: Story) -> tuple[float, float]:
    return story.begin_s, max(story.end_s, story.begin_s + 1e-3)


def _replicas(story: Story, axis: Axes, services: set[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    _, last = _span(story)
    highest = 1
    for index, service in enumerate(name for name in story.replicas if name in services):
        rows = [row for row in story.replicas[service] if row[0] <= last]
        at = [row[0] for row in rows] + [last]
        colour = f"C{index}"
        for column, style, what in ((2, "-", "ready"), (1, ":", "processes")):
            series = [row[column] for row in rows] + [rows[-1][column]]
            axis.step(at, series, style, where="post", color=colour, linewidth=1.6, label=f"{service}: {what}")
            highest = max(highest, *map(int, series))
    axis.set_ylabel("replicas")
    axis.set_ylim(0, highest + 0.8)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def _drains(story: Story, axis: Axes) -> None:
    """A hatched window from the choice of a victim to its end; the line in it: idle."""
    _, last = _span(story)
    for number, drain in enumerate(story.drains):
        gone = last if drain.gone_s is None else drain.gone_s
        axis.axvspan(drain.chosen_s, max(gone, drain.chosen_s + _least(story)), ymax=0.25, facecolor="none",
                     edgecolor="tab:purple", hatch="////", linewidth=0,
                     label="drain of a victim" if number == 0 else None)  # fmt: skip
        if drain.idle_s is not None:
            axis.axvline(drain.idle_s, ymax=0.25, color="tab:purple", linewidth=1)


def _least(story: Story) -> float:
    first, last = _span(story)
    return (last - first) * _SHORT_S


def _windows(story: Story, axes: list[Axes]) -> None:
    _, last = _span(story)
    for index, one in enumerate(story.operations.values()):
        ends = last if one.ended_s is None else one.ended_s
        for axis in axes:
            axis.axvspan(one.asked_s, max(ends, one.asked_s + _least(story)), alpha=0.13, linewidth=0,
                         color=_COLOURS[one.direction])  # fmt: skip
        axes[0].text(one.asked_s, 0.98 - 0.09 * (index % 2), _label(one), fontsize="x-small", va="top",
                     color=_COLOURS[one.direction], transform=axes[0].get_xaxis_transform())  # fmt: skip
    for start_s, end_s, _ in fault_bands(story.timeline):
        for axis in axes:
            axis.axvspan(start_s, max(end_s, start_s + _least(story)), color="tab:orange", alpha=0.18, linewidth=0)


def _label(one: Operation) -> str:
    took = "open" if one.ended_s is None else f"{one.ended_s - one.asked_s:.1f} s"
    return f" {_WORDS[one.direction]}: {one.state}, {took}{'' if one.clean is not False else ', not clean'}"


def _decisions(story: Story, axes: list[Axes]) -> None:
    for number, one in enumerate(story.decisions):
        for axis in axes:
            axis.axvline(one.at_s, color=_COLOURS[one.action], linestyle="--", linewidth=1,
                         label=None if number or axis is not axes[0] else "decision")  # fmt: skip
        axes[0].hlines(0.35, one.onset_s, one.at_s, color=_COLOURS[one.action], linewidth=2)
        axes[0].text(one.at_s, 0.4, f" {one.at_s - one.onset_s:.1f} s held", fontsize="x-small",
                     color=_COLOURS[one.action])  # fmt: skip
