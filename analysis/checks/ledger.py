"""What several checks need to know at once: open requests, weights, deaths, faults. Bounded by what is open.

The judge lets the ledger see an event before the checks do, and lets it close a request after they have.
"""

from __future__ import annotations

from collections.abc import Callable

from analysis.checks.publishing_views import PAUSE
from analysis.checks.shadow import Shadow
from analysis.order import Order, parse_cause
from analysis.rundir import Preregistered
from protocol.evidence import Event

Process = tuple[str, int]

NOBODY = "nobody on record"
"""Who had an engine abort something, where evidence names nobody though somebody asked."""

_STUCK = ("deadlock", "livelock", "endless_callback", "time_limit")


class Run:
    """A request being run by an engine, or that an engine finished."""

    __slots__ = ("abort", "accepted_seq", "cause", "completion_tokens", "engine", "finished_seq", "version")

    def __init__(self, engine: Process, accepted_seq: int, cause: str | None) -> None:
        self.engine = engine
        self.accepted_seq = accepted_seq
        self.cause = cause  # the send of whoever had it run
        self.abort: str | None = None  # the send of whoever asked for its end; empty: not on record
        self.finished_seq = 0
        self.completion_tokens = 0
        self.version = ""


class Request:
    """One request that a client or an engine still has open."""

    __slots__ = ("abort_asker", "aborted", "done_seq", "idempotent", "refused", "runs", "sent_ns", "sent_seq")

    def __init__(self, sent_seq: int, sent_ns: int, idempotent: bool) -> None:
        self.sent_seq = sent_seq
        self.sent_ns = sent_ns
        self.idempotent = idempotent
        self.done_seq = 0
        self.runs: list[Run] = []
        self.refused: tuple[int, int] | None = None  # seq and status of an engine's 4xx
        self.aborted = False  # an engine ended a run of it before its end
        self.abort_asker = ""  # who had an engine do so; never the one who had sent it there. Or NOBODY

    def is_running(self) -> bool:
        return any(not run.finished_seq for run in self.runs)


