"""Fit engine, network and actor costs to run directories of ours: ``python -m analysis calibrate RUN...``.

From evidence alone: when each request reached its engine and left it, what ran beside it, and how long it took to get
there and back. What the runs cannot tell keeps the value of a base profile. The result is a profile for ``engine:`` and
the ``--set`` arguments of a scenario that put the rest in place.

The model of a request on an engine is the simulated one's (sim/engine_cost.py), summed over its life::

    duration = fixed + per_prompt_token * prompt + base * steps + per_request * (steps * mean batch)
               + batched * (steps beside others) + stall * (prompts that came meanwhile)

fitted by least squares of errors relative to the expected duration; a cost that would be negative is left out. What the
requests took beyond that tells how the pace of an engine wanders (analysis/calibrate_pace.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from analysis.calibrate_input import CalibrationError, least_squares
from analysis.calibrate_output import profile_text
from analysis.calibrate_pace import Life, PaceFit, fit_pace
from analysis.errors import BadInput
from analysis.rundir import RunDir, write_atomic
from protocol.evidence import Event
from protocol.messages import service_of

_FEWEST = 40
_ROUNDS = 4
_PROFILES = pathlib.Path(__file__).parent.parent / "sim" / "profiles"
TERMS = ("fixed", "per prompt token", "step", "step per request", "step of several", "stall of a prompt")


@dataclasses.dataclass
class _Call:
    """One request on one engine."""

    engine: tuple[str, int]
    prompt: int
    accepted_ns: int
    finished_ns: int = 0
    tokens: int = 0
    cached: int = 0
    batch_ns: int = 0  # running requests, itself included, summed over time
    alone_ns: int = 0
    arrivals: int = 0


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was fitted. ``terms``: seconds by the names in TERMS. ``error_percent``: median of the requests' errors."""

    terms: dict[str, float]
    error_percent: float
    requests: int
    startup_s: float | None
    path_in_s: float | None
    path_out_s: float | None
    profile: str
    service: str
    pace: PaceFit = PaceFit()


