"""The faults in force, as every process of a run sees them: one file that the injector replaces, one folder of hits.

``<folder>/faults/table.json`` holds what is in force and which event kinds are breakpoints. The injector replaces it
atomically; a reader stats it at each look and reads it again when it has changed. A hit is a file that is created with
O_EXCL, so that of many processes exactly ``count`` have one. Healing renames the folder of a fault's hits away and
waits for those that are just taking one (they hold a lock of it): from then on nobody has any. All of that survives a
SIGKILL at any instruction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import random
import time
import urllib.parse
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from protocol.evidence import Event

Emit = Callable[..., object]
"""``ProcessLog.emit``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """A fault in force. Which of the target's fields count depends on the fault.

    ``name``, ``source``, ``destination``: process or node names; a link's may have ``*`` and ``?``. ``links``: pairs of
    nodes that a partition or latency acts between. ``extra``: what only the real world must know of it.
    """

    number: int
    fault: str
    params: dict[str, Any]
    name: str = ""
    source: str = "*"
    destination: str = "*"
    prefix: str = ""
    links: tuple[tuple[str, str], ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """How many hits it has at most."""
        count: int | None = self.params.get("count")
        return count


class Armed(NamedTuple):
    """Events that somebody in the driver wants to see. ``wait``: their emitter is held until they have been seen."""

    where: dict[str, Any]
    from_ns: int
    wait: bool

    def wants(self, event: Event) -> bool:
        return event.t_ns >= self.from_ns and matches(event, self.where)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The content of the file at one time. ``armed``: by event kind; ``door``: socket of the driver that sees them."""

    faults: tuple[Standing, ...] = ()
    armed: dict[str, tuple[Armed, ...]] = dataclasses.field(default_factory=dict)
    door: str = ""


_EMPTY = Table()


def matches(event: Event, where: dict[str, Any]) -> bool:
    """Whether the named fields, or ``actor`` and ``inc`` of the envelope, are equal."""
    return all(
        event.data[key] == value if key in event.data else getattr(event, key, None) == value
        for key, value in where.items()
    )


class TableFile:
    """A reader of the table. ``look`` costs one ``stat`` while nothing changes.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str) -> None:
        self._path = _table_path(folder)
        self._version = 0
        self._table = _EMPTY

    def look(self) -> Table:
        """What is in force now; nothing where no injector ever was."""
        try:
            version = os.stat(self._path).st_mtime_ns  # the writer gives every version a time of its own
        except FileNotFoundError:
            return _EMPTY
        if version != self._version:
            with open(self._path, encoding="utf-8") as file:
                self._table = _decoded(json.load(file))
            self._version = version
        return self._table


class FaultTable:
    """The faults in force, for a process that may meet them.

    Args:
        folder: of the run.
        file: the reader of the process.
        emit: records the hits, as the process's own events.
        who: tells the draws of one process from another's.
    """

    def __init__(self, folder: str, file: TableFile, emit: Emit, who: str) -> None:
        self._folder = folder
        self._file = file
        self._emit = emit
        self._who = who
        self._next: dict[int, int] = {}  # by fault: hits known to be taken
        self._draws: dict[int, random.Random] = {}

    def active(self, *names: str) -> Iterator[Standing]:
        """The faults of these names that are in force, in the order of injection."""
        table = self._file.look()
        # The usual case first: this is asked for every message and every file.
        return (one for one in table.faults if one.fault in names) if table.faults else iter(())

    def none_of(self, names: frozenset[str]) -> bool:
        """No fault of these names is in force."""
        faults = self._file.look().faults
        return not faults or all(one.fault not in names for one in faults)

    def claim(self, standing: Standing, what: str, *, once: str | None = None) -> bool:
        """Take a hit, and record it, before its effect.

        Args:
            what: what the fault meets, for people.
            once: what meets the fault with the same text again has the effect again, and is no further hit.

        Returns:
            False: the fault is spent or healed, and must have no effect.
        """
        with _locked(_hits(self._folder, standing.number)) as folder:
            if folder is None:
                return False  # healed
            if once is not None and not _create("met-" + urllib.parse.quote(once, safe=""), folder):
                return True
            taken = self._next.get(standing.number, 0)
            mine = False
            while not mine and (standing.limit is None or taken < standing.limit):
                mine = _create(str(taken), folder)
                taken += 1
            self._next[standing.number] = taken
        if mine:  # not under the lock: a breakpoint may hold whoever emits
            self._emit("fault.hit", fault=standing.number, what=what, count=taken)
        return mine

    def chosen(self, standing: Standing) -> bool:
        """Whether a fault with a ``chance`` befalls this one."""
        chance = standing.params.get("chance", 1.0)
        if chance >= 1:
            return True
        draws = self._draws.get(standing.number)
        if draws is None:
            draws = self._draws[standing.number] = random.Random(f"{self._who}/{standing.number}")
        return draws.random() < chance

    def spend(self, standing: Standing, amount: int, budget: int) -> int:
        """Take from what all processes have together; returns what of ``amount`` there was."""
        path = pathlib.Path(self._folder, "faults", f"left-{standing.number}")
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given up by the kernel when its holder dies
            text = file.read()
            left = int(text) if text else budget
            # A write that does not fit fills the disk: what fitted of it is there.
            file.seek(0)
            file.truncate()
            file.write(str(max(0, left - amount)))
            return min(left, amount)

    def wall_skew_s(self, node: str) -> float:
        """By how much the wall clock of a node is off."""
        return sum((float(fault.params["step_s"]) for fault in self.active("clock_skew") if fault.name == node), 0.0)