class Ledger:
    """State shared by the checks of one run.

    Args:
        preregistered: thresholds fixed before the run.
    """

    def __init__(self, preregistered: Preregistered) -> None:
        self.preregistered = preregistered
        self.order = Order()
        self.causal: Order | None = None  # the same where it must be fed; None where the file order is the order
        self.requests: dict[str, Request] = {}
        self.requests_sent = 0
        self.events = 0
        self.last: Event | None = None
        self.started: Event | None = None
        self.finished: Event | None = None
        self.shadow = Shadow()
        self.healed: Event | None = None
        self.broken: Event | None = None
        """The world itself broke (a full disk, the end of Ray): nothing that went wrong is held against components."""
        self.roles: dict[Process, str] = {}
        self.nodes: dict[Process, str] = {}
        self.newest: dict[str, int] = {}
        self.dead: dict[str, int] = {}  # name -> highest dead incarnation
        self.deaths: dict[Process, Event] = {}
        self.zombie_nodes: dict[str, bool] = {}
        self.open_calls: dict[int, Event] = {}
        """Number to send of the calls that have not ended at a living caller. Kept by the judge."""
        self.ended_calls = 0
        """How many of them have ended."""
        # Per engine process: its latest POST and the send of it, that of its latest pause, that of one that aborts now.
        self._posts: dict[Process, tuple[int, str]] = {}
        self._pauses: dict[Process, str] = {}
        self._aborting: dict[Process, str] = {}

    @property
    def world(self) -> str:
        """``"sim"``, ``"real"`` or ``"imported"`` (analysis/foreign); empty before the run has begun."""
        return "" if self.started is None else str(self.started.data["world"])

    def before(self) -> dict[str, Callable[[Event], None]]:
        """Handlers that run before those of the checks."""
        return {
            "run.started": self._started,
            "run.finished": self._finished,
            "run.healed": self._healed,
            "run.tail": self._tail,
            "actor.spawned": self._spawned,
            "actor.died": self._died,
            "node.lost": self._node_lost,
            "node.restored": self._node_restored,
            "publishing.deployed": self.shadow.deployed,
            "request.sent": self._sent,
            "engine.accepted": self._accepted,
            "engine.refused": self._refused,
            "engine.post": self._posted,
            "engine.abort_asked": self._abort_asked,
            "engine.paused": self._paused,
            "engine.resumed": self._resumed,
            "actor.death_noticed": self.shadow.noticed,
            "fault.injected": self.shadow.injected,
            "fault.healed": self.shadow.healed,
        }

    def after(self) -> dict[str, Callable[[Event], None]]:
        """Handlers that run after those of the checks."""
        return {"engine.finished": self._engine_finished, "request.done": self._done, "actor.died": self._forget_runs}

    # --- the run
    def _started(self, event: Event) -> None:
        self.started = event
        self.order = Order(event.data["clock_error_ns"])
        self.causal = self.order if self.order.clock_error_ns else None

    def _finished(self, event: Event) -> None:
        self.finished = event

    def _healed(self, event: Event) -> None:
        self.healed = event

    def _tail(self, event: Event) -> None:
        if event.data["what"] == "broken":
            self.broken = event

    # --- processes
    def _spawned(self, event: Event) -> None:
        process = (event.actor, event.inc)
        self.roles[process] = event.data["role"]
        self.nodes[process] = event.data["node"]
        self.shadow.spawned(event)
        self.newest[event.actor] = max(event.inc, self.newest.get(event.actor, event.inc))

    def _died(self, event: Event) -> None:
        self.dead[event.actor] = max(event.inc, self.dead.get(event.actor, event.inc))
        self.deaths[event.actor, event.inc] = event
        for call in [c for c, sent in self.open_calls.items() if sent.actor == event.actor and sent.inc == event.inc]:
            del self.open_calls[call]

    def _node_lost(self, event: Event) -> None:
        self.zombie_nodes[event.data["node"]] = event.data["zombie"]

    def _node_restored(self, event: Event) -> None:
        self.zombie_nodes.pop(event.data["node"], None)

    def is_zombie(self, process: Process) -> bool:
        """Whether the process was declared dead with its node while it may still act: that is the fault itself."""
        return self.zombie_nodes.get(self.nodes.get(process, ""), False)

    # --- requests
    def _sent(self, event: Event) -> None:
        data = event.data
        self.requests_sent += 1
        self.shadow.sent(event)
        request = data["request"]
        if request not in self.requests:  # sending an id twice is for nothing_lost to judge
            self.requests[request] = Request(event.seq, event.t_ns, data["idempotent"])

    def _accepted(self, event: Event) -> None:
        self.shadow.accepted(event)
        request = self.requests.get(event.data["request"])
        if request is not None:
            request.runs.append(Run((event.actor, event.inc), event.seq, event.cause))

    def _refused(self, event: Event) -> None:
        request = self.requests.get(event.data["request"])
        if request is None:
            return
        engine = (event.actor, event.inc)
        there = [run for run in request.runs if run.engine == engine and not run.finished_seq]
        if self.world == "real" and there:
            # What stands in front of a real engine sees a request go in before it can see it refused. The latest of
            # that id there: an id that is running already is refused, and goes on running.
            request.runs.remove(there.pop())
        # That an id is live where it was sent before is the doing of whoever sent it twice, and no refusal of it.
        if 400 <= event.data["status"] < 500 and not (there and "Duplicate request ID" in event.data["why"]):
            request.refused = (event.seq, event.data["status"])

    # --- who has engines end what they run. All of it is seen by one process, so that its order is known.
    def _posted(self, event: Event) -> None:
        engine = (event.actor, event.inc)
        self._posts[engine] = (event.n, event.cause or "")
        if event.data["route"] == PAUSE:
            self._pauses[engine] = event.cause or ""

    def _abort_asked(self, event: Event) -> None:
        engine = (event.actor, event.inc)
        number, asker = self._posts.get(engine, (0, ""))
        if event.cause is not None:
            asker = event.cause
        elif event.n != number + 1:
            return  # nobody's POST: the engine has seen that whoever had sent it has left
        for name, request in self.requests.items():
            if event.data["everything"] or name == event.data["request"]:
                for run in request.runs:
                    if run.engine == engine and not run.finished_seq:
                        run.abort = asker

    def _paused(self, event: Event) -> None:
        engine = (event.actor, event.inc)
        if event.data["mode"] == "abort":
            self._aborting[engine] = event.cause or self._pauses.get(engine, "")

    def _resumed(self, event: Event) -> None:
        self._aborting.pop((event.actor, event.inc), None)

    def _aborted(self, request: Request, run: Run) -> None:
        """An engine ended a run before its end. That the one who had sent it there wanted that explains nothing."""
        request.aborted = True
        why = self._aborting.get(run.engine) if run.abort is None else run.abort
        if why is None:
            return
        asker = parse_cause(why)[0][0] if why else NOBODY
        sender = parse_cause(run.cause)[0][0] if run.cause else ""
        if asker != sender:
            request.abort_asker = asker

    def running_at(self, request: Request, engine: Process) -> Run | None:
        """The unfinished run of a request at an engine."""
        for run in request.runs:
            if not run.finished_seq and run.engine == engine:
                return run
        return None

    def _engine_finished(self, event: Event) -> None:
        data = event.data
        name = data["request"]
        request = self.requests.get(name)
        if request is None:
            return
        run = self.running_at(request, (event.actor, event.inc))
        if run is not None:
            run.finished_seq = event.seq
            run.completion_tokens = data["completion_tokens"]
            if data["reason"] == "abort":
                self._aborted(request, run)
            spans = data["spans"]
            run.version = spans[-1][0] if spans else ""
        if request.done_seq and not request.is_running():
            del self.requests[name]

    def _done(self, event: Event) -> None:
        name = event.data["request"]
        request = self.requests.get(name)
        if request is None:
            return
        if request.is_running():
            request.done_seq = event.seq  # the client gave up; an engine has not
        else:
            del self.requests[name]

    def _forget_runs(self, event: Event) -> None:
        # What a dead engine was running will never finish there.
        process = (event.actor, event.inc)
        if self.roles.get(process, "engine") != "engine":
            return
        self._posts.pop(process, None)
        self._pauses.pop(process, None)
        self._aborting.pop(process, None)
        over = []
        for name, request in self.requests.items():
            if any(run.engine == process and not run.finished_seq for run in request.runs):
                request.runs = [run for run in request.runs if run.engine != process or run.finished_seq]
                if request.done_seq and not request.is_running():
                    over.append(name)
        for name in over:
            del self.requests[name]

    # --- how the run ended
    @property
    def last_ns(self) -> int:
        return self.last.t_ns if self.last is not None else 0

    @property
    def completed(self) -> bool:
        return self.finished is not None and self.finished.data["reason"] == "completed"

    @property
    def ended(self) -> bool:
        """What has not come will not come any more. A driver that crashed or was interrupted cut the run short."""
        return self.completed or self.stuck

    @property
    def stuck(self) -> bool:
        """The run ended because nothing went on: what is open then will never end."""
        return self.finished is not None and self.finished.data["reason"] in _STUCK

    @property
    def hung(self) -> bool:
        """As ``stuck``, and not for a limit of time: what is open would never end, however long the run went on."""
        return self.stuck and self.finished is not None and self.finished.data["reason"] != "time_limit"
