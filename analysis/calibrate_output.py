"""A fitted engine profile as text, whatever it was fitted to."""

from __future__ import annotations

from typing import Any

import yaml


def profile_text(profile: dict[str, Any], arguments: str) -> str:
    """The YAML text of a profile, one parameter a line.

    Args:
        profile: as the file holds it.
        arguments: of ``python -m analysis calibrate``, by which it was made.
    """
    head = {key: profile[key] for key in ("name", "summary", "model_path", "weights_version")}
    lines = [
        f"# Made by: python -m analysis calibrate {arguments}. Do not edit: fit again.\n",
        yaml.safe_dump(head, sort_keys=False, width=200),
    ]
    for section in ("sources", "fit"):
        lines.append(f"{section}:\n")
        lines += [f"  - {_flow(row)}\n" for row in profile[section]]
    lines.append("parameters:\n")
    lines += [f"  {key}: {_flow(entry)}\n" for key, entry in profile["parameters"].items()]
    return "".join(lines)


def _flow(row: dict[str, Any]) -> str:
    return yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=10_000).strip()
