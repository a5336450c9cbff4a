"""Boards from the evidence of a run: one that is over, or one that goes on and whose files grow.

Replicas and requests are what the world saw of them. What an autoscaler saw and decided is its own account (component
events), shown as that: no verdict is made of it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from analysis.errors import BadInput
from analysis.reader import EventReader
from analysis.rundir import RunDir, RunInfo
from protocol.evidence import Event, decode
from protocol.messages import service_of
from protocol.scaling.decision import IN_CONDITIONS, OUT_CONDITIONS, conditions
from protocol.scaling.metrics import Frame
from protocol.scaling.policy import AutoscalerConfig, Rules
from scenarios.monitor.board import (
    UNKNOWN,
    Board,
    ConditionRow,
    HistoryRow,
    latest,
    nothing_known,
    number,
    pair,
    share,
)

LIVE = "live.json"
"""In the directory of a real run while it goes on: ``{"folder": where its processes write their evidence}``."""


class Watched:
    """One service of a run, as far as its events have been fed.

    Args:
        service: its name.
        source: which run, for people.
        rules: what its autoscaler was told; None where that is not known.
        config: the same for all services.
    """

    def __init__(self, service: str, source: str, config: AutoscalerConfig | None) -> None:
        self.service = service
        self._source = source
        self._config = config
        self._rules: Rules | None = None if config is None else config.rules(service)
        self.seen = False
        self.over = ""
        self.t_s = 0.0
        self._alive: dict[str, bool] = {}
        """Replica to whether it is ready."""
        self._running: dict[str, int] = {}
        self._deployed: dict[str, Any] | None = None
        self._latest: dict[str, Any] | None = None
        self._last_action = ""
        self._accepted = 0
        self._rows: dict[str, HistoryRow] = {}
        self._asked: dict[str, dict[str, Any]] = {}
        self._handlers: dict[str, Callable[[Event], None]] = {
            "actor.spawned": self._on_spawned,
            "actor.died": self._on_died,
            "engine.ready": self._on_ready,
            "engine.accepted": self._on_accepted,
            "engine.finished": self._on_finished,
            "autoscaler.deployed": self._on_deployed,
            "autoscaler.evaluated": self._on_evaluated,
            "autoscaler.request": self._on_request,
            "scale.asked": self._on_asked,
            "scale.answered": self._on_answered,
            "scale.state": self._on_state,
            "scale.terminal": self._on_terminal,
            "scale.reconciled": self._on_reconciled,
            "run.finished": self._on_end,
        }

    def feed(self, event: Event) -> None:
        self.t_s = max(self.t_s, event.t_s)
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)

    # --- the world ---

    def _mine(self, name: str) -> bool:
        return service_of(name) == self.service

    def _on_spawned(self, event: Event) -> None:
        if event.data["role"] == "engine" and self._mine(event.actor):
            self.seen = True
            self._alive[event.actor] = False
            self._running[event.actor] = 0

    def _on_died(self, event: Event) -> None:
        self._alive.pop(event.actor, None)
        self._running.pop(event.actor, None)

    def _on_ready(self, event: Event) -> None:
        if event.actor in self._alive:
            self._alive[event.actor] = True

    def _on_accepted(self, event: Event) -> None:
        if event.actor in self._running:
            self._running[event.actor] += 1

    def _on_finished(self, event: Event) -> None:
        if self._running.get(event.actor):
            self._running[event.actor] -= 1

    def _on_end(self, event: Event) -> None:
        self.over = str(event.data["reason"])

    # --- the autoscaler ---

    def _on_deployed(self, event: Event) -> None:
        if event.data["service"] == self.service:
            self._deployed = event.data

    def _on_evaluated(self, event: Event) -> None:
        if event.data["service"] == self.service:
            self._latest = event.data

    def _on_request(self, event: Event) -> None:
        data = event.data
        if data["service"] != self.service:
            return
        name = data["operation"] or data["key"]
        known = self._rows.pop(data["key"], None) or self._rows.get(name)
        if data["what"] == "accepted":
            self._accepted += 1
            self._last_action = f"{data['action']} at {event.t_s:.1f} s"
        choice = self._latest or {}
        reason = str(choice.get("reason", "")) if choice.get("action") == data["action"] else ""
        row = known or HistoryRow(name, data["action"], "", event.t_s, f"{event.t_s:.1f} s")
        self._rows[name] = dataclasses.replace(
            row, name=name, action=data["action"], status=data["state"], cleanup=data["cleanup"],
            to_engines=data["target"], from_engines=row.from_engines or choice.get("current"),
            reason=row.reason or reason,
        )  # fmt: skip

    # --- operations ---

    def _on_asked(self, event: Event) -> None:
        if event.data["service"] == self.service and event.data["route"] == event.data["direction"]:
            self._asked[event.data["ask"]] = {**event.data, "t_s": event.t_s}

    def _on_answered(self, event: Event) -> None:
        data, asked = event.data, self._asked.pop(event.data["ask"], None)
        if asked is None:
            known = self._rows.get(data["operation"])
            if known is not None and data["state"]:
                self._rows[known.name] = dataclasses.replace(known, status=data["state"], cleanup=data["cleanup"])
            return
        status = data["state"] or data["code"] or ("ERROR" if data["status"] else "no answer")
        name = data["operation"] or asked["key"] or data["ask"]
        row = HistoryRow(
            name, asked["direction"], status, asked["t_s"], f"{asked['t_s']:.1f} s", data["current"], asked["target"],
            reason="" if data["operation"] else f"HTTP {data['status']}",
        )  # fmt: skip
        if data["operation"] or name not in self._rows:
            self._rows.setdefault(name, row)

    def _on_state(self, event: Event) -> None:
        known = self._rows.get(event.data["operation"])
        if known is not None:
            self._rows[known.name] = dataclasses.replace(known, status=event.data["state"])

    def _on_terminal(self, event: Event) -> None:
        known = self._rows.get(event.data["operation"])
        if known is not None:
            left = "true" if event.data["cleanup_required"] else "false"
            self._rows[known.name] = dataclasses.replace(known, status=event.data["state"], cleanup=left)

    def _on_reconciled(self, event: Event) -> None:
        known = self._rows.get(event.data["operation"])
        if known is not None:
            left = "true" if event.data["cleanup_required"] else "false"
            self._rows[known.name] = dataclasses.replace(known, cleanup=left)

    # --- what is shown ---

    def board(self) -> Board:
        """As of the latest event."""
        when = f"{self.t_s:.1f} s{f', over: {self.over}' if self.over else ''}"
        history = latest(self._rows.values())
        if not self.seen:
            so_far = "nothing but its operations was seen" if history else "nothing was seen of this service so far"
            empty = nothing_known(self._source, self.service, when, so_far, history)
            return dataclasses.replace(empty, over=bool(self.over))
        note = "" if self._deployed is not None else "no autoscaler looks after this service"
        out, in_ = self._conditions()
        return Board(
            self._source, self.service, when, self._figures(), out, in_, history, note, bool(self.over)
        )  # fmt: skip

    def _figures(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {
            "engines": number(len(self._alive)),
            "ready": number(sum(self._alive.values())),
            "in flight": number(sum(self._running.values())),
        }
        if self._deployed is not None:
            told = self._deployed
            found |= {
                "min / max": pair(told["min_engines"], told["max_engines"]),
                "evaluation interval": number(told["evaluation_interval_s"], " s"),
                "cooldown out / in": pair(told["out_cooldown_s"], told["in_cooldown_s"], " s"),
                "operations in all": number(self._accepted),
                "last action": self._last_action or "none yet",
            }
        if self._rules is not None:
            found |= threshold_texts(self._rules)
        if self._latest is not None:
            found |= frame_texts(self._latest["frame"])
            found["last decision"] = f"{self._latest['action']}: {self._latest['reason']}"
        return found

    def _conditions(self) -> tuple[tuple[ConditionRow, ...], tuple[ConditionRow, ...]]:
        if self._latest is None or self._rules is None:
            empty = nothing_known("", "", "", "")
            return empty.scale_out, empty.scale_in
        frame, held = dict(self._latest["frame"]), self._latest["streaks"]
        seen = conditions(
            Frame(**{**frame, "unknown_engines": tuple(frame["unknown_engines"])}, taken_s=0.0), self._rules
        )

        def rows(names: tuple[str, ...], required_s: float) -> tuple[ConditionRow, ...]:
            return tuple(
                ConditionRow(name, seen[name].value, seen[name].threshold, _met(seen[name]), held.get(name), required_s)
                for name in names
            )

        rules = self._rules
        return (
            rows(OUT_CONDITIONS, float(rules.scale_out.condition_duration_secs)),
            rows(IN_CONDITIONS, float(rules.scale_in.condition_duration_secs)),
        )


def _met(found: Any) -> bool | None:
    return None if found.value is None else bool(found.holds)


def frame_texts(frame: Any) -> dict[str, str | None]:
    """The figures of one frame of metrics, of whatever shape it turns out to be."""
    seen = frame if isinstance(frame, dict) else {}
    unknown = seen.get("unknown_engines")

    def latency(name: str) -> str | None:
        text = number(seen.get(name), " s", 3)
        return text if text is None or seen.get(f"{name}_overflow") is not True else f"above {text}"

    return {
        "queue": number(seen.get("total_queue_reqs")),
        "running": number(seen.get("total_running_reqs")),
        "token usage": share(seen.get("avg_token_usage")),
        "throughput": number(seen.get("total_throughput"), " tokens/s", 0),
        "throughput variance": number(seen.get("throughput_variance"), "", 3),
        "queue time p95": latency("max_queue_time_p95"),
        "ttft p95": latency("max_ttft_p95"),
        "itl p95": latency("max_itl_p95"),
        "coverage": share(seen.get("coverage")),
        "unknown engines": (", ".join(map(str, unknown)) or "none") if isinstance(unknown, list | tuple) else None,
    }


def threshold_texts(rules: Rules) -> dict[str, str | None]:
    """What the conditions compare with."""
    out, in_ = rules.scale_out, rules.scale_in
    return {
        "thresholds out": (
            f"usage > {share(out.token_usage_threshold)}, queue > {number(out.queue_depth_per_engine)} an engine, "
            f"queue time > {number(out.queue_time_p95_threshold)} s, ttft > {number(out.ttft_p95_threshold)} s"
        ),
        "thresholds in": (
            f"usage < {share(in_.token_usage_threshold)}, queue ≤ {number(in_.queue_depth_threshold)}, "
            f"variance < {number(in_.throughput_variance_threshold)}, then usage ≤ {share(in_.projected_usage_max)}"
        ),
    }


# --- runs ---


def services_of(info: RunInfo) -> dict[str, AutoscalerConfig | None]:
    """The scaled services of a run with what their autoscalers were told; from the scenario's text."""
    try:
        services = yaml.safe_load(info.scenario_text)["topology"]["services"]
        scaled = {str(name): one["scaling"] for name, one in services.items() if "scaling" in one}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):  # not one of ours: nothing is known of it
        return {}
    return {name: _told(name, one.get("autoscaler") if isinstance(one, dict) else None) for name, one in scaled.items()}


