"""What the models of a scenario file share: refusal of unknown keys with a suggestion, and numbers with units."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

UNITS = ("_s", "_ns", "_ms", "_us", "_per_s", "_bytes", "_gb", "_mb", "_tokens", "_percent")


_SHOWN = 16


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'? known: ...``, the known ones in the order given; of very many only the near one."""
    names = list(known)
    stem = _stem(word)
    near = [name for name in names if _stem(name) == stem] or difflib.get_close_matches(word, names, 1, 0.6)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    if near and len(names) > _SHOWN:
        return meant
    return f"{meant} known: {', '.join(names)}"


def shortened(value: object) -> str:
    """A value as it is shown in an error: at most 80 characters."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _stem(key: str) -> str:
    for unit in UNITS:
        if key.endswith(unit) and len(key) > len(unit):
            return key[: -len(unit)]
    return key


class SpecModel(BaseModel):
    """Base of the models of a scenario file: frozen, strict, no unknown key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for key in data:
                if key not in known and key not in cls.model_fields:
                    raise PydanticCustomError(
                        "unknown_key", "unknown key {key}{fix}", {"key": repr(key), "fix": did_you_mean(key, known)}
                    )
        return data


def exactly_one(model: BaseModel, names: Iterable[str], what: str) -> str:
    """The one of ``names`` that is given.

    Raises:
        PydanticCustomError: none, or several.
    """
    names = list(names)
    given = [name for name in names if getattr(model, name) is not None]
    if len(given) != 1:
        found = " and ".join(repr(name) for name in given) or "none"
        raise PydanticCustomError(
            "exactly_one", "{what} needs exactly one of {names}; given: {found}",
            {"what": what, "names": ", ".join(names), "found": found},
        )  # fmt: skip
    return given[0]


_LONGEST_S = 1e9
"""Some thirty years: beyond, a time is a slip of the pen, and nanoseconds leave the range of a float."""
_MOST = 10**12
_E_WITHOUT_POINT = re.compile(r"([-+]?\d+)(\.\d*)?[eE]([-+]?)(\d+)")
_WITH_UNIT = re.compile(r"\s*[-+]?\d+(\.\d*)?\s*(ns|us|ms|s|sec|m|min|h|%|gb|mb|kb|b)\s*", re.IGNORECASE)


def _plain_number(value: Any) -> Any:
    if isinstance(value, str) and _WITH_UNIT.fullmatch(value):
        raise PydanticCustomError(
            "unit_in_value", "{value} carries a unit; the unit is in the key's name, write the number alone",
            {"value": repr(value)},
        )  # fmt: skip
    if isinstance(value, str) and (found := _E_WITHOUT_POINT.fullmatch(value)):
        whole, point, sign, exponent = found.groups()
        raise PydanticCustomError(
            "number_as_text", "{value} is text in YAML; write {fix}",
            {"value": repr(value), "fix": f"{whole}{point or '.0'}e{sign or '+'}{exponent}"},
        )  # fmt: skip
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("not_finite", "{value} is not finite; write a number", {"value": repr(value)})
    return value


_Number = BeforeValidator(_plain_number)
Seconds = Annotated[float, _Number, Field(ge=0, le=_LONGEST_S)]
SomeSeconds = Annotated[float, _Number, Field(gt=0, le=_LONGEST_S)]
Positive = Annotated[float, _Number, Field(gt=0, le=_MOST)]
NotNegative = Annotated[float, _Number, Field(ge=0, le=_MOST)]
Bandwidth = Annotated[float, _Number, Field(ge=1, le=_MOST)]
Rate = Annotated[float, _Number, Field(gt=0, le=10**6)]
Tokens = Annotated[float, _Number, Field(ge=1, le=2**31 - 1)]
Fraction01 = Annotated[float, _Number, Field(ge=0, le=1)]
Count = Annotated[int, _Number, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, _Number, Field(ge=0, le=_MOST)]
Crowd = Annotated[int, _Number, Field(ge=1, le=10**6)]
"""How many of what the simulated world keeps one by one: nodes, replicas, clients, sessions, shards."""
TokenCount = Annotated[int, _Number, Field(ge=1, le=2**31 - 1)]


def check_known(word: str, known: Any, what: str) -> str:
    """``word`` if it is one of ``known``; raises PydanticCustomError with a suggestion otherwise."""
    if word not in known:
        raise PydanticCustomError(
            "unknown_word", "unknown {what} {word}{fix}",
            {"what": what, "word": repr(word), "fix": did_you_mean(word, known)},
        )  # fmt: skip
    return word


_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def is_name(value: object) -> bool:
    """Whether something may be a name."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _check_name(value: str) -> str:
    if not is_name(value):
        raise PydanticCustomError(
            "name", "{value} is no name; use a-z, 0-9, '_' and '-', a letter first, at most 64", {"value": repr(value)}
        )
    return value


Name = Annotated[str, AfterValidator(_check_name)]
