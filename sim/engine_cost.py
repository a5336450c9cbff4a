"""Engine profiles: every number of a simulated engine, with its unit and where it came from, and the costs of a step.

Step costs are integers of picoseconds and linear in (batch, new tokens, context tokens), so that the cost of k equal
decode steps has a closed form that is *exactly* the sum of the k steps (see ``engine_scheduler``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml

PS_PER_NS = 1_000
NS_PER_S = 1_000_000_000
_SHORTEST_PACE_NS = 1_000_000  # below a step, a draw would not last for one

_PICOSECONDS = {"ps": 1, "ns": 10**3, "us": 10**6, "ms": 10**9, "s": 10**12}
_BASE_UNITS = {"time": ("ps", "ns", "us", "ms", "s"), "count": ("tokens", "requests", "steps"), "bytes": ("bytes",)}
_ORIGINS = ("fitted", "assumed", "observed", "read")


class ProfileError(ValueError):
    """A profile that cannot be used. The text names file, key and fix. Raised before anything has happened."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineProfile:
    """One engine on one machine. Times are integers: ``*_ps`` picoseconds of a scheduler step, ``*_ns`` nanoseconds.

    Attributes with a default of the SGLang server are documented beside the table ``_PARAMETERS``.
    """

    name: str
    model_path: str
    weights_version: str
    text_sha256: str
    # scheduler step costs
    decode_base_ps: int
    decode_per_request_ps: int
    decode_batched_ps: int
    decode_per_context_token_ps: int
    prefill_base_ps: int
    prefill_per_request_ps: int
    prefill_per_token_ps: int
    prefill_per_token_pair_ps: int
    # scheduler limits
    context_length: int
    kv_capacity_tokens: int
    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    prefix_block_tokens: int
    new_token_ratio_init_ppm: int
    new_token_ratio_min_ppm: int
    new_token_ratio_decay_steps: int
    # request path and admin path
    request_intake_ns: int
    refusal_ns: int
    admin_reply_ns: int
    # lifecycle
    startup_ns: int
    weight_load_base_ns: int
    weight_bytes: int
    weight_bandwidth_bytes_per_s: int
    missing_weights_ns: int
    health_poll_ns: int
    health_timeout_ns: int
    first_report_ns: int
    abort_poll_ns: int
    sigterm_poll_ns: int
    sigterm_exit_ns: int
    coredump_wait_ns: int
    health_generates: bool
    # how the pace of the scheduler wanders (sim/engine_pace.py); 0: not at all
    pace_spread_ppm: int
    pace_period_ns: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or value < 0):
                raise ProfileError(f"profile {self.name}: {field.name} is {value!r}; must be a non-negative integer")
        for key in (
            "decode_base_ps",
            "prefill_base_ps",
            "request_intake_ns",
            "max_running_requests",
            "prefix_block_tokens",
            "chunked_prefill_size",
            "max_prefill_tokens",
            "weight_bandwidth_bytes_per_s",
            "health_poll_ns",
            "abort_poll_ns",
            "sigterm_poll_ns",
            "new_token_ratio_decay_steps",
        ):
            if getattr(self, key) <= 0:
                raise ProfileError(f"profile {self.name}: {key} must be positive, or time or work would stand still")
        if self.pace_spread_ppm > 1_000_000:
            raise ProfileError(
                f"profile {self.name}: pace_spread is {self.pace_spread_ppm / 1e6:g}; must be at most 1, or an engine "
                "would stand still now and then"
            )
        if self.pace_spread_ppm and self.pace_period_ns < _SHORTEST_PACE_NS:
            raise ProfileError(
                f"profile {self.name}: pace_period is {self.pace_period_ns} ns; with a pace_spread it must be at least "
                f"{_SHORTEST_PACE_NS} ns"
            )
        if self.kv_capacity_tokens <= self.context_length + 1:
            raise ProfileError(
                f"profile {self.name}: kv_capacity ({self.kv_capacity_tokens} tokens) must exceed context_length "
                f"({self.context_length} tokens), or one request could never finish; lower context_length"
            )

    def weight_load_ns(self, size_bytes: int) -> int:
        """Time that the scheduler stands still while it loads ``size_bytes`` of weights, in nanoseconds."""
        return self.weight_load_base_ns + size_bytes * NS_PER_S // self.weight_bandwidth_bytes_per_s

    def replace(self, **changes: Any) -> EngineProfile:
        """A profile that differs in some numbers; checked again. Raises ProfileError."""
        return dataclasses.replace(self, **changes)


