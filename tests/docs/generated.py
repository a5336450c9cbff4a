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
from tests.contract.engine_table import deviations_table, facts_table
from tests.docs.api_tables import bodies_list, errors_table, routes_table
from tests.docs.fault_ways import WAYS

_TARGETS = {
    "process": "process", "link": "link", "node": "node", "storage": "path (or none: every file)", "placement": "none"
}  # fmt: skip
_ENDS = {"reverted": "after `for_s`", "recovered": "at once; its supervisor replaces the process later"}
_MEETS = {
    "in_flight": "requests in flight at the process when it begins",
    "processes": "processes on the node when it begins; of a process, itself: it is alive, busy or not",
    "hits": "messages, files or pages it changed by its end; of `latency`, calls of which it delayed something. "
    "`clock_skew` has its one hit as it begins, for nobody is told who reads the clock: it is always met",
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
        "", "## How each world does it", "",
        "In the real world the faults in force lie in one file of the run, which every process looks at before it",
        "sends, writes or answers (a microsecond or two while nothing has changed). Each hit is a file that can be",
        "created once, so `count` holds over all processes. Signals reach processes on the driver's machine; a fault",
        "that would need one elsewhere is refused when its step fires.", "",
        *_table(("`do`", "simulated", "real"), (
            (f"`{fault.name}`", *WAYS[fault.name]) for fault in CATALOG)), "",
        "## Event-triggered steps", "",
        "In sim a step acts inside of the emission. In the real world the kinds that steps wait for are breakpoints:",
        "the process that emits a matching event has written it to its log and then blocks, with all that it does,",
        "until the driver has acted (`phase: before`; about half a millisecond), or only tells the driver (`after`).",
        "The driver's own events are seen at once. A driver that does not answer within 15 s is recorded as",
        "`run.anomaly`, and the process goes on. Kinds that no process emits during a run are refused before it.",
    ]  # fmt: skip
    return "\n".join(text) + "\n"


def checks_table() -> str:
    """The invariants: what each one says."""
    rows = (
        (f"`{check.name}`" + (" (claim)" if check.group == "claim" else ""), _first_line(check)) for check in INVARIANTS
    )
    return "\n".join(_table(("check", "what must be so"), rows))


def believing_table() -> str:
    """The invariants that decide and read claims."""
    rows = ((f"`{check.name}`", check.believes) for check in INVARIANTS if check.believes)
    return "\n".join(_table(("check", "what it takes from claims"), rows))


def criteria_table() -> str:
    """What a scenario can name under ``acceptance``."""
    rows = (
        (f"`{name}`", _without_sources(" ".join(entry.doc.partition("\n\n")[0].split())), _parameters(entry.model))
        for name, entry in CRITERIA.items()
    )
    return "\n".join(_table(("name", "what it asks", "parameters (default)"), rows))


SECTIONS = {
    "checks": checks_table,
    "believing": believing_table,
    "criteria": criteria_table,
    "engine_facts": facts_table,
    "engine_deviations": deviations_table,
    "api_gateway": lambda: routes_table("gateway"),
    "api_scale": lambda: routes_table("scale"),
    "api_rollout": lambda: routes_table("rollout"),
    "api_autoscaler": lambda: routes_table("autoscaler"),
    "api_errors": errors_table,
    "api_bodies": lambda: _without_sources(bodies_list()),
}
"""Name of a section to what makes it. A page marks it: ``<!-- made: NAME -->`` ... ``<!-- end -->``."""
_SOURCE = r"(?:[A-Z]{1,2}-I?\d+|[EM]\d+(?: to [EM]\d+)?|(?:(?:scaling|serving|training|engines|rollout)\.md )?\d+\.\d+)"
_SOURCES = re.compile(rf" \({_SOURCE}(?:[,;] {_SOURCE})*\)")
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
    return _without_sources(" ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()))


def _without_sources(text: str) -> str:
    """Without "(G-I2)" and the like: numbers of notes that the reader of a page does not have."""
    return _SOURCES.sub("", text)


def _sentence(model: type) -> str:
    return " ".join((inspect.getdoc(model) or "").replace("``", "`").split())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("``", "`") for cell in line) + " |" for line in lines]
