"""trace.json: a Chrome trace of actors, requests and faults that Perfetto (ui.perfetto.dev) opens.

Format: the JSON Trace Event Format. Times are microseconds. Actors are threads, requests and engine runs async slices,
in-flight counts counters, faults async slices of a process of their own, deaths and readiness instants.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
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


def trace_events(events: Iterable[Event], max_requests: int = MAX_REQUESTS) -> Iterator[dict[str, Any]]:
    """The trace's records, streamed. State is bounded by what is open."""
    tracer = _Tracer(max_requests)
    for pid, name in ((ACTORS, "actors"), (REQUESTS, "requests"), (FAULTS, "faults")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    last_ns = 0
    for event in events:
        last_ns = max(last_ns, event.t_ns)
        yield from tracer.see(event)
    yield from tracer.close(last_ns)


class _Tracer:
    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._threads: dict[str, int] = {}
        self._born: dict[str, tuple[int, int]] = {}  # actor -> (time, incarnation)
        self._stopped: dict[str, int] = {}
        self._requests: dict[str, tuple[int, dict[str, Any]]] = {}  # open: sent time, drawn or not in args
        self._drawn = 0
        self._runs: dict[tuple[str, int, str], None] = {}
        self._in_flight: dict[str, int] = {}
        self._faults: dict[int, str] = {}

    def see(self, event: Event) -> Iterator[dict[str, Any]]:
        kind, data = event.kind, event.data
        if event.actor not in self._threads:
            yield self._thread(event.actor)
        if kind == "actor.spawned":
            self._born[event.actor] = (event.t_ns, event.inc)
        elif kind == "actor.died":
            yield from self._end_of_life(event.actor, event.t_ns)
            yield from self._end_runs(event)
        elif kind == "actor.stopped":
            self._stopped[event.actor] = event.t_ns
        elif kind == "actor.continued" and event.actor in self._stopped:
            yield self._slice("stopped", event.actor, self._stopped.pop(event.actor), event.t_ns, {})
        elif kind == "request.sent":
            args = {"prompt_tokens": data["prompt_tokens"], "max_new_tokens": data["max_new_tokens"]}
            self._requests[data["request"]] = (event.t_ns, args)
            if self._drawn < self._max_requests:
                self._drawn += 1
                args["drawn"] = True
                yield self._async("b", REQUESTS, "request", data["request"], data["request"], event.t_ns, args)
        elif kind == "request.done":
            yield from self._request_done(event)
        elif kind == "engine.accepted":
            yield from self._run(event, 1)
        elif kind == "engine.finished":
            yield from self._run(event, -1)
        elif kind == "fault.injected":
            name = f"{data['name']} on {data['target']}"
            self._faults[data["fault"]] = name
            args = {"params": data["params"], "must_hit": data["must_hit"], "observed": data["observed"]}
            yield self._async("b", FAULTS, "fault", str(data["fault"]), name, event.t_ns, args)
        elif kind == "fault.healed" and data["fault"] in self._faults:
            args = {"hits": data["hits"], "satisfied": data["satisfied"]}
            name = self._faults.pop(data["fault"])
            yield self._async("e", FAULTS, "fault", str(data["fault"]), name, event.t_ns, args)
        if kind in _INSTANTS:
            yield {
                "ph": "i",
                "s": "t",
                "name": _INSTANTS[kind],
                "cat": kind,
                "pid": ACTORS,
                "tid": self._threads[event.actor],
                "ts": event.t_ns / 1000,
                "args": {"seq": event.seq, **data},
            }

    def close(self, last_ns: int) -> Iterator[dict[str, Any]]:
        """End whatever is still open, so that every slice has both ends."""
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

    def _request_done(self, event: Event) -> Iterator[dict[str, Any]]:
        data = event.data
        sent_ns, args = self._requests.pop(data["request"], (None, {}))
        if sent_ns is None or ("drawn" not in args and data["outcome"] == "done"):
            return
        if "drawn" not in args:  # a failure past the limit: drawn afterwards, whole
            yield self._async("b", REQUESTS, "request", data["request"], data["request"], sent_ns, args)
        told = {key: data[key] for key in ("outcome", "status", "error", "replica", "version", "attempts")}
        yield self._async("e", REQUESTS, "request", data["request"], data["request"], event.t_ns, told)

    def _run(self, event: Event, change: int) -> Iterator[dict[str, Any]]:
        request = event.data["request"]
        key = (event.actor, event.inc, request)
        if change > 0:
            drawn = "drawn" in self._requests.get(request, (0, {}))[1] and key not in self._runs
            if drawn:
                self._runs[key] = None
        else:
            drawn = key in self._runs
            self._runs.pop(key, None)
        count = max(0, self._in_flight.get(event.actor, 0) + change)
        self._in_flight[event.actor] = count
        if not drawn:
            return
        name = f"{event.actor}/{event.inc}"
        args = {"reason": event.data["reason"], "spans": event.data["spans"]} if change < 0 else {}
        yield self._async("b" if change > 0 else "e", REQUESTS, "run", request, name, event.t_ns, args)
        yield self._counter(event.actor, event.t_ns)

    def _end_runs(self, event: Event) -> Iterator[dict[str, Any]]:
        for key in [key for key in self._runs if key[0] == event.actor and key[1] == event.inc]:
            del self._runs[key]
            yield self._async("e", REQUESTS, "run", key[2], f"{key[0]}/{key[1]}", event.t_ns, {"reason": "died"})
        if self._in_flight.pop(event.actor, 0):
            yield self._counter(event.actor, event.t_ns)

    def _end_of_life(self, actor: str, t_ns: int) -> Iterator[dict[str, Any]]:
        if actor in self._born:
            since, inc = self._born.pop(actor)
            yield self._slice(f"{actor}/{inc}", actor, since, t_ns, {"incarnation": inc})

    def _thread(self, actor: str) -> dict[str, Any]:
        tid = self._threads[actor] = len(self._threads) + 1
        return {"ph": "M", "name": "thread_name", "pid": ACTORS, "tid": tid, "args": {"name": actor}}

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


def write_trace(directory: RunDir, max_requests: int = MAX_REQUESTS) -> int:
    """Write ``trace.json`` whole or not at all; returns the number of records.

    Raises:
        BadInput: the events cannot be read or the folder cannot be written.
    """
    count = 0
    with atomic_file(directory.trace) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for record in trace_events(directory.read_events(), max_requests):
            file.write(b",\n" if count else b"\n")
            file.write(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
            count += 1
        file.write(b"\n]}\n")
    return count