@dataclasses.dataclass
class TableWriter:
    """The injector's side. One a run, in the driver."""

    folder: str
    door: str = ""
    _faults: dict[int, Standing] = dataclasses.field(default_factory=dict)
    _armed: dict[str, list[Armed]] = dataclasses.field(default_factory=dict)
    _version: int = 0

    def put(self, standing: Standing) -> None:
        """A fault is in force from now on."""
        os.makedirs(_hits(self.folder, standing.number), exist_ok=True)
        self._faults[standing.number] = standing
        self._write()

    def withdraw(self, number: int) -> None:
        """It is not any more; nobody can claim a hit when this has returned. Idempotent."""
        if self._faults.pop(number, None) is None:
            return
        hits = _hits(self.folder, number)
        folder = os.open(hits, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.rename(hits, _healed(self.folder, number))
            self._wait_for_claims(folder)
        finally:
            os.close(folder)
        self._write()

    @staticmethod
    def _wait_for_claims(folder: int) -> None:
        deadline = time.monotonic() + 1  # not for ever: one of them may be stopped
        while time.monotonic() < deadline:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.001)  # who has it creates one file; asking again at once would keep it from a core
            else:
                return

    def hits(self, number: int) -> int:
        """How many hits a fault has had, healed or not."""
        for folder in (_hits(self.folder, number), _healed(self.folder, number)):
            with contextlib.suppress(FileNotFoundError):
                return sum(name.isdigit() for name in os.listdir(folder))
        return 0

    def arm(self, kind: str, armed: Armed) -> None:
        """Have these events told to the driver."""
        self._armed.setdefault(kind, []).append(armed)
        self._write()

    def disarm(self, kind: str, armed: Armed) -> None:
        """Idempotent."""
        kept = [other for other in self._armed.get(kind, []) if other is not armed]
        if kept:
            self._armed[kind] = kept
        else:
            self._armed.pop(kind, None)
        self._write()

    def _write(self) -> None:
        path = _table_path(self.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        faults = [dataclasses.asdict(standing) for standing in self._faults.values()]
        armed = {kind: [one._asdict() for one in ones] for kind, ones in self._armed.items()}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"faults": faults, "armed": armed, "door": self.door}), encoding="utf-8")
        self._version += 1
        os.utime(fresh, ns=(self._version, self._version))  # the clock behind it is too coarse to tell versions apart
        os.replace(fresh, path)


def _decoded(raw: dict[str, Any]) -> Table:
    faults = tuple(Standing(**{**one, "links": tuple(map(tuple, one["links"]))}) for one in raw["faults"])
    armed = {kind: tuple(Armed(**one) for one in ones) for kind, ones in raw["armed"].items()}
    return Table(faults, armed, raw["door"])


def befalls(pattern: str, name: str, node: str) -> bool:
    """Whether the end of a link names this process, by itself or by its node; ``*`` and ``?`` match as in a shell."""
    return fnmatchcase(name, pattern) or fnmatchcase(node, pattern)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int | None]:
    """The folder of a fault's hits, open, while whoever heals it waits; None when it is healed."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        # It may have been renamed between the open and the lock. It can be after this look, but then its healer waits.
        yield folder if os.path.exists(path) else None
    finally:
        os.close(folder)


def _create(name: str, folder: int) -> bool:
    """Create a file in an open folder; False when it is there."""
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644, dir_fd=folder))
    except FileExistsError:
        return False
    return True


def _table_path(folder: str) -> pathlib.Path:
    return pathlib.Path(folder, "faults", "table.json")


def _hits(folder: str, number: int) -> str:
    return os.path.join(folder, "faults", "hits", str(number))


def _healed(folder: str, number: int) -> str:
    return os.path.join(folder, "faults", "hits", f"{number}.healed")
