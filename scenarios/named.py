"""Names of steps and of entries of ``acceptance``: what ``--set`` and ``real.set`` call them in place of their numbers.

A number is another one as soon as a line is added in front; a name stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from analysis.acceptance import CRITERIA
from analysis.errors import BadInput
from scenarios.fields import did_you_mean, is_name
from scenarios.yaml_tree import Path, Places, dotted

_NAMED: Final[tuple[Path, ...]] = (("steps",), ("acceptance",))


def criterion_of(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of ``acceptance`` without its name."""
    return {key: value for key, value in entry.items() if key != "name"}


def item(items: list[Any], part: str, path: Sequence[str | int]) -> Path:
    """The keys that one part of a dotted key stands for, in a list at ``path``.

    That is the item's number. An entry of ``acceptance`` goes by the name of its criterion as well, where only one
    entry has it: that stands for number and criterion.

    Raises:
        LookupError: no item goes by that; says which do.
    """
    if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(items):
        return (int(part),)
    have = f"items 0 to {len(items) - 1}" if items else "no items"
    at = tuple(path)
    if at not in _NAMED or not is_name(part):
        raise LookupError(f"{dotted(path)} has {have}; {part!r} is none")
    entries = [one if isinstance(one, dict) else {} for one in items]
    known = {one["name"]: number for number, one in enumerate(entries) if isinstance(one.get("name"), str)}
    if part in known:
        return (known[part],)
    if at == ("acceptance",):
        by_criterion = [number for number, one in enumerate(entries) if part in one]
        if len(by_criterion) == 1:
            return (by_criterion[0], part)
        if by_criterion:
            which = ", ".join(map(str, by_criterion))
            raise LookupError(
                f"acceptance has {len(by_criterion)} entries of {part!r} ({which}); give the one that is meant a name "
                f"('name: ...' beside '{part}:'), or say its number"
            )
        asked = [key for one in entries for key in one if key in CRITERIA]
        known |= {key: 0 for key in asked if asked.count(key) == 1}
    names = did_you_mean(part, known) if known else "; none of them has a name"
    raise LookupError(f"{dotted(path)} has {have}; {part!r} is the name of none{names}")


def check_names(where: str, names: Sequence[object], places: Places) -> None:
    """Check the names in ``steps`` or ``acceptance``, None where there is none. Raises BadInput with place and fix."""
    seen: dict[object, int] = {}
    for number, name in enumerate(names):
        if name is None:
            continue
        place = places.name((where, number, "name"))
        if not is_name(name):
            raise BadInput(f"{place}: {name!r} is no name; use a-z, 0-9, '_' and '-', a letter first, at most 64")
        if where == "acceptance" and name in CRITERIA:
            raise BadInput(f"{place}: {name!r} is the name of a criterion; use another one")
        if name in seen:
            raise BadInput(f"{place}: {name!r} is the name of {where}[{seen[name]}] already; use another one")
        seen[name] = number
