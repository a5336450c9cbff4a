"""When the phases of a scenario's load begin, from the scenario's text in run.json."""

from __future__ import annotations

from typing import Any

import yaml

from analysis.rundir import RunInfo


def load_starts(info: RunInfo) -> dict[str, float]:
    """``load 1``, ``load 2`` and so on to seconds after the workload's start; empty where the text has no loads."""
    try:
        document: Any = yaml.safe_load(info.scenario_text)
    except yaml.YAMLError:
        return {}
    workload = document.get("workload") if isinstance(document, dict) else None
    loads = workload if isinstance(workload, list) else []
    scale = _time_scale(document) if info.backend == "real" else 1.0
    return {
        f"load {number}": float(load.get("from_s", 0) or 0) * scale
        for number, load in enumerate(loads, 1)
        if isinstance(load, dict) and isinstance(load.get("from_s", 0), (int, float))
    }


def _time_scale(document: dict[str, Any]) -> float:
    real = document.get("real")
    scale = real.get("time_scale") if isinstance(real, dict) else None
    return float(scale) if isinstance(scale, (int, float)) and not isinstance(scale, bool) else 1.0
