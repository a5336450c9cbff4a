"""What crosses between processes is copied: serialised when sent, deserialised when delivered.

Numbers, strings, bytes, None, enums, declared ``@message`` types and tuples of these are deeply immutable and may cross
as they are (``World.copy_always`` turns that off). Arrays travel out of band and so arrive read-only, as from Ray.
"""

from __future__ import annotations

import enum
import pickle
from typing import Any, Final

_ATOMS: Final = (int, float, str, bytes, bool, type(None), complex)

SMALL: Final = 256
"""Nominal bytes of a message that was not serialised: headers and a few scalars."""


class Packed:
    """A serialised value: a pickle and the buffers beside it, all immutable."""

    __slots__ = ("data", "buffers")

    def __init__(self, data: bytes, buffers: tuple[bytes, ...]) -> None:
        self.data = data
        self.buffers = buffers

    def __len__(self) -> int:
        return len(self.data) + sum(map(len, self.buffers))


class Copier:
    """Packs and unpacks values for one run.

    Args:
        always: serialise declared immutable values too.
    """

    __slots__ = ("_shared", "_seen")

    def __init__(self, always: bool = False) -> None:
        # Types whose values need no copy, and types already looked at. Asked for membership only, never iterated.
        self._shared: set[type] = set() if always else set(_ATOMS)
        self._seen: set[type] = set()
        if always:
            self._seen.update(_ATOMS)

    def pack(self, value: Any) -> Any:
        """The value itself if it may be shared, else a ``Packed``.

        Raises:
            TypeError: it cannot be serialised; the text names the type.
        """
        kind = type(value)
        if kind in self._shared or (kind not in self._seen and self._look(kind)):
            return value
        if kind is tuple and self._all_shared(value):
            return value
        return serialise(value)

    def pack_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call: ``(args, kwargs)`` as they are if every one may be shared, else a ``Packed``."""
        shared = self._shared
        for value in args:
            kind = type(value)
            if kind not in shared and (kind in self._seen or not self._look(kind)):
                return serialise((args, kwargs))
        for value in kwargs.values():
            kind = type(value)
            if kind not in shared and (kind in self._seen or not self._look(kind)):
                return serialise((args, kwargs))
        if not shared:  # copying always: also a call without arguments crosses as bytes
            return serialise((args, kwargs))
        return (args, kwargs)

    def _all_shared(self, values: tuple[Any, ...]) -> bool:
        """Whether a tuple holds nothing that needs a copy: then it needs none itself."""
        for value in values:
            kind = type(value)
            if kind in self._shared or (kind not in self._seen and self._look(kind)):
                continue
            if kind is not tuple or not self._all_shared(value):
                return False
        return bool(self._shared)

    def _look(self, kind: type) -> bool:
        """A type seen for the first time: may its values be shared?"""
        if self._shared and (kind.__dict__.get("__seatrial_message__") is True or issubclass(kind, enum.Enum)):
            self._shared.add(kind)
            return True
        self._seen.add(kind)
        return False


def serialise(value: Any) -> Packed:
    """A pickle of the value, with its arrays beside it.

    Raises:
        TypeError: the value, or something in it, cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    except Exception as error:
        raise TypeError(f"cannot send a value of {type(value).__qualname__} to another process: {error}") from error
    return Packed(data, tuple(bytes(buffer.raw()) for buffer in buffers) if buffers else ())


def unpack(packed: Any) -> Any:
    """What the receiver gets: a value of its own, or the shared immutable one."""
    if type(packed) is Packed:
        return pickle.loads(packed.data, buffers=packed.buffers)
    return packed


def nominal_size(packed: Any) -> int:
    """Bytes on the wire."""
    return len(packed) if type(packed) is Packed else SMALL
