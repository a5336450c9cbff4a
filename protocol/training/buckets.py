"""Weights on their way to the engines, in buckets: what is in each, and which part of it each training rank has.

A shard is a file of an export. Its bytes are cut into *pieces* of at most a bucket's nominal size; a bucket is a run of
pieces, in the order of the shards. Every training rank has one slice of every piece, as a sharded model has it, so a
whole piece needs all of them. Source: serving.md 9.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.messages import message


@message
class Piece:
    """Bytes ``start`` to ``stop`` of a shard: the ``index``-th of its ``of``; ``nominal``: bytes it stands for."""

    shard: str
    index: int
    of: int
    start: int
    stop: int
    nominal: int


@message
class FullPiece:
    """A piece with its content, as an engine gets it."""

    shard: str
    index: int
    of: int
    nominal: int
    data: bytes


class Shard(NamedTuple):
    """Name, length in bytes and nominal size of a shard."""

    name: str
    size: int
    nominal: int


Plan = tuple[tuple[Piece, ...], ...]


def plan(shards: Sequence[Shard], bucket_bytes: int) -> Plan:
    """The buckets of some shards, each of at most ``bucket_bytes`` nominal bytes."""
    buckets: list[list[Piece]] = []
    room = 0
    for name, size, nominal in shards:
        of = max(1, -(-nominal // bucket_bytes))
        for index in range(of):
            cost = nominal * (index + 1) // of - nominal * index // of
            if not buckets or cost > room:
                buckets.append([])
                room = bucket_bytes
            room -= cost
            buckets[-1].append(Piece(name, index, of, size * index // of, size * (index + 1) // of, cost))
    return tuple(tuple(bucket) for bucket in buckets)


def share(data: bytes, piece: Piece, rank: int, ranks: int) -> bytes:
    """The slice of a piece that a rank has, from the bytes of the whole shard."""
    size = piece.stop - piece.start
    return data[piece.start + size * rank // ranks : piece.start + size * (rank + 1) // ranks]


def whole(pieces: Sequence[Piece], shares: Sequence[Sequence[bytes]]) -> tuple[FullPiece, ...]:
    """Pieces put together from what every rank has of them: ``shares[rank][number of the piece]``."""
    return tuple(
        FullPiece(piece.shard, piece.index, piece.of, piece.nominal, b"".join(of_rank[number] for of_rank in shares))
        for number, piece in enumerate(pieces)
    )


def nominal_bytes(pieces: Sequence[FullPiece]) -> int:
    """What it costs to move them."""
    return sum(piece.nominal for piece in pieces)
