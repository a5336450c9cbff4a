"""The JSON Schema of scenario files, for editors: the models, and what goes under ``with`` for each verb."""

from __future__ import annotations

from typing import Any

from analysis.acceptance import acceptance_schema
from protocol.evidence import schema as event_kinds
from scenarios.faults import FAULTS, VERBS
from scenarios.schema import ScenarioModel
from scenarios.steps import SELECTORS


def scenario_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) that accepts what the models accept."""
    schema = ScenarioModel.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Seatrial scenario"
    definitions = schema["$defs"]
    step = definitions["StepModel"]
    step["properties"]["do"]["enum"] = [*FAULTS, *VERBS]
    step["allOf"] = [
        {
            "if": {"properties": {"do": {"const": name}}, "required": ["do"]},
            "then": {"properties": {"with": _inline(model.model_json_schema(by_alias=True), definitions)}},
        }
        for name, model in {**FAULTS, **VERBS}.items()
    ]
    definitions["WhenModel"]["properties"]["event"]["enum"] = [kind.name for kind in event_kinds()]
    target = definitions["TargetModel"]
    short = {"type": "string", "description": f"A selector ({', '.join(SELECTORS)}) or the name of a process."}
    definitions["TargetModel"] = {"anyOf": [short, target]}
    schema["properties"]["acceptance"]["items"] = entries = acceptance_schema()
    name = {"type": "string", "description": "What --set and real.set call the entry, in place of its number."}
    for entry in entries["oneOf"]:
        entry["properties"] = {**entry["properties"], "name": name}
    return schema


def _inline(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    definitions.update(schema.pop("$defs", {}))
    return schema
