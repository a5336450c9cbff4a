"""No dead option: every field of a component's configuration is read by the protocol code."""

from __future__ import annotations

import ast
import pathlib

import pydantic
import pytest

import protocol
from protocol import config
from protocol.config import ComponentConfig, GatewayConfig, HealthConfig

MODELS = sorted(
    (
        m
        for m in vars(config).values()
        if isinstance(m, type) and issubclass(m, ComponentConfig) and m is not ComponentConfig
    ),
    key=lambda m: m.__name__,
)
# Numbers that have no unit.
NUMBERS = ("temperature", "top_p")
# Where each component's configuration is read.
READERS = {
    "GatewayConfig": ("serving/gateway.py", "serving/dispatch.py"),
    "HttpConfig": ("serving/gateway_api.py",),
    "HealthConfig": ("serving/health.py",),
    "AdminConfig": ("serving/admin.py", "serving/recovery.py"),
    "RecoveryConfig": ("serving/recovery.py",),
    "ExportConfig": ("training/checkpoint.py",),
    "ScalingConfig": ("scaling/api.py", "scaling/registry.py", "scaling/watcher.py"),
    "GateConfig": ("serving/gate.py",),
    "EntrypointConfig": ("serving/entrypoint.py", "serving/settlement.py"),
    "SessionServerConfig": (
        "serving/entrypoint.py", "serving/settlement.py", "serving/session_server.py", "serving/turn_forward.py",
    ),
    "ControllerConfig": ("serving/controller.py",),
    "AffinityConfig": ("serving/affinity.py",),
    "WeightSyncConfig": ("training/weight_sync.py", "training/ranks.py", "training/transports.py"),
    "ProxyConfig": ("serving/registration.py",),
    "TraceAccessConfig": ("rollout/trace_access.py",),
    "TraceStoreConfig": ("rollout/trace_store.py",),
    "ReplayBufferConfig": ("rollout/replay_buffer.py",),
    "ProducerConfig": ("rollout/producer.py",),
    "LearnerConfig": ("training/learner.py",),
    "EvaluatorConfig": ("training/evaluator.py",),
    "RolloutScalingConfig": ("rollout/elastic.py", "rollout/elastic_lifecycle.py"),
    "JudgeConfig": ("serving/judge.py", "serving/determinism.py"),
    "LifecycleConfig": (
        "scaling/lifecycle.py",
        "scaling/lifecycle_steps.py",
        "scaling/placement.py",
        "scaling/replicas.py",
    ),
}


def attributes_read(*files: str) -> set[str]:
    """Names that are read as an attribute in these files of protocol/."""
    root = pathlib.Path(protocol.__file__).parent
    return {
        node.attr
        for file in files
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_field_is_read(model: type[ComponentConfig]) -> None:
    dead = set(model.model_fields) - attributes_read(*READERS[model.__name__])
    assert not dead, f"{model.__name__}: nothing reads {sorted(dead)}"


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_times_have_their_unit_in_the_name(model: type[ComponentConfig]) -> None:
    for name, field in model.model_fields.items():
        has_unit = name.endswith(("_s", "_gb"))
        assert field.annotation is not float or has_unit or name in NUMBERS, f"{model.__name__}.{name}"


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(pydantic.ValidationError, match="backof_s"):
        GatewayConfig(backof_s=1)  # type: ignore[call-arg]


def test_values_out_of_range_are_refused() -> None:
    for bad in ({"attempts": 0}, {"backoff_s": -1}, {"read_timeout_s": 0}, {"read_timeout_s": float("inf")}):
        with pytest.raises(pydantic.ValidationError):
            GatewayConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(pydantic.ValidationError):
        HealthConfig(generate_timeout_s=5)  # /health_generate itself takes up to 20 s


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(pydantic.ValidationError):
        GatewayConfig().attempts = 5  # type: ignore[misc]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("absurd", [1e300, float("inf"), float("nan"), 10**30, -1])
def test_an_absurd_number_is_refused_at_once(model: type[ComponentConfig], absurd: float) -> None:
    for name, field in model.model_fields.items():
        if field.annotation in (int, float):
            with pytest.raises(pydantic.ValidationError):
                model.model_validate({name: absurd})
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 1024"):
        HealthConfig(slots=1_000_000)  # each is a task