def _told(service: str, given: Any) -> AutoscalerConfig | None:
    if not isinstance(given, dict):
        return None
    target = {"service_targets": {service: "actor://here"}, "rollout_service_url": None}
    try:
        return AutoscalerConfig.model_validate({**given, **target})
    except ValidationError:  # of a version with other keys
        return None


def all_services_of(info: RunInfo) -> list[str]:
    """The services of a run, scaled or not; none where its scenario is none of ours."""
    try:
        return [str(name) for name in yaml.safe_load(info.scenario_text)["topology"]["services"]]
    except (yaml.YAMLError, KeyError, TypeError):
        return []


def chosen(names: list[str], asked: str | None, where: str, others: Sequence[str] = ()) -> str:
    """The service that is shown.

    Args:
        names: the scaled services.
        asked: what ``--service`` says.
        where: the source, for messages.
        others: what to show where nothing is scaled, on request.

    Raises:
        BadInput: there are several and none was named, there is none, or there is none of that name.
    """
    if asked is not None:
        known = names or others
        if known and asked not in known:
            raise BadInput(f"--service {asked}: {where} has {', '.join(known)}")
        return asked
    if len(names) == 1:
        return names[0]
    if not names:
        shown = f"; what it has is {', '.join(others)}" if others else ""
        raise BadInput(f"{where}: has no scaled service; give one with --service{shown}")
    raise BadInput(f"{where}: has {', '.join(names)}; name one of them with --service")


