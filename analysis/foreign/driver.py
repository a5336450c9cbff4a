"""The driver's own record of a published run (``events.json``) as our events."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from analysis.foreign.builder import Builder, Replicas
from analysis.foreign.files import Record, number, text, whole

_REFUSED = re.compile(r"/(scale_out|scale_in)/([^/\s]+?)(/reconcile)?\s*->\s*(\d{3})")
_LISTS = (
    "baseline_engines",
    "phase0_engines",
    "phase1_engines",
    "phase2_engines",
    "s1_engines",
    "s2_engines",
    "s3_engines",
)
_DONE = re.compile(r"(s\d+)_(done|requests)$")


def address(value: Any) -> str | None:
    """``host:port`` of any of the forms in which engines are named, else None."""
    if isinstance(value, str) and value.count(":") == 1:
        return value
    if isinstance(value, dict):
        value = [value.get("host"), value.get("port")]
    if isinstance(value, list) and len(value) >= 2 and isinstance(value[0], str) and whole(value[1]) is not None:
        return f"{value[0]}:{whole(value[1])}"
    return None


class Driver:
    """Turns one record after the other.

    Args:
        builder: takes the events.
        offset_s: what to take off a record's time.
    """

    def __init__(self, builder: Builder, offset_s: float) -> None:
        self.builder = builder
        self.offset_s = offset_s
        self.replicas = Replicas()
        self.notes: list[str] = []
        self.ended_s: float | None = None
        self.times: dict[str, float] = {}
        """Record name to the time of its latest occurrence."""
        self.verdict: Record | None = None
        self.baseline_gpus: float | None = None
        self._gpus: float | None = None
        self._operations: dict[str, str] = {}  # direction -> id of the latest one
        self._ops_total: dict[str, str] = {}  # id -> direction
        self._in_flight: tuple[str, int] | None = None  # victim, requests on it
        self._killed: int | None = None
        self._faults = 0
        self._calls_from = 0.0
        self._workload = False
        self._now = 0.0

    def take(self, record: Record) -> None:
        """One record of the file. Records come in the order of the file, which is that of time."""
        t_s = float(record["t"]) - self.offset_s
        if t_s < self._now:
            # A payload may overwrite the record's own time; the place in the file is still known.
            self.notes.append(f"{text(record.get('event'), 40)!r} is out of order and was put at its place in the file")
            t_s = self._now
        self._now = t_s
        name = text(record.get("event"), 80)
        if not name:
            self.notes.append(f"a record at {t_s:.3f} s has no event and was left out")
            return
        self.times[name] = t_s
        handler = self._handlers().get(name)
        if handler is None and (done := _DONE.match(name)):
            self._calls(t_s, done.group(1), record)
            if "scale_in" in record:
                self._state(t_s, "scale_in", {"status": record["scale_in"]})
        elif handler is not None:
            handler(t_s, record)
        if not self._refusal(t_s, record) and name not in ("verdicts", "engines_snapshot"):
            payload = {key: value for key, value in record.items() if key not in ("t", "event")}
            self.builder.add(t_s, "foreign.event", name=name, payload=payload)

    def _handlers(self) -> dict[str, Callable[[float, Record], None]]:
        return {
            "ray_init": self._ray,
            "pg_created": self._group,
            **dict.fromkeys(_LISTS, self._engines),
            "engines_snapshot": self._engines,
            "elastic_served_check": self._served,
            "phase1_served_counts_mid": self._served,
            "scale_out_submitted": lambda t, r: self._submitted(t, "scale_out", r),
            "scale_in_submitted": lambda t, r: self._submitted(t, "scale_in", r),
            **{f"s{n}_scale_in_submitted": lambda t, r: self._submitted(t, "scale_in", r) for n in range(1, 10)},
            "scale_out_status": lambda t, r: self._state(t, "scale_out", r),
            "scale_in_status": lambda t, r: self._state(t, "scale_in", r),
            "scale_out_final": lambda t, r: self._state(t, "scale_out", r),
            "scale_in_final": lambda t, r: self._state(t, "scale_in", r),
            "s2_registry_failed_dirty": lambda t, r: self._state(t, "scale_in", r),
            "s2_mutex_check": self._mutex,
            "s2_reconcile_result": self._reconciled,
            "victim_inflight_confirmed": self._victim,
            "s3_victim_killed": self._kill,
            "baseline_ray_free_gpus": lambda t, r: self._resources(t, "baseline", number(r.get("free"))),
            "resource_baseline": self._resource_baseline,
            "gpu_snapshot": self._gpu_snapshot,
            "round_a_resources": self._round_resources,
            "round_b_resources": self._round_resources,
            "round_b_scaled_out": self._by_hand,
            "cleanup_result": self._cleanup,
            "load_stopped": self._load,
            "verdicts": self._verdicts,
            "e2e_done": self._done,
        }

    # --- resources
    def _ray(self, t_s: float, record: Record) -> None:
        resources = record.get("resources")
        held = resources.get("GPU") if isinstance(resources, dict) else record.get("gpus")
        self._gpus = number(held)

    def _group(self, t_s: float, record: Record) -> None:
        bundles = number(record.get("bundles"))
        if self._gpus is not None and bundles is not None and self.baseline_gpus is None:
            self._resources(t_s, "baseline", self._gpus - bundles)

    def _resources(
        self, t_s: float, when: str, free: float | None, groups: int | None = None, memory: Any = None, samples: int = 1
    ) -> None:
        if when == "baseline" and free is not None:
            self.baseline_gpus = free
        used = [number(one) for one in memory] if isinstance(memory, list) else None
        self.builder.add(
            t_s, "foreign.resources", when=when, free_gpus=free, groups=groups, memory_mib=used, samples=samples
        )

    def _resource_baseline(self, t_s: float, record: Record) -> None:
        self._resources(
            t_s, "baseline", number(record.get("free_gpus")), whole(record.get("pgs")), record.get("mem_mib")
        )

    def _gpu_snapshot(self, t_s: float, record: Record) -> None:
        free, lines = record.get("ray_free_gpus"), text(record.get("gpu_mem"), 4000)
        rows = [row.split(",") for row in str(record.get("gpu_mem", "")).splitlines()]
        memory = [_float(row[1]) if len(row) > 1 else None for row in rows] if lines else None
        tag = str(record.get("tag", ""))
        when = "baseline" if tag.startswith("baseline") else "final" if tag.startswith("after-scale-in") else "after"
        self._resources(t_s, when, number(free.get("GPU")) if isinstance(free, dict) else None, None, memory)

    def _round_resources(self, t_s: float, record: Record) -> None:
        free, groups = _pair(record.get("free")), _pair(record.get("pgs"))
        samples = 3 if record.get("mem_ok") is True else 1
        self._resources(
            t_s, "final", free[0], None if groups[0] is None else int(groups[0]), record.get("mem_mib"), samples
        )

    def _cleanup(self, t_s: float, record: Record) -> None:
        self._resources(t_s, "final", number(record.get("leftover_ray_free_gpus")))

    # --- the service
    def _workload_begins(self, t_s: float) -> None:
        if not self._workload:
            self._workload = True
            self.builder.add(t_s, "run.workload", "world")

    def begin(self, t_s: float) -> None:
        """Where times are counted from, if nothing in the record says so."""
        self._workload_begins(t_s)

    def _engines(self, t_s: float, record: Record) -> None:
        listed, served, in_flight = engines_in(record)
        if not listed:
            return
        names = self.replicas.listed(listed)
        initial = not self.replicas.initial
        if initial:
            self.replicas.initial = tuple(names)
        self.builder.add(
            t_s,
            "foreign.engines",
            current=whole(record.get("current")),
            served={name: served.get(one) for name, one in zip(names, listed, strict=True)},
            in_flight={name: in_flight.get(one) for name, one in zip(names, listed, strict=True)},
            initial=initial,
            whole=True,
        )
        self._calls_from = t_s
        if initial:
            self._workload_begins(t_s)

    def _served(self, t_s: float, record: Record) -> None:
        served = record.get("served")
        if isinstance(served, dict):
            counts = {self.replicas.known(one): whole(count) for one, count in served.items()}
        else:
            elastic = [name for name in self.replicas.names() if name not in self.replicas.initial]
            counts = {name: whole(record.get("elastic_served")) for name in elastic[:1]}
        known = {name: count for name, count in counts.items() if name is not None}
        if known:
            self.builder.add(
                t_s, "foreign.engines", current=whole(record.get("current")), served=known,
                in_flight=dict.fromkeys(known), initial=False, whole=False,
            )  # fmt: skip

    def _submitted(self, t_s: float, direction: str, record: Record) -> None:
        self._workload_begins(t_s)
        operation = record.get("request_id")
        initial = max(1, len(self.replicas.initial))
        target = whole(record.get("num_replicas")) or whole(record.get("target"))
        target = target or (initial + 1 if direction == "scale_out" else initial)
        state = text(record.get("status"), 40) or ("PENDING" if operation else "")
        named = isinstance(operation, str) and operation != ""
        if named:
            self._operations[direction] = str(operation)
            self._ops_total[str(operation)] = direction
        else:
            self._operations.pop(direction, None)
        self.builder.asked(
            t_s, direction, direction, target=target, timeout_s=number(record.get("timeout_secs")),
            admitted=str(operation) if named else "", state=state, current=whole(record.get("current")),
        )  # fmt: skip

    def _by_hand(self, t_s: float, record: Record) -> None:
        """Round B's scale-out, of which only the end is on record: it was asked for when round A was over."""
        began, operation = self.times.get("round_a_resources"), "round-b-by-hand"
        if began is not None:
            initial = max(1, len(self.replicas.initial))
            state = "ACTIVE" if record.get("active") is True else ""
            self.builder.asked(began, "scale_out", "scale_out", target=initial + 1, admitted=operation, state="PENDING")
            self.builder.asked(t_s, "status", "scale_out", operation, state=state)

    def _state(self, t_s: float, direction: str, record: Record) -> None:
        operation, state = self._operations.get(direction), text(record.get("status"), 40)
        if operation is None:
            self.notes.append(f"a {direction} is {state or 'without a state'}, and no submission of it is on record")
            return
        cleanup = record.get("cleanup_required")
        self.builder.asked(
            t_s, "status", direction, operation, state=state,
            cleanup={True: "true", False: "false"}.get(cleanup, "unknown") if isinstance(cleanup, bool) else "unknown",
            current=whole(record.get("current")), ready=whole(record.get("ready")),
        )  # fmt: skip
        if direction == "scale_in" and state == "COMPLETED":
            self.replicas.only_initial()

    def _mutex(self, t_s: float, record: Record) -> None:
        held = record.get("held") is True
        initial = max(1, len(self.replicas.initial))
        status, code = (409, "CONFLICT") if held else (200, "")
        self.builder.asked(t_s, "scale_out", "scale_out", target=initial + 2, status=status, code=code)

    def _reconciled(self, t_s: float, record: Record) -> None:
        operation = self._operations.get("scale_in")
        cleanup, state = record.get("cleanup_required"), text(record.get("status"), 40)
        if operation is None or not isinstance(cleanup, bool):
            self.notes.append("a reconcile has no operation or no cleanup_required, and was left out")
            return
        said = "true" if cleanup else "false"
        self.builder.asked(t_s, "reconcile", "scale_in", operation, state=state, cleanup=said)
        self.builder.add(
            t_s, "scale.reconciled", operation=operation, direction="scale_in", state=state,
            cleanup_required=cleanup, detail=text(record.get("detail")),
        )  # fmt: skip
        if not cleanup:
            self.replicas.only_initial()

    def _refusal(self, t_s: float, record: Record) -> bool:
        """A refused question to the control API inside of an error text."""
        found = _REFUSED.search(str(record.get("error", "")))
        if found is None:
            return False
        direction, operation, reconcile, status = found.groups()
        said = str(record.get("error"))
        code = "LIFECYCLE_RUNNING" if "physical lifecycle" in said else "CONFLICT" if status == "409" else "HTTP"
        if operation in self._ops_total or operation in ("None", "null"):
            route = "reconcile" if reconcile else "status"
            self.builder.asked(t_s, route, direction, operation, status=int(status), code=code)
        else:
            self.notes.append(f"{operation} was refused with {status}, and no submission of it is on record")
        return True

    def failed(self, t_s: float, error: str) -> None:
        """The error that ended the run, where it tells of a refused question."""
        self._refusal(t_s, {"error": error})

    # --- calls and faults
    def _victim(self, t_s: float, record: Record) -> None:
        where, count = address(record.get("victim")), whole(record.get("inflight"))
        if where is None or count is None:
            self.notes.append("victim_inflight_confirmed names no victim or no number")
            return
        victim = self.replicas.name(where)
        self._in_flight = (victim, count)
        self.builder.add(
            t_s,
            "foreign.engines",
            current=None,
            served={victim: None},
            in_flight={victim: count},
            initial=False,
            whole=False,
        )

    def _kill(self, t_s: float, record: Record) -> None:
        pid = whole(record.get("pid"))
        if pid is None:
            self.notes.append("the victim has no process id: nothing was killed")
            return
        self._faults += 1
        victim, count = self._in_flight or ("", 0)
        must = {"in_flight": {"at_least": 1}}
        self.builder.add(
            t_s, "fault.injected", "world", fault=self._faults, name="sigkill", target=victim, params={},
            must_hit=must, observed={"in_flight": count},
        )  # fmt: skip
        self.builder.add(
            t_s,
            "fault.healed",
            "world",
            fault=self._faults,
            name="sigkill",
            target=victim,
            hits=count,
            satisfied=count >= 1,
        )
        self.builder.add(t_s, "run.healed", "world", faults=self._faults)

    def _calls(self, t_s: float, tag: str, record: Record) -> None:
        """Long calls, noted when all were over; they began when the engines were last listed."""
        for index, call in enumerate(record["requests"] if isinstance(record.get("requests"), list) else ()):
            if not isinstance(call, dict):
                self.notes.append(f"a call of {tag} is no object and was left out")
                continue
            began, latency, where = self._calls_from, number(call.get("latency")), address(call.get("engine"))
            ended = t_s if latency is None else min(t_s, began + max(0.0, latency))
            ok, request = call.get("ok") is True, f"{tag}-{index}"
            self.builder.add(
                began,
                "request.sent",
                "client-genrm-0-0",
                request=request,
                prompt_tokens=0,
                max_new_tokens=0,
                idempotent=True,
            )
            self.builder.add(
                ended, "request.done", "client-genrm-0-0", request=request, outcome="done" if ok else "unknown",
                status=200 if ok else 0, error="" if ok else text(call.get("error"), 80) or "failed",
                completion_tokens=0,
                version="", replica="" if where is None else self.replicas.latest(where), replica_inc=0, attempts=1,
            )  # fmt: skip
            reason = text(call.get("finish_reason"), 40)
            self.builder.add(ended, "foreign.event", name=f"{tag}_call", payload={"ok": ok, "finish_reason": reason})

    def _load(self, t_s: float, record: Record) -> None:
        sent, failed = whole(record.get("total")), whole(record.get("failed"))
        if sent is None or failed is None:
            self.notes.append("load_stopped has no total or no number of failures")
        elif self.times.get("load_counted") is None:  # some runs note it twice
            self.times["load_counted"] = t_s
            self.builder.add(t_s, "foreign.load", sent=sent, failed=failed)

    # --- the end
    def _verdicts(self, t_s: float, record: Record) -> None:
        self.verdict = {key: value for key, value in record.items() if key not in ("t", "event")}
        self.ended_s = t_s

    def _done(self, t_s: float, record: Record) -> None:
        self.ended_s = t_s


