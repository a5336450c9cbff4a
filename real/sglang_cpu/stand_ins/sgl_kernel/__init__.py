"""Stands in for sgl_kernel, whose CPU part no registry has.

On a CPU without AMX SGLang's dense models compute in torch, but names that end in ``_cpu`` are imported eagerly. They
resolve here and raise when called. One operator is really there: the hash behind ``sampling_seed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WORD = 0xFFFFFFFF


def _rotate(x: torch.Tensor, by: int) -> torch.Tensor:
    return ((x << by) | (x >> (32 - by))) & _WORD


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """32 x 32 bits -> the low 32, without leaving int64."""
    return ((x * (factor & 0xFFFF)) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & _WORD


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotate(state ^ block, 13), 5) + 0xE6546B64) & _WORD


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits) of (seed's low word, its high word, position, column): (rows,) and (columns,) -> a table.

    Args:
        seed: (rows,) 64-bit.
        positions: (rows,) where in its sequence each row's token goes.
        columns: (columns,) token ids.
    """
    words = seed.view(torch.int64)[:, None]
    state = _mix(torch.zeros_like(words), words & _WORD)
    state = _mix(state, (words >> 32) & _WORD)
    state = _mix(state, positions.to(torch.int64)[:, None] & _WORD)
    state = _mix(state, columns.to(torch.int64)[None, :] & _WORD) ^ 16  # 16: bytes hashed
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor cols) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs the real sgl_kernel")

    missing.__name__ = name
    return missing
