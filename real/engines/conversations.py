"""What the front of an engine sees of conversations: which earlier generation a prompt goes on from, what was put in.

Token ids are known where the caller sends them and asks for them back, as a session server's trace hooks do.
"""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from protocol.prompt_memory import UNASKED, PromptMemory
from real.evidence import ProcessLog

CONVERSATIONS = ("/v1/chat/completions", "/v1/messages")
COUNT = "/v1/messages/count_tokens"
_ASKED_BACK = ("return_token_ids", "return_output_ids_in_sglext")


class Conversations:
    """Of one engine process.

    Args:
        log: takes ``engine.prompt``.
    """

    def __init__(self, log: ProcessLog) -> None:
        self._log = log
        self._memory = PromptMemory()
        self._open: dict[str, list[int]] = {}  # request to the ids of its prompt

    def received(self, route: str, request: str, raw: bytes) -> None:
        """A call is about to be forwarded. ``request``: empty for one that generates nothing."""
        if route not in CONVERSATIONS and route != COUNT:
            return
        try:
            body = json.loads(raw)
        except ValueError:
            return  # the engine will say what is wrong with it
        if not isinstance(body, dict):
            return
        given = body.get("input_ids")
        ids: list[int] = []
        if request and _is_ids(given) and any(body.get(name) for name in _ASKED_BACK):
            ids = self._open[request] = given
        continues, length = self._memory.continued(ids)
        self._log.answered(
            0, None, "engine.prompt", request=request, route=route, tokens=len(ids),
            continues=continues, continued_tokens=length, unasked=[name for name in UNASKED if name in body],
        )  # fmt: skip

    def finished(self, request: str, answer: dict[str, Any] | None) -> None:
        """A generation has ended; ``answer``: its whole answer, or what the events of its stream add up to."""
        prompt = self._open.pop(request, None)
        output = None if answer is None else _output_ids(answer)
        if prompt is not None and output is not None:
            self._memory.finished(request, [*prompt, *output])


def _output_ids(answer: dict[str, Any]) -> list[int] | None:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    extension = answer.get("sglext") or {}
    found = (
        answer.get("token_ids")
        or first.get("response_token_ids")
        or next(iter(extension.get("output_ids") or ()), None)
    )
    return found if _is_ids(found) else None


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list of token ids; what else stands there is the engine's to refuse."""
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 32 for one in value)
