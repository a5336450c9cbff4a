"""A scenario as the real world runs it: its ``real:`` block may shrink counts, rates and times, never the steps."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

import yaml

from analysis.errors import BadInput
from scenarios.load import Scenario, parse
from scenarios.schema import ScenarioModel
from scenarios.shrinking import check_shrinks
from scenarios.steps import StepModel

_ONE_LINE: Final = 1 << 20
GENUINE_TRAINER = "real.trainer:TinyModelTrainer"
"""Exports weights that a genuine SGLang can load; the synthetic ones are bytes that mean nothing."""


def for_real(scenario: Scenario, kind: str) -> Scenario:
    """What runs on engines of a kind: with the changes of ``real.set``, and the steps' times scaled.

    The text that the run keeps has the changes in it, and says the scale itself.

    Raises:
        BadInput: a change names no key, its value is none for it, or it is no shrinking (``scenarios/shrinking.py``).
    """
    real = scenario.model.real
    asked = {} if real is None else next((keys for name, keys in real.set.items() if name == kind), {})
    if asked:
        try:
            changes = [f"{key}={_written(value)}" for key, value in asked.items()]
            changed = parse(scenario.text, scenario.source, scenario.folder, changes)
        except BadInput as error:
            raise BadInput(f"{scenario.place(('real', 'set', kind))}: {error}") from error
        check_shrinks(scenario, changed, kind, list(asked))
        scenario = changed
    model = scenario.model
    if kind != "emulated":
        model = _with_genuine_weights(model)
    if model.real is not None and model.real.time_scale != 1.0:
        model = model.model_copy(update={"steps": [_scaled(step, model.real.time_scale) for step in model.steps]})
    return dataclasses.replace(scenario, model=model)


def _written(value: Any) -> str:
    """A value as ``--set`` reads it again. What JSON says of numbers is not always YAML's: 1e-05 is a text there."""
    if isinstance(value, str | bytes):
        return json.dumps(str(value))
    text = yaml.safe_dump(value, default_flow_style=True, width=_ONE_LINE, sort_keys=False)
    return text.removesuffix("...\n").strip()


def _scaled(step: StepModel, by: float) -> StepModel:
    when = step.when
    return step.model_copy(
        update={
            "at_s": None if step.at_s is None else step.at_s * by,
            "after_s": step.after_s * by,
            "for_s": None if step.for_s is None else step.for_s * by,
            "when": None if when is None else when.model_copy(update={"from_s": when.from_s * by}),
        }
    )


def _with_genuine_weights(model: ScenarioModel) -> ScenarioModel:
    services = {
        name: service.model_copy(update={"components": {"trainer": GENUINE_TRAINER, **service.components}})
        for name, service in model.topology.services.items()
    }
    topology = model.topology.model_copy(update={"services": services})
    return model.model_copy(update={"topology": topology})