def engines_in(record: Record) -> tuple[list[str], dict[str, int | None], dict[str, int | None]]:
    """Addresses that a record lists, what each has served, and what is in flight on it."""
    listed: list[str] = []
    served: dict[str, int | None] = {}
    in_flight: dict[str, int | None] = {}
    for key in ("initial", "ids", "engines"):
        for one in record[key] if isinstance(record.get(key), list) else ():
            where = address(one)
            if where is None or where in listed:
                continue
            listed.append(where)
            if isinstance(one, dict):
                served[where], in_flight[where] = whole(one.get("served")), whole(one.get("inflight"))
            elif isinstance(one, list) and len(one) > 2:
                served[where] = whole(one[2])
    for key in ("elastic", "victim"):
        where = address(record.get(key))
        if where is not None and where not in listed:
            listed.append(where)
    for key, counts in (("served", served), ("inflight", in_flight)):
        for where, count in record[key].items() if isinstance(record.get(key), dict) else ():
            if address(where) is not None:
                counts[where] = whole(count)
                if where not in listed:
                    listed.append(where)
    return listed, served, in_flight


def _pair(value: Any) -> tuple[float | None, float | None]:
    """``"3.0/3.0"``: what there is, and what there was."""
    now, _, before = str(value).partition("/")
    return _float(now), _float(before)


def _float(value: str) -> float | None:
    try:
        return number(float(value))
    except ValueError:
        return None
