"""Bodies of calls to engines, and what an admin answer says: the same for engines of a run and for those of others."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from protocol.messages import AdminReply, GenerateRequest, WeightUpdate
from real.engines.prompts import prompt


def generation(request: GenerateRequest, *, stream: bool, block_tokens: int = 512) -> str:
    """The JSON text of a POST /generate. ``block_tokens``: see ``EngineSettings``."""
    body = {
        "rid": request.request_id,
        "input_ids": prompt(request, block_tokens),
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": request.ignore_eos,
            "temperature": 0,
        },
        "stream": stream,
    }
    return json.dumps(body, separators=(",", ":"))


def weight_update(update: WeightUpdate) -> dict[str, Any]:
    """The body of a POST /update_weights_from_disk. Without a version the engine keeps the label that it has."""
    body: dict[str, Any] = {
        "model_path": update.path,
        "flush_cache": update.flush_cache,
        "abort_all_requests": update.abort_all_requests,
    }
    if update.version:
        body["weight_version"] = update.version
    return body


def admin_reply(status: int, text: str) -> AdminReply:
    """SGLang answers some admin calls in JSON that has a message, others in plain text."""
    said: Any = None
    with contextlib.suppress(ValueError):
        said = json.loads(text)
    if not isinstance(said, dict):
        return AdminReply(status, text, status == 200)
    return AdminReply(status, str(said.get("message", text)), status == 200 and bool(said.get("success", True)))
