"""What checks take for usual values, states and routes is what there is: analysis may not import those who have them.

Where a scenario sets another value, that is on record (``scale.budget``, ``scale.window``, ``autoscaler.coverage``).
"""

from __future__ import annotations

from analysis.checks import autoscaler, publishing_views, scaling_operators, scaling_views
from protocol.config import RolloutScalingConfig, ScalingConfig
from protocol.evidence import KINDS
from protocol.rollout.elastic_contract import ROLLOUT_TERMINAL
from protocol.scaling import contract, requests
from protocol.scaling.policy import AutoscalerConfig
from protocol.serving import admin
from protocol.serving.gateway_bodies import GATEWAY_ROUTES
from sim import engine_anthropic, engine_openai


def test_the_usual_values_of_scaling() -> None:
    usual = ScalingConfig()
    assert (scaling_operators._BUDGET_S, scaling_operators._WAIT_S) == (usual.timeout_s, usual.completion_wait_s)
    assert scaling_operators._DAY_NS == usual.idempotency_window_s * 1e9
    # The operator records what differs from those of a judge's API, of either kind.
    kept = ("max_history", "max_idempotency_records", "idempotency_window_s")
    assert all(getattr(RolloutScalingConfig(), name) == getattr(usual, name) for name in kept)


def test_the_usual_coverage_of_an_autoscaler() -> None:
    usual = AutoscalerConfig()
    assert autoscaler._ENOUGH == (usual.min_coverage_scale_out, usual.min_coverage_scale_in)


def test_the_documented_usual_values_are_these() -> None:
    said = {
        ("scale.budget", "budget_s"): ScalingConfig().timeout_s,
        ("scale.budget", "wait_s"): ScalingConfig().completion_wait_s,
        ("scale.window", "window_s"): ScalingConfig().idempotency_window_s,
        ("autoscaler.coverage", "out_least"): AutoscalerConfig().min_coverage_scale_out,
        ("autoscaler.coverage", "in_least"): AutoscalerConfig().min_coverage_scale_in,
    }
    for (kind, field), value in said.items():
        assert f"{value:g} where nothing is said" in KINDS[kind].fields[field][1], (kind, field)


def test_the_states_in_which_an_operation_is_over() -> None:
    tables = (contract.TERMINAL, ROLLOUT_TERMINAL, requests.TERMINAL)
    assert set(scaling_views.TERMINAL) == {state for table in tables for states in table.values() for state in states}


def test_the_routes_that_generate() -> None:
    engine = {"/generate", *engine_openai.ROUTES, engine_anthropic.ROUTE}
    assert publishing_views.GENERATIONS == engine
    assert {route.path for route in GATEWAY_ROUTES if route.handler == "forward"} <= engine
    assert admin.UPDATE_WEIGHTS in publishing_views.UPDATES
