"""Which fault explains a request that failed: one that was on at the time and can touch a request's path."""

from __future__ import annotations

from analysis.order import parse_cause
from protocol.evidence import Event

Process = tuple[str, int]

PROBE_PREFIX = "probe-"
"""What the ids of requests and sessions begin with by which a component tries something out: no client's."""

# These act on exports, metrics, clocks and placement groups. A request that fails while only they are on has failed for
# a reason of its own: serving must go on without any of them.
BESIDE_THE_PATH = frozenset(
    {
        "slow_export",
        "torn_export",
        "disk_full",
        "clock_skew",
        "metrics_missing",
        "metrics_stale",
        "metrics_nan",
        "placement_stuck",
        "removal_fails",
        "removal_refused",
    }
)


ACTOR_DIED = "ActorDied"
"""What whoever asks a dead actor is told."""


class FaultWindow:
    """A fault from its injection to its healing.

    ``killed_inc``: of the kill of an actor that is no engine, the incarnation that it ended. A kill is told as healed
    at once, for bringing the process back is somebody else's job; where that is nobody's, it is not healed at all:
    ``replaced_ns`` is when a later incarnation was there. ``missed_by``: who has learnt of the death.
    """

    __slots__ = (
        "end_ns", "fault", "injected_seq", "killed_inc", "missed_by", "name", "replaced_ns", "start_ns", "target",
    )  # fmt: skip

    def __init__(self, event: Event) -> None:
        self.fault: int = event.data["fault"]
        self.name: str = event.data["name"]
        self.target: str = event.data["target"]
        self.injected_seq = event.seq
        self.start_ns = event.t_ns
        self.end_ns: int | None = None
        self.killed_inc: int | None = None
        self.replaced_ns: int | None = None
        self.missed_by: dict[str, None] = {}

    def on(self, from_ns: int, to_ns: int, grace_ns: int) -> bool:
        """Whether it was on, or healed at most ``grace_ns`` ago, at some time of an interval."""
        return self.start_ns <= to_ns and (self.end_ns is None or from_ns <= self.end_ns + grace_ns)

    def missing(self, from_ns: int, to_ns: int, grace_ns: int) -> bool:
        """Whether it killed an actor of which no later incarnation was there, or only lately, at some time of one."""
        if self.killed_inc is None or self.start_ns > to_ns:
            return False
        return self.replaced_ns is None or from_ns <= self.replaced_ns + grace_ns


class Shadow:
    """The faults of a run, and the processes that requests go through.

    A request's path is made of the clients, the engines, whoever sends requests to engines, and the router and gates
    that the turns of agents pass. A fault on another process, or on a link of which neither end lies on the path,
    explains no failure.
    """

    def __init__(self) -> None:
        self.windows: dict[int, FaultWindow] = {}
        self._path: dict[str, None] = {}
        self._known: dict[str, None] = {}  # processes that were ever spawned
        self._nodes: dict[str, dict[str, None]] = {}  # node -> processes spawned there
        self._fed: dict[Process, None] = {}  # engines of which a sender is known
        self._actors: dict[str, int] = {}  # actors that are no engines -> newest incarnation
        self._killed: dict[str, list[FaultWindow]] = {}  # those of them that were killed and not replaced

    def spawned(self, event: Event) -> None:
        self._known[event.actor] = None
        if event.data["role"] == "actor":
            self._actors[event.actor] = max(event.inc, self._actors.get(event.actor, event.inc))
            if event.actor in self._killed:
                self._replaced(event)
        self._nodes.setdefault(event.data["node"], {})[event.actor] = None
        if event.data["role"] == "engine":
            self._path[event.actor] = None

    def deployed(self, event: Event) -> None:
        for name in (event.data["router"], *(gate for _, gate, _ in event.data["entrypoints"] if gate)):
            self._path[name] = None

    def sent(self, event: Event) -> None:
        self._path[event.actor] = None

    def accepted(self, event: Event) -> None:
        engine = (event.actor, event.inc)
        if engine in self._fed or event.cause is None or event.data["request"].startswith(PROBE_PREFIX):
            return
        self._fed[engine] = None
        self._path[event.actor] = None
        (sender, _), _ = parse_cause(event.cause)
        self._path[sender] = None

    def _replaced(self, event: Event) -> None:
        missing = []
        for window in self._killed.pop(event.actor):
            if window.killed_inc is not None and window.killed_inc < event.inc:
                window.replaced_ns = event.t_ns
            else:
                missing.append(window)
        if missing:
            self._killed[event.actor] = missing

    def injected(self, event: Event) -> None:
        self.windows[event.data["fault"]] = window = FaultWindow(event)
        if window.name == "sigkill" and window.target in self._actors:
            window.killed_inc = self._actors[window.target]
            self._killed.setdefault(window.target, []).append(window)

    def noticed(self, event: Event) -> None:
        for window in self._killed.get(event.data["target"], ()):
            if window.killed_inc == event.data["target_inc"]:
                window.missed_by[event.actor] = None

    def healed(self, event: Event) -> None:
        window = self.windows.get(event.data["fault"])
        if window is not None:
            window.end_ns = event.t_ns

    def explain(
        self, from_ns: int, to_ns: int, grace_ns: int, *, error: str = "", client: str = ""
    ) -> FaultWindow | None:
        """The latest fault that was on, or healed at most ``grace_ns`` ago, in an interval and touches the path.

        Where the failure is that an actor is dead, the kill of one that nobody has brought back explains it at any
        time: of one on the path, or one that ``client`` itself was told to be dead.

        Args:
            error: class of the error that the client was told.
            client: who was told.
        """
        found = None
        for window in self.windows.values():
            on = window.on(from_ns, to_ns, grace_ns)
            if on and window.name not in BESIDE_THE_PATH and self._touches(window.target):
                found = window
            elif error == ACTOR_DIED and window.missing(from_ns, to_ns, grace_ns):
                if client in window.missed_by or self._on_path(window.target):
                    found = window
        return found

    def _touches(self, target: str) -> bool:
        if ">" not in target:
            return self._on_path(target)
        ends = [end for end in target.split(">") if end != "*"]
        return not ends or any(self._on_path(end) for end in ends)

    def _on_path(self, name: str) -> bool:
        if name in self._path:
            return True
        if name in self._nodes:
            return any(process in self._path for process in self._nodes[name])
        return name not in self._known  # of a name that says nothing, the failure may have come