def info_of(path: pathlib.Path) -> RunInfo:
    """What a directory says of its run. Raises BadInput."""
    if not path.is_dir():
        raise BadInput(
            f"{path}: {'is no directory' if path.exists() else 'does not exist'}; name a run directory or a URL"
        )
    if not (path / "run.json").is_file():
        raise BadInput(f"{path}: no run directory (run.json is missing)")
    return RunDir(path).info()


class Follower:
    """The events of a run as they come. ``look`` gives what is new since the last one, oldest first.

    Args:
        path: the run directory.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._run = RunDir(path)
        self._read: dict[pathlib.Path, int] = {}
        self._whole = self.finished

    @property
    def finished(self) -> bool:
        """Whether the run was over when this was made: all of its evidence is there."""
        return self._run.manifest.is_file()

    def whole(self) -> Iterator[Event]:
        """Every event of a finished run. Raises BadInput: the evidence is broken."""
        yield from EventReader(self._run.events)

    def asked(self) -> list[str]:
        """The services of a finished run whose control API was asked for something: of an imported one, all we know.

        Raises BadInput: the evidence is broken.
        """
        events = self.whole() if self.finished else iter(())
        return list(dict.fromkeys(event.data["service"] for event in events if event.kind == "scale.asked"))

    def look(self) -> list[Event]:
        """What has been written since the last look. Raises BadInput: it can no longer be read."""
        found: list[Event] = []
        for path in self._files():
            found += self._more(path)
        found.sort(key=lambda event: event.t_ns)
        return found

    def _files(self) -> list[pathlib.Path]:
        try:
            live = json.loads((self._run.path / LIVE).read_text(encoding="utf-8"))
            return sorted(pathlib.Path(live["folder"], "events").iterdir())
        except FileNotFoundError:
            return [self._run.events] if self._run.events.is_file() else []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{self._run.path / LIVE}: cannot be read ({error})") from error

    def _more(self, path: pathlib.Path) -> list[Event]:
        at = self._read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(at)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # a line that is being written is for the next look
            self._read[path] = at + len(whole)
            return [decode(line) for line in whole.splitlines()]
        except FileNotFoundError:  # the run has just ended: its evidence is in the directory now
            return []
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read ({error})") from error


__all__ = [
    "LIVE",
    "UNKNOWN",
    "Follower",
    "Watched",
    "chosen",
    "frame_texts",
    "info_of",
    "services_of",
    "threshold_texts",
]
