"""What a trace consists of: tokenised segments, and what is found or exported of them (serving.md 5.3, 5.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from protocol.messages import ObjectRef, message

MASKED = -100
"""The label of a token that is not trained on."""


@message
class TokenizedSegment:
    """A piece of a conversation, as text and as the tokens that an engine read or generated for it.

    ``token_ids``, ``labels`` and ``logprobs`` have one entry a token; labels left out are all masked, logprobs left
    out all 0. ``experts``: where the expert choices of these tokens lie, None for a dense model. ``request_id`` and
    ``model_step``: the generation that the segment is of, and the version that it was generated under; a segment with
    a request id is *request-aware*, and its expert reference is shared, never freed by hand.

    Raises:
        ValueError: lengths differ, or there is a request id without a model step; the text names both.
    """

    text: str
    token_ids: tuple[int, ...]
    labels: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    experts: ObjectRef | None = None
    request_id: str = ""
    model_step: int = -1

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if not self.labels and count:
            object.__setattr__(self, "labels", (MASKED,) * count)
        if not self.logprobs and count:
            object.__setattr__(self, "logprobs", (0.0,) * count)
        if len(self.labels) != count or len(self.logprobs) != count:
            raise ValueError(
                f"a segment has {count} token_ids, {len(self.labels)} labels and {len(self.logprobs)} logprobs; give "
                "one of each a token, or leave labels and logprobs out"
            )
        if self.request_id and self.model_step < 0:
            raise ValueError(f"segment of request {self.request_id!r} has no model_step; give the version of its lease")

    @property
    def request_aware(self) -> bool:
        """Whether it is known which request generated it, and so under which version."""
        return bool(self.request_id)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TokenizedSegment:
        """A segment from a JSON object.

        Raises:
            ValueError: a field is unknown or missing, or not a list where one is needed; the text names it.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(f"a segment has no field {name!r}; known are {', '.join(known)}")
        for name in ("text", "token_ids"):
            if name not in fields:
                raise ValueError(f"a segment needs {name!r}")
        given = dict(fields)
        for name in ("token_ids", "labels", "logprobs"):
            value = given.get(name, ())
            if not isinstance(value, list | tuple):
                raise ValueError(f"a segment's {name} must be a list, not {type(value).__name__}")
            given[name] = tuple(value)
        return cls(**given)


@message
class TraceMatch:
    """The longest stored prefix of a text: its text, and the tokens of its segments in order."""

    text: str
    token_ids: tuple[int, ...]
    segments: int


@message
class TrainingTrace:
    """One conversation as it is trained on; every tuple but ``experts`` has one entry a token.

    ``model_steps`` and ``request_ids`` are -1 and empty where a segment is not request-aware. ``experts``: one
    reference a segment, none for a dense model.
    """

    session_id: str
    prompt: str
    token_ids: tuple[int, ...]
    labels: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_steps: tuple[int, ...]
    request_ids: tuple[str, ...]
    experts: tuple[ObjectRef, ...]
    shared: bool
    """Whether any segment is request-aware: its expert references are not the reader's to free."""


@message
class StoreSnapshot:
    """What a trace store holds: sessions in the order of their first write, segments and tokens over all of them.

    ``tombstones``: released sessions that it still remembers.
    """

    sessions: tuple[str, ...]
    segments: int
    tokens: int
    tombstones: int = 0
