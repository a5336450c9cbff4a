"""The formats that there are, and which one a path is of."""

from __future__ import annotations

from protocol.serving.native import NativeFormat
from protocol.serving.native_anthropic import AnthropicFormat
from protocol.serving.native_openai import OpenAIFormat

FORMATS: tuple[NativeFormat, ...] = (AnthropicFormat(), OpenAIFormat())


def format_of(path: str) -> NativeFormat:
    """In which format errors on a path are told; OpenAI's where no other claims it."""
    return next(form for form in FORMATS if form.belongs(path))


def generation_of(method: str, path: str) -> NativeFormat | None:
    """The format of a generation; None for every other call, which is forwarded as it is (serving.md 5.2)."""
    if method != "POST":
        return None
    return next((form for form in FORMATS if form.generates(path)), None)
