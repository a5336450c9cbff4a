"""Acceptance criteria: what a scenario asks beyond the invariants, by name, with thresholds fixed before the run.

A scenario's ``acceptance`` list holds one ``{name: parameters}`` an entry. Source: DESIGN.md, "Scenario files".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from analysis.checks import affinity, autoscaler_criteria, engines, foreign, judging, publishing, requests, run, scaling
from analysis.checks.base import Check
from analysis.checks.criteria import (
    AnsweredFraction,
    Count,
    EventsPerRequest,
    Happens,
    LatencyP99,
    Occurs,
    Parameters,
    Reached,
)
from analysis.checks.ledger import Ledger
from analysis.checks.publishing_criteria import DistinctWeights, PrefixHits, SessionsAcrossUpdates, TurnsAtVersions
from analysis.checks.traces_criteria import CleanupsKeptOthers, RecordedBetween
from analysis.checks.training_criteria import TrainingContinues
from analysis.errors import BadInput, nearest, unknown_kind
from protocol.evidence import KINDS


class Entry(NamedTuple):
    """One criterion that a scenario can name. ``make`` is None for an invariant, which is judged in any case."""

    model: type[Parameters]
    doc: str
    make: Callable[[Ledger, Any], Check] | None


CRITERIA: dict[str, Entry] = {
    invariant.name: Entry(Parameters, inspect.getdoc(invariant) or "", None)
    for invariant in (
        requests.NothingLost,
        requests.NothingTwice,
        requests.UnexplainedFailures,
        requests.Converges,
        engines.LoadedExportIsWhole,
        run.FaultsHit,
        scaling.RemovedWhileIdle,
        scaling.CleanMeansClean,
        scaling.ProtectedAlive,
        scaling.VictimStaysOut,
        publishing.TurnOfOneVersion,
        publishing.NoUpdateUnderLease,
        affinity.RouterEmptyAtTheEnd,
    )
} | {
    criterion.name: Entry(criterion.model, inspect.getdoc(criterion) or "", criterion)
    for criterion in (
        AnsweredFraction,
        LatencyP99,
        Reached,
        Occurs,
        EventsPerRequest,
        TurnsAtVersions,
        SessionsAcrossUpdates,
        DistinctWeights,
        PrefixHits,
        CleanupsKeptOthers,
        RecordedBetween,
        autoscaler_criteria.Decided,
        autoscaler_criteria.CapacityReturned,
        autoscaler_criteria.Reversals,
        foreign.FilesRead,
        foreign.StatedVerdict,
        foreign.ResourcesReturned,
        foreign.LoadAnswered,
        foreign.VictimsBusy,
        foreign.TrainingContinued,
        foreign.DocumentsAgree,
        judging.JudgementsAgree,
        TrainingContinues,
    )
}
"""Every criterion by name."""


def parse_criterion(entry: Any) -> tuple[str, Parameters]:
    """Check one entry of an ``acceptance`` list.

    Raises:
        BadInput: the name is unknown or a parameter is wrong; the message names the key and what is known.
    """
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise BadInput(f"acceptance entry {entry!r}: must be one 'criterion: {{parameters}}'")
    ((name, raw),) = entry.items()
    if name not in CRITERIA:
        meant = nearest(str(name), CRITERIA)
        raise BadInput(f"acceptance criterion {name!r} is unknown; {meant}known are {', '.join(sorted(CRITERIA))}")
    model = CRITERIA[name].model
    try:
        parameters = model.model_validate({} if raw is None else raw)
    except ValidationError as error:
        if isinstance(raw, Mapping) and (unknown := [key for key in raw if key not in model.model_fields]):
            known = ", ".join(model.model_fields) or "none"
            meant = nearest(str(unknown[0]), model.model_fields)
            raise BadInput(
                f"acceptance criterion {name!r}: unknown key {unknown[0]!r}; {meant}known: {known}"
            ) from error
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            said = "is missing; add it"
        elif first["type"] in ("model_type", "dict_type") and not key:
            known = ", ".join(model.model_fields) or "none"
            said = f"its parameters are a mapping of keys, not {raw!r:.80}; known: {known}"
        else:
            said = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
            if isinstance(given := first["input"], str | int | float):
                said += f" (given: {given!r:.80})"
        raise BadInput(f"acceptance criterion {name!r}{f', key {key!r}' if key else ''}: {said}") from error
    if isinstance(parameters, Happens):
        named = set(parameters.where) | ({"state"} if parameters.state is not None else set())
        _check_events(name, parameters.event, parameters.after, named)
    elif isinstance(parameters, Count):
        _check_events(name, parameters.event, None, set(parameters.where))
    return name, parameters


def _check_events(name: str, event: str, after: str | None, fields: set[str]) -> None:
    for kind in (event, after):
        if kind is not None and kind not in KINDS:
            raise BadInput(f"acceptance criterion {name!r}: {unknown_kind(kind, KINDS)}")
    if unknown := sorted(fields - {*KINDS[event].fields, "actor", "inc"}):
        raise BadInput(
            f"acceptance criterion {name!r}: event {event!r} has no field {unknown[0]!r}; "
            f"it has {', '.join(KINDS[event].fields)}"
        )


def criteria(ledger: Ledger, entries: Sequence[Mapping[str, Any]]) -> list[Check | str]:
    """The checks of an ``acceptance`` list; the name where it asks for an invariant.

    Raises:
        BadInput: as :func:`parse_criterion`.
    """
    made: list[Check | str] = []
    for entry in entries:
        name, parameters = parse_criterion(entry)
        make = CRITERIA[name].make
        made.append(name if make is None else make(ledger, parameters))
    return made


def acceptance_schema() -> dict[str, Any]:
    """JSON Schema of one entry of an ``acceptance`` list."""
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {name: entry.model.model_json_schema()},
                "required": [name],
                "additionalProperties": False,
                "description": entry.doc,
            }
            for name, entry in sorted(CRITERIA.items())
        ]
    }
