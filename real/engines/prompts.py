"""The token ids that stand for a request's prompt: the same for the same request, alike where prefix blocks are."""

from __future__ import annotations

import hashlib

from protocol.messages import GenerateRequest

FIRST_TOKEN = 1000  # below are a tokenizer's special tokens; bytes make ids up to 1255, which every vocabulary has


def prompt(request: GenerateRequest, block_tokens: int = 512) -> list[int]:
    """``request.prompt_tokens`` ids in [1000, 1256).

    Args:
        block_tokens: length of one of ``request.prefix_blocks``. Equal leading blocks give equal leading tokens; what
            follows the blocks depends on the request's id, and is shared with no other request.
    """
    parts: list[bytes] = []
    missing = request.prompt_tokens
    for block in request.prefix_blocks:
        if missing <= 0:
            break
        parts.append(_tokens(f"block {block}", min(block_tokens, missing)))
        missing -= block_tokens
    if missing > 0:
        parts.append(_tokens(f"request {request.request_id}", missing))
    return [FIRST_TOKEN + byte for byte in b"".join(parts)]


def _tokens(seed: str, count: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(count)
