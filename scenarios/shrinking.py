"""What a ``real:`` block may change under ``set``: counts, rates and durations become smaller, the steps stay.

The block is for a machine on which the whole would not run in real time. It is no way to ask for less, so what it
changes is compared with what the file says, key by key:

* *steps*: only what follows from fewer replicas (``schema.RealModel`` names the keys). As many replicas or fewer are
  asked for, a replica goes by a smaller number of the same service, and a trigger waits for as busy a replica or a
  busier one, no longer.
* *workload*: numbers become smaller, texts and kinds stay; a trace may be another one that is not longer.
* *topology*: so, too; what ends in ``_s`` or ``_secs`` (time-outs of components) may be what the machine needs.
* *acceptance*: the same criteria on the same events. Counts follow the counts, but not to none; times become
  shorter. What may fail of a fraction grows as the replicas become fewer, and no further: three kills of four replicas
  meet four times as much.
* *limits*: shorter, but for ``time_limit_s``, after which a run is ended.

Genuine engines (``sglang``, ``sglang-cpu``) have a model of their own and take longer to start and to answer: for
them the workload, the weights and the engines' options may be other ones, and times may be longer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Final

from analysis.errors import BadInput
from scenarios.load import Scenario, path_of
from scenarios.yaml_tree import Path, dotted

_FREE_OF_GENUINE: Final = ("weights", "engine_options")
_TIMES: Final = ("_s", "_secs")
_BOUNDS: Final = ("at_least", "at_most", "within_s", "at_most_s")
_SMALLER: Final = "a 'real:' block may make counts, rates and durations smaller"
_EVENTS: Final = "a 'real:' block leaves every criterion on the events that it is on"
_NAMES: Final = "only a replica of the service with a smaller number may be named"
_REPLICA: Final = re.compile(r"(?P<service>.+)-(?P<number>\d+)")


def check_shrinks(before: Scenario, after: Scenario, kind: str, keys: list[str]) -> None:
    """Check that a block's changes for a kind of engine only shrink.

    Args:
        before: as the file says, with the block.
        after: with the changes.
        keys: those that the block changes, as it writes them.

    Raises:
        BadInput: names file, line and key, and what would become what.
    """
    judge = _Judge(before, after, genuine=kind != "emulated")
    for key in keys:
        path = path_of(before.text, key)
        for inner, was, becomes, why in judge.grown(path):
            place = before.place(("real", "set", kind, key))
            raise BadInput(f"{place}: {dotted(inner)} is {_shown(was)} and would become {_shown(becomes)}: {why}")


def _shown(value: Any) -> str:
    text = "not there" if value is _ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


_ABSENT: Final = object()
_Grown = tuple[Path, Any, Any, str]


@dataclasses.dataclass
class _Judge:
    """Compares the two as trees of plain values."""

    before: Scenario
    after: Scenario
    genuine: bool

    def __post_init__(self) -> None:
        self._trees = [one.model.model_dump() for one in (self.before, self.after)]

    def grown(self, path: Path) -> Iterator[_Grown]:
        """Whatever at or below a path of the file is no shrinking."""
        if path[0] == "real":
            return
        if path[0] == "workload" and (len(path) == 1 or not isinstance(path[1], int)):
            path = ("workload", *(() if len(path) == 1 else (0, *path[1:])))  # of the model it is a list in any case
        path = tuple("with_" if path[0] == "steps" and part == "with" else part for part in path)
        if self.genuine and self._is_the_models_own(path):
            return
        yield from self._below(path, *(_at(tree, path) for tree in self._trees))

    def _is_the_models_own(self, path: Path) -> bool:
        return path[0] == "workload" or any(part in _FREE_OF_GENUINE for part in path[3:4])

    def _below(self, path: Path, was: Any, becomes: Any) -> Iterator[_Grown]:
        if was == becomes:
            return
        if isinstance(was, dict) and isinstance(becomes, dict):
            for key in {**was, **becomes}:
                yield from self._below((*path, key), was.get(key, _ABSENT), becomes.get(key, _ABSENT))
        elif isinstance(was, list) and isinstance(becomes, list):
            if len(becomes) > len(was) or (path[0] == "acceptance" and len(becomes) < len(was)):
                yield (*path,), was, becomes, "the list has another length"
            for number, (one, other) in enumerate(zip(was, becomes, strict=False)):
                yield from self._below((*path, number), one, other)
        elif why := self._objection(path, was, becomes):
            yield path, was, becomes, why

    def _objection(self, path: Path, was: Any, becomes: Any) -> str:
        """Why a plain value may not become another one; empty: it may."""
        name = str(path[-1])
        if _is_number(becomes) and (was is None or was is _ABSENT):
            if path[0] != "acceptance" or name in _BOUNDS:
                return ""  # a bound where there was none
            return _EVENTS
        if _is_number(was) and _is_number(becomes):
            return self._of_numbers(path, name, was, becomes)
        if isinstance(was, str) and isinstance(becomes, str):
            if path[0] == "workload" and path[2:] == ("trace", "file"):
                return "" if self._lines(becomes) <= self._lines(was) else "that trace is longer"
            if path[0] in ("steps", "acceptance") and "where" in path:
                return "" if _is_lower(was, becomes) else _NAMES
        if path[0] == "acceptance":
            return _EVENTS
        return f"{_SMALLER}, and change nothing else"

    def _of_numbers(self, path: Path, name: str, was: float, becomes: float) -> str:
        is_time = name.endswith(_TIMES)
        if path[0] == "topology" and is_time:
            return ""
        if path[0] == "limits" and name == "time_limit_s":
            return ""
        if path[0] in ("acceptance", "limits") and is_time and self.genuine:
            return ""
        if path[0] == "steps" and name == "running":
            return "" if becomes >= was else "a fault comes to as busy a replica, or to a busier one"
        if path[0] == "acceptance" and path[2:] == ("answered_fraction", "at_least"):
            most = (1 - was) * self._fewer()
            if 1 - becomes > most + 1e-9:
                return f"with so many replicas fewer at most {most:.6g} may fail"
            return ""
        if path[0] == "acceptance" and name == "at_least" and becomes <= 0 < was:
            return "of what must happen something must"
        return "" if becomes <= was else f"{_SMALLER}, never larger"

    def _fewer(self) -> float:
        """How many times as many replicas there were, of the service that has lost most."""
        was, becomes = (one.model.topology.services for one in (self.before, self.after))
        return max(was[name].initial_replicas / max(1, becomes[name].initial_replicas) for name in was)

    def _lines(self, trace: str) -> int:
        with open(self.before.trace_path(trace), "rb") as file:
            return sum(1 for _ in file)


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return tree


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_lower(was: str, becomes: str) -> bool:
    """Whether a replica's name has become that of one with a smaller number."""
    first, second = _REPLICA.fullmatch(was), _REPLICA.fullmatch(becomes)
    if first is None or second is None or first["service"] != second["service"]:
        return False
    return int(second["number"]) <= int(first["number"])