class StepCosts:
    """The cost coefficients in force, in picoseconds. ``slow`` scales the coefficients, not the sums.

    Scaling sums would round each step on its own, and the closed form of k steps would no longer be exact.
    """

    __slots__ = (
        "decode_base",
        "decode_batched",
        "decode_per_context_token",
        "decode_per_request",
        "prefill_base",
        "prefill_per_request",
        "prefill_per_token",
        "prefill_per_token_pair",
    )

    def __init__(self, profile: EngineProfile, slow_ppm: int = 1_000_000) -> None:
        def scaled(value: int) -> int:
            return value * slow_ppm // 1_000_000

        self.decode_base = max(1, scaled(profile.decode_base_ps))
        self.decode_per_request = scaled(profile.decode_per_request_ps)
        self.decode_batched = scaled(profile.decode_batched_ps)
        self.decode_per_context_token = scaled(profile.decode_per_context_token_ps)
        self.prefill_base = max(1, scaled(profile.prefill_base_ps))
        self.prefill_per_request = scaled(profile.prefill_per_request_ps)
        self.prefill_per_token = scaled(profile.prefill_per_token_ps)
        self.prefill_per_token_pair = scaled(profile.prefill_per_token_pair_ps)


# yaml key -> (attribute, kind). A time's attribute suffix says in which unit it is kept.
_PARAMETERS: dict[str, tuple[str, str]] = {
    "decode_step_base": ("decode_base_ps", "time"),
    "decode_step_per_request": ("decode_per_request_ps", "time"),
    "decode_step_batched": ("decode_batched_ps", "time"),
    "decode_step_per_context_token": ("decode_per_context_token_ps", "time"),
    "prefill_step_base": ("prefill_base_ps", "time"),
    "prefill_step_per_request": ("prefill_per_request_ps", "time"),
    "prefill_step_per_token": ("prefill_per_token_ps", "time"),
    "prefill_step_per_token_pair": ("prefill_per_token_pair_ps", "time"),
    "context_length": ("context_length", "count"),
    "kv_capacity": ("kv_capacity_tokens", "count"),
    "max_running_requests": ("max_running_requests", "count"),
    "chunked_prefill_size": ("chunked_prefill_size", "count"),
    "max_prefill_tokens": ("max_prefill_tokens", "count"),
    "prefix_block": ("prefix_block_tokens", "count"),
    "new_token_ratio_init": ("new_token_ratio_init_ppm", "ratio"),
    "new_token_ratio_min": ("new_token_ratio_min_ppm", "ratio"),
    "new_token_ratio_decay_steps": ("new_token_ratio_decay_steps", "count"),
    "request_intake": ("request_intake_ns", "time"),
    "refusal": ("refusal_ns", "time"),
    "admin_reply": ("admin_reply_ns", "time"),
    "startup": ("startup_ns", "time"),
    "weight_load_base": ("weight_load_base_ns", "time"),
    "weight_bytes": ("weight_bytes", "bytes"),
    "weight_bandwidth": ("weight_bandwidth_bytes_per_s", "bandwidth"),
    "missing_weights": ("missing_weights_ns", "time"),
    "health_poll": ("health_poll_ns", "time"),
    "health_timeout": ("health_timeout_ns", "time"),
    "first_report": ("first_report_ns", "time"),
    "abort_poll": ("abort_poll_ns", "time"),
    "sigterm_poll": ("sigterm_poll_ns", "time"),
    "sigterm_exit": ("sigterm_exit_ns", "time"),
    "coredump_wait": ("coredump_wait_ns", "time"),
    "health_generates": ("health_generates", "flag"),
    "pace_spread": ("pace_spread_ppm", "ratio"),
    "pace_period": ("pace_period_ns", "time"),
}
_ABSENT = {"decode_step_batched": 0, "first_report": 0, "pace_spread": 0, "pace_period": 0}
"""What a profile need not say. What a step costs more when it is of several requests (other kernels run then); how long
an engine that is ready and has nothing to do shows no gauges (SGLang reports an idle scheduler every 30 s); how the
pace wanders (sim/engine_pace.py): by which standard deviation, and for how long one draw holds."""
_UNITS = {
    "time": _BASE_UNITS["time"],
    "count": _BASE_UNITS["count"],
    "bytes": ("bytes",),
    "ratio": ("1",),
    "bandwidth": ("bytes/s",),
    "flag": ("flag",),
}
_TOP = ("name", "summary", "model_path", "weights_version", "sources", "parameters", "fit")