class _Reader:
    """Folds one run into calls, start-ups and paths."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.startups: list[float] = []
        self.path_in: list[int] = []
        self.path_out: list[int] = []
        self.profiles: dict[str, None] = {}
        self.services: dict[str, None] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # request -> prompt tokens, time
        self._running: dict[tuple[str, int], dict[str, _Call]] = {}
        self._at: dict[tuple[str, int], int] = {}
        self._left: dict[str, int] = {}
        self._started: dict[tuple[str, int], float] = {}
        self._handlers = {
            "request.sent": self._on_sent,
            "engine.accepted": self._on_accepted,
            "engine.finished": self._on_finished,
            "request.done": self._on_done,
            "engine.started": self._on_started,
            "engine.ready": self._on_ready,
            "actor.died": lambda e: self._running.pop((e.actor, e.inc), None),
        }

    def feed(self, event: Event) -> None:
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event)

    def _advance(self, engine: tuple[str, int], t_ns: int) -> dict[str, _Call]:
        running = self._running.setdefault(engine, {})
        gap = t_ns - self._at.get(engine, t_ns)
        for call in running.values():
            call.batch_ns += gap * len(running)
            call.alone_ns += gap if len(running) == 1 else 0
        self._at[engine] = t_ns
        return running

    def _on_sent(self, event: Event) -> None:
        self._sent[event.data["request"]] = (event.data["prompt_tokens"], event.t_ns)

    def _on_accepted(self, event: Event) -> None:
        request = event.data["request"]
        sent = self._sent.get(request)
        running = self._advance((event.actor, event.inc), event.t_ns)
        for call in running.values():
            call.arrivals += 1
        if sent is not None:
            running[request] = _Call((event.actor, event.inc), sent[0], event.t_ns)
            self.path_in.append(event.t_ns - sent[1])

    def _on_finished(self, event: Event) -> None:
        data = event.data
        call = self._advance((event.actor, event.inc), event.t_ns).pop(data["request"], None)
        if call is None or data["reason"] == "abort" or not data["completion_tokens"]:
            return
        call.finished_ns, call.tokens, call.cached = event.t_ns, data["completion_tokens"], data["cached_tokens"]
        self.calls.append(call)
        self._left[data["request"]] = event.t_ns

    def _on_done(self, event: Event) -> None:
        left = self._left.pop(event.data["request"], None)
        self._sent.pop(event.data["request"], None)
        if left is not None and event.data["attempts"] == 1:
            self.path_out.append(event.t_ns - left)

    def _on_started(self, event: Event) -> None:
        self._started[event.actor, event.inc] = event.t_s
        self.profiles[event.data["profile"]] = None
        self.services[service_of(event.actor)] = None

    def _on_ready(self, event: Event) -> None:
        began = self._started.pop((event.actor, event.inc), None)
        if began is not None:
            self.startups.append(event.t_s - began)


def fit_runs(directories: Sequence[RunDir]) -> Fit:
    """Fit the costs to the requests of all these runs.

    Raises:
        BadInput: a run cannot be read.
        CalibrationError: too few requests, or they do not tell the costs apart.
    """
    readers = []
    for directory in directories:
        reader = _Reader()
        for event in directory.read_events():
            reader.feed(event)
        readers.append(reader)
    runs = [[call for call in reader.calls if call.finished_ns > call.accepted_ns] for reader in readers]
    calls = [call for run in runs for call in run]
    if len(calls) < _FEWEST:
        raise CalibrationError(
            f"{len(calls)} requests that an engine finished, fewer than {_FEWEST}; give runs with more of them"
        )
    terms, error = _fit(calls)
    pace = fit_pace([[_life(call, terms) for call in run] for run in runs])
    terms = {name: cost * pace.costs for name, cost in terms.items()}
    startups = [one for reader in readers for one in reader.startups]
    ways_in = [one for reader in readers for one in reader.path_in]
    ways_out = [one for reader in readers for one in reader.path_out]
    return Fit(
        terms, error, len(calls), statistics.median(startups) if startups else None,
        statistics.median(ways_in) / 1e9 if ways_in else None, statistics.median(ways_out) / 1e9 if ways_out else None,
        _only("engine profiles", [one for reader in readers for one in reader.profiles]),
        _only("services", [one for reader in readers for one in reader.services]),
        pace,
    )  # fmt: skip


def _only(what: str, names: list[str]) -> str:
    found = list(dict.fromkeys(names))
    if len(found) > 1:
        raise CalibrationError(f"the runs have several {what} ({', '.join(found)}); give runs of one")
    return found[0] if found else ""


def _fit(calls: Sequence[_Call]) -> tuple[dict[str, float], float]:
    rows = [_terms(call) for call in calls]
    took = [(call.finished_ns - call.accepted_ns) / 1e9 for call in calls]
    # Errors count relative to what the fit before expected: relative to what was seen, slow outliers would count for
    # nothing and the fit would be too fast.
    expected = [statistics.fmean(took)] * len(took)
    costs = [0.0] * len(TERMS)
    for _ in range(_ROUNDS):
        costs = _weighted(rows, took, expected)
        modelled = [sum(cost * term for cost, term in zip(costs, row, strict=True)) for row in rows]
        least = max(modelled) / 1000
        expected = [max(one, least) for one in modelled]
    errors = [abs(one / seen - 1.0) for one, seen in zip(expected, took, strict=True)]
    return dict(zip(TERMS, costs, strict=True)), statistics.median(errors) * 100.0


def _weighted(rows: list[list[float]], took: list[float], expected: list[float]) -> list[float]:
    """Costs that are not negative; one that would be is left out, the most negative first."""
    used = [index for index in range(len(TERMS)) if any(row[index] for row in rows)]
    while used:
        scaled = [[row[index] / one for index in used] for row, one in zip(rows, expected, strict=True)]
        solution = least_squares(scaled, [seen / one for seen, one in zip(took, expected, strict=True)])
        worst = min(range(len(used)), key=lambda place: solution[place])
        if solution[worst] >= 0:
            found = dict(zip(used, solution, strict=True))
            return [found.get(index, 0.0) for index in range(len(TERMS))]
        del used[worst]
    raise CalibrationError("no cost of a request fits these runs: each would be negative")


def _terms(call: _Call) -> list[float]:
    """What the costs in TERMS are multiplied by."""
    steps, life = call.tokens - 1, call.finished_ns - call.accepted_ns
    batch = call.batch_ns / life
    beside = 1.0 - call.alone_ns / life
    return [1.0, max(0, call.prompt - call.cached), steps, steps * batch, steps * beside, call.arrivals]


def _life(call: _Call, terms: Mapping[str, float]) -> Life:
    modelled = sum(cost * term for cost, term in zip(terms.values(), _terms(call), strict=True))
    begin, end = call.accepted_ns / 1e9, call.finished_ns / 1e9
    return Life(call.engine, begin, end, modelled / (end - begin))


def fitted_profile(fit: Fit, base: pathlib.Path | None, sources: Sequence[RunDir]) -> dict[str, Any]:
    """A profile with the fitted costs in place of the base profile's, as the mapping that its YAML holds.

    Args:
        base: profile that gives what the runs cannot tell; by default the one that the runs' services name.

    Raises:
        BadInput: there is no base profile, or it is none.
    """
    path = base if base is not None else _PROFILES / f"{fit.profile}.yaml"
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        parameters: dict[str, Any] = {key: dict(entry) for key, entry in document["parameters"].items()}
        head = {key: document[key] for key in ("model_path", "weights_version")}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"{path}: cannot be read as an engine profile ({error}); name one with --base") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: is no engine profile ({error}); name one with --base") from error
    terms = fit.terms
    # A prompt that comes stalls the others for its whole prefill; its own shows in the fixed part as well.
    stall = terms["stall of a prompt"]
    prefill = min(stall, terms["fixed"]) if stall else terms["fixed"] / 2
    changed = {
        "decode_step_base": max(terms["step"], 1e-6),
        "decode_step_per_request": terms["step per request"],
        "decode_step_batched": terms["step of several"],
        "prefill_step_base": max(prefill, 1e-6),
        "prefill_step_per_token": terms["per prompt token"],
        "request_intake": max(terms["fixed"] - prefill, 1e-6),
    }
    for key, seconds in changed.items():
        parameters[key] = {"value": float(f"{seconds * 1e6:.4g}"), "unit": "us", "origin": "fitted"}
    for key in ("decode_step_per_context_token", "prefill_step_per_token_pair"):
        parameters[key] = {
            "value": 0,
            "unit": "ns",
            "origin": "fitted",
            "note": "part of the others: prompts are short",
        }
    for key in ("pace_spread", "pace_period"):
        parameters.pop(key, None)
    if fit.pace.spread:
        parameters["pace_spread"] = {"value": float(f"{fit.pace.spread:.3g}"), "unit": "1", "origin": "fitted"}
        parameters["pace_period"] = {"value": float(f"{fit.pace.period_s:.3g}"), "unit": "s", "origin": "fitted"}
    if fit.startup_s is not None:
        parameters["startup"] = {"value": float(f"{fit.startup_s:.4g}"), "unit": "s", "origin": "fitted"}
    files = [
        {"file": f"{one.path.name}/events.jsonl", "sha256": hashlib.sha256(one.events.read_bytes()).hexdigest()}
        for one in sources
    ]
    return {
        "name": f"{fit.profile or path.stem}-fitted",
        "summary": f"Fitted to {fit.requests} requests of {len(sources)} runs; the rest as in {path.stem}.",
        **head,
        "sources": files,
        "fit": [
            {
                "figure": f"median error of {fit.requests} requests", "observed": 0.0,
                "modelled": round(fit.error_percent, 1), "unit": "%", "error_percent": round(fit.error_percent, 1),
                "role": "fitted", "source": "the runs above",
            }
        ],
        "parameters": parameters,
    }  # fmt: skip


def world_settings(fit: Fit) -> dict[str, float]:
    """Scenario keys for the way of a request: two hops there and two back, and the gateway's work on it.

    The way back is two hops and nothing else; what the way there takes beyond that is the gateway's.
    """
    if fit.path_in_s is None or fit.path_out_s is None:
        return {}
    hop = max(1e-6, min(fit.path_in_s, fit.path_out_s) / 2)
    return {
        "network.loopback_latency_s": float(f"{hop:.4g}"),
        f"topology.services.{fit.service}.gateway_cost_s": float(f"{max(0.0, fit.path_in_s - 2 * hop):.4g}"),
    }


def pace_said(pace: PaceFit) -> str:
    """How the pace wanders, in words."""
    return f"spread {pace.spread:.1%}, drawn anew every {pace.period_s:.2f} s" if pace.spread else "steady"


def set_arguments(fit: Fit, profile: str) -> list[str]:
    """``KEY=VALUE`` of what puts a fit in place in a scenario; without exponents, which YAML takes for text."""
    settings = [f"{key}={value:.9f}".rstrip("0") for key, value in world_settings(fit).items()]
    return [f"topology.services.{fit.service}.engine={profile}", *(one + "0" * one.endswith(".") for one in settings)]


def run_calibrate_runs(runs: Sequence[pathlib.Path], base: pathlib.Path | None, out: pathlib.Path | None) -> str:
    """Fit, and write or return the profile.

    Returns:
        What to say of it, and the profile's text where ``out`` is None.

    Raises:
        BadInput: a run, the base profile or the output cannot be used; nothing is written then.
    """
    directories = [RunDir.open(path) for path in runs]
    try:
        fit = fit_runs(directories)
    except CalibrationError as error:
        raise BadInput(f"calibrate: {error}") from error
    text = profile_text(fitted_profile(fit, base, directories), "RUN...")
    lines = [f"{name:<20} {fit.terms[name] * 1e3:9.4f} ms" for name in TERMS]
    lines.append(f"median error of {fit.requests} requests: {fit.error_percent:.1f}%")
    lines.append(f"pace: {pace_said(fit.pace)}")
    if fit.startup_s is not None:
        lines.append(f"engine start-up: {fit.startup_s:.2f} s")
    if fit.service:
        named = str(out) if out is not None else "PROFILE.yaml"
        lines.append("to use it: " + " ".join(f"--set {one}" for one in set_arguments(fit, named)))
    if out is None:
        return text + "".join(f"# {line}\n" for line in lines)
    write_atomic(out, text)
    return "\n".join([*lines, f"written: {out}"]) + "\n"
