"""The parts of the documentation that are made from the code: the tables of faults, checks and criteria."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from analysis.acceptance import CRITERIA
from analysis.checks import INVARIANTS
from scenarios.faults import CATALOG, VERBS, FaultSpec

_TARGETS = {
    "process": "process", "link": "link", "node": "node", "storage": "path (or none: every file)", "placement": "none"
}  # fmt: skip
_ENDS = {"reverted": "after `for_s`", "recovered": "when recovery has replaced the process"}
_MEETS = {
    "in_flight": "requests in flight at the process when it begins",
    "processes": "processes on the node when it begins",
    "hits": "messages, files or pages it changed by its end",
}


def faults_page() -> str:
    """``docs/faults.md``."""
    text = [
        "# Faults", "",
        "Made from `scenarios/faults.py` by `python -m tests.docs`; do not edit. How a step names a fault, its time",
        "and its target is in [scenarios.md](scenarios.md#steps).", "",
        "Every fault must hit: a step says under `must_hit` what it must meet, and what is left out is in the table. A",
        "fault that met less makes the run *inconclusive*, for then the run says nothing about that fault.", "",
        *_table(("`do`", "what happens", "target", "`with` (default)", "ends", "must meet"), map(_fault, CATALOG)), "",
        "`must_hit` counts:", "",
        *(f"- `{name}`: {meaning}." for name, meaning in _MEETS.items()), "",
        "## Verbs", "", "A step can also do something that is no fault:", "",
        *_table(("`do`", "what happens", "`with` (default)"), (
            (f"`{name}`", _sentence(model).partition(": ")[2], _parameters(model)) for name, model in VERBS.items())),
        "", "## What the real world cannot do", "",
        *(f"- `{fault.name}` exists in sim alone." for fault in CATALOG if fault.worlds == ("sim",)), "",
        "Scenarios run in sim alone so far; see the README.",
    ]  # fmt: skip
    return "\n".join(text) + "\n"


def checks_table() -> str:
    """The invariants: what each one says."""
    rows = (
        (f"`{check.name}`" + (" (claim)" if check.group == "claim" else ""), _first_line(check)) for check in INVARIANTS
    )
    return "\n".join(_table(("check", "what must be so"), rows))


def criteria_table() -> str:
    """What a scenario can name under ``acceptance``."""
    rows = (
        (f"`{name}`", " ".join(entry.doc.partition("\n\n")[0].split()), _parameters(entry.model))
        for name, entry in CRITERIA.items()
    )
    return "\n".join(_table(("name", "what it asks", "parameters (default)"), rows))


SECTIONS = {"checks": checks_table, "criteria": criteria_table}
"""Name of a section to what makes it. A page marks it: ``<!-- made: NAME -->`` ... ``<!-- end -->``."""
_SECTION = re.compile(r"(<!-- made: (?P<name>\w+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def with_sections(page: str) -> str:
    """A page with its marked sections made anew."""
    return _SECTION.sub(lambda match: f"{match[1]}{SECTIONS[match['name']]()}\n{match[4]}", page)


def _fault(fault: type[FaultSpec]) -> tuple[str, ...]:
    must = ", ".join(f"`{name}` ≥ {bound['at_least']}" for name, bound in fault.must_hit.items())
    return (
        f"`{fault.name}`", _sentence(fault), _TARGETS[fault.target], _parameters(fault), _ends(fault), must
    )  # fmt: skip


def _ends(fault: type[FaultSpec]) -> str:
    if fault.name == "restart_empty":
        return "at once: the process is up again"
    if fault.healing == "spent":
        return "after `count` hits" if fault.name == "torn_export" else "after `count` hits or `for_s`"
    return _ENDS[fault.healing]


def _parameters(model: type[BaseModel]) -> str:
    said = []
    for name, field in model.model_fields.items():
        default: Any = field.default
        shown = "" if default is None else f" ({'needed' if default is PydanticUndefined else _yaml(default)})"
        said.append(f"`{name}`{shown}")
    return ", ".join(said)


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if value == "*" else f"{value:g}" if isinstance(value, float) else str(value)


def _first_line(thing: type) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _sentence(model: type) -> str:
    return " ".join((inspect.getdoc(model) or "").replace("``", "`").split())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("``", "`") for cell in line) + " |" for line in lines]
