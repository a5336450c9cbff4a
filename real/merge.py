"""One ``events.jsonl`` out of the logs that a run's processes have left, judged like any other.

Events are ordered by time, but never before their process's previous event, nor before their cause. What another
process wrote of a process (kill, SIGSTOP: ``n`` from ``OBSERVED`` on) keeps its place behind the writer's event that
led to it; a death moreover behind the last thing that its victim did, for a signal takes a moment to arrive.

What is missing is said: a last line that a death cut short, and a process that is gone without a word of its death.
"""

from __future__ import annotations

import dataclasses
import heapq
import pathlib
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from protocol.evidence import Event, decode
from real.evidence import OBSERVED

Process = tuple[str, int]

SIGNAL_NS: Final = 3_000_000_000
"""For so long after its recorded death a process may still have been at work: the signal was on its way."""


class Tail(NamedTuple):
    """A log that has no proper end. ``what``: torn or silent."""

    process: Process
    what: str
    detail: str


class MergeFailed(Exception):
    """A log holds what no process of this version writes; the text names file and line."""


class Merged(NamedTuple):
    """The evidence of a run, in order.

    ``inversion_ns``: by how much the clocks put an effect before its cause at worst; 0 when they never did.
    """

    events: list[Event]
    tails: list[Tail]
    inversion_ns: int


class Log(NamedTuple):
    """What one process has written. ``cut``: bytes of a last line that lacks its end."""

    process: Process
    events: list[Event]
    cut: int = 0


def read_logs(folder: pathlib.Path) -> list[Log]:
    """The logs below ``events/``, in the order of their names.

    Raises:
        MergeFailed: a line that is not the last is no event.
    """
    logs = []
    for path in sorted(folder.glob("*.jsonl")):
        events: list[Event] = []
        cut = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    cut = len(line)
                    break
                try:
                    events.append(decode(line))
                except ValueError as error:
                    raise MergeFailed(f"{path}: line {number}: {error}") from error
        own = next((event for event in events if event.n < OBSERVED), None)
        if own is not None:
            logs.append(Log((own.actor, own.inc), events, cut))
        elif events or cut:
            logs.append(Log((path.stem, -1), events, cut))
    return logs


def merge(logs: Iterable[Log], alive: Collection[Process] = (), until_ns: int | None = None) -> Merged:
    """Order the events of all processes.

    Args:
        logs: one a process.
        alive: processes that lived when the run ended: no death of theirs is missing.
        until_ns: the end of the run. What is later was done by processes that were being taken down, of which one
            sees the other die, and is no part of the evidence.
    """
    logs = [log if until_ns is None else _until(log, until_ns) for log in logs]
    tails = [Tail(log.process, "torn", f"its last line was cut short after {log.cut} bytes") for log in logs if log.cut]
    streams = [*_split(logs), *([event] for event in _silent_deaths(logs, alive, tails))]
    ordered, inversion_ns = _order(streams)
    return Merged([dataclasses.replace(event, seq=seq) for seq, event in enumerate(ordered, 1)], tails, inversion_ns)


def _until(log: Log, until_ns: int) -> Log:
    return log._replace(events=[event for event in log.events if event.t_ns <= until_ns])


# --- what is missing ---


def _silent_deaths(logs: list[Log], alive: Collection[Process], tails: list[Tail]) -> Iterator[Event]:
    """A death for every process that is gone without one: at the last time that it is known to have lived."""
    died = {(event.actor, event.inc) for log in logs for event in log.events if event.kind == "actor.died"}
    lost_nodes: dict[str, int] = {}
    for log in logs:
        for event in log.events:
            if event.kind == "node.lost":
                lost_nodes[event.data["node"]] = event.t_ns
    for log in logs:
        own = [event for event in log.events if event.n < OBSERVED]
        born = next((event for event in own if event.kind == "actor.spawned"), None)
        if born is None or born.data["role"] == "driver" or log.process in died or log.process in alive:
            continue
        last = own[-1]
        lost = lost_nodes.get(born.data["node"], -1) >= last.t_ns
        tails.append(Tail(log.process, "silent", f"it is gone, and its log ends with {last.kind} ({last.id})"))
        yield Event(
            0, last.t_ns, "actor.died", *log.process, OBSERVED, last.lc + 1, last.id,
            {"reason": "node_lost" if lost else "crashed", "detail": "it wrote nothing of its death"},
        )  # fmt: skip


# --- order ---


def _split(logs: list[Log]) -> Iterator[list[Event]]:
    """The events of each process, and every event that one wrote of another by itself."""
    for log in logs:
        yield [event for event in log.events if event.n < OBSERVED]
        for event in log.events:
            if event.n >= OBSERVED:
                yield [event]


@dataclasses.dataclass(slots=True)
class _Stream:
    events: list[Event]
    at: int = 0


def _order(streams: Iterable[list[Event]]) -> tuple[list[Event], int]:
    lines = [_Stream(events) for events in streams if events]
    times = {event.id: event.t_ns for line in lines for event in line.events}
    last = {
        (line.events[-1].actor, line.events[-1].inc): line.events[-1] for line in lines if line.events[-1].n < OBSERVED
    }
    ready: list[tuple[int, int]] = []
    waiting: dict[str, list[int]] = {}
    done: set[str] = set()
    held: dict[int, str] = {}
    ordered: list[Event] = []
    inversion_ns = 0

    def offer(number: int) -> None:
        """Put a stream where its next event belongs: among the ready ones, or behind what it waits for."""
        line = lines[number]
        if line.at == len(line.events):
            return
        event = line.events[line.at]
        for needed in _before(event, last):
            if needed in times and needed not in done:
                waiting.setdefault(needed, []).append(number)
                held[number] = needed
                return
        held.pop(number, None)
        heapq.heappush(ready, (event.t_ns, number))

    for number in range(len(lines)):
        offer(number)
    while ready or held:
        if not ready:
            # Causes in a circle, which no run writes: the earliest goes first, and the order of the others follows.
            number = min(held, key=lambda one: (lines[one].events[lines[one].at].t_ns, one))
            waiting[held.pop(number)].remove(number)
            heapq.heappush(ready, (lines[number].events[lines[number].at].t_ns, number))
        _, number = heapq.heappop(ready)
        line = lines[number]
        event = line.events[line.at]
        line.at += 1
        ordered.append(event)
        done.add(event.id)
        if event.cause is not None:
            inversion_ns = max(inversion_ns, times.get(event.cause, event.t_ns) - event.t_ns)
        offer(number)
        for waiter in waiting.pop(event.id, ()):
            offer(waiter)
    return ordered, inversion_ns


def _before(event: Event, last: dict[Process, Event]) -> Iterator[str]:
    """Ids of the events that an event must follow, beside the one before it in its own stream."""
    if event.cause is not None:
        yield event.cause
    if event.kind == "actor.died" and event.n >= OBSERVED:
        final = last.get((event.actor, event.inc))
        if final is not None and final.t_ns <= event.t_ns + SIGNAL_NS:
            yield final.id
