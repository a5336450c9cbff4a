"""Which weights an engine serves, as far as its front has seen, and what that says of an answer."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

Span = list[Any]
"""[version, first output token, one past the last, weight hash]."""


_ANTHROPIC = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "stop"}


class Ending(NamedTuple):
    """What an engine's answer to a generation says of itself."""

    reason: str
    completion_tokens: int
    cached_tokens: int
    versions: tuple[tuple[str, int, int], ...]
    """(version, first output token, one past the last)."""


def ending_of(document: dict[str, Any]) -> Ending:
    """Read the final answer of /generate, of an OpenAI route or of /v1/messages."""
    meta = document.get("meta_info")
    if document.get("type") == "message":  # it names no version, and tells an abort as end_turn
        stop = str(document.get("stop_reason") or "")
        tokens = int((document.get("usage") or {}).get("output_tokens", 0))
        return Ending(_ANTHROPIC.get(stop, stop), tokens, 0, (("", 0, tokens),) if tokens else ())
    if meta is not None:
        reason = (meta.get("finish_reason") or {}).get("type", "")
        tokens, cached = int(meta.get("completion_tokens", 0)), int(meta.get("cached_tokens", 0))
    else:
        meta = document.get("metadata") or {}
        usage = document.get("usage") or {}
        reason = next((choice.get("finish_reason") or "" for choice in document.get("choices") or ()), "")
        tokens = int(usage.get("completion_tokens", 0))
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    versions = tuple((str(v["version"]), int(v["start"]), int(v["end"])) for v in meta.get("weight_versions") or ())
    if not versions and tokens:
        versions = ((str(meta.get("weight_version", "")), 0, tokens),)
    return Ending(reason, tokens, cached, versions)


class Served:
    """The weights of one engine process.

    Args:
        version, weight_hash: of those that it starts with.
    """

    def __init__(self, version: str, weight_hash: str) -> None:
        self.version = version
        self.weight_hash = weight_hash
        self.hashes = {version: weight_hash}
        self._mixed = False  # the prefix cache may hold what earlier weights computed
        self.cache_outlived = False
        """It does, because the flush of a load that changed the weights was refused."""
        self._changes = 0
        self._epoch = 0
        self._settled = asyncio.Event()
        self._settled.set()

    def change_begins(self) -> None:
        """The engine was asked to change its weights; until the answer comes it may serve either."""
        self._changes += 1
        self._epoch += 1
        self._settled.clear()

    def change_ended(self) -> None:
        self._changes -= 1
        if not self._changes:
            self._settled.set()

    def changed(self, version: str, weight_hash: str, *, flushed: bool) -> None:
        """The engine's weights are others now. ``version`` empty: under the old label."""
        self.version = version or self.version
        self.weight_hash = weight_hash
        self.hashes[self.version] = weight_hash
        self._mixed = not flushed

    def flush_refused(self, before: str) -> None:
        """The flush of a load was refused; ``before``: the hash of the weights before it."""
        self.cache_outlived |= before != self.weight_hash

    def relabelled(self, version: str) -> None:
        """The same weights under another label."""
        self._epoch += 1
        self.version = version
        self.hashes[version] = self.weight_hash

    def flushed(self) -> bool:
        """The prefix cache is empty. Whether it had outlived weights."""
        outlived, self._mixed, self.cache_outlived = self.cache_outlived, False, False
        return outlived

    async def explained(self, ending: Ending) -> None:
        """Wait until every version in an answer is a known one, or no change is under way that could explain it.

        The engine computes with new weights some milliseconds before it answers the call that brought them.
        """
        while self._changes and any(version and version not in self.hashes for version, _, _ in ending.versions):
            await self._settled.wait()

    @property
    def epoch(self) -> tuple[int, int]:
        """Equal at two times when nothing was changed between them."""
        return self._epoch, self._changes

    def spans(self, ending: Ending, since: tuple[int, int]) -> list[Span]:
        """Which weights computed which tokens. ``since``: ``epoch`` when the request was accepted.

        A chunked OpenAI answer does not tell: then it is known only if there was but one set of weights meanwhile.
        """
        spans = [[version, start, end, self.hashes.get(version, "")] for version, start, end in ending.versions]
        if not ending.versions or ending.versions[0][0]:
            return spans
        _, start, end = ending.versions[0]
        return [[self.version, start, end, self.weight_hash]] if since == self.epoch == (since[0], 0) else []

    def stale_cached_tokens(self, ending: Ending) -> int | None:
        """None where nobody can know: the engine does not tell whose tokens it had cached."""
        return 0 if not ending.cached_tokens or not self._mixed else None
