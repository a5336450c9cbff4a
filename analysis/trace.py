"""trace.json: a Chrome trace of actors, requests and faults that Perfetto (ui.perfetto.dev) opens.

Format: the JSON Trace Event Format. Times are microseconds. Actors are threads, requests and engine runs async slices,
in-flight counts counters, faults async slices of a process of their own, deaths and readiness instants.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from analysis.rundir import RunDir, atomic_file
from protocol.evidence import Event

ACTORS, REQUESTS, FAULTS = 1, 2, 3
MAX_REQUESTS = 20_000
"""Requests drawn. A trace of a million requests is of no use to a viewer; failures and faults are always drawn."""

_INSTANTS = {
    "engine.ready": "ready",
    "engine.weights": "weights",
    "engine.paused": "paused",
    "engine.resumed": "resumed",
    "engine.refused": "refused",
    "actor.died": "died",
    "run.healed": "healed",
    "node.lost": "node lost",
    "storage.torn": "torn write",
}


class _Tracer:
    """The records of a trace. State is bounded by what is open."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._last_ns = 0
        self._threads: dict[str, int] = {}
        self._born: dict[str, tuple[int, int]] = {}  # actor -> (time, incarnation)
        self._stopped: dict[str, int] = {}
        self._requests: dict[str, tuple[int, dict[str, Any]]] = {}  # open: sent time, drawn or not in args
        self._drawn = 0
        self._runs: dict[tuple[str, int, str], None] = {}
        self._in_flight: dict[str, int] = {}
        self._faults: dict[int, str] = {}
        self._handlers: dict[str, Callable[[Event], Iterable[dict[str, Any]]]] = {
            **dict.fromkeys(_INSTANTS, self._instant),
            "actor.spawned": self._spawned,
            "actor.died": self._died,
            "actor.stopped": self._stop,
            "actor.continued": self._continue,
            "request.sent": self._request_sent,
            "request.done": self._request_done,
            "engine.accepted": self._accepted,
            "engine.finished": self._finished,
            "fault.injected": self._injected,
            "fault.healed": self._healed,
        }

    def head(self) -> Iterable[dict[str, Any]]:
        for pid, name in ((ACTORS, "actors"), (REQUESTS, "requests"), (FAULTS, "faults")):
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}

    def see(self, event: Event) -> Iterable[dict[str, Any]]:
        """The records that an event adds; an empty tuple for most, for a live run passes all of its events here."""
        self._last_ns = event.t_ns
        handler = self._handlers.get(event.kind)
        if handler is None:
            return ()
        return handler(event)

    def _instant(self, event: Event) -> Iterator[dict[str, Any]]:
        yield from self._thread(event.actor)
        yield {
            "ph": "i",
            "s": "t",
            "name": _INSTANTS[event.kind],
            "cat": event.kind,
            "pid": ACTORS,
            "tid": self._threads[event.actor],
            "ts": event.t_ns / 1000,
            "args": {"seq": event.seq, **event.data},
        }

    def _spawned(self, event: Event) -> Iterator[dict[str, Any]]:
        yield from self._thread(event.actor)
        self._born[event.actor] = (event.t_ns, event.inc)

    def _died(self, event: Event) -> Iterator[dict[str, Any]]:
        yield from self._thread(event.actor)
        yield from self._end_of_life(event.actor, event.t_ns)
        for key in [key for key in self._runs if key[0] == event.actor and key[1] == event.inc]:
            del self._runs[key]
            yield self._async("e", REQUESTS, "run", key[2], f"{key[0]}/{key[1]}", event.t_ns, {"reason": "died"})
        if self._in_flight.pop(event.actor, 0):
            yield self._counter(event.actor, event.t_ns)
        yield from self._instant(event)

    def _stop(self, event: Event) -> Iterable[dict[str, Any]]:
        self._stopped[event.actor] = event.t_ns
        return self._thread(event.actor)

    def _continue(self, event: Event) -> Iterator[dict[str, Any]]:
        if event.actor in self._stopped:
            yield self._slice("stopped", event.actor, self._stopped.pop(event.actor), event.t_ns, {})

    def _injected(self, event: Event) -> Iterator[dict[str, Any]]:
        data = event.data
        name = self._faults[data["fault"]] = f"{data['name']} on {data['target']}"
        args = {"params": data["params"], "must_hit": data["must_hit"], "observed": data["observed"]}
        yield self._async("b", FAULTS, "fault", str(data["fault"]), name, event.t_ns, args)

    def _healed(self, event: Event) -> Iterator[dict[str, Any]]:
        data = event.data
        name = self._faults.pop(data["fault"], None)
        if name is not None:
            args = {"hits": data["hits"], "satisfied": data["satisfied"]}
            yield self._async("e", FAULTS, "fault", str(data["fault"]), name, event.t_ns, args)

    def _request_sent(self, event: Event) -> Iterable[dict[str, Any]]:
        data = event.data
        args = {"prompt_tokens": data["prompt_tokens"], "max_new_tokens": data["max_new_tokens"]}
        self._requests[data["request"]] = (event.t_ns, args)
        if self._drawn >= self._max_requests:
            return ()
        self._drawn += 1
        args["drawn"] = True
        return (self._async("b", REQUESTS, "request", data["request"], data["request"], event.t_ns, args),)

    def _request_done(self, event: Event) -> Iterable[dict[str, Any]]:
        data = event.data
        sent_ns, args = self._requests.pop(data["request"], (None, {}))
        if sent_ns is None or ("drawn" not in args and data["outcome"] == "done"):
            return ()
        told = {key: data[key] for key in ("outcome", "status", "error", "replica", "version", "attempts")}
        end = self._async("e", REQUESTS, "request", data["request"], data["request"], event.t_ns, told)
        if "drawn" in args:
            return (end,)
        # A failure past the limit is drawn afterwards, whole.
        return (self._async("b", REQUESTS, "request", data["request"], data["request"], sent_ns, args), end)

    def _accepted(self, event: Event) -> Iterable[dict[str, Any]]:
        request = event.data["request"]
        self._in_flight[event.actor] = self._in_flight.get(event.actor, 0) + 1
        key = (event.actor, event.inc, request)
        if "drawn" not in self._requests.get(request, (0, {}))[1] or key in self._runs:
            return ()
        self._runs[key] = None
        name = f"{event.actor}/{event.inc}"
        begin = self._async("b", REQUESTS, "run", request, name, event.t_ns, {})
        return (begin, self._counter(event.actor, event.t_ns))

    def _finished(self, event: Event) -> Iterable[dict[str, Any]]:
        request = event.data["request"]
        self._in_flight[event.actor] = max(0, self._in_flight.get(event.actor, 0) - 1)
        key = (event.actor, event.inc, request)
        if key not in self._runs:
            return ()
        del self._runs[key]
        args = {"reason": event.data["reason"], "spans": event.data["spans"]}
        end = self._async("e", REQUESTS, "run", request, f"{event.actor}/{event.inc}", event.t_ns, args)
        return (end, self._counter(event.actor, event.t_ns))

    def close(self) -> Iterator[dict[str, Any]]:
        """End whatever is still open, so that every slice has both ends."""
        last_ns = self._last_ns
        for actor in list(self._stopped):
            yield self._slice("stopped", actor, self._stopped.pop(actor), last_ns, {"open": True})
        for actor in list(self._born):
            yield from self._end_of_life(actor, last_ns)
        for request, (_, args) in self._requests.items():
            if "drawn" in args:
                yield self._async("e", REQUESTS, "request", request, request, last_ns, {"outcome": "never ended"})
        for engine, inc, request in self._runs:
            yield self._async("e", REQUESTS, "run", request, f"{engine}/{inc}", last_ns, {"reason": "never ended"})
        for fault, name in self._faults.items():
            yield self._async("e", FAULTS, "fault", str(fault), name, last_ns, {"healed": False})

    def _end_of_life(self, actor: str, t_ns: int) -> Iterator[dict[str, Any]]:
        if actor in self._born:
            since, inc = self._born.pop(actor)
            yield self._slice(f"{actor}/{inc}", actor, since, t_ns, {"incarnation": inc})

    def _thread(self, actor: str) -> Iterable[dict[str, Any]]:
        """Name the thread of an actor that is drawn for the first time."""
        if actor in self._threads:
            return ()
        tid = self._threads[actor] = len(self._threads) + 1
        return ({"ph": "M", "name": "thread_name", "pid": ACTORS, "tid": tid, "args": {"name": actor}},)

    def _slice(self, name: str, actor: str, from_ns: int, to_ns: int, args: dict[str, Any]) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "cat": "process",
            "pid": ACTORS,
            "tid": self._threads[actor],
            "ts": from_ns / 1000,
            "dur": (to_ns - from_ns) / 1000,
            "args": args,
        }

    def _counter(self, actor: str, t_ns: int) -> dict[str, Any]:
        count = self._in_flight.get(actor, 0)
        return {
            "ph": "C",
            "name": f"in flight {actor}",
            "pid": ACTORS,
            "tid": 0,
            "ts": t_ns / 1000,
            "args": {"requests": count},
        }

    @staticmethod
    def _async(
        phase: str, pid: int, category: str, identity: str, name: str, t_ns: int, args: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": name,
            "cat": category,
            "id": identity,
            "pid": pid,
            "tid": 0,
            "ts": t_ns / 1000,
            "args": args,
        }


