"""What the rules on lines of published verdicts share (analysis/checks/foreign_claims.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analysis.checks.foreign_view import Facts, Operation
from protocol.evidence import Event

UNKNOWN = object()
"""The evidence does not hold whether a line is true."""
MEMORY_MIB = 500.0
Stated = dict[str, Any]
Rule = Callable[[Facts, Stated], Any]


def nth(facts: Facts, direction: str, index: int = 0) -> Operation | None:
    """The operation of that place among those of its direction, in the order of their submissions."""
    found = facts.all_of(direction)
    return found[index] if index < len(found) else None


def returned(facts: Facts, _: Stated) -> Any:
    wrong, compared = shortages(facts.resources)
    return not wrong if compared else UNKNOWN


def returned_in(name: str) -> Rule:
    def rule(facts: Facts, _: Stated) -> Any:
        note = facts.notes.get(name)
        if note is None:
            return UNKNOWN
        at_s = facts.noted_s[name]
        looked = [one for one in facts.resources if one.data["when"] == "baseline" or abs(one.t_s - at_s) < 1e-3]
        wrong, compared = shortages(looked)
        return not wrong and note.get("mem_ok") is True if compared else UNKNOWN

    return rule


def shortages(looks: list[Event]) -> tuple[list[tuple[str, int, int]], int]:
    """What is not as it was: (text, seq of the first look, seq of the later one), and how many figures were compared.

    GPUs that are free beyond the first look are none: the service itself may be gone. Memory may differ by 500 MiB, in
    either direction: where the service's own process has vanished from the figures, they say nothing (M48b).
    """
    baseline: dict[str, tuple[Any, int]] = {}
    wrong: list[tuple[str, int, int]] = []
    compared = 0
    for look in looks:
        for figure in ("free_gpus", "groups", "memory_mib"):
            value = look.data[figure]
            if value is None or look.data["when"] == "after":
                continue
            if look.data["when"] == "baseline":
                baseline[figure] = (value, look.seq)
            elif figure in baseline:
                before, seq = baseline[figure]
                compared += 1
                if figure == "memory_mib":
                    bad = len(value) != len(before) or any(
                        a is None or b is None or abs(a - b) > MEMORY_MIB for a, b in zip(value, before, strict=False)
                    )
                else:
                    bad = value < before if figure == "free_gpus" else value > before
                if bad:
                    wrong.append((f"{figure} is {value}, it was {before}", seq, look.seq))
    return wrong, compared
