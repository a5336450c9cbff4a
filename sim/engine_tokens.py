"""Tokens of an engine that has no model: text to ids and back, ids to cache blocks, and a greedy continuation.

Everything is a pure function, so that two engines with the same weights answer alike. A continuation depends on the
tokens before it and on the weights, and on nothing else: as with greedy decoding, a prompt and 20 tokens resumed for 20
more give the same 40 tokens as one run (../shared/spec/engines.md, section 3).
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Sequence

FIRST_ID, LAST_ID = 1000, 1899
_SIZE = LAST_ID - FIRST_ID + 1
_PIECES = re.compile(r" 1[0-8]\d\d(?!\d)|\s|[^\s]{1,4}")  # an output token's own text, or up to four characters
_SHORTEST, _SPREAD = 16, 112  # of an answer that ends by itself


def encode(text: str) -> list[int]:
    """Ids of ``text``. The text that :func:`decode` gives comes back as the same ids, so that a conversation which
    repeats an answer repeats its tokens, and finds them in the prefix cache."""
    return [_id(piece) for piece in _PIECES.findall(text)]


def _id(piece: str) -> int:
    if len(piece) == 5:  # only an output token's text is that long
        return int(piece)
    return FIRST_ID + zlib.crc32(piece.encode("utf-8", "surrogatepass")) % _SIZE


def decode(ids: Sequence[int]) -> str:
    """The text of ``ids``: each as a number after a space."""
    return "".join(f" {token}" for token in ids)


def prefix_blocks(ids: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Ids of the whole blocks of ``block_tokens`` tokens at the beginning of a prompt, for the prefix cache."""
    whole = len(ids) // block_tokens
    packed = struct.pack(f"<{whole * block_tokens}I", *ids[: whole * block_tokens])
    size = 4 * block_tokens
    return tuple(
        int.from_bytes(hashlib.blake2b(packed[at : at + size], digest_size=8).digest(), "little")
        for at in range(0, len(packed), size)
    )


class Continuation:
    """What a model with certain weights says after ``prompt``, token by token.

    Args:
        prompt: token ids, each of 32 bits without sign.
        draw: whether the token at a position is not the best one, by the state before it; None: greedy.
    """

    __slots__ = ("_draw", "_state", "ids", "natural_length")

    def __init__(self, prompt: Sequence[int], draw: Callable[[int, int], bool] | None = None) -> None:
        self.ids: list[int] = []
        self._draw = draw
        self._state = zlib.crc32(struct.pack(f"<{len(prompt)}I", *prompt))
        self.natural_length = _SHORTEST + self._state % _SPREAD
        """Tokens after which the model would end by itself."""

    def extend(self, count: int, weight_hash: str) -> None:
        """Have ``count`` tokens in all, the new ones computed by the weights of ``weight_hash``."""
        weights = weight_hash.encode()
        while len(self.ids) < count:
            token = FIRST_ID + zlib.crc32(weights, self._state) % _SIZE
            if self._draw is not None and self._draw(self._state, len(self.ids)):
                token = FIRST_ID + (token - FIRST_ID + 1) % _SIZE
            self.ids.append(token)
            self._state = zlib.crc32(token.to_bytes(4, "little"), self._state)

    @property
    def text(self) -> str:
        return decode(self.ids)