class TraceWriter:
    """Writes ``trace.json`` while events come, live or from a file; the file appears when the block ends well.

    Args:
        directory: of the run.
        max_requests: requests drawn at most, beside those that fail.

    Raises:
        BadInput: the folder cannot be written.
    """

    def __init__(self, directory: RunDir, max_requests: int = MAX_REQUESTS) -> None:
        self._stack = contextlib.ExitStack()
        self._path = directory.trace
        self._tracer = _Tracer(max_requests)
        self.records = 0

    def __enter__(self) -> TraceWriter:
        self._file = self._stack.enter_context(atomic_file(self._path))
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._put(self._tracer.head())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool | None:
        if error is not None:
            return self._stack.__exit__(kind, error, trace)
        with self._stack:  # what goes wrong here leaves no half file either
            self._put(self._tracer.close())
            self._file.write(b"\n]}\n")
        return None

    def feed(self, event: Event) -> None:
        """Take one event."""
        records = self._tracer.see(event)
        if records:
            self._put(records)

    def _put(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            self._file.write(b",\n" if self.records else b"\n")
            self._file.write(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
            self.records += 1


def write_trace(directory: RunDir, max_requests: int = MAX_REQUESTS) -> int:
    """Write ``trace.json`` from the evidence, whole or not at all; returns the number of records.

    Raises:
        BadInput: the events cannot be read or the folder cannot be written.
    """
    with TraceWriter(directory, max_requests) as writer:
        for event in directory.read_events():
            writer.feed(event)
    return writer.records
