"""Amounts of GPUs, CPUs and other resources, in ten-thousandths as in Ray, so that fractions add up exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from protocol.errors import PlacementError

_UNIT: Final = 10_000

Resources = dict[str, int]
"""Resource name to amount in ten-thousandths."""


def units(amounts: Iterable[tuple[str, float]]) -> Resources:
    """(resource, amount) pairs as Resources.

    Raises:
        PlacementError: an amount is negative or no number.
    """
    found: Resources = {}
    for resource, amount in amounts:
        if not amount >= 0:
            raise PlacementError(f"{amount!r} is no amount of {resource}")
        found[resource] = found.get(resource, 0) + round(amount * _UNIT)
    return found


def fits(need: Resources, free: Resources) -> bool:
    return all(amount <= free.get(resource, 0) for resource, amount in need.items())


def take(need: Resources, free: Resources, sign: int = 1) -> None:
    """Subtract (``sign`` -1: add back) in place."""
    for resource, amount in need.items():
        free[resource] = free.get(resource, 0) - sign * amount


def show(amounts: Resources) -> str:
    return ", ".join(f"{amount / _UNIT:g} {resource}" for resource, amount in sorted(amounts.items())) or "nothing"
