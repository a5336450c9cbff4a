"""What a run's processes have written so far, as the driver sees it while they go on writing."""

from __future__ import annotations

import pathlib

from protocol.evidence import Event, decode

Process = tuple[str, int]


class EvidenceTail:
    """Follows the logs below ``events/`` of a run. ``look`` reads what is new; everything else is as of then.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder, "events")
        self._read: dict[str, int] = {}  # file name to bytes taken in
        self.events = 0
        self.sent = 0
        self.done = 0
        self.faults = 0
        self.open_calls: dict[int, Event] = {}
        self.deaths: dict[Process, Event] = {}
        self.born: dict[Process, int] = {}
        """Engines, in the order in which they were launched."""

    def look(self) -> None:
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.iterdir()):
            at = self._read.get(path.name, 0)
            if path.stat().st_size == at:
                continue
            with path.open("rb") as file:
                file.seek(at)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path.name] = at + len(whole)
            for line in whole.splitlines():
                self._take(decode(line))

    def open_calls_of_the_living(self) -> list[Event]:
        """The sends of calls that have not ended and whose caller lives."""
        return [sent for sent in self.open_calls.values() if (sent.actor, sent.inc) not in self.deaths]

    def _take(self, event: Event) -> None:
        self.events += 1
        kind = event.kind
        if kind == "call.sent":
            self.open_calls[event.data["call"]] = event
        elif kind == "call.done":
            self.open_calls.pop(event.data["call"], None)
        elif kind == "request.sent":
            self.sent += 1
        elif kind == "request.done":
            self.done += 1
        elif kind == "fault.injected":
            self.faults += 1
        elif kind == "actor.died":
            self.deaths.setdefault((event.actor, event.inc), event)
        elif kind == "actor.spawned" and event.data["role"] == "engine":
            self.born.setdefault((event.actor, event.inc), len(self.born))
