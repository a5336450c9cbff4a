"""Which earlier generation a prompt goes on from: what the world remembers of the token ids at one engine.

For the fronts of engines in either world. A prompt that an agent's session server sends must begin with the ids of the
turns before it (serving.md 5.7, S-I6); here that is seen at the engine, whatever the session server says of itself.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence

UNASKED = ("session_id", "request_id", "model_step", "input_ids", "return_token_ids", "return_output_ids_in_sglext")
"""Fields of a body that clients do not send to an engine: for hooks of a session server alone, or put in by one."""


class PromptMemory:
    """The latest generations of one engine: lengths and digests, no ids.

    Args:
        kept: how many; the oldest is forgotten.
    """

    def __init__(self, kept: int = 4096) -> None:
        self._kept = kept
        self._ends: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._lengths: dict[int, int] = {}  # length to how many generations have it

    def finished(self, request: str, ids: Sequence[int]) -> None:
        """A generation has ended; ``ids``: its prompt and its output."""
        key = (len(ids), zlib.crc32(_packed(ids)))
        if self._ends.pop(key, None) is None:
            self._lengths[key[0]] = self._lengths.get(key[0], 0) + 1
        self._ends[key] = request
        if len(self._ends) > self._kept:
            (length, _), _ = self._ends.popitem(last=False)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def continued(self, ids: Sequence[int]) -> tuple[str, int]:
        """The longest generation that ``ids`` begins with, and its length; ("", 0) without one."""
        packed = _packed(ids)
        found, found_length, crc, at = "", 0, 0, 0
        for length in sorted(length for length in self._lengths if length <= len(ids)):
            crc = zlib.crc32(packed[4 * at : 4 * length], crc)
            at = length
            request = self._ends.get((length, crc))
            if request is not None:
                found, found_length = request, length
        return found, found_length


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)
