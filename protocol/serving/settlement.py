"""How a forwarded generation ended, as a receipt for its gate: the outcome table of serving.md 2.3, row by row.

Only what is known counts as ended. A complete answer is, and so is the one refusal that a backend gives *before* it
generates: the context is too long. That refusal is recognised by status and text, fixed to an engine's version: too
wide a pattern would hide generations that run, too narrow a one poisons the gate after an upgrade (2.4).
"""

from __future__ import annotations

import re

from protocol.config import EntrypointConfig
from protocol.errors import ConnectionRefused, ConnectTimeout, HttpError
from protocol.messages import GenerateResult
from protocol.serving.gate import SettlementReceipt

SHIPPED = {
    "sglang 0.5.23": (
        r"The input \(\d+ tokens\) is longer than the model's context length \(\d+ tokens\)"
        r"|Requested token count exceeds the model's maximum context length of \d+ tokens"
    ),
    # LMDeploy v0.16.0, lmdeploy/serve/core/async_engine.py (`preprocess`, `_request_error_from_status`), exceptions.py:
    # before anything is given to the engine, or refused by it unread. Its `code` is the status, a number; the typed
    # "context_length_exceeded" is on the wire of /v1/responses alone.
    "lmdeploy 0.16": (
        r'"message":\s*"(Input length \(\d+\) must be smaller than the model context length \(\d+\)\.'
        r'|The request exceeds the model context length\.)"'
    ),
    # v0.9.0 to v0.15.0 refuse none: they answer 200 without a token, with length for a finish reason and "run out of
    # tokens" in their log (async_engine.py). No 400 of theirs is this refusal.
    **dict.fromkeys((f"lmdeploy 0.{minor}" for minor in range(9, 16)), r"(?!)"),
}
"""Engine kind and version to the text of its refusal of a too long context, in a body of status 400."""


class RejectionPattern:
    """Recognises the refusal of a too long context.

    Args:
        config: names the engine, and further patterns.

    Raises:
        ValueError: no pattern is known of the engine, or it is no regular expression; the text says what is known.
    """

    def __init__(self, config: EntrypointConfig) -> None:
        known = {**SHIPPED, **config.rejections}
        if config.engine not in known:
            raise ValueError(
                f"entrypoint.engine: no rejection pattern of {config.engine!r}; add it to entrypoint.rejections, or "
                f"name one of {', '.join(known)}"
            )
        try:
            self._pattern = re.compile(known[config.engine])
        except re.error as error:
            raise ValueError(f"entrypoint.rejections[{config.engine!r}]: no regular expression ({error})") from error

    def matches(self, error: HttpError) -> bool:
        """Whether the backend refused before generating. Both are needed: status 400 and the text."""
        return error.fields["status"] == 400 and self._pattern.search(error.fields["body"]) is not None


def answered(result: GenerateResult) -> SettlementReceipt:
    """Of a complete response. One that the backend aborted in mid-generation is ended, but no complete turn (S-22)."""
    return SettlementReceipt(True, True, "aborted" if result.finish_reason == "abort" else "completed")


def failed(error: BaseException, rejection: RejectionPattern) -> SettlementReceipt:
    """Of an error of the forward: safe only where nothing can be running for it."""
    if isinstance(error, ConnectTimeout | ConnectionRefused):
        return SettlementReceipt(True, True, "failed: never sent")  # no connection, so nothing has begun
    if isinstance(error, HttpError) and rejection.matches(error):
        return SettlementReceipt(True, True, "rejected: context length")
    return SettlementReceipt(False, False, f"unknown: {type(error).__name__}")