def load_profile_file(path: Path) -> EngineProfile:
    """Read one profile.

    Raises:
        ProfileError: no such file, not YAML, or a bad key, unit or value; the text names file, key and fix.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"{path}: cannot read the engine profile ({error.strerror})") from None
    except ValueError as error:  # no UTF-8; or a path with a NUL in it
        raise ProfileError(f"{str(path)!r}: cannot read the engine profile as UTF-8 text ({error})") from None
    return parse_profile(text, str(path))


def parse_profile(text: str, where: str) -> EngineProfile:
    """The profile written in ``text``; ``where`` names it in messages. Raises ProfileError."""
    try:
        document = yaml.load(text, Loader=_ExactLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark is not None else ""
        raise ProfileError(f"{where}{at}: not valid YAML ({getattr(error, 'problem', error)})") from None
    except RecursionError:
        raise ProfileError(f"{where}: nested too deeply for an engine profile") from None
    if not isinstance(document, dict):
        raise ProfileError(f"{where}: an engine profile is a mapping with the keys {', '.join(_TOP)}")
    unknown = sorted(str(key) for key in document if key not in _TOP)
    if unknown:
        raise ProfileError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(_TOP)}")
    for key in ("name", "model_path", "weights_version", "parameters"):
        if key not in document:
            raise ProfileError(f"{where}: key {key!r} is missing")
    parameters = document["parameters"]
    if not isinstance(parameters, dict):
        raise ProfileError(f"{where}: parameters must be a mapping of name to {{value, unit, origin}}")
    values: dict[str, Any] = {}
    for key in parameters:
        if key not in _PARAMETERS:
            raise ProfileError(f"{where}: unknown parameter {key!r}; known: {', '.join(_PARAMETERS)}")
    for key, (attribute, kind) in _PARAMETERS.items():
        if key not in parameters and key in _ABSENT:
            values[attribute] = _ABSENT[key]
            continue
        if key not in parameters:
            raise ProfileError(f"{where}: parameters.{key} is missing")
        values[attribute] = _number(parameters[key], kind, attribute, f"{where}: parameters.{key}")
    return EngineProfile(
        name=str(document["name"]),
        model_path=str(document["model_path"]),
        weights_version=str(document["weights_version"]),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        **values,
    )


class _ExactLoader(yaml.SafeLoader):
    """Numbers with a point stay decimal text: 2.0145 ms must become 2,014,500,000 ps on every machine."""


_ExactLoader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: _decimal(node.value))


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text.replace("_", ""))
    except InvalidOperation:
        return Decimal("NaN")


def _number(entry: Any, kind: str, attribute: str, where: str) -> Any:
    if not isinstance(entry, dict) or set(entry) - {"value", "unit", "origin", "note"} or "value" not in entry:
        raise ProfileError(f"{where} must be a mapping with value, unit, origin and, if it helps, note")
    unit, value, origin = entry.get("unit"), entry["value"], entry.get("origin")
    if unit not in _UNITS[kind]:
        raise ProfileError(f"{where}: unit {unit!r}; must be one of {', '.join(_UNITS[kind])}")
    if origin not in _ORIGINS:
        raise ProfileError(f"{where}: origin {origin!r}; must be one of {', '.join(_ORIGINS)}")
    if kind == "flag":
        if not isinstance(value, bool):
            raise ProfileError(f"{where}: value {value!r}; must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ProfileError(f"{where}: value {value!r} is not a number")
    number = Decimal(value)
    if not number.is_finite() or number < 0:
        raise ProfileError(f"{where}: value {value!s}; must be finite and not negative")
    if kind == "time":
        scaled = number * _PICOSECONDS[str(unit)]
        return int(scaled if attribute.endswith("_ps") else scaled / PS_PER_NS)
    if kind == "ratio":
        return int(number * 1_000_000)
    if number != int(number):
        raise ProfileError(f"{where}: value {value!s}; must be a whole number of {unit}")
    return int(number)


def is_profile_name(text: str) -> bool:
    """Whether ``text`` can name a shipped profile (and is not a path)."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None
