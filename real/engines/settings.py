"""What an operator chooses about engines: which kind, in which Python environment, with which model."""

from __future__ import annotations

import dataclasses
from typing import Literal

EngineKind = Literal["emulated", "sglang-cpu", "sglang"]


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How the engines of a run are started.

    Args:
        kind: ``emulated`` (cost model in real time), ``sglang-cpu`` (genuine SGLang, tiny model), ``sglang`` (GPU).
        python: interpreter of the environment that has the engine; an absolute path.
        model: SGLang kinds: model folder or name; empty: the ``profile`` of each EngineSpec names it.
        arguments: further command-line arguments, the same for every engine.
        block_tokens: tokens of one prefix block of a request, as the traces of the run have it.
        first_port: lowest public port; each engine takes the lowest free one from there.
    """

    kind: EngineKind
    python: str
    model: str = ""
    arguments: tuple[str, ...] = ()
    block_tokens: int = 512
    first_port: int = 30000
