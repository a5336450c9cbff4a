"""What an autoscaler is told: bounds, intervals, policies by service, and where the services are.

Source: scaling.md 6.1 and 6.4; names and defaults as there. Two hazards of section 11 are done right here: a service's
policy that is given in part inherits the *configured* global values, field by field (H8), and what it comes to is
checked as a whole (H6).
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from protocol.config import ComponentConfig, Count, Seconds, SecondsOrNone

ROLLOUT = "rollout"
"""The service whose target has a spelling of its own, ``rollout_service_url``."""

_Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_BelowOne = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
_Level = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Above0 = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


def _is_url(given: str) -> str:
    """Refuse what nobody could ever be asked at, by its writing alone; which of the others it reaches, a world says."""
    try:
        parts = urllib.parse.urlsplit(given)
        good = bool(parts.scheme and parts.netloc) and not parts.query and not parts.fragment
        if parts.scheme in ("http", "https"):
            good = good and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        good = False
    if not good or not given.isprintable() or " " in given:
        raise _wrong(f"{given!r} is no URL of a scale API; as in http://127.0.0.1:8090/genrm or actor://NAME")
    return given


_Url = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_is_url)]


class _SentModel(ComponentConfig):
    """Base of what a client may send: no type stands for another, so that true is no number of replicas (M23)."""

    model_config = ConfigDict(strict=True)


class ScaleOutPolicy(_SentModel):
    """When replicas are added: any one condition, for long enough."""

    token_usage_threshold: _Fraction = 0.85
    """Mean use of the KV cache above which a replica is added."""
    queue_depth_per_engine: _Above0 = 10
    """Requests waiting, by replica, above which one is added."""
    queue_time_p95_threshold: _Above0 = 5.0
    """Seconds."""
    ttft_p95_threshold: _Above0 = 10.0
    """Seconds."""
    condition_duration_secs: SecondsOrNone = 30
    """How long a condition must hold without a break."""
    max_delta: Count = 4
    """Replicas added at once."""


class ScaleInPolicy(_SentModel):
    """When replicas are removed: all three conditions, for long enough."""

    token_usage_threshold: _BelowOne = 0.3
    queue_depth_threshold: _Level = 0
    """Requests waiting in all, at most."""
    throughput_variance_threshold: _Level = 0.1
    """Largest deviation of the throughput from its mean, by the mean."""
    condition_duration_secs: SecondsOrNone = 120
    max_delta: Count = 1
    """Replicas removed at once."""
    projected_usage_max: _Fraction = 0.5
    """Use of the KV cache that the replicas that stay would have."""


class ServicePolicy(_SentModel):
    """What is different for one service. What is not given, inside of the policies too, is as it is for all."""

    min_engines: Count | None = None
    max_engines: Count | None = None
    scale_out_policy: ScaleOutPolicy | None = None
    scale_in_policy: ScaleInPolicy | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What holds for one service, nothing left open."""

    min_engines: int
    max_engines: int
    scale_out: ScaleOutPolicy
    scale_in: ScaleInPolicy


