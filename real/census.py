"""Who runs where: one small file a process name in the run's folder, kept current by the process itself.

The injector must know at once, and without asking anybody, what a fault is about to meet: whether a process lives,
on which node, under which pid, and how many requests are in flight at it. A process that is stopped or blocked at a
breakpoint answers no question, so it writes the answers down beforehand, into memory that outlives it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pathlib
import signal
import socket
import struct
import urllib.parse
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, NamedTuple

_IN_FLIGHT: Final = struct.Struct("<q")
_SIZE: Final = 4096
_PF_EXITING: Final = 0x4  # include/linux/sched.h

Role = Literal["actor", "engine", "driver"]
Process = tuple[str, int]
"""(name, incarnation)"""


class ProcessCard(NamedTuple):
    """What is known of the latest incarnation of a name.

    ``host``: the machine on which its pids mean something. ``keeper``: pid of the process that keeps the card and
    writes the evidence: that of an engine's host, else its own.
    """

    name: str
    incarnation: int
    role: Role
    node: str
    pid: int
    born: int
    keeper: int
    host: str
    in_flight: int

    @property
    def is_here(self) -> bool:
        """Whether it is on this process's machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether the process exists, is no zombie and has not begun to die.

        Raises RuntimeError: it is on another machine, of which this one's /proc says nothing; see ``Census.is_alive``.
        """
        if not self.is_here:
            raise RuntimeError(f"{self.name} runs on {self.host}; who is alive there is not seen from here")
        # The kernel gives pids again: the start time tells one process from the next. A dying process closes its
        # connections before it becomes a zombie, so that its clients may know of its death sooner than its state.
        try:
            state, flags, born = _stat(self.pid)
            if state in "ZX" or born != self.born or flags & _PF_EXITING:
                return False
            return not _is_pending(self.pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return False


class OwnCard:
    """The card of a process, as whoever runs it keeps it. The newest card of a name counts.

    Args:
        folder: of the run.
        node: name of its node.
        pid: of the process itself; of an engine, its main process.
    """

    def __init__(self, folder: str, *, name: str, incarnation: int, role: Role, node: str, pid: int) -> None:
        card = {
            "name": name, "incarnation": incarnation, "role": role, "node": node, "pid": pid, "born": _born(pid),
            "keeper": os.getpid(), "host": socket.gethostname(),
        }  # fmt: skip
        path = _path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{incarnation}")
        fresh.write_bytes((_IN_FLIGHT.pack(0) + json.dumps(card).encode() + b"\n").ljust(_SIZE, b"\0"))
        with open(fresh, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        os.replace(fresh, path)
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """Calls or generation requests between acceptance and answer."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self._in_flight = count
        _IN_FLIGHT.pack_into(self._memory, 0, count)


class Census:
    """Reads the cards of a run.

    Args:
        folder: of the run.
        dead_of: tells which of some processes, (name, incarnation) each, are known to be dead. It is asked about those
            of other machines alone; without it nobody is known to be dead there.
    """

    def __init__(self, folder: str, dead_of: Callable[[list[Process]], Collection[Process]] = lambda _: ()) -> None:
        self._folder = folder
        self._dead_of = dead_of

    def find(self, name: str) -> ProcessCard | None:
        """The latest incarnation of a name, dead or alive; None when there never was one."""
        try:
            raw = _path(self._folder, name).read_bytes()
        except FileNotFoundError:
            return None
        (in_flight,) = _IN_FLIGHT.unpack_from(raw)
        card: dict[str, Any] = json.loads(raw[_IN_FLIGHT.size : raw.index(b"\n", _IN_FLIGHT.size)])
        return ProcessCard(in_flight=in_flight, **card)

    def node_of(self, name: str) -> str:
        """The node of a name; empty when nobody ever had it."""
        card = self.find(name)
        return "" if card is None else card.node

    def everybody(self) -> list[ProcessCard]:
        """The latest incarnation of every name, in the order of names."""
        with contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(pathlib.Path(self._folder, "processes")))
            cards = (self.find(urllib.parse.unquote(name[:-5])) for name in names if name.endswith(".card"))
            return [card for card in cards if card is not None]
        return []

    def living(self) -> list[ProcessCard]:
        """As ``everybody``, without the dead. On other machines: without those whose death somebody knows of."""
        cards = self.everybody()
        elsewhere = [(card.name, card.incarnation) for card in cards if not card.is_here]
        dead = set(self._dead_of(elsewhere)) if elsewhere else set()
        return [card for card in cards if (card.alive if card.is_here else (card.name, card.incarnation) not in dead)]

    def is_alive(self, card: ProcessCard) -> bool:
        """Whether a process lives; on another machine, whether nobody knows of its death."""
        if card.is_here:
            return card.alive
        return not self._dead_of([(card.name, card.incarnation)])


def _path(folder: str, name: str) -> pathlib.Path:
    return pathlib.Path(folder, "processes", f"{urllib.parse.quote(name, safe='')}.card")


def _born(pid: int) -> int:
    """Start time of a process in clock ticks since the machine's; 0 for one that has ended already."""
    try:
        return _stat(pid)[2]
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _stat(pid: int) -> tuple[str, int, int]:
    """From /proc/PID/stat, by proc_pid_stat(5): letter of the state, flags, start time in clock ticks."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[6]), int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, as by SIGSTOP, or is about to be and does nothing any more."""
    try:
        return _stat(pid)[0] == "T" or _is_pending(pid, signal.SIGSTOP)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a signal has been sent to a process that has not run since. SIGKILL is pending to its end."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    pending = int(status.partition("ShdPnd:")[2].split(maxsplit=1)[0], 16)
    return bool(pending >> (number - 1) & 1)