class AutoscalerConfig(_SentModel):
    """``protocol.scaling.autoscaler`` (scaling.md 6.1)."""

    enabled: bool = True
    """False: metrics are collected and open requests followed, nothing is decided."""
    min_engines: Count = 1
    max_engines: Count = 32
    scale_out_cooldown_secs: SecondsOrNone = 60
    """After a scale-out was accepted nothing is decided for so long."""
    scale_in_cooldown_secs: SecondsOrNone = 300
    """The same after a scale-in."""
    metrics_interval_secs: Seconds = 10
    evaluation_interval_secs: Seconds = 30
    condition_window_secs: Seconds = 60
    """Latencies count that were measured within so long: a percentile since the start never goes down (H7)."""
    min_coverage_scale_out: _Fraction = 0.5
    """Part of the replicas that must have reported."""
    min_coverage_scale_in: _Fraction = 1.0
    scale_out_request_timeout_secs: Seconds | None = None
    """Budget of a scale-out; null: the service's own default."""
    rollout_service_url: _Url | None = "http://localhost:8000/rollout"
    """The same as ``service_targets.rollout``; where both are given, that. Null: there is no rollout service."""
    scale_out_policy: ScaleOutPolicy = ScaleOutPolicy()
    scale_in_policy: ScaleInPolicy = ScaleInPolicy()
    service_targets: dict[str, _Url] = {}
    """Service to the URL of its control API."""
    service_policies: dict[str, ServicePolicy] = {}

    @model_validator(mode="before")
    @classmethod
    def _one_rollout_target(cls, given: Any) -> Any:
        """Both spellings of the rollout target say the same from here on (M32)."""
        if not isinstance(given, Mapping) or not isinstance(given.get("service_targets", {}), Mapping):
            return given
        targets = dict(given.get("service_targets", {}))
        url = targets.get(ROLLOUT, given.get("rollout_service_url", cls.model_fields["rollout_service_url"].default))
        if url is not None:
            targets[ROLLOUT] = url
        return {**given, "service_targets": targets, "rollout_service_url": url}

    @model_validator(mode="after")
    def _consistent(self) -> AutoscalerConfig:
        if self.evaluation_interval_secs < self.metrics_interval_secs:
            raise _wrong(
                f"evaluation_interval_secs {self.evaluation_interval_secs:g} is below metrics_interval_secs "
                f"{self.metrics_interval_secs:g}; nothing new would be there to evaluate"
            )
        for service in self.service_policies:
            if service not in self.service_targets:
                raise _wrong(f"service_policies.{service}: no such service; give service_targets.{service} a URL")
        _check(self.for_all(), "")
        for service in self.service_policies:
            _check(self.rules(service), f"service_policies.{service}: ")
        return self

    def for_all(self) -> Rules:
        """What holds for a service that has no policy of its own."""
        return Rules(self.min_engines, self.max_engines, self.scale_out_policy, self.scale_in_policy)

    def rules(self, service: str) -> Rules:
        """What holds for a service: its own values, and for the rest those of all."""
        own = self.service_policies.get(service)
        if own is None:
            return self.for_all()
        return Rules(
            self.min_engines if own.min_engines is None else own.min_engines,
            self.max_engines if own.max_engines is None else own.max_engines,
            self.scale_out_policy.model_copy(update=_given(own.scale_out_policy)),
            self.scale_in_policy.model_copy(update=_given(own.scale_in_policy)),
        )

    def document(self) -> dict[str, Any]:
        """As JSON. A policy of a service shows what it was given and no more, so that it can be read back."""
        shown = self.model_dump(mode="json")
        shown["service_policies"] = {
            service: policy.model_dump(mode="json", exclude_unset=True)
            for service, policy in self.service_policies.items()
        }
        return shown

    def patched(self, patch: Mapping[str, Any]) -> AutoscalerConfig:
        """The configuration with a JSON merge patch (RFC 7396) applied: null takes a key out.

        Raises:
            ValidationError: the result is none. Nothing has changed then.
        """
        merged = _merge(self.document(), patch)
        targets = patch.get("service_targets")
        named = isinstance(targets, Mapping) and ROLLOUT in targets
        if isinstance(targets, Mapping) and targets.get(ROLLOUT, "") is None:
            merged["rollout_service_url"] = None
        elif "rollout_service_url" in patch and not named and isinstance(merged.get("service_targets"), dict):
            merged["service_targets"].pop(ROLLOUT, None)
        return type(self).model_validate(merged)


def _given(policy: ScaleOutPolicy | ScaleInPolicy | None) -> dict[str, Any]:
    return {} if policy is None else {name: getattr(policy, name) for name in sorted(policy.model_fields_set)}


def _check(rules: Rules, where: str) -> None:
    if rules.max_engines < rules.min_engines:
        raise _wrong(f"{where}max_engines {rules.max_engines} is below min_engines {rules.min_engines}")
    low, high = rules.scale_in.token_usage_threshold, rules.scale_out.token_usage_threshold
    if low >= high:
        raise _wrong(
            f"{where}scale_in_policy.token_usage_threshold {low:g} must be below that of scale_out_policy, {high:g}, "
            "or a replica is added and removed in turn"
        )


def _merge(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(document)
    for key, value in patch.items():
        if value is None and key not in ("rollout_service_url", "scale_out_request_timeout_secs"):
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = _merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _wrong(text: str) -> PydanticCustomError:
    return PydanticCustomError("autoscaler", "{text}", {"text": text})
